"""Every figure of a table of memories."""

from collections.abc import Collection
from pathlib import Path

import xarray as xr

from qed_probe import figures
from qed_probe.gallery.files import save
from qed_probe.memory.strips import farthest_head, source_strip


def plot_memory(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Draw what the parts of the table are drawn as."""
    return _plot_sources(ds, folder, formats) if "share_role" in ds else []


def _plot_sources(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Shares by role and lag; of the head that reads farthest, the map and the first prompt's text."""
    files = save(figures.draw_sources(ds), folder / "sources", formats)
    if "share_map" in ds:
        files += save(figures.draw_read_map(ds, *farthest_head(ds)), folder / "sources-map", formats)
    if "source_text" in ds.coords:
        for probe in ds["probe"].values:
            files += save(figures.draw_token_strip(source_strip(ds, str(probe))), folder / f"sources-{probe}", formats)
    return files
