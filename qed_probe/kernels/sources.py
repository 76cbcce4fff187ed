"""The recurrence read backwards: what a read is made of, as exact weights on everything that was ever written.

With Φ_{t,j} the product of the transitions (decay, then edits) after token j up to and including t, a read of the memory is::

    pᵀS_t = Σ_{j≤t} Σ_m ω_{jm} u_jmᵀ + z₀ᵀS_0,      ω_{jm} = pᵀ Φ_{t,j} (Π_{m'>m} (I − k_jm' a_jm'ᵀ)) k_jm

A row z that reads the memory after a chunk reads it before the chunk with z', and what the chunk wrote with ω::

    ω (I + L) = z K_end,      z' = z ⊙ total − ω A₀

where L, K_end, A₀ and total are those of ``chunked``. From a token's chunk back to the first one this takes T(2K + C) products a
row and head, and decays are only ever multiplied.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qed_probe.kernels.chunked import add_own_edits, couple, no_dust
from qed_probe.kernels.packing import grid


@dataclass(frozen=True)
class Factors:
    """One sequence's chunks of C tokens, n of them, as ``weights`` goes through them.

    ``lower`` ``[n, H, CM, CM]`` is I + L, ``entering`` ``[n, H, CM, K]`` A₀, ``leaving`` ``[n, H, K, CM]`` K_end, ``total``
    ``[n, H, K or 1]`` the decay of a whole chunk; ``decay`` ``[n, H, C, K or 1]`` and ``keys`` ``[n, H, C, M, K]`` are those of
    the tokens, of which there are ``tokens``.
    """

    lower: Tensor
    entering: Tensor
    leaving: Tensor
    total: Tensor
    decay: Tensor
    keys: Tensor
    tokens: int


def factor(g: Tensor, k: Tensor, a: Tensor, *, chunk: int = 64) -> Factors:
    """What ``weights`` needs of one sequence: ``g`` ``[T, H, K or 1]``, ``k`` and ``a`` ``[T, H, M, K]``, float32 or float64."""
    T, _, M, _ = k.shape
    per_token = 1 << (M - 1).bit_length()
    layout = grid((0, T), min(max(chunk // per_token, 1), 1 << max(T - 1, 0).bit_length()), k.device)
    keys, rows, decay = layout.fill(k).contiguous(), layout.fill(a).contiguous(), layout.fill(g[..., None, :]).exp()
    within, entering, leaving, total = couple([rows], keys, decay)
    lower = add_own_edits(within[0], rows, keys).flatten(2, 3)
    lower.diagonal(dim1=-2, dim2=-1).fill_(1)
    return Factors(lower, entering[0].flatten(2, 3), leaving, total, decay.squeeze(3), keys, T)


def weights(factors: Factors, tokens: Tensor, probes: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """The weights ω ``[P, H, T, M]`` of every write in P reads, and what of the reads falls on S_0, z₀ ``[P, H, K]``.

    Read p is ``probes[p]`` ``[H, K]`` on the memory of token ``tokens[p]`` ``[P]`` after ``seen`` of its own edits: M for y, the
    index of the edit for what an edit reads. What was written later has weight 0.
    """
    n, H, C, M, K = factors.keys.shape
    found = probes.new_zeros(H, len(tokens), n, C * M)
    z, chunks = probes.new_zeros(H, len(tokens), K), tokens // C
    own, entered = _own_chunk(factors, tokens, probes, seen)
    for at in range(int(chunks.max()), -1, -1) if len(tokens) else ():
        here, later = chunks == at, chunks >= at
        read = torch.where(here[:, None], own, z @ factors.leaving[at])
        omega = torch.linalg.solve_triangular(factors.lower[at], read, upper=False, left=False, unitriangular=True)
        before = torch.where(here[:, None], entered, z * factors.total[at, :, None])
        z = no_dust(torch.where(later[:, None], before - omega @ factors.entering[at], z))
        found[:, :, at] = omega.where(later[:, None], 0)
    return found.view(H, len(tokens), n * C, M)[:, :, : factors.tokens].movedim(0, 1), z.movedim(0, 1)


def _own_chunk(factors: Factors, tokens: Tensor, probes: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """How reads see their own chunk: what it wrote so far ``[H, P, CM]``, and the memory before it ``[H, P, K]``."""
    M, C = factors.keys.shape[3], factors.decay.shape[2]
    at, last = tokens // C, tokens % C
    place = torch.arange(C, device=tokens.device)
    later = place > last[:, None]
    decay = factors.decay[at].masked_fill(later[:, None, :, None], 1)
    until = decay.flip(2).cumprod(2).flip(2)
    since = torch.cat([until[:, :, 1:], torch.ones_like(until[:, :, :1])], 2)
    read = torch.einsum("phk,phck,phcmk->hpcm", probes, since.expand(*since.shape[:3], probes.shape[-1]), factors.keys[at])
    unseen = later[:, :, None] | ((place == last[:, None])[:, :, None] & (torch.arange(M, device=tokens.device) >= seen))
    return read.masked_fill(unseen, 0).flatten(2, 3), (probes * until[:, :, 0]).movedim(0, 1)
