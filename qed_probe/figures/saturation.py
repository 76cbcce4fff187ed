"""Layer × head maps of gates at the ends of their range, and of decay; takes what ``analyses.gate_saturation`` returns."""

import numpy as np
import xarray as xr
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import style

LETTERS = {"b": "b", "w": "w", "beta": "β", "gamma": "γ"}
Panel = tuple[str, NDArray[np.float64]] | None


@style.styled
def draw_gate_saturation(ds: xr.Dataset) -> Figure:
    """Quantiles of exp g, then a row a gate with the shares near its ends, beside the last of them that of g at its floor."""
    rows = _rows(ds)
    layers, heads = ds["layer"].values, ds.sizes["head"]
    numbers = len(layers) <= 12 and heads <= 4
    height = float(np.clip((0.14 if numbers else 0.085) * len(layers), 0.5, 2.0))
    figure = style.new_figure(style.COLUMN, 0.45 + len(rows) * (height + 0.22))
    grid = figure.subplots(len(rows), 3, sharex=True, sharey=True, squeeze=False)
    norm = Normalize(0, 100)
    for line, (axes, panels) in enumerate(zip(grid, rows, strict=True)):
        axes[0].set_ylabel("layer")
        for panel, shown in zip(axes, panels, strict=True):
            if shown is None:
                panel.set_axis_off()
                continue
            mesh = style.heatmap(panel, 100 * shown[1], layers, norm, numbers, _per_cent)
            panel.set_title(shown[0], pad=3)
            panel.set_xlabel("head" if line == len(rows) - 1 else "")
    figure.colorbar(mesh, ax=list(grid.flat), label="%", pad=0.02, aspect=15 * len(rows))
    style.write_below(figure, [*_notes(ds), style.note(ds)])
    return figure


def _rows(ds: xr.Dataset) -> list[list[Panel]]:
    titles = {0.05: "exp g, 5 %", 0.5: "exp g, median", 0.95: "exp g, 95 %"}
    rows: list[list[Panel]] = [[(title, ds["kept_quantile"].sel(level=level).values) for level, title in titles.items()]]
    for gate in ds["gate"].values if "gate" in ds.coords else ():
        letter, top = LETTERS[str(gate)], _top(ds, str(gate))
        near = ds[["near_zero", "near_one"]].sel(gate=gate)
        rows.append([(f"{letter} near 0", near["near_zero"].values), (f"{letter} near {top:g}", near["near_one"].values), None])
    if "at_floor" in ds:
        rows[-1][-1] = ("g at its floor", ds["at_floor"].values)
    return rows


def _per_cent(x: float) -> str:
    return "<0.1" if 0 < x < 0.1 else f"{x:.1f}" if 0 < x < 9.95 else f"{x:.0f}"


def _top(ds: xr.Dataset, gate: str) -> float:
    return float(ds.attrs["gate_max"]) if gate in ("b", "beta") else 1.0


def _notes(ds: xr.Dataset) -> list[str]:
    shares = "; shares of a gate's values within 0.01 of its ends" * ("gate" in ds.coords)
    lines = [f"All in %, over tokens and channels: quantiles of exp g{shares}."]
    if "at_floor" in ds:
        floor = ds.attrs["lower_bound"]
        lines.append(f"Floor: g within 1 % of ℓ = {floor:g}, where exp g = {np.exp(floor):.2g}.".replace("-", "−"))
    return lines
