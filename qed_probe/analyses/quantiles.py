"""Exact quantiles of a record in memory that does not grow with the store: its float32 bits, read digit by digit as integers."""

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Step, finite, fold

DIGITS = (11, 11, 10)
"""How many of the 32 bits each pass over the store settles."""


def layer_quantiles(ds: xr.Dataset, name: str, levels: Sequence[float]) -> tuple[Array, dict[str, Array]]:
    """The quantiles ``[layer, level]`` of a record's finite values over tokens and heads, float64, NaN where a layer has none.

    Linear between the two values nearest to (n − 1)·level in order, as numpy's default; values count as the float32 that a
    store keeps. One pass over the store for each of three digits. Also returns what ``fold`` found, with ``n(layer)``, how many
    values are finite.
    """
    left = 32 - DIGITS[0]
    folded = fold(ds, [name], _counting(name, np.zeros((ds.sizes["layer"], 1), np.int64), left, DIGITS[0]))
    n = folded["counts"].sum((1, 2))
    at = np.maximum(n[:, None] - 1, 0) * np.asarray(levels, np.float64)
    rank = np.concatenate([np.floor(at), np.ceil(at)], 1).astype(np.int64)
    key, rank = _settle(folded["counts"], np.zeros_like(rank), rank)
    for bits in DIGITS[1:]:
        left -= bits
        key, rank = _settle(fold(ds, [name], _counting(name, key, left, bits))["counts"], key, rank)
    low, high = np.split(from_keys(key).astype(np.float64), 2, axis=1)
    found = np.where(n[:, None] > 0, low + (high - low) * (at - np.floor(at)), np.nan)
    return found, folded | {"n": n}


def digit_counts(x: Array, prefix: Array, left: int, bits: int) -> Array:
    """How often each digit comes, ``[rank, digit]``, among the keys of finite values that begin alike.

    The digit is the ``bits`` bits above the lowest ``left``; all above them are ``prefix`` ``[rank]``.
    """
    keys = to_keys(x) >> np.uint32(left)
    each, where = np.unique(prefix, return_inverse=True)
    alike = (keys[keys >> np.uint32(bits) == start] for start in each) if left + bits < 32 else [keys]
    return np.stack([np.bincount(some & np.uint32((1 << bits) - 1), minlength=1 << bits) for some in alike])[where]


def to_keys(x: Array) -> Array:
    """The bits of float32 values as uint32 integers that are ordered as the values are; −0 comes before 0."""
    bits = np.asarray(x, np.float32).view(np.int32)
    keys: Array = (bits ^ (bits >> 31 | np.int32(-(1 << 31)))).view(np.uint32)
    return keys


def from_keys(keys: Array) -> Array:
    """The float32 values of ``to_keys``."""
    bits = keys.astype(np.uint32).view(np.int32)
    values: Array = (bits ^ (~bits >> 31 | np.int32(-(1 << 31)))).view(np.float32)
    return values


def _counting(name: str, prefix: Array, left: int, bits: int) -> Callable[[int], Step]:
    return lambda layer: lambda _, records: {"counts": digit_counts(finite(records[name])[0], prefix[layer], left, bits)}


def _settle(counts: Array, key: Array, rank: Array) -> tuple[Array, Array]:
    """The keys ``[layer, rank]`` with one more digit, and the ranks that are left among those that share it."""
    below = np.concatenate([np.zeros_like(counts[..., :1]), counts.cumsum(-1)], -1)
    below = np.broadcast_to(below, (*rank.shape, below.shape[-1]))
    digit = (below[..., 1:] <= rank[..., None]).sum(-1)
    passed = np.take_along_axis(below, digit[..., None], -1)[..., 0]
    return key * counts.shape[-1] + digit, rank - passed
