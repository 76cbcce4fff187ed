"""Every figure of a table of memories."""

from collections.abc import Collection
from pathlib import Path

import xarray as xr

from qed_probe import figures
from qed_probe.analyses.source_strip import farthest_head, source_strip
from qed_probe.errors import StoreError
from qed_probe.gallery.files import save

DRAWN = {
    "effect_share": ("effects", figures.draw_effects),
    "growth": ("growth", figures.draw_growth),
    "recall_gain": ("recall", figures.draw_recall),
    "effective_rank": ("capacity", figures.draw_capacity),
}
"""The figure of each part, by a variable that the part has."""


def plot_memory(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Draw what the parts of the table are drawn as; raises StoreError if it has none that can be drawn."""
    files = _plot_sources(ds, folder, formats) if "share_role" in ds else []
    for variable, (name, draw) in DRAWN.items():
        if variable in ds:
            files += save(draw(ds), folder / name, formats)
    if not files:
        raise StoreError(f"expected a table with a part that can be drawn, found {ds.attrs['parts']} of {ds.attrs['subject']}")
    return files


def _plot_sources(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Shares by role and lag; of the head that reads farthest, the map and the first prompt's text."""
    files = save(figures.draw_sources(ds), folder / "sources", formats)
    if "share_map" in ds:
        files += save(figures.draw_read_map(ds, *farthest_head(ds)), folder / "sources-map", formats)
    if "source_text" in ds.coords:
        for probe in ds["probe"].values:
            files += save(figures.draw_token_strip(source_strip(ds, str(probe))), folder / f"sources-{probe}", formats)
    return files
