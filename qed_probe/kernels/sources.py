"""The recurrence read backwards: what a read is made of, as exact weights on everything that was ever written.

With Φ_{t,j} the product of the transitions (decay, then edits) after token j up to and including t, a read of the memory is::

    pᵀS_t = Σ_{j≤t} Σ_m ω_{jm} u_jmᵀ + z₀ᵀS_0,      ω_{jm} = pᵀ Φ_{t,j} (Π_{m'>m} (I − k_jm' a_jm'ᵀ)) k_jm

A row z that reads the memory after a chunk reads it before the chunk with z', and what the chunk wrote with ω::

    ω (I + L) = z K_end,      z' = z carry = z (Diag(total) − K_end (I + L)⁻¹ A₀)

where L, K_end, A₀ and total are those of ``chunked``. Only z goes from chunk to chunk, that of all sequences together; what was
written is then weighed in all chunks at once. This takes T(K + K²/C + C) products a row and head, and decays are only ever
multiplied.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from qed_probe.kernels.chunked import add_own_edits, couple, no_dust
from qed_probe.kernels.packing import Grid, chunk_table, grid


@dataclass(frozen=True)
class Factors:
    """N packed sequences in n chunks of C tokens, as ``weights`` goes through them; ``layout`` says which token lies where.

    ``lower`` ``[n, H, CM, CM]`` is I + L, ``entering`` ``[n, H, CM, K]`` A₀, ``leaving`` ``[n, H, K, CM]`` K_end, ``carry``
    ``[n, H, K, K]`` what a whole chunk does to a row; ``decay`` ``[n, H, C, K or 1]`` and ``keys`` ``[n, H, C, M, K]`` are those
    of the tokens. ``first`` ``[N]`` is each sequence's first chunk, ``sequence`` ``[n]`` each chunk's sequence.
    """

    lower: Tensor
    entering: Tensor
    leaving: Tensor
    carry: Tensor
    decay: Tensor
    keys: Tensor
    layout: Grid
    first: Tensor
    sequence: Tensor


def factor(g: Tensor, k: Tensor, a: Tensor, ends: tuple[int, ...] | None = None, *, chunk: int = 64) -> Factors:
    """What ``weights`` needs of packed sequences with these boundaries, of one if None.

    ``g`` is ``[T, H, K or 1]``, ``k`` and ``a`` are ``[T, H, M, K]``, float32 or float64.
    """
    T, _, M, K = k.shape
    ends, per_token = ends or (0, T), 1 << (M - 1).bit_length()
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    layout = grid(ends, min(max(chunk // per_token, 1), 1 << max(longest - 1, 0).bit_length()), k.device)
    keys, rows, decay = layout.fill(k).contiguous(), layout.fill(a).contiguous(), layout.fill(g[..., None, :]).exp()
    within, (entered,), leaving, total = couple([rows], keys, decay)
    lower, entering = add_own_edits(within[0], rows, keys).flatten(2, 3), entered.flatten(2, 3)
    lower.diagonal(dim1=-2, dim2=-1).fill_(1)
    seen = torch.linalg.solve_triangular(lower, entering, upper=False, unitriangular=True)
    carry = no_dust(torch.diag_embed(total.expand(*total.shape[:2], K)) - leaving @ no_dust(seen))
    chunks = chunk_table(ends, layout.size, k.device).chunks
    sequence = torch.bucketize(torch.arange(layout.chunks, device=k.device), chunks[1:], right=True)
    return Factors(lower, entering, leaving, carry, decay.squeeze(3), keys, layout, chunks[:-1], sequence)


def weights(factors: Factors, tokens: Tensor, probes: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """The weights ω of every write in P reads of each sequence, and what of the reads falls on S_0, z₀ ``[N, P, H, K]``.

    ω is ``[P, H, T, M]`` of all packed tokens, each in the reads of its own sequence. Read p of sequence s is ``probes[s, p]`` of
    ``[N, P, H, K]`` on the memory of the sequence's token ``tokens[s, p]`` of ``[N, P]``, counted within it, after ``seen`` of
    that token's edits: M for y, the index of the edit for what an edit reads. What was written later has weight 0.
    """
    n, H, C, M, K = factors.keys.shape
    (N, P), chunks = tokens.shape, tokens // C
    at = factors.first[:, None] + chunks
    own, entered = _own_chunk(factors, at.flatten(), tokens.flatten() % C, probes.flatten(0, 1), seen)
    after, left = _walk_back(factors, chunks, entered.view(N, P, H, K).transpose(1, 2))
    used = slice(int(at.max()) + 1 if at.numel() else 0)
    known, lower = after[used] @ factors.leaving[used], factors.lower[used]
    earlier = (torch.arange(len(known), device=at.device)[:, None] < at[factors.sequence[used]])[:, None, :, None]
    found = probes.new_zeros(n, H, P, C * M)
    found[used] = torch.linalg.solve_triangular(lower, known, upper=False, left=False, unitriangular=True).where(earlier, 0)
    found[at, :, torch.arange(P, device=at.device)] = own.view(N, P, H, C * M)
    by_token = factors.layout.take(found.view(n, H, P, C, M).transpose(2, 3))
    return by_token.permute(2, 1, 0, 3), left.transpose(1, 2)


def _walk_back(factors: Factors, chunks: Tensor, entered: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that read the memory after every chunk ``[n, H, P, K]``, and those before each sequence's first ``[N, H, P, K]``.

    Reads begin with ``entered`` ``[N, H, P, K]`` before their sequence's chunk number ``chunks`` ``[N, P]``.
    """
    order, steps = factors.layout.order, factors.layout.steps[: int(chunks.max()) + 1 if chunks.numel() else 0]
    after = entered.new_zeros(factors.layout.chunks, *entered.shape[1:])
    begun, z = entered[order], torch.zeros_like(entered)
    here = (torch.arange(len(steps), device=order.device)[:, None, None] == chunks[order])[:, :, None, :, None]
    for step in range(len(steps) - 1, -1, -1):
        carry = factors.carry[steps[step]]
        running = slice(len(carry))
        after[steps[step]] = z[running]
        z[running] = torch.where(here[step, running], begun[running], no_dust(z[running] @ carry))
    return after, torch.empty_like(z).index_copy_(0, order, z)


