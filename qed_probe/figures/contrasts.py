"""Differences between two arms, seed by seed."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style

# The axis reaches at least so far to either side, in percentage points, and at most so far.
LEAST, MOST = 5.0, 108.0


@style.styled
def draw_contrast(ds: xr.Dataset) -> Figure:
    """Accuracy of one arm minus another's by length, a panel a pair of arms and a mark a seed, as QED's Figure 2.

    Takes what ``analyses.contrast`` returns: ``difference`` in percentage points, dims (panel, seed, length), NaN where a seed
    was not trained or a value not reported; ``mean``, ``low`` and ``high``, dims (panel, length), NaN where there is none; the
    coordinate ``panel`` says what is subtracted, "qed − gdn2". Attribute ``trained_length`` (0: unknown). With the attribute
    ``published`` the note names its ``source``, ``place``, ``page`` and ``gaps``, and what is missing is labelled so.
    """
    ds = axes.with_length(ds)
    count, names = ds.sizes["panel"], [runs.seed_name(seed) for seed in ds["seed"].values]
    across = -(-count // -(-count // 5))  # as even as rows of at most five can be
    marks = runs.marks(names)
    width, height = (style.PAGE, 1.9) if count > 2 else (style.COLUMN, 1.9)
    figure, panels = axes.panels(count, across, height, width)
    for panel, i in zip(panels, range(count), strict=False):
        _draw_pair(panel, ds.isel(panel=i), [marks[name] for name in names])
    values = [ds[name].values.ravel() for name in ("difference", "low", "high") if name in ds]
    extremes = np.concatenate([x[np.isfinite(x)] for x in values])
    low, high = min(extremes.min(initial=0), -LEAST), max(extremes.max(initial=0), LEAST)
    panels[0].set_ylim(max(1.1 * low, -MOST), min(1.1 * high, MOST))
    axes.label_outside(panels, across, "length (tokens)", "percentage points")
    averaged = "mean" in ds and bool(ds["mean"].notnull().any())
    by_seed = [axes.entry(name, color=style.BLUE, linestyle="none", **mark) for name, mark in marks.items()]
    mean = [axes.entry("mean, 95 % t interval", color=style.VERMILION)] * averaged
    axes.legend(figure, by_seed, mean + axes.draw_trained(panels, ds))
    lines = ["Accuracy of the first arm minus the second's, paired by training seed."]
    lines[0] += " The interval is over seeds, where there are four or more." * averaged
    style.write_below(figure, [*axes.source(ds), *lines])
    return figure


def _draw_pair(panel: Axes, pair: xr.Dataset, marks: list[dict[str, Any]]) -> None:
    lengths, difference = pair["length"].values, pair["difference"].transpose("seed", "length").values
    panel.axhline(0, color=style.INK, linewidth=0.6, zorder=1)
    if "mean" in pair:
        panel.vlines(lengths, pair["low"], pair["high"], color=style.VERMILION, linewidth=0.9)
        panel.plot(lengths, pair["mean"], "_", color=style.VERMILION, markersize=6, markeredgewidth=1.1)
    there = np.isfinite(difference)
    (trained,) = there.any(1).nonzero()
    for i, shift in zip(trained, axes.set_off(len(trained), 0.6), strict=True):
        panel.plot(lengths * 2.0**shift, difference[i], linestyle="none", color=style.BLUE, alpha=0.85, **marks[i])
    axes.length_axis(panel, lengths, most=6)
    panel.grid(axis="y", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)
    _label_gaps(panel, pair, there)
    seeds = style.counted(len(trained), "seed") if trained.size else "no seeds"
    panel.set_title(f"{_wrapped(str(pair['panel'].values))}\n{seeds}", pad=3)


def _wrapped(name: str, most: int = 20) -> str:
    """A long name on two lines."""
    return name if len(name) <= most else name.replace(" − ", " −\n", 1)


def _label_gaps(panel: Axes, pair: xr.Dataset, there: NDArray[np.bool_]) -> None:
    """Say of lengths that have no value, and in published data of seeds that have none there, that it is so."""
    missing = axes.gap(pair)
    if not there.any():
        axes.label_gap(panel, missing)
        return
    shifts = axes.set_off(len(there), 0.9)
    for length, seen in zip(pair["length"].values, there.T, strict=True):
        if not seen.any():
            axes.label_gap(panel, missing, length)
        elif pair.attrs.get("published") and not seen.all():
            absent = np.flatnonzero(~seen)
            who = f"seed {', '.join(str(seed) for seed in pair['seed'].values[absent])}"
            axes.label_gap(panel, f"{who}: {missing}", length * 2.0 ** shifts[absent[0]])
