"""Random and hand-made tokens for every mixer of the family."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qed_probe.kernels import MIXERS, Tokens


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


def error(found: Tensor, expected: Tensor) -> float:
    """Max |x − ref| / max |ref|, absolute where the reference is 0; infinite entries must agree exactly."""
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(found[~finite], expected[~finite]):
        return float("inf")
    if not finite.any():
        return 0.0
    size = expected[finite].abs().max().item()
    return (found[finite] - expected[finite]).abs().max().item() / (size or 1.0)
