"""Strict recall: what the memory returns, Δ tokens later, to the key that something was written with.

A token t writes u_t at k_t, and the memory should give v_t back (w⊙v_t where the write has a gate of channels)::

    r = S_{t+Δ}ᵀk_t      gain Σ⟨r, v⟩/Σ‖v‖²      residual √(Σ‖r − v⟨r, v⟩/‖v‖²‖² / Σ‖v‖²)

Of the gain the own-write part k_tᵀΦk_t⟨u_t, v_t⟩/‖v_t‖² is what is left of the token's own write after all edits since, Φ the
product of their transitions, those of the token itself that come after its write among them; the rest are other tokens' writes.
The null has another token's v, of the same prompt and head. A key that a later edit, in (t, t + Δ], came within |cos| > 0.9 of is
rewritten: what it holds may be meant to be gone, and it is counted apart. Source: this package; EDA (arXiv 2606.26560, p. 9 and
Sec. 6) says of such a probe that KDA is better at it, and shows no curve.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.memory import rereading
from qed_probe.memory.passes import Array, over, written
from qed_probe.memory.rereading import target
from qed_probe.memory.subject import Subject, lag_bins
from qed_probe.replays.directions import derangement
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store import whole
from qed_probe.store.schema import Variable

KEYS = ("all", "kept", "rewritten")
CURVES = ("own", "own kept", "decay")

_PLACE = ("layer", "head", "recall_keys", "recall_lag")
_RATIOS = (
    ("gain", "what the key still finds of its value", "Σ⟨S_{t+Δ}ᵀk_t, v_t⟩/Σ‖v_t‖²"),
    ("residual", "what the key finds across its value", "√(Σ‖S_{t+Δ}ᵀk_t − v_t⟨S_{t+Δ}ᵀk_t, v_t⟩/‖v_t‖²‖²/Σ‖v_t‖²)"),
    ("relative", "gain over that of the same tokens at lag 0", "Σ⟨S_{t+Δ}ᵀk_t, v_t⟩/Σ⟨S_tᵀk_t, v_t⟩"),
    ("residual_relative", "residual over that of the same tokens at lag 0", "residual(Δ)/residual(0)"),
    ("own", "part of the gain that is left of the own write", "Σk_tᵀΦ_{t+Δ,t}k_t⟨u_t, v_t⟩/Σ‖v_t‖²"),
    ("null", "gain of another token's value", "Σ⟨S_{t+Δ}ᵀk_t, v_s⟩/Σ‖v_s‖², s ≠ t of the same prompt"),
)
_COUNTS = (("n", "tokens with a token so much later"), ("null_n", "of these, those whose prompt has another token"))
_PARTS = ("n", "null_n", "target", "found", "across", "start", "start_across", "own", "null", "null_target")
"""What is summed over tokens."""

VARIABLES = {
    row.name: row
    for where, dims in (("", _PLACE), ("layer_", (_PLACE[0], *_PLACE[2:])))
    for row in (
        *(Variable(f"{where}recall_{name}", dims, "int64", "count", words) for name, words in _COUNTS),
        *(Variable(f"{where}recall_{name}", dims, "float64", "1", words, formula) for name, words, formula in _RATIOS),
    )
} | {
    row.name: row
    for row in (
        Variable(
            "own_left", _PLACE, "float64", "1", "what is left of a write",
            "mean over prompts of median k_tᵀΦ_{t+Δ,t}k_t/‖k_t‖²",
        ),
        Variable(
            "decay_left", (*_PLACE[:2], "recall_lag"), "float64", "1", "what decay alone would leave of a write",
            "mean over prompts of median Σ_c k_c² exp(Σ g_c)/‖k‖²",
        ),
        Variable(
            "write_half_life", (*_PLACE[:2], "recall_curve"), "float64", "token",
            "first lag at which half of a write is left", "of own_left and decay_left, between lags along ln(1 + Δ)",
        ),
        Variable("half_life_censored", (*_PLACE[:2], "recall_curve"), "bool", "1", "more than half is left at the last lag"),
        Variable("zero_targets", _PLACE[:2], "int64", "count", "tokens that write 0, of which the gain knows nothing", "‖v‖ = 0"),
        Variable("zero_keys", _PLACE[:2], "int64", "count", "tokens with the key 0, left out of own_left", "‖k‖ = 0"),
    )
}  # fmt: skip


def _others(layer: LayerInputs) -> NDArray[np.int64]:
    """Another token of its prompt for each token, itself where there is no other."""
    return np.concatenate([
        begin + (derangement(np.random.default_rng([4, layer.index, prompt]), end - begin) if end - begin > 1 else np.arange(1))
        for (begin, end), prompt in zip(itertools.pairwise(layer.ends), layer.prompts, strict=True)
    ])  # fmt: skip


class Recall:
    """Gain, residual, null and own-write part against lag, of kept and of rewritten keys, and the half-lives of writes."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.lags = lag_bins(max(subject.lengths) - 1)
        place = len(subject.layers), subject.heads
        self.sums = {name: np.zeros((*place, 2, len(self.lags))) for name in _PARTS}
        self.left, self.prompts = np.zeros((2, *place, 1 + len(KEYS), len(self.lags)))
        self.zero_targets, self.zero_keys = np.zeros((2, *place), np.int64)

    def add(self, layer: LayerInputs) -> None:
        """Reread every key of these prompts at every lag."""
        left, rewritten, v = rereading.tokens_left(layer), rereading.rewritten_after(layer), target(layer)
        lags = [int(lag) for lag in self.lags if lag <= int(left.max())]
        order = torch.from_numpy(_others(layer)).to(left.device)
        read, own = rereading.reread(layer, lags, v[order]), rereading.own_write(layer, lags)
        decayed, size, key = rereading.decayed_write(layer, lags), v.square().sum(-1), rereading.key(layer).square().sum(-1)
        alone = (order == torch.arange(len(order), device=order.device))[:, None]
        share = torch.linalg.vecdot(layer.edits.u[0, ..., written(layer), :], v)
        one = torch.ones_like(size)
        at = self.subject.at(layer)
        self.zero_targets[at] += (size == 0).sum(0).cpu().numpy()
        self.zero_keys[at] += (key == 0).sum(0).cpu().numpy()
        for i, lag in enumerate(lags):
            there, again = (left >= lag)[:, None], rewritten <= lag
            with_other = torch.where(alone, 0, one)
            parts = {
                "n": one, "null_n": with_other, "target": size, "found": read.found[i], "across": read.across[i],
                "start": read.found[0], "start_across": read.across[0], "own": own[i] * share,
                "null": read.null[i] * with_other, "null_target": size[order] * with_other,
            }  # fmt: skip
            for name, x in parts.items():
                both = torch.stack([x.where(there & ~again, 0), x.where(there & again, 0)])
                self.sums[name][at, ..., i] += both.sum(1, dtype=torch.float64).T.cpu().numpy()
            known = there & (key > 0)
            fractions = torch.stack([own[i], own[i], own[i], decayed[i]]) / key.where(key > 0, 1)
            self._median(at, i, layer.ends, fractions, torch.stack([known, known & ~again, known & again, known]))

    def _median(self, at: int, lag: int, ends: Sequence[int], fractions: Tensor, known: Tensor) -> None:
        """Add each prompt's median of what is ``known`` of the fractions ``[1 + KEYS, T, H]``."""
        some = fractions.where(known, torch.nan).double()
        for begin, end in itertools.pairwise(ends):
            median = some[:, begin:end].nanquantile(0.5, 1).T.cpu().numpy()
            self.prompts[at, ..., lag] += np.isfinite(median)
            self.left[at, ..., lag] += np.nan_to_num(median)

    def table(self) -> xr.Dataset:
        """``VARIABLES``, by head and of all heads of a layer together."""
        columns = {f"recall_{name}": x for name, x in _ratios(self.sums).items()}
        columns |= {f"layer_recall_{name}": x for name, x in _ratios({k: x.sum(1) for k, x in self.sums.items()}).items()}
        left = over(self.left, self.prompts)
        half, censored = half_life(left[:, :, [0, 1, 3]], self.lags)
        columns |= {"own_left": left[:, :, :3], "decay_left": left[:, :, 3], "write_half_life": half}
        columns |= {"half_life_censored": censored, "zero_targets": self.zero_targets, "zero_keys": self.zero_keys}
        coords = {"recall_keys": [*KEYS], "recall_lag": self.lags, "recall_curve": [*CURVES]}
        return whole.table(VARIABLES, columns, coords, {})


