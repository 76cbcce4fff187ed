"""Which heads carry the answer, from outcomes made by hand; a sweep of the heads from model to figure."""

import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import qed_probe as qp
from qed_probe import analyses, figures
from qed_probe.cli import main
from qed_probe.errors import StoreError
from tests.drawn import check_words
from tests.hand_made import join, run

BASE = np.array([0.1, 0.2, 0.0, 0.4, 0.3])
EFFECT = {(0, 0): np.zeros(5), (0, 1): np.array([0.0, 0.1, -0.1, 0.05, 0.0]), (1, 1): np.full(5, 0.25)}
"""By head, how much the answer's loss per token rises for each sample."""
RIGHT = [1, 1, 1, 0, 0]


def changed(place: tuple[int, int] | None, right: list[int] | None = None, **columns: object) -> xr.Dataset:
    """One run as it is, or with one head changed."""
    if place is None:
        return run("qed", 0, {512: right or RIGHT}, answer_loss=BASE, **columns)
    about = {"strength": 0.0, "at": f"{place[0]}:{place[1]}", "answer_loss": BASE + EFFECT[place]}
    return run("qed", 0, {512: right or RIGHT}, **(about | columns))


def whole() -> xr.Dataset:
    return join(changed(None), changed((0, 0)), changed((0, 1), [1, 1, 0, 1, 1]), changed((1, 1), [0, 0, 0, 0, 0]))


def test_the_effect_of_a_head_is_paired_by_sample() -> None:
    ds = analyses.head_effects(whole())
    assert ds["difference"].dims == ("run", "length", "layer", "head")
    assert ds["difference"].shape == (1, 1, 2, 2)
    one = ds.isel(run=0, length=0)
    for (layer, head), effect in EFFECT.items():
        cell, x = one.isel(layer=layer, head=head), -4 * effect  # four bytes of answer, a fall of ln p where the loss rises
        assert cell["difference"] == pytest.approx(x.mean())
        assert cell["samples"] == 5
        if np.ptp(x):
            low, high = stats.t.interval(0.95, 4, x.mean(), stats.sem(x))
            assert (cell["low"].item(), cell["high"].item()) == pytest.approx((low, high))
            assert cell["p"] == pytest.approx(stats.ttest_rel(-4 * (BASE + effect), -4 * BASE).pvalue)
    assert one["p"].isel(layer=0, head=0) == 1
    assert one["p"].isel(layer=1, head=1) < 1e-9
    assert [one[name].isel(layer=0, head=1).item() for name in ("gained", "lost")] == [2, 1]
    assert [one[name].isel(layer=1, head=1).item() for name in ("gained", "lost")] == [0, 3]
    p = np.array([1.0, one["p"].values[0, 1], one["p"].values[1, 1]])
    assert one["p_fdr"].values[[0, 0, 1], [0, 1, 1]] == pytest.approx(stats.false_discovery_control(p))


def test_a_head_that_was_not_changed_is_a_gap() -> None:
    one = analyses.head_effects(whole()).isel(run=0, length=0, layer=1, head=0)
    assert one["samples"] == 0
    assert all(np.isnan(one[name]) for name in ("difference", "low", "high", "p", "p_fdr"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: changed(None), "one head changed at a time, found none"),
        (lambda: join(changed(None), changed((0, 0), strength=0.0, at="all")), "one head changed at a time, found none"),
        (lambda: join(whole(), changed((0, 0), strength=2.0)), "heads changed in one way"),
        (lambda: join(whole(), changed((0, 0), phase="prompt")), "heads changed in one way"),
        (lambda: join(changed(None), changed((0, 0), fingerprint=7)), "the same samples, found others"),
        (lambda: changed((0, 0)), "the same samples; length 512, sample 0 and 4 more of qed seed 0 with strength 0 at 0:0"),
    ],
)
def test_what_cannot_be_compared_is_refused(make: object, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        analyses.head_effects(make())  # type: ignore[operator]


def test_a_sweep_of_heads_is_none_of_strengths() -> None:
    with pytest.raises(StoreError, match="one place and phase in which strengths differ, found at 0:0, phase all and at 0:1"):
        analyses.strengths(whole())
    assert analyses.accuracy(whole())["samples"].item() == 5


def test_the_figure_shows_the_numbers() -> None:
    figure = figures.draw_heads(analyses.head_effects(whole()))
    values = figure.axes[0].collections[0].get_array()
    assert values is not None
    np.testing.assert_allclose(
        np.ma.filled(values, np.nan).reshape(2, 2), analyses.head_effects(whole())["difference"].values[0, 0]
    )
    check_words(figure)


def test_the_command_changes_one_head_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, words = tmp_path / "heads.zarr", ["--each-head", "--strengths", "-30,1", "--lengths", "400", "--samples", "4"]
    bundled = Path(qp.__file__).parent / "data" / "qed-tiny"
    monkeypatch.setattr(sys, "argv", ["qed-probe", "sweep", str(bundled), *words, "-o", str(store)])
    assert main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1] in ("0", "1")]
    assert [row[:2] for row in rows] == [[str(layer), str(head)] for layer in (0, 1) for head in range(3)]
    ds = qp.open_outcomes(store)
    assert sorted({*ds["at"].values}) == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2", "all"]
    effects = analyses.head_effects(ds).isel(run=0, length=0)
    assert float(np.abs(effects["difference"]).max()) > 1  # thirty times λ, backwards, does not leave the answer alone
    assert {"heads.png", "accuracy.png"} <= {path.name for path in qp.plot(store, tmp_path / "figures")}
