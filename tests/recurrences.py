"""Random and hand-made tokens for every mixer of the family."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qed_probe.kernels import MIXERS, Choice, Tokens, reference, run


def make_tokens(
    mixer: str,
    *,
    B: int = 1,
    T: int = 40,
    H: int = 2,
    Hk: int | None = None,
    K: int = 8,
    V: int = 6,
    edits: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    decay: float | None = None,
    gate: float | None = None,
) -> Tokens:
    """Tokens of one mixer; ``decay`` fixes every log decay, ``gate`` every b, w, beta and gamma."""
    spec, rng = MIXERS[mixer], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def gates(*shape: int) -> Tensor:
        random = torch.rand(shape, generator=rng, dtype=torch.float64)
        return random if gate is None else torch.full_like(random, gate)

    heads = Hk or H
    several = (edits,) if mixer == "deltaproduct" else ()
    fields: dict[str, Any] = {
        "q": normalize(normal(B, T, heads, K), dim=-1),
        "k": normalize(normal(B, T, heads, *several, K), dim=-1),
        "v": normal(B, T, H, *several, V),
    }
    if spec.decay != "none":
        g = -torch.rand(B, T, H, 1 if spec.decay == "head" else K, generator=rng, dtype=torch.float64)
        fields["g"] = g * 0.5 if decay is None else torch.full_like(g, decay)
    if spec.gate == "scalar":
        fields["beta"] = gates(B, T, H, *several)
    if spec.gate == "channel":
        fields |= {"b": gates(B, T, H, K), "w": gates(B, T, H, V)}
    if spec.gate == "in-context":
        fields |= {"removal_key": normalize(normal(B, T, H, K), dim=-1), "in_context_rate": gates(B, T, H, K)}
        fields["g"] = -0.6065 * torch.rand(B, T, H, K, generator=rng, dtype=torch.float64)
        if decay is not None:
            fields["g"] = fields["g"].clamp(min=decay)
    if spec.direction is not None:
        fields["lam"] = 0.25 * torch.rand(H, generator=rng, dtype=torch.float64)
        if spec.direction.source == "random":
            fields["direction"] = normalize(normal(H, K), dim=-1)
    if spec.address is not None:
        fields["gamma"] = gates(B, T, H)
        fields["address"] = (
            fields["k"].repeat_interleave(H // heads, 2) if spec.address == "key" else normalize(normal(B, T, H, K), dim=-1)
        )
        if spec.address == "random":
            fields["address"] = fields["address"][:1, :1].expand(B, T, H, K)
    return Tokens(**{name: x.to(dtype) for name, x in fields.items()})


def error(found: Tensor, expected: Tensor, smallest: float = 1e-40) -> float:
    """Max |x − ref| / max |ref|, absolute where the reference is 0; infinite entries must agree exactly.

    Against ``smallest`` where all of the reference is below it: of what is below 1e-40 float32 holds fewer than 17 bits.
    """
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    size = expected[finite].abs().max().item()
    return (found[finite] - expected[finite]).abs().max().item() / (max(size, smallest) if size else 1.0)


def place(tokens: Tokens, device: str) -> Tokens:
    """The same tokens on another device."""
    tensors: dict[str, Any] = {f.name: x.to(device) for f in fields(tokens) if isinstance(x := getattr(tokens, f.name), Tensor)}
    return replace(tokens, **tensors)


def compare(
    mixer: str,
    tokens: Tokens,
    tolerance: float,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: Choice = "torch",
    device: str = "cpu",
) -> None:
    """Every record, the outputs and the last state within ``tolerance`` of the oracle, which runs on a CPU."""
    expected = reference(mixer, tokens, initial_state=initial_state, cu_seqlens=cu_seqlens)
    state, ends = (None if x is None else x.to(device) for x in (initial_state, cu_seqlens))
    seen = run(MIXERS[mixer], place(tokens, device), record=True, initial_state=state, cu_seqlens=ends, backend=backend)
    assert seen.backend == backend
    assert set(seen.records) == set(expected.records)
    found = {name: x.cpu() for name, x in (seen.records | {"y": seen.y, "final_state": seen.final_state}).items()}
    wanted = expected.records | {"y": expected.y, "final_state": expected.final_state}
    if "correction_cosine" in wanted:
        # A direction has no cosine left once its read is below float32's smallest normal number.
        tiny = torch.minimum(wanted["read_norm"] * wanted["rho"].abs(), wanted["output_norm"]) < 1e-36
        found["correction_cosine"] = found["correction_cosine"].masked_fill(tiny, 0)
        wanted["correction_cosine"] = wanted["correction_cosine"].masked_fill(tiny, 0)
    # An eigenvalue is a difference from 1 and is judged against it: at gates of exactly 1 nothing but the keys' rounding is left.
    for name in wanted:
        if "eigenvalue" in name:
            found[name], wanted[name] = 1 - found[name].double(), 1 - wanted[name]
    errors = {name: error(found[name], wanted[name]) for name in wanted}
    assert {name: size for name, size in errors.items() if not size <= tolerance} == {}