def _ratios(sums: dict[str, Array]) -> dict[str, NDArray[np.generic]]:
    """Counts and ratios of sums over kept and rewritten tokens, and over both."""
    x = {name: np.concatenate([part.sum(-2, keepdims=True), part], -2) for name, part in sums.items()}
    return {
        "n": x["n"].astype(np.int64),
        "null_n": x["null_n"].astype(np.int64),
        "gain": over(x["found"], x["target"]),
        "residual": np.sqrt(over(x["across"], x["target"])),
        "relative": over(x["found"], x["start"]),
        "residual_relative": np.sqrt(over(x["across"], x["start_across"])),
        "own": over(x["own"], x["target"]),
        "null": over(x["null"], x["null_target"]),
    }


def half_life(curves: Array, lags: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_]]:
    """The first lag at which ``curves`` ``[..., L]`` are at half of what they begin with, and whether they never are.

    Between lags the curve is a line along ln(1 + Δ). A curve may end, in NaN, before the last lag; one that never is at a half
    has the last lag at which it is known, one that is nowhere known NaN.
    """
    half, along = curves[..., :1] / 2, np.log1p(lags)
    crossed = curves <= half
    last = np.isfinite(curves).sum(-1) - 1
    at = np.where(crossed.any(-1), crossed.argmax(-1), last)
    before = np.maximum(at - 1, 0)
    high, low = (np.take_along_axis(curves, i[..., None], -1)[..., 0] for i in (before, np.maximum(at, 0)))
    part = np.clip(over(high - half[..., 0], high - low), 0, 1)
    inside = np.expm1(along[before] + (along[at] - along[before]) * part)
    found = np.where(crossed.any(-1) & (at > 0), inside, lags[at])
    return np.where(last >= 0, found, np.nan), ~crossed.any(-1) & (last >= 0)
