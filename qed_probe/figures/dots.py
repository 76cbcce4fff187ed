"""Accuracy of tasks that have one length or none, an arm a row."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qed_probe.figures import axes, runs, style


@style.styled
def draw_dots(ds: xr.Dataset) -> Figure:
    """Accuracy with 95 % binomial intervals, a panel a task (and length), a row an arm and a mark a seed, as QED's Figure 3.

    Takes what ``analyses.accuracy`` returns, as ``draw_accuracy`` does: ``accuracy``, ``low`` and ``high`` in [0, 1] and
    ``samples``, dims (run, length), with the coordinates model, arm, seed, lambda_max and task of each run. A length of 0 is that
    of a task without one. What is NaN has no mark. Each panel has its own scale.
    """
    arms, seeds = np.array(runs.arms(ds), str), np.array(runs.seeds(ds), str)
    rows, colours, marks = runs.in_order(arms), runs.colours(arms), runs.marks(seeds)
    shown = _panels(ds)
    across = min(len(shown), 3)
    width = style.PAGE if len(shown) > 1 else style.COLUMN
    pitch = max(0.2, 0.05 * len(marks))
    figure, panels = axes.panels(len(shown), across, 0.35 + pitch * len(rows), width, alike=False)
    shifts = dict(zip(marks, axes.set_off(len(marks), 0.75), strict=True))
    for panel, (title, mine, length) in zip(panels, shown, strict=False):
        if not mine:
            axes.label_gap(panel, axes.gap(ds))
        for i in mine:
            run = ds.isel(run=i, length=length)
            place, colour = rows.index(arms[i]) + shifts[seeds[i]], colours[arms[i]]
            panel.hlines(place, 100 * run["low"], 100 * run["high"], color=colour, linewidth=0.8)
            panel.plot(100 * run["accuracy"], place, color=colour, **marks[seeds[i]])
        panel.set_title(title, pad=3)
        panel.set_xlabel("accuracy (%)")
        _keep_to_percent(panel)
        _part_arms(panel, rows)
    axes.legend(figure, [axes.entry(seed, color=style.GREY, linestyle="none", **mark) for seed, mark in marks.items()])
    counts = f"{axes.span(ds['samples'].values, 'samples')} a run" if "samples" in ds else "Numbers of samples not reported"
    lines = f"Bars: 95 % binomial intervals of one run; {counts}." + " Each panel has its own scale." * (len(shown) > 1)
    style.write_below(figure, [*axes.source(ds), lines])
    return figure


def _panels(ds: xr.Dataset) -> list[tuple[str, list[int], int]]:
    """Title, runs and place of the length of each panel: the lengths that a task has values of, or one panel without any."""
    tasks, there = ds["task"].values.astype(str), ds["accuracy"].transpose("run", "length").notnull().values
    found = []
    for task in runs.tasks(ds):
        mine = [(j, np.flatnonzero((tasks == task) & there[:, j]).tolist()) for j in range(ds.sizes["length"])]
        for j, some in [(j, some) for j, some in mine if some] or [(0, [])]:
            length = int(ds["length"][j])
            found.append((f"{task}, {axes.length_label(length)}" if length else task, some, j))
    return found


def _keep_to_percent(panel: Axes) -> None:
    """The axis as wide as what is drawn, but no wider than 0 to 100 %."""
    panel.margins(x=0.08)
    low, high = panel.get_xlim()
    panel.set_xlim(max(low, -1), min(high, 101))
    panel.grid(axis="x", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)


def _part_arms(panel: Axes, rows: list[str]) -> None:
    """One row an arm, the first on top, with a thin line between two."""
    for row in range(1, len(rows)):
        panel.axhline(row - 0.5, color="0.8", linewidth=0.4, zorder=1)
    style.label_rows(panel.yaxis, np.array(rows, str), most=max(len(rows), 1))
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
