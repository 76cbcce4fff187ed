"""The eigenvalue claim, as pictures."""

from collections.abc import Collection
from pathlib import Path

import xarray as xr

from qed_probe import figures
from qed_probe.gallery.files import save


def plot_eigen(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Draw every figure that what ``qed-probe eigen`` kept can carry, and return the files."""
    return [path for name, draw in figures.eigen_figures(ds).items() for path in save(draw(ds), folder / name, formats)]
