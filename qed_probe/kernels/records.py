"""What is recorded of every token and head, from one pass of the recurrence and the vectors that went into it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qed_probe.kernels.chunked import Read, recurrence
from qed_probe.kernels.mixers import Edits, Mixer, Tokens, edits


@dataclass(frozen=True)
class Observation:
    """One layer's pass, seen: its canonical inputs, what the memory gave back, and the records by name.

    Records are float32 ``[B, T, H]``, except ``edit_eigenvalue`` ``[B, T, H, M]``, ``state_norm`` ``[marks, H]`` and the vector
    ``read`` ``[B, T, H, V]``.
    """

    tokens: Tokens
    edits: Edits
    read: Read
    records: dict[str, Tensor]


def run(
    mixer: Mixer,
    tokens: Tokens,
    *,
    record: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: tuple[int, ...] = (),
) -> Observation:
    """Run a layer's memory over its tokens, once, and record it if asked; ``read.y`` is the same to the bit either way.

    The other arguments are those of ``edits`` and ``recurrence``.
    """
    ready = edits(mixer, tokens)
    probes = [x for x in (ready.d, ready.address) if x is not None] if record else []
    read = recurrence(
        ready.q,
        ready.g,
        ready.k,
        ready.a,
        ready.u,
        probes=torch.stack([ready.base, *probes], -2) if record else None,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        states_at=states_at,
    )
    return Observation(tokens, ready, read, records(mixer, tokens, ready, read) if record else {})


def records(mixer: Mixer, tokens: Tokens, ready: Edits, read: Read) -> dict[str, Tensor]:
    """Every record that this mixer can have, from the reads of b⊙k, d and ε that ``run`` asks for.

    The probes read the decayed memory Ŝ; the memory that the main edit reads is S̄ᵀp = Ŝᵀp + Σ_{m<main} (pᵀk_m) r_m.
    """
    k, a = ready.k[..., ready.main, :], ready.a[..., ready.main, :]
    rho, overlap, overlap_base = _dot(ready.q, k), _dot(a, k), _dot(ready.base, k)
    found = {
        "rho": rho,
        "eigenvalue": 1 - overlap,
        "eigenvalue_projected": 1 - overlap_base,
        "eigenvalue_unit": 1 - _unit_overlap(mixer, tokens) if tokens.unit_key else 1 - overlap,
        "key_norm": _norm(k),
        "operator_norm": operator_norm(k, a, overlap),
        "operator_norm_base": operator_norm(k, ready.base, overlap_base),
        "residual_norm": _norm(read.residual[..., ready.main, :]),
        "output_norm": _norm(read.y),
        "state_norm": read.state_norm,
    }
    if ready.k.shape[-2] > 1:
        found["edit_eigenvalue"] = 1 - _dot(ready.a, ready.k)
    found |= _decay_records(ready.g)
    beta = overlap_base if tokens.beta is None else tokens.beta.to(k.dtype)
    beta = beta[..., -1] if beta.ndim == 4 else beta
    gamma = torch.zeros_like(rho) if tokens.gamma is None else tokens.gamma.to(k.dtype)
    found |= {"budget_decay": -ready.g.expm1().mean(-1), "budget_delta": found["retention"] * beta}
    if mixer.gate != "in-context":
        found["budget_erase"] = found["retention"] * gamma
    if ready.d is not None:
        found |= _direction_records(tokens, ready, ready.d, read, rho)
    if ready.address is not None:
        found |= _address_records(ready, read, ready.address, beta, gamma)
    return {name: x.float() for name, x in found.items()}


def operator_norm(k: Tensor, a: Tensor, overlap: Tensor) -> Tensor:
    """‖I − kaᵀ‖₂ = ½(√((1−e)² + p²) + √((1+e)² + p²)) with e = 1 − kᵀa and p = ‖k‖·‖a − k(kᵀa)/‖k‖²‖.

    ``k`` and ``a`` are ``[..., K]``, ``overlap`` is kᵀa. In one dimension it is |e|. p is taken from the part of a across k, not
    from ‖k‖²‖a‖² − (kᵀa)², whose rounding would be all that is left of it where a = 2k.
    """
    if k.shape[-1] == 1:
        return (1 - overlap).abs()
    square = _dot(k, k)
    along = overlap / square.where(square > 0, 1)
    across = square.sqrt() * _norm(torch.addcmul(a, along[..., None], k, value=-1))
    return (torch.hypot(overlap, across) + torch.hypot(2 - overlap, across)) / 2


def _decay_records(g: Tensor) -> dict[str, Tensor]:
    return {
        "retention": g.exp().mean(-1),
        "log_decay": g.mean(-1),
        "log_decay_min": g.amin(-1),
        "log_decay_max": g.amax(-1),
    }


def _direction_records(tokens: Tokens, ready: Edits, d: Tensor, read: Read, rho: Tensor) -> dict[str, Tensor]:
    lam = torch.zeros_like(rho[0, 0]) if tokens.lam is None else tokens.lam.to(rho.dtype)
    by_base, by_d = _main_reads(ready, d, read)
    without = torch.addcmul(read.y, (lam * rho)[..., None], by_d)
    read_norm = _norm(by_d)
    return {
        "direction_norm": _norm(d),
        "read_norm": read_norm,
        "base_read_norm": _norm(by_base),
        "correction_norm": (lam * rho).abs() * read_norm,
        "correction_cosine": -rho.sign() * _cosine(by_d, without),
        "read": by_d,
    }


def _main_reads(ready: Edits, d: Tensor, read: Read) -> tuple[Tensor, Tensor]:
    """S̄ᵀ(b⊙k) and S̄ᵀd: what the earlier edits of the token left of Ŝᵀ(b⊙k) and Ŝᵀd."""
    by_base, by_d = read.probes[..., 0, :], read.probes[..., 1, :]
    for edit in range(ready.main):
        k, written = ready.k[..., edit, :], read.residual[..., edit, :]
        by_base = torch.addcmul(by_base, _dot(ready.base, k)[..., None], written)
        by_d = torch.addcmul(by_d, _dot(d, k)[..., None], written)
    return by_base, by_d


def _address_records(ready: Edits, read: Read, address: Tensor, beta: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    cosine, query = _dot(address, ready.k[..., ready.main, :]), _dot(ready.q, address)
    address_read = _norm(read.probes[..., -1, :])
    return {
        "address_cosine": cosine,
        "query_address": query,
        "address_read_norm": address_read,
        "address_correction_norm": gamma * query.abs() * address_read,
        "pre_erase_output_norm": _norm(read.decayed_y),
        "cross_term": gamma * beta * cosine.abs(),
    }


def _unit_overlap(mixer: Mixer, tokens: Tokens) -> Tensor:
    """aᵀk of the main edit after its key is renormalised, and a and d are rebuilt from it."""
    if tokens.removal_key is None:
        unit = edits(mixer, replace(tokens, k=_unit(tokens.k)))
    else:
        unit = edits(mixer, replace(tokens, removal_key=_unit(tokens.removal_key)))
    return _dot(unit.a[..., unit.main, :], unit.k[..., unit.main, :])


def _unit(x: Tensor) -> Tensor:
    return normalize(x if x.dtype == torch.float64 else x.float(), dim=-1, eps=1e-30)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _norm(x: Tensor) -> Tensor:
    # float64 sums: after strong decay the squares of float32 reads underflow.
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norm.to(x.dtype)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """The cosine along the last axis; 0 where either vector is 0."""
    x, y = x.double(), y.double()
    size = _norm(x) * _norm(y)
    return torch.where(size > 0, _dot(x, y) / size.where(size > 0, 1), 0).clamp(-1, 1)
