"""Where two runs part: by record and layer, and by layer and position."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from qed_probe.figures import style


@style.styled
def draw_difference(ds: xr.Dataset) -> Figure:
    """The largest difference of each record and layer, and of any record by layer and position, on one colour scale.

    A dot marks what is beyond the tolerance.
    """
    by_record, by_position, tolerance = ds["largest"].values, ds["by_position"].values, ds.attrs["tolerance"]
    layers, records, starts = ds["layer"].values, ds["record"].values, ds["bin_start"].values
    figure = style.new_figure(style.PAGE, max(1.2, 0.4 + 0.105 * len(records)))
    # Long labels are wider at 300 dots an inch than where they are laid out.
    figure.get_layout_engine().set(rect=(0.01, 0, 0.99, 1))  # type: ignore[union-attr,call-arg]
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    norm = style.log_norm(np.concatenate([by_record.ravel(), by_position.ravel()]))
    _cells(left, by_record, np.arange(len(layers) + 1) - 0.5, norm, tolerance)
    style.label_rows(left.yaxis, records, most=len(records))
    style.label_rows(left.xaxis, layers)
    left.set_xlabel("layer")
    left.set_title("by record", pad=3)
    width = int(starts[1] - starts[0]) if len(starts) > 1 else 1
    mesh = _cells(right, by_position, np.append(starts, starts[-1] + width), norm, tolerance)
    style.label_rows(right.yaxis, layers)
    right.set_xlabel("position in the prompt (token)")
    right.set_ylabel("layer")
    right.set_title("all but correction_cosine, by position", pad=3)
    if (np.isfinite(by_record) & (by_record > 0)).any():
        style.colour_bar(figure, mesh, [left, right], "largest difference / largest value", aspect=20)
    beyond, n = int(ds["beyond"].sum()), int(ds["compared"]) * by_record.size
    lines = [
        f"|x₁ − x₂| / max |x₁| of the record and layer; grey: no difference, ∞: only one is finite; dots: beyond {tolerance:g}.",
        f"{beyond:,} of {n:,} values are beyond {tolerance:g}.",
        "A cosine of vectors that nearly vanish may differ by 2 without a fault.",
    ]
    style.write_below(figure, [*lines, style.note(ds)])
    return figure


def _cells(axes: Axes, values: NDArray[np.float64], edges: NDArray[Any], norm: LogNorm, tolerance: float) -> QuadMesh:
    drawable = np.isfinite(values) & (values > 0)
    rows = np.arange(len(values) + 1) - 0.5
    mesh = axes.pcolormesh(edges, rows, np.ma.masked_where(~drawable, values), cmap="viridis", norm=norm, rasterized=True)
    axes.set_facecolor(style.EMPTY)
    centres = (edges[1:] + edges[:-1]) / 2
    for marks, marker, size in (((values > tolerance) & drawable, ".", 2), (np.isinf(values), r"$\infty$", 5)):
        row, column = marks.nonzero()
        axes.plot(centres[column], row, color=style.VERMILION, marker=marker, markersize=size, linestyle="none")
    axes.set_ylim(len(values) - 0.5, -0.5)
    axes.tick_params(length=0)
    return mesh
