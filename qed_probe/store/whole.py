"""Small stores of results: one zarr group a table, written aside and renamed whole, so that there never is a part of one."""

import json
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import place
from qed_probe.store.schema import Variable, plain


def table(
    rows: Mapping[str, Variable], columns: Mapping[str, object], coords: Mapping[str, object], attrs: Mapping[str, object]
) -> xr.Dataset:
    """Arrays by name as a Dataset, each along the dims and with the words of its row; attributes as a store gives them back."""
    ds = xr.Dataset({name: (rows[name].dims, np.asarray(x)) for name, x in columns.items()}, dict(coords))
    for name, row in rows.items():
        if name in ds:
            formula = {"formula": row.formula} if row.formula else {}
            ds[name].attrs = {"long_name": row.long_name, "units": row.units, **formula}
    return ds.assign_attrs(plain_attrs(attrs))


def plain_attrs(attrs: Mapping[str, object]) -> dict[str, object]:
    """Attributes as a store gives them back."""
    return plain(json.loads(json.dumps(dict(attrs))))


def put(path: str | Path, write: Callable[[Path], None], *, schema: str, overwrite: bool) -> None:
    """Let ``write`` make a store aside, and give it its name; ``overwrite`` replaces a store of the same ``schema``.

    Raises StoreError, and leaves what is there as it was, for anything else there, for another writer and for a full disk.
    """
    with _held(path, "; what was there is as it was") as path:
        there = _check_there(path, schema, overwrite)
        place.sweep(path)
        aside = place.sibling(path, "tmp")
        try:
            # zarr goes on writing after Ctrl-C, beside what is swept away; the end of a thread is waited for.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(write, aside).result()
            aside.rename(place.sibling(path, "new") if there else path)
            if there:
                place.replace(path)
        except BaseException:
            place.sweep(path)
            raise


def check_free(path: str | Path, *, schema: str, overwrite: bool) -> None:
    """Raise StoreError now, before hours of work, where ``put`` could not write."""
    with _held(path) as path:
        _check_there(path, schema, overwrite)


@contextmanager
def _held(path: str | Path, consequence: str = "") -> Iterator[Path]:
    """Lock the true path; what the disk refuses is one line."""
    path = Path(os.path.realpath(path))
    try:
        held = place.lock(path)
        try:
            yield path
        finally:
            place.unlock(path, held)
    except OSError as error:
        raise StoreError(f"{path}: writing failed: {error.strerror or error}{consequence}") from error


def _check_there(path: Path, schema: str, overwrite: bool) -> bool:
    """Whether there is a store to replace; the lock is held."""
    place.restore(path)
    there = os.path.lexists(path)
    if there and not overwrite:
        raise StoreError(f"{path}: expected nothing there, found {place.kind(path)}; overwrite replaces {place.KINDS[schema]}")
    if there:
        attrs_of(path, schema)
    return there


def write_group(ds: xr.Dataset, root: Path) -> None:
    """One compressed chunk a variable, which is there whatever its values are: a missing file is a loss."""
    with zarr.config.set({"array.write_empty_chunks": True}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
        encoding = {name: {"chunks": x.shape} for name, x in ds.variables.items() if x.shape}
        ds.to_zarr(root, mode="w-", zarr_format=3, consolidated=True, encoding=encoding)


def retyped(ds: xr.Dataset, kinds: str, dtype: type) -> xr.Dataset:
    """The same with texts of these kinds as another: "U" as object to be written, "OT" as str to be selected by."""
    texts: dict[Hashable, Any] = {
        name: (x.dims, x.values.astype(object).astype(dtype), x.attrs)
        for name, x in ds.variables.items()
        if x.dtype.kind in kinds
    }
    return ds.assign_coords({name: x for name, x in texts.items() if name in ds.coords}).assign(
        {name: x for name, x in texts.items() if name not in ds.coords}
    )


def load(path: Path, *, schema: str, version: int) -> xr.Dataset:
    """The Dataset that ``put`` and ``write_group`` have left at ``path``; raises StoreError for anything else, and for a part."""
    path = place.found(path)
    found = attrs_of(path, schema).get("schema_version")
    if found != version:
        what = place.KINDS[schema].rpartition(" ")[2]
        raise StoreError(f"{path}: expected version {version} of {what}, found {found}; a newer qed-probe reads it")
    try:
        # An absolute path: xarray would take "a:b" for a URL.
        stored: xr.Dataset = xr.open_zarr(os.path.abspath(path), chunks=None, consolidated=True)
        lost = [
            str(name) for name, x in stored.variables.items() if not (path / str(name) / "c").joinpath(*"0" * x.ndim).is_file()
        ]
        if lost:
            raise StoreError(f"{path}: expected the values of every variable, found none of {', '.join(lost)}")
        return stored.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        expected = place.KINDS[schema].removeprefix("a ")
        raise StoreError(f"{path}: expected a whole {expected}, found one that cannot be read: {error}") from error


def attrs_of(path: Path, schema: str) -> dict[str, Any]:
    """The attributes of the store of this schema at ``path``; raises StoreError saying what is there instead."""
    attrs = place.group_attrs(path)
    if attrs.get("schema") != schema:
        raise StoreError(f"{path}: expected {place.KINDS[schema]}, found {place.kind(path)}")
    return attrs
