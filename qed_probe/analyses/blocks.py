"""How every analysis walks a store: block by block of tokens, so that memory does not grow with the number of tokens."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import xarray as xr
from dask.base import optimize
from dask.local import get_sync
from dask.optimization import cull
from numpy.typing import NDArray

from qed_probe.errors import StoreError
from qed_probe.store.schema import ran

Array = NDArray[Any]
Analysis = Callable[[xr.Dataset], xr.Dataset]
Step = Callable[[Array, dict[str, Array]], dict[str, Array]]
Field = tuple[tuple[str, ...], str, str]  # dims, units, long name
Place = TypeVar("Place")
Read = TypeVar("Read")

BLOCK = 4096
OF_DIRECTION = frozenset({"d", "direction_norm", "read", "read_norm", "correction_norm", "correction_cosine"})
"""Records and inputs that speak of the direction d."""
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
    readers = {name: _reader(ds[name].transpose("layer", "token", "head")) for name in names}
    there = np.logical_or.reduceat(complete, np.arange(0, complete.size, BLOCK)).nonzero()[0]
    for block, records in ahead(lambda block: {name: read(block) for name, read in readers.items()}, there.tolist()):
        keep = complete[block * BLOCK : (block + 1) * BLOCK]
        kept = records if keep.all() else {name: x[:, keep] for name, x in records.items()}
        yield block * BLOCK + np.flatnonzero(keep), kept


def _reader(x: xr.DataArray) -> Callable[[int], Array]:
    """Reads a block of a record by its number."""
    if x.chunks is None:
        return lambda block: x.isel(token=slice(block * BLOCK, (block + 1) * BLOCK)).values
    # To lay out dask's graph anew for each block takes longer than to read it.
    (data,) = optimize(x.chunk({"layer": -1, "token": BLOCK, "head": -1}).data)
    graph = dict(data.dask)

    def read(block: int) -> Array:
        key = (data.name, 0, block, 0)
        found: Array = get_sync(cull(graph, [key])[0], key)
        return found

    return read


def ahead(read: Callable[[Place], Read], places: Iterable[Place]) -> Iterator[tuple[Place, Read]]:
    """Each place and what is read there, the next in a thread while one is worked on."""
    with ThreadPoolExecutor(1) as pool:
        coming = ((place, pool.submit(read, place)) for place in places)
        for now, _ in pairwise(chain(coming, [None])):
            if now is not None:
                yield now[0], now[1].result()


def fold(ds: xr.Dataset, names: Sequence[str], start: Callable[[int], Step]) -> dict[str, Array]:
    """Apply to each block of records ``[token, head]`` the step that ``start`` gives for its layer, and join what it returns.

    A layer at a time stays in the processor's cache. A step is told the packed indices of the block's tokens. Names in _min or
    _max are joined by that, all others by sum, and a new first axis is the layer. The count and the place of the non-finite
    values of each record come along as ``nonfinite`` ``[record, layer]`` and ``first_min`` ``[record]``.
    """
    layers = ds.sizes["layer"]
    steps = [start(layer) for layer in range(layers)]
    rows: list[dict[str, Array]] = [{} for _ in steps]
    for tokens, records in blocks(ds, names):
        for layer, (step, row) in enumerate(zip(steps, rows, strict=True)):
            x = {name: record[layer] for name, record in records.items()}
            add(row, step(tokens, x) | _nonfinite(tokens, x, layer, layers))
    folded = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return folded | {"nonfinite": folded["nonfinite"].T, "first_min": folded["first_min"].min(0)}


def add(total: dict[str, Array], found: Mapping[str, Array]) -> None:
    """Join what was found to the total: names in _min or _max by that, all others by sum."""
    for name, value in found.items():
        join = {"min": np.minimum, "max": np.maximum}.get(name.rpartition("_")[2], np.add)
        if name in total:
            join(total[name], value, out=total[name])
        else:
            total[name] = np.array(value)


def mean(total: Array, n: Array) -> Array:
    """What sums and counts give, NaN where nothing was counted."""
    found: Array = np.divide(total, n, out=np.full(total.shape, np.nan), where=n > 0)
    return found


def all_finite(x: Array) -> bool:
    """Whether no value is NaN or infinite, told from the sum of squares, which is quickest; False too where that overflows."""
    return bool(np.isfinite(np.vdot(x, x)))


def finite(*x: Array) -> list[Array]:
    """The values at those places where all of these are finite, flat."""
    if all(map(all_finite, x)):
        return [each.ravel() for each in x]
    good = np.logical_and.reduce([np.isfinite(each) for each in x])
    return [each[good] for each in x]


def over_tokens(x: Array) -> Array:
    """Sums over ``[token, head]`` by head, float64; a product with ones is many times as fast as a sum along the first axis."""
    return np.ones(len(x)) @ x.astype(np.float64)


def _nonfinite(tokens: Array, records: Mapping[str, Array], layer: int, layers: int) -> dict[str, Array]:
    """How many values of each record are not finite, and the smallest (token, layer, head) among them as one number."""
    counts, first = [], []
    for x in records.values():
        token, head = (np.empty(0, np.int64),) * 2 if all_finite(x) else (~np.isfinite(x)).nonzero()
        place = (tokens[token] * layers + layer) * x.shape[1] + head
        counts.append(place.size)
        first.append(place.min(initial=NOWHERE))
    return {"nonfinite": np.array(counts), "first_min": np.array(first)}


def label(
    ds: xr.Dataset,
    names: Sequence[str],
    values: Mapping[str, Array],
    fields: Mapping[str, Field],
    coords: Mapping[str, Any],
    **attrs: object,
) -> xr.Dataset:
    """The one place where arrays become a Dataset: dims, units, names, the store's own labels, and the count of tokens used.

    ``names`` are the records that the arrays are made of.
    """
    complete = complete_tokens(ds)
    known: dict[Hashable, Any] = {name: ds[name].values for name in ("layer", "head") if name in ds.coords}
    dims = {dim for name in values for dim in fields[name][0]}
    labels = {name: value for name, value in (known | dict(coords)).items() if name in dims}
    described = {}
    for name, value in values.items():
        axes, units, long_name = fields[name]
        described[name] = (axes, value, {"units": units, "long_name": long_name})
    counts = {"tokens": int(complete.sum()), "tokens_incomplete": int((~complete).sum())}
    ran = {"mixer": ds.attrs.get("mixer", "unknown"), "subject": _subject(ds, names)}
    return xr.Dataset(described, coords=labels, attrs={**ran, **counts, **attrs})


def _subject(ds: xr.Dataset, names: Sequence[str]) -> str:
    """What ran, and where d is shown whether it is only what would be added."""
    idle = "lambda" in ds and not ds["lambda"].values.any() and not OF_DIRECTION.isdisjoint(names)
    memory = "the memory has " * (ds.attrs.get("mode") == "immediate")
    return ran(ds.attrs) + f" ({memory}λ = 0: d is what would be added)" * idle


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
    return label(ds, names, {**values, **bad}, {**fields, **NONFINITE}, labels, **attrs)
