"""Growth, which e does not tell: ‖M_t‖₂ of all token-heads, and norm and spectral radius of M_tD_t of a sample."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qed_probe.figures import axes, runs, style
from qed_probe.figures import eigen_parts as parts

WITH, WITHOUT = "norm_excess", "norm_excess_base"
STEP = ("step_norm", "step_norm_base")
RADIUS = ("step_radius", "step_radius_base")
COLOURS = (style.BLUE, style.ORANGE)
OCTAVE = 4
"""Bars an octave."""
ROUNDING = 1e-7
"""Norms are float32 numbers near 1, whose neighbours are 1.2e-7 apart: smaller excesses are not drawn."""


def has_growth(ds: xr.Dataset) -> bool:
    """Whether norms were counted, with and without the added direction."""
    return parts.has(ds, WITH) and parts.has(ds, WITHOUT)


@style.styled
def draw_eigen_growth(ds: xr.Dataset) -> Figure:
    """A row a run: ‖M_t‖₂ − 1, with and without the added direction; norm and spectral radius of a sample's M_tD_t; counts.

    Takes the quantities ``norm_excess`` and ``norm_excess_base``, ‖M‖₂ − 1, with ``above(run, quantity, layer, head, margin)``,
    how many are above each ``margin``; and of a sample ``step_norm(run, sample)``, ‖M_tD_t‖₂ − 1, and ``step_radius``, the
    spectral radius, both also with ``_base``: without the added direction. What there is without it is the gates' own doing. Of
    the sample too, what counts is above a margin, the smallest: in float64 a radius of 1 comes out as much as 1e-8 above it.
    """
    figure = style.new_figure(style.PAGE, 0.55 + 1.3 * ds.sizes["run"])
    grid = figure.subplots(ds.sizes["run"], 3, sharex="col", squeeze=False, width_ratios=[1.2, 0.9, 1.3])
    unseen = 0
    for (panel, sample, beside), (name, run) in zip(grid, parts.each_run(ds), strict=True):
        unseen += _draw_norms(panel, run)
        idle = not (run["lambda"].fillna(0) != 0).any()
        panel.set_title(runs.shorten(name, 30) + " (adds no direction)" * idle, pad=3, loc="left")
        _draw_sample(sample, run)
        parts.draw_table(beside, ["with d", "without"], _rows(run))
    grid[-1, 0].set_xscale("log")
    grid[-1, 0].xaxis.set_minor_locator(NullLocator())
    grid[-1, 0].set_xlabel("‖Mₜ‖₂ − 1")
    grid[-1, 1].set_xlabel("of MₜDₜ, less 1")
    styles = {"norm": "-", "spectral radius": "--"}
    entries = [
        axes.entry(text, color=colour) for text, colour in zip(("with the added direction", "without"), COLOURS, strict=True)
    ]
    axes.legend(figure, entries, [axes.entry(text, color=style.INK, linestyle=look) for text, look in styles.items()])
    lines = [
        f"Left: all token-heads; {unseen:,} with the direction are at 10⁻⁷ or less and not drawn. "
        "Middle: the share of sampled token-heads up to a value. Without the direction, growth is the gates' own.",
        "A norm above 1 lets one step stretch some memory; a spectral radius above 1 lets the same step, repeated, grow it "
        "without bound. The steps of a text differ. ‖Mₜ‖₂ itself is never below 1.",
    ]
    several = ["Of several edits a token ‖Mₜ‖₂ is the main one's, MₜDₜ the whole step."] * bool(parts.other_edits(ds))
    style.write_below(figure, [*lines, *several, parts.about(ds)])
    return figure


def _draw_norms(panel: Axes, run: xr.Dataset) -> int:
    """Both histograms, on logarithmic axes; how many values with the direction are too small for them."""
    unseen, most = 0, 0.0
    for quantity, colour, fill in ((WITH, COLOURS[0], True), (WITHOUT, COLOURS[1], False)):
        if not parts.has(run, quantity):
            continue
        counts, edges, lost = parts.histogram(run, quantity, _octave)
        unseen += lost * (quantity == WITH)
        most = max(most, counts.max(initial=0))
        if counts.size:
            panel.stairs(counts, 2.0 ** (edges / OCTAVE), fill=fill, color=colour, alpha=0.6 if fill else 1, linewidth=0.9)
    for margin in run["margin"].values:
        panel.axvline(margin, color=style.GREY, linewidth=0.5, linestyle=":", zorder=1)
    if not most:
        axes.label_gap(panel, "no excess" if parts.has(run, WITH) else "no data")
    panel.set_ylim(0.5, max(2 * most, 10))
    parts.log_counts(panel)
    panel.set_ylabel("count")
    return unseen


def _octave(x: parts.Array) -> parts.Array:
    """Where on a logarithmic axis a value is; what is too small to tell from 0 has no place."""
    found: parts.Array = np.where(x > ROUNDING, OCTAVE * np.log2(x), np.nan)
    return found


def _draw_sample(panel: Axes, run: xr.Dataset) -> None:
    """The share of the sample up to each value: norms as they are kept, less 1, and radii less 1."""
    for names, shift, look in ((STEP, 0, "-"), (RADIUS, 1, "--")):
        for name, colour, width in zip(names, COLOURS, (0.8, 1.8), strict=True):
            values = _sampled(run, name) - shift
            shares = np.arange(1, values.size + 1) / max(values.size, 1)
            panel.plot(values, shares, look, color=colour, linewidth=width, drawstyle="steps-post", zorder=3 - width / 2)
    panel.axvline(0, color=style.GREY, linewidth=0.5, zorder=1)
    panel.set_ylim(-0.03, 1.03)
    panel.set_ylabel("share of the sample")
    panel.set_title(f"sample of {_sampled(run, STEP[0]).size:,}", pad=3, loc="left")


def _sampled(run: xr.Dataset, name: str) -> parts.Array:
    """The finite values of a sample, in order; none where there is none."""
    values = run[name].values.astype(float) if name in run else np.zeros(0)
    return np.sort(values[np.isfinite(values)])


def _rows(run: xr.Dataset) -> list[tuple[str, list[str]]]:
    """The table beside: how many are above the margins, the largest, and what the sample has above 1."""
    both = [WITH, WITHOUT]
    rows = [
        (f"‖Mₜ‖₂ > {1 + margin:g}", [f"{parts.total(run.isel(margin=i), name, 'above'):,}" for name in both])
        for i, margin in enumerate(run["margin"].values)
    ]
    rows.append(("largest ‖Mₜ‖₂ − 1", [parts.written(parts.span(run, name)[1], 3) for name in both]))
    least = float(run["margin"].min())
    for text, names, shift in (("‖MₜDₜ‖₂", STEP, 0), ("radius", RADIUS, 1)):
        sampled = [f"{int((_sampled(run, name) - shift > least).sum()):,}" for name in names]
        rows.append((f"sample: {text} > {1 + least:g}", sampled))
    return rows
