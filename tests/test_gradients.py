"""The gradients of Triton's programs against those of the float64 oracle, by the same tests on a GPU and in the interpreter."""

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Tokens, reference, run
from qed_probe.kernels.packing import first_tokens
from qed_probe.models.config import NATIVE
from tests.recurrences import error, make_tokens, place

pytest.importorskip("triton")
EXACT, STRONG, ROUNDED = 1e-5, 1e-4, 1e-2
"""In float32, where decays beyond −5 leave the small rest of large writes, and with the TF32 products that 16 bits get: each of a
dozen products in a row rounds to 2⁻¹¹, and gates take the difference of several such gradients."""


@pytest.fixture(autouse=True)
def _nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def new(*given: object, **more: object) -> Tensor:
            x = make(*given, **more)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return new

    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


def pull(pass_: Callable[[Tokens, Tensor], tuple[Tensor, Tensor]], tokens: Tokens, state: Tensor) -> dict[str, Tensor]:
    """Outputs, last states, and by what was given the gradients of a random sum of them, on the CPU."""
    given = {f.name: x.clone().requires_grad_() for f in fields(tokens) if isinstance(x := getattr(tokens, f.name), Tensor)}
    start = state.clone().requires_grad_()
    changed: dict[str, Any] = dict(given)
    y, final = pass_(replace(tokens, **changed), start)
    rng = torch.Generator().manual_seed(6)
    by_y, by_final = (torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x) for x in (y, final))
    names, leaves = [*given, "initial_state"], [*given.values(), start]
    found = torch.autograd.grad((y * by_y).sum() + (final * by_final).sum(), leaves, allow_unused=True)
    gradients = {name: x.cpu() for name, x in zip(names, found, strict=True) if x is not None}
    return gradients | {"y": y.detach().cpu(), "final_state": final.detach().cpu()}


def compare_gradients(
    mixer: str, tokens: Tokens, device: str, tolerance: float = EXACT, cu_seqlens: Tensor | None = None
) -> None:
    """Outputs, last state and every gradient within ``tolerance`` of the oracle's."""
    B, H, K, V = len(tokens.q), tokens.v.shape[2], tokens.q.shape[-1], tokens.v.shape[-1]
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = torch.randn(rows, H, K, V, generator=torch.Generator().manual_seed(3))

    def oracle(given: Tokens, start: Tensor) -> tuple[Tensor, Tensor]:
        made = reference(mixer, given, initial_state=start, cu_seqlens=cu_seqlens)
        return made.y, made.final_state

    def ours(given: Tokens, start: Tensor) -> tuple[Tensor, Tensor]:
        ends = None if cu_seqlens is None else cu_seqlens.to(device)
        seen = run(MIXERS[mixer], given, initial_state=start, cu_seqlens=ends, backend="triton")
        return seen.y, seen.final_state

    double: dict[str, Any] = {f.name: x.double() for f in fields(tokens) if isinstance(x := getattr(tokens, f.name), Tensor)}
    wanted = pull(oracle, replace(tokens, **double), state.double())
    found = pull(ours, place(tokens, device), state.to(device))
    assert found.keys() == wanted.keys()
    # What a decay of −90 leaves is below float32's normal numbers, where a GPU's exponentials and products have few bits.
    errors = {name: error(found[name], wanted[name], 1e-36) for name in wanted}
    assert {name: size for name, size in errors.items() if not size <= tolerance} == {}


@pytest.mark.parametrize("mixer", NATIVE)
def test_every_mixer(mixer: str, device: str) -> None:
    for T in (1, 63, 200) if device == "cuda" else (19,):
        compare_gradients(mixer, make_tokens(mixer, T=T, H=2 if device == "cuda" else 1), device)


