"""Packed sequences laid out as a grid of equal chunks, the last chunk of each sequence padded with tokens that change nothing."""

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qed_probe.errors import InputError

MARK = 64
"""The state's norm is recorded at tokens 63, 127, … of each sequence and at its last one, as in ``store.schema``."""


@dataclass(frozen=True)
class Grid:
    """Where the tokens of N packed sequences lie in ``chunks`` chunks of ``size`` tokens.

    ``slot`` ``[tokens]`` is each token's place in the grid, None where the grid is the packing itself. ``order`` lists the
    sequences by falling length, so that those still running at any step of the scan come first; ``steps[c]`` picks the chunk
    that each of them is at. Of the states at the start and after each step, one after another, ``starts`` picks that before each
    chunk, None where all lengths are equal, and ``marks`` those at the marks.
    """

    size: int
    chunks: int
    slot: Tensor | None
    order: Tensor
    steps: list[Tensor | slice]
    starts: Tensor | None
    marks: Tensor

    def fill(self, x: Tensor) -> Tensor:
        """``[tokens, H, ...]`` to ``[chunks, H, size, ...]``, zeros where there is no token."""
        if self.slot is not None:
            x = x.new_zeros(self.chunks * self.size, *x.shape[1:]).index_copy(0, self.slot, x)
        return x.view(self.chunks, self.size, *x.shape[1:]).transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """``[chunks, H, size, ...]`` back to ``[tokens, H, ...]``."""
        x = x.transpose(1, 2).reshape(self.chunks * self.size, x.shape[1], *x.shape[3:])
        return x if self.slot is None else x[self.slot]

    def before(self, states: Tensor) -> Tensor:
        """Of the states at the start and after each step of the scan, the one before each chunk."""
        if self.starts is not None:
            return states[self.starts]
        return states[: self.chunks].view(len(self.steps), -1, *states.shape[1:]).transpose(0, 1).flatten(0, 1)


