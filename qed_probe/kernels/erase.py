"""What is recorded of a token's erase factors: what needs no memory, and so no pass of the recurrence."""

import torch
from torch import Tensor

from qed_probe.kernels.mixers import Edits, Mixer, Tokens

ERASE = (
    "eigenvalue", "eigenvalue_projected", "eigenvalue_unit", "key_norm", "operator_norm", "operator_norm_base",
    "edit_eigenvalue", "edit_eigenvalue_unit",
)  # fmt: skip
"""The records of the erase factors; the last two where a token makes several edits."""


def erase_records(mixer: Mixer, tokens: Tokens, ready: Edits) -> dict[str, Tensor]:
    """The records ``ERASE`` of canonical tokens and their edits."""
    k, a = ready.k[..., ready.main, :], ready.a[..., ready.main, :]
    overlaps, key_norm = dot(ready.a, ready.k), norm(k)
    overlap = overlaps[..., ready.main]
    overlap_base = overlap if mixer.direction is None else dot(ready.base, k)
    size = operator_norm(k, a, overlap, key_norm)
    units = _unit_overlaps(mixer, tokens, overlaps, overlap_base) if tokens.unit_key else overlaps
    found = {
        "eigenvalue": 1 - overlap,
        "eigenvalue_projected": 1 - overlap_base,
        "eigenvalue_unit": 1 - units[..., ready.main],
        "key_norm": key_norm,
        "operator_norm": size,
        "operator_norm_base": size if mixer.direction is None else operator_norm(k, ready.base, overlap_base, key_norm),
    }
    several = {"edit_eigenvalue": 1 - overlaps, "edit_eigenvalue_unit": 1 - units} if overlaps.shape[-1] > 1 else {}
    return {name: x.float() for name, x in (found | several).items()}


def operator_norm(k: Tensor, a: Tensor, overlap: Tensor, key_norm: Tensor) -> Tensor:
    """‖I − kaᵀ‖₂ = ½(√((1−e)² + p²) + √((1+e)² + p²)) with e = 1 − kᵀa and p = ‖k‖·‖a − k(kᵀa)/‖k‖²‖.

    ``k`` and ``a`` are ``[..., K]``, ``overlap`` is kᵀa and ``key_norm`` ‖k‖. In one dimension it is |e|. p is taken from the
    part of a across k, not from ‖k‖²‖a‖² − (kᵀa)², whose rounding would be all that is left of it where a = 2k.
    """
    if k.shape[-1] == 1:
        return (1 - overlap).abs()
    along = overlap / key_norm.square().where(key_norm > 0, 1)
    across = key_norm * norm(torch.addcmul(a, along[..., None], k, value=-1))
    return (_hypot(overlap, across) + _hypot(2 - overlap, across)) / 2


def _unit_overlaps(mixer: Mixer, tokens: Tokens, overlaps: Tensor, overlap_base: Tensor) -> Tensor:
    """aᵀk ``[..., M]`` of every edit after its key is renormalised, and a and d are rebuilt from it.

    What is linear in k twice loses ‖k‖²; that leaves the gate, β, γ or bᵀ(k⊙k)/‖k‖², a mean of b which no rounding may take
    beyond b's own ends. An unprojected direction loses ‖k‖ once; a projected one is orthogonal to the unit key.
    """
    if tokens.removal_key is not None:
        return overlaps / _positive(norm(tokens.removal_key).square())[..., None]
    size = norm(tokens.k)
    if tokens.beta is not None:
        units = tokens.beta
    elif tokens.b is not None:
        base = overlaps if mixer.direction is None and mixer.address is None else overlap_base[..., None]
        least, most = tokens.b.aminmax(dim=-1, keepdim=True)
        units = torch.minimum(torch.maximum(base / _positive(size.square()), least), most)
    else:
        return overlaps
    units = units.where(size > 0, 0)
    if mixer.direction is not None and not mixer.direction.projected:
        units = units + (overlaps - overlap_base[..., None]) / _positive(size)
    if tokens.address is None or tokens.gamma is None:
        return units
    erased = tokens.gamma.where(norm(tokens.address) > 0, 0)[..., None]
    return torch.cat([units, erased] if mixer.address_last else [erased, units], -1)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy along the last axis."""
    found: Tensor = torch.linalg.vecdot(x, y)
    return found


def norm(x: Tensor) -> Tensor:
    """‖x‖ along the last axis."""
    found: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return found


def _positive(x: Tensor) -> Tensor:
    return x.where(x > 0, 1)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    return norm(torch.stack([x, y], -1)) if torch.is_grad_enabled() else torch.hypot(x, y)
