"""What models answered, sample by sample: one flat table along ``sample``, kept as one small zarr store.

A store of outcomes is written aside and renamed whole, so there is never a part of one.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from qed_probe.errors import StoreError
from qed_probe.store import place, schema, whole
from qed_probe.store.schema import Variable

VERSION = 1


def _variable(name: str, dtype: str, long_name: str, units: str = "1") -> Variable:
    return Variable(name, ("sample",), dtype, units, long_name)


VARIABLES = {
    row.name: row
    for row in (
        _variable("model", "str", "name of the checkpoint"),
        _variable("arm", "str", "mixer"),
        _variable("seed", "int64", "training seed, −1 where unknown"),
        _variable("lambda_max", "float64", "largest strength of the direction, NaN where the mixer adds none"),
        _variable("task", "str", "task"),
        _variable("length", "int64", "length of prompt and answer, 0 where the task has none", "token"),
        _variable("index", "int64", "number of the sample within task and length"),
        _variable("fingerprint", "int64", "64 bits of what the model was given, the same in samples that pair"),
        _variable("depth", "float64", "share of the noise that comes before the needle, NaN where unknown"),
        _variable("strength", "float64", "factor on the strength of the direction"),
        _variable("direction", "str", "direction or address that ran instead, own if none"),
        _variable("at", "str", "heads that were changed, layer:head, or all"),
        _variable("phase", "str", "tokens for which the change held: all, prompt or answer"),
        _variable("mode", "str", "what the direction did: full, immediate, lasting or none"),
        _variable("answer", "str", "right answer"),
        _variable("prediction", "str", "the model's answer"),
        _variable("correct", "bool", "whether the answer was right"),
        _variable("loss", "float64", "mean −ln p over all tokens but the first, NaN where unknown", "nat"),
        _variable("answer_loss", "float64", "mean −ln p over the answer's tokens, NaN where unknown", "nat"),
        _variable("trained_length", "int64", "length of the training sequences, 0 where unknown", "token"),
        _variable("learned_at", "int64", "training step at which the task was learned, 0 never, −1 where unknown", "step"),
    )
}
KEY = ("model", "arm", "seed", "lambda_max", "task", "length", "strength", "direction", "at", "phase", "mode", "index")
"""What no two samples share; NaN equals NaN."""

JUDGED = ("answer", "prediction", "correct")
"""Variables of tasks that have an answer: all of them are there or none."""

NAMES = ("model", "arm", "task", "direction", "at", "phase", "mode")
UNKNOWN = {
    "seed": -1,
    "lambda_max": math.nan,
    "depth": math.nan,
    "loss": math.nan,
    "answer_loss": math.nan,
    "trained_length": 0,
    "learned_at": -1,
}
LEAST = {"seed": -1, "length": 0, "index": 0, "trained_length": 0, "learned_at": -1}


def make_outcomes(columns: Mapping[str, object], attrs: Mapping[str, object] | None = None) -> xr.Dataset:
    """A table of outcomes from its columns: a value a sample, or one for all of them.

    What is left out is unknown, and ``strength`` 1. Widths of numbers are made to fit, kinds are not. Raises StoreError as
    ``check_outcomes`` does.
    """
    given = UNKNOWN | schema.UNCHANGED | dict(columns)
    count = max((len(x) for x in given.values() if isinstance(x, (Sequence, np.ndarray)) and not isinstance(x, str)), default=1)
    ds = xr.Dataset(attrs={"schema": schema.OUTCOMES, "schema_version": VERSION, **(attrs or {})})
    for name, x in given.items():
        dtype = _stored_dtype(VARIABLES[name]) if name in VARIABLES else object
        values = np.asarray(x, object if dtype is object else None)
        if np.can_cast(values.dtype, dtype, "same_kind"):
            values = values.astype(dtype)
        ds[name] = ("sample", np.broadcast_to(values, count).copy() if values.ndim == 0 else values)
    check_outcomes(ds)
    return _typed(ds)


def check_outcomes(ds: xr.Dataset, where: str | Path = "outcomes") -> None:
    """Refuse a Dataset that is no table of outcomes.

    Every variable is there once a sample, with the dtype that ``VARIABLES`` names; ``answer``, ``prediction`` and ``correct`` are
    all there or none of them; no key is there twice. Raises StoreError naming ``where``, the sample and its value.
    """
    judged = [name for name in JUDGED if name in ds.variables]
    expected = [name for name in VARIABLES if name not in JUDGED or judged]
    missing = [name for name in expected if name not in ds.variables]
    unknown = [str(name) for name in ds.variables if name not in expected]
    if missing or unknown:
        found = [f"no {', '.join(missing)}"] * bool(missing) + [f"also {', '.join(unknown)}"] * bool(unknown)
        together = f" ({', '.join(JUDGED)} are there together or not at all)" if set(missing) & set(JUDGED) else ""
        raise StoreError(f"{where}: expected the variables of outcomes, found {' and '.join(found)}{together}")
    for name in expected:
        _check_column(ds[name], VARIABLES[name], where)
    if not ds.sizes["sample"]:
        raise StoreError(f"{where}: expected at least one sample, found none")
    _check_ranges(ds, where)
    keys = _keys(ds)
    if repeated := _repeated(keys):
        first, again = repeated
        raise StoreError(f"{where}, samples {first} and {again}: expected every key once, found {_key(keys, first)} twice")


def save_outcomes(ds: xr.Dataset, path: str | Path, *, overwrite: bool = False) -> None:
    """Keep a table of outcomes as a zarr store, which appears at ``path`` whole.

    Raises StoreError, and leaves what is there as it was, if the table is none, if something is at ``path`` already (with
    ``overwrite``: something that is no store of outcomes), if another process writes there, or if the disk does not allow it.
    """
    check_outcomes(ds)
    attrs = {**ds.attrs, "schema": schema.OUTCOMES, "schema_version": VERSION}
    plain = ds.reset_coords().assign_attrs(schema.plain(json.loads(json.dumps(attrs))))
    whole.put(path, lambda aside: _write(plain, aside), schema=schema.OUTCOMES, overwrite=overwrite)


def check_free(path: str | Path, export: str | Path | None = None, *, overwrite: bool = False) -> None:
    """Raise StoreError now, before hours of work, where ``save_outcomes`` or ``export_outcomes`` could not write these paths."""
    whole.check_free(path, schema=schema.OUTCOMES, overwrite=overwrite)
    path = Path(os.path.realpath(path))
    if export is not None:
        if os.path.realpath(export) == str(path):
            raise StoreError(f"{path}: expected a store and a file at different paths, found both there")
        with _aside(export):
            pass


def open_outcomes(paths: str | Path | Sequence[str | Path]) -> xr.Dataset:
    """Load stores of outcomes, one or several, as one table.

    ``model``, ``arm`` and ``task`` are numpy's fixed-width strings, ``answer`` and ``prediction`` objects. Attributes are those
    that all stores share. Raises StoreError for a path that holds no such store, a store that is damaged or needs a newer
    qed-probe, stores of which some have answers and some have none, and for a key that two of them have.
    """
    places = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not places:
        raise StoreError("expected at least one store of outcomes to open, found none")
    twice = [path for i, path in enumerate(places) if os.path.realpath(path) in map(os.path.realpath, places[:i])]
    if twice:
        raise StoreError(f"expected stores that differ, found {twice[0]} twice")
    stores = [_open(path) for path in places]
    if len(stores) == 1:
        return stores[0]
    _check_together(stores, places)
    joined: xr.Dataset = xr.concat(stores, "sample", combine_attrs="drop_conflicts")
    return joined


def export_outcomes(ds: xr.Dataset, path: str | Path) -> None:
    """Write a table of outcomes as JSON Lines, an object a sample; what was at ``path`` is replaced whole.

    NaN is null, and an infinite loss the string "Infinity", for which JSON has no number. Raises StoreError if the table is none
    or the file cannot be written.
    """
    check_outcomes(ds)
    with _aside(path) as aside:
        with open(aside, "w", encoding="utf-8", newline="\n") as out:
            out.writelines(_lines(ds))
        aside.replace(os.path.realpath(path))


@contextmanager
def _aside(path: str | Path) -> Iterator[Path]:
    """An empty file beside ``path``, to be written and renamed; whatever happens, it is gone afterwards."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise StoreError(f"{path}: expected the path of a file, found a directory")
    aside = place.sibling(path, "tmp")
    try:
        try:
            aside.touch()
            yield aside
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: writing failed: {error.strerror or error}; what was there is as it was") from error


