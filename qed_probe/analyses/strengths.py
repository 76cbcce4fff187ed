"""What scaling every λ of a trained model does to its answers (QED, arXiv 2608.13668, Sec. 5.3 and Table 4)."""

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.accuracy import shares
from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import RUN, check_pairs, judged, of_run, trained
from qed_probe.analyses.statistics import holm, mcnemar, page
from qed_probe.errors import StoreError


def strengths(outcomes: xr.Dataset) -> xr.Dataset:
    """Accuracy of each run by length and strength s, against s = 1 of the same samples, and whether it rises with s.

    Dims ``run``, ``length``, ``strength``: ``correct``, ``samples``, ``accuracy``, ``low``, ``high`` as in ``accuracy``;
    ``gained`` and ``lost``, the samples that are right at s and not at 1 and the other way; ``p``, exact McNemar's of these,
    and ``p_holm``, adjusted over all s ≠ 1 and lengths of the run. Dims run and length: ``page_z`` and ``page_p``, one-sided,
    of Page's test that answers get better as s grows. What a run was not asked is 0 and NaN; runs at s = 1 alone are left out.
    Raises StoreError if none has another s, if strengths differ in several places or phases, if one lacks s = 1, or if its
    samples differ between strengths.
    """
    frame = _one_way(judged(outcomes))
    runs = [run for _, run in frame.groupby([*RUN], dropna=False) if {*run["strength"]} != {1}]
    if not runs:
        raise StoreError("expected outcomes at strength 1 and others, found 1 alone")
    runs = sorted(runs, key=lambda run: tuple(run[["arm", "seed", "task"]].iloc[0]))
    frame = pd.concat(runs)
    factors, lengths = np.sort(frame["strength"].unique()), np.sort(frame["length"].unique())
    dims, shape = ("run", "length", "strength"), (len(runs), len(lengths), len(factors))
    right, n, gained, lost = (np.zeros(shape, np.int64) for _ in range(4))
    z, p_page = np.full(shape[:2], np.nan), np.full(shape[:2], np.nan)
    for row, run in enumerate(runs):
        there, parts = _right(run)
        for length, part in parts.items():
            cell = row, int(np.searchsorted(lengths, length))
            at, usual = (*cell, np.searchsorted(factors, there)), part[:, there == 1]
            right[at], n[at] = part.sum(0), len(part)
            gained[at], lost[at] = (part & ~usual).sum(0), (~part & usual).sum(0)
            _, z[cell], p_page[cell] = page(part)
    labels = {name: ("run", np.array([run[name].iloc[0] for run in runs])) for name in RUN}
    ds = shares(right, n, dims, labels | {"length": ("length", lengths), "strength": ("strength", factors)})
    p = np.where((factors == 1) | (n == 0), np.nan, mcnemar(gained, lost))
    ds = ds.assign(gained=(dims, gained), lost=(dims, lost), p=(dims, p), p_holm=(dims, np.stack([holm(x) for x in p])))
    return ds.assign(page_z=(dims[:2], z), page_p=(dims[:2], p_page)).assign_attrs(trained_length=trained(frame))


def _one_way(frame: pd.DataFrame) -> pd.DataFrame:
    """The models' own directions, scaled at the same heads and in the same phase."""
    frame = frame[(frame["direction"] == "own") & (frame["mode"] == "full")]
    ways = frame.loc[frame["strength"] != 1, ["at", "phase"]].drop_duplicates()
    if len(ways) > 1:
        found = " and ".join(f"at {way.at}, phase {way.phase}" for way in ways.itertuples() if way.Index in ways.index[:2])
        raise StoreError(f"expected one place and phase in which strengths differ, found {found}")
    return frame


def _right(run: pd.DataFrame) -> tuple[Array, dict[int, Array]]:
    """A run's strengths in order and, by length, which samples are right at each of them, ``[n, strength]`` bool."""
    arm, seed = run["arm"].iloc[0], int(run["seed"].iloc[0])
    there = np.sort(run["strength"].unique())
    if 1 not in there:
        raise StoreError(f"expected {arm} seed {seed} at strength 1 too, found {', '.join(f'{s:g}' for s in there)}")
    parts = {float(s): of_run(run[run["strength"] == s], arm, seed) for s in there}
    for s, part in parts.items():
        check_pairs(parts[1.0], part, (f"{arm} seed {seed} at strength 1", f"at strength {s:g}"))
    lengths = parts[1.0].index.unique("length")
    return there, {
        int(length): np.stack([part.loc[length, "correct"].to_numpy() for part in parts.values()], 1) for length in lengths
    }
