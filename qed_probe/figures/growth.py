"""How far memories can grow and do: transitions over windows, norms of states, and what the added direction adds to an edit."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qed_probe.figures import axes, style

LOOKS: dict[str, dict[str, Any]] = {
    "norm": {"color": style.VERMILION, "label": "most possible, ‖Φ‖₂"},
    "realised": {"color": style.BLUE, "label": "of the own write, ‖Φk‖/‖k‖"},
    "decay": {"color": style.GREEN, "label": "mean decay"},
    "volume": {"color": style.GREY, "label": "volume, Π|e|"},
}
DASHES = {"own": "-", "base": (0, (2, 1.5))}
FEW = 10
"""Bins of fewer tokens have no mean."""


@style.styled
def draw_growth(ds: xr.Dataset) -> Figure:
    """A panel a layer of the growth over windows; below, ‖S‖ by position and, by ρ and ‖S̄ᵀd‖, tokens and the edit's growth.

    Takes the part ``growth`` of ``inspect_memory``. Medians over tokens and heads, of ‖Φ‖₂ the maximum too; without the
    added direction dashed, where a mixer has one.
    """
    layers = ds["layer"].values
    across = min(len(layers), 4)
    rows = -(-len(layers) // across)
    height = 1.9 if rows == 1 else 1.15 * rows
    figure = style.new_figure(style.PAGE, 0.5 + height + 1.75)
    grid, joint = figure.add_gridspec(2, 1, height_ratios=[height, 1.75]), "joint_n" in ds
    above, below = grid[0].subgridspec(rows, across), grid[1].subgridspec(1, 3 if joint else 1)
    _draw_windows([figure.add_subplot(above[i // across, i % across]) for i in range(len(layers))], ds, across)
    _draw_norms(figure.add_subplot(below[0]), ds)
    if joint:
        _draw_joint(figure, figure.add_subplot(below[1]), figure.add_subplot(below[2]), ds)
    entries = [axes.entry(str(look["label"]), color=look["color"]) for look in LOOKS.values()]
    entries.append(axes.entry("largest ‖Φ‖₂", color=style.VERMILION, linewidth=0.5))
    both = "base" in ds["gates"].values
    axes.legend(figure, entries, [axes.entry("without λd", color=style.INK, linestyle=DASHES["base"])] * both)
    style.write_below(figure, _note(ds))
    return figure


def _draw_windows(panels: list[Axes], ds: xr.Dataset, across: int) -> None:
    """Growth over windows, a panel a layer, all on the same scales."""
    for panel, layer in zip(panels, ds["layer"].values, strict=True):
        panel.set_title(f"layer {layer}", pad=3)
        panel.set_yscale("log")
        if "growth_layer" not in ds:
            axes.label_gap(panel, "no token has another behind it")
            continue
        panel.axhline(1, color=style.INK, linewidth=0.5, zorder=1)
        cells = ds["growth_layer"].sel(layer=layer)
        if cells.isnull().all():
            axes.label_gap(panel, "no tokens")
        for name, look in LOOKS.items():
            for gates in ds["gates"].values:
                lines = np.exp(cells.sel(growth_of=name, gates=gates).transpose("growth_level", "window").values)
                panel.plot(ds["window"], lines[0], color=look["color"], linestyle=DASHES[str(gates)], linewidth=0.9)
                if name == "norm":
                    panel.plot(ds["window"], lines[-1], color=look["color"], linestyle=DASHES[str(gates)], linewidth=0.5)
        axes.length_axis(panel, ds["window"].values, 6 if across > 2 else 10)
    low, high = _span(ds)
    for panel in panels:
        panel.set_ylim(low, high)
    axes.label_outside(panels, across, "window (tokens)", "factor")


def _span(ds: xr.Dataset) -> tuple[float, float]:
    """What the scale shows: all of the norms and of what writes become, down to 1e-6; volume and decay may leave it."""
    if "growth_layer" not in ds:
        return 0.1, 1.0
    x = np.exp(ds["growth_layer"].sel(growth_of=["norm", "realised"]).values)
    x = x[np.isfinite(x) & (x > 0)]
    return max(1e-6, x.min(initial=1) / 2), 1.5 * x.max(initial=1)


def _draw_norms(panel: Axes, ds: xr.Dataset) -> None:
    """‖S‖_F by position, a line a layer, mean over heads and prompts."""
    layers = ds["layer"].values
    for layer, shade in zip(layers, axes.shades(len(layers)), strict=True):
        for gates in ds["gates"].values:
            line = ds["norm_mean"].sel(layer=layer, gates=gates).mean("head")
            marker = "o" if len(line) == 1 else None
            panel.plot(
                ds["norm_position"], line, color=shade, linestyle=DASHES[str(gates)], linewidth=0.9, marker=marker, markersize=2.5
            )
    if ds["norm_mean"].isnull().all():
        axes.label_gap(panel, "no states")
    axes.from_zero(panel)
    panel.set_xlim(0, 1.03 * float(ds["norm_position"][-1]))
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.set_xlabel("tokens seen")
    panel.set_title("mean ‖S‖ over prompts and heads", pad=3)
    few = sorted({0, len(layers) // 2, len(layers) - 1}) if len(layers) > 6 else range(len(layers))
    panel.legend(
        handles=[axes.entry(f"layer {layers[i]}", color=axes.shades(len(layers))[i]) for i in few],
        loc="best", frameon=False, handlelength=1.2, labelspacing=0.2, borderaxespad=0.2,
    )  # fmt: skip


def _draw_joint(figure: Figure, counted: Axes, grown: Axes, ds: xr.Dataset) -> None:
    """Tokens by ρ and ‖S̄ᵀd‖ over all layers and heads, and the mean growth of their main edits."""
    n, total = (ds[name].sum(("layer", "head")).transpose("read_bin", "rho_bin").values for name in ("joint_n", "joint_growth"))
    rows, columns = np.flatnonzero(n.any(1)), np.flatnonzero(n.any(0))
    titles = {counted: "tokens and heads", grown: "mean ln(‖M‖₂/‖M‖₂ without λd)"}
    for panel, title in titles.items():
        panel.set_title(title, pad=3)
        panel.set_xlabel("ρ = qᵀk")
        panel.set_ylabel("log₁₀ ‖S̄ᵀd‖")
        panel.set_facecolor(style.EMPTY)
    if not len(rows):
        for panel in titles:
            axes.label_gap(panel, "nothing is read")
        return
    part = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    x, y = ds["rho_bin"].values[part[1]], np.log10(ds["read_bin"].values[part[0]])
    n, total = n[part], total[part]
    mean = np.ma.masked_where(n < FEW, total / np.maximum(n, 1))
    top = float(np.abs(mean).max()) if mean.count() else 0.0
    look: dict[str, Any] = {"shading": "nearest", "rasterized": True}
    mesh = counted.pcolormesh(x, y, np.ma.masked_equal(n, 0), norm=LogNorm(1, max(int(n.max()), 10)), cmap="viridis", **look)
    style.colour_bar(figure, mesh, counted, "", aspect=15)
    mesh = grown.pcolormesh(x, y, mean, norm=Normalize(-(top or 1), top or 1), cmap="PuOr", **look)
    bar = figure.colorbar(mesh, ax=grown, pad=0.02, aspect=15)
    bar.ax.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))


def _note(ds: xr.Dataset) -> list[str]:
    """What the lines are and over how many, what is 0, what is above 1, and what the map leaves out."""
    lines = [axes.about(ds)]
    if "growth_n" in ds:
        norms = ds.sel(growth_of="norm", gates="own")
        n, above = (norms[name].sum(("layer", "head")) for name in ("growth_n", "growth_above"))
        starts = axes.span(ds["growth_starts"].values, "tokens")
        lines.append(
            f"Φ: all decays and edits over a window, from {starts} a layer and head, drawn at random; medians, of "
            f"{int(n[0]):,} windows of 1 token to {int(n[-1]):,} of {int(ds['window'][-1])}. "
            f"‖Φ‖₂ > 1 in {int(above.sum()):,} of {int(n.sum()):,}. {_zeros(ds)}What leaves a panel goes on falling."
        )
    if "joint_n" in ds:
        total, tokens = float(ds["edit_growth"].sum()), int(ds["edit_growth_n"].sum())
        nothing, strange = (int(x) for x in ds["joint_left_out"].sum(("layer", "head")).values)
        ratio = f"the mean of its ln ratio is {total / max(tokens, 1):.2g} over {tokens:,} tokens and heads, the largest "
        ratio += f"{float(ds['edit_growth_max'].max()):.2g}"
        lines.append(
            f"M: the main edit of one token; {ratio if tokens else 'there is none'}. A mean in the map is of at least {FEW}. "
            f"Not in the maps: {nothing:,} with ‖S̄ᵀd‖ = 0, as at a prompt's first token; {strange:,} not finite."
        )
        same = tokens > 0 and not ds["joint_growth"].any() and not ds["edit_growth"].any()
        lines += ["λ = 0: with and without λd is the same."] * same
    lines.append(f"‖S‖ every {int(ds['norm_position'][0])} tokens; a prompt's last state stands at the next of these.")
    return lines


def _zeros(ds: xr.Dataset) -> str:
    """How many windows of one token have no logarithm of their volume."""
    zero = int(ds["growth_zero"].sel(growth_of="volume", gates="own", window=1).sum())
    return f"Π|e| = 0 at {zero:,} tokens. " * bool(zero)
