"""Datasets as the analyses of outcomes return them, made up: accuracy falls with length, by arm and seed."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.stats import beta

ARMS = ("gdn2", "qed", "qed-nogate", "qed-nogate-noproj", "qed-rand", "qed-noproj")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
RUN = ("model", "arm", "seed", "lambda_max", "task")


def interval(k: NDArray[np.int64], n: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Clopper and Pearson's, ends at 0 and 1 included; NaN of nothing."""
    low = np.where(k == 0, 0.0, beta.ppf(0.025, np.maximum(k, 1), n - k + 1))
    high = np.where(k == n, 1.0, beta.ppf(0.975, k + 1, np.maximum(n - k, 1)))
    return np.where(n == 0, np.nan, low), np.where(n == 0, np.nan, high)


def runs(arms: Sequence[str], seeds: int, task: str = "niah") -> dict[str, tuple[str, list[object]]]:
    """The coordinates of a run an arm and seed."""
    pairs = [(arm, seed) for arm in arms for seed in range(seeds)]
    bounds = [np.nan if arm.startswith(("gdn2", "kda")) else 0.25 for arm, _ in pairs]
    values: tuple[list[object], ...] = (
        [f"{arm}-s{seed}" for arm, seed in pairs], [arm for arm, _ in pairs], [seed for _, seed in pairs],
        [*bounds], [task] * len(pairs),
    )  # fmt: skip
    return {name: ("run", value) for name, value in zip(RUN, values, strict=True)}


