"""The log of a training run, read and drawn."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from qed_probe.errors import CheckpointError, InputError, StoreError
from qed_probe.models.config import ModelConfig

SIZES = {"hidden": 16, "layers": 2, "heads": 2, "key_dim": 8, "value_dim": 8, "ffn": 16, "vocab_size": 256, "tokenizer": "bytes"}
RECIPE = replace(qp.RECIPES["tiny"], steps=4, batch=2, micro_batch=2, length=380, log_every=1, save_every=2, precision="float32")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    qp.train(ModelConfig(mixer="qed", lambda_max=0.5, **SIZES), RECIPE, tmp_path / "run", seed=3)  # type: ignore[arg-type]
    return tmp_path / "run"


def test_a_history_is_the_log(run: Path) -> None:
    ds = qp.read_history(run)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text("utf-8").splitlines()]
    assert ds["step"].values.tolist() == [1, 2, 3, 4]
    for name in ("loss", "lm_loss", "answer_loss", "accuracy", "rate"):
        assert ds[name].values.tolist() == [line[name] for line in lines]
    assert ds["lambda"].dims == ("step", "layer", "head")
    assert ds["lambda"].sel(layer=1).values.tolist() == [line["lambda"]["1"] for line in lines]
    assert ds.attrs["lambda_max"] == 0.5
    assert ds.attrs["lambda_init"] == pytest.approx(0.5 / (1 + np.exp(2)))
    assert ds.attrs["subject"] == "qed, seed 3"
    assert {path.name for path in qp.plot(run, run / "figures")} == {"lambda.png", "lambda.svg"}


def test_an_arm_without_a_direction_has_no_strength_to_draw(tmp_path: Path) -> None:
    qp.train(ModelConfig(mixer="gdn2", **SIZES), RECIPE, tmp_path / "run")  # type: ignore[arg-type]
    assert "lambda" not in qp.read_history(tmp_path / "run")
    with pytest.raises(StoreError, match="adds a direction, whose λ could be drawn, found gdn2, seed 0"):
        qp.plot(tmp_path / "run", tmp_path / "figures")


def test_a_log_that_is_not_whole_is_refused(run: Path, tmp_path: Path) -> None:
    text = (run / "log.jsonl").read_text("utf-8")
    (run / "log.jsonl").write_text(text[:-20], "utf-8")
    with pytest.raises(InputError, match=r"log\.jsonl, line 4: expected a whole line of JSON"):
        qp.read_history(run)
    (run / "log.jsonl").write_text("", "utf-8")
    with pytest.raises(InputError, match="found an empty file"):
        qp.read_history(run)
    (run / "log.jsonl").unlink()
    with pytest.raises(InputError, match="expected the log of a training run, found no such file"):
        qp.read_history(run)
    with pytest.raises(CheckpointError, match="nowhere"):
        qp.read_history(tmp_path / "nowhere")
