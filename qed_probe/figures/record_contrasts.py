"""One record of two traces of a checkpoint, head by head; and of several checkpoints, as the quantiles of each layer."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style

NUMBERED = 12
"""Cells bear their numbers where there are no more layers or heads than this."""
FEW = 10
"""Below so many prompts the note says that a percentile interval is too narrow."""
CROWDED = 48
"""Above so many bars the quantiles take a page's width."""


@style.styled
def draw_record_contrast(ds: xr.Dataset) -> Figure:
    """The difference of a record between two traces of one checkpoint, layer × head, on colours symmetric about 0.

    Takes what ``analyses.record_contrast`` returns. A dot marks a cell whose interval excludes 0; the note says how many do.
    """
    cells = ds.transpose("layer", "head", ...)
    difference, sure = cells["difference"].values, _excludes_zero(cells)
    rows, columns = difference.shape
    numbers = max(rows, columns) <= NUMBERED
    height = float(np.clip((0.17 if numbers else 0.085) * rows, 0.6, 4.0))
    figure = style.new_figure(style.PAGE if numbers and columns > 5 else style.COLUMN, 0.55 + height)
    panel = figure.subplots()
    mesh = signed_cells(panel, difference, sure, numbers)
    style.label_rows(panel.yaxis, ds["layer"].values)
    style.label_rows(panel.xaxis, np.arange(columns))
    panel.set_xlabel("head")
    panel.set_ylabel("layer")
    panel.set_title(_title(ds), pad=3)
    bar = figure.colorbar(mesh, ax=panel, pad=0.02, aspect=12, label="difference")
    bar.ax.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    style.write_below(figure, [*_intervals(ds, sure), style.note(ds)])
    return figure


@style.styled
def draw_record_quantiles(ds: xr.Dataset) -> Figure:
    """Quantiles of a record by layer, a colour a store: a bar between each two levels that pair, a line through the medians.

    Takes what ``analyses.record_quantiles`` returns, at levels that pair about the middle one. Bars of one layer stand beside
    each other; a layer that a store has not is left out.
    """
    x, levels = ds["quantile"].transpose("store", "layer", "level").values, ds["level"].values
    stores = [str(name) for name in ds["store"].values]
    colours = runs.colours(stores)
    crowded = x[..., 0].size > CROWDED
    figure, (panel,) = axes.panels(1, 1, 1.7, style.PAGE if crowded else style.COLUMN)
    room = 0.8 / len(stores)
    for name, shift, values in zip(stores, axes.set_off(len(stores), 0.8), x, strict=True):
        _draw_store(panel, np.arange(x.shape[1]) + shift, values, 0.85 * room, colours[name])
    if np.nanmin(x, initial=0) < 0 < np.nanmax(x, initial=0):
        panel.axhline(0, color=style.INK, linewidth=0.5, zorder=0.5)
    panel.use_sticky_edges = False
    panel.set_xlim(-0.5, x.shape[1] - 0.5)
    style.label_rows(panel.xaxis, ds["layer"].values, most=24 if crowded else 12)
    panel.set_xlabel("layer")
    panel.set_ylabel(_quantity(ds))
    axes.legend(figure, [axes.entry(name, color=colour, linewidth=3) for name, colour in colours.items()])
    style.write_below(figure, [_bands(levels), *(_store_note(ds.isel(store=i)) for i in range(len(stores)))])
    return figure


def signed_cells(
    panel: Axes, difference: NDArray[np.float64], sure: NDArray[np.bool_], numbers: bool, top: float | None = None
) -> QuadMesh:
    """Cells coloured from −top to top, the largest unless given, with numbers if asked, and dots; NaN is grey and says so."""
    rows, columns = difference.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    top = top or float(np.nanmax(np.abs(difference), initial=0)) or 1.0
    norm, cells = Normalize(-top, top), np.ma.masked_invalid(difference)
    mesh = panel.pcolormesh(*edges, cells, cmap="PuOr", norm=norm, edgecolors="white", linewidth=0.3)
    panel.set_facecolor(style.EMPTY)
    for row, column in np.argwhere(np.isnan(difference) | sure | numbers):
        x = difference[row, column]
        ink = "white" if abs(x) > 0.6 * top else "black"
        if numbers or np.isnan(x):
            text = "NaN" if np.isnan(x) else _signed(x)
            panel.text(column, row, text, ha="center", va="center", fontsize=6 if numbers else 5, color=ink)
        if sure[row, column]:
            panel.plot(column + 0.42 * numbers, row, ".", color=ink, markersize=3, markeredgewidth=0)
    panel.set_ylim(rows - 0.5, -0.5)
    panel.tick_params(length=0)
    return mesh