def bounds(rows: int, length: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """The boundaries of the packed sequences, ``rows`` equal ones where ``cu_seqlens`` is None.

    Raises InputError if ``cu_seqlens`` is not a rising list of integers from 0 to ``length``, or comes with more than one row.
    """
    if cu_seqlens is None:
        return tuple(range(0, rows * length + 1, length)) if length else (0,) * (rows + 1)
    ends = tuple(cu_seqlens.tolist())
    if rows != 1:
        raise InputError(f"cu_seqlens: expected one packed row [1, T, ...], found {rows} rows")
    integral = not (cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool)
    rising = all(a <= b for a, b in itertools.pairwise(ends))
    if not (integral and len(ends) > 1 and ends[0] == 0 and ends[-1] == length and rising):
        raise InputError(f"cu_seqlens: expected integers rising from 0 to {length}, found {list(ends)[:8]}")
    return ends


@lru_cache(maxsize=4)  # one number a token, asked for by one layer after another
@torch.inference_mode(False)
def first_tokens(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """The first token of each token's sequence, ``[tokens]``, of packed sequences with these boundaries."""
    bounds = torch.tensor(ends)
    return torch.repeat_interleave(bounds[:-1], bounds.diff()).to(device)


SEGMENT, SEGMENT_ON_GPU = 1024, 8192
"""Tokens that are worked on at once, so that the memory of a long prompt is bounded: on a CPU what its caches hold."""


def segment_size(device: torch.device) -> int:
    """The tokens that this device works on at once."""
    return SEGMENT if device.type == "cpu" else SEGMENT_ON_GPU


@dataclass(frozen=True)
class Segment:
    """A span of packed tokens, the sequences that have tokens in it, and their boundaries within it."""

    tokens: slice
    sequences: slice
    cu_seqlens: Tensor


@lru_cache(maxsize=64)
def segments(ends: tuple[int, ...], device: torch.device) -> list[Segment]:
    """Cut packed sequences with these boundaries into spans of at most ``segment_size`` tokens, a sequence only at its marks."""
    spans, start = [], 0
    while start < ends[-1]:
        stop = min(start + segment_size(device), ends[-1])
        begun = ends[bisect_right(ends, stop) - 1]
        stop = stop if stop == ends[-1] else stop - (stop - begun) % MARK
        first, last = bisect_right(ends, start) - 1, bisect_left(ends, stop)
        inside = [min(max(end, start), stop) - start for end in ends[first : last + 1]]
        spans.append(Segment(slice(start, stop), slice(first, last), torch.tensor(inside)))
        start = stop
    return spans


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of packed sequences: the ``first`` token and the ``size`` of each, which sequence's they are, and marks.

    ``chunks`` ``[N + 1]`` bounds the chunks of each sequence, ``marked`` picks those that end at a mark; the longest sequence has
    ``longest`` chunks.
    """

    first: Tensor
    size: Tensor
    chunks: Tensor
    marked: Tensor
    longest: int


_recorded: dict[tuple[tuple[int, ...], int, torch.device], ChunkTable] = {}


def chunk_table(ends: tuple[int, ...], size: int, device: torch.device) -> ChunkTable:
    """List the chunks of ``size`` tokens of packed sequences with these boundaries."""
    table = _chunk_table(ends, size, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _recorded[ends, size, device] = table  # a CUDA graph reads what it was recorded with for as long as it is replayed
    return table


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _chunk_table(ends: tuple[int, ...], size: int, device: torch.device) -> ChunkTable:
    lengths = torch.tensor(ends).diff()
    counts = -(-lengths // size)
    of_chunk = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    within = torch.arange(len(of_chunk)) - bounds[of_chunk]
    left = lengths[of_chunk] - within * size
    marked = (((within + 1) * size) % MARK == 0) | (left <= size)
    first = torch.tensor(ends)[of_chunk] + within * size
    columns = (first, left.clamp(max=size).int(), bounds, marked.nonzero()[:, 0])
    first, left, bounds, marked = (x.to(device) for x in columns)
    return ChunkTable(first, left, bounds, marked, longest=int(counts.max()))


@dataclass(frozen=True)
class Runs:
    """Runs of chunks: ``chunks`` ``[runs + 1]`` bounds the chunks of each, ``sequences`` ``[N + 1]`` each sequence's runs."""

    chunks: Tensor
    sequences: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def runs(ends: tuple[int, ...], size: int, longest: int, device: torch.device) -> Runs:
    """Cut each sequence's chunks of ``size`` tokens into runs of at most ``longest``; an empty sequence is an empty run."""
    counts = -(-torch.tensor(ends).diff() // size)
    several = (-(-counts // longest)).clamp(min=1)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), several)
    zero = counts.new_zeros(1)
    first = torch.cat([zero, several.cumsum(0)])
    within = torch.arange(len(sequence)) - first[sequence]
    left = (counts[sequence] - within * longest).clamp(max=longest)
    return Runs(torch.cat([zero, left.cumsum(0)]).to(device), first.to(device))


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def grid(ends: tuple[int, ...], size: int, device: torch.device) -> Grid:
    """Lay packed sequences with these boundaries out in chunks of ``size`` tokens; what is cached here may meet gradients."""
    table = chunk_table(ends, size, torch.device("cpu"))
    lengths, counts = torch.tensor(ends).diff(), table.chunks.diff()
    first, chunks, slot = table.chunks[:-1], len(table.first), None
    if chunks * size != ends[-1]:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        slot = (first[sequence] * size + torch.arange(ends[-1]) - torch.tensor(ends)[sequence]).to(device)
    order = torch.argsort(counts, descending=True, stable=True)
    falling = counts[order]
    steps = [first[order[: int((falling > step).sum())]] + step for step in range(int(counts.max()))]
    after = torch.argsort(torch.cat([*steps, first[:0]])) + len(lengths)
    starts = after.roll(1).index_copy(0, first[order[counts[order] > 0]], torch.arange(int((counts > 0).sum())))
    even = 0 < int(falling[-1]) == len(steps)
    # Equal lengths, the usual batch, are strided views of the grid; the rest is gathered.
    picks = [slice(step, None, len(steps)) if even else at.to(device) for step, at in enumerate(steps)]
    return Grid(size, chunks, slot, order.to(device), picks, None if even else starts.to(device), after[table.marked].to(device))
