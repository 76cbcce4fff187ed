"""Exact quantiles of a record in memory that does not grow with the store: its float32 bits, read digit by digit as integers."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, fold

DIGITS = (11, 11, 10)
"""How many of the 32 bits each pass over the store settles."""


def layer_quantiles(ds: xr.Dataset, name: str, levels: Sequence[float]) -> tuple[Array, dict[str, Array]]:
    """The quantiles ``[layer, level]`` of a record's finite values over tokens and heads, float64, NaN where a layer has none.

    Linear between the two values nearest to (n − 1)·level in order, as numpy's default; values count as the float32 that a
    store keeps. One pass over the store for each of three digits. Also returns what ``fold`` found, with ``n(layer)``, how many
    values are finite.
    """
    left = 32 - DIGITS[0]
    folded = fold(ds, [name], partial(_counts, name, np.zeros((1, 1), np.int64), left, DIGITS[0]))
    n = folded["counts"].sum((1, 2))
    at = np.maximum(n[:, None] - 1, 0) * np.asarray(levels, np.float64)
    rank = np.concatenate([np.floor(at), np.ceil(at)], 1).astype(np.int64)
    key, rank = _settle(folded["counts"], np.zeros_like(rank), rank)
    for bits in DIGITS[1:]:
        left -= bits
        key, rank = _settle(fold(ds, [name], partial(_counts, name, key, left, bits))["counts"], key, rank)
    low, high = np.split(from_keys(key).astype(np.float64), 2, axis=1)
    found = np.where(n[:, None] > 0, low + (high - low) * (at - np.floor(at)), np.nan)
    return found, folded | {"n": n}


def digit_counts(x: Array, prefix: Array, left: int, bits: int) -> Array:
    """How often each digit comes, ``[layer, rank, digit]``, among the keys of a block ``[layer, token, head]`` that begin alike.

    The digit is the ``bits`` bits above the lowest ``left``; all above them are ``prefix`` ``[layer, rank]``.
    """
    counts = []
    for row, wanted in zip(x, np.broadcast_to(prefix, (len(x), prefix.shape[1])), strict=True):
        keys = to_keys(row[np.isfinite(row)])
        begins, digits = keys >> (left + bits), keys >> left & (1 << bits) - 1
        each, where = np.unique(wanted, return_inverse=True)
        counts.append(np.stack([np.bincount(digits[begins == start], minlength=1 << bits) for start in each])[where])
    return np.stack(counts)


def to_keys(x: Array) -> Array:
    """The bits of float32 values as integers from 0 to 2³² − 1 that are ordered as the values are; −0 comes before 0."""
    bits = np.asarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + (1 << 31)


def from_keys(keys: Array) -> Array:
    """The float32 values of ``to_keys``."""
    bits = keys - (1 << 31)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int32).view(np.float32)


def _counts(name: str, prefix: Array, left: int, bits: int, records: dict[str, Array]) -> dict[str, Array]:
    return {"counts": digit_counts(records[name], prefix, left, bits)}


def _settle(counts: Array, key: Array, rank: Array) -> tuple[Array, Array]:
    """The keys ``[layer, rank]`` with one more digit, and the ranks that are left among those that share it."""
    below = np.concatenate([np.zeros_like(counts[..., :1]), counts.cumsum(-1)], -1)
    below = np.broadcast_to(below, (*rank.shape, below.shape[-1]))
    digit = (below[..., 1:] <= rank[..., None]).sum(-1)
    passed = np.take_along_axis(below, digit[..., None], -1)[..., 0]
    return key * counts.shape[-1] + digit, rank - passed
