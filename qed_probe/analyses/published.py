"""What the papers print, as datasets of their own: marked as published, never mixed with what was measured, gaps left open."""

import json
from importlib.resources import files
from itertools import combinations
from typing import Any

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Field
from qed_probe.analyses.statistics import binomial_interval
from qed_probe.errors import InputError, StoreError
from qed_probe.kernels import MIXERS

PUBLISHED = (
    "qed-table-2", "qed-table-3", "qed-table-4", "qed-contrasts-8k", "qed-lambda", "qed-eigenvalue",
    "eda-table-1", "eda-table-2", "eda-table-3", "eda-figure-2a", "eda-figure-2b", "eda-figure-2c",
)  # fmt: skip
LAMBDA_MAX = 0.25  # of every arm with a direction: QED, eq. (13)
FIELDS: dict[str, Field] = {
    "accuracy": (("run", "length"), "1", "share of right answers"),
    "correct": (("run", "length"), "count", "right answers"),
    "samples": (("run", "length"), "count", "samples"),
    "low": (("run", "length"), "1", "lower end of its 95 % interval"),
    "high": (("run", "length"), "1", "upper end of its 95 % interval"),
}


def published(name: str, *more: str) -> xr.Dataset:
    """The values of one published table or figure, or of several that do not speak of the same thing.

    Dims and units are the table's own, values float64, NaN where the attribute ``gaps`` says that there are none. Attributes
    ``name``, ``source`` (authors, title, arXiv id and version), ``place``, ``page`` and ``unit`` say what stands where;
    ``published`` is 1. Raises InputError for a name that is not in PUBLISHED, StoreError for tables which ``check_unmixed``
    refuses or which have a variable in common.
    """
    tables = [_table(each) for each in (name, *more)]
    check_unmixed(*tables)
    for first, second in combinations(tables, 2):
        if both := sorted(map(str, first.data_vars.keys() & second.data_vars.keys())):
            names = " and ".join(table.attrs["name"] for table in (first, second))
            raise StoreError(f"expected tables of different variables, found {', '.join(both)} in {names}")
    if not more:
        return tables[0]
    attrs = {key: "; ".join(table.attrs[key] for table in tables) for key in ("name", "source", "place", "page", "unit", "gaps")}
    joined = xr.merge(tables, join="outer", compat="no_conflicts", combine_attrs="drop")
    return joined.assign_attrs(attrs, published=1)


def published_accuracy() -> xr.Dataset:
    """QED's Table 3, S-NIAH-1, in the form that ``accuracy`` gives: dims (run, length), a run an arm of a seed.

    ``accuracy``, ``low`` and ``high`` are shares, the ends from exact binomial intervals over ``samples`` = 500 (0 in a gap);
    ``correct`` is the count that gives a printed percentage exactly; NaN in a gap and where no whole count does, and so the ends.
    λ_max is NaN for the arm that adds no direction. Source: QED arXiv 2608.13668v1, Table 3 and Sec. 4.2.
    """
    table = published("qed-table-3")
    share = table["accuracy"].transpose("arm", "seed", "length").values.reshape(-1, table.sizes["length"]) / 100
    samples = np.where(np.isnan(share), 0, table.attrs["samples"])
    count = share * samples
    whole = np.isclose(count, np.round(count), rtol=0, atol=1e-6)
    correct = np.where(whole, np.round(count), np.nan)
    low, high = (np.where(whole, end, np.nan) for end in binomial_interval(np.where(whole, correct, 0), samples))
    values = {"accuracy": share, "correct": correct, "samples": samples, "low": low, "high": high}
    described = {name: (dims, values[name], {"units": unit, "long_name": text}) for name, (dims, unit, text) in FIELDS.items()}
    coords = {"length": table["length"].values, **_runs(table)}
    return xr.Dataset(described, coords=coords, attrs={**table.attrs, "unit": "1"})


def published_contrast() -> xr.Dataset:
    """Differences between QED's arms in the form that ``contrast`` gives: dims (panel, seed, length), in percentage points.

    Of two cells of Table 3 where both are known, else as printed for 8192 tokens; NaN in a gap. With two seeds there is no mean.
    Source: QED arXiv 2608.13668v1, Table 3 and Sec. 6.
    """
    table, printed = published("qed-table-3"), published("qed-contrasts-8k")
    share, pairs = table["accuracy"], list(zip(printed["first"].values, printed["second"].values, strict=True))
    known = [[str(arm) in share["arm"].values for arm in pair] for pair in pairs]
    gap = xr.full_like(share.isel(arm=0, drop=True), np.nan)
    rows = [
        share.sel(arm=first, drop=True) - share.sel(arm=second, drop=True) if all(there) else gap
        for (first, second), there in zip(pairs, known, strict=True)
    ]
    found = xr.concat(rows, "panel").assign_coords(panel=printed["panel"].values).transpose("panel", "seed", "length")
    found = found.combine_first(printed["difference"].drop_vars(["first", "second"])).rename("difference")
    attrs = {key: table.attrs[key] for key in ("name", "source", "place", "page", "gaps", "trained_length") if key in table.attrs}
    return found.assign_attrs(units="percentage points").to_dataset().assign_attrs(attrs, published=1)


def _runs(table: xr.Dataset) -> dict[str, tuple[str, Any]]:
    """The labels of a run, arm after arm and in each seed after seed."""
    arm, seed = np.repeat(table["arm"].values, table.sizes["seed"]), np.tile(table["seed"].values, table.sizes["arm"])
    runs = {
        "model": [f"{a} seed {s} (published)" for a, s in zip(arm, seed, strict=True)],
        "arm": arm,
        "seed": seed,
        "lambda_max": [np.nan if MIXERS[a].direction is None else LAMBDA_MAX for a in arm],
        "task": ["niah_single_1"] * len(arm),
    }
    return {key: ("run", x) for key, x in runs.items()}


def check_unmixed(*datasets: xr.Dataset) -> None:
    """Refuse to treat as one what must stay apart; to be asked before datasets are joined or drawn as one series.

    Raises StoreError where some are published and some were measured, and where two published tables print different values of
    the same thing, with the reason.
    """
    marked = [ds for ds in datasets if ds.attrs.get("published")]
    names = [name for ds in marked for name in ds.attrs["name"].split("; ")]
    if 0 < len(marked) < len(datasets):
        raise StoreError(f"expected published or measured values alone, found {names[0]} (published) beside measured ones")
    for name in names:
        for other, reason in _document(name).get("conflicts", {}).items():
            if other in names:
                raise StoreError(f"expected tables that agree, found {other} and {name}. {reason}")


def _document(name: str) -> dict[str, Any]:
    if name not in PUBLISHED:
        raise InputError(f"expected a published dataset among {', '.join(PUBLISHED)}; found {name!r}")
    text = (files("qed_probe.data") / "published" / f"{name}.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _table(name: str) -> xr.Dataset:
    """One JSON file as it stands: a coordinate is a list, or [dim, list] along another's dim; null is NaN."""
    document = _document(name)
    variables = {
        key: (row["dims"], np.array(row["values"], dtype=np.float64), {"units": document["unit"], "long_name": row["long_name"]})
        for key, row in document["variables"].items()
    }
    coords = {key: tuple(x) if x and isinstance(x[-1], list) else x for key, x in document["coords"].items()}
    attrs = {key: x for key, x in document.items() if key not in ("variables", "coords", "conflicts")}
    return xr.Dataset(variables, coords=coords, attrs={"name": name, **attrs, "published": 1})
