"""What each head's d, ε, γ or S carries of an answer."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from qed_probe.figures import axes, style
from qed_probe.figures.heads import BELOW
from qed_probe.figures.record_contrasts import NUMBERED, signed_cells

SYMBOLS = {"direction": "d", "address": "ε", "gamma": "γ", "state": "S"}


@style.styled
def draw_patches(ds: xr.Dataset) -> Figure:
    """How far each head's part of the other run moves an answer, layer × head: a row a way, a column and a scale a part.

    Takes what ``analyses.patch_effects`` returns. A dot marks a head whose adjusted p is below 0.05.
    """
    ds = ds.transpose("what", "way", "layer", "head", ...)
    parts, rows, columns = (ds.sizes[name] for name in ("what", "layer", "head"))
    numbers = max(rows, columns * parts) <= NUMBERED
    height = 0.4 + float(np.clip(0.17 * rows, 0.4, 2.5))
    figure, panels = axes.panels(2 * parts, parts, height, style.PAGE if parts > 2 or columns * parts > 6 else style.COLUMN)
    for column, part in enumerate(ds["what"].values):
        cells = ds.sel(what=part)
        top = float(np.abs(cells["difference"].values).max()) or 1.0
        mine = [panels[column], panels[parts + column]]
        for panel, way in zip(mine, ds["way"].values, strict=True):
            cell = cells.sel(way=way)
            mesh = signed_cells(panel, cell["difference"].values, cell["p_fdr"].values < BELOW, numbers, top)
            style.label_rows(panel.yaxis, ds["layer"].values)
            style.label_rows(panel.xaxis, np.arange(columns))
            panel.set_title(f"{SYMBOLS[str(part)]}, {way}", pad=3)
        bar = figure.colorbar(mesh, ax=mine, pad=0.02, location="bottom", aspect=12, label=f"change (nats){_most(cells)}")
        end = style.number(top, style.is_plain(top))
        bar.set_ticks([-top, 0, top], labels=[f"−{end}", "0", f"+{end}"])
        bar.ax.get_xticklabels()[0].set_horizontalalignment("left")
        bar.ax.get_xticklabels()[2].set_horizontalalignment("right")
    axes.label_outside(panels, parts, "head", "layer")
    style.write_below(figure, _note(ds))
    return figure


def _most(cells: xr.Dataset) -> str:
    """How much of the difference between whole runs that is, where there is one."""
    most = float(np.abs(cells["ratio"].values).max())
    return "" if np.isnan(most) else f"\nat most {style.number(most, style.is_plain(most))} of the whole"


def _note(ds: xr.Dataset) -> list[str]:
    full, low, high = (float(ds[name]) for name in ("full", "full_low", "full_high"))
    marked, cells = int((ds["p_fdr"] < BELOW).sum()), ds["p_fdr"].size
    pairs = style.counted(int(ds["pairs"]), "pair")
    return [
        "Change of ln p(clean answer) − ln p(corrupted answer) when one head has the other run's part: d, ε or γ over the whole "
        "prompt, S where the question begins. Denoising: the clean run's in the corrupted run; noising: the reverse.",
        f"{ds.attrs['mixer']}, {pairs} of {ds.attrs['task']}, {ds.attrs['length']:,} tokens. Whole runs are "
        f"{full:.3g} nats [{low:.3g}, {high:.3g}] apart; each part has a scale of its own. Dots: p < {BELOW:g} by the "
        f"paired t test, adjusted after Benjamini and Hochberg within a panel, {marked} of {cells}.",
    ]
