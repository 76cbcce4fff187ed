"""What other erase directions would have done, beside the actual one."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, style
from qed_probe.store.replays import left_out

REGIMES = {"one-step": "one step", "trajectory": "whole trajectory"}
WHAT = {
    "direction": "the added direction d replaced, gates kept: o⁻ = y + λρS̄ᵀd, δo = −λρS̄ᵀd",
    "address": "the erase address ε replaced, gates kept: o⁻ = Ŝᵀq, δo = −γ(qᵀε)Ŝᵀε",
}


@style.styled
def draw_replay(ds: xr.Dataset) -> Figure:
    """Perturbation of each direction over the actual one's, one step and whole trajectory apart, and the trajectory's drift.

    Takes what ``replay`` returns. Panels in rows by ``match``; bars are ``mean_of_ratios``, as in EDA's Fig. 2b, and dots the
    ``ratio`` of each layer; of the drift ``layers_drift_mean`` and ``drift_mean``. What is NaN has no bar and is labelled so.
    """
    names, ways = [str(name) for name in ds["direction"].values], [str(way) for way in ds["match"].values]
    across = len(REGIMES) + 1
    figure, panels = axes.panels(across * len(ways), across, 0.4 + 0.13 * len(names), style.PAGE, alike=False)
    for row, way in enumerate(ways):
        mine = ds.sel(match=way)
        suffix = "" if len(ways) == 1 else ", as made" if way == "none" else f", same {way}"
        for column, (regime, title) in enumerate(REGIMES.items()):
            panel, found = panels[across * row + column], mine.sel(regime=regime)
            _draw_bars(panel, names, found["mean_of_ratios"].values, found["ratio"].transpose("direction", "layer").values)
            panel.axvline(1, zorder=3, **axes.DASHED)
            panel.set_title(title + suffix, pad=3)
            panel.set_xlabel("‖δo‖/‖o⁻‖ over the actual one's")
        panel, found = panels[across * row + 2], mine.sel(regime="trajectory")
        drift = found["drift_mean"].transpose("direction", "layer").values
        _draw_bars(panel, names, 100 * found["layers_drift_mean"].values, 100 * drift)
        panel.set_title("whole trajectory" + suffix, pad=3)
        panel.set_xlabel("drift ‖y' − y‖/‖y‖ (%)")
    _share_scale(panels, across)
    dot = axes.entry("a layer", color=style.INK, marker="o", markersize=2.2, linestyle="none", alpha=0.7)
    bar = axes.entry("mean over layers of the ratio in each (of the drift: of its mean)", color=style.SKY, linewidth=4)
    axes.legend(figure, [bar, dot, axes.entry("actual", **axes.DASHED)])
    style.write_below(figure, _note(ds))
    return figure


def _draw_bars(panel: Axes, names: list[str], means: NDArray[np.float64], by_layer: NDArray[np.float64]) -> None:
    """A row a direction, the first on top."""
    places = np.arange(len(names))
    there = np.isfinite(means)
    colours = [style.GREY if name == "actual" else style.SKY for name in names]
    panel.barh(places[there], means[there], 0.7, color=[colours[i] for i in places[there]], zorder=2)
    layers = by_layer.shape[1]
    for i, place in enumerate(places.tolist()):
        heights = place + axes.set_off(layers, 0.45)
        panel.plot(by_layer[i], heights, "o", color=style.INK, markersize=1.8, markeredgewidth=0, alpha=0.7, zorder=4)
        if not there[i]:
            panel.text(0.02, place, "no data", transform=panel.get_yaxis_transform(), va="center", color=style.GREY, fontsize=6)
    style.label_rows(panel.yaxis, np.array(names), most=len(names))
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)


def _share_scale(panels: list[Axes], across: int) -> None:
    """Ratios on one scale, drifts on another, both from 0."""
    groups = [[panel for i, panel in enumerate(panels) if (i % across == across - 1) == last] for last in (False, True)]
    for group in groups:
        most = max(panel.get_xlim()[1] for panel in group)
        for panel in group:
            panel.set_xlim(0, most)


def _note(ds: xr.Dataset) -> list[str]:
    """What was replaced, over how much, how not to read it, and what is left out."""
    n, layers = ds["n"].sel(direction="actual").values, ds.sizes["layer"]
    over = f"{style.counted(layers, 'layer')} of {axes.span(n, 'tokens and heads')}"
    lines = [
        f"{ds.attrs['subject']}, {style.counted(ds.attrs['tokens'], 'token')}, {over}; {WHAT[ds.attrs['replaced']]}; "
        f"random: {ds.attrs['draws']} draws.",
        "One step: from the actual memory. Whole trajectory: the memory itself replayed. A smaller perturbation is not better by "
        "itself: none has the smallest, and its drift says what it changes later.",
    ]
    left = left_out(ds)
    return lines + [f"Left out: {'; '.join(left)}."] * bool(left)
