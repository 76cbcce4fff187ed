"""Shares of decay, delta edit and address erase in their sum; takes what ``analyses.gate_budgets`` returns."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from qed_probe.figures import style

Numbers = NDArray[np.float64]

LOOKS = {"decay": ("decay 1 − ᾱ", style.BLUE), "delta": ("delta ᾱβ", style.SKY), "erase": ("erase ᾱγ", style.VERMILION)}
PALE = 0.5


@style.styled
def draw_gate_budgets(ds: xr.Dataset) -> Figure:
    """Stacked shares by bins of ᾱ under the counts, of all together, and a layer a row; the two kinds of share side by side."""
    layers, edges = ds.sizes["layer"], ds["edges"].values
    height = min(0.28 * layers, 1.2 + 0.05 * layers)
    figure = style.new_figure(style.COLUMN, 2.5 + height)
    grid = figure.add_gridspec(3, 10, height_ratios=[0.45, 1.4, height])
    by_bin, total = figure.add_subplot(grid[1, :8]), figure.add_subplot(grid[1, 8:])
    _draw_counts(figure.add_subplot(grid[0, :8], sharex=by_bin), ds)
    _stack(by_bin, ds["bin_share"].values, edges[:-1], np.diff(edges)[0])
    for centre in (edges[:-1] + edges[1:])[ds["n"].sum("layer").values == 0] / 2:
        by_bin.text(centre, 0.5, "empty", rotation=90, ha="center", va="center", color=style.GREY, fontsize=6)
    by_bin.set_xlim(0, 1)
    by_bin.set_xlabel("retention ᾱ")
    by_bin.set_ylabel("share of Σ b")
    _stack(total, ds["total_share"].values[:, None], np.zeros(1), 1.0, numbers=True)
    if not ds["n"].any():
        total.text(0.5, 0.5, "none", ha="center", va="center", color=style.GREY, fontsize=6)
    total.set_xlim(0, 1)
    total.set_xticks([0.5], ["all ᾱ"])
    total.tick_params(length=0, labelleft=False)
    rows = [figure.add_subplot(grid[2, :5]), figure.add_subplot(grid[2, 5:])]
    _draw_layers(rows[0], ds["layer_share"].values, ds["layer"].values, "all ᾱ")
    _draw_layers(rows[1], ds["share"].isel(bin=-1).values, ds["layer"].values, f"ᾱ ≥ {edges[-2]:.2g}")
    rows[0].set_ylabel("layer")
    rows[1].tick_params(labelleft=False)
    shown = [name for name in LOOKS if name != "erase" or _erases(ds)]
    figure.legend(
        handles=[Patch(color=LOOKS[name][1], label=LOOKS[name][0]) for name in shown],
        loc="outside upper left", ncols=3, frameon=False, handlelength=1.0, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
    style.write_below(figure, _notes(ds))
    return figure


def _draw_counts(panel: Axes, ds: xr.Dataset) -> None:
    counts = ds["n"].sum("layer").values
    panel.stairs(counts, ds["edges"].values, fill=True, color=style.GREY)
    panel.set_yscale("log" if counts.any() else "linear")
    panel.set_ylim(0.5, max(counts.max(), 1) * 3)
    panel.yaxis.set_major_locator(LogLocator(numticks=3))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.set_ylabel("count")
    panel.tick_params(labelbottom=False)


def _stack(panel: Axes, shares: Numbers, left: Numbers, width: float, numbers: bool = False) -> None:
    """Upright bars of ``shares`` ``[kind, bar, budget]``, the kinds beside each other within the width of a bar."""
    half = 0.46 * width
    for kind, share in enumerate(shares):
        x = left + width / 2 + (kind - 0.5) * half
        foot = np.zeros(len(x))
        for name, part in zip(LOOKS, share.T, strict=True):
            panel.bar(x, part, half * 0.96, foot, color=LOOKS[name][1], alpha=PALE if kind else 1, linewidth=0)
            if numbers and part[0] >= 0.08:
                ink = "white" if name == "decay" and not kind else "black"
                panel.text(x[0], foot[0] + part[0] / 2, f"{part[0]:.0%}", ha="center", va="center", fontsize=6, color=ink)
            foot = foot + np.nan_to_num(part)
    panel.set_ylim(0, 1)


def _draw_layers(panel: Axes, shares: Numbers, layers: NDArray[np.int64], title: str) -> None:
    """Level bars of ``shares`` ``[kind, layer, budget]``, the first layer on top, the second kind below the first."""
    for kind, share in enumerate(shares):
        y = np.arange(len(layers)) + (kind - 0.5) * 0.4
        foot = np.zeros(len(layers))
        for name, part in zip(LOOKS, share.T, strict=True):
            panel.barh(y, part, 0.4, foot, color=LOOKS[name][1], alpha=PALE if kind else 1, linewidth=0)
            foot = foot + np.nan_to_num(part)
    for row in np.flatnonzero(np.isnan(shares[0]).all(-1)):
        panel.text(0.5, float(row), "none", ha="center", va="center", color=style.GREY, fontsize=6)
    panel.set_ylim(len(layers) - 0.5, -0.5)
    panel.set_xlim(0, 1)
    panel.set_title(title, pad=3)
    panel.set_xlabel("share of Σ b")
    panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    style.label_rows(panel.yaxis, layers)
    panel.tick_params(axis="y", length=0)


def _erases(ds: xr.Dataset) -> bool:
    return bool((ds["total_share"].sel(budget="erase") > 0).any())


def _notes(ds: xr.Dataset) -> list[str]:
    n, zero, reflected = (int(ds[name].sum()) for name in ("n", "zero", "reflected"))
    counted = [f"{n:,} token-heads"] + [f"{zero:,} more without any budget are left out"] * (zero > 0)
    lines = ["Full colour: share of the summed budgets; pale: mean of each token-head's shares. " + "; ".join(counted) + "."]
    lines += [f"{reflected:,} have β > 1 (by over 1 %): an edit that reflects what it reads."] * (reflected > 0)
    lines += ["No address edit: γ = 0."] * (not _erases(ds))
    lines += ["The delta budget is that of the last of several delta edits."] * (ds.attrs["delta_edits"] > 1)
    lines.append("Gates, not energy: what an edit removes depends on what lies there. QED's λd has no part in them (dᵀk = 0).")
    return [*lines, style.note(ds)]
