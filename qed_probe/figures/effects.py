"""What an added direction does at once and what it does later."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, style

LOOKS = {"immediate": style.ORANGE, "lasting": style.BLUE, "interaction": style.GREEN, "total": style.INK}
MARKS = {"immediate": "o", "lasting": "^", "interaction": "v", "total": "s"}
CONVENTIONS = {"own reads": "own reads, base transitions", "base reads": "base reads, own transitions"}
LABELLED = 8
"""Layers that a legend names."""


@style.styled
def draw_effects(ds: xr.Dataset) -> Figure:
    """Shares of Δ = y − y⁰ by lag in both conventions, of the 2×2 by layer and by role, and sizes over ‖y⁰‖ by layer.

    Takes the part ``effects`` of ``inspect_memory``. Shares of several heads are weighted by their ``effect_energy``, as
    they are pooled over tokens; of sizes a mark is a head. Layers in which the direction has no effect say so.
    """
    figure = style.new_figure(style.PAGE, 3.7)
    grid = figure.subplot_mosaic([["own reads", "base reads", "roles"], ["shares", "sizes", "roles"]], width_ratios=[1, 1, 0.9])
    layers, shades = ds["layer"].values, axes.shades(ds.sizes["layer"])
    for name, title in CONVENTIONS.items():
        _draw_lags(grid[name], ds.sel(effect_convention=name), shades)
        grid[name].set_title(title, pad=3)
    ends = np.array([grid[name].get_ylim() for name in CONVENTIONS])
    for name in CONVENTIONS:
        grid[name].set_ylim(ends[:, 0].min(), ends[:, 1].max())
        grid[name].set_ylabel("share of Δ (%)")
    _draw_shares(grid["shares"], ds)
    _draw_sizes(grid["sizes"], ds)
    _draw_roles(grid["roles"], ds)
    for name in ("shares", "sizes"):
        style.label_rows(grid[name].xaxis, layers)
        grid[name].set_xlabel("layer")
    by_layer = [axes.entry(f"layer {layer}", color=shades[i]) for i, layer in enumerate(layers)]
    parts = [axes.entry(part, color=LOOKS[part], marker=MARKS[part], markersize=3, linestyle="none") for part in LOOKS]
    axes.legend(figure, by_layer if len(layers) <= LABELLED else [by_layer[0], by_layer[-1]], parts)
    style.write_below(figure, _lines(ds))
    return figure


def pooled(ds: xr.Dataset, name: str) -> xr.DataArray:
    """Shares of all heads together, NaN where no head has an effect."""
    weight = ds["effect_energy"] if "effect_role" in ds[name].dims else ds["effect_energy"].sel(effect_role="all", drop=True)
    return (ds[name].fillna(0) * weight).sum("head") / weight.sum("head").where(weight.sum("head") > 0)


def _draw_lags(panel: Axes, ds: xr.Dataset, shades: NDArray[np.float64]) -> None:
    lags, shares = ds["effect_lag"].values, 100 * pooled(ds, "effect_lag_share").transpose("layer", "effect_lag").values
    shares = np.where(ds["effect_lag_n"].values > 0, shares, np.nan)
    for row, shade in zip(shares, shades, strict=True):
        panel.plot(np.arange(len(lags)), row, color=shade, marker="o", markersize=2.2)
    panel.axhline(0, color=style.INK, linewidth=0.5)
    panel.set_xticks(np.arange(len(lags)), axes.span_labels(lags), rotation=60)
    panel.set_xlabel("lag t − j (tokens)")
    panel.grid(axis="y", color="0.9", linewidth=0.4)
    if not np.isfinite(shares).any():
        axes.label_gap(panel, "no effect" if ds["effect_n"].any() else "no tokens")


def _draw_shares(panel: Axes, ds: xr.Dataset) -> None:
    """A stacked bar a layer: what is positive stands on 0, the rest hangs from there."""
    shares = 100 * pooled(ds, "effect_share").sel(effect_role="all").transpose("effect_part", "layer")
    at = np.arange(ds.sizes["layer"])
    above, below = np.zeros(len(at)), np.zeros(len(at))
    for part in ("immediate", "lasting", "interaction"):
        x = shares.sel(effect_part=part).fillna(0).values
        panel.bar(at, x, 0.8, np.where(x > 0, above, below), color=LOOKS[part], linewidth=0)
        above, below = above + np.maximum(x, 0), below + np.minimum(x, 0)
    for layer in np.flatnonzero(np.isnan(shares.sel(effect_part="total"))):
        axes.label_gap(panel, "no effect" if int(ds["effect_n"].isel(layer=layer).max()) else "no tokens", float(layer))
    panel.axhline(0, color=style.INK, linewidth=0.5)
    panel.set_ylabel("share of Δ (%)")
    panel.set_title("2×2 of memory and step", pad=3)
    panel.set_xlim(-0.6, len(at) - 0.4)
    _scale(panel, "y")


def _draw_sizes(panel: Axes, ds: xr.Dataset) -> None:
    sizes = ds["effect_median"].sel(effect_role="all").transpose("effect_part", "layer", "head").values
    for part, x, shift in zip(ds["effect_part"].values, sizes, axes.set_off(len(sizes), 0.7), strict=True):
        places = np.arange(len(x))[:, None] + shift + 0 * x
        drawn = np.isfinite(x) & (x > 0)
        look: dict[str, Any] = {"color": LOOKS[part], "marker": MARKS[part]}
        panel.plot(places[drawn], x[drawn], **look, linestyle="none", markersize=2.4, markeredgewidth=0, alpha=0.8)
    if (sizes > 0).any():
        panel.set_yscale("log")
    else:
        axes.label_gap(panel, "no effect" if ds["effect_n"].any() else "no tokens")
    panel.set_ylabel("median ‖part‖/‖y⁰‖")
    panel.set_title("size, a mark a head", pad=3)
    panel.set_xlim(-0.6, ds.sizes["layer"] - 0.4)
    panel.grid(axis="y", color="0.9", linewidth=0.4)


def _draw_roles(panel: Axes, ds: xr.Dataset) -> None:
    """A band a role, in it a row a layer."""
    shares = 100 * pooled(ds, "effect_share").transpose("effect_part", "effect_role", "layer", ...)
    roles, n = [str(role) for role in ds["effect_role"].values], ds["effect_n"].max("layer").values
    places = np.arange(len(roles))[:, None] + axes.set_off(ds.sizes["layer"], 0.6)
    for part in ("immediate", "lasting", "interaction"):
        x = shares.sel(effect_part=part).values
        panel.plot(x, places, MARKS[part], color=LOOKS[part], markersize=2.8, markeredgewidth=0, alpha=0.8)
    for row in np.flatnonzero(np.isnan(shares.sel(effect_part="total").values).all(1)).tolist():
        text = "no effect" if n[row] else "no tokens"
        panel.text(0.5, row, text, transform=panel.get_yaxis_transform(), ha="center", va="center", color=style.GREY, fontsize=6)
    style.label_rows(panel.yaxis, np.array([f"{role}\n{count:,}" for role, count in zip(roles, n, strict=True)]), most=len(roles))
    panel.set_ylim(len(roles) - 0.5, -0.5)
    panel.axvline(0, color=style.INK, linewidth=0.5)
    panel.set_xlabel("share of Δ (%)")
    panel.set_title("2×2 by role, tokens", pad=3)
    _scale(panel, "x")


def _scale(panel: Axes, which: str) -> None:
    """At least 0 to 100 %."""
    low, high = panel.get_ylim() if which == "y" else panel.get_xlim()
    (panel.set_ylim if which == "y" else panel.set_xlim)(min(low, -5), max(high, 105))
    panel.grid(axis=which, color="0.9", linewidth=0.4)  # type: ignore[arg-type]
    panel.set_axisbelow(True)


def _lines(ds: xr.Dataset) -> list[str]:
    """What is split, over how much, what is left out, and how not to read it."""
    n, still = ds["effect_n"].sel(effect_role="all").values, int(ds["effect_still"].sel(effect_role="all").max())
    silent, lost = int(ds["effect_silent"].sel(effect_role="all").max()), int(ds["nonfinite"].max())
    cancelling = ds["effect_cancelling"].values
    known = cancelling[np.isfinite(cancelling)]
    ratio = f" ΣΣ_j‖part_j‖/Σ‖Δ‖ is {known.min():.2g} to {known.max():.2g}: single steps cancel." if known.size else ""
    left = [f"{still:,} tokens of a head have no effect, as a prompt's first"] * bool(still)
    left += [f"{silent:,} have ‖y⁰‖ = 0"] * bool(silent) + [
        f"up to {lost:,} prompts a layer whose inputs are not finite are left out"
    ] * bool(lost)
    prompts = style.counted(ds.attrs["prompts"], "prompt")
    return [
        f"{ds.attrs['subject']}, {prompts}, {axes.span(n, 'tokens')} a layer. Δ = y − y⁰, with λd less "
        f"without, = −λ Σ ω c. Shares: Σ⟨part, Δ⟩/Σ‖Δ‖² over tokens, which add up to 1 and may lie beyond it.{ratio}",
        "immediate: the step alone, of a memory without the direction; lasting: the memory alone, without the step; interaction: "
        f"the rest. chosen: predicts the answer, or is the last. {'; '.join(left)}{'.' * bool(left)}",
        "By role: a row a layer, the first on top. Each layer's inputs are as they were: what one layer's "
        "effect does to the next is not in it.",
    ]
