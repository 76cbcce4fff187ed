"""What other erase directions would have done, as one small zarr store."""

from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from qed_probe.errors import StoreError
from qed_probe.store import schema, whole
from qed_probe.store.schema import Variable

VERSION = 1

PLACE = ("match", "regime", "direction")
CELL = (*PLACE, "layer")


def _cell(name: str, long_name: str, formula: str = "", dtype: str = "float64", units: str = "1") -> Variable:
    return Variable(name, CELL, dtype, units, long_name, formula)


VARIABLES = {
    row.name: row
    for row in (
        _cell("n", "tokens, heads and draws with a perturbation", dtype="int64", units="count"),
        _cell("undefined", "tokens, heads and draws with nothing to perturb", "‖o⁻‖ = 0", dtype="int64", units="count"),
        _cell("nonfinite", "tokens, heads and draws that are not finite", dtype="int64", units="count"),
        _cell("mean", "mean perturbation", "mean ‖δo‖/‖o⁻‖"),
        _cell("median", "median perturbation", "median ‖δo‖/‖o⁻‖"),
        _cell("sum_ratio", "perturbation of all outputs together", "Σ‖δo‖/Σ‖o⁻‖"),
        _cell("ratio", "mean perturbation over the actual direction's in this layer", "mean / mean of actual"),
        _cell("gate", "mean strength of the erase", "mean |λ| or γ"),
        _cell("overlap", "mean overlap with the query", "mean |qᵀk| or |qᵀε|"),
        _cell("read", "mean norm of what the direction reads", "mean ‖S̄ᵀd‖ or ‖Ŝᵀε‖"),
        _cell("before", "mean norm of the output without the erase", "mean ‖o⁻‖"),
        _cell("drift_n", "tokens, heads and draws with a drift: ‖y‖ > 0", dtype="int64", units="count"),
        _cell("drift_mean", "mean change of the output against the actual one", "mean ‖y' − y‖/‖y‖"),
        _cell("drift_median", "median change of the output against the actual one", "median ‖y' − y‖/‖y‖"),
        Variable("layers_mean", PLACE, "float64", "1", "mean perturbation, mean over layers", "mean over layers of mean"),
        Variable("layers_median", PLACE, "float64", "1", "median perturbation, mean over layers", "mean over layers of median"),
        Variable("layers_sum_ratio", PLACE, "float64", "1", "Σ‖δo‖/Σ‖o⁻‖, mean over layers", "mean over layers of sum_ratio"),
        Variable("layers_drift_mean", PLACE, "float64", "1", "mean drift, mean over layers", "mean over layers of drift_mean"),
        Variable(
            "ratio_of_means", PLACE, "float64", "1", "ratio of means over layers", "Σ_layer n·mean / Σn over that of actual"
        ),
        Variable("mean_of_ratios", PLACE, "float64", "1", "mean over layers of the ratio in each", "mean over layers of ratio"),
    )
}


def make_replays(columns: Mapping[str, object], coords: Mapping[str, object], attrs: Mapping[str, object]) -> xr.Dataset:
    """A labelled table of replays from arrays by name and the labels of ``CELL``; raises StoreError as ``check_replays`` does."""
    ds = whole.table(VARIABLES, columns, coords, {"schema": schema.REPLAYS, "schema_version": VERSION, **attrs})
    check_replays(ds)
    return ds


def check_replays(ds: xr.Dataset, where: str | Path = "replays") -> None:
    """Refuse a Dataset that has not every variable of ``VARIABLES`` along its dims, or no actual direction."""
    missing = [name for name, row in VARIABLES.items() if name not in ds or {*ds[name].dims} != {*row.dims}]
    if missing:
        raise StoreError(f"{where}: expected the variables of replays along {', '.join(CELL)}, found no {', '.join(missing)}")
    if "actual" not in ds["direction"].values:
        found = ", ".join(map(str, ds["direction"].values)) or "none"
        raise StoreError(f"{where}: expected the actual direction among the replays, found {found}")


def left_out(ds: xr.Dataset) -> list[str]:
    """What replays are without, in words: directions, ratios, tokens and prompts."""
    idle = ds["ratio"].sel(direction="actual").isnull().any(("match", "regime"))
    layers = ", ".join(map(str, ds["layer"].values[idle.values]))
    parts = [str(ds.attrs["absent"])] * bool(ds.attrs["absent"])
    parts += [f"ratios of layer {layers}, where the actual direction changes nothing"] * bool(layers)
    empty, lost = int(ds["undefined"].sel(direction="actual").max()), ds["nonfinite"].sum(("match", "regime", "layer"))
    parts += [f"{empty:,} tokens and heads a layer with ‖o⁻‖ = 0, as a prompt's first"] * bool(empty)
    counted = zip(lost["direction"].values, lost.values, strict=True)
    parts += [f"{int(count):,} values of {name} that are not finite" for name, count in counted if count]
    short, broken = (int(ds.attrs[name]) for name in ("prompts_of_one_token", "tokens_incomplete"))
    parts += [f"{short:,} prompt{'s' * (short != 1)} of one token"] * bool(short)
    return parts + [f"{broken:,} tokens of prompts that are not complete"] * bool(broken)


def save_replays(ds: xr.Dataset, path: str | Path, *, overwrite: bool = False) -> None:
    """Keep replays as a zarr store, which appears at ``path`` whole.

    Raises StoreError, and leaves what is there as it was, if these are no replays, if something is at ``path`` already (with
    ``overwrite``: something that is no store of replays), if another process writes there, or if the disk does not allow it.
    """
    check_replays(ds)
    ds = whole.retyped(ds, "U", object)
    whole.put(path, lambda aside: whole.write_group(ds, aside), schema=schema.REPLAYS, overwrite=overwrite)


def open_replays(path: str | Path) -> xr.Dataset:
    """Load a store of replays; raises StoreError for anything else, for a damaged store and for one of a newer qed-probe."""
    ds = whole.load(Path(path), schema=schema.REPLAYS, version=VERSION)
    check_replays(ds, path)
    return whole.retyped(ds, "OT", str)
