"""How long the memory keeps what was written."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, fold, label_folded, mean

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
    folded = fold(ds, NAMES, lambda records: decay_sums(np.stack(list(records.values()))))
    g = mean(folded["total"], folded["n"])
    values = {"half_life": half_life_of(g), "mean_log_decay": g, "n": folded["n"], "wiped": folded["wiped"]}
    return label_folded(ds, NAMES, folded, values, FIELDS, {"channel": ["mean", "slowest"]})


def decay_sums(g: Array) -> dict[str, Array]:
    """What ``half_life`` adds up, of one block ``[channel, layer, token, head]``."""
    good = ~np.isnan(g) & (g < np.inf)
    return {"n": good.sum(2), "wiped": np.isneginf(g).sum(2), "total": np.where(good, g, 0).sum(2, dtype=np.float64)}


def half_life_of(g: Array) -> Array:
    """The half-life ln ½ / mean g: 0 at −∞, ∞ at 0."""
    found: Array = np.divide(np.log(0.5), g, out=np.full(g.shape, np.inf), where=g != 0)
    return found
