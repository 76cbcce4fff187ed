"""One layer replayed with other erase directions: a step on the actual state, and the whole trajectory.

Where λd is replaced, S̄ is the memory that the main edit reads, and::

    o⁻ = y + λρS̄ᵀd      δo' = −λρS̄ᵀd'

Where the address ε is replaced, Ŝ is the memory that the erase reads (the decayed one, if the erase comes first), and::

    o⁻ = Ŝᵀq            δo' = −γ(qᵀε')Ŝᵀε'

One step: d' at the memory that the actual direction left, one pass for all directions together. Trajectory: the memory itself
replayed with d' at every token, a pass for each. Source: QED (arXiv 2608.13668), Eq. 10–12; EDA (arXiv 2606.26560), Sec. 4.5
and Fig. 2b.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import Edits, Read, recurrence
from qed_probe.kernels.packing import segments
from qed_probe.replays.directions import Counterfactuals, Replaced, with_direction
from qed_probe.replays.inputs import LayerInputs

Match = Literal["norm", "read", "correction", "none"]
REGIMES = ("one-step", "trajectory")
QUANTITIES = ("gate", "overlap", "read", "before", "shift", "output")
"""|λ| or γ; |ρ| or |qᵀε'|; ‖S̄ᵀd'‖ or ‖Ŝᵀε'‖; ‖o⁻‖; ‖y' − y‖; ‖y‖, y the actual output.

