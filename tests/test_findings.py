"""What is committed for docs/findings.md: the whole grid, the same prompts throughout, and models that answer so."""

from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.models.checkpoint import read_provenance

ROOT = Path(__file__).parents[1]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
AGAIN = ("gdn2", "qed", "qed-nogate", "qed-nogate-noproj", "qed-rand")
KEPT = ("gdn2", "qed-nogate-noproj", "qed-rand", "eda")


@pytest.mark.parametrize("task", ["niah", "reassignment"])
def test_the_outcomes_are_those_of_the_whole_grid(task: str) -> None:
    frame = qp.open_outcomes(ROOT / "docs" / "outcomes" / f"{task}.zarr").to_dataframe()
    assert {*frame["task"]} == {task}
    counts = frame.groupby(["model", "length"]).size().unstack()
    assert {*counts.index} == {job.name.partition("/")[2] for job in qp.GRID if job.task == task}
    assert [*counts.columns] == LENGTHS
    assert (counts.to_numpy() == 500).all()
    assert (frame.groupby(["length", "index"])["fingerprint"].nunique() == 1).all()


def test_the_second_training_is_of_the_same_seeds_over_the_same_prompts() -> None:
    once, again = (
        qp.open_outcomes(ROOT / "docs" / "outcomes" / f"{name}.zarr").to_dataframe() for name in ("niah", "niah-again")
    )
    assert {*again["model"]} == {job.name.partition("/")[2] for job in qp.GRID if job.arm in AGAIN and not job.lambda_max}
    columns = ["model", "length", "index"]
    pairs = once.merge(again, on=columns, suffixes=(" once", " again"))
    assert len(pairs) == len(again) == 24 * len(LENGTHS) * 500
    for name in ("arm", "seed", "task", "fingerprint", "answer"):
        assert (pairs[f"{name} once"] == pairs[f"{name} again"]).all()
    losses = pairs.groupby("model")[["answer_loss once", "answer_loss again"]].mean()
    assert (losses["answer_loss once"] != losses["answer_loss again"]).all()  # so a seed does not fix a run


def test_the_kinds_of_answers_add_up_to_the_accuracy() -> None:
    """And hardly one of them is stale."""
    outcomes = qp.open_outcomes(ROOT / "docs" / "outcomes" / "reassignment.zarr")
    outcomes = outcomes.isel(sample=outcomes["index"].values < 100)
    found, expected = qp.analyses.answer_kinds(outcomes), qp.analyses.accuracy(outcomes)
    np.testing.assert_array_equal(found["answers"].sel(kind="current"), expected["correct"])
    np.testing.assert_array_equal(found["answers"].sum("kind"), expected["samples"])
    learned = found["answers"].isel(run=found["learned_at"].values > 0).sum(["run", "length"])
    assert learned.sel(kind="stale") < 0.01 * learned.drop_sel(kind="current").sum()


def test_the_strengths_are_those_of_every_qed_model_over_the_same_prompts() -> None:
    frame = qp.open_outcomes(ROOT / "docs" / "outcomes" / "strengths.zarr").to_dataframe()
    assert (frame.groupby(["seed", "strength", "length"]).size() == 500).all()
    assert {*frame["strength"]} == {-1, 0, 0.5, 1, 1.5, 2}
    needles = qp.open_outcomes(ROOT / "docs" / "outcomes" / "niah.zarr").to_dataframe()
    of_qed = needles[(needles["arm"] == "qed") & (needles["lambda_max"] == 0.25)]
    columns = ["model", "length", "index"]
    as_trained = frame[frame["strength"] == 1].set_index(columns)["correct"].sort_index()
    assert as_trained.equals(of_qed.set_index(columns)["correct"].sort_index())


@pytest.mark.parametrize("arm", KEPT)
def test_a_kept_checkpoint_gives_the_kept_answers(arm: str) -> None:
    """Of the longest prompts that are quick; float32 here and there, in other kernels, so a logit that is nearly tied may tip."""
    directory = ROOT / "checkpoints" / f"{arm}-seed0"
    found = qp.evaluate([directory], lengths=[1024], samples=4).to_dataframe().sort_values("index")
    kept = qp.open_outcomes(ROOT / "docs" / "outcomes" / "niah.zarr").to_dataframe()
    kept = kept[(kept["model"] == directory.name) & (kept["length"] == 1024) & (kept["index"] < 4)].sort_values("index")
    np.testing.assert_array_equal(found["fingerprint"], kept["fingerprint"])
    assert found["prediction"].tolist() == kept["prediction"].tolist()
    np.testing.assert_allclose(found["answer_loss"], kept["answer_loss"], rtol=1e-2, atol=1e-4)
    assert read_provenance(directory)["learned_at"] == kept["learned_at"].iloc[0]
    assert (directory / "model.safetensors").stat().st_size <= 2_500_000
