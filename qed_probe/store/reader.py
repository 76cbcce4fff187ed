"""Open stores as plain xarray, several as one, with everything masked that is not complete."""

import os
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from qed_probe.errors import StoreError
from qed_probe.store import place, schema

IN_MEMORY = 1 << 24
"""Tokens up to which the coordinates of all stores together are loaded."""


class IncompleteStoreWarning(UserWarning):
    """The store was not finished: part of it reads as NaN."""


def open(*paths: str | Path) -> xr.Dataset:
    """Open trace stores of one checkpoint as one Dataset, the records lazily.

    Coordinates are in memory, text as numpy's fixed-width strings, unless there are more than 2²⁴ tokens: then they are lazy too.
    Later stores follow along ``token``, ``prompt``, ``mark`` and ``boundary``. The coordinate ``complete(token)`` and the
    attribute ``complete`` say what is there: where a block is not, records are NaN and texts empty, as are marks in it and
    outcomes of prompts that reach into it. Warns with IncompleteStoreWarning. Raises StoreError for a path that is no store or
    needs a newer qed-probe, and for stores that do not belong together.
    """
    return _open_all(paths)


def open_inputs(*paths: str | Path) -> xr.Dataset:
    """Open the ``inputs`` of stores, as ``open`` does: what recomputes every record without the model."""
    return _open_all(paths, "inputs")


def open_states(*paths: str | Path) -> xr.Dataset:
    """Open the ``states`` of stores, as ``open`` does: ``state(layer, snapshot, head, key, value)``."""
    return _open_all(paths, "states")


def _open_all(paths: tuple[str | Path, ...], group: str = "") -> xr.Dataset:
    if not paths:
        raise StoreError("expected at least one store to open, found none")
    places = [os.path.realpath(path) for path in paths]
    twice = [str(path) for i, path in enumerate(paths) if places[i] in places[:i]]
    if twice:
        raise StoreError(f"expected stores that differ, found {twice[0]} twice")
    stores: list[xr.Dataset] = []
    for path in paths:
        stores.append(_open(Path(path), group))
        _check_together(stores[0], stores[-1], f"{paths[0]} and {path}")
    ds = stores[0] if len(stores) == 1 else _join(stores)
    del ds.attrs["variables"]  # which the Dataset itself shows, and an attribute of that name breaks scipy's netCDF files
    return _with_coordinates_loaded(ds) if ds.sizes["token"] <= IN_MEMORY else ds


def _open(path: Path, group: str) -> xr.Dataset:
    path = place.found(path)
    attrs = place.stored_attrs(path)
    version = attrs["qed_probe_schema"]
    if version != schema.SCHEMA_VERSION:
        raise StoreError(f"{path}: expected schema version {schema.SCHEMA_VERSION}, found {version}; a newer qed-probe reads it")
    if group and not (path / group).is_dir():
        setting = {"inputs": "save_inputs", "states": "state_at"}[group]
        raise StoreError(f"{path}: expected group {group}, found none; a trace with {setting} keeps it")
    root = _lazily(path)
    _check_bounds(root, path)
    ds = _open_group(path, group, root) if group else root
    complete = np.repeat(root["done"].values.astype(bool), int(root.attrs["block_tokens"]))[: root.sizes["token"]]
    if not complete.all():
        ds = _mask(ds, group, complete)
        kept = f"{complete.sum()} of {len(complete)} tokens are complete, the others read as NaN"
        warnings.warn(f"{path}: {kept}; resume finishes it", IncompleteStoreWarning, stacklevel=4)
    ds = ds.assign_coords(complete=("token", complete)).drop_vars("done", errors="ignore")
    return ds.assign_attrs(schema.plain(root.attrs), complete=int(complete.all()))


def _open_group(path: Path, group: str, root: xr.Dataset) -> xr.Dataset:
    """A group, with the coordinates that the trace itself wrote, which are at the root alone."""
    ds = _lazily(path, group)
    return ds.assign_coords({name: x for name, x in root.coords.items() if name not in ds.coords and {*x.dims} <= {*ds.dims}})


