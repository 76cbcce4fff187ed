"""Triton's programs against the float64 oracle, by the same tests on a GPU and, with tiny sizes, in the interpreter."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Tokens, reference, run
from qed_probe.kernels.mixers import cut
from tests.recurrences import compare, error, make_tokens, place

pytest.importorskip("triton")
EXACT, STRONG, ROUNDED = 1e-5, 1e-4, 5e-3
"""In float32, where decays beyond −5 meet, and in 16 bits: what goes from step to step is rounded to 2⁻⁹ several times."""


@pytest.fixture(autouse=True, params=[0, 1 << 20], ids=["in-chunks", "one-by-one"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with the programs for long sequences and with those for short ones."""
    monkeypatch.setattr("qed_probe.kernels.fused.SHORT", request.param)


@pytest.fixture(autouse=True)
def _nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Tensor.new_empty

    def new_empty(x: Tensor, *size: object, **given: object) -> Tensor:
        new: Tensor = plain(x, *size, **given)  # type: ignore[call-overload]
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(Tensor, "new_empty", new_empty)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_and_record(mixer: str, device: str) -> None:
    for T in (1, 63, 100, 1000) if device == "cuda" else (19,):
        H = 2 if device == "cuda" else 1
        compare(mixer, make_tokens(mixer, T=T, H=H), EXACT, backend="triton", device=device)


