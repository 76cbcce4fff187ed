"""The eigenvalue claim as figures: how e is distributed against theory's bounds, and at which heads it comes near them.

All take the Dataset that ``qed-probe eigen`` keeps, dims (run, quantity, layer, head, bin): ``counts(run, quantity, layer, bin)``
between ``bin_edges(quantity, edge)``; ``n``, ``nonfinite``, ``below_zero``, ``above_one``, ``beyond_one``, ``outside`` (of
theory's bounds), ``minimum`` and ``maximum`` by (run, quantity, layer, head); theory's ``low`` and ``high``, and ``lambda``, by
(run, layer, head); ``prompts(run)`` and ``tokens(run)``. Quantities are ``eigenvalue`` (as used) and ``eigenvalue_unit`` (with
the key renormalised), both of the main edit, and by their names other edits, without unit. What a run lacks is n = 0 or NaN.
"""

from collections.abc import Callable
from itertools import cycle

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style
from qed_probe.figures import eigen_parts as parts
from qed_probe.figures.eigen_growth import draw_eigen_growth, has_growth
from qed_probe.figures.eigen_ranges import draw_eigen_ridge, draw_eigen_steps, draw_eigen_strength, has_steps, has_strength

COUNTED = {
    "outside": "outside the bounds",
    "below_zero": "below 0",
    "above_one": "above 1",
    "beyond_one": "beyond ±1",
    "nonfinite": "NaN or infinite",
}


def eigen_figures(ds: xr.Dataset) -> dict[str, Callable[[xr.Dataset], Figure]]:
    """Which figures this Dataset can carry: by the name of its files, the function that draws it."""
    table: dict[str, tuple[bool, Callable[[xr.Dataset], Figure]]] = {
        "eigen-histogram": (True, draw_eigen_histogram),
        "eigen-maps": (parts.has(ds, parts.USED), draw_eigen_maps),
        "eigen-strength": (has_strength(ds), draw_eigen_strength),
        "eigen-ridge": (ds.sizes["run"] > 1 and parts.has(ds, parts.USED), draw_eigen_ridge),
        "eigen-steps": (has_steps(ds), draw_eigen_steps),
        "eigen-growth": (has_growth(ds), draw_eigen_growth),
    }
    return {name: draw for name, (carried, draw) in table.items() if carried}


@style.styled
def draw_eigen_histogram(ds: xr.Dataset) -> Figure:
    """A row a run: the histogram of e over all layers and heads on a log scale, and beside it how many lie where.

    Bars are the main edit's as used, lines with renormalised keys and, as used, of other edits. Dashed are the widest of theory's
    bounds over the heads, but whether a value is outside is judged by the bounds of its own head.
    """
    figure = style.new_figure(style.PAGE, 0.5 + 1.15 * ds.sizes["run"])
    grid = figure.subplots(ds.sizes["run"], 2, sharex="col", squeeze=False, width_ratios=[2.1, 1])
    edits = dict(zip(parts.other_edits(ds), cycle(style.EDITS), strict=False))
    lost, ends = 0, [0.0, 1.0]
    for (panel, beside), (name, run) in zip(grid, parts.each_run(ds), strict=True):
        counts, edges, beyond = parts.e_bars(run, parts.USED)
        lost += beyond
        ends += [*edges[[0, -1]][: 2 * counts.size], *filter(np.isfinite, parts.bounds(run))]
        if counts.size:
            panel.stairs(counts, edges, fill=True, color=style.SKY)
            parts.log_counts(panel)
        else:
            axes.label_gap(panel, "no value on the axis")
        if parts.has(run, parts.UNIT):
            rebuilt, places, _ = parts.e_bars(run, parts.UNIT)
            panel.stairs(rebuilt, places, color=style.BLUE, linewidth=0.7)
        for edit, colour in edits.items():
            if parts.has(run, edit):
                heights, places, _ = parts.e_bars(run, edit)
                panel.stairs(heights, places, color=colour, linewidth=0.7)
                ends += [*places[[0, -1]]]
        panel.set_ylim(0.5, None)
        parts.draw_bounds(panel, run)
        panel.set_ylabel("count")
        panel.set_title(_title(name, run), pad=3, loc="left")
        _draw_counts(beside, run)
    margin = 0.03 * (max(ends) - min(ends))
    grid[-1, 0].set_xlim(min(ends) - margin, max(ends) + margin)
    grid[-1, 0].set_xlabel("e = 1 − aᵀk, all layers and heads")
    entries = [axes.entry("as used", color=style.SKY, linewidth=4)]
    entries += [axes.entry("with renormalised keys", color=style.BLUE, linewidth=0.7)] * parts.has(ds, parts.UNIT)
    entries += [axes.entry(edit, color=colour, linewidth=0.7) for edit, colour in edits.items()]
    axes.legend(figure, [*entries, axes.entry("theory's bounds, the widest of all heads", **axes.DASHED)])
    lines = ["Outside the bounds: each value by those of its own head. What renormalising the key takes back inside is rounding."]
    lines += [_edit_in_words(ds, edit) for edit in edits]
    lines += [f"{lost:,} values as used lie beyond the bins and are not drawn."] * bool(lost)
    parts.write_below(figure, ds, lines)
    return figure


