"""Layer × head maps: the correction's share of the output, and the memory's half-life."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import style


@style.styled
def draw_correction_share(ds: xr.Dataset) -> Figure:
    """Mean and median (columns) of the correction's share and of its part across the output (rows), one colour scale a row."""
    figure, panels = _panels(ds, 2)
    unit = " per unit λ" if ds.attrs["per_unit_lambda"] else ""
    formula = f"share{unit} = {'|ρ|·‖S̄ᵀd‖' if unit else '‖λρS̄ᵀd‖'} / ‖y‖,  across{unit} = share{unit} · √(1 − cos²)"
    rows = (("share", f"share{unit}"), ("across", f"across{unit}"))
    for line, (name, text) in zip(panels, rows, strict=True):
        values = [ds[f"{name}_{kind}"].values for kind in ("mean", "median")]
        _draw_pair(figure, line, values, ds["layer"].values, text)
    for axes, kind in zip(panels[0], ("mean over tokens", "median over tokens"), strict=True):
        axes.set_title(kind, pad=3)
    n, silent = int(ds["n"].sum()), int(ds["zero_output"].sum())
    style.write_below(figure, [formula, f"{n:,} shares;  left out: {silent:,} with ‖y‖ = 0", style.note(ds)])
    return figure


@style.styled
def draw_half_life(ds: xr.Dataset) -> Figure:
    """Half-lives of the channels' mean and of the slowest channel, on one logarithmic scale; ∞ and 0 are counted, not drawn."""
    figure, panels = _panels(ds, 1)
    values = list(ds["half_life"].values)
    _draw_pair(figure, panels[0], values, ds["layer"].values, "half-life (tokens)")
    for axes, kind in zip(panels[0], ("mean over channels", "slowest channel"), strict=True):
        axes.set_title(kind, pad=3)
    lines = ["half-life = ln ½ / mean g over tokens"]
    for kind, x in zip(("mean", "slowest"), values, strict=True):
        wiped = int(ds["wiped"].sel(channel=kind).sum())
        counts = f"{x.size} heads, {int(np.isposinf(x).sum())} at ∞, {int((x == 0).sum())} at 0"
        lines.append(f"{kind} channel: {counts}" + (f" ({wiped:,} tokens with g = −∞)" if wiped else ""))
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


def _panels(ds: xr.Dataset, rows: int) -> tuple[Figure, NDArray[np.object_]]:
    height = np.clip(0.085 * ds.sizes["layer"], 0.8, 4.0)
    figure = style.new_figure(style.COLUMN, 0.45 + rows * (height + 0.1))
    panels: NDArray[np.object_] = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    for axes in panels[-1]:
        axes.set_xlabel("head")
    for axes in panels[:, 0]:
        axes.set_ylabel("layer")
    return figure, panels


def _draw_pair(
    figure: Figure, pair: NDArray[np.object_], values: list[NDArray[np.float64]], layers: NDArray[np.int64], text: str
) -> None:
    norm = style.log_norm(np.stack(values))
    axes: Axes
    for axes, x in zip(pair, values, strict=True):
        mesh = style.heatmap(axes, x, layers, norm)
    style.colour_bar(figure, mesh, list(pair), text, aspect=15)
