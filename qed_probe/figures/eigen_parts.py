"""What the figures of the eigenvalue claim have in common: bins that can be seen, extremes, counts in a table, words below."""

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from qed_probe.figures import axes, runs, style

Array = NDArray[np.float64]
USED, UNIT = "eigenvalue", "eigenvalue_unit"
SIZES = ("projection_effect", "norm_excess", "norm_excess_base")
"""The quantities that are no eigenvalues; what is none of these is an edit beside the main one."""
COARSE = 64
"""Bars of e a unit: whole numbers are edges of them, and a power of two so that they are whole numbers of the tally's bins."""
FACTOR_ALONE = "e speaks of the erase factor Mₜ alone, never of its product with the decay, MₜDₜ."


def coarse(counts: Array, edges: Array, place: Callable[[Array], Array]) -> tuple[Array, NDArray[np.int64], int]:
    """Counts put together into wider bars, from the first that is not empty to the last, and how many have no place.

    ``counts`` ``[bin]`` and ``edges`` ``[bin + 1]``; ``place`` says of the middle of a bin at which bar it is, as a number that
    is rounded down. Returns the bars' counts ``[bar]``, their ends ``[bar + 1]`` in places, and the values in bins that have no
    finite place, as those beyond the first or the last edge.
    """
    with np.errstate(all="ignore"):
        where = np.floor(place(edges[:-1] / 2 + edges[1:] / 2))
    there = (counts > 0) & np.isfinite(where)
    lost = int(counts.sum() - counts[there].sum())
    if not there.any():
        return np.zeros(0), np.zeros(1, np.int64), lost
    bars = where[there].astype(np.int64)
    first = bars.min()
    return np.bincount(bars - first, counts[there]).astype(float), np.arange(first, bars.max() + 2), lost


def histogram(run: xr.Dataset, quantity: str, place: Callable[[Array], Array]) -> tuple[Array, NDArray[np.int64], int]:
    """``coarse`` of one quantity of one run, its layers pooled."""
    pooled = run["counts"].sel(quantity=quantity)
    pooled = pooled.sum("layer") if "layer" in pooled.dims else pooled
    return coarse(pooled.fillna(0).values.astype(float), run["bin_edges"].sel(quantity=quantity).values.astype(float), place)


def e_bars(run: xr.Dataset, quantity: str) -> tuple[Array, Array, int]:
    """The bars of an eigenvalue: counts, edges as values of e, and how many lie beyond the tally's bins."""
    counts, places, lost = histogram(run, quantity, lambda e: e * COARSE)
    return counts, places / COARSE, lost


def extremes(run: xr.Dataset, quantity: str) -> tuple[Array, Array]:
    """Smallest and largest finite value by layer and head, ``[layer, head]``; NaN where there is none."""
    part = run.sel(quantity=quantity).transpose("layer", "head", ...)
    there = part["n"].values > 0
    low, high = (np.where(there, part[name].values, np.nan) for name in ("minimum", "maximum"))
    return low, high


def span(run: xr.Dataset, quantity: str) -> tuple[float, float]:
    """Smallest and largest finite value of all layers and heads; NaN if there is none."""
    low, high = extremes(run, quantity)
    return float(np.fmin.reduce(low, None)), float(np.fmax.reduce(high, None))


def judged(run: xr.Dataset) -> str:
    """The record that tells rounding from what is real: with renormalised keys, or as used where none is renormalised."""
    return UNIT if has(run, UNIT) else USED


def total(run: xr.Dataset, quantity: str, name: str) -> int:
    """A count over all layers and heads."""
    return int(run[name].sel(quantity=quantity).sum())


def has(ds: xr.Dataset, quantity: str) -> bool:
    """Whether anything was counted of this quantity."""
    return quantity in ds["quantity"].values and bool((ds["n"].sel(quantity=quantity) > 0).any())


def other_edits(ds: xr.Dataset) -> list[str]:
    """The edits beside the main one, whose eigenvalues were counted too."""
    return [str(name) for name in ds["quantity"].values if name not in (USED, UNIT, *SIZES) and has(ds, str(name))]


def each_run(ds: xr.Dataset) -> list[tuple[str, xr.Dataset]]:
    """The runs by name, in order."""
    return [(str(name), ds.isel(run=i)) for i, name in enumerate(ds["run"].values)]


def written(x: float, digits: int = 4) -> str:
    """A number with a minus sign that can be seen."""
    text = "∞" if np.isposinf(x) else "−∞" if np.isneginf(x) else f"{x:.{digits}g}"
    return text.replace("-", "−")


def bounds(run: xr.Dataset) -> tuple[float, float]:
    """The widest of the bounds that theory gives to the heads of a run, or of several."""
    return float(run["low"].min()), float(run["high"].max())


def draw_bounds(panel: Axes, run: xr.Dataset) -> None:
    """A dashed line at each of the widest bounds that is finite."""
    for end in filter(np.isfinite, bounds(run)):
        panel.axvline(end, zorder=1.5, **axes.DASHED)


def log_counts(panel: Axes) -> None:
    """A logarithmic axis upwards, ticked at powers of ten alone."""
    panel.set_yscale("log")
    panel.yaxis.set_minor_locator(NullLocator())


def draw_table(panel: Axes, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Words at the left and a number below each head, in the place of a panel."""
    panel.set_axis_off()
    heights = 1 - (np.arange(len(rows) + 1) + 0.5) / (len(rows) + 1)
    columns = 1 - 0.3 * np.arange(len(heads))[::-1]
    for y, (name, numbers) in zip(heights, [("", heads), *rows], strict=True):
        panel.text(0, y, name, transform=panel.transAxes, ha="left", va="center", fontsize=6)
        for x, number in zip(columns, numbers, strict=True):
            panel.text(x, y, number, transform=panel.transAxes, ha="right", va="center", fontsize=6)


def about(ds: xr.Dataset) -> str:
    """Over how much: of a few runs one by one, of many as spans."""
    if ds.sizes["run"] > 4:
        counts = [axes.span(ds[name].values.astype(float), name) for name in ("prompts", "tokens")]
        return f"{ds.sizes['run']} runs of {', '.join(counts)}."
    each = [
        f"{runs.shorten(name, 40)}: {style.counted(int(run['prompts']), 'prompt')}, {style.counted(int(run['tokens']), 'token')}"
        for name, run in each_run(ds)
    ]
    return f"{'; '.join(each)}."


def write_below(figure: Figure, ds: xr.Dataset, lines: Sequence[str]) -> None:
    """Notes under the figure, then what was counted and what e does not say."""
    style.write_below(figure, [*lines, about(ds), FACTOR_ALONE])