def _check_column(column: xr.DataArray, row: Variable, where: str | Path) -> None:
    if column.dims != row.dims:
        raise StoreError(f"{where}: expected {row.name} along sample alone, found {column.dims}")
    values = column.values
    if row.dtype != "str":
        if values.dtype != row.dtype:
            raise StoreError(f"{where}: expected {row.name} as {row.dtype}, found {values.dtype}")
        return
    for i, text in enumerate(values.tolist()):
        if not isinstance(text, str) or not _encodable(text):
            raise StoreError(f"{where}, sample {i}: expected {row.name} to be Unicode text, found {text!r}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_ranges(ds: xr.Dataset, where: str | Path) -> None:
    wrong = {name: (ds[name].values < least, f"≥ {least}") for name, least in LEAST.items()}
    depth = ds["depth"].values
    wrong["depth"] = (depth < 0) | (depth > 1), "within 0 and 1, or NaN"
    wrong["strength"] = ~np.isfinite(ds["strength"].values), "finite"
    for name, (bad, expected) in wrong.items():
        if bad.any():
            i = int(np.argmax(bad))
            raise StoreError(f"{where}, sample {i}: expected {name} {expected}, found {ds[name].values[i]}")


def _keys(ds: xr.Dataset) -> pd.DataFrame:
    # As objects: not every pandas takes NumPy's strings of variable width.
    return pd.DataFrame({name: ds[name].values.astype(_stored_dtype(VARIABLES[name])) for name in KEY})


def _key(keys: pd.DataFrame, i: int) -> str:
    return ", ".join(f"{name} {keys[name].iloc[i]}" for name in KEY)


def _repeated(keys: pd.DataFrame) -> tuple[int, int] | None:
    """The first row that repeats an earlier one: that one and it."""
    again = keys.duplicated().to_numpy()
    if not again.any():
        return None
    groups = keys.groupby([*KEY], dropna=False, sort=False).ngroup().to_numpy()
    second = int(np.argmax(again))
    return int(np.argmax(groups == groups[second])), second


def _write(ds: xr.Dataset, root: Path) -> None:
    columns = {
        name: ("sample", ds[name].values.astype(_stored_dtype(row)), _described(row))
        for name, row in VARIABLES.items()
        if name in ds
    }
    whole.write_group(xr.Dataset(columns, attrs=ds.attrs), root)


def _stored_dtype(row: Variable) -> Any:  # noqa: ANN401 - a name or a type
    return object if row.dtype == "str" else row.dtype


def _described(row: Variable) -> dict[str, str]:
    return {"long_name": row.long_name, "units": row.units}


def _typed(ds: xr.Dataset) -> xr.Dataset:
    """Variables in their order; texts as objects, for numpy's fixed-width strings lose NULs at their end."""
    columns: dict[str, Any] = {}
    for name in [name for name in VARIABLES if name in ds]:
        values = ds[name].values
        if VARIABLES[name].dtype == "str":
            values = values.astype(object).astype(str if name in NAMES else object)
        columns[name] = ("sample", values, _described(VARIABLES[name]))
    return xr.Dataset(columns, attrs=ds.attrs)


def _open(path: Path) -> xr.Dataset:
    stored = whole.load(path, schema=schema.OUTCOMES, version=VERSION)
    if "mode" not in stored and "phase" in stored:  # made before there were modes
        stored["mode"] = stored["phase"].dims, np.full(stored["phase"].shape, "full", object)
    check_outcomes(stored, path)
    return _typed(stored)


def _check_together(stores: list[xr.Dataset], paths: list[Path]) -> None:
    judged = ["correct" in ds for ds in stores]
    if len({*judged}) > 1:
        first, other = paths[judged.index(True)], paths[judged.index(False)]
        raise StoreError(f"{first} and {other} do not belong together: the first has answers, the second has none")
    keys = pd.concat([_keys(ds) for ds in stores], ignore_index=True)
    if repeated := _repeated(keys):
        ends = np.cumsum([ds.sizes["sample"] for ds in stores])
        first, other = (paths[int(np.searchsorted(ends, i, "right"))] for i in repeated)
        raise StoreError(f"{first} and {other} do not belong together: both have the sample {_key(keys, repeated[0])}")


def _lines(ds: xr.Dataset) -> Iterator[str]:
    names = [name for name in VARIABLES if name in ds]
    for row in zip(*(ds[name].values.tolist() for name in names), strict=True):
        sample = dict(zip(names, map(_number, row), strict=True))
        yield json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n"


def _number(x: object) -> object:
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return None if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