@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn"])
def test_odd_sizes_and_grouped_heads(mixer: str, device: str) -> None:
    sizes = [(60, 100, 2, 1), (64, 128, 1, 1), (24, 8, 6, 2), (256, 256, 1, 1)] if device == "cuda" else [(5, 34, 2, 1)]
    for K, V, H, Hk in sizes:
        compare_gradients(mixer, make_tokens(mixer, B=2, T=70 if device == "cuda" else 5, K=K, V=V, H=H, Hk=Hk), device)


@pytest.mark.parametrize("edits", [1, 3, 4])
def test_any_number_of_edits(edits: int, device: str) -> None:
    compare_gradients("deltaproduct", make_tokens("deltaproduct", edits=edits, T=70 if device == "cuda" else 11, H=1), device)


@pytest.mark.parametrize("decay", [0.0, -0.001, -5.0, -90.0, -1e4, -torch.inf])
def test_decays_of_any_strength(decay: float, device: str) -> None:
    for mixer in ("gdn", "qed", "eda-qed") if device == "cuda" else ("eda-qed",):
        tokens = make_tokens(mixer, T=70 if device == "cuda" else 18, H=1, decay=decay)
        compare_gradients(mixer, tokens, device, EXACT if decay >= -5 else STRONG)


def test_strong_and_weak_decays_in_one_block(device: str) -> None:
    tokens = make_tokens("qed", T=130 if device == "cuda" else 34, H=1)
    assert tokens.g is not None
    pick = torch.rand(tokens.g.shape, generator=torch.Generator().manual_seed(1))
    g = tokens.g.masked_fill(pick < 0.1, -90).masked_fill(pick < 0.05, -1e4).masked_fill(pick < 0.02, -torch.inf)
    compare_gradients("qed", replace(tokens, g=g), device, STRONG)


@pytest.mark.parametrize("gate", [0.0, 1.0, 2.0])
def test_gates_at_their_ends(gate: float, device: str) -> None:
    for mixer in ("deltanet", "qed") if device == "cuda" else ("qed",):
        compare_gradients(mixer, make_tokens(mixer, T=70 if device == "cuda" else 18, H=1, gate=gate), device)


