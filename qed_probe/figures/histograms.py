"""Figures of distributions; they take what ``analyses.histograms`` returns."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from qed_probe.figures import style


@style.styled
def draw_eigenvalues(ds: xr.Dataset) -> Figure:
    """The eigenvalue's histogram over all layers above a row a layer, theory's ends drawn in, the outliers counted."""
    used = ds.sel(record="eigenvalue")
    figure, top, rows = _stack(used, "eigenvalue e = 1 − aᵀk", 0.75)
    low, high = float(ds["low"].min()), float(ds["high"].max())
    for end in (low, high):
        top.axvline(end, color=style.VERMILION, linestyle="--")
    place = np.arange(ds.sizes["layer"])
    for ends in (ds["low"].values, ds["high"].values):
        rows.vlines(ends, place - 0.5, place + 0.5, color=style.VERMILION, linestyle="--", linewidth=1)
    top.set_title(f"dashed: theory, e between {low:.3g} and {high:.3g}", color=style.VERMILION, fontsize=6, loc="right", pad=2)
    lines = [f"{int(used['n'].sum()):,} values of e from {used['minimum'].min():.4g} to {used['maximum'].max():.4g}"]
    names = (("e < 0", "below_zero"), ("e > 1", "above_one"), ("|e| > 1", "beyond_one"), ("beyond theory", "outside_theory"))
    for record, how in (("eigenvalue", "as used"), ("eigenvalue_unit", "key renormalised")):
        if record in ds["record"]:
            lines.append(f"{how}:  " + ",  ".join(f"{text}: {int(ds[name].sel(record=record).sum()):,}" for text, name in names))
    if int(used["outside_bins"].sum()):
        lines.append(f"{int(used['outside_bins'].sum()):,} beyond the axis")
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


@style.styled
def draw_rho(ds: xr.Dataset) -> Figure:
    """The histogram of ρ over all layers above one row a layer, with each layer's mean."""
    figure, top, rows = _stack(ds, "ρ = qᵀk", 0.75)
    for axes in (top, rows):
        axes.axvline(0, color="0.4", linewidth=0.6)
    rows.plot(ds["mean"], np.arange(ds.sizes["layer"]), "o", color=style.VERMILION, markersize=2.5, label="mean")
    rows.legend(loc="upper left", handlelength=1, borderpad=0.3)
    n, negative = int(ds["n"].sum()), int(ds["negative"].sum())
    style.write_below(figure, [f"{n:,} values of ρ, {negative:,} of them negative ({negative / max(n, 1):.1%})", style.note(ds)])
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
    n, zero, below = (int(ds[name].sum()) for name in ("n", "zero", "below"))
    text = f"{n:,} pairs;  not drawn: {zero:,} with ‖S̄ᵀd‖ = 0, {below:,} below the axis"
    style.write_below(figure, [text, style.note(ds)])
    return figure


def _stack(ds: xr.Dataset, label: str, row_top: float) -> tuple[Figure, Axes, Axes]:
    """A pooled histogram on a log scale above a row a layer, coloured by that layer's share of values in each bin."""
    layers, counts, edges = ds.sizes["layer"], ds["counts"].values, ds["edges"].values
    low = min(0.35 + 0.28 * layers, 0.35 + 1.2 + 0.05 * layers)
    figure = style.new_figure(style.COLUMN, 0.9 + row_top + low)
    top, rows = figure.subplots(2, 1, sharex=True, height_ratios=[row_top, low - 0.35])
    top.stairs(counts.sum(0), edges, fill=True, color=style.BLUE)
    top.set_yscale("log")
    top.set_ylim(0.5, None)
    top.set_ylabel("all layers:\ncount")
    share = np.ma.masked_equal(counts / np.maximum(ds["n"].values[:, None], 1), 0)
    norm = style.log_norm(share.filled(0))
    mesh = rows.pcolormesh(edges, np.arange(layers + 1) - 0.5, share, norm=norm, cmap="cividis", rasterized=True)
    rows.invert_yaxis()
    style.label_rows(rows.yaxis, ds["layer"].values)
    rows.set_ylabel("layer")
    rows.set_xlabel(label)
    rows.xaxis.set_major_locator(MaxNLocator(5))
    style.colour_bar(figure, mesh, rows, "part of the layer", aspect=12)
    return figure, top, rows
