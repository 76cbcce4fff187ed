"""Which heads carry an answer: what changing one head at a time does to it."""

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import RUN, check_pairs, judged, of_run, trained, unchanged
from qed_probe.analyses.statistics import mean_interval
from qed_probe.errors import StoreError

CHANGE = ["strength", "direction", "phase", "mode"]


def head_effects(outcomes: xr.Dataset) -> xr.Dataset:
    """What a change of one head does to the answer's log-probability, sample by sample against the model as it is.

    Dims ``run``, ``length``, ``layer``, ``head``: ``difference``, the mean over samples of ln p(answer) with the change minus
    ln p without it, in nats; ``low`` and ``high``, Student's 95 % interval; ``p`` of the paired t test and ``p_fdr``, adjusted
    over the heads of a run and length by Benjamini and Hochberg; ``gained`` and ``lost``, samples that only the changed, only
    the usual model got right; ``samples``. NaN and 0 where a head was not changed. Attributes ``strength``, ``direction``,
    ``phase`` and ``mode`` say what was done. Raises StoreError if no head was changed alone, heads were changed in several ways,
    or samples differ.
    """
    frame = judged(outcomes)
    alone = frame[frame["at"].str.fullmatch(r"\d+:\d+")]
    if alone.empty:
        raise StoreError("expected outcomes with one head changed at a time, found none")
    ways = alone[CHANGE].drop_duplicates()
    if len(ways) > 1:
        raise StoreError(f"expected heads changed in one way, found {ways.to_dict('records')[:2]}")
    keys = [key for key, _ in alone.groupby([*RUN], dropna=False)]
    places = np.array([[int(x) for x in at.split(":")] for at in alone["at"].unique()])
    lengths = np.sort(alone["length"].unique())
    shape = (len(keys), len(lengths), *(places.max(0) + 1))
    values = {name: np.full(shape, np.nan) for name in ("difference", "low", "high", "p")}
    counts = {name: np.zeros(shape, np.int64) for name in ("gained", "lost", "samples")}
    for row, (_, run) in enumerate(alone.groupby([*RUN], dropna=False)):
        usual = unchanged(frame.merge(run[[*RUN]].drop_duplicates()))
        for at, changed in run.groupby("at"):
            layer, head = map(int, str(at).split(":"))
            for length, found in effects(changed, usual, f"with head {at} changed").items():
                cell = row, int(np.searchsorted(lengths, length)), layer, head
                for name, x in found.items():
                    (values if name in values else counts)[name][cell] = x
    dims = ("run", "length", "layer", "head")
    ds = xr.Dataset(
        {name: (dims, x) for name, x in (values | counts).items()},
        {name: ("run", [key[i] for key in keys]) for i, name in enumerate(RUN)} | {"length": lengths},
    )
    ds["p_fdr"] = dims, _controlled(values["p"])
    ds["difference"].attrs = {"units": "nat", "long_name": "change of ln p(answer)"}
    return ds.assign_attrs({**{name: ways[name].iloc[0] for name in CHANGE}, "trained_length": trained(alone)})


def effects(changed: pd.DataFrame, usual: pd.DataFrame, how: str) -> dict[int, dict[str, float]]:
    """Of one run by length: change of ln p(answer), its interval and p, and the samples gained and lost; ``how`` names it."""
    arm, seed = changed["arm"].iloc[0], int(changed["seed"].iloc[0])
    mine, base = of_run(changed, arm, seed), of_run(usual, arm, seed)
    check_pairs(mine, base, (f"{arm} seed {seed} {how}", "as it is"))
    found = {}
    for length in mine.index.unique("length"):
        one, other = mine.loc[length], base.loc[length]
        size = one["answer"].str.len().to_numpy()
        x = size * (other["answer_loss"].to_numpy() - one["answer_loss"].to_numpy())
        right, before = one["correct"].to_numpy(), other["correct"].to_numpy()
        found[int(length)] = _interval(x) | {
            "gained": int((right & ~before).sum()),
            "lost": int((~right & before).sum()),
            "samples": len(x),
        }
    return found


def _interval(x: Array) -> dict[str, float]:
    """Mean, interval and p of paired differences; p is 1 where all are 0, and 0 where all are the same otherwise."""
    if len(x) < 2:
        return {"difference": float(x.mean())}
    middle, low, high = mean_interval(x)
    error = stats.sem(x)
    t = middle / error if error > 0 else np.inf
    return {"difference": middle, "low": low, "high": high, "p": float(2 * stats.t.sf(abs(t), len(x) - 1)) if middle else 1.0}


def _controlled(p: Array) -> Array:
    """Adjusted over layer and head; NaN is left out."""
    adjusted = p.copy()
    for row in np.ndindex(p.shape[:2]):
        known = np.isfinite(p[row])
        if known.any():
            adjusted[row][known] = stats.false_discovery_control(p[row][known])
    return adjusted
