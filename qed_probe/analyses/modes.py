"""What is left of a model's answers where its added direction acts at once alone, later alone, or not at all."""

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.analyses.accuracy import shares
from qed_probe.analyses.blocks import Array
from qed_probe.analyses.changes import paired
from qed_probe.analyses.runs import RUN, judged, trained
from qed_probe.analyses.statistics import holm, mcnemar
from qed_probe.errors import StoreError

MODES = ("full", "immediate", "lasting", "none")
"""Those of ``models.intervention``, in the order in which they are shown."""
NATS = {"difference": "difference", "low": "difference_low", "high": "difference_high"}


def modes(outcomes: xr.Dataset) -> xr.Dataset:
    """Accuracy of each run by length and mode, against the same samples of mode "full", and the change of ln p(answer).

    Dims ``run``, ``length``, ``mode``: ``correct``, ``samples``, ``accuracy``, ``low``, ``high`` as in ``accuracy``; ``gained``
    and ``lost``, the samples that are right in the mode and not in full and the other way; ``p``, exact McNemar's of these, and
    ``p_holm``, adjusted over the other modes and lengths of the run; ``difference``, the mean over samples of ln p(answer) in the
    mode minus that in full, in nats, with ``difference_low`` and ``difference_high``, Student's 95 % interval. What a run was not
    asked is 0 and NaN; runs in full alone are left out. Attributes ``at`` and ``phase`` say where and when. Raises StoreError if
    none has another mode, if modes differ in several places or phases, or if samples differ between them.
    """
    frame = judged(outcomes)
    frame = frame[(frame["strength"] == 1) & (frame["direction"] == "own")]
    way = _one_way(frame)
    runs = [run for _, run in frame.groupby([*RUN], dropna=False) if {*run["mode"]} != {"full"}]
    runs = sorted(runs, key=lambda run: tuple(run[["arm", "seed", "task"]].iloc[0]))
    frame = pd.concat(runs)
    names, lengths = [mode for mode in MODES if mode in {*frame["mode"]}], np.sort(frame["length"].unique())
    dims, shape = ("run", "length", "mode"), (len(runs), len(lengths), len(names))
    counts = {name: np.zeros(shape, np.int64) for name in ("correct", "samples", "gained", "lost")}
    nats = {name: np.full(shape, np.nan) for name in NATS.values()}
    for row, run in enumerate(runs):
        for mode, part in run.groupby("mode"):
            for length, found in paired(part, run[run["mode"] == "full"]).items():
                cell = row, int(np.searchsorted(lengths, length)), names.index(str(mode))
                counts["correct"][cell] = part.loc[part["length"] == length, "correct"].sum()
                for name in ("samples", "gained", "lost"):
                    counts[name][cell] = found[name]
                for name in NATS if mode != "full" else ():
                    nats[NATS[name]][cell] = found.get(name, np.nan)
    labels = {name: ("run", np.array([run[name].iloc[0] for run in runs])) for name in RUN}
    coords = labels | {"length": ("length", lengths), "mode": ("mode", np.array(names))}
    ds = shares(counts["correct"], counts["samples"], dims, coords)
    p = np.where((np.array(names) == "full") | (counts["samples"] == 0), np.nan, mcnemar(counts["gained"], counts["lost"]))
    more: dict[str, Array] = {name: counts[name] for name in ("gained", "lost")} | {"p": p, "p_holm": np.stack([*map(holm, p)])}
    ds = ds.assign({name: (dims, x) for name, x in more.items()})
    ds = ds.assign({name: (dims, x, {"units": "nat"}) for name, x in nats.items()})
    return ds.assign_attrs(**way, trained_length=trained(frame))


def _one_way(frame: pd.DataFrame) -> dict[str, str]:
    """Where and when the modes hold."""
    ways = frame.loc[frame["mode"] != "full", ["at", "phase"]].drop_duplicates()
    if ways.empty:
        raise StoreError("expected outcomes of the model's own direction, at strength 1, in other modes than full, found none")
    if len(ways) > 1:
        found = " and ".join(f"at {way.at}, phase {way.phase}" for way in ways.head(2).itertuples())
        raise StoreError(f"expected one place and phase in which modes differ, found {found}")
    return {name: str(ways[name].iloc[0]) for name in ("at", "phase")}
