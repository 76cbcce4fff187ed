"""Where the erase address, the added direction and the query lie to the key, against what chance alone would give."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, lgamma, log, pi

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, Step, complete_tokens, label_folded, mean
from qed_probe.analyses.correction import fine_counts, quantile
from qed_probe.analyses.inputs import check_inputs, fold_inputs, main_edit
from qed_probe.kernels import MIXERS

INPUTS = ("q", "k")
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.999)
PROMPTS, PER_PROMPT = 32, 16
"""Of how many prompts, and how many tokens of each, the empirical null takes keys and queries."""
GOLDEN = 0x9E3779B9  # 2³² over the golden ratio

FIELDS: dict[str, Field] = {
    "mean": (("measure", "layer"), "1", "mean over tokens and heads"),
    "quantile": (("measure", "layer", "level"), "1", "quantiles over tokens and heads"),
    "maximum": (("measure", "layer"), "1", "largest value"),
    "n": (("measure", "layer"), "count", "token-heads"),
    "undefined": (("measure", "layer"), "count", "token-heads with a vector that is 0, whose cosine is none"),
    "null_mean": (("measure", "layer"), "1", "mean with the key (or query) of a token of another prompt"),
    "null_quantile": (("measure", "layer", "level"), "1", "quantiles with the key (or query) of a token of another prompt"),
    "null_maximum": (("measure", "layer"), "1", "largest value with such a partner"),
    "null_n": (("measure", "layer"), "count", "token-heads with such a partner"),
    "isotropic": (("measure",), "1", "mean of |cos| of two independent directions without preference"),
    "measure_name": (("measure",), "1", "formula"),
}
FORMULAS = {
    "address_key": "|cos(ε, k)|",
    "cross_term": "γβ|εᵀk|",
    "query_key": "|cos(q, k)|",
    "direction_query": "|cos(d, q⊥)|",
}


def address_geometry(ds: xr.Dataset, inputs: xr.Dataset) -> xr.Dataset:
    """|cos(ε, k)|, γβ|εᵀk|, |cos(q, k)| and |cos(d, q⊥)| for each layer: mean, quantiles and maximum, beside two nulls.

    ``address_key`` and ``cross_term`` exist where there is an erase address ε, ``direction_query`` where there is a direction d,
    added or that QED would add; q⊥ = q − k(kᵀq). ``query_key`` is |ρ| for unit vectors. Means and maxima are exact, quantiles
    right to 0.4 %.

    The empirical null comes first: the same with k (for q⊥ the query) of a token of another prompt at the same layer and head,
    drawn from 16 tokens of each of at most 32 prompts; vectors made by SiLU are not isotropic. None with a single prompt (NaN,
    ``null_n`` 0). ``isotropic`` is Γ(K/2)/(√π Γ((K + 1)/2)), the mean of |cos| of independent directions without preference in K
    dimensions (0.0707 for 128), K − 1 for a projected d and q⊥; NaN for what is no cosine.

    Needs the inputs ``q`` and ``k``, and takes ``d``, ``gamma`` and ``beta`` or ``b``. Raises StoreError if one is not there.
    Source: EDA arXiv 2606.26560, Fig. 2c and Eq. 16.
    """
    check_inputs(ds, inputs, INPUTS)
    layout = _Layout.of(ds, inputs)
    names = [*INPUTS, *[name for name in ("d", "gamma", "beta", "b") if name in inputs]]
    tokens = _bank_tokens(ds)
    folded = fold_inputs(ds, inputs, names, lambda layer: _step(ds, inputs, layout, tokens, layer))
    n, null_n = folded["n"].T, folded["null_n"].T
    values = {"n": n, "null_n": null_n, "undefined": folded["undefined"].T}
    for name, counted in (("", n), ("null_", null_n)):
        counts = folded[f"{name}counts"].swapaxes(0, 1)
        largest = np.where(counted > 0, folded[f"{name}value_max"].T, np.nan)
        quantiles = np.stack([quantile(counts, level) for level in LEVELS], -1)
        values[f"{name}mean"] = mean(folded[f"{name}total"].T, counted)
        values[f"{name}maximum"] = largest
        values[f"{name}quantile"] = np.minimum(quantiles, largest[..., None])
    values["isotropic"] = np.array([layout.isotropic(measure) for measure in layout.measures])
    values["measure_name"] = np.array([FORMULAS[measure] for measure in layout.measures])
    coords = {"measure": list(layout.measures), "level": list(LEVELS)}
    return label_folded(ds, names, folded, values, FIELDS, coords, prompts=ds.sizes["boundary"] - 1)


def isotropic_cosine(dims: int) -> float:
    """E|cos| of two independent isotropic directions: Γ(K/2)/(√π Γ((K + 1)/2)); 1 in one dimension."""
    return exp(lgamma(dims / 2) - lgamma((dims + 1) / 2) - log(pi) / 2)


@dataclass(frozen=True)
class _Layout:
    """Which measures a mixer has, and where its edits are."""

    measures: tuple[str, ...]
    main: int
    address: int
    projected: bool
    dims: int

    @classmethod
    def of(cls, ds: xr.Dataset, inputs: xr.Dataset) -> "_Layout":
        row, edits = MIXERS[ds.attrs["mixer"]], inputs.sizes["edit"]
        main = main_edit(row, edits)
        there = {
            "address_key": row.address is not None,
            "cross_term": row.address is not None,
            "query_key": True,
            "direction_query": "d" in inputs,
        }
        projected = row.recorded_direction is not None and row.recorded_direction.projected
        return cls(tuple(name for name in FORMULAS if there[name]), main, edits - 1 - main, projected, inputs.sizes["key"])

    def isotropic(self, measure: str) -> float:
        dims = self.dims - (measure == "direction_query" and self.projected)
        return np.nan if measure == "cross_term" or not dims else isotropic_cosine(dims)

    def values(self, x: dict[str, Array], partner_k: Array, partner_q: Array) -> Iterator[Array]:
        """Each measure ``[token, head]`` with these keys and queries for the token's own, NaN where a cosine is none."""
        key = x["k"][..., self.main, :]
        for measure in self.measures:
            if measure == "query_key":
                yield _cosine(x["q"], partner_k)
            elif measure == "direction_query":
                yield _cosine(x["d"], partner_q - key * _dot(key, partner_q)[..., None])
            elif measure == "address_key":
                yield _cosine(x["k"][..., self.address, :], partner_k)
            else:
                beta = x["beta"] if "beta" in x else _dot(x["b"], key * key)
                yield x["gamma"] * beta * np.abs(_dot(x["k"][..., self.address, :], partner_k))


