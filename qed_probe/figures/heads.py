"""What each head carries of the answer."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qed_probe.figures import axes, runs, style
from qed_probe.figures.record_contrasts import NUMBERED, signed_cells

BELOW = 0.05


@style.styled
def draw_heads(ds: xr.Dataset) -> Figure:
    """Change of ln p(answer) when one head is changed, layer × head, a panel a run and length, on colours symmetric about 0.

    Takes what ``analyses.head_effects`` returns. A dot marks a head whose adjusted p is below 0.05.
    """
    shown = [(i, j) for i in range(ds.sizes["run"]) for j in range(ds.sizes["length"])]
    across = min(len(shown), 3)
    rows, columns = ds.sizes["layer"], ds.sizes["head"]
    height = 0.5 + float(np.clip(0.17 * rows, 0.5, 3.0))
    figure, panels = axes.panels(len(shown), across, height, style.PAGE if across > 1 else style.COLUMN)
    top = float(np.nanmax(np.abs(ds["difference"].values), initial=0)) or 1.0
    titles = runs.titles(ds)
    for panel, (i, j) in zip(panels, shown, strict=False):
        cells = ds.isel(run=i, length=j).transpose("layer", "head", ...)
        sure = cells["p_fdr"].values < BELOW
        mesh = signed_cells(panel, cells["difference"].values, sure, max(rows, columns) * across <= NUMBERED, top)
        style.label_rows(panel.yaxis, ds["layer"].values)
        style.label_rows(panel.xaxis, np.arange(columns))
        length = int(ds["length"][j])
        panel.set_title(titles[i] + f", {axes.length_label(length)}" * (length > 0), pad=3)
    axes.label_outside(panels, across, "head", "layer")
    bar = figure.colorbar(mesh, ax=panels, pad=0.02, aspect=12, label="change of ln p(answer)")
    bar.ax.yaxis.set_major_locator(MaxNLocator(4, symmetric=True))
    style.write_below(figure, _note(ds))
    return figure


def _note(ds: xr.Dataset) -> list[str]:
    direction = f", direction {ds.attrs['direction']}" * (ds.attrs["direction"] != "own")
    direction += f", mode {ds.attrs['mode']}" * (ds.attrs["mode"] != "full")
    where = {"all": "in prompt and answer", "prompt": "in the prompt alone", "answer": "in the answer alone"}[ds.attrs["phase"]]
    counts, marked = axes.span(ds["samples"].values, "samples"), int((ds["p_fdr"] < BELOW).sum())
    return [
        f"One head changed at a time, λ (γ of an address) × {ds.attrs['strength']:g}{direction}, {where}.",
        f"{counts} a head, paired with the model as it is. Dots: p < {BELOW:g} by the paired t test, "
        f"adjusted after Benjamini and Hochberg within a panel, {marked} of {int((ds['samples'] > 0).sum())}.",
    ]