def _excludes_zero(ds: xr.Dataset) -> NDArray[np.bool_]:
    return np.asarray((ds["low"] > 0) | (ds["high"] < 0))


def _signed(x: float) -> str:
    """Two digits with their sign."""
    if x == 0:
        return "0"
    text = style.number(abs(x), style.is_plain(abs(x)))
    return f"{'−' if x < 0 else '+'}{text}"


def _title(ds: xr.Dataset) -> str:
    return f"{_quantity(ds)}: {ds.attrs['subject'].partition(': ')[2]}"


def _quantity(ds: xr.Dataset) -> str:
    units = "" if ds.attrs["units"] == "1" else f" ({ds.attrs['units']})"
    return f"{ds.attrs['formula'] or ds.attrs['record']}{units}"


def _intervals(ds: xr.Dataset, sure: NDArray[np.bool_]) -> list[str]:
    """What the dots are, and how many there are among how many intervals."""
    prompts = axes.span(np.array([ds.attrs["prompts"]]), "prompts")
    known = int(np.isfinite(ds["low"]).sum())
    first = f"{ds.attrs['record']}, mean over tokens of {prompts}."
    if not known:
        return [f"{first} No intervals: fewer than two prompts."]
    level, draws = ds.attrs["bootstrap_level"], ds.attrs["bootstrap_draws"]
    narrow = " From so few prompts such intervals are too narrow." * (ds.attrs["prompts"] < FEW)
    return [
        f"{first} Dots: the {100 * level:g} % interval (bootstrap over prompts, {draws:,} draws) excludes 0, "
        f"{int(sure.sum()):,} of {known:,} cells; each is judged alone.{narrow}"
    ]


def _draw_store(panel: Axes, at: NDArray[np.float64], x: NDArray[np.float64], width: float, colour: str) -> None:
    """Bars and medians of one store, from quantiles ``[layer, level]``."""
    count = x.shape[1]
    there = np.flatnonzero(np.isfinite(x).all(axis=1))
    for i in range(count // 2):
        low, high = x[there, i], x[there, count - 1 - i]
        panel.bar(at[there], high - low, width, low, color=colour, alpha=0.25 + 0.3 * (i > 0), linewidth=0)
    if count % 2:
        middle = x[:, count // 2]
        panel.plot(at, middle, color=colour, linewidth=0.7)
        panel.hlines(middle, at - width / 2, at + width / 2, color=style.INK, linewidth=0.9, zorder=3)


def _bands(levels: NDArray[np.float64]) -> str:
    """Which levels the bars and the line stand for."""
    percent = [f"{100 * x:g}" for x in levels]
    pairs = [f"{percent[i]}–{percent[-1 - i]} %" for i in range(len(levels) // 2)]
    bars = [f"bars: {', '.join(pairs)}"] * bool(pairs)
    line = [f"line: {'median' if levels[len(levels) // 2] == 0.5 else percent[len(levels) // 2] + ' %'}"] * (len(levels) % 2)
    return f"Values of all tokens and heads of a layer; {'; '.join(bars + line)}."


def _store_note(ds: xr.Dataset) -> str:
    """What the figure stands on in one store."""
    name, prompts = str(ds["store"].values), axes.span(ds["prompts"].values.reshape(1), "prompts")
    other = "" if ds["same_tokens"] else ", other tokens than the first"
    counts = {key: int(ds[key]) for key in ("tokens", "tokens_incomplete")}
    return style.note(ds.assign_attrs(counts, subject=f"{name}: mixer {ds['mixer'].values}, {prompts}{other}"))
