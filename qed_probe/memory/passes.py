"""A layer's prompts through the recurrence in float64, with and without the added direction, and means and ratios over them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import Edits, Read, recurrence
from qed_probe.kernels.packing import segments
from qed_probe.replays.inputs import LayerInputs
from qed_probe.replays.layer import cut

Array = NDArray[np.float64]
Pass = tuple[slice, Edits, Read]


def without_direction(e: Edits) -> Edits:
    """The same edits with λd taken from what the main one reads."""
    a = e.a.clone()
    a[..., e.main, :] = e.base
    return replace(e, a=a)


def written(layer: LayerInputs) -> int:
    """The edit that writes what the token has to say: the main one, but of RWKV-7, whose main edit only erases, the last."""
    return layer.edits.k.shape[-2] - 1 if layer.mixer.gate == "in-context" else layer.edits.main


def in_double(e: Edits, tokens: slice | Tensor) -> Edits:
    """The edits of some tokens, float64."""
    part = cut(e, tokens)
    double = {name: getattr(part, name).double() for name in ("q", "g", "k", "a", "u", "base")}
    return replace(part, **double, d=None if part.d is None else part.d.double())


def after_edits(read: Read, e: Edits, probes: Tensor, count: int) -> Tensor:
    """Sᵀp after the first ``count`` edits of a token, ``[T, H, P, V]``, of ``probes`` ``[T, H, P, K]`` read before them."""
    r = read.probes[0]
    for m in range(count):
        overlap = torch.linalg.vecdot(probes, e.k[0, ..., m, None, :])
        r = torch.addcmul(r, overlap[..., None], read.residual[0, ..., m, None, :])
    return r


def passes(layer: LayerInputs, e: Edits, states_at: Sequence[int] = ()) -> Iterator[Pass]:
    """Run the layer's prompts with these edits, segment after segment: its tokens, their edits in float64, and what was read.

    ``probes`` are Ŝᵀd where there is a d; ``states`` those after the packed tokens ``states_at`` that lie in the segment.
    """
    state = e.u.new_zeros(len(layer.ends) - 1, *e.q.shape[2:], e.u.shape[-1], dtype=torch.float64)
    if layer.initial_state is not None:
        state += layer.initial_state
    for span in segments(layer.ends, e.q.device):
        part, mine = in_double(e, span.tokens), span.sequences
        read = recurrence(
            part.q,
            part.g,
            part.k,
            part.a,
            part.u,
            probes=None if part.d is None else part.d[..., None, :],
            initial_state=state[mine],
            cu_seqlens=span.cu_seqlens,
            states_at=tuple(t - span.tokens.start for t in states_at if span.tokens.start <= t < span.tokens.stop),
        )
        state[mine] = read.final_state
        yield span.tokens, part, read


def over(x: Array, by: Array) -> Array:
    """x/by, NaN where that is 0."""
    ratio: Array = np.full(np.broadcast_shapes(x.shape, by.shape), np.nan)
    return np.divide(x, by, out=ratio, where=by != 0)


class Running:
    """Count, mean and variance of values that come one after another, cell by cell; what is not finite is not counted.

    Welford's update, which does not lose a small variance beside a large mean. Source: Welford (1962).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.n = np.zeros(shape, np.int64)
        self._mean, self._squares = np.zeros(shape), np.zeros(shape)

    def add(self, at: tuple[int, ...], x: Array) -> None:
        """Take one value of each cell at this place."""
        known = np.isfinite(x)
        self.n[at] += known
        off = np.where(known, x, self._mean[at]) - self._mean[at]
        self._mean[at] += off / np.maximum(self.n[at], 1)
        self._squares[at] += off**2 * (1 - 1 / np.maximum(self.n[at], 1))

    @property
    def mean(self) -> Array:
        """The mean, NaN where there is no value."""
        return np.where(self.n > 0, self._mean, np.nan)

    @property
    def variance(self) -> Array:
        """The variance of the sample, over n − 1; NaN of fewer than two values."""
        return np.where(self.n > 1, self._squares / np.maximum(self.n - 1, 1), np.nan)
