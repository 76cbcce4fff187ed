"""What is recorded of every token and head, from one pass of the recurrence and the vectors that went into it."""

import torch
from torch import Tensor

from qed_probe.kernels.chunked import Read
from qed_probe.kernels.erase import dot, erase_records, norm
from qed_probe.kernels.mixers import Edits, Mixer, Tokens


def records(mixer: Mixer, tokens: Tokens, ready: Edits, read: Read) -> dict[str, Tensor]:
    """Every record that this mixer can have, from tokens as ``checked`` returns them and a pass that was probed with d.

    The probes read the decayed memory Ŝ; from the memory that the main edit reads, S̄ᵀp = Ŝᵀp + Σ_{m<main} (pᵀk_m) r_m.
    """
    rho = read.overlap[..., ready.main]
    found = erase_records(mixer, tokens, ready) | {
        "rho": rho,
        "residual_norm": _read_norm(read.residual[..., ready.main, :]),
        "output_norm": _read_norm(read.y),
        "state_norm": read.state_norm,
    }
    found |= _decay_records(ready.g)
    beta = dot(ready.base, ready.k[..., ready.main, :]) if tokens.beta is None else tokens.beta[..., -1]
    gamma = torch.zeros_like(rho) if tokens.gamma is None else tokens.gamma
    found["budget_delta"] = found["retention"] * beta
    if mixer.gate != "in-context":
        found["budget_erase"] = found["retention"] * gamma
    if ready.d is not None:
        found |= _direction_records(tokens, ready, ready.d, read, rho, found["output_norm"])
    if ready.address is not None:
        found |= _address_records(ready, read, ready.address, beta, gamma)
    return {name: x.float() for name, x in found.items()}


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
        by_d = torch.addcmul(by_d, dot(d, ready.k[..., edit, :])[..., None], read.residual[..., edit, :])
    read_norm = _read_norm(by_d)
    if tokens.lam is None:
        lam, by_base, without, without_norm = torch.zeros_like(rho[0, 0]), by_a, read.y, output_norm
    else:
        lam = tokens.lam
        by_base = torch.addcmul(by_a, lam[:, None], by_d, value=-1)
        without = torch.addcmul(read.y, (lam * rho)[..., None], by_d)
        without_norm = _read_norm(without)
    return {
        "direction_norm": norm(d),
        "read_norm": read_norm,
        "base_read_norm": _read_norm(by_base),
        "correction_norm": (lam * rho).abs() * read_norm,
        "correction_cosine": -rho.sign() * _cosine(by_d, without, read_norm, without_norm),
        "read": by_d,
    }


def _address_records(ready: Edits, read: Read, at: int, beta: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    address = ready.a[..., at, :]
    cosine, query = dot(address, ready.k[..., ready.main, :]), dot(ready.q, address)
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


def _read_norm(x: Tensor) -> Tensor:
    size = norm(x)
    # After strong decay the squares of float32 reads underflow.
    tiny = size < 1e-15
    if not tiny.any():
        return size
    return size.masked_scatter(tiny, torch.linalg.vector_norm(x[tiny], dim=-1, dtype=torch.float64).to(x.dtype))


def _cosine(x: Tensor, y: Tensor, x_norm: Tensor, y_norm: Tensor) -> Tensor:
    """The cosine along the last axis from the vectors and their norms; 0 where either vector is 0."""
    size = x_norm.double() * y_norm.double()
    tiny = size < 1e-30
    overlap = dot(x, y).double()
    if tiny.any():
        overlap = overlap.masked_scatter(tiny, dot(x[tiny].double(), y[tiny].double()))
    return (overlap / size.where(size > 0, 1)).clamp(-1, 1).to(x.dtype)
