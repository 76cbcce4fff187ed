"""What is recorded of every token and head, from one pass of the recurrence and the vectors that went into it."""

import torch
from torch import Tensor

from qed_probe.kernels.chunked import Read
from qed_probe.kernels.mixers import Edits, Mixer, Tokens


def records(mixer: Mixer, tokens: Tokens, ready: Edits, read: Read) -> dict[str, Tensor]:
    """Every record that this mixer can have, from tokens as ``checked`` returns them and a pass that was probed with d.

    The probes read the decayed memory Ŝ; from the memory that the main edit reads, S̄ᵀp = Ŝᵀp + Σ_{m<main} (pᵀk_m) r_m.
    """
    k, a = ready.k[..., ready.main, :], ready.a[..., ready.main, :]
    rho, overlap, key_norm = read.overlap[..., ready.main], _dot(a, k), _norm(k)
    overlap_base = overlap if mixer.direction is None else _dot(ready.base, k)
    norm = operator_norm(k, a, overlap, key_norm)
    unit = key_norm if tokens.removal_key is None else _norm(tokens.removal_key)
    found = {
        "rho": rho,
        "eigenvalue": 1 - overlap,
        "eigenvalue_projected": 1 - overlap_base,
        "eigenvalue_unit": 1 - (_unit_overlap(mixer, unit, overlap, overlap_base) if tokens.unit_key else overlap),
        "key_norm": key_norm,
        "operator_norm": norm,
        "operator_norm_base": norm if mixer.direction is None else operator_norm(k, ready.base, overlap_base, key_norm),
        "residual_norm": _read_norm(read.residual[..., ready.main, :]),
        "output_norm": _read_norm(read.y),
        "state_norm": read.state_norm,
    }
    if ready.k.shape[-2] > 1:
        found["edit_eigenvalue"] = 1 - _dot(ready.a, ready.k)
    found |= _decay_records(ready.g)
    beta = overlap_base if tokens.beta is None else tokens.beta[..., -1]
    gamma = torch.zeros_like(rho) if tokens.gamma is None else tokens.gamma
    found["budget_delta"] = found["retention"] * beta
    if mixer.gate != "in-context":
        found["budget_erase"] = found["retention"] * gamma
    if ready.d is not None:
        found |= _direction_records(tokens, ready, ready.d, read, rho, found["output_norm"])
    if ready.address is not None:
        found |= _address_records(ready, read, ready.address, beta, gamma)
    return {name: x.float() for name, x in found.items()}


def operator_norm(k: Tensor, a: Tensor, overlap: Tensor, key_norm: Tensor) -> Tensor:
    """‖I − kaᵀ‖₂ = ½(√((1−e)² + p²) + √((1+e)² + p²)) with e = 1 − kᵀa and p = ‖k‖·‖a − k(kᵀa)/‖k‖²‖.

    ``k`` and ``a`` are ``[..., K]``, ``overlap`` is kᵀa and ``key_norm`` ‖k‖. In one dimension it is |e|. p is taken from the
    part of a across k, not from ‖k‖²‖a‖² − (kᵀa)², whose rounding would be all that is left of it where a = 2k.
    """
    if k.shape[-1] == 1:
        return (1 - overlap).abs()
    along = overlap / key_norm.square().where(key_norm > 0, 1)
    across = key_norm * _norm(torch.addcmul(a, along[..., None], k, value=-1))
    return (_hypot(overlap, across) + _hypot(2 - overlap, across)) / 2


def _decay_records(g: Tensor) -> dict[str, Tensor]:
    kept = g.exp()
    lost = (g / -2).tanh_()  # 1 − exp g = tanh(−g/2)·(1 + exp g), without cancellation and faster than expm1
    return {
        "retention": kept.mean(-1),
        "budget_decay": torch.addcmul(lost, lost, kept).mean(-1),
        "log_decay": g.mean(-1),
        "log_decay_min": g.amin(-1),
        "log_decay_max": g.amax(-1),
    }


def _direction_records(
    tokens: Tokens, ready: Edits, d: Tensor, read: Read, rho: Tensor, output_norm: Tensor
) -> dict[str, Tensor]:
    by_a, by_d = read.found[..., ready.main, :], read.probes[..., 0, :]
    for edit in range(ready.main):
        by_d = torch.addcmul(by_d, _dot(d, ready.k[..., edit, :])[..., None], read.residual[..., edit, :])
    read_norm = _read_norm(by_d)
    if tokens.lam is None:
        lam, by_base, without, without_norm = torch.zeros_like(rho[0, 0]), by_a, read.y, output_norm
    else:
        lam = tokens.lam
        by_base = torch.addcmul(by_a, lam[:, None], by_d, value=-1)
        without = torch.addcmul(read.y, (lam * rho)[..., None], by_d)
        without_norm = _read_norm(without)
    return {
        "direction_norm": _norm(d),
        "read_norm": read_norm,
        "base_read_norm": _read_norm(by_base),
        "correction_norm": (lam * rho).abs() * read_norm,
        "correction_cosine": -rho.sign() * _cosine(by_d, without, read_norm, without_norm),
        "read": by_d,
    }


def _address_records(ready: Edits, read: Read, at: int, beta: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    address = ready.a[..., at, :]
    cosine, query = _dot(address, ready.k[..., ready.main, :]), _dot(ready.q, address)
    by_address = read.found[..., at, :]
    if at > ready.main:
        by_address = torch.addcmul(by_address, cosine[..., None], read.residual[..., ready.main, :], value=-1)
    address_read = _read_norm(by_address)
    return {
        "address_cosine": cosine,
        "query_address": query,
        "address_read_norm": address_read,
        "address_correction_norm": gamma * query.abs() * address_read,
        "pre_erase_output_norm": _read_norm(read.decayed_y),
        "cross_term": gamma * beta * cosine.abs(),
    }


def _unit_overlap(mixer: Mixer, size: Tensor, overlap: Tensor, overlap_base: Tensor) -> Tensor:
    """aᵀk of the main edit after its key, of norm ``size``, is renormalised, and a and d are rebuilt from it.

    What is linear in k twice loses ‖k‖², and an unprojected direction once ‖k‖; a projected one is orthogonal to the unit key.
    """
    size = size.where(size > 0, 1)
    added = 0 if mixer.direction is None or mixer.direction.projected else (overlap - overlap_base) / size
    return overlap_base / size.square() + added


def _dot(x: Tensor, y: Tensor) -> Tensor:
    dot: Tensor = torch.linalg.vecdot(x, y)
    return dot


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    return _norm(torch.stack([x, y], -1)) if torch.is_grad_enabled() else torch.hypot(x, y)


def _read_norm(x: Tensor) -> Tensor:
    norm = _norm(x)
    # After strong decay the squares of float32 reads underflow.
    tiny = norm < 1e-15
    if not tiny.any():
        return norm
    return norm.masked_scatter(tiny, torch.linalg.vector_norm(x[tiny], dim=-1, dtype=torch.float64).to(x.dtype))


def _cosine(x: Tensor, y: Tensor, x_norm: Tensor, y_norm: Tensor) -> Tensor:
    """The cosine along the last axis from the vectors and their norms; 0 where either vector is 0."""
    size = x_norm.double() * y_norm.double()
    tiny = size < 1e-30
    overlap = _dot(x, y).double()
    if tiny.any():
        overlap = overlap.masked_scatter(tiny, _dot(x[tiny].double(), y[tiny].double()))
    return (overlap / size.where(size > 0, 1)).clamp(-1, 1).to(x.dtype)
