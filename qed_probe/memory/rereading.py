"""Every key of a layer read again, Δ tokens after something was written with it: what is found, and what is left of the write.

Own writes pass through the recurrence as values of their own, chunk by chunk: in columns ``[I | 1_t]`` the identity at a chunk's
start becomes the product of the chunk's transitions, and a write of the number 1 at each token what is left of it at the
chunk's end. From a write in one chunk to its key, read in another, these are multiplied::

    k_tᵀΦ_{t+Δ,t}k_t = (k_tᵀ Φ_{t+Δ,start}) · Φ_{chunk} … Φ_{chunk} · (Φ_{end,t} k_t)
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot, pad

from qed_probe.kernels import Edits, Read, recurrence
from qed_probe.kernels.packing import MARK, segments
from qed_probe.memory.passes import after_edits, written
from qed_probe.replays.inputs import LayerInputs
from qed_probe.replays.layer import cut, passes

TOGETHER = 4
"""Lags that the memory is read at in one pass."""
NEAR = 0.9
"""The |cos| beyond which a later key is the same one."""
BLOCK = 256
"""Keys that are compared with all later ones at once."""


@dataclass(frozen=True)
class Reread:
    """Reads r = S_{t+Δ}ᵀk_t of every token t of a pack, ``[L, T, H]`` each, L lags.

    ``found`` ⟨r, v⟩, ``across`` ‖r − v⟨r, v⟩/‖v‖²‖² and ``null`` ⟨r, v_s⟩. Where the prompt ends before t + Δ they say nothing.
    """

    found: Tensor
    across: Tensor
    null: Tensor


def key(layer: LayerInputs) -> Tensor:
    """The key that it writes with, ``[T, H, K]``."""
    return layer.edits.k[0, ..., written(layer), :]


def target(layer: LayerInputs) -> Tensor:
    """What that edit would have its key return, ``[T, H, V]``: v where its gate is a number, else what it writes."""
    return layer.value[0] if layer.mixer.gate == "scalar" else layer.edits.u[0, ..., written(layer), :]


def tokens_left(layer: LayerInputs) -> Tensor:
    """How many tokens of its prompt come after each, ``[T]``."""
    ends = torch.tensor(layer.ends[1:]).repeat_interleave(torch.tensor(layer.ends).diff())
    return (ends - 1 - torch.arange(layer.ends[-1])).to(layer.edits.q.device)


@torch.no_grad()
def reread(layer: LayerInputs, lags: Sequence[int], others: Tensor) -> Reread:
    """Read the memory after every token by the keys of ``lags`` tokens before; ``others`` ``[T, H, V]`` are the null's values."""
    v = target(layer)
    found, across, null = v.new_empty(3, len(lags), *v.shape[:2])
    for at in _groups(lags):
        probes, aims, nulls = (_late(x, lags[at]) for x in (key(layer), v, others))
        for span, e, read in passes(layer, probes[None]):
            r, aim = after_edits(read, e, probes[span], e.k.shape[-2]), aims[span]
            along, size = torch.linalg.vecdot(r, aim), torch.linalg.vecdot(aim, aim)
            rest = r - torch.where(size > 0, along / size.where(size > 0, 1), 0)[..., None] * aim
            found[at, span], null[at, span] = along.movedim(-1, 0), torch.linalg.vecdot(r, nulls[span]).movedim(-1, 0)
            across[at, span] = torch.linalg.vecdot(rest, rest).movedim(-1, 0)
    return Reread(*(_early(x, lags) for x in (found, across, null)))