‖δo'‖ is the product of the first three.
"""
OWN = ("actual", "none", "reversed")
"""Directions that need no matching: their size is the actual one, or 0."""

Key = tuple[str, str, str]
"""Match, regime and direction."""


@dataclass(frozen=True)
class Replay:
    """What every direction does at every token: ``[draws, QUANTITIES, T, H]`` float32 by match, regime and direction.

    ``passes`` of the recurrence were needed; ``off`` is max |y − o| / max |o|, of the actual pass against what the model's own
    kernel returned.
    """

    measures: dict[Key, Tensor]
    passes: int
    off: float


@dataclass(frozen=True)
class _Step:
    """One step with every direction: ``before`` o⁻, ``reads`` and the outputs ``y`` ``[P, T, H, V]``; ``overlap`` ``[P, T, H]``.

    Only of what is the same for all directions P is 1.
    """

    before: Tensor
    overlap: Tensor
    reads: Tensor
    y: Tensor


def matches(replaced: Replaced, match: Match) -> tuple[str, ...]:
    """The ways in which directions are compared: as they are made, and matched to the actual one if that is another thing.

    Raises InputError for an unknown match, and for addresses matched by anything but their norm, which is 1 as they are made.
    """
    if match not in get_args(Match):
        raise InputError(f"match: expected one of {', '.join(get_args(Match))}, found {match!r}")
    if replaced == "direction":
        return ("none",) if match == "none" else ("none", match)
    if match in ("read", "correction"):
        raise InputError(
            f"match: expected norm or none where an address is replaced, found {match!r}: what scales ε by c scales 1 − γ‖ε‖², "
            "the factor that it erases by, to 1 − γc², which then is in no bounds"
        )
    return ("none",)


@torch.no_grad()
def replay_layer(layer: LayerInputs, chosen: Counterfactuals, match: Match = "norm") -> Replay:
    """Measure every direction in both regimes, as made (match ``none``) and scaled to the actual one's size at every token.

    ``match`` is what the sizes share: ``norm`` ‖d‖, after gate and projection; ``read`` ‖S̄ᵀd‖ at the actual state, or
    ``correction`` ‖λρS̄ᵀd‖ there, which is the same as λρ is the gates' alone. D directions, a draw or a match being one, take
    at most D + 1 passes. Raises InputError as ``matches`` does.
    """
    ways = matches(chosen.replaced, match)
    rows = [(name, draw) for name, x in chosen.directions.items() for draw in range(len(x))]
    directions = torch.cat([*chosen.directions.values()])
    measured, scales, y = _one_step(layer, chosen, rows, directions, match if len(ways) > 1 else "none")
    by_row: dict[tuple[str, str, tuple[str, int]], Tensor] = {
        ("none", "one-step", row): x for row, x in zip(rows, measured, strict=False)
    }
    scaled = [row for row in rows if row[0] not in OWN] if len(ways) > 1 else []
    by_row |= {(ways[-1], "one-step", row): x for row, x in zip(scaled, measured[len(rows) :], strict=True)}
    by_row["none", "trajectory", rows[0]] = measured[0]
    passes = 1
    for i, row in enumerate(rows[1:], 1):
        by_row["none", "trajectory", row] = _trajectory(layer, chosen, row[0], directions[i], y)
        passes += 1
    for row, scale in zip(scaled, scales, strict=True):
        x = scale[..., None] * directions[rows.index(row)]
        by_row[ways[-1], "trajectory", row] = _trajectory(layer, chosen, row[0], x, y)
        passes += 1
    measures = {
        (way, regime, name): torch.stack(
            [by_row[way if (way, regime, (name, draw)) in by_row else "none", regime, (name, draw)] for draw in range(len(x))]
        )
        for way in ways
        for regime in REGIMES
        for name, x in chosen.directions.items()
    }
    return Replay(measures, passes, _off(layer, y))


def _one_step(
    layer: LayerInputs, chosen: Counterfactuals, rows: list[tuple[str, int]], directions: Tensor, match: Match
) -> tuple[Tensor, Tensor, Tensor]:
    """Measures ``[P, Q, T, H]`` of all rows, those that are matched once more behind them; their scales; the actual y."""
    T, H, V = layer.output.shape[1:]
    some = [i for i, (name, _) in enumerate(rows) if name not in OWN] if match != "none" else []
    turned = [name in chosen.turned for name, _ in rows]
    found = directions.new_empty(len(rows) + len(some), len(QUANTITIES), T, H, dtype=torch.float32)
    scales, y = directions.new_empty(len(some), T, H), layer.edits.u.new_empty(T, H, V)
    gate = _gate(layer, chosen.replaced)
    for span, e, read in passes(layer, _probes(layer, chosen.replaced, directions)):
        step = _step(e, read, gate[:, span], directions[:, span], chosen.replaced, turned)
        y[span] = read.y[0]
        sizes = _norm(directions[:, span]) if match == "norm" else _norm(step.reads)
        scales[:, span] = _ratio(sizes[:1], sizes[some]).to(scales.dtype)
        if some:
            step = _scaled(step, gate[:, span], some, scales[:, span])
        found[:, :, span] = _measure(gate[:, span], step, y[span])
    return found, scales, y


def _trajectory(layer: LayerInputs, chosen: Counterfactuals, name: str, direction: Tensor, y: Tensor) -> Tensor:
    """Measures ``[Q, T, H]`` of the memory replayed with this direction ``[T, H, K]``, against the actual y."""
    other, gate = with_direction(layer, chosen, name, direction[None]), _gate(layer, chosen.replaced)
    found = direction.new_empty(len(QUANTITIES), *direction.shape[:2], dtype=torch.float32)
    for span, e, read in passes(other, _probes(other, chosen.replaced, direction[None])):
        step = _step(e, read, gate[:, span], direction[None, span], chosen.replaced, [False])
        found[:, span] = _measure(gate[:, span], step, y[span])[0]
    return found


def _probes(layer: LayerInputs, replaced: Replaced, directions: Tensor) -> Tensor:
    """What else the pass reads the memory by, ``[1, T, H, P, K]``."""
    probes = directions.movedim(0, -2)[None]
    if replaced == "direction":
        return probes
    return torch.cat([probes, layer.edits.a[..., layer.edits.main, None, :]], -2)


def passes(layer: LayerInputs, probes: Tensor) -> Iterator[tuple[slice, Edits, Read]]:
    """One pass of the recurrence, segment after segment: the tokens, their edits and what the memory gave back."""
    ready, state = layer.edits, layer.initial_state
    if state is None:
        state = ready.u.new_zeros(len(layer.ends) - 1, *ready.q.shape[2:], ready.u.shape[-1])
    state = state.clone()
    for span in segments(layer.ends, layer.edits.q.device):
        e, mine = cut(ready, span.tokens), span.sequences
        seen, before = probes[:, span.tokens], state[mine]
        read = recurrence(e.q, e.g, e.k, e.a, e.u, probes=seen, initial_state=before, cu_seqlens=span.cu_seqlens)
        state[mine] = read.final_state
        yield span.tokens, e, read


def cut(e: Edits, at: slice | Tensor) -> Edits:
    """The edits of some tokens."""
    d = None if e.d is None else e.d[:, at]
    return replace(e, q=e.q[:, at], g=e.g[:, at], k=e.k[:, at], a=e.a[:, at], u=e.u[:, at], base=e.base[:, at], d=d)


def _step(e: Edits, read: Read, gate: Tensor, directions: Tensor, replaced: Replaced, turned: list[bool]) -> _Step:
    """One step with each of these directions ``[P, T, H, K]``, of which the first is what the memory ran with."""
    step = _add(e, read, gate, directions) if replaced == "direction" else _erase(e, read, gate, directions, turned)
    # The first's output is there, and need not be put together again.
    return replace(step, y=torch.cat([read.y, step.y[1:]]))


def _add(e: Edits, read: Read, lam: Tensor, directions: Tensor) -> _Step:
    reads = read.probes[0].movedim(-2, 0)
    for m in range(e.main):
        reads = torch.addcmul(reads, _dot(directions, e.k[..., m, :])[..., None], read.residual[..., m, :])
    rho = read.overlap[..., e.main]
    strength = (lam * rho)[..., None]
    before = read.y + strength * reads[:1]
    return _Step(before, rho, reads, before - strength * reads)


def _erase(e: Edits, read: Read, gamma: Tensor, directions: Tensor, turned: list[bool]) -> _Step:
    k, a, u = (x[0, ..., e.main, :] for x in (e.k, e.a, e.u))
    rho, gamma = read.overlap[0, ..., e.main, None], gamma[0, ..., None]
    *probes, by_a = read.probes[0].unbind(-2)
    residual, overlap = u - by_a, _dot(directions, e.q)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    for x, by_x, q_x, other in zip(directions, probes, overlap[..., None], turned, strict=True):
        before = read.decayed_y[0]
        if (e.address == 0) == other:  # the delta edit comes first
            before, by_x = before + rho * residual, by_x + _dot(x, k)[..., None] * residual
            y = before - gamma * q_x * by_x
        else:
            y = before - gamma * q_x * by_x + rho * (residual + gamma * _dot(a, x)[..., None] * by_x)
        steps.append((before, by_x, y))
    before, reads, y = (torch.stack(x) for x in zip(*steps, strict=True))
    return _Step(before, overlap, reads, y)


def _scaled(step: _Step, lam: Tensor, some: list[int], scales: Tensor) -> _Step:
    """The step with some of its added directions, scaled by ``[P, T, H]``, behind all of them."""
    reads = scales[..., None] * step.reads[some]
    y = step.before - (lam * step.overlap)[..., None] * reads
    return replace(step, reads=torch.cat([step.reads, reads]), y=torch.cat([step.y, y]))


def _measure(gate: Tensor, step: _Step, y: Tensor) -> Tensor:
    """``[P, QUANTITIES, T, H]`` float32; norms are taken in float64, as squares of what has decayed underflow."""
    columns = [gate.abs(), step.overlap.abs(), _norm(step.reads), _norm(step.before), _norm(step.y - y), _norm(y)[None]]
    return torch.stack([x.float().expand(len(step.reads), *y.shape[:2]) for x in columns], 1)


def _gate(layer: LayerInputs, replaced: Replaced) -> Tensor:
    """λ or γ, ``[1, T, H]``."""
    gate = layer.lam if replaced == "direction" else layer.gamma
    if gate is None:
        raise InputError(f"layer {layer.index}: expected {'λ' if replaced == 'direction' else 'γ'}, found none")
    return gate.expand(1, *layer.edits.q.shape[1:3])


def _off(layer: LayerInputs, y: Tensor) -> float:
    output = layer.output[0].double()
    largest = output.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((layer.scale * y.double() - output).abs().max() / largest)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    dot: Tensor = torch.linalg.vecdot(x, y)
    return dot


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return norm


def _ratio(size: Tensor, other: Tensor) -> Tensor:
    """``size / other``, and 1 where the other is 0 and cannot be made larger."""
    return torch.where(other > 0, size / other.where(other > 0, 1), 1)
