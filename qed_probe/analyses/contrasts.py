"""Differences between arms, seeds kept apart: the panels of QED's Figure 2 (arXiv 2608.13668), and the one it could not draw."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import check_pairs, judged, learned, of_run, one_task, trained, unchanged
from qed_probe.analyses.statistics import mcnemar, mean_interval, seeds_needed
from qed_probe.errors import InputError, StoreError

PANELS = (
    ("qed", "gdn2"),
    ("qed", "qed-rand"),
    ("qed", "qed-nogate"),
    ("qed-nogate", "qed-nogate-noproj"),
    ("qed", "qed-noproj"),
)
"""The whole mechanism, its direction, gate and projection without the gate, and projection with the gate, which no paper has."""
SEEDS = 4
"""From this many seeds on there is an interval over them."""
POINTS = 10.0
"""The difference, in percentage points, for which it is said how many seeds would find it."""


def contrast(
    outcomes: xr.Dataset, pairs: Sequence[tuple[str, str]] = PANELS, *, task: str | None = None, only_learned: bool = False
) -> xr.Dataset:
    """How many percentage points one arm's accuracy lies above another's, for each length and seed, at strength 1.

    Dims ``panel`` (labelled "qed − gdn2"), ``seed``, ``length`` (tokens): ``difference``, NaN where one of the two was not
    trained; ``gained`` and ``lost``, samples that the first alone and the second alone got right; ``p``, exact McNemar's of
    these: it compares two checkpoints, not two mechanisms. Dims panel, length: ``mean``, ``low``, ``high``, with Student's
    95 % interval over the seeds, from 4 on, NaN below; ``seeds``, how many; ``deviation``, the standard deviation between them,
    and ``needed``, with how many a difference of 10 points would be found four times in five (``seeds_needed``), NaN and 0 below
    4. Attributes say which seeds of an arm had no partner, and that ``only_learned`` leaves out pairs of which one had not
    learned the task in training, which is a selection.

    Raises InputError for no pairs, a pair of equal arms or an unknown task, StoreError for an arm that is missing, arms that
    share no seed that is known, and pairs that did not answer the same samples.
    """
    frame = one_task(judged(outcomes), task)
    frame = unchanged(frame)
    _check_pairs(frame, pairs, "outcomes at strength 1")
    if only_learned:
        frame = frame[learned(frame)]
        _check_pairs(frame, pairs, "runs that are known to have learned the task")
    seeds, lengths = np.unique(np.concatenate([_common(frame, *pair) for pair in pairs])), np.sort(frame["length"].unique())
    shape = (len(pairs), len(seeds), len(lengths))
    difference, gained, lost = np.full(shape, np.nan), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    n = np.zeros(shape, np.int64)
    for at, (first, second) in enumerate(pairs):
        for seed in _common(frame, first, second):
            row = at, int(np.searchsorted(seeds, seed))
            for length, (plus, minus, count) in _paired(frame, first, second, seed).items():
                cell = *row, int(np.searchsorted(lengths, length))
                gained[cell], lost[cell], n[cell] = plus, minus, count
                difference[cell] = 100 * (plus - minus) / count
    dims = ("panel", "seed", "length")
    ds = xr.Dataset(
        {
            "difference": (dims, difference, {"units": "percentage points"}),
            "gained": (dims, gained),
            "lost": (dims, lost),
            "samples": (dims, n),
            "p": (dims, np.where(n > 0, mcnemar(gained, lost), np.nan)),
        },
        {"panel": [f"{first} − {second}" for first, second in pairs], "seed": seeds, "length": lengths},
        {
            "task": str(frame["task"].iloc[0]),
            "trained_length": trained(frame),
            "selection": "pairs of which both learned the task" if only_learned else "all pairs",
            "unpaired": "; ".join(filter(None, (_unpaired(frame, *pair) for pair in pairs))),
        },
    )
    return ds.merge(over_seeds(ds["difference"]), combine_attrs="override")


def over_seeds(difference: xr.DataArray) -> xr.Dataset:
    """What ``contrast`` gives over the seeds, ``[panel, length]`` each, of differences ``[panel, seed, length]``."""
    x = difference.transpose("panel", "seed", "length").values
    known = np.isfinite(x)
    found = np.full((4, x.shape[0], x.shape[2]), np.nan)
    for panel, length in np.ndindex(x.shape[0], x.shape[2]):
        values = x[panel, known[panel, :, length], length]
        if len(values) >= SEEDS:
            found[:, panel, length] = *mean_interval(values), values.std(ddof=1)
    dims, units = ("panel", "length"), {"units": "percentage points"}
    names = ("mean", "low", "high", "deviation")
    return xr.Dataset({name: (dims, part, units) for name, part in zip(names, found, strict=True)}).assign(
        seeds=(dims, known.sum(1)), needed=(dims, seeds_needed(found[3], POINTS))
    )


def _paired(frame: pd.DataFrame, first: str, second: str, seed: int) -> dict[int, tuple[int, int, int]]:
    """Of each length: samples that the first alone got right, that the second alone did, and how many there are."""
    mine, theirs = of_run(frame, first, seed), of_run(frame, second, seed)
    check_pairs(mine, theirs, (f"{first} seed {seed}", f"{second} seed {seed}"))
    found = {}
    for length in mine.index.unique("length"):
        one, other = (run.loc[length, "correct"].to_numpy() for run in (mine, theirs))
        found[int(length)] = int((one & ~other).sum()), int((~one & other).sum()), len(one)
    return found


def _check_pairs(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], what: str) -> None:
    if not pairs:
        raise InputError("pairs: expected at least one, found none")
    there = sorted(frame["arm"].unique())
    for pair in pairs:
        if pair[0] == pair[1]:
            raise InputError(f"pair: expected two arms that differ, found {pair[0]} twice")
        missing = [arm for arm in pair if arm not in there]
        if missing:
            raise StoreError(f"expected {what} of {pair[0]} and {pair[1]}, found {', '.join(there) or 'none'}")
        if not len(_common(frame, *pair)):
            raise StoreError(f"expected {what} of a seed that {pair[0]} and {pair[1]} share, found {_seeds(frame, *pair)}")


def _common(frame: pd.DataFrame, first: str, second: str) -> Array:
    """Seeds that both arms have; those that are unknown are not the same."""
    mine, theirs = (frame.loc[(frame["arm"] == arm) & (frame["seed"] >= 0), "seed"].to_numpy() for arm in (first, second))
    return np.intersect1d(mine, theirs)


def _unpaired(frame: pd.DataFrame, first: str, second: str) -> str:
    """Seeds of either arm that the other lacks."""
    alone = {arm: {*frame.loc[frame["arm"] == arm, "seed"]} - {*_common(frame, first, second)} for arm in (first, second)}
    parts = [f"{arm} seed {_listed(seeds)}" for arm, seeds in alone.items() if seeds]
    return f"without a partner in {first} − {second}: {' and '.join(parts)}" if parts else ""


def _seeds(frame: pd.DataFrame, first: str, second: str) -> str:
    return " and ".join(f"{_listed(frame.loc[frame['arm'] == arm, 'seed'].unique())} of {arm}" for arm in (first, second))


def _listed(seeds: Iterable[int]) -> str:
    return ", ".join(str(seed) if seed >= 0 else "unknown" for seed in sorted(seeds))
