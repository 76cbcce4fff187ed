"""Distributions of the records: the erase eigenvalue, ρ = qᵀk, and ρ against the size of what d reads."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, fold, label_folded, mean
from qed_probe.analyses.bounds import eigenvalue_bounds
from qed_probe.analyses.inputs import main_edit
from qed_probe.kernels import MIXERS

WIDTH = 0.02
MARGIN = 0.1
DECADES = 6
SQUARES = 48

EIGENVALUES: dict[str, Field] = {
    "counts": (("record", "layer", "bin"), "count", "values in each bin"),
    "n": (("record", "layer"), "count", "finite values"),
    "below_zero": (("record", "layer"), "count", "e < 0"),
    "above_one": (("record", "layer"), "count", "e > 1"),
    "beyond_one": (("record", "layer"), "count", "|e| > 1"),
    "outside_theory": (("record", "layer"), "count", "beyond the ends that theory gives"),
    "outside_bins": (("record", "layer"), "count", "finite values beyond the first or the last bin"),
    "minimum": (("record", "layer"), "1", "smallest e"),
    "maximum": (("record", "layer"), "1", "largest e"),
    "low": (("layer",), "1", "lower end of e in theory"),
    "high": (("layer",), "1", "upper end of e in theory"),
    "edges": (("edge",), "1", "eigenvalue e = 1 − aᵀk"),
}
RHO: dict[str, Field] = {
    "counts": (("layer", "bin"), "count", "values in each bin"),
    "n": (("layer",), "count", "finite values"),
    "negative": (("layer",), "count", "ρ < 0"),
    "mean": (("layer",), "1", "mean of ρ"),
    "edges": (("edge",), "1", "ρ = qᵀk"),
}
JOINT: dict[str, Field] = {
    "counts": (("layer", "bin", "read_bin"), "count", "values in each bin"),
    "n": (("layer",), "count", "pairs of finite values"),
    "zero": (("layer",), "count", "pairs with ‖S̄ᵀd‖ = 0"),
    "zero_first": (("layer",), "count", "those of them at the first token of a prompt, whose memory is empty"),
    "below": (("layer",), "count", "pairs with ‖S̄ᵀd‖ > 0 below the first bin"),
    "edges": (("edge",), "1", "ρ = qᵀk"),
    "read_edges": (("read_edge",), "1", "‖S̄ᵀd‖"),
}


def eigenvalues(ds: xr.Dataset) -> xr.Dataset:
    """Histogram of e = 1 − aᵀk for each layer, as used and with the key renormalised, beside the ends that theory gives.

    Needs ``eigenvalue``, of the main edit, and takes ``eigenvalue_unit`` and, as a record each, the other edits of
    ``edit_eigenvalue``, for which the ends do not speak. Returns ``counts(record, layer, bin)`` over bins of 0.02, among whose
    edges are 0 and 1 (1 belongs to the bin below it; where theory leaves e = 1 alone, that is a bin's middle), the counts of
    e < 0, e > 1, |e| > 1, e outside theory, and the extremes. Raises StoreError if ``eigenvalue`` is not there.
    """
    strength = np.abs(ds["lambda"].transpose("layer", "head").values).max(1) if "lambda" in ds else np.zeros(ds.sizes["layer"])
    gate_max = float(ds.attrs["gate_max"])
    low, high = np.array([eigenvalue_bounds(ds.attrs["mixer"], gate_max, float(x)) for x in strength]).T
    lowest = min(low.min(), 0) if np.isfinite(low).all() else -1
    first = np.floor((lowest - MARGIN) / WIDTH + 1e-9)
    edges = np.arange(first, np.ceil((high.max() + MARGIN) / WIDTH - 1e-9) + 1) * WIDTH
    edges += WIDTH / 2 * (low.min() == high.max())
    others = _other_edits(ds)
    ds = ds.assign(others)
    names = ["eigenvalue", *(["eigenvalue_unit"] if "eigenvalue_unit" in ds else []), *others]
    folded = fold(ds, names, lambda records: eigenvalue_counts(np.stack(list(records.values())), edges, low, high))
    values = {name: folded[f"{name}_{name[:3]}"] for name in ("minimum", "maximum")}
    values |= {name: folded[name] for name in EIGENVALUES if name in folded} | {"low": low, "high": high, "edges": edges}
    return label_folded(ds, names, folded, values, EIGENVALUES, {"record": names}, gate_max=gate_max)


def _other_edits(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """The eigenvalues of the edits beside the main one, by a name for each edit."""
    if "edit_eigenvalue" not in ds:
        return {}
    row, e, edits = MIXERS[ds.attrs["mixer"]], ds["edit_eigenvalue"], ds.sizes["edit"]
    main = main_edit(row, edits)
    return {"address edit" if row.address else f"edit {m + 1}": e.isel(edit=m) for m in range(edits) if m != main}


def eigenvalue_counts(e: Array, edges: Array, low: Array, high: Array) -> dict[str, Array]:
    """What ``eigenvalues`` counts, of one block ``[record, layer, token, head]``; ``low`` and ``high`` are ``[layer]``."""
    finite = np.isfinite(e)
    ends = low[:, None, None], high[:, None, None]
    inside = np.where(e == 1, np.nextafter(np.float32(1), np.float32(0)), e)
    counts = np.stack([histogram(x, edges) for x in inside])
    n = finite.sum((2, 3))
    return {
        "counts": counts,
        "n": n,
        "below_zero": (finite & (e < 0)).sum((2, 3)),
        "above_one": (finite & (e > 1)).sum((2, 3)),
        "beyond_one": (finite & (abs(e) > 1)).sum((2, 3)),
        "outside_theory": (finite & ((e < ends[0]) | (e > ends[1]))).sum((2, 3)),
        "outside_bins": n - counts.sum(2),
        "minimum_min": np.where(finite, e, np.inf).min((2, 3)),
        "maximum_max": np.where(finite, e, -np.inf).max((2, 3)),
    }


def rho(ds: xr.Dataset) -> xr.Dataset:
    """Histogram of ρ = qᵀk for each layer, 100 bins over [−1, 1], or over the widest |ρ| where q and k are not unit vectors.

    Needs ``rho``; returns ``counts(layer, bin)``, the mean and how many are negative. Raises StoreError if it is not there.
    """
    span = widest(ds, "rho")
    edges = np.linspace(-span, span, 101)
    folded = fold(ds, ["rho"], lambda records: rho_counts(records["rho"], edges))
    values = {name: folded[name] for name in ("counts", "n", "negative")} | {"edges": edges}
    values["mean"] = mean(folded["total"], folded["n"])
    return label_folded(ds, ["rho"], folded, values, RHO, {})


def rho_counts(x: Array, edges: Array) -> dict[str, Array]:
    """What ``rho`` counts, of one block ``[layer, token, head]``."""
    finite = np.isfinite(x)
    return {
        "counts": histogram(x, edges),
        "n": finite.sum((1, 2)),
        "negative": (finite & (x < 0)).sum((1, 2)),
        "total": np.where(finite, x, 0).sum((1, 2), dtype=np.float64),
    }


def rho_read(ds: xr.Dataset) -> xr.Dataset:
    """Joint histogram of ρ and ‖S̄ᵀd‖ for each layer: their product, times λ, is the correction's size.

    Needs ``rho`` and ``read_norm``; returns ``counts(layer, bin, read_bin)``, even bins of ρ by logarithmic bins of ‖S̄ᵀd‖ over at
    most six decades below the largest; reads of zero, among them at first tokens of prompts, and those below the bins are counted
    apart. Raises StoreError if a record is not there.
    """
    names = ["rho", "read_norm"]
    ends = fold(ds, ["read_norm"], lambda records: _positive_ends(records["read_norm"]))
    top = float(ends["ends_max"]) or 1.0
    bottom = max(min(float(ends["ends_min"]), top / 10), top * 10.0**-DECADES)
    span = widest(ds, "rho")
    edges, read_edges = np.linspace(-span, span, SQUARES + 1), np.geomspace(bottom, top, SQUARES + 1)
    folded = fold(ds, names, lambda records: joint_counts(records["rho"], records["read_norm"], edges, read_edges))
    values = {name: folded[name] for name in ("counts", "n", "zero", "below")} | {"edges": edges, "read_edges": read_edges}
    firsts = ds[names].isel(token=np.flatnonzero(ds["position"].values == 0)).transpose("layer", "token", "head")
    values["zero_first"] = ((firsts["read_norm"] == 0) & np.isfinite(firsts["rho"])).sum(("token", "head")).values
    return label_folded(ds, names, folded, values, JOINT, {})


def joint_counts(x: Array, read: Array, edges: Array, read_edges: Array) -> dict[str, Array]:
    """What ``rho_read`` counts, of one block ``[layer, token, head]``."""
    finite = np.isfinite(x) & np.isfinite(read)
    counts = [np.histogram2d(a[f], b[f].astype(float), (edges, read_edges))[0] for a, b, f in zip(x, read, finite, strict=True)]
    return {
        "counts": np.stack(counts).astype(np.int64),
        "n": finite.sum((1, 2)),
        "zero": (finite & (read == 0)).sum((1, 2)),
        "below": (finite & (read > 0) & (read < read_edges[0])).sum((1, 2)),
    }


def histogram(x: Array, edges: Array) -> Array:
    """Counts ``[layer, bin]`` of the finite values of ``x`` ``[layer, token, head]``; those beyond the edges are in no bin."""
    return np.stack([np.histogram(row[np.isfinite(row)].astype(float), edges)[0] for row in x])


def widest(ds: xr.Dataset, name: str) -> float:
    """The largest finite |x| of a record over the store, and at least 1."""
    ends = fold(ds, [name], lambda records: {"ends_max": np.abs(records[name][np.isfinite(records[name])]).max(initial=1)})
    return float(ends["ends_max"])


def _positive_ends(x: Array) -> dict[str, Array]:
    positive = x[np.isfinite(x) & (x > 0)].astype(float)
    return {"ends_min": positive.min(initial=np.inf), "ends_max": positive.max(initial=0)}