def _edit_in_words(ds: xr.Dataset, edit: str) -> str:
    """The counts of an edit beside the main one, over all runs."""
    n, beyond, bad = (parts.total(ds, edit, name) for name in ("n", "beyond_one", "nonfinite"))
    ends = np.array([parts.span(run, edit) for _, run in parts.each_run(ds)])
    low, high = parts.written(np.fmin.reduce(ends[:, 0])), parts.written(np.fmax.reduce(ends[:, 1]))
    return f"{edit.capitalize()}, as used: {n:,} values from {low} to {high}, {beyond:,} beyond ±1, {bad:,} not finite."


def _title(name: str, run: xr.Dataset) -> str:
    low, high = parts.span(run, parts.USED)
    name = runs.shorten(name, 48)
    return f"{name}: no finite value" if np.isnan(low) else f"{name}: e from {parts.written(low)} to {parts.written(high)}"


def _draw_counts(panel: Axes, run: xr.Dataset) -> None:
    """Beside a histogram, of both records: how many there are, inside, outside, and not finite."""
    records = list(dict.fromkeys([parts.USED, parts.judged(run)]))
    n, outside = ([parts.total(run, record, name) for record in records] for name in ("n", "outside"))
    rows = [("finite values", n), ("inside the bounds", [a - b for a, b in zip(n, outside, strict=True)])]
    rows += [(text, [parts.total(run, record, name) for record in records]) for name, text in COUNTED.items()]
    parts.draw_table(panel, ["as used", "unit keys"][: len(records)], [(text, [f"{x:,}" for x in row]) for text, row in rows])


@style.styled
def draw_eigen_maps(ds: xr.Dataset) -> Figure:
    """A row a run: the smallest e and the largest |e| of each layer and head, as used.

    A framed head passes a limit: in the left map theory's lower bound, in the right map 1. The frame is solid where it does so
    with the key renormalised too, dotted where that is rounding.
    """
    rows, heads = ds.sizes["run"], ds.sizes["head"]
    numbers = ds.sizes["layer"] <= 12 and heads <= 8
    height = float(np.clip((0.15 if numbers else 0.085) * ds.sizes["layer"], 0.6, 4.0))
    figure = style.new_figure(style.PAGE if numbers and heads > 3 else style.COLUMN, 0.45 + rows * (height + 0.25))
    grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    found = [_limits(run) for _, run in parts.each_run(ds)]
    for column, label in enumerate(("smallest e", "largest |e|")):
        norm = _norm(np.stack([maps[column][0] for maps in found]))
        for panel, maps in zip(grid[:, column], found, strict=True):
            values, passed, real = maps[column]
            mesh = style.heatmap(panel, values, ds["layer"].values, norm, numbers, _cell)
            _frame(panel, passed, real)
            bar = figure.colorbar(mesh, ax=panel, label=label, pad=0.02, aspect=12)
            bar.ax.yaxis.set_major_locator(MaxNLocator(4))
        grid[-1, column].set_xlabel("head")
    for panel, (name, _) in zip(grid[:, 0], parts.each_run(ds), strict=True):
        panel.set_ylabel("layer")
        panel.set_title(runs.shorten(name, 48), pad=3, loc="left")
    parts.write_below(figure, ds, [_frames_in_words(found)])
    return figure


Map = tuple[parts.Array, NDArray[np.bool_], NDArray[np.bool_]]


def _limits(run: xr.Dataset) -> tuple[Map, Map]:
    """Smallest e and largest |e| as used, where they pass their limit, and where they still do with the key renormalised."""
    theory = run["low"].transpose("layer", "head").values
    (low, high), (unit_low, unit_high) = parts.extremes(run, parts.USED), parts.extremes(run, parts.judged(run))
    size, unit_size = (np.maximum(np.abs(a), np.abs(b)) for a, b in ((low, high), (unit_low, unit_high)))
    return (low, low < theory, unit_low < theory), (size, size > 1, unit_size > 1)


def _cell(x: float) -> str:
    return parts.written(x, 3) if abs(x) >= 10 else f"{x:.3f}".replace("-", "−")


def _norm(values: parts.Array) -> Normalize:
    low, high = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0.0, 1.0)
    widen = 0.5 * (low == high)
    return Normalize(low - widen, high + widen)


def _frame(panel: Axes, passed: NDArray[np.bool_], real: NDArray[np.bool_]) -> None:
    for row, column in np.argwhere(passed):
        look = "-" if real[row, column] else ":"
        place = column - 0.45, row - 0.45
        panel.add_patch(Rectangle(place, 0.9, 0.9, fill=False, linestyle=look, edgecolor=style.VERMILION, linewidth=1.2))


def _frames_in_words(found: list[tuple[Map, Map]]) -> str:
    """How many heads are framed in each map, and how many of them for rounding alone."""
    counts = []
    for column, text in enumerate(("below theory's lower bound", "with |e| > 1")):
        framed = sum(int(maps[column][1].sum()) for maps in found)
        real = sum(int((maps[column][1] & maps[column][2]).sum()) for maps in found)
        counts.append(f"{framed:,} {text} ({framed - real:,} dotted)")
    return f"Framed heads: {', '.join(counts)}; dotted where only rounding of the key does it."
