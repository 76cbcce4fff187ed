"""What a change does to answers, from outcomes made by hand, and the commands that make and show other directions."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import qed_probe as qp
from qed_probe import analyses
from qed_probe.cli import main
from qed_probe.errors import StoreError
from tests.hand_made import join, run

BASE = np.array([0.1, 0.2, 0.0, 0.4, 0.3])
WORSE = np.array([0.2, 0.1, 0.1, 0.9, 0.3])
BUNDLED = Path(qp.__file__).parent / "data" / "qed-tiny"


def asked(right: list[int], loss: np.ndarray = BASE, **how: Any) -> xr.Dataset:  # noqa: ANN401
    return run("qed", 0, {512: right}, answer_loss=loss, **how)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, words)])
    return main()


def test_each_change_is_paired_with_the_model_as_it_is() -> None:
    other: dict[str, Any] = {"direction": "nogate"}
    half = other | {"strength": 0.5, "phase": "prompt"}
    ds = analyses.change_effects(join(asked([1, 1, 1, 0, 0]), asked([0, 0, 1, 1, 0], WORSE, **other), asked([1] * 5, **half)))
    assert dict(ds.sizes) == {"run": 1, "length": 1, "change": 2}
    assert [ds[name].values.tolist() for name in ("strength", "direction", "at", "phase")] == [
        [1, 0.5], ["nogate", "nogate"], ["all", "all"], ["all", "prompt"],
    ]  # fmt: skip
    first, second = (ds.isel(run=0, length=0, change=i) for i in (0, 1))
    x = -4 * (WORSE - BASE)  # four bytes of answer, a fall of ln p where the loss rises
    expected = (x.mean(), *stats.t.interval(0.95, 4, x.mean(), stats.sem(x)), stats.ttest_1samp(x, 0).pvalue)
    assert [first[name].item() for name in ("difference", "low", "high", "p")] == pytest.approx(expected)
    assert [first[name].item() for name in ("usual", "accuracy", "gained", "lost", "samples")] == [0.6, 0.4, 1, 2, 5]
    assert [second[name].item() for name in ("difference", "p", "gained", "lost")] == [0, 1, 2, 0]
    assert ds["p_holm"].values.ravel() == pytest.approx(analyses.holm(analyses.mcnemar([1, 2], [2, 0])))


def test_what_was_not_changed_or_answered_other_samples_is_refused() -> None:
    with pytest.raises(StoreError, match="expected outcomes of a changed model, found none"):
        analyses.change_effects(asked([1, 0, 1, 0, 0]))
    other = asked([1, 0, 1, 0, 0], direction="nogate", strength=0.5, at="0:1", fingerprint=7)
    with pytest.raises(StoreError, match=r"qed seed 0 with strength 0\.5, direction nogate at 0:1 and as it is"):
        analyses.change_effects(join(asked([1, 0, 1, 0, 0]), other))


@pytest.mark.parametrize(
    ("command", "strengths"),
    [(("evaluate",), ["1"]), (("sweep", "--strengths", "1"), ["1"]), (("sweep", "--strengths", "2,0"), ["2", "0"])],
)
def test_the_commands_show_another_direction(
    command: tuple[str, ...],
    strengths: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *more = command
    how = (
        "--direction",
        "nogate",
        "--at",
        "0:1",
        "--phase",
        "prompt",
        "--lengths",
        "400",
        "--samples",
        "3",
        "-o",
        tmp_path / "o.zarr",
    )
    assert call(monkeypatch, name, BUNDLED, *more, *how) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if " nogate " in line]
    found = analyses.change_effects(qp.open_outcomes(tmp_path / "o.zarr"))
    assert [row[:4] for row in rows] == [[s, "nogate", "0:1", "prompt"] for s in strengths]
    assert [row[7] for row in rows] == [f"{x:+.3g}" for x in found["difference"].values.ravel()]
    assert f"The outcomes are in {tmp_path / 'o.zarr'}" in said


def test_heads_are_changed_in_one_way_before_hours_are_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "sweep", BUNDLED, "--each-head", "--strengths", "0,1,2", "-o", tmp_path / "o.zarr") == 2
    assert (
        "--each-head: expected one of --strengths for all heads, beside the model as it is, found 0, 2" in capsys.readouterr().err
    )
    assert not (tmp_path / "o.zarr").exists()


@pytest.mark.parametrize("place", ["0:1,1:0", "0:1"])
def test_strengths_at_some_heads_are_drawn_as_strengths(place: str, tmp_path: Path) -> None:
    changed = [asked([1, 0, 1, 0, 0], strength=s, at=place) for s in (0.0, 2.0)]
    drawn = {path.stem for path in qp.plot(join(asked([1, 0, 1, 0, 0]), *changed), tmp_path, formats=["svg"])}
    assert "strengths" in drawn
    assert "heads" not in drawn


def test_directions_that_no_figure_shows_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    qp.plot(join(asked([1, 0, 1, 0, 0]), asked([1, 0, 1, 0, 0], direction="nogate")), tmp_path, formats=["svg"])
    assert "skipped other directions" in caplog.text