def _lazily(path: Path, group: str | None = None) -> xr.Dataset:
    """A group whose values are read when they are wanted; raises StoreError where what describes it is damaged."""
    try:
        # An absolute path: xarray would take "a:b" for a URL.
        ds: xr.Dataset = xr.open_zarr(os.path.abspath(path), group=group, chunks={}, consolidated=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise StoreError(f"{path}: expected a whole trace store, found one that cannot be read: {error}") from error
    return ds


def _check_bounds(root: xr.Dataset, path: Path) -> None:
    """Raise StoreError for prompts that are not one behind the other up to the last token: their chunk is lost."""
    bounds = root["cu_seqlens"].values
    if bounds[0] != 0 or bounds[-1] != root.sizes["token"] or (np.diff(bounds.astype(np.int64)) < 0).any():
        raise StoreError(f"{path}: expected prompts from token 0 to {root.sizes['token']}, found {bounds[0]} to {bounds[-1]}")


def _with_coordinates_loaded(ds: xr.Dataset) -> xr.Dataset:
    """In memory xarray can group and select by them; netCDF and ``astype(str)`` take no strings of variable width."""
    loaded = {name: x.load() for name, x in ds.coords.items()}
    texts = {name: x.astype(object).astype(str) for name, x in loaded.items() if x.dtype.kind in "OT"}
    return ds.assign_coords(loaded | texts)


def _mask(ds: xr.Dataset, group: str, complete: np.ndarray) -> xr.Dataset:
    counted = np.concatenate([[0], np.cumsum(complete)])[ds["cu_seqlens"].values]
    keep = {
        "token": complete,
        "mark": complete[ds["mark_token"].values],
        "prompt": np.diff(counted) == np.diff(ds["cu_seqlens"].values),
        "snapshot": complete[ds["snapshot_token"].values] if "snapshot_token" in ds.coords else complete[:0],
    }
    masked: dict[Hashable, xr.DataArray] = {}
    for name, array in ds.variables.items():
        row = schema.VARIABLES.get(f"{group}/{name}" if group else str(name))
        dim = next((dim for dim in array.dims if dim in keep), None)
        if row is not None and not row.static and dim is not None:
            fill = row.fill if row.dtype == "str" else array.dtype.type(row.fill)
            masked[name] = ds[name].where(xr.DataArray(keep[str(dim)], dims=dim), fill)
    return ds.assign(masked)


def _check_together(one: xr.Dataset, other: xr.Dataset, paths: str) -> None:
    for name in schema.SHARED_ATTRS:
        a, b = (ds.attrs.get(name, schema.UNCHANGED.get(name)) for ds in (one, other))
        if a != b:
            shown = [f"{x!s:.12}…" if name == "checkpoint_digest" else str(x) for x in (a, b)]
            differ = _apart(str(a), str(b)) if name == "variables" else f"{name} is {' and '.join(shown)}"
            raise StoreError(f"{paths} do not belong together: {differ}")


def _apart(one: str, other: str) -> str:
    """Which variables only one of two stores has."""
    a, b = set(one.split(", ")), set(other.split(", "))
    only = {"first": a - b, "second": b - a}
    return "; ".join(f"only the {which} has {', '.join(sorted(names))}" for which, names in only.items() if names)


def _join(stores: list[xr.Dataset]) -> xr.Dataset:
    """One after another along every dimension that grows with the prompts; indices into those dimensions move along."""
    grown = [dim for dim in ("token", "prompt", "mark", "boundary", "snapshot") if dim in stores[0].dims]
    shifted, tokens, prompts = [], 0, 0
    for ds in stores:
        moved: dict[str, Any] = {
            "prompt_index": ds["prompt_index"] + prompts,
            "mark_token": ds["mark_token"] + tokens,
            "cu_seqlens": ds["cu_seqlens"] + tokens,
        }
        if "snapshot" in grown:
            moved["snapshot_token"] = ds["snapshot_token"] + tokens
        shifted.append(ds.assign_coords(moved).isel(boundary=slice(1 if tokens else 0, None)))
        tokens, prompts = tokens + ds.sizes["token"], prompts + ds.sizes["boundary"] - 1
    names = {dim: [name for name, x in stores[0].variables.items() if dim in x.dims] for dim in grown}
    joined = stores[0].drop_dims(grown)
    for dim, along in names.items():
        part = xr.concat(
            [_only(ds, along) for ds in shifted], dim, data_vars="minimal", coords="minimal", compat="override", join="override"
        )
        joined = joined.merge(part, compat="override", join="override")
    common = {k: v for k, v in stores[0].attrs.items() if all(ds.attrs.get(k) == v for ds in stores)}
    joined.attrs = {**common, "complete": min(ds.attrs["complete"] for ds in stores)}
    return joined


def _only(ds: xr.Dataset, names: list[Hashable]) -> xr.Dataset:
    return ds.drop_vars([name for name in ds.variables if name not in names and name not in ds.dims])
