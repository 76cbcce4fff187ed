"""Where in the prompt the needle lay, and whether it was found."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from qed_probe.figures import axes, runs, style


@style.styled
def draw_depth(ds: xr.Dataset) -> Figure:
    """The needle grid: accuracy by length and depth of the needle, a panel a run, on one linear scale from 0 to 100 %.

    Takes what ``analyses.by_depth`` returns: ``accuracy`` in [0, 1] and ``samples``, dims (run, length, bin), with the
    coordinates ``bin_start`` and ``bin_end`` of the depth and those of each run as for ``draw_accuracy``; attribute
    ``trained_length`` (0: unknown). Cells without samples are grey. A dashed line parts the lengths up to the training length
    from those beyond it.
    """
    ds = ds.sortby("length").transpose("run", "length", "bin")
    count, lengths = ds.sizes["run"], ds["length"].values
    across = axes.columns(count)
    width, height = (style.COLUMN, 1.6) if count == 1 else (style.PAGE, 1.25)
    figure, panels = axes.panels(count, across, height, width)
    for panel, title, i in zip(panels, runs.titles(ds), range(count), strict=False):
        mesh = _draw_grid(panel, ds.isel(run=i), axes.room(across))
        panel.set_title(title, pad=3)
        within = int((lengths <= axes.trained_length(ds)).sum())
        if 0 < within < len(lengths):
            panel.axvline(within - 0.5, **axes.DASHED | {"color": style.VERMILION, "linewidth": 1.0})
    axes.label_outside(panels, across, "length (tokens)", "depth of the needle")
    bar = figure.colorbar(mesh, ax=panels, label="accuracy (%)", pad=0.02, aspect=15 * -(-count // across))
    bar.set_ticks([0, 25, 50, 75, 100])
    samples = ds["samples"].values
    lines = [f"{', '.join(runs.tasks(ds))}: {axes.span(samples.sum(2), 'samples')} a length and run, "]
    lines[0] += f"{axes.span(samples, 'samples')} a cell; grey: none ({int((samples == 0).sum())} of {samples.size} cells)."
    trained = axes.trained_length(ds)
    lines += ["Depth: share of the noise before the needle, 0 the start of the prompt."]
    lines += [f"Dashed: lengths beyond the training length, {axes.length_label(trained)}, lie to the right."] * bool(trained)
    style.write_below(figure, [*axes.source(ds), *lines])
    return figure


def _draw_grid(panel: Axes, run: xr.Dataset, most: int) -> QuadMesh:
    lengths, samples = run["length"].values, run["samples"].values.T
    cells = np.ma.masked_where((samples == 0) | ~np.isfinite(run["accuracy"].values.T), 100 * run["accuracy"].values.T)
    edges = np.append(run["bin_start"].values, run["bin_end"].values[-1:])
    columns = np.arange(len(lengths) + 1) - 0.5
    mesh = panel.pcolormesh(columns, edges, cells, cmap="viridis", norm=Normalize(0, 100), edgecolors="white", linewidth=0.3)
    panel.set_facecolor(style.EMPTY)
    panel.set_ylim(edges[-1], edges[0])
    style.label_rows(panel.xaxis, np.array([axes.length_label(x) for x in lengths], str), most)
    panel.tick_params(length=0)
    return mesh
