"""What reads of the memory are made of: by role and lag, and of one prompt all reads by all sources."""

from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, SymLogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import axes, style
from qed_probe.figures.strip import role_colours

ROWS = 24
"""Heads that have rows of their own; of more, the layers have."""
NAMES = {"query": "read by the query: y", "direction": "read by the direction: S̄ᵀd"}


@style.styled
def draw_sources(ds: xr.Dataset) -> Figure:
    """Shares of the reads that predict the answers, by role of their sources (bars) and by lag (colours), a panel a probe.

    Takes what ``inspect_memory`` returns. A row is a head, of many heads a layer. Shares may be negative, where sources cancel;
    each row adds up to 1.
    """
    by_head = ds.sizes["layer"] * ds.sizes["head"] <= ROWS
    rows = [f"{layer}:{head}" for layer in ds["layer"].values for head in ds["head"].values] if by_head else ds["layer"].values
    ds = ds.sel(role=(ds["share_role"] != 0).any(("probe", "layer", "head")))
    probes, colours = ds["probe"].values, role_colours(ds["role"].values.tolist())
    height = 0.5 + 0.14 * len(rows)
    figure, panels = axes.panels(2 * len(probes), len(probes), height, style.PAGE, alike=False)
    prefix = "" if by_head else "layer_"
    lost = np.repeat(ds["nonfinite"].values >= ds.attrs["prompts"], len(rows) // ds.sizes["layer"])
    for column, probe in enumerate(probes):
        mine = ds.sel(probe=probe)
        shares = mine[f"{prefix}share_role"].transpose(..., "role").values.reshape(len(rows), -1)
        _draw_bars(panels[column], shares, [colours[role] for role in ds["role"].values.tolist()], lost)
        panels[column].set_title(NAMES[str(probe)], pad=3)
        panels[column].set_xlabel("share")
        lags = mine[f"{prefix}share_lag"].transpose(..., "lag").values.reshape(len(rows), -1)
        mesh = _draw_lags(panels[len(probes) + column], lags, ds["lag"].values)
    for panel in panels:
        style.label_rows(panel.yaxis, np.array(rows), most=ROWS)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
    for panel in panels[:: len(probes)]:
        panel.set_ylabel("layer:head" if by_head else "layer")
    figure.colorbar(mesh, ax=panels[len(probes) :], label="share", pad=0.02, aspect=12)
    handles = [axes.entry(role, color=colour, linewidth=4) for role, colour in colours.items()]
    axes.legend(figure, handles)
    style.write_below(figure, _note(ds))
    return figure


def _draw_bars(panel: Axes, shares: NDArray[np.float64], colours: list[str], lost: NDArray[np.bool_]) -> None:
    """Positive shares to the right of 0, one on another, and negative ones to its left; ``lost`` rows have no finite prompt."""
    places, good = np.arange(len(shares)), np.isfinite(shares.sum(1))
    panel.use_sticky_edges = False  # else the axis ends where a bar does
    for sign in (1, -1):
        part = np.where(good[:, None], np.maximum(sign * shares, 0), 0)
        begun = np.cumsum(part, 1) - part
        for i, colour in enumerate(colours):
            panel.barh(places, sign * part[:, i], 0.75, left=sign * begun[:, i], color=colour, linewidth=0, zorder=2)
    look: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "va": "center", "color": style.GREY, "fontsize": 6}
    for place in places[~good]:
        panel.text(0.02, place, "no finite prompt" if lost[place] else "nothing read", **look)
    panel.axvline(0, color=style.INK, linewidth=0.6, zorder=3)
    panel.axvline(1, zorder=3, **axes.DASHED)


def _draw_lags(panel: Axes, shares: NDArray[np.float64], lags: NDArray[np.int64]) -> mpl.collections.QuadMesh:
    cmap = mpl.colormaps["PuOr"].with_extremes(bad=style.EMPTY)
    edges = np.arange(len(lags) + 1) - 0.5
    mesh = panel.pcolormesh(edges, np.arange(len(shares) + 1) - 0.5, shares, cmap=cmap, norm=Normalize(-1, 1))
    labels = axes.span_labels(lags)
    style.label_rows(panel.xaxis, np.array(labels), most=6)
    panel.set_xlabel("lag of the source (tokens)")
    return mesh


@style.styled
def draw_read_map(ds: xr.Dataset, layer: int, head: int) -> Figure:
    """All reads of the first prompt by all of their sources, block by block, of one head; a panel a probe.

    Takes what ``inspect_memory`` returns. A row is a block of reads and adds up to 1.
    """
    probes, side = ds["probe"].values, int(ds.attrs["block_tokens"])
    figure, panels = axes.panels(len(probes), len(probes), 2.3, style.PAGE if len(probes) > 1 else style.COLUMN)
    cmap = mpl.colormaps["PuOr"].with_extremes(bad=style.EMPTY)
    lost = bool(ds["nonfinite"].sel(layer=layer)) and bool(ds["share_map"].sel(probe="query", layer=layer).isnull().all())
    for panel, probe in zip(panels, probes, strict=True):
        shares = ds["share_map"].sel(probe=probe, layer=layer, head=head).transpose("target_block", "source_block").values
        ends = side * np.arange(len(shares) + 1)
        mesh = panel.pcolormesh(ends, ends, shares, cmap=cmap, norm=SymLogNorm(0.01, vmin=-1, vmax=1), rasterized=True)
        panel.set_ylim(ends[-1], 0)
        panel.set_aspect("equal")
        panel.set_title(NAMES[str(probe)], pad=3)
        if np.isnan(shares).all():
            axes.label_gap(panel, "not finite" if lost else "nothing read")
    axes.label_outside(panels, len(probes), "source (token)", "read at (token)")
    figure.colorbar(mesh, ax=panels, label="share", pad=0.02, aspect=16)
    blocks = f"in blocks of {side} tokens" if side > 1 else "token by token"
    where = f"layer {layer}, head {head}; first prompt, {style.counted(ds.attrs['first_prompt_tokens'], 'token')}, {blocks}"
    lines = [f"{ds.attrs['subject']}, {where}."]
    grey = "the prompt's inputs are not finite in this layer" if lost else "the memory was empty"
    lines.append(f"Shares ⟨c, r⟩/‖r‖² of the reads (a row adds up to 1), logarithmic beyond ±0.01. Grey: {grey}.")
    style.write_below(figure, lines)
    return figure


def _note(ds: xr.Dataset) -> list[str]:
    """Over how much, and what the numbers are not."""
    reads = axes.span(ds["reads"].sel(probe="query").values, "reads")
    lines = [
        f"{ds.attrs['subject']}; {reads} a head, of the token that predicts each prompt's answer (or its last token). Shares are "
        "Σ⟨c, r⟩/Σ‖r‖², c what a token wrote and later edits and decay left of it; they add up to 1, and may cancel.",
        "Roles are of the tokens that wrote; what a token writes holds some of those before it, in deeper layers of all.",
    ]
    lost = int(ds["nonfinite"].max())
    return lines + [f"Left out: up to {lost:,} prompts a layer whose inputs are not finite."] * bool(lost)
