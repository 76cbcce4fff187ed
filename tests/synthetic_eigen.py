"""The Dataset of the eigenvalue claim, counted by hand from values that a test sets."""

from collections.abc import Mapping

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from qed_probe.analyses.bounds import eigenvalue_bounds

MARGINS = np.array([1e-3, 1e-2, 1e-1])
BINS = 4096
PLACE = ("run", "quantity", "layer", "head")
SIZES = ("projection_effect", "norm_excess", "norm_excess_base")

_EVEN = np.concatenate([[-np.inf], np.linspace(-4, 4, BINS + 1)[1:-1], [np.inf]])
_OCTAVES = np.minimum(np.arange(BINS + 1) << 19, 0x7F800000).astype(np.int32).view(np.float32).astype(float)


def eigen_run(
    name: str,
    records: Mapping[str, ArrayLike],
    strength: ArrayLike = 0.0,
    mixer: str = "qed",
    gate_max: float = 1.0,
    sample: Mapping[str, ArrayLike] | None = None,
    steps: int = -1,
    seed: int = -1,
    prompts: int = 2,
) -> xr.Dataset:
    """One run from its records ``[layer, token, head]``, by quantity, at strengths ``[layer, head]``."""
    values = {quantity: np.asarray(x, np.float64) for quantity, x in records.items()}
    layers, tokens, heads = next(iter(values.values())).shape
    lam = np.broadcast_to(np.asarray(strength, float), (layers, heads))
    low, high = np.array([eigenvalue_bounds(mixer, gate_max, x) for x in lam.flat]).T.reshape(2, layers, heads)
    rows = [_counted(x, quantity, low, high) for quantity, x in values.items()]
    data = {key: ((*PLACE, "margin")[: row.ndim + 2], np.stack([r[key] for r in rows])[None]) for key, row in rows[0].items()}
    data["counts"] = (("run", "quantity", "layer", "bin"), data["counts"][1])
    data["bin_edges"] = (("quantity", "edge"), np.stack([_EVEN if q not in SIZES else _OCTAVES for q in values]))
    data |= {key: (("run", "layer", "head"), x[None]) for key, x in (("low", low), ("high", high), ("lambda", lam))}
    data |= {key: (("run",), np.array([x])) for key, x in (("prompts", prompts), ("tokens", tokens))}
    data |= {key: (("run", "sample"), np.asarray(x, float)[None]) for key, x in (sample or {}).items()}
    coords = {"quantity": list(values), "layer": np.arange(layers), "head": np.arange(heads), "margin": MARGINS, "run": [name]}
    about = {"mixer": ("run", [mixer]), "steps": ("run", [steps]), "seed": ("run", [seed])}
    return xr.Dataset(data, coords={**coords, **about})


def _counted(
    x: NDArray[np.float64], quantity: str, low: NDArray[np.float64], high: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Of one quantity what the figures take, ``[layer, head]`` but for ``counts`` and ``above``."""
    good = np.isfinite(x)
    edges, side = (_OCTAVES, "right") if quantity in SIZES else (_EVEN, "left")  # of sizes the lower end, of e the upper
    bins = [np.searchsorted(edges[1:-1], row[here], side) for row, here in zip(x, good, strict=True)]  # type: ignore[call-overload]
    counts = np.stack([np.bincount(row, minlength=BINS) for row in bins])

    def count(where: NDArray[np.bool_]) -> NDArray[np.float64]:
        return np.asarray((where & good).sum(1), float)

    return {
        "counts": counts,
        "n": good.sum(1),
        "nonfinite": (~good).sum(1),
        "below_zero": count(x < 0),
        "above_one": count(x > 1),
        "beyond_one": count(np.abs(x) > 1),
        "outside": count((x < low[:, None]) | (x > high[:, None])) * quantity.startswith("eigenvalue"),
        "above": np.stack([count(x > margin) for margin in MARGINS], -1),
        "minimum": np.where(good, x, np.inf).min(1),
        "maximum": np.where(good, x, -np.inf).max(1),
    }


def synthetic_eigen(
    layers: int = 2, heads: int = 3, tokens: int = 200, mixer: str = "qed-nogate-noproj", name: str = "made", **about: int
) -> xr.Dataset:
    """A plausible run with every quantity and a sample, random by a fixed seed."""
    rng = np.random.default_rng(layers + heads)
    lam = np.linspace(0.02, 0.2, layers * heads).reshape(layers, heads)
    e = rng.beta(2, 2, (layers, tokens, heads))
    excess, base = rng.lognormal(-4, 1, e.shape), rng.lognormal(-5, 1, e.shape)
    records = {"eigenvalue": e, "eigenvalue_unit": e + 1e-4, "norm_excess": excess, "norm_excess_base": base}
    draws = {key: rng.normal(at, 0.1, 64) for key, at in (("step_norm", 0.0), ("step_norm_base", -0.05))}
    draws |= {key: rng.uniform(0.8, top, 64) for key, top in (("step_radius", 1.02), ("step_radius_base", 1.0))}
    return eigen_run(name, records, lam, mixer, sample=draws, **about)


def join(*runs: xr.Dataset) -> xr.Dataset:
    """Several runs as one Dataset; what a run lacks is NaN."""
    joined: xr.Dataset = xr.concat(runs, "run", data_vars="minimal", coords="minimal", compat="override", join="outer")
    return joined
