"""Distributions of the records: the erase eigenvalue, ρ = qᵀk, and ρ against the size of what d reads."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, finite, fold, label_folded, mean
from qed_probe.analyses.bounds import eigenvalue_bounds
from qed_probe.analyses.inputs import other_edits
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
    folded = fold(
        ds, names, lambda layer: lambda _, records: eigenvalue_counts(list(records.values()), edges, low[layer], high[layer])
    )
    values = {name: folded[name].swapaxes(0, 1) for name in EIGENVALUES if name in folded}
    values |= {name: folded[f"{name}_{name[:3]}"].swapaxes(0, 1) for name in ("minimum", "maximum")}
    values |= {"low": low, "high": high, "edges": edges}
    return label_folded(ds, names, folded, values, EIGENVALUES, {"record": names}, gate_max=gate_max)


def _other_edits(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """The eigenvalues of the edits beside the main one, by a name for each edit."""
    if "edit_eigenvalue" not in ds:
        return {}
    found = other_edits(MIXERS[ds.attrs["mixer"]], ds.sizes["edit"])
    return {name: ds["edit_eigenvalue"].isel(edit=m) for name, m in found.items()}


def eigenvalue_counts(records: list[Array], edges: Array, low: float, high: float) -> dict[str, Array]:
    """What ``eigenvalues`` counts of one block of a layer, by record ``[token, head]``; ``low`` and ``high`` are theory's."""
    rows = [_counts_of_record(finite(e)[0], edges, low, high) for e in records]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _counts_of_record(e: Array, edges: Array, low: float, high: float) -> dict[str, Array]:
    smallest, largest = e.min(initial=np.inf), e.max(initial=-np.inf)

    def outside(low: float, high: float) -> Array:
        inside = low <= smallest and largest <= high
        return np.array(0 if inside else np.count_nonzero((e < np.float64(low)) | (e > np.float64(high))))

    binned = np.where(e == 1, np.nextafter(e.dtype.type(1), e.dtype.type(0)), e) if largest >= 1 else e
    counts = histogram(binned, edges)[1:-1]
    return {
        "counts": counts,
        "n": np.array(e.size),
        "below_zero": outside(0, np.inf),
        "above_one": outside(-np.inf, 1),
        "beyond_one": outside(-1, 1),
        "outside_theory": outside(low, high),
        "outside_bins": e.size - counts.sum(),
        "minimum_min": smallest,
        "maximum_max": largest,
    }


def rho(ds: xr.Dataset) -> xr.Dataset:
    """Histogram of ρ = qᵀk for each layer, 100 bins over [−1, 1], or over the widest |ρ| where q and k are not unit vectors.

    Needs ``rho``; returns ``counts(layer, bin)``, the mean and how many are negative. Raises StoreError if it is not there.
    """
    edges, folded = _fold_rho(ds, 1)
    if (widest := float(folded["size_max"].max())) > 1:
        edges, folded = _fold_rho(ds, widest)
    values = {name: folded[name] for name in ("counts", "n", "negative")} | {"edges": edges}
    values["mean"] = mean(folded["total"], folded["n"])
    return label_folded(ds, ["rho"], folded, values, RHO, {})


def _fold_rho(ds: xr.Dataset, span: float) -> tuple[Array, dict[str, Array]]:
    edges = np.linspace(-span, span, 101)
    return edges, fold(ds, ["rho"], lambda _: lambda _, records: rho_counts(finite(records["rho"])[0], edges))


def rho_counts(x: Array, edges: Array) -> dict[str, Array]:
    """What ``rho`` counts of the finite values of one block of a layer."""
    counts = histogram(x, edges)
    counts[-2] += counts[-1]  # the last bin has its upper edge too
    return {
        "counts": counts[1:-1],
        "n": np.array(x.size),
        "negative": np.array(np.count_nonzero(x < 0)),
        "total": x.sum(dtype=np.float64),
        "size_max": _size(x),
    }


