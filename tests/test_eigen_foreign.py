"""The eigenvalue claim on other libraries' checkpoints: their own kernels run, a stream and a trace come to the same."""

import sys
from pathlib import Path

import pytest

import qed_probe as qp
from qed_probe import cli
from tests.foreign_models import tiny
from tests.test_eigen import identical
from tests.test_foreign_tracing import write_prompts

pytest.importorskip("transformers", minversion="4.57")
pytestmark = pytest.mark.filterwarnings("ignore:.*A_log:qed_probe.models.foreign.checkpoint.RoundedDecayWarning")


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "qwen3_5_text", "kimi_linear"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_checkpoint_of_transformers(model_type: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = tiny(model_type), write_prompts(tmp_path, *[5, 70, 14] * 20)
    model.save_pretrained(tmp_path / "model")
    prompts = qp.file_prompts(path, None)
    tally = qp.tally_eigen(tmp_path / "model", prompts, batch=batch)
    table = qp.compare_eigen({"run": tally})
    assert [x.verdict for x in qp.verdicts(table)] == ["holds", "holds"]
    low = -1 if model_type == "olmo_hybrid" else 0  # the only one of these whose gates reach 2
    assert table["low"].min() == low
    assert (table["minimum"].sel(quantity="eigenvalue").min() < 0) == (low < 0)
    qp.trace(tmp_path / "model", prompts, tmp_path / "run.zarr", batch=batch, save_inputs=True)
    identical(qp.tally_eigen_store(tmp_path / "run.zarr"), tally)
    parts = [qp.tally_eigen(tmp_path / "model", prompts, batch=batch, part=(i, 2)) for i in (2, 1)]
    identical(qp.merge_eigen(parts), tally)
    command = ["qed-probe", "eigen", str(tmp_path / "model"), "--prompts", str(path), "--batch", str(batch)]
    monkeypatch.setattr(sys, "argv", command)
    assert cli.main() == 0
