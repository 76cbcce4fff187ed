"""What becomes of a memory over windows of tokens: the product of their decays and edits, from a few tokens drawn at random."""

import itertools

import numpy as np
import torch
from torch import Tensor

from qed_probe.kernels import Edits, recurrence
from qed_probe.kernels.erase import dot, norm
from qed_probe.memory.passes import in_double
from qed_probe.memory.singular import singular_values

STARTS, LONGEST = 32, 512
"""Tokens whose transitions are followed, in all, and how far."""
MEASURES = ("norm", "realised", "volume", "decay")
"""‖Φ‖₂, ‖Φk‖/‖k‖, Π|e| and the exponential of Σ mean_c g, over a window."""


def spread(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Prompt and token of STARTS tokens that have another behind them, one at random (seed 0) in each of as many equal parts."""
    before = np.cumsum([0, *(length - 1 for length in lengths)])
    edges = np.linspace(0, before[-1], min(STARTS, before[-1]) + 1).astype(int)
    chosen = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    prompts = np.searchsorted(before, chosen, "right") - 1
    return [(int(p), int(t - before[p])) for p, t in zip(prompts, chosen, strict=True)]


def windows(ahead: int) -> list[int]:
    """Windows of 1, 2, 4 … tokens, of at most ``ahead`` and LONGEST."""
    return [1 << i for i in range(min(ahead, LONGEST).bit_length())]


def transitions(e: Edits, tokens: list[int], ahead: list[int], written: int) -> list[Tensor]:
    """Logarithms of ``MEASURES`` ``[H, 4, windows]``, float64, from each packed token over windows of the tokens ``ahead`` of it.

    Φ is what the recurrence makes of the identity when nothing is written; k is the token's own key of edit ``written``, after
    its later edits. −∞ is ln 0; what grew from a key of norm 0 is NaN.
    """
    after = torch.cat([torch.arange(t + 1, t + 1 + n) for t, n in zip(tokens, ahead, strict=True)]).to(e.q.device)
    x, own = in_double(e, after), in_double(e, torch.tensor(tokens, device=e.q.device))
    H, K = x.q.shape[2:]
    ends, sizes = np.cumsum([0, *ahead]).tolist(), [windows(n) for n in ahead]
    at = [begin + size - 1 for begin, mine in zip(ends, sizes, strict=False) for size in mine]
    identity = torch.eye(K, dtype=torch.float64, device=x.q.device).expand(len(tokens), H, K, K)
    silent = torch.zeros_like(x.k)
    moved = recurrence(
        x.q, x.g, x.k, x.a, silent, initial_state=identity, cu_seqlens=torch.tensor(ends), states_at=tuple(at)
    ).states
    start = torch.tensor([i for i, mine in enumerate(sizes) for _ in mine], device=moved.device)
    key = _after_later_edits(own, written)[0, start]
    realised = norm((moved @ key[..., None])[..., 0]) / norm(own.k[0, start, :, written])
    steps = torch.stack([(1 - dot(x.a, x.k))[0].abs().log().sum(-1), x.g[0].mean(-1)], -1)
    sums = torch.cat([steps[a:b].cumsum(0) for a, b in itertools.pairwise(ends)])[at]
    logs = torch.cat([torch.stack([_largest_singular(moved), realised], -1).log(), sums], -1)
    return [part.permute(1, 2, 0) for part in torch.split(logs, [len(mine) for mine in sizes])]


def _after_later_edits(e: Edits, written: int) -> Tensor:
    """The key of an edit after the token's later edits, ``[1, T, H, K]``."""
    k = e.k[..., written, :]
    for m in range(written + 1, e.k.shape[-2]):
        k = torch.addcmul(k, dot(e.a[..., m, :], k)[..., None], e.k[..., m, :], value=-1)
    return k


def _largest_singular(x: Tensor) -> Tensor:
    """‖x‖₂ of matrices, ∞ of those that are not finite."""
    finite = x.isfinite().all(-1).all(-1)
    found = torch.full(finite.shape, torch.inf, dtype=x.dtype, device=x.device)
    found[finite] = singular_values(x[finite])[:, 0]
    return found
