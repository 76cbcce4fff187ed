"""Accuracy by length, depth and strength from outcomes made by hand: every count is known beforehand."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from qed_probe.analyses import accuracy, by_depth, strengths, usable_length
from qed_probe.errors import InputError, StoreError
from qed_probe.store.outcomes import make_outcomes
from tests.hand_made import join, run


def shares(*right: int, of: int = 4, lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)) -> xr.Dataset:
    """One run that answers so many of ``of`` samples right at each length."""
    return run("qed", 0, {n: [1] * k + [0] * (of - k) for n, k in zip(lengths, right, strict=False)})


def row(ds: xr.Dataset, arm: str) -> xr.Dataset:
    return ds.isel(run=int(np.flatnonzero(ds["arm"].values == arm)[0]))


def test_accuracy_counts_right_answers() -> None:
    ds = accuracy(join(run("qed", 0, {1024: [1, 1, 0], 512: [1]}), run("gdn2", 3, {512: [0, 0]})))
    assert ds["length"].values.tolist() == [512, 1024]
    qed, gdn2 = row(ds, "qed"), row(ds, "gdn2")
    assert (qed["correct"].values.tolist(), qed["samples"].values.tolist()) == ([1, 2], [1, 3])
    np.testing.assert_allclose(qed["accuracy"], [1, 2 / 3])
    interval = stats.binomtest(2, 3).proportion_ci(0.95, "exact")
    np.testing.assert_allclose((qed["low"][1], qed["high"][1]), (interval.low, interval.high))
    assert (float(qed["high"][0]), float(gdn2["accuracy"][0]), float(gdn2["low"][0])) == (1, 0, 0)
    assert (int(gdn2["samples"][1]), np.isnan(gdn2["accuracy"][1].item()), np.isnan(gdn2["low"][1].item())) == (0, True, True)
    assert (qed["model"].item(), qed["seed"].item(), gdn2["seed"].item(), gdn2["task"].item()) == ("qed-seed0", 0, 3, "niah")
    assert ds.attrs["trained_length"] == 512


def test_the_training_length_is_told_where_it_is_one() -> None:
    both = join(run("qed", 0, {512: [1]}), run("gdn2", 0, {512: [1]}, trained_length=1024))
    assert accuracy(both).attrs["trained_length"] == 0


def test_accuracy_is_that_of_strength_one() -> None:
    swept = join(*(run("qed", 0, {512: [s == 1, 1]}, strength=s) for s in (0.0, 1.0, 2.0)))
    assert accuracy(swept)["samples"].values.tolist() == [[2]]
    assert accuracy(swept)["correct"].values.tolist() == [[2]]
    with pytest.raises(StoreError, match="expected outcomes at strength 1, found others alone"):
        accuracy(run("qed", 0, {512: [1]}, strength=0.5))


def test_several_tasks_are_several_runs() -> None:
    ds = accuracy(join(run("qed", 0, {512: [1, 0]}), run("qed", 0, {0: [1, 1, 1]}, task="fda", trained_length=0)))
    assert ds["task"].values.tolist() == ["fda", "niah"]
    assert ds["samples"].values.tolist() == [[3, 0], [0, 2]]


def test_a_lambda_max_is_another_arm_and_unknown_seeds_are_told_apart_by_the_model() -> None:
    bounds = (0.25, 0.5, 1.0, 0.1 + 0.2, 0.3)
    ds = accuracy(join(*(run("qed", 0, {512: [1]}, lambda_max=most) for most in bounds)))
    assert {*ds["arm"].values} == {"qed", "qed-max0.5", "qed-max1", "qed-max0.30000000000000004", "qed-max0.3"}
    unknown = accuracy(join(*(run("gdn2", -1, {512: [k]}, model=f"model{k}") for k in (0, 1))))
    assert unknown["accuracy"].values.tolist() == [[0], [1]]
    with pytest.raises(StoreError, match="one run of each arm, seed and task, found a and b, both gdn2 seed 2 on niah"):
        accuracy(join(*(run("gdn2", 2, {512: [1]}, model=name) for name in "ab")))


def test_losses_alone_have_no_accuracy() -> None:
    losses = make_outcomes(
        {"model": "m", "arm": "qed", "task": "tokens", "length": 9, "index": [0], "fingerprint": 1, "loss": 2.0}
    )
    for analysis in (accuracy, by_depth, strengths):
        with pytest.raises(StoreError, match="expected outcomes with answers, found losses alone"):
            analysis(losses)


@pytest.mark.parametrize(
    ("right", "usable", "censored"),
    [
        ((4, 4, 4, 4, 4, 4), 16384, 1),
        ((4, 4, 4, 2, 0, 0), 4096, 0),
        ((4, 4, 4, 1, 0, 0), 2048 * 2 ** (2 / 3), 0),
        ((4, 4, 1, 4, 4, 4), 1024 * 2 ** (2 / 3), 0),
        ((4, 2, 1, 0, 0, 0), 1024, 0),
        ((1, 4, 4, 4, 4, 4), np.nan, -1),
        ((0, 0, 0, 0, 0, 0), np.nan, -1),
        ((2, 2, 2, 2, 2, 2), 16384, 1),
        ((3,), 512, 1),
        ((1,), np.nan, -1),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_usable_length_is_where_the_level_is_first_lost(right: tuple[int, ...], usable: float, censored: int) -> None:
    found = usable_length(accuracy(shares(*right)), (0.5,))
    np.testing.assert_allclose(found["usable"].values, [[usable]])
    assert found["censored"].values.tolist() == [[censored]]


def test_usable_length_leaves_out_what_was_not_asked() -> None:
    both = join(shares(4, 4, 0), run("gdn2", 1, {512: [1], 2048: [0]}), run("gdn2", 1, {0: [1]}, task="fda"))
    found = usable_length(accuracy(both), (0.5,))
    usable = dict(zip(zip(found["arm"].values, found["task"].values, strict=True), found["usable"].values[:, 0], strict=True))
    np.testing.assert_allclose((usable["qed", "niah"], usable["gdn2", "niah"]), (1024 * 2**0.5, 1024))
    assert np.isnan(usable["gdn2", "fda"])
    assert 0 in found["censored"].values[found["task"].values == "fda"]


@pytest.mark.parametrize("levels", [(), (0.0,), (1.5,), (np.nan,), (90,)])
def test_levels_are_shares(levels: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="levels: expected shares from 0 to 1"):
        usable_length(accuracy(shares(4)), levels)


def test_by_depth_puts_each_sample_into_the_bin_that_holds_it() -> None:
    depth = np.array([0, 0.2499, 0.25, 0.74, 0.75, 1, np.nan])
    ds = by_depth(run("qed", 0, {512: [1, 0, 1, 0, 1, 1, 1]}, depth=depth), 4)
    assert ds["samples"].values.tolist() == [[[2, 1, 1, 2]]]
    assert ds["correct"].values.tolist() == [[[1, 1, 0, 2]]]
    assert ds["bin_start"].values.tolist() == [0, 0.25, 0.5, 0.75]
    many = by_depth(run("qed", 0, {512: [1], 1024: [0]}, depth=0.29), 100)
    assert many["samples"].sel(length=512).values[0].nonzero()[0].tolist() == [29]
    assert np.isnan(many["accuracy"].values).sum() == 198
    with pytest.raises(StoreError, match="whose depth is known, found none"):
        by_depth(shares(4))
    with pytest.raises(InputError, match="bins: expected at least 1, found 0"):
        by_depth(shares(4), 0)


RIGHT = {
    0.0: [1, 0, 0, 0, 0, 1, 0, 0],
    1.0: [1, 1, 1, 1, 1, 0, 0, 0],
    2.0: [1, 1, 1, 1, 1, 1, 1, 0],
}


def sweep(seed: int = 0, lengths: Sequence[int] = (512,), arm: str = "qed") -> xr.Dataset:
    return join(*(run(arm, seed, dict.fromkeys(lengths, right), strength=s) for s, right in RIGHT.items()))


def test_strengths_count_the_pairs() -> None:
    ds = strengths(sweep())
    assert ds["strength"].values.tolist() == [0, 1, 2]
    assert ds["correct"].values.tolist() == [[[2, 5, 7]]]
    assert ds["gained"].values.tolist() == [[[1, 0, 2]]]
    assert ds["lost"].values.tolist() == [[[4, 0, 0]]]
    p = [stats.binomtest(1, 5).pvalue, stats.binomtest(0, 2).pvalue]
    np.testing.assert_allclose(ds["p"].values, [[[p[0], np.nan, p[1]]]])
    np.testing.assert_allclose(ds["p_holm"].values, [[[min(2 * min(p), 1), np.nan, max(2 * min(p), *p)]]])


def test_page_looks_for_answers_that_get_better_with_s() -> None:
    ds = strengths(sweep())
    # Of the orders that a row with one or two right answers of three may have, L is exact over all rows.
    orders = [
        [np.dot(stats.rankdata(order), [1, 2, 3]) for order in set(permutations(row))]
        for row in zip(*RIGHT.values(), strict=True)
    ]
    mean, variance = sum(map(np.mean, orders)), sum(map(np.var, orders))
    L = sum(np.dot(stats.rankdata(row), [1, 2, 3]) for row in zip(*RIGHT.values(), strict=True))
    np.testing.assert_allclose(ds["page_z"], [[(L - mean) / variance**0.5]])
    np.testing.assert_allclose(ds["page_p"], stats.norm.sf(ds["page_z"]))
    falling = join(*(run("qed", 0, {512: right}, strength=2 - s) for s, right in RIGHT.items()))
    np.testing.assert_allclose(strengths(falling)["page_z"], -ds["page_z"])


def test_runs_may_have_been_asked_other_lengths_and_strengths() -> None:
    longer = join(*(run("qed", 1, {1024: right}, strength=s) for s, right in RIGHT.items() if s))
    other = join(sweep(), longer, run("gdn2", 0, {512: [1, 0]}), run("kda", -1, {512: [1]}))
    ds = strengths(other)
    assert ds["seed"].values.tolist() == [0, 1]
    xr.testing.assert_equal(ds.isel(run=[0]).sel(length=[512]), strengths(sweep()))
    second = ds.isel(run=1)
    assert second["samples"].values.tolist() == [[0, 0, 0], [0, 8, 8]]
    assert np.isnan(second["p"].values).tolist() == [[True] * 3, [True, True, False]]
    assert np.isnan(second["page_p"].values).tolist() == [True, False]


def test_sweeps_of_other_samples_or_without_the_usual_strength_are_refused() -> None:
    with pytest.raises(StoreError, match="expected outcomes at strength 1 and others, found 1 alone"):
        strengths(shares(4))
    with pytest.raises(StoreError, match=r"qed seed 0 at strength 1 too, found 0, 2"):
        strengths(sweep().isel(sample=sweep()["strength"].values != 1))
    with pytest.raises(StoreError, match=r"length 512, sample 7 .*are not in at strength 2"):
        strengths(sweep().isel(sample=slice(-1)))
    ds = sweep()
    ds["fingerprint"][3] += 1
    with pytest.raises(StoreError, match="found others at length 512, first sample 3"):
        strengths(ds)
