"""Strict recall against lag, by layer, and the half-lives of writes."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from qed_probe.figures import axes, style

ACROSS = 3
CURVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gain, kept keys": ("gain", "kept", {"color": style.BLUE, "marker": "o", "markersize": 2}),
    "own write's part": ("own", "kept", {"color": style.ORANGE, "linestyle": "--"}),
    "another token's value": ("null", "kept", {"color": style.GREY, "linestyle": ":"}),
    "gain, rewritten keys": ("gain", "rewritten", {"color": style.VERMILION, "marker": "x", "markersize": 2.5, "linewidth": 0.6}),
}
HALVES: dict[str, dict[str, Any]] = {
    "decay": {"color": style.SKY, "marker": "s"},
    "own": {"color": style.ORANGE, "marker": "o"},
    "own kept": {"color": style.GREEN, "marker": "D"},
}
WORDS = {"decay": "half-life: decay alone", "own": "with all edits", "own kept": "of kept keys"}


@style.styled
def draw_recall(ds: xr.Dataset) -> Figure:
    """A panel a layer: recall, own-write part and null of all heads together, gain by head (thin); a panel of half-lives.

    Takes the part ``recall`` of ``inspect_memory``. Rewritten keys are drawn apart. A hollow mark is a half-life that is
    longer than the longest lag.
    """
    layers = ds["layer"].values
    across = min(len(layers), ACROSS)
    rows = -(-len(layers) // across)
    figure = style.new_figure(style.PAGE, 0.7 + 1.5 * rows)
    grid = figure.add_gridspec(rows, across + 1, width_ratios=[1.0] * across + [0.8])
    for i, layer in enumerate(layers):
        panel = figure.add_subplot(grid[divmod(i, across)], sharey=figure.axes[0] if i else None)
        _draw_layer(panel, ds.sel(layer=layer))
        panel.set_title(f"layer {layer}", pad=3)
        panel.tick_params(labelleft=i % across == 0)
        panel.set_xlabel("lag Δ (tokens)" if i + across >= len(layers) else "")
        panel.set_ylabel("⟨r, v⟩/‖v‖²" if i % across == 0 else "")
    low, high = figure.axes[0].get_ylim()
    figure.axes[0].set_ylim(low, high + 0.15 * (high - low))  # room for the counts
    _draw_halves(figure.add_subplot(grid[:, -1]), ds)
    lines = [axes.entry(name, **look) for name, (_, _, look) in CURVES.items()]
    marks = [axes.entry(WORDS[name], linestyle="none", markersize=3, **look) for name, look in HALVES.items()]
    axes.legend(figure, lines, marks)
    style.write_below(figure, _note(ds))
    return figure


def _draw_layer(panel: Axes, ds: xr.Dataset) -> None:
    at, lags = np.arange(ds.sizes["recall_lag"]), ds["recall_lag"].values
    for part, keys, look in CURVES.values():
        panel.plot(at, ds[f"layer_recall_{part}"].sel(recall_keys=keys).values, zorder=3, **look)
    heads = ds["recall_gain"].sel(recall_keys="kept").transpose("recall_lag", "head").values
    panel.plot(at, heads, color=style.BLUE, linewidth=0.4, alpha=0.5)
    panel.axhline(0, color=style.INK, linewidth=0.5)
    style.label_rows(panel.xaxis, np.array([axes.length_label(lag) if lag else "0" for lag in lags]), most=8)
    panel.grid(axis="y", color="0.9", linewidth=0.4)
    panel.set_axisbelow(True)
    n = [ds["layer_recall_n"].sel(recall_keys=keys).values for keys in ("kept", "rewritten")]
    text = "\n".join(f"{keys}: n = {x[1 % len(x)]:,} … {x[-1]:,}" for keys, x in zip(("kept", "rewritten"), n, strict=True))
    place: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 5, "color": style.GREY}
    panel.text(0.98, 0.97, text if n[0][0] else "no tokens", transform=panel.transAxes, **place)


def _draw_halves(panel: Axes, ds: xr.Dataset) -> None:
    layers, shifts = np.arange(ds.sizes["layer"]), axes.set_off(len(HALVES), 0.6)
    for (name, look), shift in zip(HALVES.items(), shifts, strict=True):
        mine = ds.sel(recall_curve=name).transpose("layer", "head", ...)
        x = np.repeat(layers + shift, ds.sizes["head"])
        y, open_ = mine["write_half_life"].values.ravel(), mine["half_life_censored"].values.ravel()
        panel.plot(x[~open_], y[~open_], linestyle="none", markersize=3, markeredgewidth=0, alpha=0.8, **look)
        panel.plot(x[open_], y[open_], linestyle="none", markersize=3, fillstyle="none", markeredgewidth=0.7, **look)
    for at in layers[ds["write_half_life"].isnull().all(("head", "recall_curve")).values]:
        axes.label_gap(panel, "no tokens", float(at))
    panel.set_yscale("symlog", base=2, linthresh=1)
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.set_ylim(bottom=0)
    style.label_rows(panel.xaxis, ds["layer"].values, most=12)
    panel.set_xlabel("layer")
    panel.set_ylabel("half-life (tokens)")
    panel.set_title("what is left of a write", pad=3)


def _note(ds: xr.Dataset) -> list[str]:
    lags, n = ds["recall_lag"].values, ds["layer_recall_n"].sel(recall_keys="all")
    zero = int(ds["zero_targets"].sum())
    first = int(lags[1 % len(lags)])
    lines = [
        "r = Sᵀk, what a write's own key finds in the memory Δ tokens later; v, what the write aims at (w⊙v with channel gates). "
        "Ratios of sums over tokens; thick: all heads, thin: a head.",
        "Kept, rewritten: without and with a later edit in (t, t + Δ] whose key has |cos| > 0.9 to this one; "
        f"n at lags {first} … {int(lags[-1])}, of {axes.span(n.values, 'token-heads')} a layer and lag. "
        "Null: v of another token of the prompt.",
        "Half-life: median kᵀΦk/‖k‖² of a prompt, mean over prompts, reaches a half; hollow: not by the longest lag.",
    ]
    return [*lines, *([f"{zero:,} token-heads write 0."] * bool(zero)), axes.about(ds)]
