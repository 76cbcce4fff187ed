"""Which heads carry an answer: what changing one head at a time does to it."""

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from qed_probe.analyses.blocks import Array
from qed_probe.analyses.changes import effects
from qed_probe.analyses.runs import judged, unchanged
from qed_probe.errors import StoreError

WAY = ["strength", "direction", "phase", "mode"]
KEPT = ("difference", "low", "high", "p", "gained", "lost", "samples")


def head_effects(outcomes: xr.Dataset) -> xr.Dataset:
    """What a change of one head does to the answer's log-probability, sample by sample against the model as it is.

    Dims ``run``, ``length``, ``layer``, ``head``: ``difference``, ``low``, ``high``, ``p``, ``gained``, ``lost`` and ``samples``
    as ``change_effects`` has them, and ``p_fdr``, p adjusted over the heads of a run and length by Benjamini and Hochberg. NaN
    and 0 where a head was not changed. Attributes ``strength``, ``direction``, ``phase`` and ``mode`` say what was done.
    Raises StoreError if no head was changed alone, heads were changed in several ways, or samples differ.
    """
    frame = judged(outcomes)
    alone = one_head(frame)
    if alone.empty:
        raise StoreError("expected outcomes with one head changed at a time, found none")
    ways = alone[WAY].drop_duplicates()
    if len(ways) > 1:
        raise StoreError(f"expected heads changed in one way, found {ways.to_dict('records')[:2]}")
    found = effects(frame, alone)
    layers, heads = np.array([[int(x) for x in str(at).split(":")] for at in found["at"].values]).T
    ds = found.drop_dims("change")
    for name in KEPT:
        x = found[name].values
        cells = np.full((*x.shape[:2], layers.max() + 1, heads.max() + 1), 0 if x.dtype.kind == "i" else np.nan, x.dtype)
        cells[:, :, layers, heads] = x
        ds[name] = ("run", "length", "layer", "head"), cells, found[name].attrs
    ds["p_fdr"] = ds["p"].dims, controlled(ds["p"].values)
    return ds.assign_attrs({name: ways[name].iloc[0] for name in WAY})


def one_head(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows in which a single head was changed."""
    changed = frame.drop(unchanged(frame).index)
    return changed[changed["at"].str.fullmatch(r"\d+:\d+")]


def controlled(p: Array) -> Array:
    """P values ``[a, b, layer, head]`` adjusted over layer and head by Benjamini and Hochberg; NaN is left out."""
    adjusted = p.copy()
    for row in np.ndindex(p.shape[:2]):
        known = np.isfinite(p[row])
        if known.any():
            adjusted[row][known] = stats.false_discovery_control(p[row][known])
    return adjusted
