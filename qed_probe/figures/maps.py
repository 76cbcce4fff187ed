"""Layer × head maps: the correction's share of the output, and the memory's half-life."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import style

Panels = list[tuple[str, NDArray[np.float64]]]


@style.styled
def draw_correction_share(ds: xr.Dataset) -> Figure:
    """Mean and median (columns) of the correction's share and of its part across the output (rows), on one colour scale."""
    unit = " per unit λ" if ds.attrs["per_unit_lambda"] else ""
    panels = [
        (f"{name}{unit}, {kind}", ds[f"{name}_{kind}"].values) for name in ("share", "across") for kind in ("mean", "median")
    ]
    figure = _draw(panels, ds["layer"].values, f"fraction of the output{unit}")
    n, silent = int(ds["n"].sum()), int(ds["zero_output"].sum())
    lines = [
        f"share{unit} = {'|ρ|·‖S̄ᵀd‖' if unit else '‖λρS̄ᵀd‖'} / ‖y‖,  across{unit} = share{unit} · √(1 − cos²)",
        f"Mean and median over tokens, of {n:,} values; {silent:,} more had ‖y‖ = 0.",
    ]
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


@style.styled
def draw_half_life(ds: xr.Dataset) -> Figure:
    """Half-lives of the channels' mean and of the slowest channel on one scale; one panel where they are the same."""
    mean, slowest = ds["half_life"].values
    panels = [("mean over channels", mean), ("slowest channel", slowest)]
    if np.allclose(mean, slowest, rtol=1e-5, equal_nan=True):
        panels = [("all channels alike", mean)]
    lines = ["half-life = ln ½ / mean g over tokens"]
    for (kind, x), wiped in zip(panels, ds["wiped"].sum(("layer", "head")).values, strict=False):
        lines.append(
            f"{kind.capitalize()}: {int(np.isposinf(x).sum())} of {x.size} heads never decay (∞), {_forgetful(x, wiped)}."
        )
    figure = _draw(panels, ds["layer"].values, "half-life (tokens)")
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


def _forgetful(x: NDArray[np.float64], wiped: int) -> str:
    return f"{int((x == 0).sum())} forget all (0)" + (f" at {wiped:,} tokens with g = −∞" if wiped else "")


def _draw(panels: Panels, layers: NDArray[np.int64], label: str) -> Figure:
    """Panels on one colour scale; tiles bear their numbers if they are few, and are as wide as these need."""
    heads = panels[0][1].shape[1]
    numbers = len(layers) <= 12 and heads <= 12
    columns = 1 if len(panels) == 1 or (numbers and heads > 6) else 2
    rows = len(panels) // columns
    height = np.clip((0.14 if numbers else 0.085) * len(layers), 0.8, 4.0)
    figure = style.new_figure(style.PAGE if numbers and heads > 3 else style.COLUMN, 0.45 + rows * (height + 0.2))
    grid: NDArray[np.object_] = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    values = np.stack([x for _, x in panels])
    norm = style.log_norm(values)
    every: list[Axes] = list(grid.ravel())
    for axes, (title, x) in zip(every, panels, strict=True):
        mesh = style.heatmap(axes, x, layers, norm, numbers)
        axes.set_title(title, pad=3)
    for axes in grid[-1]:
        axes.set_xlabel("head")
    for axes in grid[:, 0]:
        axes.set_ylabel("layer")
    if (np.isfinite(values) & (values > 0)).any():
        style.colour_bar(figure, mesh, every, label, aspect=15 * rows)
    return figure
