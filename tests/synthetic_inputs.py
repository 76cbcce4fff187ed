"""The ``inputs`` of a made-up trace, consistent with its mixer: vectors at random, gates in their range."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from qed_probe.kernels import MIXERS
from qed_probe.store import schema

Vectors = NDArray[np.float64]


def synthetic_inputs(ds: xr.Dataset, K: int = 8, inputs: Mapping[str, ArrayLike] | None = None, seed: int = 0) -> xr.Dataset:
    """What a trace keeps for the tokens of ``ds`` of its inputs, but o and v: at random, or ``inputs`` where given.

    A given input is broadcast to its variable's shape; with an address, ``k`` holds ε and then the key.
    """
    rng = np.random.default_rng(seed)
    row = MIXERS[ds.attrs["mixer"]]
    shape = tuple(ds.sizes[dim] for dim in ("layer", "token", "head"))
    edits = 2 if row.address else 1
    q, k = _unit(rng.normal(size=(*shape, K))), _unit(rng.normal(size=(*shape, edits, K)))
    found: dict[str, Vectors] = {"q": q, "k": k, "g": -rng.gamma(1, 0.1, (*shape, K))}
    if row.gate == "channel":
        found |= {"b": rng.uniform(size=(*shape, K)), "w": rng.uniform(size=(*shape, K))}
    if row.gate == "scalar":
        found["beta"] = rng.uniform(size=shape)
    if row.address:
        found["gamma"] = rng.uniform(size=shape)
    if row.recorded_direction:
        gated = found["b"] * q if "b" in found else q
        key = k[..., -1, :]
        found["d"] = gated - key * (gated * key).sum(-1, keepdims=True)
    found |= {"a": 0.5 * k + 0.1 * rng.normal(size=k.shape), "u": rng.normal(size=(*k.shape[:-1], K))}
    found |= {name: np.broadcast_to(np.asarray(x, np.float64), found[name].shape) for name, x in (inputs or {}).items()}
    rows = {name: schema.VARIABLES[f"inputs/{name}"] for name in found}
    variables = {name: (rows[name].dims, np.array(x, np.float32)) for name, x in found.items()}
    return xr.Dataset(variables, coords=ds.coords, attrs=ds.attrs)


def _unit(x: Vectors) -> Vectors:
    unit: Vectors = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return unit
