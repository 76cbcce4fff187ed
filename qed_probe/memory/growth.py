"""How far a memory can grow and does: transitions over windows, states by position, and what a single edit adds.

The transition over n tokens is Φ_{t+n,t}, the product of decay and edits of tokens t + 1 … t + n. ‖Φ‖₂ is the most that it can
make of anything in the memory, ‖Φk_t‖/‖k_t‖ what it makes of what token t wrote, after the token's own later edits. Beside them
Π|e|, |det| of all edits, which is no growth: K − 1 eigenvalues of an edit are 1 whatever its norm; and the mean decay alone.
``own`` are the model's gates, ``base`` the same without λd on the same inputs, where a mixer adds one.

Of the main edit M_t = I − k aᵀ alone, ln(‖M_t‖₂/‖M_t without λd‖₂) over all tokens, by ρ_t and ‖S̄_tᵀd_t‖. Source: this package;
the norm of an edit is that of ``kernels.erase.operator_norm``.
"""

import itertools

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import Edits, Read
from qed_probe.kernels.erase import dot, norm, operator_norm
from qed_probe.kernels.packing import MARK, segment_size
from qed_probe.memory.passes import Array, Running, after_edits, passes, without_direction, written
from qed_probe.memory.subject import Subject, row
from qed_probe.memory.transitions import LONGEST, MEASURES, spread, transitions, windows
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store.whole import table
from qed_probe.tracing.plan import packs

GATES = ("own", "base")
LEVELS = (0.5, 0.9, 1.0)
ROUNDING = 1e-9
"""What is above 1 is so by more than this."""
RHO, READ = np.linspace(-1, 1, 41), 10 ** np.linspace(-4, 4, 33)
"""Edges of the bins of ρ and ‖S̄ᵀd‖; the outermost hold what lies beyond."""
LEFT_OUT = ("reads nothing", "not finite")

_PLACE = ("layer", "head")
_CELL, _STATE, _BIN = (
    ("growth_of", "gates", "window"),
    (*_PLACE, "gates", "norm_position"),
    (*_PLACE, "rho_bin", "read_bin"),
)
_GROWTH = "ln ‖Φ‖₂, ln ‖Φk‖/‖k‖, Σ ln|e| or Σ mean_c g over a window; −∞ is ln 0"
_EDIT = "ln(‖M‖₂/‖M without λd‖₂)"

VARIABLES = {
    x.name: x
    for x in (
        row("growth_starts", _PLACE, "tokens whose transitions were followed", "", "count"),
        row("growth", (*_PLACE, *_CELL, "growth_level"), "logarithm of the growth over a window, quantiles over tokens", _GROWTH),
        row("growth_layer", ("layer", *_CELL, "growth_level"), "the same over tokens and heads", _GROWTH),
        row("growth_n", (*_PLACE, *_CELL), "tokens with such a window", "", "count"),
        row("growth_above", (*_PLACE, *_CELL), "of these above 1", f"ln x > {ROUNDING:g}", "count"),
        row("growth_zero", (*_PLACE, *_CELL), "of these 0", "ln x = −∞", "count"),
        row("norm_mean", _STATE, "norm of the state after so many tokens or the prompt's last, mean over prompts", "‖S_t‖_F"),
        row("norm_variance", _STATE, "variance over prompts of the same", "Var ‖S_t‖_F, over n − 1"),
        row("norm_n", _STATE, "prompts with such a state, finite", "", "count"),
        row("edit_growth", _PLACE, "growth of the main edit's norm by the direction, sum over tokens", f"Σ {_EDIT}"),
        row("edit_growth_max", _PLACE, "growth of the main edit's norm by the direction, largest", _EDIT),
        row("edit_growth_n", _PLACE, "tokens whose main edit has both norms above 0", "", "count"),
        row("joint_n", _BIN, "tokens by ρ and ‖S̄ᵀd‖", "", "count"),
        row("joint_growth", _BIN, "growth of the main edit's norm by the direction, sum over tokens", f"Σ {_EDIT}"),
        row("joint_left_out", (*_PLACE, "left_out"), "tokens in no bin, as ‖S̄ᵀd‖ = 0 or not finite", "", "count"),
    )
}


