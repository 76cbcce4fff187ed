"""What is committed for docs/findings.md: the whole grid, the same prompts throughout, and models that answer so."""

from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.models.checkpoint import read_provenance

ROOT = Path(__file__).parents[1]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
KEPT = ("gdn2", "qed-nogate-noproj", "qed-rand", "eda")


def test_the_needles_are_those_of_the_whole_grid() -> None:
    frame = qp.open_outcomes(ROOT / "docs" / "outcomes" / "niah.zarr").to_dataframe()
    counts = frame.groupby(["model", "length"]).size().unstack()
    assert {*counts.index} == {job.name.partition("/")[2] for job in qp.GRID if job.task == "niah"}
    assert [*counts.columns] == LENGTHS
    assert (counts.to_numpy() == 500).all()
    assert (frame.groupby(["length", "index"])["fingerprint"].nunique() == 1).all()


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
