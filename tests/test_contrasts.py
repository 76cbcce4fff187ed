"""Differences between arms from outcomes made by hand: paired by seed, and refused where there is nothing to pair."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from qed_probe.analyses import contrast
from qed_probe.cli import main
from qed_probe.errors import InputError, StoreError
from qed_probe.store.outcomes import save_outcomes
from tests.hand_made import join, run

QED = [1, 1, 1, 1, 1, 1, 0, 0, 1, 1]
GDN2 = [0, 0, 0, 0, 0, 1, 1, 0, 1, 1]
PAIR = (("qed", "gdn2"),)


def both(*seeds: int, **columns: object) -> xr.Dataset:
    """Both arms; the higher the seed, the more of QED's samples are wrong."""
    parts = [
        (run("qed", s, {512: QED, 1024: QED[s:] + [0] * s}), run("gdn2", s, {512: GDN2, 1024: GDN2}, **columns)) for s in seeds
    ]
    return join(*(part for pair in parts for part in pair))


def without(ds: xr.Dataset, **values: object) -> xr.Dataset:
    """The samples that do not have all of these values."""
    has = np.logical_and.reduce([ds[name].values == value for name, value in values.items()])
    return ds.isel(sample=~has)


def test_the_pairs_of_a_seed_are_counted() -> None:
    ds = contrast(both(0, 1), PAIR)
    assert (ds["panel"].values.tolist(), ds["seed"].values.tolist(), ds["length"].values.tolist()) == (
        ["qed − gdn2"],
        [0, 1],
        [512, 1024],
    )
    assert ds["gained"].sel(length=512).values.tolist() == [[5, 5]]
    assert ds["lost"].sel(length=512).values.tolist() == [[1, 1]]
    np.testing.assert_allclose(ds["difference"].sel(length=512), [[40, 40]])
    np.testing.assert_allclose(ds["p"].sel(length=512), [[stats.binomtest(1, 6).pvalue] * 2])
    assert ds["samples"].values.tolist() == [[[10, 10], [10, 10]]]
    assert ds.attrs["task"] == "niah"
    assert ds.attrs["unpaired"] == ""


def test_samples_are_paired_by_index_and_not_by_place() -> None:
    ds = both(0, 1)
    shuffled = ds.isel(sample=np.random.default_rng(0).permutation(ds.sizes["sample"]))
    xr.testing.assert_identical(contrast(shuffled, PAIR), contrast(ds, PAIR))


def test_there_is_an_interval_from_four_seeds_on() -> None:
    few, enough = contrast(both(0, 1, 2), PAIR), contrast(both(0, 1, 2, 3), PAIR)
    assert np.isnan(few["low"].values).all()
    assert few["seeds"].values.tolist() == [[3, 3]]
    points = enough["difference"].sel(length=1024).values[0]
    mean, half = points.mean(), stats.t.ppf(0.975, 3) * points.std(ddof=1) / 2
    np.testing.assert_allclose([enough[name].values[0, 1] for name in ("mean", "low", "high")], [mean, mean - half, mean + half])


def test_seeds_without_a_partner_are_listed_and_left_out() -> None:
    ds = contrast(join(both(0), run("qed", 7, {512: QED}), run("gdn2", 3, {512: GDN2}), run("gdn2", -1, {512: GDN2})), PAIR)
    assert ds["seed"].values.tolist() == [0]
    assert ds.attrs["unpaired"] == "without a partner in qed − gdn2: qed seed 7 and gdn2 seed unknown, 3"


def test_seeds_of_one_panel_are_gaps_in_another() -> None:
    ds = contrast(join(both(0, 1), run("qed-rand", 1, {512: QED, 1024: QED})), (*PAIR, ("qed", "qed-rand")))
    assert np.isnan(ds["difference"].values[1]).tolist() == [[True, True], [False, False]]
    assert np.isnan(ds["p"].values[1, 0]).all()
    assert ds["seeds"].values.tolist() == [[2, 2], [1, 1]]


def test_only_learned_is_a_selection_of_pairs() -> None:
    ds = join(both(0), both(1, learned_at=0), both(2, learned_at=-1))
    found = contrast(ds, PAIR, only_learned=True)
    assert found["seed"].values.tolist() == [0]
    assert found.attrs["selection"] == "pairs of which both learned the task"
    assert found.attrs["unpaired"] == "without a partner in qed − gdn2: qed seed 1, 2"
    assert contrast(ds, PAIR)["seed"].values.tolist() == [0, 1, 2]
    with pytest.raises(StoreError, match=r"expected runs that are known to have learned the task of qed and gdn2, found qed$"):
        contrast(both(0, learned_at=0), PAIR, only_learned=True)


