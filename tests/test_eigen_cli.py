"""``qed-probe eigen``: verdicts as exit statuses, tables and JSON, parts, several processes, and what is refused."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import qed_probe as qp
from qed_probe import cli
from qed_probe.errors import StoreError
from tests.test_eigen import identical

Capture = pytest.CaptureFixture[str]
MAIN = "import sys; from qed_probe.cli import main; sys.exit(main())"


def call(monkeypatch: pytest.MonkeyPatch, *command: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, command)])
    return cli.main()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny checkpoint ``model`` and sixty prompts for it."""
    config = replace(qp.preset("tiny", "qed-nogate-noproj"), hidden=16, heads=2, key_dim=8, value_dim=8, ffn=16, layers=2)
    torch.manual_seed(0)
    qp.save_model(qp.LanguageModel(config), tmp_path / "model")
    rng = np.random.default_rng(0)
    (tmp_path / "sixty.txt").write_text("\n".join("".join(rng.choice([*"abc "], 30)).strip() or "a" for _ in range(60)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--claim", "abs<=2"), 0, "abs<=2: holds: no real violation in 60 prompts"),
        (("--claim", "e>0.99"), 1, "e>0.99: fails: "),
        (("--claim", "abs<=2", "--rate", "0.01"), 3, "abs<=2: cannot be told: "),
        (("--claim", "abs<=2", "--claim", "e>0.99", "--rate", "0.01"), 1, "abs<=2: cannot be told: "),
    ],
)
def test_a_verdict_is_an_exit_status(
    place: Path, options: tuple[str, ...], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert call(monkeypatch, "eigen", "model", "--prompts", "sixty.txt", *options) == status
    out = capfd.readouterr().out
    assert f"  {said}" in out
    assert out.endswith("e speaks of the erase factor M_t alone, never of M_tD_t, which a step does to the memory.\n")


def test_the_tables_and_the_numbers_are_the_same(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    assert call(monkeypatch, "eigen", "model", "--prompts", "sixty.txt", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert {x["claim"]: x["verdict"] for x in found["verdicts"]} == {"abs<=1": "holds", "theory": "holds"}
    assert found["data"]["prompts"] == {"dims": ["run"], "values": [60]}
    assert len(found["data"]["minimum"]["values"][0][0]) == 2
    assert call(monkeypatch, "eigen", "model", "--prompts", "sixty.txt") == 0
    smallest = min(min(row) for row in found["data"]["minimum"]["values"][0][0])
    line = next(line for line in capfd.readouterr().out.splitlines() if line.split()[:1] == ["eigenvalue"])
    assert line.split()[2] == f"{smallest:.4g}"


def test_parts_and_a_store_and_a_stream_side_by_side(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr("qed_probe.tracing.plan.PACK", 512)
    assert call(monkeypatch, "trace", "model", "--prompts", "sixty.txt", "--save-inputs") == 0
    for i in range(1, 4):
        assert call(monkeypatch, "eigen", "model", "--prompts", "sixty.txt", "--part", f"{i}/3", "-o", f"part{i}.zarr") == 3
    assert call(monkeypatch, "eigen", "part2.zarr", "part3.zarr", "part1.zarr", "-o", "whole.zarr") == 0
    identical(qp.open_eigen("whole.zarr"), qp.tally_eigen_store("run.zarr"))
    capfd.readouterr()
    assert call(monkeypatch, "eigen", "part3.zarr", "part1.zarr") == 3
    assert "\npart3.zarr: mixer qed-nogate-noproj, 40 of 60 prompts, " in capfd.readouterr().out
    assert call(monkeypatch, "eigen", "whole.zarr", "run.zarr", "--json") == 0
    table = json.loads(capfd.readouterr().out)
    assert table["coords"]["run"] == ["whole.zarr", "run.zarr"]
    assert all(x["values"][0] == x["values"][1] for x in table["data"].values() if x["dims"][0] == "run")
    assert call(monkeypatch, "eigen", "whole.zarr", "run.zarr") == 0
    assert "\n whole.zarr  eigenvalue" in capfd.readouterr().out


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]),
    ],
)
def test_processes_of_torchrun_come_to_the_same(device: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACK", "PACK_ON_GPU"):
        monkeypatch.setattr(f"qed_probe.tracing.plan.{name}", 512)
    script = place / "command.py"
    script.write_text(f"from qed_probe.tracing import plan; plan.PACK = plan.PACK_ON_GPU = 512; {MAIN}")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "eigen"]
    words += ["model", "--prompts", "sixty.txt", "-o", "two.zarr", "--json", "--device", device]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert [x["verdict"] for x in json.loads(done.stdout)["verdicts"]] == ["holds", "holds"]
    assert call(monkeypatch, "eigen", "model", "--prompts", "sixty.txt", "-o", "one.zarr", "--device", device) == 0
    identical(qp.open_eigen("two.zarr"), qp.open_eigen("one.zarr"))


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("nowhere --text hi", "nowhere"),
        ("model --text hi --claim speed<1", "found 'speed<1'"),
        ("model --text hi --claim norm<1:mean", "found 'norm<1:mean'"),
        ("model --text hi --rate 0", "rate: expected a chance between 0 and 1, found 0"),
        ("model --text hi --part 3/2", "found 3/2"),
        ("model --text hi --part two", "--part: expected I/N, two whole numbers, found 'two'"),
        ("model model --text hi", "found model twice"),
        ("model eda-tiny --text hi -o out.zarr", "-o: expected one run to keep, found 2"),
        ("model --text hi -o run.zarr", "expected nothing there, found a trace store"),
        ("model --text hi -o run.zarr --overwrite", "expected a store of eigenvalues, found a trace store"),
        ("run.zarr --text hi", "--text: expected with a checkpoint, found with the store run.zarr"),
        ("tally.zarr --claim abs<=2", "abs<=1, theory, as claims come before the run"),
        ("tally.zarr again.zarr", "found prompt 1 in two of them"),
        ("broken.zarr", "first at layer 1, token 0, head 1"),
        ("bare.zarr", "found a store without operator_norm"),
    ],
)
def test_bad_input_is_one_line(place: Path, command: str, named: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    qp.trace("model", qp.text_prompts(["hi"], qp.ByteTokenizer()), "run.zarr")
    tally = qp.tally_eigen_store("run.zarr")
    qp.save_eigen(tally, "tally.zarr")
    qp.save_eigen(tally, "again.zarr")
    bad = tally.copy(deep=True)
    bad["nonfinite"][0, 1, 1], bad["first_nonfinite"][0, 1] = 1, 1
    qp.save_eigen(bad, "broken.zarr")
    qp.trace("model", qp.text_prompts(["hi"], qp.ByteTokenizer()), "bare.zarr")
    del zarr.open_group("bare.zarr", mode="a")["operator_norm"]
    zarr.consolidate_metadata("bare.zarr")
    capfd.readouterr()
    assert call(monkeypatch, "eigen", *command.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("qed-probe: error: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_store_that_a_replacement_left_beside_its_name_is_found(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert call(monkeypatch, "trace", "model", "--text", "hi", "--save-inputs") == 0
    assert call(monkeypatch, "eigen", "model", "--text", "hi", "-o", "kept.zarr") == 3
    for name in ("run.zarr", "kept.zarr"):
        (place / name).rename(place / f".{name}.old")
        assert call(monkeypatch, "info", name) == 0
        assert call(monkeypatch, "plot", name) == 0
        assert call(monkeypatch, "eigen", name) == 3
    assert call(monkeypatch, "memory", "run.zarr") == 0
    assert "error" not in capfd.readouterr().err


def test_an_interrupt_that_breaks_cleaning_up_is_one(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    def closed_twice(path: Path) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            os.close(-1)

    monkeypatch.setattr("qed_probe.store.place.sweep", closed_twice)
    assert call(monkeypatch, "eigen", "model", "--text", "hi", "-o", "out.zarr") == 130
    assert capfd.readouterr().err == "qed-probe: interrupted\n"


def test_kept_counts_are_described_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    qp.save_eigen(qp.tally_eigen(None, qp.niah_prompts(400, 2, 0)), tmp_path / "kept.zarr")
    assert call(monkeypatch, "info", tmp_path / "kept.zarr") == 0
    assert "800 of 800" in capsys.readouterr().out
    drawn = {path.name for path in qp.plot(tmp_path / "kept.zarr", tmp_path / "plots", formats=["png"])}
    assert {"eigen-histogram.png", "eigen-maps.png", "eigen-strength.png", "eigen-growth.png"} <= drawn
    qp.trace(None, qp.niah_prompts(400, 1, 0), tmp_path / "run.zarr")
    with pytest.raises(StoreError, match=r"stores of one kind, found a trace store at .* beside a store of eigenvalues"):
        qp.plot([tmp_path / "run.zarr", tmp_path / "kept.zarr"], tmp_path / "plots")
