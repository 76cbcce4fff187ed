"""Intervals and tests over counts, seeds and paired outcomes: arrays in, arrays out."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from qed_probe.analyses.blocks import Array, mean
from qed_probe.errors import InputError

LEVEL = 0.95
POWER = 0.8
FAR = 1e6
"""As many standard deviations are as good as more."""
DRAWS = 2000
BATCH = 1 << 23
"""How often a bootstrap resamples, and how many weights of its draws are in memory at a time."""


class Page(NamedTuple):
    """Page's L, what it is in standard deviations from its mean, and the one-sided p for an increasing order."""

    L: float
    z: float
    p: float


class Interval(NamedTuple):
    """A mean and the ends of its interval, in the unit of the values."""

    mean: float
    low: float
    high: float


def binomial_interval(successes: ArrayLike, trials: ArrayLike, level: float = LEVEL) -> tuple[Array, Array]:
    """The exact interval of a share, from k successes in n trials; both of any shape, broadcast.

    With α = 1 − level, the ends are the quantiles α/2 of Beta(k, n − k + 1), 0 where k = 0, and 1 − α/2 of Beta(k + 1, n − k), 1
    where k = n; so (0, 1) where n = 0. Returns (low, high), float64 shares. Raises InputError for counts that are not whole
    numbers with 0 ≤ k ≤ n, and for a level outside (0, 1). Source: Clopper and Pearson, Biometrika 26 (1934).
    """
    _check_level(level)
    k, n = np.broadcast_arrays(_counts("successes", successes), _counts("trials", trials))
    if (k > n).any():
        raise InputError(f"expected no more successes than trials, found {int(k[k > n][0])} of {int(n[k > n][0])}")
    tail = (1 - level) / 2
    low = np.where(k == 0, 0.0, stats.beta.ppf(tail, np.maximum(k, 1), n - k + 1))
    high = np.where(k == n, 1.0, stats.beta.isf(tail, k + 1, np.maximum(n - k, 1)))
    return low, high


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean of independent values ``[n]``, one a seed, and Student's interval of it.

    x̄ ± t·s/√n, with s of n − 1 degrees of freedom and t the quantile (1 + level)/2 of Student's distribution of as many. Raises
    InputError for fewer than two values, for one that is not finite, and for a level outside (0, 1).
    """
    _check_level(level)
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.size < 2:
        raise InputError(f"expected two values or more along one axis, found shape {x.shape}")
    if not np.isfinite(x).all():
        at = int((~np.isfinite(x)).argmax())
        raise InputError(f"expected finite values, found {x[at]} at {at}")
    middle = float(x.mean())
    half = float(stats.t.ppf((1 + level) / 2, x.size - 1) * stats.sem(x))
    return Interval(middle, middle - half, middle + half)


def seeds_needed(deviation: ArrayLike, difference: float, level: float = LEVEL, power: float = POWER) -> NDArray[np.int64]:
    """How many seeds would tell: the fewest with which Student's test finds a mean ``difference`` that is there.

    The least n ≥ 2 with P(T > t) ≥ power, where t is the quantile (1 + level)/2 of Student's distribution of n − 1 degrees of
    freedom and T has the noncentral one, of noncentrality √n·difference/deviation. ``deviation``, of any shape, is the standard
    deviation between seeds in the units of ``difference``; 0 where it is NaN. Raises InputError for a level or a power outside
    (0, 1), a negative deviation and a difference that is not more than 0.
    """
    _check_level(level)
    if not 0 < power < 1:
        raise InputError(f"power: expected a share between 0 and 1, found {power}")
    if not difference > 0:
        raise InputError(f"difference: expected more than 0, found {difference}")
    s = np.asarray(deviation, np.float64)
    if (s < 0).any():
        raise InputError(f"deviation: expected at least 0, found {s[s < 0].flat[0]}")
    found = [_seeds_needed(float(one), difference, level, power) for one in s.flat]
    return np.array(found, np.int64).reshape(s.shape)


def _seeds_needed(deviation: float, difference: float, level: float, power: float) -> int:
    """By doubling, then by halving: power rises with n."""
    if np.isnan(deviation):
        return 0

    def enough(n: int) -> bool:
        shift = np.sqrt(n) * difference / max(deviation, difference / FAR)
        return bool(stats.nct.sf(stats.t.ppf((1 + level) / 2, n - 1), n - 1, shift) >= power)

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def bootstrap_interval(
    sums: ArrayLike, counts: ArrayLike, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> tuple[Array, Array]:
    """The percentile interval of means over values that come in independent units, from each unit's sum and count.

    ``sums`` and ``counts`` are ``[unit, ...]``; units are drawn with replacement, as many as there are, for all cells together;
    a draw's mean is Σ sums / Σ counts, and the ends are the quantiles (1 ∓ level)/2 of the draws. Returns (low, high) ``[...]``,
    NaN where fewer than two units have a value; a draw that has none in a cell does not count there. With few units (say, below
    ten) such an interval is too narrow. Raises InputError for a level outside (0, 1).
    Source: Efron, Annals of Statistics 7 (1979).
    """
    _check_level(level)
    total, n = np.broadcast_arrays(np.asarray(sums, np.float64), np.asarray(counts, np.float64))
    units, shape = len(total), total.shape[1:]
    total, n = total.reshape(units, -1), n.reshape(units, -1)
    enough = (n > 0).sum(0) >= 2
    ends = np.full((2, enough.size), np.nan)
    if enough.any():
        rng, step = np.random.default_rng(seed), max(1, BATCH // units)
        sizes = [min(step, draws - start) for start in range(0, draws, step)]
        weights = (rng.multinomial(units, np.full(units, 1 / units), size).astype(np.float64) for size in sizes)
        means = np.concatenate([mean(w @ total[:, enough], w @ n[:, enough]) for w in weights])
        ends[:, enough] = np.nanquantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ends[0].reshape(shape), ends[1].reshape(shape)


def mcnemar(gained: ArrayLike, lost: ArrayLike) -> Array:
    """The exact two-sided p of paired right-or-wrong outcomes, from the pairs gained and lost; both of any shape, broadcast.

    p = min(1, 2 P(X ≤ min(b, c))) with X ~ Binomial(b + c, ½): pairs that agree do not count, and p = 1 where none disagrees.
    Raises InputError for counts that are not whole numbers from 0. Source: McNemar, Psychometrika 12 (1947).
    """
    b, c = np.broadcast_arrays(_counts("gained", gained), _counts("lost", lost))
    return np.asarray(np.minimum(1.0, 2 * stats.binom.cdf(np.minimum(b, c), b + c, 0.5)))


def holm(p: ArrayLike) -> Array:
    """The p values of any shape, adjusted for being one family; NaN stays NaN and does not count.

    Of m in increasing order, p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎). Raises InputError for a value outside [0, 1].
    Source: Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    found = np.array(p, dtype=np.float64)
    known = ~np.isnan(found)
    family = found[known]
    outside = family[(family < 0) | (family > 1)]
    if outside.size:
        raise InputError(f"expected p values from 0 to 1, found {outside[0]}")
    order = np.argsort(family)
    stepped = np.minimum(1.0, family[order] * np.arange(family.size, 0, -1))
    family[order] = np.maximum.accumulate(stepped)
    found[known] = family
    return found


