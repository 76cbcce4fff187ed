"""One layer's pass over its tokens: which code runs it, in which pieces, and what is kept of it."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels.backend import Backend, Choice, choose, trains
from qed_probe.kernels.chunked import recurrence
from qed_probe.kernels.erase import erase_records
from qed_probe.kernels.mixers import Edits, Mixer, Tokens, canonical, checked, cut, edits
from qed_probe.kernels.packing import SEGMENT, bounds, segments
from qed_probe.kernels.records import records
from qed_probe.kernels.reference import reference

BY_MARK = ("state_norm", "states")
"""What a pass gives that has no token axis."""


@dataclass(frozen=True)
class Observation:
    """One layer's pass, seen: what the layer fed its memory, what the memory gave back, and the records by name.

    ``y`` ``[B, T, H, V]`` is Sᵀq without the output's scale; ``final_state`` ``[N, H, K, V]`` and ``states``
    ``[positions, H, K, V]`` are the memory itself. Records are float32 ``[B, T, H]``, except those of every edit
    ``[B, T, H, M]``, ``state_norm`` ``[marks, H]`` and the vector ``read`` ``[B, T, H, V]``. ``backend`` is what ran.
    """

    tokens: Tokens
    y: Tensor
    final_state: Tensor
    states: Tensor
    records: dict[str, Tensor]
    backend: Backend


def run(
    mixer: Mixer,
    tokens: Tokens,
    *,
    record: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: tuple[int, ...] = (),
    chunk: int = 64,
    backend: Choice = "auto",
) -> Observation:
    """Run a layer's memory over its tokens, once, and record it if asked; ``y`` is the same to the bit either way.

    The other arguments are those of ``edits``, ``recurrence`` and ``choose``. A CPU works through a long row segment by segment;
    Triton keeps its own chunks and rounds values of 16 bits as ``fused`` and ``gradients`` say. Raises InputError as they do, and
    for a token of ``states_at`` that is not there.
    """
    ready = checked(mixer, tokens)
    trained = trains(ready, initial_state)
    chosen = choose(backend, ready, seen=record or len(states_at) > 0, trained=trained)
    B, T, H, V = *ready.v.shape[:3], ready.v.shape[-1]
    ends, dtype = bounds(B, T, cu_seqlens), torch.float64 if ready.v.dtype == torch.float64 else torch.float32
    state = ready.q.new_zeros(len(ends) - 1, H, ready.q.shape[-1], V, dtype=dtype)
    state = state if initial_state is None else initial_state.to(dtype)
    beyond = [token for token in states_at if not 0 <= token < ends[-1]]
    if beyond:
        raise InputError(f"states_at: expected packed tokens from 0 to {ends[-1] - 1}, found {beyond[0]}")
    places = tuple(sorted(states_at))
    if chosen == "reference":
        found, state = _run_reference(mixer, tokens, state, cu_seqlens, places, record=record)
    elif chosen == "triton" and T:
        found, state = _run_triton(mixer, ready, state, ends, places, record=record, trained=trained)
    elif ready.q.device.type == "cpu" and B == 1 and T > SEGMENT:
        found, state = _run_segments(canonical(ready), state.clone(), ends, places, mixer=mixer, record=record, chunk=chunk)
    else:
        found, state = _run(canonical(ready), state, cu_seqlens, places, mixer=mixer, record=record, chunk=chunk)
    states = found.pop("states")[[places.index(token) for token in states_at]]
    return Observation(tokens, found.pop("y"), state, states, found, chosen)


def run_edits(
    tokens: Tokens, ready: Edits, *, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Observation:
    """As ``run`` in PyTorch, unrecorded, but with edits that need not be those that the mixer makes of these tokens."""
    given: dict[str, Any] = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    read = recurrence(ready.q, ready.g, ready.k, ready.a, ready.u, **given)
    return Observation(tokens, read.y, read.final_state, read.states, {}, "torch")


def erase(mixer: Mixer, tokens: Tokens, *, backend: Choice = "auto") -> dict[str, Tensor]:
    """Record a layer's erase factors alone, which takes no pass of its memory: of ``run``'s records, ``ERASE``, to the bit.

    Raises InputError as ``run`` does.
    """
    ready = checked(mixer, tokens)
    B, T = ready.v.shape[:2]
    if choose(backend, ready, seen=True, trained=False) == "triton" and T:
        from qed_probe.kernels import fused

        with torch.cuda.device(ready.q.get_device()):
            return fused.erase(mixer, ready, bounds(B, T, None))
    step = SEGMENT if ready.q.device.type == "cpu" else max(T, 1)
    parts = []
    for start in range(0, max(T, 1), step):
        part = canonical(cut(ready, slice(start, start + step)))
        parts.append(erase_records(mixer, part, edits(mixer, part)))
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


def merged(one: Observation, other: Observation, heads: Tensor) -> Observation:
    """The heads ``heads`` ``[H]`` bool of one pass, and the rest of another over the same tokens; records that both have."""
    records = {
        name: torch.where(heads[:, None] if x.ndim == 4 else heads, x, other.records[name])
        for name, x in one.records.items()
        if name in other.records
    }
    return Observation(
        one.tokens,
        torch.where(heads[:, None], one.y, other.y),
        torch.where(heads[:, None, None], one.final_state, other.final_state),
        torch.where(heads[:, None, None], one.states, other.states),
        records,
        one.backend,
    )


def _run(
    tokens: Tokens,
    state: Tensor,
    cu_seqlens: Tensor | None,
    states_at: tuple[int, ...],
    *,
    mixer: Mixer,
    record: bool,
    chunk: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """Outputs, states and records by name, and the last state."""
    ready = edits(mixer, tokens)
    probes = ready.d[..., None, :] if record and ready.d is not None else None
    given: dict[str, Any] = {"initial_state": state, "cu_seqlens": cu_seqlens, "states_at": states_at, "chunk": chunk}
    read = recurrence(ready.q, ready.g, ready.k, ready.a, ready.u, probes=probes, **given)
    found = records(mixer, tokens, ready, read) if record else {}
    return found | {"y": read.y, "states": read.states}, read.final_state


def _run_triton(
    mixer: Mixer,
    tokens: Tokens,
    state: Tensor,
    ends: tuple[int, ...],
    states_at: tuple[int, ...],
    *,
    record: bool,
    trained: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """As ``_run``, with programs launched where the tokens are: Triton's own choice is the current GPU."""
    from qed_probe.kernels import fused, gradients

    with torch.cuda.device(tokens.q.get_device()):
        if trained:
            return gradients.run(mixer, tokens, state, ends)
        return fused.run(mixer, tokens, state, ends, states_at, record=record)