def _step(ds: xr.Dataset, inputs: xr.Dataset, layout: _Layout, bank: Array, layer: int) -> Step:
    """What ``address_geometry`` adds up of one layer."""
    prompts = ds["prompt_index"].values
    kept = inputs[list(INPUTS)].isel(layer=layer, token=bank).transpose("token", "head", ...).compute()
    keys, queries, owners = kept["k"].values[..., layout.main, :], kept["q"].values, prompts[bank]

    def step(tokens: Array, x: dict[str, Array]) -> dict[str, Array]:
        own = np.stack([*layout.values(x, x["k"][..., layout.main, :], x["q"])])
        finite = np.logical_and.reduce([np.isfinite(value).all(tuple(range(2, value.ndim))) for value in x.values()])
        found = _sums(own) | {"undefined": (np.isnan(own) & finite).sum((1, 2))}
        partner = _partners(tokens, prompts[tokens], owners)
        apart = partner >= 0
        other = np.full_like(own, np.nan)
        mine = {name: value[apart] for name, value in x.items()}
        other[:, apart] = np.stack([*layout.values(mine, keys[partner[apart]], queries[partner[apart]])])
        return found | {f"null_{name}": value for name, value in _sums(other).items()}

    return step


def _sums(x: Array) -> dict[str, Array]:
    good = np.isfinite(x)
    return {
        "n": good.sum((1, 2)),
        "total": np.where(good, x, 0).sum((1, 2), dtype=np.float64),
        "counts": fine_counts(x, good).sum(1),
        "value_max": np.where(good, x, -np.inf).max((1, 2), initial=-np.inf),
    }


def _bank_tokens(ds: xr.Dataset) -> Array:
    """Packed indices of the tokens whose keys and queries others are paired with, in order."""
    prompts, complete = ds["prompt_index"].values, np.flatnonzero(complete_tokens(ds))
    there = np.unique(prompts[complete])
    chosen = there[np.unique(np.linspace(0, len(there) - 1, min(len(there), PROMPTS)).astype(np.int64))]
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(complete[prompts[complete] == prompt])[:PER_PROMPT] for prompt in chosen]
    return np.sort(np.concatenate(drawn))


def _partners(tokens: Array, prompts: Array, owners: Array) -> Array:
    """A place in the bank for each token, of another prompt than its own, spread evenly; −1 where there is none.

    It depends on the token alone, so that it is the same in whatever blocks the store is read.
    """
    first, last = np.searchsorted(owners, prompts), np.searchsorted(owners, prompts, "right")
    others = len(owners) - (last - first)
    draw = ((tokens * GOLDEN & 0xFFFFFFFF) * np.maximum(others, 1)) >> 32
    return np.where(others > 0, np.where(draw < first, draw, draw + last - first), -1)


def _dot(x: Array, y: Array) -> Array:
    dot: Array = np.einsum("...k,...k->...", x, y)
    return dot


def _cosine(x: Array, y: Array) -> Array:
    size = np.sqrt(_dot(x, x) * _dot(y, y))
    cosine: Array = np.divide(np.abs(_dot(x, y)), size, out=np.full(size.shape, np.nan, size.dtype), where=size > 0)
    return cosine
