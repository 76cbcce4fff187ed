"""What was counted of a run's erase factors, or of a part of its prompts, as one small zarr store."""

from collections.abc import Mapping
from pathlib import Path

import xarray as xr

from qed_probe.errors import StoreError
from qed_probe.store import schema, whole
from qed_probe.store.schema import Variable

VERSION = 1
HEADS, WORST = ("layer", "head"), ("claim", "worst")


def _count(name: str, dims: tuple[str, ...], long_name: str) -> Variable:
    return Variable(name, dims, "int64", "count", long_name)


VARIABLES = {
    row.name: row
    for row in (
        _count("n", ("quantity", *HEADS), "finite values"),
        _count("nonfinite", ("quantity", *HEADS), "values that are NaN or infinite"),
        _count("below_zero", ("quantity", *HEADS), "values below 0, of eigenvalues"),
        _count("above_one", ("quantity", *HEADS), "values above 1, of eigenvalues"),
        _count("beyond_one", ("quantity", *HEADS), "values with |e| > 1, of eigenvalues"),
        _count("outside", ("quantity", *HEADS), "values outside of theory's ends, of the main edit's eigenvalue"),
        _count("above", ("quantity", "margin", *HEADS), "values above a margin, of sizes"),
        _count("sum_high", ("quantity", *HEADS), "sum of the values in steps of 2⁻²⁰"),
        _count("sum_low", ("quantity", *HEADS), "what that leaves, in steps of 2⁻⁵²"),
        Variable("minimum", ("quantity", *HEADS), "float64", "1", "smallest value, infinite if there is none"),
        Variable("maximum", ("quantity", *HEADS), "float64", "1", "largest value, minus infinite if there is none"),
        Variable("first_nonfinite", ("quantity", "layer"), "int64", "1", "packed token · heads + head of the first such value"),
        _count("counts", ("quantity", "layer", "bin"), "values in each bin"),
        Variable("bin_edges", ("quantity", "edge"), "float64", "1", "ends of the bins"),
        Variable("lambda", HEADS, "float64", "1", "strength of the direction d"),
        Variable("low", HEADS, "float64", "1", "lower end of e in theory"),
        Variable("high", HEADS, "float64", "1", "upper end of e in theory"),
        _count("violations", ("claim", *HEADS), "violations with the keys as used"),
        _count("real_violations", ("claim", *HEADS), "those that are there with renormalised keys too"),
        Variable("rounding", ("claim",), "float64", "1", "largest violation that renormalising removes, minus infinite if none"),
        _count("prompt_violations", ("claim", "prompt"), "real violations of each prompt"),
        _count("prompt_tokens", ("prompt",), "tokens that were tallied"),
        _count("prompt_length", ("prompt",), "tokens that there are"),
        Variable(
            "worst_excess", WORST, "float64", "1", "by how much the bound is passed, with either key; NaN where no more are"
        ),
        Variable("worst_value", WORST, "float64", "1", "the value as used"),
        Variable("worst_unit", WORST, "float64", "1", "the value with the key renormalised"),
        *(Variable(f"worst_{name}", WORST, "int64", "1", name) for name in ("prompt", "position", "layer", "head", "edit")),
        Variable("worst_token_id", WORST, "int64", "1", "token id"),
        Variable("worst_token_text", WORST, "str", "1", "text of the token"),
        *(Variable(f"sample_{name}", ("sample",), "int64", "1", f"{name} of the sample") for name in ("layer", "token", "head")),
        Variable("step_norm", ("sample",), "float64", "1", "norm of the whole step, less 1", "‖M_tD_t‖₂ − 1"),
        Variable("step_norm_base", ("sample",), "float64", "1", "the same without the added direction"),
        Variable("step_radius", ("sample",), "float64", "1", "spectral radius of the whole step", "max |eig(M_tD_t)|"),
        Variable("step_radius_base", ("sample",), "float64", "1", "the same without the added direction"),
    )
}
LABELS = ("quantity", "margin", "layer", "claim")


def make_eigen(columns: Mapping[str, object], coords: Mapping[str, object], attrs: Mapping[str, object]) -> xr.Dataset:
    """A labelled tally from its arrays, the labels of ``LABELS`` and what ran; raises StoreError as ``check_eigen`` does."""
    ds = whole.table(VARIABLES, columns, coords, {"schema": schema.EIGEN, "schema_version": VERSION, **attrs})
    check_eigen(ds)
    return ds


def check_eigen(ds: xr.Dataset, where: str | Path = "eigenvalues") -> None:
    """Refuse a Dataset that has not every variable of ``VARIABLES`` along its dims, or a label missing."""
    missing = [name for name, row in VARIABLES.items() if name not in ds or {*ds[name].dims} != {*row.dims}]
    missing += [name for name in LABELS if name not in ds.coords]
    if missing:
        raise StoreError(f"{where}: expected the variables of tallied eigenvalues, found no {', '.join(missing)}")


def save_eigen(ds: xr.Dataset, path: str | Path, *, overwrite: bool = False) -> None:
    """Keep a tally as a zarr store, which appears at ``path`` whole.

    Raises StoreError, and leaves what is there as it was, if this is no tally, if something is at ``path`` already (with
    ``overwrite``: something that is no store of eigenvalues), if another process writes there, or if the disk does not allow it.
    """
    check_eigen(ds)
    ds = whole.retyped(ds, "U", object)
    whole.put(path, lambda aside: whole.write_group(ds, aside), schema=schema.EIGEN, overwrite=overwrite)


def open_eigen(path: str | Path) -> xr.Dataset:
    """Load a tally; raises StoreError for anything else, for a damaged store and for one of a newer qed-probe."""
    ds = whole.load(Path(path), schema=schema.EIGEN, version=VERSION)
    check_eigen(ds, path)
    return whole.retyped(ds, "OT", str)