def _run_segments(
    tokens: Tokens,
    state: Tensor,
    ends: tuple[int, ...],
    states_at: tuple[int, ...],
    **choices: Any,  # noqa: ANN401
) -> tuple[dict[str, Tensor], Tensor]:
    """As ``_run``, one segment after another; ``state`` is updated in place."""
    whole: dict[str, Tensor] = {}
    by_mark: defaultdict[str, list[Tensor]] = defaultdict(list)
    for span in segments(ends, tokens.q.device):
        inside = range(span.tokens.start, span.tokens.stop)
        wanted = tuple(token - inside.start for token in states_at if token in inside)
        part, before = cut(tokens, span.tokens), state[span.sequences]
        found, state[span.sequences] = _run(part, before, span.cu_seqlens, wanted, **choices)
        for name in BY_MARK:
            by_mark[name] += [found.pop(name)] if name in found else []
        for name, x in found.items():
            if name not in whole:
                whole[name] = x.new_empty(1, ends[-1], *x.shape[2:])
            whole[name][:, span.tokens] = x
    return whole | {name: torch.cat(parts) for name, parts in by_mark.items() if parts}, state


def _run_reference(
    mixer: Mixer, tokens: Tokens, state: Tensor, cu_seqlens: Tensor | None, states_at: tuple[int, ...], *, record: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """As ``_run``, by the float64 oracle."""
    seen = reference(mixer.name, tokens, initial_state=state, cu_seqlens=cu_seqlens)
    found = {name: x.float() for name, x in seen.records.items()} if record else {}
    return found | {"y": seen.y.float(), "states": seen.states.flatten(0, 1)[list(states_at)].float()}, seen.final_state.float()