def rho_read(ds: xr.Dataset) -> xr.Dataset:
    """Joint histogram of ρ and ‖S̄ᵀd‖ for each layer: their product, times λ, is the correction's size.

    Needs ``rho`` and ``read_norm``; returns ``counts(layer, bin, read_bin)``, even bins of ρ by logarithmic bins of ‖S̄ᵀd‖ over at
    most six decades below the largest; reads of zero, among them at first tokens of prompts, and those below the bins are counted
    apart. Raises StoreError if a record is not there.
    """
    names = ["rho", "read_norm"]
    ends = fold(ds, names, lambda _: lambda _, records: _ends(*finite(records["rho"]), *finite(records["read_norm"])))
    top = float(ends["read_max"].max()) or 1.0
    bottom = max(min(float(ends["read_min"].min()), top / 10), top * 10.0**-DECADES)
    span = max(float(ends["size_max"].max()), 1)
    edges, read_edges = np.linspace(-span, span, SQUARES + 1), np.geomspace(bottom, top, SQUARES + 1)
    first = ds["position"].values == 0

    def step(tokens: Array, records: dict[str, Array]) -> dict[str, Array]:
        x, read = records["rho"], records["read_norm"]
        at = np.flatnonzero(first[tokens])
        zero_first = np.count_nonzero((read[at] == 0) & np.isfinite(x[at]))
        x, read = finite(x, read)
        return joint_counts(x, read, edges, read_edges) | {"zero_first": np.array(zero_first)}

    folded = fold(ds, names, lambda _: step)
    values = {name: folded[name] for name in JOINT if name in folded} | {"edges": edges, "read_edges": read_edges}
    return label_folded(ds, names, folded, values, JOINT, {})


def _ends(x: Array, read: Array) -> dict[str, Array]:
    """The largest |x|, and the ends of the positive ``read``."""
    smallest = read.min(initial=np.inf)
    positive = smallest if smallest > 0 else read[read > 0].min(initial=np.inf)
    return {"size_max": _size(x), "read_min": positive, "read_max": read.max(initial=0)}


def _size(x: Array) -> Array:
    return np.asarray(np.maximum(x.max(initial=0), -x.min(initial=0)))


def joint_counts(x: Array, read: Array, edges: Array, read_edges: Array) -> dict[str, Array]:
    """What ``rho_read`` counts of the pairs of finite values of one block of a layer."""
    bottom = read.dtype.type(read_edges[0])
    row = np.clip(_places(x, edges), 1, SQUARES)
    column = np.clip(_places(np.log2(np.maximum(read, bottom)), np.log2(read_edges)), 1, SQUARES)
    cell = (np.floor(row) * SQUARES + np.floor(column)).astype(np.intp) - (SQUARES + 1)
    counts = np.bincount(cell, minlength=SQUARES * SQUARES)
    low = read < bottom
    counts -= np.bincount(cell[low], minlength=SQUARES * SQUARES)
    zero = np.count_nonzero(read == 0)
    return {
        "counts": counts.reshape(SQUARES, SQUARES),
        "n": np.array(x.size),
        "zero": np.array(zero),
        "below": np.array(np.count_nonzero(low) - zero),
    }


def histogram(x: Array, edges: Array) -> Array:
    """Counts of finite values below evenly wide bins, in each of them and above them, ``[1 + bins + 1]``; an edge is above.

    Edges hold to the rounding of float32: a value nearer to one than that may be counted on its other side.
    """
    last = len(edges)
    return np.bincount(np.clip(_places(x, edges), 0, last).astype(np.intp), minlength=last + 1)


@np.errstate(over="ignore")
def _places(x: Array, edges: Array) -> Array:
    """Where values lie among even bins, as numbers whose whole part is 1 in the first of them."""
    scale = (len(edges) - 1) / (edges[-1] - edges[0])
    places: Array = x * x.dtype.type(scale)
    places += x.dtype.type(1 - edges[0] * scale)
    return places
