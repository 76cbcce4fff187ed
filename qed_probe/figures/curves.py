"""Accuracy by length, and by the strength of the added direction."""

from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style

ALPHA = 0.05
LIMITS = [
    "s = 0 of a QED model is not a trained GDN-2: its other weights were trained with the direction.",
    "That accuracy changes with s does not show that λ_max binds in training.",
]


@style.styled
def draw_accuracy(ds: xr.Dataset) -> Figure:
    """Accuracy by length, a line a run with 95 % binomial intervals, as QED's Figure 1: an arm's colour, a seed's mark.

    Takes what ``analyses.accuracy`` returns: ``accuracy``, ``low`` and ``high`` in [0, 1] and ``samples``, dims (run, length),
    with the coordinates model, arm, seed, lambda_max and task of each run and the attribute ``trained_length`` (0: unknown).
    Above four arms or eight runs, each arm has a panel, with the other arms in grey. Marks of one length are set off sideways.
    The length 0 of tasks without one is not drawn.
    """
    drawn = axes.with_length(ds)
    arms, seeds = runs.arms(ds), runs.seeds(ds)
    colours, marks = runs.colours(arms), runs.marks(seeds)
    shown = _panels(ds, arms)
    across = axes.columns(len(shown))
    width, height = (style.PAGE, 1.3) if len(shown) > 1 else (style.COLUMN, 1.9)
    figure, panels = axes.panels(len(shown), across, height, width)
    for panel, (title, own, others) in zip(panels, shown, strict=False):
        panel.plot(drawn["length"], 100 * drawn["accuracy"].values[others].T, color="0.82", linewidth=0.5, zorder=1)
        for i, shift in zip(own, axes.set_off(len(own), 0.3), strict=True):
            _draw_run(panel, drawn.isel(run=i), shift, {"color": colours[arms[i]], **marks[seeds[i]]})
        if not np.isfinite(drawn["accuracy"].values[own]).any():
            axes.label_gap(panel, axes.gap(ds))
        axes.length_axis(panel, drawn["length"].values, axes.room(across))
        axes.percent_axis(panel)
        panel.set_title(title, pad=3)
    axes.label_outside(panels, across, "length (tokens)", "accuracy (%)")
    apart = any(panel.others.size for panel in shown)
    by_arm = [axes.entry(arm, color=colour) for arm, colour in colours.items() if not apart]
    by_seed = [axes.entry(seed, color=style.GREY, linewidth=0.7, **mark) for seed, mark in marks.items()]
    axes.legend(figure, by_arm, by_seed + axes.draw_trained(panels, ds))
    counts = f"{', '.join(runs.tasks(ds))}: {axes.span(drawn['samples'].values, 'samples')} a length and run."
    bars = "Bars: 95 % binomial intervals of one run." + " Grey: the other arms." * apart
    style.write_below(figure, [*axes.source(ds), f"{counts} {bars}"])
    return figure


class _Panel(NamedTuple):
    title: str
    own: NDArray[np.int64]
    others: NDArray[np.int64]


def _panels(ds: xr.Dataset, arms: list[str]) -> list[_Panel]:
    """A panel a task or, where these are too many lines, one a task and arm: the runs in colour, and those in grey."""
    tasks, names = ds["task"].values.astype(str), np.array(arms, str)
    found = []
    for task in runs.tasks(ds):
        mine = tasks == task
        if len(set(arms)) <= 4 and mine.sum() <= 8:
            found.append(_Panel(task, np.flatnonzero(mine), np.array([], int)))
            continue
        for arm in runs.in_order(names[mine]):
            title = f"{task}: {arm}" if len(set(tasks)) > 1 else arm
            found.append(_Panel(title, np.flatnonzero(mine & (names == arm)), np.flatnonzero(mine & (names != arm))))
    return found


def _draw_run(panel: Axes, run: xr.Dataset, shift: float, look: dict[str, Any]) -> None:
    x = run["length"].values * 2.0**shift
    panel.vlines(x, 100 * run["low"], 100 * run["high"], color=look["color"], linewidth=0.6)
    panel.plot(x, 100 * run["accuracy"], linewidth=0.8, **look)


@style.styled
def draw_strengths(ds: xr.Dataset) -> Figure:
    """Accuracy against the strength s, a panel a run and a line a length; filled marks differ from s = 1; after QED's Table 4.

    Takes what ``analyses.strengths`` returns: ``accuracy`` in [0, 1], ``samples`` and ``p_holm``, dims (run, length, strength),
    and ``page_p``, dims (run, length), with the coordinates of each run as for ``draw_accuracy``.
    """
    ds = ds.sortby(["length", "strength"])
    count = ds.sizes["run"]
    across = 1 if count == 1 else 2
    width = style.COLUMN if count == 1 else style.PAGE
    figure, panels = axes.panels(count, across, 1.5, width)
    shades = mpl.colormaps["viridis"](np.linspace(0.9, 0.0, max(ds.sizes["length"], 1)))
    for panel, title, i in zip(panels, runs.titles(ds), range(count), strict=False):
        entries = [_draw_length(panel, ds.isel(run=i, length=j), shade) for j, shade in enumerate(shades[: ds.sizes["length"]])]
        panel.axvline(1, color=style.INK, linewidth=0.5, zorder=1)
        axes.percent_axis(panel)
        panel.set_xticks(ds["strength"].values, [f"{s:g}".replace("-", "−") for s in ds["strength"].values])
        panel.set_title(title, pad=3)
        panel.legend(
            handles=entries[::-1], title="length, Page's p", title_fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5),
            frameon=False, handlelength=1.2, labelspacing=0.3,
        )  # fmt: skip
    axes.label_outside(panels, across, "strength s (λ → sλ)", "accuracy (%)")
    lines = [
        f"{', '.join(runs.tasks(ds))}: {axes.span(ds['samples'].values, 'samples')} a length, the same for every s.",
        f"Filled: differs from s = 1 (exact McNemar test of the pairs, p < {ALPHA:g} after Holm over s and length of the run); "
        "hollow: not shown to differ. The line: s = 1, as trained. Page's p: one-sided, that accuracy rises with s.",
    ]
    style.write_below(figure, [*axes.source(ds), *lines, *LIMITS])
    return figure


def _draw_length(panel: Axes, line: xr.Dataset, shade: NDArray[np.float64]) -> Line2D:
    s, y = line["strength"].values, 100 * line["accuracy"].values
    differs = line["p_holm"].values < ALPHA
    panel.plot(s, y, color=shade, linewidth=0.8)
    for marked, fill in ((differs & (s != 1), shade), (~differs & (s != 1), "white")):
        panel.plot(s[marked], y[marked], "o", color=shade, markerfacecolor=fill, markersize=3.2, markeredgewidth=0.7)
    length, p = axes.length_label(float(line["length"])), float(line["page_p"])
    return axes.entry(f"{length}, {_p(p)}", color=shade)


def _p(p: float) -> str:
    return "–" if np.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.2g}"
