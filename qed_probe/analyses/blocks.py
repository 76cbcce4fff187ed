"""How every analysis walks a store: block by block of tokens, so that memory does not grow with the number of tokens."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe.errors import StoreError

Array = NDArray[Any]
Analysis = Callable[[xr.Dataset], xr.Dataset]
Field = tuple[tuple[str, ...], str, str]  # dims, units, long name

BLOCK = 4096
NOWHERE = np.iinfo(np.int64).max
NONFINITE: dict[str, Field] = {
    "nonfinite": (("source", "layer"), "count", "values that are NaN or infinite"),
    "first_nonfinite": (("source", "place"), "index", "where the first of them is, by token; −1 if there is none"),
}


def complete_tokens(ds: xr.Dataset) -> NDArray[np.bool_]:
    """Which tokens an unfinished store has in full, ``[token]``; every analysis leaves the others out and counts them."""
    if "complete" in ds.coords:
        return np.asarray(ds["complete"].values, dtype=np.bool_)
    return np.ones(ds.sizes["token"], dtype=np.bool_)


def blocks(ds: xr.Dataset, names: Sequence[str]) -> Iterator[tuple[Array, dict[str, Array]]]:
    """The packed indices of the complete tokens and these records ``[layer, token, head]``, BLOCK tokens at a time."""
    missing = [name for name in names if name not in ds]
    if missing:
        raise StoreError(f"expected the records {', '.join(names)}, found a store without {', '.join(missing)}")
    complete = complete_tokens(ds)
    if not complete.any():
        raise StoreError(f"expected at least one complete token, found {complete.size} tokens and none complete")
    for start in range(0, complete.size, BLOCK):
        keep = complete[start : start + BLOCK]
        if keep.any():
            part = ds[list(names)].isel(token=slice(start, start + BLOCK)).transpose("layer", "token", "head").compute()
            yield start + np.flatnonzero(keep), {name: part[name].values[:, keep] for name in names}


def fold(ds: xr.Dataset, names: Sequence[str], step: Callable[[dict[str, Array]], dict[str, Array]]) -> dict[str, Array]:
    """Apply ``step`` to each block of records and join what it returns: names in _min or _max by that, all others by sum.

    The count and the place of the non-finite values of each record come along as ``nonfinite`` and ``first_min``.
    """
    return fold_tokens(ds, names, lambda _, records: step(records))


def fold_tokens(
    ds: xr.Dataset, names: Sequence[str], step: Callable[[Array, dict[str, Array]], dict[str, Array]]
) -> dict[str, Array]:
    """``fold`` with a ``step`` that is also told the packed indices of the block's tokens."""
    total: dict[str, Array] = {}
    for tokens, records in blocks(ds, names):
        for name, value in (step(tokens, records) | _nonfinite(tokens, records)).items():
            total[name] = join(name)(total[name], value) if name in total else value
    return total


def mean(total: Array, n: Array) -> Array:
    """What sums and counts give, NaN where nothing was counted."""
    found: Array = np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)
    return found


def join(name: str) -> np.ufunc:
    """How two blocks' values of this name become one."""
    return {"min": np.minimum, "max": np.maximum}.get(name.rpartition("_")[2], np.add)


def _nonfinite(tokens: Array, records: Mapping[str, Array]) -> dict[str, Array]:
    """How many values of each record and layer are not finite, and the smallest (token, layer, head) among them as one number."""
    counts, first = [], []
    for x in records.values():
        bad = ~np.isfinite(x)
        if not bad.any():
            counts.append(np.zeros(len(x), np.int64))
            first.append(NOWHERE)
            continue
        counts.append(bad.sum((1, 2)))
        layer, token, head = bad.nonzero()
        place = (tokens[token] * x.shape[0] + layer) * x.shape[2] + head
        first.append(place.min(initial=NOWHERE))
    return {"nonfinite": np.stack(counts), "first_min": np.array(first)}


def label(
    ds: xr.Dataset, values: Mapping[str, Array], fields: Mapping[str, Field], coords: Mapping[str, Any], **attrs: object
) -> xr.Dataset:
    """The one place where arrays become a Dataset: dims, units, names, the store's own labels, and the count of tokens used."""
    complete = complete_tokens(ds)
    known: dict[Hashable, Any] = {name: ds[name].values for name in ("layer", "head") if name in ds.coords}
    dims = {dim for name in values for dim in fields[name][0]}
    labels = {name: value for name, value in (known | dict(coords)).items() if name in dims}
    described = {}
    for name, value in values.items():
        axes, units, long_name = fields[name]
        described[name] = (axes, value, {"units": units, "long_name": long_name})
    counts = {"tokens": int(complete.sum()), "tokens_incomplete": int((~complete).sum())}
    return xr.Dataset(
        described, coords=labels, attrs={"mixer": ds.attrs.get("mixer", "unknown"), "subject": _subject(ds), **counts, **attrs}
    )


def _subject(ds: xr.Dataset) -> str:
    """What ran: the mixer, its strength where that was changed, and whether d is only what would be added."""
    strength = float(ds.attrs.get("strength", 1))
    parts = [f"Mixer {ds.attrs.get('mixer', 'unknown')}"] + [f"strength {strength:g}"] * (strength != 1)
    idle = "read_norm" in ds and "lambda" in ds and not ds["lambda"].values.any()
    return ", ".join(parts) + " (λ = 0: d is what would be added)" * idle


def label_folded(
    ds: xr.Dataset,
    names: Sequence[str],
    folded: Mapping[str, Array],
    values: Mapping[str, Array],
    fields: Mapping[str, Field],
    coords: Mapping[str, Any],
    **attrs: object,
) -> xr.Dataset:
    """``label`` for what ``fold`` found over these records, with the places of the non-finite values written out."""
    layers, heads = ds.sizes["layer"], ds.sizes["head"]
    first = folded["first_min"]
    token, rest = np.divmod(first, layers * heads)
    layer, head = np.divmod(rest, heads)
    found = first < NOWHERE
    places = np.stack([np.where(found, x, -1) for x in (ds["layer"].values[layer], token, head)], -1)
    bad = {"nonfinite": folded["nonfinite"], "first_nonfinite": places}
    labels = {"source": list(names), "place": ["layer", "token", "head"], **coords}
    return label(ds, {**values, **bad}, {**fields, **NONFINITE}, labels, **attrs)
