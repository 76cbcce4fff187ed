"""What figures of results have in common: panels, a legend above them, the axes of length and per cent, counts in words."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from numpy.typing import NDArray

from qed_probe.figures import style

DASHED: dict[str, Any] = {"color": style.INK, "linestyle": (0, (3, 2)), "linewidth": 0.7}


def columns(count: int) -> int:
    """How many panels stand beside each other on a page: what leaves the fewest places empty."""
    return {1: 1, 2: 2, 4: 2}.get(count) or min((5, 4, 3), key=lambda across: -count % across)


def room(across: int) -> int:
    """How many lengths can be labelled under a panel of so many beside each other."""
    return 8 if across <= 3 else 6


def panels(count: int, across: int, height: float, width: float, alike: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of this width and its ``count`` panels of this height: on the same axes, or on the same rows if not ``alike``."""
    lines = max(1, -(-count // across))
    figure = style.new_figure(width, 0.35 + lines * height)
    # Long labels are wider at 300 dots an inch than where they are laid out.
    figure.get_layout_engine().set(rect=(0.01, 0, 0.99, 1))  # type: ignore[union-attr,call-arg]
    every = list(figure.subplots(lines, max(1, min(across, count)), squeeze=False, sharex=alike, sharey=True).flat)
    for spare in every[max(count, 1) :]:
        spare.set_axis_off()
    return figure, every[: max(count, 1)]


def label_outside(axes: Sequence[Axes], across: int, below: str, beside: str) -> None:
    """Labels of the axes at the foot of each column, with the labels of its ticks, and at the left of each row."""
    for i, panel in enumerate(axes):
        last = i + across >= len(axes)
        panel.tick_params(labelbottom=last)
        panel.set_xlabel(below if last else "")
        panel.set_ylabel(beside if i % across == 0 else "")


def legend(figure: Figure, *groups: Sequence[Line2D]) -> None:
    """Above all panels, on one line if there is room, else each group on lines of its own."""
    letters = 20.5 * figure.get_figwidth()
    whole = [entry for group in groups for entry in group]
    downwards = [(entry,) for entry in whole] if _letters(whole) <= letters else _columns(groups, letters)
    if not downwards:
        return
    figure.legend(
        handles=[entry for column in downwards for entry in column],
        loc="outside upper left",
        ncols=len(downwards),
        frameon=False,
        handlelength=1.8,
        columnspacing=1.0,
        labelspacing=0.3,
        borderaxespad=0.2,
    )


def _letters(entries: Iterable[Line2D]) -> int:
    """The width of these entries beside each other, in letters."""
    return sum(6 + len(str(entry.get_label())) for entry in entries)


def _columns(groups: Sequence[Sequence[Line2D]], letters: float) -> list[tuple[Line2D, ...]]:
    """The entries in as many columns as there is room for, each from its top, as matplotlib fills them."""
    blank = Line2D([], [], linestyle="none", label=" ")
    for count in range(max(map(len, groups), default=0), 0, -1):
        lines = [group[i : i + count] for group in groups for i in range(0, len(group), count)]
        found = list(zip_longest(*lines, fillvalue=blank))
        if count == 1 or sum(max(_letters([entry]) for entry in column) for column in found) <= letters:
            return found
    return []


def entry(label: str, **look: Any) -> Line2D:  # noqa: ANN401 - what Line2D takes
    """One entry of a legend."""
    return Line2D([], [], label=label, **look)


def length_label(length: float) -> str:
    """512, 2K, 1M: short in powers of two, else written out."""
    whole = int(length)
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if whole >= unit and whole % unit == 0:
            return f"{whole // unit}{name}"
    return f"{whole:,}"


def with_length(ds: xr.Dataset) -> xr.Dataset:
    """Of a Dataset by length what a logarithmic axis can show, in order; the length 0 is that of tasks without one."""
    return ds.isel(length=ds["length"].values > 0).sortby("length")


def length_axis(axes: Axes, lengths: NDArray[Any], most: int) -> None:
    """A log₂ axis with a tick at each length that was measured, labelled where there is room for ``most`` along the axis."""
    axes.set_xscale("log", base=2)
    if not len(lengths):
        return
    low, high = lengths[0] * 2**-0.45, lengths[-1] * 2**0.45
    apart = np.log2(high / low) / most
    labels, last = [], -np.inf
    for length in lengths:
        far = np.log2(length) - last >= apart
        labels.append(length_label(length) if far else "")
        last = np.log2(length) if far else last
    axes.set_xticks(lengths, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(low, high)


def from_zero(axes: Axes) -> None:
    """Let the y axis begin at 0 and end a little above what is drawn."""
    top = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.05 * top if 0 < top < np.inf else None)


def shades(count: int) -> NDArray[np.float64]:
    """A colour a layer, from the first, dark, to the last."""
    return mpl.colormaps["viridis"](np.linspace(0.0, 0.85, count))


def set_off(count: int, width: float) -> NDArray[np.float64]:
    """Where ``count`` marks of one place stand, beside each other and around 0, over ``width``."""
    return (np.arange(count) - (count - 1) / 2) * width / max(count, 1)


def percent_axis(axes: Axes) -> None:
    """0 to 100 %, with room for marks at either end."""
    axes.set_ylim(-5, 105)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.grid(axis="y", color="0.9", linewidth=0.4)
    axes.set_axisbelow(True)


def trained_length(ds: xr.Dataset) -> int:
    """The length that the runs were trained at, 0 if that is unknown."""
    return int(ds.attrs.get("trained_length", 0))


def draw_trained(axes: Iterable[Axes], ds: xr.Dataset) -> list[Line2D]:
    """A dashed line at the training length, if that is known, and its entry in the legend."""
    trained = trained_length(ds)
    for panel in axes if trained else ():
        panel.axvline(trained, zorder=1.5, **DASHED)
    return [entry(f"trained at {length_label(trained)}", **DASHED)] if trained else []


def span_labels(starts: NDArray[np.int64]) -> list[str]:
    """What bins of whole numbers hold that begin at these, the last one without an end: "1", "2–3", "4+"."""
    ends = [*starts[1:] - 1, None]
    return [f"{a}" if a == b else f"{a}–{b}" if b is not None else f"{a}+" for a, b in zip(starts, ends, strict=True)]


def span(values: NDArray[Any], what: str) -> str:
    """How many, without gaps and zeros: "500 samples" or "38 to 62 samples"."""
    some = values[np.isfinite(values) & (values > 0)]
    if not some.size:
        return f"no {what}"
    low, high = int(some.min()), int(some.max())
    return f"{low:,} {what}" if low == high else f"{low:,} to {high:,} {what}"


def source(ds: xr.Dataset) -> list[str]:
    """Of published values that they are published, where, and why some are not there."""
    if not ds.attrs.get("published"):
        return []
    found = [str(ds.attrs[name]) for name in ("source", "place", "page") if ds.attrs.get(name)]
    where = ", ".join(f"p. {part}" if part.isdecimal() else part for part in found)
    gaps = [f"{gap(ds).capitalize()}: {ds.attrs['gaps']}"] if ds.attrs.get("gaps") else []
    return [f"Published values, not measured here{': ' * bool(where)}{where}.", *gaps]


def about(ds: xr.Dataset) -> str:
    """What ran, over how much, and what was left out."""
    lost, incomplete = int(ds["nonfinite"].max()), int(ds.attrs["tokens_incomplete"])
    left = [style.counted(incomplete, "incomplete token")] * bool(incomplete)
    left += [f"up to {lost:,} prompts a layer whose inputs are not finite"] * bool(lost)
    empty = [str(layer) for layer in ds["layer"].values[ds["nonfinite"].values >= ds.attrs["prompts"]]]
    left += [f"so all of layer{'s' * (len(empty) > 1)} {', '.join(empty)}"] * bool(empty)
    prompts, tokens = style.counted(ds.attrs["prompts"], "prompt"), style.counted(ds.attrs["tokens"], "token")
    return f"{ds.attrs['subject']}, {prompts}, {tokens}{'; left out: ' + ', '.join(left) if left else ''}."


def gap(ds: xr.Dataset) -> str:
    """What to call a value that is not there; of published ones with ``gaps`` a note says more than that the source lacks it."""
    return "no data" if not ds.attrs.get("published") else "not given" if ds.attrs.get("gaps") else "not reported"


def label_gap(panel: Axes, text: str, length: float | None = None) -> None:
    """Say of a panel, or upright of one length, that it has no value."""
    look: dict[str, Any] = {"ha": "center", "va": "bottom", "color": style.GREY, "fontsize": 6}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    if length is None:
        panel.text(0.5, 0.6, text, transform=panel.transAxes, **look)
    else:
        panel.text(length, 0.04, text, transform=panel.get_xaxis_transform(), rotation=90, **look)