def page(outcomes: ArrayLike) -> Page:
    """Whether paired outcomes ``[n, k]`` increase along k, the order that was expected before they were seen.

    L = Σ_i Σ_j j r_ij with mid-ranks r in each row. Where all orders within a row are equally likely, its mean is n k (k + 1)²/4
    and its variance Σ_i Σ_j (j − j̄)² Σ_j (r_ij − r̄_i)² / (k − 1), exact with ties too; z = (L − mean)/√variance and p = P(Z ≥ z)
    for a normal Z. Where every row is tied throughout, z = 0 and p = 1. Raises InputError for outcomes without rows or with fewer
    than two columns, and for NaN. Source: Page, Journal of the American Statistical Association 58 (1963).
    """
    x = np.asarray(outcomes, dtype=np.float64)
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] < 2:
        raise InputError(f"expected outcomes [n, k] with n ≥ 1 and k ≥ 2, found shape {x.shape}")
    if np.isnan(x).any():
        row, column = np.argwhere(np.isnan(x))[0]
        raise InputError(f"expected an outcome in every cell, found NaN in row {row}, column {column}")
    n, k = x.shape
    middle = (k + 1) / 2
    ranks, order = stats.rankdata(x, axis=1), np.arange(1, k + 1)
    L = float((ranks @ order).sum())
    variance = ((order - middle) ** 2).sum() * ((ranks - middle) ** 2).sum() / (k - 1)
    if variance == 0:
        return Page(L, 0.0, 1.0)
    z = float((L - n * k * middle**2) / np.sqrt(variance))
    return Page(L, z, float(stats.norm.sf(z)))


def _counts(name: str, x: ArrayLike) -> Array:
    """Whole numbers from 0, as int64."""
    found = np.asarray(x)
    whole = np.isfinite(found) & (found >= 0) & (found == np.floor(found))
    if not whole.all():
        raise InputError(f"{name}: expected whole numbers from 0, found {found[~whole].flat[0]}")
    return found.astype(np.int64)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError(f"level: expected a share between 0 and 1, found {level}")