@pytest.mark.parametrize("mixer", ["qed", "eda", "deltaproduct"])
def test_packed_sequences_with_states_and_empty_ones(mixer: str, device: str) -> None:
    ends = torch.tensor([0, 0, 5, 70, 70, 198, 199, 199] if device == "cuda" else [0, 0, 3, 3, 22, 22])
    compare_gradients(mixer, make_tokens(mixer, T=int(ends[-1]), H=1), device, cu_seqlens=ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn"])
def test_sixteen_bits(mixer: str, dtype: torch.dtype, device: str) -> None:
    T, H, K, V = (300, 2, 64, 64) if device == "cuda" else (18, 1, 8, 6)
    compare_gradients(mixer, make_tokens(mixer, T=T, H=H, K=K, V=V, dtype=dtype), device, ROUNDED)


def test_a_wiped_memory_has_no_gradient(device: str) -> None:
    tokens = place(make_tokens("qed", T=40 if device == "cuda" else 20, H=1), device)
    assert tokens.g is not None
    g = tokens.g.clone()
    g[:, 10] = -torch.inf
    g.requires_grad_()
    torch.autograd.backward([run(MIXERS["qed"], replace(tokens, g=g), backend="triton").y.sum()])
    assert g.grad is not None
    assert g.grad.isfinite().all()
    assert (g.grad[:, 10] == 0).all()


def test_no_tokens_at_all(device: str) -> None:
    state = torch.ones(1, 2, 8, 6, device=device, requires_grad=True)
    seen = run(MIXERS["qed"], place(make_tokens("qed", T=0), device), initial_state=state, backend="triton")
    torch.autograd.backward([seen.y.sum() + seen.final_state.sum()])
    assert seen.y.shape == (1, 0, 2, 6)
    assert state.grad is not None
    assert (state.grad == 1).all()


def test_records_and_a_gradient_at_once_are_left_to_torch(device: str) -> None:
    tokens = place(make_tokens("qed", T=3), device)
    tokens = replace(tokens, v=tokens.v.requires_grad_())
    asked: dict[str, Any]
    for asked in ({"record": True}, {"states_at": (1,)}):
        with pytest.raises(InputError, match="expected triton, found records and their gradient to be computed"):
            run(MIXERS["qed"], tokens, backend="triton", **asked)
        assert run(MIXERS["qed"], tokens, **asked).backend == "torch"
    assert run(MIXERS["qed"], tokens).backend == ("triton" if device == "cuda" else "torch")
    with torch.no_grad():
        assert run(MIXERS["qed"], tokens, record=True, backend="triton").backend == "triton"


@pytest.mark.parametrize(("width", "L", "C"), [(4, 137, 70), (1, 5, 3), (3, 1, 64)], ids=str)
def test_short_convolution(width: int, L: int, C: int, device: str) -> None:
    from qed_probe.kernels.convolution import convolution

    rng = torch.Generator().manual_seed(0)
    x, taps, weight = (torch.randn(size, generator=rng) for size in ((2, L, C), (C, width), (2, L, C)))
    found = [z.to(device).requires_grad_() for z in (x, taps)]
    exact = [z.double().requires_grad_() for z in (x, taps)]
    y = convolution(found[0], found[1])
    padded = F.pad(exact[0].transpose(1, 2), (width - 1, 0))
    expected = F.silu(F.conv1d(padded, exact[1][:, None], groups=C)).transpose(1, 2)
    assert error(y.detach().cpu(), expected.detach()) < EXACT
    ours = torch.autograd.grad((y * weight.to(device)).sum(), found)
    theirs = torch.autograd.grad((expected * weight).sum(), exact)
    for p, q in zip(ours, theirs, strict=True):
        assert error(p.cpu(), q) < EXACT


def test_short_convolution_of_packed_sequences(device: str) -> None:
    from qed_probe.kernels.convolution import convolution

    rng, ends = torch.Generator().manual_seed(0), (0, 1, 3, 3, 66, 131)
    x, taps, weight = (torch.randn(size, generator=rng).to(device) for size in ((1, 131, 5), (5, 4), (1, 131, 5)))
    with torch.inference_mode():
        first = first_tokens(ends, x.device)  # is kept from one call to another, and may meet a gradient in the next
    spans = [slice(a, b) for a, b in itertools.pairwise(ends) if a < b]
    x, taps = x.requires_grad_(), taps.requires_grad_()
    y = convolution(x, taps, first)
    alone = torch.cat([convolution(x[:, span], taps) for span in spans], 1)
    assert torch.equal(y, alone)
    ours, theirs = (torch.autograd.grad((z * weight).sum(), [x, taps]) for z in (y, alone))
    assert torch.equal(ours[0], theirs[0])
    assert error(ours[1].cpu(), theirs[1].cpu()) < EXACT  # summed in another order


@pytest.mark.parametrize("size", [(3, 5, 64), (7, 192), (2, 1)], ids=str)
def test_norm(size: tuple[int, ...], device: str) -> None:
    from qed_probe.kernels.norm import norm

    rng = torch.Generator().manual_seed(0)
    x, scale, weight = (torch.randn(s, generator=rng) for s in (size, size[-1:], size))
    found = [z.to(device).requires_grad_() for z in (x, scale)]
    exact = [z.double().requires_grad_() for z in (x, scale)]
    y, expected = norm(found[0], found[1], 0.1, torch.float32), F.rms_norm(exact[0], size[-1:], exact[1], 0.1)
    assert error(y.detach().cpu(), expected.detach()) < EXACT
    assert norm(found[0], found[1], 0.1, torch.bfloat16).dtype == torch.bfloat16
    ours = torch.autograd.grad((y * weight.to(device)).sum(), found)
    theirs = torch.autograd.grad((expected * weight).sum(), exact)
    for p, q in zip(ours, theirs, strict=True):
        assert error(p.cpu(), q) < EXACT