@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn"])
def test_runs_of_chunks_side_by_side(mixer: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    T = 4097 if device == "cuda" else 150
    monkeypatch.setattr("qed_probe.kernels.fused.RUN", 16 if device == "cuda" else 1)
    ends = torch.tensor([0, 0, T // 2, T // 2 + 5, T, T])
    state = torch.randn(len(ends) - 1, 1, 8, 6, generator=torch.Generator().manual_seed(3))
    compare(mixer, make_tokens(mixer, T=T, H=1), EXACT, cu_seqlens=ends, initial_state=state, backend="triton", device=device)


@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn"])
def test_odd_sizes_and_grouped_heads(mixer: str, device: str) -> None:
    sizes = [(60, 100, 2, 1), (64, 128, 1, 1), (24, 8, 6, 2), (256, 256, 1, 1)] if device == "cuda" else [(5, 18, 2, 1)]
    for K, V, H, Hk in sizes:
        tokens = make_tokens(mixer, T=70 if device == "cuda" else 9, K=K, V=V, H=H, Hk=Hk)
        compare(mixer, tokens, EXACT, backend="triton", device=device)


def test_rwkv7_with_fewer_removal_keys_and_decays_beyond_float16(device: str) -> None:
    tokens = place(make_tokens("rwkv7", T=5, H=2, dtype=torch.float16), device)
    assert tokens.g is not None
    assert tokens.removal_key is not None
    tokens = replace(tokens, g=tokens.g * 0 - 12, removal_key=tokens.removal_key[:, :, :1])
    y, expected = (run(MIXERS["rwkv7"], tokens, backend=backend).y for backend in ("triton", "torch"))
    assert error(y, expected) < ROUNDED
    with pytest.raises(InputError, match=r"before its decay: expected log decays whose exp\(-g\) is finite, found one of -inf"):
        run(MIXERS["rwkv7"], replace(tokens, g=y.new_full(y.shape, -torch.inf)[..., :1]), backend="triton")


@pytest.mark.parametrize("edits", [1, 3, 4])
def test_any_number_of_edits(edits: int, device: str) -> None:
    tokens = make_tokens("deltaproduct", edits=edits, T=70 if device == "cuda" else 11, H=1)
    compare("deltaproduct", tokens, EXACT, backend="triton", device=device)


@pytest.mark.parametrize("decay", [0.0, -0.001, -5.0, -90.0, -1e4, -torch.inf])
def test_decays_of_any_strength(decay: float, device: str) -> None:
    for mixer in ("gdn", "qed", "eda-qed") if device == "cuda" else ("qed",):
        tokens = make_tokens(mixer, T=70 if device == "cuda" else 18, H=1, decay=decay)
        compare(mixer, tokens, EXACT if decay >= -5 else STRONG, backend="triton", device=device)


def test_strong_and_weak_decays_in_one_block(device: str) -> None:
    tokens = make_tokens("qed", T=130 if device == "cuda" else 34, H=1)
    assert tokens.g is not None
    pick = torch.rand(tokens.g.shape, generator=torch.Generator().manual_seed(1))
    g = tokens.g.masked_fill(pick < 0.1, -90).masked_fill(pick < 0.05, -1e4).masked_fill(pick < 0.02, -torch.inf)
    compare("qed", replace(tokens, g=g), STRONG, backend="triton", device=device)


@pytest.mark.parametrize("gate", [0.0, 1.0, 2.0])
def test_gates_at_their_ends(gate: float, device: str) -> None:
    for mixer in ("deltanet", "qed") if device == "cuda" else ("qed",):
        tokens = make_tokens(mixer, T=70 if device == "cuda" else 18, H=1, gate=gate)
        compare(mixer, tokens, EXACT, backend="triton", device=device)


@pytest.mark.parametrize("mixer", ["qed", "eda", "deltaproduct"])
def test_packed_sequences_with_states_and_empty_ones(mixer: str, device: str) -> None:
    ends = torch.tensor([0, 0, 5, 70, 70, 198, 199, 199] if device == "cuda" else [0, 0, 3, 3, 22, 22])
    state = torch.randn(len(ends) - 1, 1, 8, 6, generator=torch.Generator().manual_seed(3))
    tokens = make_tokens(mixer, T=int(ends[-1]), H=1)
    compare(mixer, tokens, EXACT, cu_seqlens=ends, initial_state=state, backend="triton", device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_sequences_than_an_axis_of_programs_holds() -> None:
    lengths = torch.randint(0, 3, (70_000,), generator=torch.Generator().manual_seed(5))
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).cuda()
    tokens = place(make_tokens("qed", T=int(ends[-1]), H=1, K=16, V=16), "cuda")
    found, expected = (
        run(MIXERS["qed"], tokens, record=True, cu_seqlens=ends, backend=backend) for backend in ("triton", "torch")
    )
    assert error(found.y, expected.y) < EXACT
    assert error(found.final_state, expected.final_state) < EXACT
    # Of so many tokens some give next to nothing back, whose cosine has few digits in float32, here or there.
    for name in expected.records.keys() - {"correction_cosine"}:
        assert error(found.records[name], expected.records[name]) < EXACT, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 130e9, reason="no CUDA device of 130 GB")
def test_offsets_beyond_32_bits() -> None:
    T, H, K, last = 2**20, 16, 128, 5
    rng = torch.Generator("cuda").manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(1, T + last, H, *shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    q, k = (torch.nn.functional.normalize(new(K), dim=-1) for _ in range(2))
    tokens = Tokens(q=q, k=k, v=new(K), g=-new(1).float().abs(), beta=new().float().sigmoid())
    ends = torch.tensor([0, T, T + last], device="cuda")
    seen = run(MIXERS["gdn"], tokens, record=True, cu_seqlens=ends, backend="triton")
    expected = reference("gdn", place(cut(tokens, slice(T, None)), "cpu"))
    assert error(seen.y[:, T:].cpu(), expected.y) < ROUNDED
    for name in set(expected.records) - {"state_norm"}:
        assert error(seen.records[name][:, T:].cpu(), expected.records[name]) < ROUNDED, name


def test_no_tokens_at_all(device: str) -> None:
    tokens = place(make_tokens("qed", T=0), device)
    seen = run(MIXERS["qed"], tokens, record=True, initial_state=torch.ones(1, 2, 8, 6, device=device), backend="triton")
    assert seen.y.shape == (1, 0, 2, 6)
    assert (seen.final_state == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn"])
def test_sixteen_bits(mixer: str, dtype: torch.dtype, device: str) -> None:
    T, H, K, V = (1000, 2, 128, 128) if device == "cuda" else (18, 1, 8, 6)
    tokens = make_tokens(mixer, T=T, H=H, K=K, V=V, dtype=dtype)
    compare(mixer, tokens, ROUNDED, backend="triton", device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_where_channels_decay_apart(dtype: torch.dtype, device: str) -> None:
    T, H, K = (1000, 2, 64) if device == "cuda" else (34, 1, 8)
    tokens = make_tokens("qed", T=T, H=H, K=K, V=K, dtype=dtype)
    assert tokens.g is not None
    g = -(torch.logspace(-3, 0.7, K)[torch.randperm(K, generator=torch.Generator().manual_seed(4))]).expand(tokens.g.shape)
    compare("qed", replace(tokens, g=g.to(dtype)), ROUNDED, backend="triton", device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_read_what_has_long_decayed(dtype: torch.dtype, device: str) -> None:
    T = 64 if device == "cuda" else 34
    tokens = make_tokens("qed-nogate", T=T, H=1, decay=-1.0, gate=0.0, dtype=dtype)
    assert tokens.lam is not None
    tokens, state = replace(tokens, lam=tokens.lam * 0), torch.randn(1, 1, 8, 6, generator=torch.Generator().manual_seed(3))
    expected = reference("qed-nogate", tokens, initial_state=state)
    seen = run(MIXERS["qed-nogate"], place(tokens, device), record=True, initial_state=state.to(device), backend="triton")
    for found, wanted in ((seen.y, expected.y), (seen.records["read"], expected.records["read"])):
        for t in range(T):
            assert error(found[:, t].cpu(), wanted[:, t]) < 2 * ROUNDED, t


def test_nothing_depends_on_a_later_token_or_on_the_run(device: str) -> None:
    T, cuts = (150, (1, 31, 64, 100, 149)) if device == "cuda" else (20, (1, 17))
    tokens, later = (place(make_tokens("eda-qed", T=T, H=1, seed=seed), device) for seed in (0, 9))
    before = run(MIXERS["eda-qed"], tokens, record=True, backend="triton")
    for t in cuts:
        changed: dict[str, Any] = {}
        for field in fields(tokens):
            x, y = getattr(tokens, field.name), getattr(later, field.name)
            if isinstance(x, Tensor) and field.name not in ("lam", "direction"):
                changed[field.name] = torch.cat([x[:, :t], y[:, t:]], 1)
        after = run(MIXERS["eda-qed"], replace(tokens, **changed), record=True, backend="triton")
        assert torch.equal(before.y[:, :t], after.y[:, :t])
        for name, x in before.records.items():
            if name != "state_norm":
                assert torch.equal(x[:, :t], after.records[name][:, :t]), name
    assert torch.equal(before.y, run(MIXERS["eda-qed"], tokens, backend="triton").y)


def test_states_and_a_carried_state(device: str) -> None:
    T, cut = (150, 77) if device == "cuda" else (40, 21)
    tokens = make_tokens("qed", T=T, H=1)
    expected = reference("qed", tokens)
    seen = run(MIXERS["qed"], place(tokens, device), states_at=(cut - 1, T - 1), backend="triton")
    assert error(seen.states.cpu(), expected.states[0, [cut - 1, T - 1]]) < EXACT
    later: dict[str, Any] = {
        field.name: x[:, cut:]
        for field in fields(tokens)
        if isinstance(x := getattr(tokens, field.name), Tensor) and field.name != "lam"
    }
    rest = run(MIXERS["qed"], place(replace(tokens, **later), device), initial_state=seen.states[:1], backend="triton")
    assert error(rest.y.cpu(), expected.y[:, cut:]) < EXACT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tokens: replace(tokens, v=tokens.v.double()), "found float64 tensors"),
        (lambda _: make_tokens("qed", T=1, K=300), "found 1 edits a token and 300 channels, more than 4 and 256"),
    ],
    ids=["float64", "channels"],
)
def test_what_triton_cannot_run_is_refused_and_left_to_torch(change: Callable[[Tokens], Tokens], words: str) -> None:
    tokens = change(make_tokens("qed", T=1))
    with pytest.raises(InputError, match=words):
        run(MIXERS["qed"], tokens, backend="triton")
    assert run(MIXERS["qed"], tokens).backend == "torch"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InputError, match="expected one of auto, triton, torch, reference, found 'cuda'"):
        run(MIXERS["qed"], make_tokens("qed", T=1), backend="cuda")  # type: ignore[arg-type]


def test_the_oracle_is_a_backend() -> None:
    compare("eda-qed", make_tokens("eda-qed", T=9), 1e-6, backend="reference")
