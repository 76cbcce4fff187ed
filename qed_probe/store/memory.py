"""What memories hold and what reads of them contain, as one small zarr store."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe.errors import StoreError
from qed_probe.store import schema, whole

VERSION = 1


def make_memory(
    tables: Sequence[xr.Dataset],
    layers: Sequence[int],
    heads: int,
    nonfinite: NDArray[np.int64],
    attrs: dict[str, object],
) -> xr.Dataset:
    """The tables of a run as one, along ``layer`` and ``head``, with ``nonfinite`` ``[layer]`` prompts left out."""
    ds = xr.merge([table.assign_coords(layer=[*layers], head=np.arange(heads)) for table in tables], join="exact")
    ds["nonfinite"] = (("layer",), nonfinite, {"long_name": "prompts left out, as inputs are not finite", "units": "count"})
    found = ds.assign_attrs(whole.plain_attrs({"schema": schema.MEMORY, "schema_version": VERSION, **attrs}))
    check_memory(found)
    return found


def check_memory(ds: xr.Dataset, where: str | Path = "memory") -> None:
    """Refuse a Dataset that is no table of memories."""
    missing = [name for name in ("layer", "head", "nonfinite") if name not in ds.variables]
    if missing or ds.attrs.get("schema") != schema.MEMORY:
        raise StoreError(f"{where}: expected a table of memories, found one without {', '.join(missing) or 'its schema'}")


def save_memory(ds: xr.Dataset, path: str | Path, *, overwrite: bool = False) -> None:
    """Keep a table of memories as a zarr store, which appears at ``path`` whole.

    Raises StoreError, and leaves what is there as it was, if this is none, if something is at ``path`` already (with
    ``overwrite``: something that is no such store), if another process writes there, or if the disk does not allow it.
    """
    check_memory(ds)
    ds = whole.retyped(ds, "U", object)
    whole.put(path, lambda aside: whole.write_group(ds, aside), schema=schema.MEMORY, overwrite=overwrite)


def open_memory(path: str | Path) -> xr.Dataset:
    """Load such a store; raises StoreError for anything else, for a damaged store and for one of a newer qed-probe."""
    ds = whole.load(Path(path), schema=schema.MEMORY, version=VERSION)
    check_memory(ds, path)
    return whole.retyped(ds, "OT", str)
