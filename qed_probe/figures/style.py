"""One look for all figures: sizes of a paper's column, colours that the colour-blind can tell apart, and shared small parts."""

import math
from collections.abc import Callable
from functools import wraps
from textwrap import wrap
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

Arguments = ParamSpec("Arguments")

COLUMN, PAGE = 3.4, 7.0
# Okabe and Ito's palette, but for its black.
ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
EDITS = ORANGE, PURPLE, GREEN
"""Of a token's other edits, beside the main one."""
EMPTY = "#D9D9D9"
INK, GREY = "0.25", "0.45"

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.0,
    "svg.hashsalt": "qed-probe",
    "savefig.dpi": 300,
}


def styled(draw: Callable[Arguments, Figure]) -> Callable[Arguments, Figure]:
    """Draw under this style and no other."""

    @wraps(draw)
    def inner(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Figure:
        with mpl.rc_context(RC):
            return draw(*args, **kwargs)

    return inner


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches that no pyplot knows of."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, hspace=0.02, wspace=0.02)  # type: ignore[union-attr,call-arg]
    return figure


def label_rows(axis: Axis, labels: NDArray[Any], most: int = 8) -> None:
    """Tick rows (or columns) 0, 1, … at their centres by their own labels, at most ``most`` of them."""
    places = np.arange(0, len(labels), -(-len(labels) // most))
    axis.set_ticks(places, [str(labels[i]) for i in places])


def log_norm(values: NDArray[Any]) -> LogNorm:
    """A logarithmic colour scale over the positive finite values, wide enough to hold a 1, 2 or 5."""
    drawn = values[np.isfinite(values) & (values > 0)]
    low, high = (float(drawn.min()), float(drawn.max())) if drawn.size else (0.5, 1.0)
    widen = max(1.0, np.sqrt(2.5 * low / high))
    return LogNorm(low / widen, high * widen)


def colour_bar(figure: Figure, mesh: QuadMesh, axes: Axes | list[Axes], label: str, aspect: float) -> None:
    """A bar for a logarithmic colour scale, ticked at 1, 2 and 5 or, over more than a decade and a half, at powers of ten."""
    low, high = mesh.get_clim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = _marks(low, high, decades, (1, 2, 5) if high / low < 30 else (1,))
    if len(marks) < 2:
        marks = _marks(low, high, decades, (1, 2, 5))
    bar = figure.colorbar(mesh, ax=axes, label=label, pad=0.02, aspect=aspect)
    bar.set_ticks(marks, labels=[number(x, plain=all(map(is_plain, marks))) for x in marks])
    bar.minorticks_off()


def _marks(low: float, high: float, decades: range, steps: tuple[int, ...]) -> list[float]:
    """These steps of every decade, or of fewer where there are many, that lie on the scale."""
    marks = [step * 10.0**power for power in decades[:: -(-len(decades) // 6)] for step in steps]
    return [x for x in marks if low <= x <= high]


def is_plain(x: float) -> bool:
    """Whether a number is short when it is written out."""
    return 0.001 <= x < 10_000


def number(x: float, plain: bool) -> str:
    """Two digits, written out or beside a power of ten."""
    if plain:
        return f"{float(f'{x:.2g}'):g}"
    digits, power = f"{x:.1e}".split("e")
    digits = digits.removesuffix(".0")
    return f"$10^{{{int(power)}}}$" if digits == "1" else f"${digits} \\cdot 10^{{{int(power)}}}$"


def heatmap(
    axes: Axes,
    values: NDArray[Any],
    layers: NDArray[Any],
    norm: Normalize,
    numbers: bool,
    write: Callable[[float], str] = lambda x: number(x, is_plain(x)),
) -> QuadMesh:
    """Layer × head cells, with their numbers if asked; what the scale cannot show is grey and says what it is: 0, ∞ or NaN."""
    drawable = np.isfinite(values) & ((values > 0) | (not isinstance(norm, LogNorm)))
    rows, columns = values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    cells = np.ma.masked_where(~drawable, values)
    mesh = axes.pcolormesh(*edges, cells, cmap="viridis", norm=norm, edgecolors="white", linewidth=0.3)
    axes.set_facecolor(EMPTY)
    for row, column in np.argwhere(~drawable | numbers):
        x = values[row, column]
        text = "NaN" if np.isnan(x) else "0" if x == 0 else "∞" if np.isinf(x) else write(x)
        ink = "white" if drawable[row, column] and norm(x) < 0.45 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=6 if numbers else 5, color=ink)
    axes.set_ylim(rows - 0.5, -0.5)
    label_rows(axes.yaxis, layers)
    label_rows(axes.xaxis, np.arange(columns))
    axes.tick_params(length=0)
    return mesh


def counted(n: int, what: str) -> str:
    """How many of what: "1 token", "1,024 tokens"."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def note(ds: xr.Dataset) -> str:
    """What a reader has to know of the data: what ran, tokens, and what was left out, with the place of the first bad value."""
    left_out = f"; {ds.attrs['tokens_incomplete']:,} incomplete ones are left out" if ds.attrs["tokens_incomplete"] else ""
    parts = [f"{ds.attrs['subject']}, {counted(ds.attrs['tokens'], 'token')}{left_out}."]
    for source in ds["source"].values if "nonfinite" in ds else ():
        count = int(ds["nonfinite"].sel(source=source).sum())
        if count:
            layer, token, head = ds["first_nonfinite"].sel(source=source).values
            parts.append(f"{source}: {count:,} not finite, first at layer {layer}, token {token}, head {head}.")
    return "\n".join(parts)


def write_below(figure: Figure, lines: list[str]) -> None:
    """Notes under the axes, wrapped at the figure's width, in room that the figure grows by."""
    width, height = figure.get_size_inches()
    wrapped = [part for line in "\n".join(lines).split("\n") for part in wrap(line, int(20.5 * width))]
    figure.set_size_inches(width, height + 0.125 * len(wrapped))
    figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=6, color=INK, linespacing=1.3)