def test_a_sweep_is_contrasted_at_strength_one() -> None:
    swept = join(both(0), *(run("qed", 0, {512: [0] * 10, 1024: [0] * 10}, strength=s) for s in (0.0, 2.0)))
    xr.testing.assert_identical(contrast(swept, PAIR), contrast(both(0), PAIR))


def test_one_of_several_tasks_is_named() -> None:
    ds = join(both(0), run("qed", 0, {512: GDN2}, task="niah-2"), run("gdn2", 0, {512: QED}, task="niah-2"))
    with pytest.raises(InputError, match="task: expected one of niah, niah-2, found none"):
        contrast(ds, PAIR)
    with pytest.raises(InputError, match="task: expected one of niah, niah-2, found fda"):
        contrast(ds, PAIR, task="fda")
    found = contrast(ds, PAIR, task="niah-2")
    assert (found["difference"].values.tolist(), found.attrs["task"]) == ([[[-40]]], "niah-2")


def test_one_sample_of_a_task_without_a_length() -> None:
    ds = contrast(join(run("qed", 0, {0: [1]}, task="fda"), run("gdn2", 0, {0: [0]}, task="fda")), PAIR)
    assert (ds["length"].values.tolist(), ds["difference"].values.tolist(), ds["p"].values.tolist()) == ([0], [[[100]]], [[[1]]])


UNPAIRED: list[tuple[Callable[[], xr.Dataset], str]] = [
    (lambda: without(both(0), arm="gdn2", length=1024), "length 1024, sample 0 and 9 more of qed seed 0 are not in gdn2"),
    (lambda: without(both(0), arm="qed", index=3), "length 512, sample 3 and 1 more of gdn2 seed 0 are not in qed"),
    (
        lambda: join(run("qed", 0, {512: QED}), run("gdn2", 0, {512: GDN2}, fingerprint=5)),
        "qed seed 0 and gdn2 seed 0 to have answered the same samples, found others at length 512, first sample 0",
    ),
    (
        lambda: join(both(0), run("gdn2", 0, {512: GDN2}, model="twin")),
        "one run of each arm, seed and task, found .*both gdn2 seed 0 on niah",
    ),
    (lambda: run("qed", 0, {512: QED}), "outcomes at strength 1 of qed and gdn2, found qed$"),
    (lambda: join(run("qed", 0, {512: QED}), run("gdn2", 1, {512: GDN2})), "a seed that .*found 0 of qed and 1 of gdn2"),
    (lambda: join(run("qed", -1, {512: QED}), run("gdn2", -1, {512: GDN2})), "found unknown of qed and unknown of gdn2"),
    (lambda: run("qed", 0, {512: QED}, strength=2.0), "outcomes at strength 1 of qed and gdn2, found none"),
]


@pytest.mark.parametrize(("make", "words"), UNPAIRED, ids=range(len(UNPAIRED)))
def test_what_cannot_be_paired_is_refused(make: Callable[[], xr.Dataset], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        contrast(make(), PAIR)


def test_pairs_are_of_two_arms() -> None:
    with pytest.raises(InputError, match="pair: expected two arms that differ, found qed twice"):
        contrast(both(0), [("qed", "qed")])
    with pytest.raises(InputError, match="pairs: expected at least one, found none"):
        contrast(both(0), [])


def test_the_command_prints_the_numbers_and_the_places_of_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["qed-probe", "contrast", *words])
        return main()

    good, cut, figure = (str(tmp_path / name) for name in ("good.zarr", "cut.zarr", "figure.png"))
    save_outcomes(both(0, 1, 2, 3), good)
    save_outcomes(without(both(0), arm="gdn2", length=1024), cut)
    assert call(good, "-o", figure) == 0
    out = capsys.readouterr().out
    assert "+40.0 (5/1)" in out
    assert "mean" in out
    assert "compares two checkpoints, not two mechanisms" in out
    assert Path(figure).is_file()
    for words, named in (
        ((cut, "--pair", "qed:gdn2"), "not in gdn2 seed 0"),
        ((good, "--pair", "qed:kda"), "qed and kda"),
        ((good, "--pair", "qed"), "--pair"),
        ((good, good), "twice"),
        ((str(tmp_path / "none.zarr"),), "none.zarr"),
    ):
        assert call(*words, "-o", figure) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert named in errors
