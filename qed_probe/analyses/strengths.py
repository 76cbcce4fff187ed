"""What scaling every λ of a trained model does to its answers (QED, arXiv 2608.13668, Sec. 5.3 and Table 4)."""

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.accuracy import shares
from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import RUN, check_pairs, judged, of_run
from qed_probe.analyses.statistics import holm, mcnemar, page
from qed_probe.errors import StoreError


def strengths(outcomes: xr.Dataset) -> xr.Dataset:
    """Accuracy of each run by length and strength s, against s = 1 of the same samples, and whether it rises with s.

    Dims ``run``, ``length``, ``strength``: ``correct``, ``samples``, ``accuracy``, ``low``, ``high`` as in ``accuracy``;
    ``gained`` and ``lost``, the samples that are right at s and not at 1 and the other way; ``p``, exact McNemar's of these, and
    ``p_holm``, adjusted over all s ≠ 1 and lengths of the run. Dims run and length: ``page_z`` and ``page_p``, one-sided, of
    Page's test that answers get better as s grows. Raises
    StoreError if a run lacks s = 1 or has no other, or its samples differ between strengths.
    """
    frame = judged(outcomes)
    runs = frame.drop_duplicates([*RUN])[[*RUN]].sort_values(["arm", "seed", "task"], ignore_index=True)
    factors, lengths = np.sort(frame["strength"].unique()), np.sort(frame["length"].unique())
    if len(factors) < 2 or 1 not in factors:
        raise StoreError(f"expected outcomes at strength 1 and others, found {', '.join(f'{s:g}' for s in factors)}")
    right = [_right(frame.merge(runs.iloc[[row]]), lengths, factors) for row in range(len(runs))]
    dims = ("run", "length", "strength")
    counts = np.array([[[column.sum() for column in part.T] for part in of_length] for of_length in right])
    n = np.array([[[len(part)] * len(factors) for part in of_length] for of_length in right])
    coords = {name: ("run", runs[name].to_numpy()) for name in RUN}
    ds = shares(counts, n, dims, coords | {"length": ("length", lengths), "strength": ("strength", factors)})
    usual = int(np.flatnonzero(factors == 1)[0])
    gained = np.array([[(part & ~part[:, [usual]]).sum(0) for part in of_length] for of_length in right])
    lost = np.array([[(~part & part[:, [usual]]).sum(0) for part in of_length] for of_length in right])
    p = np.where(factors == 1, np.nan, mcnemar(gained, lost))
    tests = [[page(part) for part in of_length] for of_length in right]
    ds = ds.assign(gained=(dims, gained), lost=(dims, lost), p=(dims, p), p_holm=(dims, np.stack([holm(x) for x in p])))
    found = {name: [[getattr(test, name) for test in row] for row in tests] for name in ("z", "p")}
    return ds.assign(page_z=(("run", "length"), found["z"]), page_p=(("run", "length"), found["p"]))


def _right(run: pd.DataFrame, lengths: Array, factors: Array) -> list[Array]:
    """By length, which of a run's samples are right at each strength, ``[n, strength]`` bool."""
    arm, seed = run["arm"].iloc[0], int(run["seed"].iloc[0])
    parts = {float(s): of_run(run[run["strength"] == s], arm, seed) for s in factors}
    for s, part in parts.items():
        check_pairs(parts[1.0], part, (f"{arm} seed {seed} at strength 1", f"at strength {s:g}"))
    return [np.stack([part.loc[length, "correct"].to_numpy() for part in parts.values()], 1) for length in lengths]
