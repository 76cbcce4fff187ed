"""Accuracy by length where the added direction acts at once alone, later alone, or not at all."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qed_probe.figures import axes, runs, style

ALPHA = 0.05
COLOURS = {"full": style.INK, "immediate": style.ORANGE, "lasting": style.BLUE, "none": style.GREY}
MARKS = {"full": "s", "immediate": "o", "lasting": "^", "none": "D"}
WHERE = {"all": "in prompt and answer", "prompt": "in the prompt alone", "answer": "in the answer alone"}


@style.styled
def draw_modes(ds: xr.Dataset) -> Figure:
    """Accuracy, and change of ln p(answer), by length: two panels a run, a line a mode.

    Takes what ``analyses.modes`` returns: ``accuracy`` in [0, 1], ``samples``, ``p_holm``, and ``difference`` with its ends in
    nats, dims (run, length, mode), with the coordinates of each run as for ``draw_accuracy``. Filled marks of accuracy differ
    from mode full; bars of the change are 95 % intervals. The length 0 of tasks without one is not drawn.
    """
    drawn, count = axes.with_length(ds), ds.sizes["run"]
    figure = style.new_figure(style.PAGE, 0.35 + 1.5 * count)
    grid = figure.subplots(count, 2, squeeze=False, sharex=True, sharey="col")
    panels = [*grid.flat]
    for run, (title, (share, change)) in enumerate(zip(runs.titles(ds), grid, strict=True)):
        _draw_shares(share, drawn.isel(run=run))
        _draw_changes(change, drawn.isel(run=run))
        for panel in (share, change):
            axes.length_axis(panel, drawn["length"].values, axes.room(2))
            panel.set_title(title, pad=3)
        share.set_ylabel("accuracy (%)")
        change.set_ylabel("Δ ln p(answer) (nats)")
    for panel in panels[-2:]:
        panel.set_xlabel("length (tokens)")
    known = [str(mode) for mode in ds["mode"].values]
    looks = {mode: {"color": COLOURS[mode], "marker": MARKS[mode], "markersize": 3.2} for mode in known}
    axes.legend(figure, [axes.entry(mode, **look) for mode, look in looks.items()], axes.draw_trained(panels, ds))
    style.write_below(figure, [*axes.source(ds), *_lines(ds, drawn)])
    return figure


def _draw_shares(panel: Axes, run: xr.Dataset) -> None:
    for mode, shift in zip(run["mode"].values, axes.set_off(run.sizes["mode"], 0.2), strict=True):
        one = run.sel(mode=mode)
        look: dict[str, Any] = {"color": COLOURS[mode], "marker": MARKS[mode]}
        x, y, filled = one["length"].values * 2.0**shift, 100 * one["accuracy"].values, one["p_holm"].values < ALPHA
        panel.plot(x, y, color=look["color"], linewidth=0.8)
        for marked, fill in ((filled | (mode == "full"), look["color"]), (~filled & (mode != "full"), "white")):
            panel.plot(x[marked], y[marked], **look, linestyle="none", markerfacecolor=fill, markersize=3.2, markeredgewidth=0.7)
    axes.percent_axis(panel)
    if not np.isfinite(run["accuracy"].values).any():
        axes.label_gap(panel, axes.gap(run))


def _draw_changes(panel: Axes, run: xr.Dataset) -> None:
    panel.axhline(0, color=COLOURS["full"], linewidth=0.8)
    for mode, shift in zip(run["mode"].values, axes.set_off(run.sizes["mode"], 0.2), strict=True):
        one, colour = run.sel(mode=mode), COLOURS[mode]
        x = one["length"].values * 2.0**shift
        panel.vlines(x, one["difference_low"], one["difference_high"], color=colour, linewidth=0.6)
        panel.plot(x, one["difference"], color=colour, marker=MARKS[mode], linewidth=0.8, markersize=3.2, markeredgewidth=0.7)
    panel.grid(axis="y", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)


def _lines(ds: xr.Dataset, drawn: xr.Dataset) -> list[str]:
    """How many, what is filled, and what the modes are."""
    heads = "all heads" if ds.attrs["at"] == "all" else f"the heads {ds.attrs['at']}"
    counts = f"{', '.join(runs.tasks(ds))}: {axes.span(drawn['samples'].values, 'samples')} a length and mode, the same for each."
    return [
        f"{counts} Modes hold for {heads}, {WHERE[ds.attrs['phase']]}.",
        "immediate: y⁰ − λρS̄⁰ᵀd, the step alone, of a memory without it; lasting: y + λρS̄ᵀd, what the memory keeps alone; "
        "none: s = 0.",
        f"Accuracy, filled: differs from full (exact McNemar test of the pairs, p < {ALPHA:g} after Holm over mode and length). "
        "ln p(answer): mean over pairs and its 95 % interval.",
        "Layers see what those before them give, so what the modes take and leave does not add up.",
    ]
