"""Where two runs over the same tokens part."""

from collections.abc import Iterator

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import BLOCK, NOWHERE, Array, Field, complete_tokens, label
from qed_probe.errors import InputError, StoreError

TOLERANCE = 1e-3
BINS = 64
UNSTEADY = "correction_cosine"
"""Between vectors that may nearly vanish: it can differ by as much as 2 where nothing is wrong."""
FIELDS: dict[str, Field] = {
    "scale": (("record", "layer"), "1", "largest size in the first run"),
    "largest": (("record", "layer"), "1", "largest difference, as a fraction of the scale"),
    "largest_at": (("record", "layer", "place"), "index", "where that is"),
    "first_at": (("record", "layer", "place"), "index", "the first token beyond the tolerance, −1 if there is none"),
    "beyond": (("record", "layer"), "count", "values beyond the tolerance"),
    "compared": ((), "count", "tokens and heads of a layer that were compared"),
    "by_position": (("layer", "bin"), "1", "largest difference of any record but correction_cosine, by position in the prompt"),
    "bin_start": (("bin",), "token", "first position of the bin"),
}


def difference(first: xr.Dataset, second: xr.Dataset, tolerance: float = TOLERANCE) -> xr.Dataset:
    """How far two runs over the same tokens differ, record by record and layer by layer.

    The difference of a value is |x₁ − x₂| / s, with s the largest |x₁| of its record and layer (1 where that is 0); of a vector
    it is its largest component's. What is not finite differs infinitely from all but its like. Records, layers and complete
    tokens that both runs have are compared. Raises StoreError if the tokens are not the same or nothing can be compared,
    InputError for a tolerance that is no number from 0.
    """
    if not (np.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"tolerance: expected a number from 0, found {tolerance}")
    first, second, names = _common(first, second)
    together = complete_tokens(first) & complete_tokens(second)
    if not together.any():
        raise StoreError(f"expected a token that is complete in both runs, found none of {together.size}")
    position = np.asarray(first["position"].values)
    width = int(position.max()) // BINS + 1
    bins = int(position.max()) // width + 1
    L = first.sizes["layer"]
    values: dict[str, list[Array]] = {name: [] for name in ("scale", "largest", "largest_at", "first_at", "beyond")}
    by_position = np.zeros((L, bins))
    for name in names:
        scale = _scale(first, name, together)
        steady = by_position if name != UNSTEADY else np.zeros_like(by_position)
        found = _part(first, second, name, together, scale, tolerance, position // width, steady)
        for key, x in ({"scale": scale} | found).items():
            values[key].append(x)
    whole: dict[str, Array] = {key: np.stack(x) for key, x in values.items()}
    whole |= {"by_position": by_position, "bin_start": np.arange(bins) * width}
    whole["compared"] = np.array(int(together.sum()) * first.sizes["head"])
    labels = {"record": names, "place": ["token", "head"]}
    return label(first.assign_coords(complete=("token", together)), names, whole, FIELDS, labels, tolerance=tolerance)


def check_same_tokens(first: xr.Dataset, second: xr.Dataset) -> None:
    """Raise StoreError, with the first place, where two runs are not over the same prompts, token by token.

    A token that an unfinished run has not generated yet is −1, and may be any.
    """
    for name in ("token_id", "cu_seqlens"):
        x, y = (np.asarray(ds[name].values) for ds in (first, second))
        if x.shape != y.shape:
            raise StoreError(f"expected runs over the same tokens, found {name} of {x.size:,} and {y.size:,} entries")
        differ = (x != y) & (x >= 0) & (y >= 0)
        if differ.any():
            raise StoreError(f"expected runs over the same tokens, found {name} to differ first at {int(differ.argmax())}")


def _common(first: xr.Dataset, second: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset, list[str]]:
    """Both runs with the layers that they share, and the records that they share."""
    check_same_tokens(first, second)
    layers = [layer for layer in first["layer"].values if layer in second["layer"].values]
    names = [str(name) for name, x in first.data_vars.items() if {"layer", "token", "head"} <= set(x.dims) and name in second]
    if not layers or not names:
        raise StoreError("expected runs with a record and a layer in common, found none")
    first, second = first.sel(layer=layers), second.sel(layer=layers)
    for name in names:
        if first[name].sizes != second[name].sizes:
            raise StoreError(f"expected {name} of one shape, found {dict(first[name].sizes)} and {dict(second[name].sizes)}")
    return first, second, names


def _pieces(ds: xr.Dataset, name: str, together: Array) -> Iterator[tuple[slice, Array, Array]]:
    """Layers, packed indices of tokens and float64 values ``[layer, token, head, component]``, of a size that memory holds."""
    x = ds[name].transpose("layer", "token", "head", ...)
    whole = x.ndim == 3
    for layers in [slice(0, x.sizes["layer"])] if whole else [slice(i, i + 1) for i in range(x.sizes["layer"])]:
        for start in range(0, together.size, BLOCK):
            keep = together[start : start + BLOCK]
            part = x.isel(layer=layers, token=slice(start, start + BLOCK)).values[:, keep].astype(np.float64)
            yield layers, start + np.flatnonzero(keep), part.reshape(*part.shape[:3], -1)


def _scale(ds: xr.Dataset, name: str, together: Array) -> Array:
    """The largest finite size of a record, ``[layer]``."""
    scale = np.zeros(ds.sizes["layer"])
    for layers, _, x in _pieces(ds, name, together):
        size = np.where(np.isfinite(x), np.abs(x), 0).max((1, 2, 3), initial=0)
        scale[layers] = np.maximum(scale[layers], size)
    return scale


def _part(
    first: xr.Dataset,
    second: xr.Dataset,
    name: str,
    together: Array,
    scale: Array,
    tolerance: float,
    bins: Array,
    by_position: Array,
) -> dict[str, Array]:
    """What ``difference`` says of one record; ``by_position`` ``[layer, bin]`` takes its largest differences."""
    L, heads = first.sizes["layer"], first.sizes["head"]
    largest, beyond = np.zeros(L), np.zeros(L, np.int64)
    largest_at, first_at = np.zeros(L, np.int64), np.full(L, NOWHERE)
    for (layers, tokens, x), (_, _, y) in zip(_pieces(first, name, together), _pieces(second, name, together), strict=True):
        unit = np.where(scale[layers] > 0, scale[layers], 1)[:, None, None]
        off = _apart(x, y).max(-1, initial=0) / unit
        for i, layer in enumerate(range(L)[layers]):
            token, head = np.unravel_index(off[i].argmax(), off[i].shape)
            if off[i, token, head] > largest[layer]:
                largest[layer], largest_at[layer] = off[i, token, head], tokens[token] * heads + head
            wrong = np.argwhere(off[i] > tolerance)
            beyond[layer] += len(wrong)
            if len(wrong):
                first_at[layer] = min(first_at[layer], tokens[wrong[0, 0]] * heads + wrong[0, 1])
            np.maximum.at(by_position[layer], bins[tokens], off[i].max(-1))
    nowhere = first_at == NOWHERE
    places = {"largest_at": np.where(largest > 0, largest_at, -1), "first_at": np.where(nowhere, -1, first_at)}
    split = {key: np.where(x[:, None] < 0, -1, np.stack(np.divmod(x, heads), -1)) for key, x in places.items()}
    return {"largest": largest, "beyond": beyond} | split


def _apart(x: Array, y: Array) -> Array:
    """|x − y|, 0 for two NaN and two equal infinities, ∞ where one of both is not finite."""
    with np.errstate(invalid="ignore"):
        off = np.abs(x - y)
    alike = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(alike, 0.0, np.where(np.isfinite(off), off, np.inf))
