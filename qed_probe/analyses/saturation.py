"""How often gates stand at the ends of their range, and how fast channels decay."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, label_folded, mean
from qed_probe.analyses.inputs import fold_inputs
from qed_probe.kernels import MIXERS

INPUTS = ("g",)
GATES = ("b", "w", "beta", "gamma")
NEAR = 0.01
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 4096
LOWER_BOUND = -5.0
"""EDA's ℓ, of traces that do not say theirs."""

FIELDS: dict[str, Field] = {
    "near_zero": (("gate", "layer", "head"), "1", "share of a gate's values up to 0.01"),
    "near_one": (("gate", "layer", "head"), "1", "share of a gate's values from 0.01 below its upper end"),
    "gate_n": (("gate", "layer", "head"), "count", "values of the gate: tokens times channels"),
    "at_floor": (("layer", "head"), "1", "share of g within 1 % of the safe gate's lower bound ℓ"),
    "kept_quantile": (("level", "layer", "head"), "1", "quantiles of exp g over tokens and channels"),
    "kept_min": (("layer", "head"), "1", "smallest exp g"),
    "kept_max": (("layer", "head"), "1", "largest exp g"),
    "n": (("layer", "head"), "count", "values of g: tokens times channels"),
}


def gate_saturation(ds: xr.Dataset, inputs: xr.Dataset) -> xr.Dataset:
    """Shares of values near the ends of b, w, β and γ and at the safe gate's floor, and quantiles of exp g, by layer and head.

    Over tokens and channels, of the gates that the mixer has. Near 0 is up to 0.01; near one from 0.01 below the upper end, which
    is ``gate_max`` of b and β and 1 of w and γ. ``at_floor``, of mixers with EDA's safe gate g = ℓ + |ℓ| exp(…) alone, counts
    g ≤ 0.99 ℓ, with ℓ the trace's ``lower_bound``, else −5. Quantiles are right to 1/8192 and shares are exact; values that are
    no number are left out, and counted. Needs the input ``g`` (−∞ is a number: exp g = 0). Raises StoreError if it is not there.
    Source: EDA arXiv 2606.26560, Eq. 14–15.
    """
    row, heads = MIXERS[ds.attrs["mixer"]], ds.sizes["head"]
    gates = [name for name in GATES if name in inputs]
    top = [float(ds.attrs["gate_max"]) if name in ("b", "beta") else 1.0 for name in gates]
    floor = float(ds.attrs.get("lower_bound", LOWER_BOUND))
    names = [*INPUTS, *gates]
    folded = fold_inputs(
        ds, inputs, names, lambda _: lambda _, x: _decay(x["g"], floor) | _gates([x[k] for k in gates], top, heads)
    )
    n, low, high = folded["n"], folded["kept_min"], folded["kept_max"]
    values = {"n": n, "kept_min": np.where(n > 0, low, np.nan), "kept_max": np.where(n > 0, high, np.nan)}
    quantiles = np.stack([linear_quantile(folded["counts"], level) for level in LEVELS])
    values["kept_quantile"] = np.clip(quantiles, values["kept_min"], values["kept_max"])
    if row.decay == "safe":
        values["at_floor"] = mean(folded["floor"], n)
    if gates:
        counted = {name: folded[name].swapaxes(0, 1) for name in ("gate_n", "near_zero", "near_one")}
        values["gate_n"] = counted["gate_n"]
        values |= {name: mean(counted[name], counted["gate_n"]) for name in ("near_zero", "near_one")}
    return label_folded(
        ds,
        names,
        folded,
        values,
        FIELDS,
        {"gate": gates, "level": list(LEVELS)},
        lower_bound=floor,
        gate_max=float(ds.attrs["gate_max"]),
    )


def linear_quantile(counts: Array, level: float) -> Array:
    """The centre of the bin of [0, 1] ``[..., bin]`` below or in which this part of the values lies; NaN of none."""
    total = counts.sum(-1)
    place = (counts.cumsum(-1) >= level * total[..., None]).argmax(-1)
    return np.where(total > 0, (place + 0.5) / counts.shape[-1], np.nan)


def _decay(g: Array, floor: float) -> dict[str, Array]:
    """What is counted of g ``[token, head, key]``, by head."""
    good = ~np.isnan(g) & (g < np.inf)
    kept = np.exp(np.where(good, g, 0))
    heads = g.shape[1]
    place = np.minimum(kept * BINS, BINS - 1).astype(np.int64) + BINS * np.arange(heads)[:, None]
    return {
        "n": good.sum((0, 2)),
        "floor": (good & (g <= 0.99 * floor)).sum((0, 2)),
        "kept_min": np.where(good, kept, np.inf).min((0, 2)).astype(np.float64),
        "kept_max": np.where(good, kept, -np.inf).max((0, 2)).astype(np.float64),
        "counts": np.bincount(place[good], minlength=heads * BINS).reshape(heads, BINS),
    }


def _gates(gates: list[Array], top: list[float], heads: int) -> dict[str, Array]:
    """What is counted of each gate ``[token, head, ...]``, by gate and head."""
    if not gates:
        return {}
    flat = [x.swapaxes(0, 1).reshape(heads, -1) for x in gates]
    return {
        "gate_n": np.stack([np.isfinite(x).sum(1) for x in flat]),
        "near_zero": np.stack([(np.isfinite(x) & (x <= NEAR)).sum(1) for x in flat]),
        "near_one": np.stack([(np.isfinite(x) & (x >= end - NEAR)).sum(1) for x, end in zip(flat, top, strict=True)]),
    }
