"""Intervals and tests against scipy and statsmodels, pair by pair; Page's with ties against all orders within the rows."""

from itertools import permutations, product

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

from qed_probe.analyses.statistics import binomial_interval, holm, mcnemar, mean_interval, page, seeds_needed
from qed_probe.errors import InputError

RNG = np.random.default_rng(20260813)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_binomial_intervals_are_scipys_and_statsmodels(level: float) -> None:
    trials = RNG.integers(1, 2000, 60)
    successes = RNG.binomial(trials, RNG.uniform(0, 1, 60))
    cases = [(0, 1), (1, 1), (0, 500), (500, 500), (1, 500), (499, 500), *zip(successes, trials, strict=True)]
    low, high = binomial_interval([k for k, _ in cases], [n for _, n in cases], level)
    for i, (k, n) in enumerate(cases):
        scipys = stats.binomtest(int(k), int(n)).proportion_ci(level, "exact")
        statsmodels = proportion_confint(int(k), int(n), 1 - level, "beta")
        np.testing.assert_allclose((low[i], high[i]), (scipys.low, scipys.high), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose((low[i], high[i]), statsmodels, rtol=1e-9, atol=1e-12)


def test_shares_of_none_and_of_all_have_one_sided_ends() -> None:
    low, high = binomial_interval([[0, 500], [0, 7]], [[500, 500], [0, 7]])
    np.testing.assert_array_equal(low == 0, [[True, False], [True, False]])
    np.testing.assert_array_equal(high == 1, [[False, True], [True, True]])
    assert high[0, 0] == pytest.approx(1 - 0.025 ** (1 / 500))
    assert low[0, 1] == pytest.approx(0.025 ** (1 / 500))
    assert (low[1, 0], high[1, 0]) == (0, 1)
    assert float(binomial_interval(250, 500)[0]) == pytest.approx(0.4553, abs=1e-4)


@pytest.mark.parametrize(
    ("successes", "trials", "level", "message"),
    [
        (3, 2, 0.95, "no more successes than trials, found 3 of 2"),
        (-1, 2, 0.95, "successes: expected whole numbers from 0, found -1"),
        (0.5, 2, 0.95, "successes: expected whole numbers from 0, found 0.5"),
        (1, np.nan, 0.95, "trials: expected whole numbers from 0, found nan"),
        (1, 2, 95, "level: expected a share between 0 and 1, found 95"),
    ],
)
def test_counts_that_are_none_are_refused(successes: float, trials: float, level: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        binomial_interval(successes, trials, level)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 40])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_mean_intervals_are_statsmodels(n: int, level: float) -> None:
    for _ in range(20):
        x = RNG.normal(3, 20, n)
        found = mean_interval(x, level)
        np.testing.assert_allclose(found[1:], DescrStatsW(x).tconfint_mean(1 - level), rtol=1e-9)
        assert found.mean == pytest.approx(x.mean())


