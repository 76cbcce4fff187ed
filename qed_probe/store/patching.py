"""What exchanging a part of two runs does to an answer, pair by pair, as one small zarr store."""

from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from qed_probe.errors import StoreError
from qed_probe.store import schema, whole
from qed_probe.store.schema import Variable

VERSION = 1
CELL = ("what", "way", "layer", "head", "pair")
ERASE = ("way", "erase", "layer", "head")

_E = "e of the main edit with the own or a patched d, from the first token that differs on"
_SCORE = "ln p(clean answer) − ln p(corrupted answer)"
VARIABLES = {
    row.name: row
    for row in (
        Variable("patched", CELL, "float64", "nat", f"{_SCORE} of a run that has one head's part of the other"),
        Variable("clean", ("pair",), "float64", "nat", f"{_SCORE} of the clean run"),
        Variable("corrupted", ("pair",), "float64", "nat", f"{_SCORE} of the corrupted run"),
        Variable("depth", ("pair",), "float64", "1", "share of the noise before the needle"),
        Variable("eigenvalue_min", ERASE, "float64", "1", f"smallest {_E}", "e = 1 − aᵀk"),
        Variable("eigenvalue_max", ERASE, "float64", "1", f"largest {_E}", "e = 1 − aᵀk"),
    )
}
ALWAYS = ("patched", "clean", "corrupted", "depth")


def make_patches(columns: Mapping[str, object], coords: Mapping[str, object], attrs: Mapping[str, object]) -> xr.Dataset:
    """A labelled table from its arrays and the labels of its dims; raises StoreError as ``check_patches`` does."""
    ds = whole.table(VARIABLES, columns, coords, {"schema": schema.PATCHES, "schema_version": VERSION, **attrs})
    check_patches(ds)
    return ds


def check_patches(ds: xr.Dataset, where: str | Path = "patches") -> None:
    """Refuse a Dataset without the variables of ``ALWAYS`` along their dims."""
    missing = [name for name in ALWAYS if name not in ds or {*ds[name].dims} != {*VARIABLES[name].dims}]
    if missing:
        raise StoreError(f"{where}: expected the variables of patches, found no {', '.join(missing)}")


def save_patches(ds: xr.Dataset, path: str | Path, *, overwrite: bool = False) -> None:
    """Keep patches as a zarr store, which appears at ``path`` whole.

    Raises StoreError, and leaves what is there as it was, if these are no patches, if something is at ``path`` already (with
    ``overwrite``: something that is no store of patches), if another process writes there, or if the disk does not allow it.
    """
    check_patches(ds)
    ds = whole.retyped(ds, "U", object)
    whole.put(path, lambda aside: whole.write_group(ds, aside), schema=schema.PATCHES, overwrite=overwrite)


def open_patches(path: str | Path) -> xr.Dataset:
    """Load a store of patches; raises StoreError for anything else, for a damaged store and for one of a newer qed-probe."""
    ds = whole.load(Path(path), schema=schema.PATCHES, version=VERSION)
    check_patches(ds, path)
    return whole.retyped(ds, "OT", str)
