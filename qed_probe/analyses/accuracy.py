"""Accuracy by length, of each run, and how long a context it can be used with."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.blocks import Array
from qed_probe.analyses.runs import RUN, judged, trained, unchanged
from qed_probe.analyses.statistics import binomial_interval
from qed_probe.errors import InputError, StoreError

LEVELS = (0.9, 0.75, 0.5)
BINS = 10


def accuracy(outcomes: xr.Dataset) -> xr.Dataset:
    """The share of right answers of each run and length, at strength 1, with its exact 95 % binomial interval.

    Dims ``run``, labelled by model, arm (with its λ_max if not the usual one), seed, task, trained_length (tokens) and learned_at
    (the training step, 0 never, −1 unknown), and ``length`` (tokens). ``correct`` and ``samples`` are counts, ``accuracy``,
    ``low`` and ``high`` shares; where a run has no samples of a length, 0 and NaN. Raises StoreError as ``judged`` does, and if
    no outcome has strength 1.
    """
    frame = judged(outcomes)
    frame = unchanged(frame)
    if frame.empty:
        raise StoreError("expected outcomes at strength 1, found others alone")
    right, n = _counts(frame, ["length"])
    coords = labels(n) | {"length": ("length", n.columns.get_level_values(0).to_numpy())}
    return shares(right.to_numpy(), n.to_numpy(), ("run", "length"), coords).assign_attrs(trained_length=trained(frame))


def by_depth(outcomes: xr.Dataset, bins: int = BINS) -> xr.Dataset:
    """``accuracy`` by where the needle is: dims run, length and ``bin``, equal shares of the depth from 0 to 1.

    ``bin_start`` and ``bin_end`` are a bin's ends. Raises StoreError also where no depth is known, InputError for no bins.
    """
    if bins < 1:
        raise InputError(f"bins: expected at least 1, found {bins}")
    frame = judged(outcomes)
    frame = unchanged(frame[frame["depth"].notna()])
    if frame.empty:
        raise StoreError("expected outcomes at strength 1 whose depth is known, found none")
    lengths, edges = np.sort(frame["length"].unique()), np.linspace(0, 1, bins + 1)
    frame = frame.assign(bin=np.searchsorted(edges[1:-1], frame["depth"].to_numpy(), side="right"))
    counts = _counts(frame, ["length", "bin"])
    columns = pd.MultiIndex.from_product([lengths, range(bins)])
    right, n = (table.reindex(columns=columns, fill_value=0).to_numpy().reshape(-1, len(lengths), bins) for table in counts)
    coords = {"length": ("length", lengths), "bin_start": ("bin", edges[:-1]), "bin_end": ("bin", edges[1:])}
    return shares(right, n, ("run", "length", "bin"), labels(counts[1]) | coords).assign_attrs(trained_length=trained(frame))


def usable_length(ds: xr.Dataset, levels: Sequence[float] = LEVELS) -> xr.Dataset:
    """L_τ, the length up to which a run's accuracy stays at τ or more: dims ``run`` and ``level`` of what ``accuracy`` gave.

    ``usable`` (tokens) lies where the line through (log length, accuracy) first falls below τ. It is censored where that does
    not happen: ``censored`` is 1 where accuracy stays at τ up to the longest length, which is given, and −1 where it is below τ
    at the shortest, with NaN. A task without a length, 0, has none: NaN, and ``censored`` 0. Raises InputError for a level
    outside (0, 1]. QED's "context about doubles" (Sec. 6) names no threshold.
    """
    if not levels or not all(0 < level <= 1 for level in levels):
        raise InputError(f"levels: expected shares from 0 to 1, found {', '.join(map(str, levels)) or 'none'}")
    found = [[_crossing(ds["length"].values, row, level) for level in levels] for row in ds["accuracy"].values]
    usable = np.array([[length for length, _ in row] for row in found])
    censored = np.array([[how for _, how in row] for row in found])
    return xr.Dataset(
        {
            "usable": (
                ("run", "level"),
                usable,
                {"units": "token", "long_name": "length up to which accuracy stays at the level"},
            ),
            "censored": (("run", "level"), censored, {"long_name": "1: beyond all lengths, −1: below all lengths"}),
        },
        {name: ds[name] for name in ds.coords if ds[name].dims == ("run",)} | {"level": list(levels)},
    )


def _crossing(lengths: Array, shares: Array, level: float) -> tuple[float, int]:
    known = np.isfinite(shares) & (lengths > 0)
    x, y = np.log(lengths[known]), shares[known]
    below = np.flatnonzero(y < level)
    if not len(below):
        return (float(lengths[known][-1]), 1) if len(y) else (np.nan, 0)
    at = int(below[0])
    if at == 0:
        return np.nan, -1
    share = (y[at - 1] - level) / (y[at - 1] - y[at])
    return float(np.exp(x[at - 1] + share * (x[at] - x[at - 1]))), 0


def _counts(frame: pd.DataFrame, by: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """How many are right, and how many there are, a row a run."""
    grouped = frame.groupby([*RUN, *by], dropna=False, sort=True)["correct"]
    return grouped.sum().unstack(by, fill_value=0), grouped.size().unstack(by, fill_value=0)


def labels(table: pd.DataFrame) -> dict[str, tuple[str, Array]]:
    """The coordinates of a table's rows, a run each."""
    return {name: ("run", table.index.get_level_values(name).to_numpy()) for name in RUN}


def shares(right: Array, n: Array, dims: tuple[str, ...], coords: dict[str, tuple[str, Array]]) -> xr.Dataset:
    """Counts of right answers and of samples, their share and its exact 95 % interval, NaN where there is no sample."""
    low, high = binomial_interval(right, n)
    known = n > 0
    shares = {"accuracy": np.divide(right, n, out=np.full(n.shape, np.nan), where=known)}
    shares |= {"low": np.where(known, low, np.nan), "high": np.where(known, high, np.nan)}
    return xr.Dataset(
        {"correct": (dims, right), "samples": (dims, n)} | {name: (dims, x, {"units": "1"}) for name, x in shares.items()}, coords
    )