@torch.no_grad()
def own_write(layer: LayerInputs, lags: Sequence[int]) -> Tensor:
    """k_tᵀΦ_{t+Δ,t}k_t ``[L, T, H]`` for rising lags, a chunk's length or less or powers of 2.

    Φ holds the edits of t that come after its write. Where the prompt ends before t + Δ it says nothing.
    """
    K, starts = key(layer).shape[-1], [t for ends in itertools.pairwise(layer.ends) for t in range(*ends, MARK)]
    first = torch.tensor(starts, device=layer.edits.q.device)
    chunk = torch.bucketize(torch.arange(layer.ends[-1], device=first.device), first, right=True) - 1
    place = torch.arange(layer.ends[-1], device=first.device) - first[chunk]
    found = key(layer).new_empty(len(lags), *key(layer).shape[:2])
    final = torch.cat([read.final_state for *_, read in _chunks(layer, place, None)])
    step, before, back = final[..., :K], final[..., K:].roll(1, 0), 1
    for at in _groups(lags):
        columns = []
        for lag in lags[at]:
            for _ in range(back, max(lag // MARK, 1)):
                before, back = (step @ before).roll(1, 0), back + 1
            columns.append(before)
        probes = _late(key(layer), lags[at])
        for span, e, read in _chunks(layer, place, probes):
            rows = after_edits(read, e, probes[span], e.k.shape[-2])
            for i, (lag, column) in enumerate(zip(lags[at], columns, strict=True)):
                since = (place[span] - lag)[:, None]
                there, row = rows[..., i, :K], rows[..., i, K:]
                inside = row.gather(-1, (since % MARK)[..., None].expand(*row.shape[:2], 1)).squeeze(-1)
                left = column[chunk[span][:, None], torch.arange(row.shape[1], device=row.device), :, since % MARK]
                found[at.start + i, span] = torch.where(since >= 0, inside, torch.linalg.vecdot(there, left))
    return _early(found, lags)


def _chunks(layer: LayerInputs, place: Tensor, probes: Tensor | None) -> Iterator[tuple[slice, Edits, Read]]:
    """One pass in which every chunk begins with ``[I | 0]`` and token t writes 1 in the column of its ``place`` in the chunk."""
    at, K = written(layer), layer.edits.q.shape[-1]
    for segment in segments(layer.ends, layer.edits.q.device):
        e, span = cut(layer.edits, segment.tokens), segment.tokens
        one = one_hot(place[span], MARK).to(e.k.dtype)
        u = e.k.new_zeros(*e.k.shape[:-1], K + MARK)
        u[0, ..., at, K:] = one[:, None]
        begins = torch.cat([(place[span] == 0).nonzero()[:, 0], place.new_tensor([len(one)])])
        state = pad(torch.eye(K, dtype=u.dtype, device=u.device), (0, MARK)).expand(len(begins) - 1, u.shape[2], -1, -1)
        probe = None if probes is None else probes[None, span]
        yield span, e, recurrence(e.q, e.g, e.k, e.a, u, probes=probe, initial_state=state, cu_seqlens=begins)


def _groups(lags: Sequence[int]) -> list[slice]:
    return [slice(i, min(i + TOGETHER, len(lags))) for i in range(0, len(lags), TOGETHER)]


def _late(x: Tensor, lags: Sequence[int]) -> Tensor:
    """At every token what was there ``lags`` tokens before, ``[T, H, L, ...]``."""
    return torch.stack([x.roll(lag, 0) for lag in lags], 2)


def _early(x: Tensor, lags: Sequence[int]) -> Tensor:
    """At every token what is there ``lags`` tokens later, of ``x`` ``[L, T, H]``."""
    return torch.stack([row.roll(-lag, 0) for row, lag in zip(x, lags, strict=True)])


@torch.no_grad()
def decayed_write(layer: LayerInputs, lags: Sequence[int]) -> Tensor:
    """Σ_c k_c² exp(g_{t+1} + … + g_{t+Δ}) ``[L, T, H]`` for the lags 0, 1, 2, 4, …: of decay alone."""
    since, found = layer.edits.g[0].exp().roll(-1, 0), []
    for lag in lags:
        if lag > 1:
            since = since * since.roll(-(lag // 2), 0)
        found.append((key(layer).square() * (since if lag else 1)).sum(-1))
    return torch.stack(found)


@torch.no_grad()
def rewritten_after(layer: LayerInputs) -> Tensor:
    """Tokens until a later edit has nearly the same key, ``[T, H]``; T where none has. Edits that do nothing do not count."""
    e, at = layer.edits, written(layer)
    acts = ((e.a != 0).any(-1) | (e.u != 0).any(-1))[0]
    keys, own = normalize(e.k[0] * acts[..., None], dim=-1), normalize(key(layer), dim=-1)
    T, H, M = acts.shape
    found = torch.full((T, H), T, device=own.device)
    for (_, end), begin in ((ends, b) for ends in itertools.pairwise(layer.ends) for b in range(*ends, BLOCK)):
        rows, later = own[begin : min(begin + BLOCK, end)].transpose(0, 1), keys[begin:end].transpose(0, 1).flatten(1, 2)
        order = torch.arange(later.shape[1], device=own.device)
        place = torch.arange(rows.shape[1], device=own.device)
        near = ((rows @ later.transpose(-1, -2)).abs() > NEAR) & (order > (place * M + at)[:, None])
        lag = near.byte().argmax(-1) // M - place
        found[begin : begin + rows.shape[1]] = torch.where(near.any(-1), lag, T).T
    return found