class Growth:
    """Transitions from tokens drawn at random, the norm of the state, and the growth of edits with the reads they come with."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.gates = GATES if subject.mixer.direction is not None else GATES[:1]
        self.starts = spread(subject.lengths)
        self.windows = windows(max((subject.lengths[p] - 1 - t for p, t in self.starts), default=0))
        cells = (len(subject.layers), subject.heads)
        self.logs = np.full((*cells, len(MEASURES), len(self.gates), len(self.windows), len(self.starts)), np.nan)
        self.norms = Running((cells[0], len(self.gates), -(-max(subject.lengths) // MARK), cells[1]))
        self.edit_n, self.edit_sum, self.edit_max = np.zeros(cells, np.int64), np.zeros(cells), np.full(cells, np.nan)
        bins = (*cells, len(RHO) - 1, len(READ) - 1)
        self.joint_n, self.joint_sum = np.zeros(bins, np.int64), np.zeros(bins)
        self.left_out = np.zeros((*cells, len(LEFT_OUT)), np.int64)

    @torch.no_grad()
    def add(self, layer: LayerInputs) -> None:
        """Work through one layer's prompts."""
        at = self.subject.at(layer)
        marks = [mark for a, b in itertools.pairwise(layer.ends) for mark in range(-(-(b - a) // MARK))]
        for gates, name in enumerate(self.gates):
            e = layer.edits if name == "own" else without_direction(layer.edits)
            self._follow(layer, at, gates, e)
            norms = []
            for _, part, read in passes(layer, e):
                norms.append(read.state_norm)
                if name == "own" and layer.mixer.direction is not None and part.d is not None:
                    self._join(at, part, part.d[0], read)
            for mark, x in zip(marks, torch.cat(norms).cpu().numpy(), strict=True):
                self.norms.add((at, gates, mark), x)

    def _follow(self, layer: LayerInputs, at: int, gates: int, e: Edits) -> None:
        """The transitions from those starts that lie in the layer's prompts, some at a time."""
        begins = dict(zip(layer.prompts, itertools.pairwise(layer.ends), strict=True))
        mine = [(i, begins[p][0] + t, begins[p][1]) for i, (p, t) in enumerate(self.starts) if p in begins]
        ahead = [min(end - 1 - token, LONGEST) for _, token, end in mine]
        for group in packs(ahead, segment_size(e.q.device)) if mine else ():
            found = transitions(e, [token for _, token, _ in mine[group]], ahead[group], written(layer))
            for (i, _, _), x in zip(mine[group], found, strict=True):
                self.logs[at, :, :, gates, : x.shape[-1], i] = x.cpu().numpy()

    def _join(self, at: int, e: Edits, d: Tensor, read: Read) -> None:
        """Growth of the main edit by the direction, token by token, with ρ and what the direction reads."""
        k, a, seen = e.k[0, ..., e.main, :], e.a[0, ..., e.main, :], after_edits(read, e, d[..., None, :], e.main)[..., 0, :]
        own, base = (operator_norm(k, x, dot(x, k), norm(k)) for x in (a, e.base[0]))
        rho, reads, log = (x.cpu().numpy() for x in (read.overlap[0, ..., e.main], norm(seen), (own / base).log()))
        log[~np.isfinite(log)] = np.nan
        self.edit_n[at] += (~np.isnan(log)).sum(0)
        self.edit_sum[at] += np.nansum(log, 0)
        self.edit_max[at] = np.fmax(self.edit_max[at], np.fmax.reduce(log, 0))
        strange = np.isnan(log) | ~np.isfinite(reads)
        empty = ~strange & (reads == 0)
        self.left_out[at] += np.stack([empty.sum(0), strange.sum(0)], -1)
        token, head = np.nonzero(~(empty | strange))
        places = (head, _bin(rho[token, head], RHO), _bin(reads[token, head], READ))
        np.add.at(self.joint_n[at], places, 1)
        np.add.at(self.joint_sum[at], places, log[token, head])

    def table(self) -> xr.Dataset:
        """``VARIABLES``: without a token that has another behind it nothing of transitions, without a direction no joint."""
        x = self.logs
        found: dict[str, object] = {"growth_starts": (~np.isnan(x)).any((2, 3, 4)).sum(-1)}
        if self.starts:
            found |= {"growth": quantiles(x), "growth_layer": quantiles(np.concatenate([*np.moveaxis(x, 1, 0)], -1))}
            counts = {"growth_n": ~np.isnan(x), "growth_above": x > ROUNDING, "growth_zero": np.isneginf(x)}
            found |= {name: counted.sum(-1) for name, counted in counts.items()}
        norms = {"norm_mean": self.norms.mean, "norm_variance": self.norms.variance, "norm_n": self.norms.n}
        found |= {name: np.moveaxis(values, -1, 1) for name, values in norms.items()}
        if len(self.gates) > 1:
            found |= {"edit_growth": self.edit_sum, "edit_growth_max": self.edit_max, "edit_growth_n": self.edit_n}
            found |= {"joint_n": self.joint_n, "joint_growth": self.joint_sum, "joint_left_out": self.left_out}
        coords: dict[str, object] = {
            "growth_of": [*MEASURES],
            "gates": [*self.gates],
            "window": self.windows,
            "growth_level": [*LEVELS],
            "norm_position": MARK * (1 + np.arange(self.norms.n.shape[2])),
            "rho_bin": (RHO[1:] + RHO[:-1]) / 2,
            "read_bin": np.sqrt(READ[1:] * READ[:-1]),
            "left_out": [*LEFT_OUT],
        }
        used = {dim for name in found for dim in VARIABLES[name].dims}
        return table(VARIABLES, found, {name: labels for name, labels in coords.items() if name in used}, {})


def quantiles(x: Array) -> Array:
    """``LEVELS`` along the last axis, each the smallest value with at least that share at or below it; NaN is left out."""
    n = (~np.isnan(x)).sum(-1, keepdims=True)
    at = np.maximum(np.ceil(np.array(LEVELS) * n).astype(int) - 1, 0)
    return np.take_along_axis(np.sort(x, -1), at, -1)


def _bin(x: Array, edges: Array) -> NDArray[np.intp]:
    return np.clip(np.searchsorted(edges, x, "right") - 1, 0, len(edges) - 2)
