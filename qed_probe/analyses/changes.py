"""What changes of a model do to its answers, each against the model as it is."""

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import RUN, check_pairs, judged, of_run, trained, unchanged
from qed_probe.analyses.statistics import holm, mcnemar, mean_interval
from qed_probe.errors import StoreError

CHANGE = ("strength", "direction", "at", "phase", "mode")
SHARES = ("difference", "low", "high", "p", "accuracy", "usual")
COUNTS = ("gained", "lost", "samples")


def change_effects(outcomes: xr.Dataset) -> xr.Dataset:
    """What each change does to the answer's log-probability and to accuracy, sample by sample against the model as it is.

    Dims ``run``, ``length``, ``change``, the last labelled by strength, direction, at, phase and mode: ``difference``, the mean
    over samples of ln p(answer) with the change minus ln p without it, in nats; ``low`` and ``high``, Student's 95 % interval;
    ``p`` of the paired t test; ``accuracy`` with the change and ``usual`` without; ``gained`` and ``lost``, samples that only the
    changed, only the usual model got right; ``p_holm``, exact McNemar's of these, adjusted over the changes and lengths of a run;
    ``samples``. NaN and 0 where a run was not changed so. Raises StoreError if nothing was changed, or samples differ.
    """
    frame = judged(outcomes)
    changed = frame.drop(unchanged(frame).index)
    if changed.empty:
        raise StoreError("expected outcomes of a changed model, found none")
    ds = effects(frame, changed)
    p = np.where(ds["samples"] > 0, mcnemar(ds["gained"], ds["lost"]), np.nan)
    return ds.assign(p_holm=(ds["gained"].dims, np.stack([holm(x) for x in p])))


def effects(frame: pd.DataFrame, changed: pd.DataFrame) -> xr.Dataset:
    """``change_effects`` of these rows of the frame, without ``p_holm``."""
    ways = changed[[*CHANGE]].drop_duplicates().set_index([*CHANGE])
    runs = [run for _, run in changed.groupby([*RUN], dropna=False)]
    lengths = np.sort(changed["length"].unique())
    shape = len(runs), len(lengths), len(ways)
    values = {name: np.full(shape, np.nan) for name in SHARES} | {name: np.zeros(shape, np.int64) for name in COUNTS}
    for row, run in enumerate(runs):
        usual = unchanged(frame.merge(run[[*RUN]].drop_duplicates()))
        for way, mine in run.groupby([*CHANGE]):
            column = ways.index.get_loc(way)
            for length, found in paired(mine, usual).items():
                cell = row, int(np.searchsorted(lengths, length)), column
                for name, x in found.items():
                    values[name][cell] = x
    dims = "run", "length", "change"
    coords = {name: ("run", np.array([run[name].iloc[0] for run in runs])) for name in RUN}
    coords |= {name: ("change", ways.index.get_level_values(name).to_numpy()) for name in CHANGE} | {
        "length": ("length", lengths)
    }
    ds = xr.Dataset({name: (dims, x) for name, x in values.items()}, coords, {"trained_length": trained(changed)})
    ds["difference"].attrs = {"units": "nat", "long_name": "change of ln p(answer)"}
    return ds


def paired(changed: pd.DataFrame, usual: pd.DataFrame) -> dict[int, dict[str, float]]:
    """By length what one change of a run does."""
    arm, seed, strength, direction, at, mode = changed[["arm", "seed", "strength", "direction", "at", "mode"]].iloc[0]
    mine, base = of_run(changed, arm, seed), of_run(usual, arm, seed)
    way = f"strength {strength:g}" + f", direction {direction}" * (direction != "own") + f", mode {mode}" * (mode != "full")
    way += f" at {at}" * (at != "all")
    check_pairs(mine, base, (f"{arm} seed {seed} with {way}", "as it is"))
    found = {}
    for length in mine.index.unique("length"):
        one, other = mine.loc[length], base.loc[length]
        size = one["answer"].str.len().to_numpy()
        right, before = one["correct"].to_numpy(), other["correct"].to_numpy()
        found[int(length)] = paired_interval(size * (other["answer_loss"] - one["answer_loss"]).to_numpy()) | {
            "accuracy": right.mean(),
            "usual": before.mean(),
            "gained": (right & ~before).sum(),
            "lost": (~right & before).sum(),
            "samples": len(one),
        }
    return found


def paired_interval(x: Array) -> dict[str, float]:
    """Mean, interval and p of paired differences; p is 1 where all are 0, and 0 where all are the same otherwise."""
    if len(x) < 2:
        return {"difference": float(x.mean())}
    middle, low, high = mean_interval(x)
    error = stats.sem(x)
    t = middle / error if error > 0 else np.inf
    return {"difference": middle, "low": low, "high": high, "p": float(2 * stats.t.sf(abs(t), len(x) - 1)) if middle else 1.0}