def test_seeds_that_agree_have_an_interval_of_no_width() -> None:
    assert mean_interval([2.5, 2.5, 2.5]) == (2.5, 2.5, 2.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"found shape \(0,\)"),
        ([1], r"found shape \(1,\)"),
        ([[1, 2]], r"found shape \(1, 2\)"),
        ([1, np.nan, 2], "found nan at 1"),
    ],
)
def test_too_few_seeds_have_no_interval(values: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mean_interval(values)


@pytest.mark.parametrize(("level", "power"), [(0.95, 0.8), (0.9, 0.95)])
def test_seeds_needed_are_statsmodels(level: float, power: float) -> None:
    deviations = np.array([[2.0, 7.5], [23.0, 64.0]])
    found = seeds_needed(deviations, 10, level, power)
    for n, deviation in zip(found.flat, deviations.flat, strict=True):
        powers = [TTestPower().power(10 / deviation, m, 1 - level) for m in (n, n - 1) if m > 1]
        assert powers[0] >= power
        assert all(less < power for less in powers[1:])


def test_seeds_that_agree_tell_at_once_and_unknown_ones_never() -> None:
    assert seeds_needed([0, 1e-300, 1e-3, np.nan], 10).tolist() == [2, 2, 2, 0]


@pytest.mark.parametrize(
    ("deviation", "difference", "power", "message"),
    [(1.0, 0.0, 0.8, "difference: .*found 0"), (-1.0, 1.0, 0.8, "deviation: .*found -1"), (1.0, 1.0, 1.0, "power: .*found 1")],
)
def test_questions_without_a_number_of_seeds_are_refused(deviation: float, difference: float, power: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        seeds_needed(deviation, difference, power=power)


def test_mcnemar_is_statsmodels_and_the_binomial_test() -> None:
    cases = [(0, 0), (0, 1), (1, 1), (0, 40), (7, 7), *RNG.integers(0, 60, (200, 2)), *RNG.integers(0, 500, (50, 2))]
    found = mcnemar([b for b, _ in cases], [c for _, c in cases])
    for p, (b, c) in zip(found, cases, strict=True):
        table = [[17, int(b)], [int(c), 4]]
        assert p == pytest.approx(statsmodels_mcnemar(table, exact=True).pvalue, rel=1e-9)
        if b + c:
            assert p == pytest.approx(stats.binomtest(int(b), int(b + c)).pvalue, rel=1e-9)
    assert float(mcnemar(0, 0)) == 1
    assert mcnemar([[3], [4]], [0, 1, 2]).shape == (2, 3)
    with pytest.raises(InputError, match="lost: expected whole numbers from 0, found -2"):
        mcnemar(3, -2)


@pytest.mark.parametrize("n", [1, 2, 5, 36])
def test_holm_is_statsmodels(n: int) -> None:
    for _ in range(50):
        p = np.round(RNG.uniform(0, 1, n) ** 3, 2)  # some equal
        np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1], rtol=1e-12)


def test_holm_keeps_the_shape_and_leaves_nan_out() -> None:
    p = np.array([[0.01, np.nan, 0.04], [np.nan, 0.03, 0.2]])
    np.testing.assert_allclose(holm(p), [[0.04, np.nan, 0.09], [np.nan, 0.09, 0.2]])
    assert p[0, 0] == 0.01
    assert np.isnan(holm(np.nan))
    assert holm([]).size == 0
    with pytest.raises(InputError, match=r"p values from 0 to 1, found 1\.5"):
        holm([0.1, 1.5])


@pytest.mark.parametrize("shape", [(2, 3), (4, 3), (10, 6), (500, 5)])
def test_pages_test_is_scipys_without_ties(shape: tuple[int, int]) -> None:
    for trend in (0, 0.3, -0.3):
        x = RNG.normal(size=shape) + trend * np.arange(shape[1])
        found, scipys = page(x), stats.page_trend_test(x, method="asymptotic")
        assert scipys.statistic == found.L
        assert found.p == pytest.approx(scipys.pvalue, rel=1e-9)


@pytest.mark.parametrize(
    "rows",
    [[[0, 1]], [[0, 0, 1], [1, 0, 1]], [[0, 0, 0], [0, 1, 1]], [[1, 2, 2, 1], [0, 0, 0, 1]], [[3, 1, 1], [2, 2, 5], [0, 1, 0]]],
)
def test_pages_mean_and_variance_are_those_over_all_orders(rows: list[list[int]]) -> None:
    found = page(rows)
    orders = [[page([order]).L for order in permutations(row)] for row in rows]
    every = np.array([sum(parts) for parts in product(*orders)])
    assert found.z == pytest.approx((found.L - every.mean()) / every.std())
    assert found.p == pytest.approx(stats.norm.sf(found.z))
    assert page([row[::-1] for row in rows]).z == pytest.approx(-found.z)


def test_paged_pairs_that_agree_say_nothing() -> None:
    assert page(np.ones((5, 4))) == (5 * 4 * 25 / 4, 0, 1)
    with_ties = np.vstack([np.ones((90, 4)), np.tile([0, 0, 1, 1], (10, 1))])
    assert page(with_ties).z == pytest.approx(page(with_ties[90:]).z)


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([1, 2], r"found shape \(2,\)"),
        ([[1]], r"found shape \(1, 1\)"),
        (np.ones((0, 3)), r"found shape \(0, 3\)"),
        ([[0, 1], [1, np.nan]], "found NaN in row 1, column 1"),
    ],
)
def test_outcomes_without_an_order_are_refused(outcomes: list[list[float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        page(outcomes)
