"""How long the memory keeps what was written."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, all_finite, fold, label_folded, mean, over_tokens

NAMES = ("log_decay", "log_decay_max")
FIELDS: dict[str, Field] = {
    "half_life": (("channel", "layer", "head"), "token", "half-life ln ½ / mean g"),
    "mean_log_decay": (("channel", "layer", "head"), "1/token", "mean of g over tokens"),
    "n": (("channel", "layer", "head"), "count", "tokens whose g is a number or −∞"),
    "wiped": (("channel", "layer", "head"), "count", "tokens with g = −∞, which make the mean −∞ and the half-life 0"),
}


def half_life(ds: xr.Dataset) -> xr.Dataset:
    """Half-life ln ½ / mean g in tokens, for each layer and head, of the channels' mean and of the slowest channel of each token.

    Needs ``log_decay`` and ``log_decay_max``; means over tokens are exact. No decay (mean g = 0) gives ∞; one token with g = −∞
    wipes the memory and gives 0. Raises StoreError if a record is not there.
    """
    folded = fold(ds, NAMES, lambda _: lambda _, records: decay_sums(list(records.values())))
    n, wiped, total = (folded[name].swapaxes(0, 1) for name in ("n", "wiped", "total"))
    g = mean(total, n)
    values = {"half_life": half_life_of(g), "mean_log_decay": g, "n": n, "wiped": wiped}
    return label_folded(ds, NAMES, folded, values, FIELDS, {"channel": ["mean", "slowest"]})


def decay_sums(records: list[Array]) -> dict[str, Array]:
    """What ``half_life`` adds up of each channel ``[token, head]`` of one block, ``[channel, head]``."""
    rows = []
    for g in records:
        if all_finite(g):
            rows.append((np.full(g.shape[1], len(g)), np.zeros(g.shape[1], np.int64), over_tokens(g)))
        else:
            good = ~np.isnan(g) & (g < np.inf)
            rows.append((good.sum(0), np.isneginf(g).sum(0), np.where(good, g, 0).sum(0, dtype=np.float64)))
    return dict(zip(("n", "wiped", "total"), map(np.stack, zip(*rows, strict=True)), strict=True))


def half_life_of(g: Array) -> Array:
    """The half-life ln ½ / mean g: 0 at −∞, ∞ at 0."""
    found: Array = np.divide(np.log(0.5), g, out=np.full(g.shape, np.inf), where=g != 0)
    return found