def counts(correct: NDArray[np.int64], samples: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Accuracy and its interval from counts; NaN of nothing."""
    low, high = interval(correct, samples)
    share = np.divide(correct, samples, out=np.full(correct.shape, np.nan), where=samples > 0)
    return {"correct": correct, "samples": samples, "accuracy": share, "low": low, "high": high}


def accuracy(arms: Sequence[str] = ARMS[:2], seeds: int = 2, lengths: Sequence[int] = LENGTHS, samples: int = 500) -> xr.Dataset:
    """As ``analyses.accuracy`` returns it."""
    rng = np.random.default_rng(0)
    place = rng.normal(12.6, 0.7, (len(arms) * seeds, 1))
    p = 1 / (1 + np.exp(2.2 * (np.log2(np.maximum(lengths, 1)) - place)))
    n = np.full(p.shape, samples)
    values = counts(rng.binomial(n, p), n)
    coords = {**runs(arms, seeds), "length": list(lengths)}
    return xr.Dataset({name: (("run", "length"), x) for name, x in values.items()}, coords, {"trained_length": 512})


def contrast(panels: int = 5, seeds: int = 6, lengths: Sequence[int] = LENGTHS) -> xr.Dataset:
    """As ``analyses.contrast`` returns it: the first panel has all seeds, the others four at most."""
    pairs = [(1, 0), (1, 4), (1, 2), (2, 3), (1, 5)][:panels]
    ds = accuracy(ARMS, seeds, lengths)
    share = 100 * ds["accuracy"].values.reshape(len(ARMS), seeds, len(lengths))
    difference = np.stack([share[first] - share[second] for first, second in pairs])
    difference[1:, 4:] = np.nan
    there = np.isfinite(difference).sum(1)
    enough = there >= 4
    mean, half = np.full(there.shape, np.nan), np.full(there.shape, np.nan)
    mean[enough] = np.nanmean(difference, 1)[enough]
    half[enough] = (2.6 * np.nanstd(difference, 1, ddof=1) / np.sqrt(there))[enough] if seeds > 1 else np.nan
    values = {"mean": mean, "low": mean - half, "high": mean + half, "seeds": there}
    return xr.Dataset(
        {"difference": (("panel", "seed", "length"), difference)} | {k: (("panel", "length"), x) for k, x in values.items()},
        {"panel": [f"{ARMS[a]} − {ARMS[b]}" for a, b in pairs], "seed": list(range(seeds)), "length": list(lengths)},
        {"trained_length": 512},
    )


def published() -> xr.Dataset:
    """QED's Figure 2 as far as the notes give its numbers."""
    nan = np.nan
    difference = [
        [[0, 1, 6.2, 27.2, 18, 6.4], [0, 4, 16.8, 33.6, 38.6, 24.2]],
        [[nan, nan, nan, 25.6, nan, nan], [nan, nan, nan, 2.2, 12.8, nan]],
        [[nan, nan, nan, 40.4, nan, nan], [nan, nan, nan, -3.4, nan, nan]],
        [[nan, nan, nan, -39.8, nan, nan], [nan, nan, nan, 70.4, nan, nan]],
        [[nan] * 6] * 2,
    ]
    pairs = ["qed − gdn2", "qed − qed-rand", "qed − qed-nogate", "qed-nogate − qed-nogate-noproj", "qed − qed-noproj"]
    coords = {"panel": pairs, "seed": [0, 1], "length": [1024 << i for i in range(6)]}
    attrs = {"trained_length": 2048, "published": 1, "source": "QED, arXiv 2608.13668v1", "place": "Table 3", "page": "7"}
    return xr.Dataset({"difference": (("panel", "seed", "length"), np.array(difference, float))}, coords, attrs)


def strengths(seeds: int = 2, lengths: Sequence[int] = LENGTHS) -> xr.Dataset:
    """As ``analyses.strengths`` returns it: odd seeds answer to the strength, even ones do not."""
    rng = np.random.default_rng(1)
    s = np.array([-1, 0, 0.5, 1, 1.5, 2])
    base = 13.5 + rng.normal(0, 0.4, (seeds, 1, 1)) + 0.4 * (np.arange(seeds) % 2)[:, None, None] * s
    p = 1 / (1 + np.exp(1.8 * (np.log2(lengths)[:, None] - base)))
    n = np.full(p.shape, 500)
    values = counts(rng.binomial(n, p), n)
    dims = ("run", "length", "strength")
    holm = np.where(np.abs(values["accuracy"] - values["accuracy"][..., 3:4]) > 0.06, 0.004, 0.7)
    holm[..., 3] = np.nan
    page = np.where((np.arange(seeds) % 2)[:, None] > 0, 1e-6, 0.31) * np.ones((seeds, len(lengths)))
    variables = {name: (dims, x) for name, x in values.items()} | {"p_holm": (dims, holm)}
    coords = {**runs(["qed"], seeds), "length": list(lengths), "strength": s}
    return xr.Dataset(variables | {"page_p": (("run", "length"), page)}, coords, {"trained_length": 512})


def by_depth(arms: Sequence[str] = ARMS[:2], seeds: int = 2, lengths: Sequence[int] = LENGTHS, bins: int = 10) -> xr.Dataset:
    """As ``analyses.by_depth`` returns it, with some cells empty."""
    rng = np.random.default_rng(2)
    edges = np.linspace(0, 1, bins + 1)
    p = 1 / (1 + np.exp(1.8 * (np.log2(lengths)[:, None] - 12.5 - 3 * edges[1:])))
    shape = (len(arms) * seeds, len(lengths), bins)
    samples = rng.integers(35, 65, shape)
    samples[:, 0, ::4] = 0
    values = counts(rng.binomial(samples, p), samples)
    coords = {
        **runs(arms, seeds), "length": list(lengths), "bin": list(range(bins)), "bin_start": ("bin", edges[:-1]),
        "bin_end": ("bin", edges[1:]),
    }  # fmt: skip
    kept = {name: (("run", "length", "bin"), values[name]) for name in ("accuracy", "samples")}
    return xr.Dataset(kept, coords, {"trained_length": 512})


def recall(arms: Sequence[str] = ARMS[:5], seeds: int = 2) -> xr.Dataset:
    """As ``analyses.accuracy`` returns it of two tasks without a length."""
    rng = np.random.default_rng(3)
    parts = []
    for task, p in (("fda", 0.06), ("squad_completion", 0.3)):
        n = np.full((len(arms) * seeds, 1), 1102)
        values = counts(rng.binomial(n, p), n)
        coords = {**runs(arms, seeds, task), "length": [0]}
        parts.append(xr.Dataset({name: (("run", "length"), x) for name, x in values.items()}, coords))
    return xr.concat(parts, "run")


def training(layers: int = 2, heads: int = 4, steps: int = 50) -> xr.Dataset:
    """λ of each layer and head over training."""
    rng = np.random.default_rng(4)
    theta = -2 + np.cumsum(rng.normal(0.02, 0.08, (steps, layers, heads)), 0)
    dims = ("step", "layer", "head")
    coords = {"step": np.arange(steps) * 50, "layer": list(range(layers)), "head": list(range(heads))}
    attrs = {"lambda_max": 0.25, "lambda_init": 0.25 / (1 + np.exp(2)), "subject": "qed, seed 0"}
    return xr.Dataset({"lambda": (dims, 0.25 / (1 + np.exp(-theta)))}, coords, attrs)
