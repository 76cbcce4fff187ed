"""Angles between erase address, direction, query and key by layer; takes what ``analyses.address_geometry`` returns."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qed_probe.figures import style

LOW, MIDDLE, HIGH = 0.05, 0.5, 0.95
DASHED: dict[str, Any] = {"color": style.INK, "linestyle": (0, (3, 2)), "linewidth": 0.7}
MEAN: dict[str, Any] = {"color": style.BLUE, "marker": "o", "markersize": 3, "linestyle": "none"}
MEDIAN: dict[str, Any] = {"color": style.BLUE, "marker": "_", "markersize": 5, "linestyle": "none"}
MAXIMUM: dict[str, Any] = {"color": style.VERMILION, "marker": "v", "markersize": 2.5, "linestyle": "none"}
CHANCE: dict[str, Any] = {"color": style.INK, "linewidth": 0.9}


@style.styled
def draw_address_geometry(ds: xr.Dataset) -> Figure:
    """A panel a measure: by layer its mean, median, 5 to 95 % of the token-heads and maximum, before the nulls."""
    measures, layers = ds["measure"].values, ds["layer"].values
    across = 2 if len(layers) <= 8 and len(measures) > 1 else 1
    lines = -(-len(measures) // across)
    figure = style.new_figure(style.COLUMN, 0.55 + 1.35 * lines)
    grid = figure.subplots(lines, across, sharex=True, squeeze=False)
    for panel, measure in zip(grid.flat, measures, strict=False):
        _draw(panel, ds.sel(measure=measure))
        style.label_rows(panel.xaxis, layers, most=12 if across == 1 else 8)
        panel.set_xlim(-0.5, len(layers) - 0.5)
    for spare in grid.flat[len(measures) :]:
        spare.set_axis_off()
    for i, panel in enumerate(grid.flat):
        last = len(measures) - across <= i < len(measures)
        panel.tick_params(labelbottom=last)
        panel.set_xlabel("layer" if last else "")
    figure.legend(
        handles=_entries(bool(ds["null_n"].sum())), loc="outside upper left", ncols=3, frameon=False,
        handlelength=1.6, columnspacing=1.0, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip
    style.write_below(figure, _notes(ds))
    return figure


def _draw(panel: Axes, ds: xr.Dataset) -> None:
    place = np.arange(ds.sizes["layer"])
    quantile, null = (ds[name].transpose("level", "layer") for name in ("quantile", "null_quantile"))
    ends = null.sel(level=[LOW, HIGH]).values
    panel.bar(place, ends[1] - ends[0], 0.8, ends[0], color=style.EMPTY, linewidth=0)
    panel.hlines(ds["null_mean"].values, place - 0.4, place + 0.4, **CHANCE)
    if np.isfinite(ds["isotropic"]):
        panel.axhline(float(ds["isotropic"]), **DASHED)
    panel.vlines(place, quantile.sel(level=LOW), quantile.sel(level=HIGH), color=style.BLUE, linewidth=1)
    panel.plot(place, quantile.sel(level=MIDDLE), **MEDIAN)
    panel.plot(place, ds["mean"], **MEAN)
    panel.plot(place, ds["maximum"], **MAXIMUM)
    for row in place[ds["n"].values == 0]:
        panel.text(row, 0.5, "none", rotation=90, ha="center", va="center", color=style.GREY, fontsize=6)
    cosine = "cos" in str(ds["measure_name"].values)
    panel.set_ylim(0, 1.05 if cosine else None)
    if cosine:
        panel.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    panel.set_title(str(ds["measure_name"].values), pad=3)


def _entries(null: bool) -> list[Line2D | Patch]:
    found: list[Line2D | Patch] = [Line2D([], [], label="mean", **MEAN), Line2D([], [], label="median", **MEDIAN)]
    found.append(Line2D([], [], color=style.BLUE, linewidth=1, label="5 to 95 %"))
    found.append(Line2D([], [], label="maximum", **MAXIMUM))
    if null:
        found += [Patch(color=style.EMPTY, label="null: 5 to 95 %"), Line2D([], [], label="null: mean", **CHANCE)]
    return [*found, Line2D([], [], label="isotropic: mean", **DASHED)]


def _notes(ds: xr.Dataset) -> list[str]:
    n, undefined = int(ds["n"].max("measure").sum()), int(ds["undefined"].max("measure").sum())
    lines = [f"{n:,} token-heads" + f"; {undefined:,} more with a vector that is 0, which has no cosine" * (undefined > 0) + "."]
    if int(ds["null_n"].sum()):
        lines.append("Null: the same with the key (for q⊥ the query) of a token of another prompt, same layer and head.")
    else:
        lines.append("No null from other prompts' keys: there is only one prompt.")
    lines.append(f"Isotropic: directions without preference ({', '.join(_isotropic(ds))}).")
    return [*lines, style.note(ds)]


def _isotropic(ds: xr.Dataset) -> list[str]:
    found = ds["isotropic"].values
    return list(dict.fromkeys(f"{x:.3f}" for x in found[np.isfinite(found)])) or ["none"]
