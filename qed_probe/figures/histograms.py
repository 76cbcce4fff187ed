"""Figures of distributions; they take what ``analyses.histograms`` returns."""

import math
from itertools import cycle

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qed_probe.figures import style

OUTSIDE = {
    "outside_theory": "outside the bounds",
    "below_zero": "below 0",
    "above_one": "above 1",
    "beyond_one": "beyond ±1",
}


@style.styled
def draw_eigenvalues(ds: xr.Dataset) -> Figure:
    """The main edit's eigenvalue over all layers and a layer a row, other edits as lines; theory's ends, outliers counted."""
    used = ds.sel(record="eigenvalue")
    figure, top, rows = _stack(used, "eigenvalue e = 1 − aᵀk")
    _draw_bounds(top, rows, ds)
    others = [str(name) for name in ds["record"].values if not str(name).startswith("eigenvalue")]
    for name, colour in zip(others, cycle(style.EDITS), strict=False):
        counts = ds["counts"].sel(record=name).sum("layer").values
        top.stairs(counts, ds["edges"].values, color=colour, linewidth=1.2, label=name)
    if others:
        figure.legend(loc="outside upper left", ncols=4, frameon=False)
    of = "values of e" + (" of the main edit" if others else "")
    low, high = float(used["minimum"].min()), float(used["maximum"].max())
    span = f"all {low:.4g}" if low == high else f"from {low:.4g} to {high:.4g}"
    lines = [f"{int(used['n'].sum()):,} {of}, {span}:"]
    lines.append(", ".join(f"{int(used[name].sum()):,} {text}" for name, text in OUTSIDE.items()))
    if "eigenvalue_unit" in ds["record"]:
        *most, last = (f"{int(ds[name].sel(record='eigenvalue_unit').sum()):,}" for name in OUTSIDE)
        lines.append(f"(with the key renormalised: {', '.join(most)} and {last}).")
    if int(used["outside_bins"].sum()):
        lines.append(f"{int(used['outside_bins'].sum()):,} lie beyond the axis and are not drawn.")
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


def _draw_bounds(top: Axes, rows: Axes, ds: xr.Dataset) -> None:
    low, high = float(ds["low"].min()), float(ds["high"].max())
    for end in filter(math.isfinite, (low, high)):
        top.axvline(end, color=style.VERMILION, linestyle="--")
    place = np.arange(ds.sizes["layer"])
    for ends in (ds["low"].values, ds["high"].values):
        ends = np.where(np.isfinite(ends), ends, np.nan)
        rows.vlines(ends, place - 0.5, place + 0.5, color=style.VERMILION, linestyle="--", linewidth=1)
    text = f"dashed: theory, e = {low:.3g}" if low == high else f"dashed: theory's bounds, {low:.3g} and {high:.3g}"
    text = text if math.isfinite(low) else f"dashed: theory's upper bound, {high:.3g}"
    top.set_title(text, color=style.VERMILION, fontsize=6, loc="right", pad=2)


@style.styled
def draw_rho(ds: xr.Dataset) -> Figure:
    """The histogram of ρ over all layers above one row a layer, with each layer's mean."""
    figure, top, rows = _stack(ds, "ρ = qᵀk")
    for axes in (top, rows):
        axes.axvline(0, color="0.4", linewidth=0.6)
    rows.plot(ds["mean"], np.arange(ds.sizes["layer"]), "o", color=style.VERMILION, markersize=2.5)
    rows.set_title("• mean", color=style.VERMILION, fontsize=6, loc="right", pad=2)
    n, negative = int(ds["n"].sum()), int(ds["negative"].sum())
    style.write_below(figure, [f"{n:,} values of ρ, {negative:,} of them negative ({negative / max(n, 1):.1%}).", style.note(ds)])
    return figure


@style.styled
def draw_rho_read(ds: xr.Dataset) -> Figure:
    """A panel a layer: ρ across, ‖S̄ᵀd‖ upwards on a log scale, colour the count on a log scale."""
    layers = ds.sizes["layer"]
    columns = min(layers, 4 if layers > 6 else 3)
    lines = -(-layers // columns)
    figure = style.new_figure(style.COLUMN, 0.75 + lines * (1.3 if columns < 4 else 0.8))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    norm = LogNorm(1, max(int(ds["counts"].max()), 10))
    for i, axes in enumerate(panels.flat):
        if i >= layers:
            axes.set_axis_off()
            continue
        counts = np.ma.masked_equal(ds["counts"].isel(layer=i).values.T, 0)
        mesh = axes.pcolormesh(ds["edges"], ds["read_edges"], counts, norm=norm, cmap="viridis", rasterized=True)
        axes.set_yscale("log")
        axes.set_title(f"layer {ds['layer'].values[i]}", pad=2, fontsize=6)
        axes.axvline(0, color="0.4", linewidth=0.5)
        axes.set_xticks([-0.5, 0.5] if columns > 2 else [-0.5, 0, 0.5])
        axes.yaxis.set_minor_locator(NullLocator())
        last = i + columns >= layers
        axes.tick_params(labelbottom=last)
        axes.set_xlabel("ρ = qᵀk" if last else "")
    figure.supylabel("‖S̄ᵀd‖", fontsize=7)
    style.colour_bar(figure, mesh, list(panels.flat), "count in a bin", aspect=20 * lines)
    n, zero, first, below = (int(ds[name].sum()) for name in ("n", "zero", "zero_first", "below"))
    where = f"{'all' if first == zero else f'{first:,} of them'} at first tokens of prompts, where the memory is empty"
    notes = [f"{n:,} pairs. Not drawn: {below:,} below the axis, {zero:,} with ‖S̄ᵀd‖ = 0" + (f", {where}." if zero else ".")]
    style.write_below(figure, [*notes, style.note(ds)])
    return figure


def _stack(ds: xr.Dataset, label: str) -> tuple[Figure, Axes, Axes]:
    """A histogram over all layers on a log scale above one a layer, whose shape is seen: each as high as its row."""
    layers, counts, edges = ds.sizes["layer"], ds["counts"].values, ds["edges"].values
    height = min(0.28 * layers, 1.2 + 0.05 * layers)
    figure = style.new_figure(style.COLUMN, 2.1 + height)
    top, rows = figure.subplots(2, 1, sharex=True, height_ratios=[0.9, height])
    top.stairs(counts.sum(0), edges, fill=True, color=style.BLUE, label="main edit")
    top.set_yscale("log" if counts.any() else "linear")
    top.set_ylim(0.5, None)
    top.set_ylabel("all layers:\ncount")
    for row, count in enumerate(counts):
        rows.stairs(row + 0.45 - 0.85 * count / max(count.max(), 1), edges, baseline=row + 0.45, fill=True, color=style.BLUE)
    rows.set_ylim(layers - 0.5, -0.5)
    style.label_rows(rows.yaxis, ds["layer"].values)
    peaks = counts.max(1)
    span = f"{peaks[0]:,}" if peaks.min() == peaks.max() else f"{peaks.min():,} to {peaks.max():,}"
    rows.set_title(f"layers scaled to their peaks, counts of {span}", fontsize=6, loc="left", pad=2)
    rows.set_ylabel("layer")
    rows.set_xlabel(label)
    rows.set_xlim(edges[0], edges[-1])
    rows.xaxis.set_major_locator(MaxNLocator(5))
    return figure, top, rows