def _own_chunk(factors: Factors, at: Tensor, last: Tensor, probes: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """The weights of what reads' own chunks wrote so far ``[R, H, CM]``, and the rows that read the memory before ``[R, H, K]``.

    Read r is ``probes[r]`` ``[H, K]`` on the memory of token ``last[r]`` of the chunk ``at[r]``, after ``seen`` of its edits.
    """
    M, C = factors.keys.shape[3], factors.decay.shape[2]
    place = torch.arange(C, device=at.device)
    later = place > last[:, None]
    decay = factors.decay[at].masked_fill(later[:, None, :, None], 1)
    until = decay.flip(2).cumprod(2).flip(2)
    since = torch.cat([until[:, :, 1:], torch.ones_like(until[:, :, :1])], 2)
    read = torch.einsum("rhk,rhck,rhcmk->rhcm", probes, since.expand(*since.shape[:3], probes.shape[-1]), factors.keys[at])
    unseen = later[:, :, None] | ((place == last[:, None])[:, :, None] & (torch.arange(M, device=at.device) >= seen))
    rows = read.masked_fill(unseen[:, None], 0).flatten(2)[:, :, None]
    lower = factors.lower[at].masked_fill_(unseen.flatten(1)[:, None, :, None], 0)  # what overflows later is not read
    omega = torch.linalg.solve_triangular(lower, rows, upper=False, left=False, unitriangular=True)
    entered = probes * until[:, :, 0] - (omega @ factors.entering[at])[:, :, 0]
    return omega[:, :, 0], no_dust(entered)
