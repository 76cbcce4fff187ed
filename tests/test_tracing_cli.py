"""Trace and what follows it on the command line: bad input is one line and touches nothing, a stopped trace resumes."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qed_probe as qp
from qed_probe import cli
from tests.test_store_kill import contents

SMALL = (
    "import sys; from qed_probe.cli import main; from qed_probe.store import schema; from qed_probe.tracing import plan; "
    "schema.MAX_BLOCK, plan.PACK = 256, 512; sys.exit(main())"
)
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a tiny checkpoint ``model`` and things that are none."""
    config = replace(qp.preset("tiny", "qed"), hidden=16, heads=2, key_dim=8, value_dim=8, ffn=16, layers=2)
    torch.manual_seed(0)
    qp.save_model(qp.LanguageModel(config), tmp_path / "model")
    qp.save_model(qp.LanguageModel(config), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("keep me")
    (tmp_path / "gap.txt").write_text("one\n\nthree\n")
    (tmp_path / "half.jsonl").write_text('{"tokens": [1, 2.0]}\n')
    np.save(tmp_path / "float.npy", np.array([1.0]))
    np.save(tmp_path / "high.npy", np.array([256]))
    np.save(tmp_path / "low.npy", np.array([-1]))
    np.save(tmp_path / "long.npy", np.zeros(200_000, np.int8))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, command: str) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *command.split()])
    return cli.main()


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("trace nowhere --text hi", "nowhere"),
        ("trace folder --text hi", "config.json"),
        ("trace cut --text hi", "cut/model.safetensors"),
        ("trace model --text=", "empty prompt"),
        ("trace model --prompts gap.txt", "line 2"),
        ("trace model --prompts half.jsonl", "2.0 at token 1"),
        ("trace model --prompts nothing.txt", "nothing.txt"),
        ("trace model --tokens float.npy", "float64"),
        ("trace model --tokens high.npy", "found 256"),
        ("trace model --tokens low.npy", "found -1"),
        ("trace model --text hi -o folder", "overwrite replaces it"),
        ("trace model --text hi -o folder --overwrite", "qed-probe store"),
        ("trace model --text hi -o folder --resume", "qed-probe store"),
        ("trace model --text hi -o /", "root of the file system"),
        ("trace model --text hi -o no/such/place.zarr", "nothing was created"),
        ("trace model --text hi --resume --overwrite", "found both"),
        ("trace model --text hi --layers 2", "found [2]"),
        ("trace model --text hi --strength nan", "found nan"),
        ("trace model --text hi --backend cuda", "backend: expected one of auto, triton, torch, reference, found 'cuda'"),
        ("trace model --text hi --seed -1", "found -1"),
        ("trace model --text hi --device cuda:77", "cuda:77"),
        ("trace model --text hi --device meta", "meta"),
        ("trace model --text hi --device privateuseone", "privateuseone"),
        ("trace model --text hi --dtype float16", "float16"),
        ("trace model --text hi --vectors float64", "float64"),
        ("trace model --text hi --state-at 2", "from 0 to 1"),
        ("trace model --text hi --samples 16", "--samples"),
        ("trace model --tokens low.npy --length 400 --samples 2", "--length and --samples"),
        ("trace model --length 3", "found 3"),
        ("trace model --text hi --generate -1", "expected a whole number of tokens, from 0 to 2,147,483,647, found -1"),
        ("trace model --text hi --generate 9999999999", "found 9999999999"),
        ("trace model --text hi --generate 1.5", "Invalid value for '--generate'"),
        ("trace model --text hi --chat", "found one of bytes, which has none"),
        ("trace --text hi --chat", "a chat template in the bundled model"),
        ("trace model --chat", "found no prompts"),
        ("plot nowhere.zarr", "nowhere.zarr"),
        ("plot folder", "qed-probe store"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(
    place: Path, command: str, named: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    before = contents(place)
    assert call(monkeypatch, command) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("qed-probe: error: ")
    assert err.count("\n") == 1
    assert named in err
    assert contents(place) == before


def test_a_prompt_that_does_not_fit_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr("qed_probe.tracing.plan._free_memory", lambda: 10_000_000)
    assert call(monkeypatch, "trace model --tokens long.npy --dry-run") == 2
    assert "found 200,000" in capfd.readouterr().err


def test_from_text_to_figures(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    assert call(monkeypatch, "trace model --text a --text 🎉 --vectors none --layers 1 -o one.zarr") == 0
    assert capfd.readouterr().out.endswith("next: qed-probe plot one.zarr\n")
    assert call(monkeypatch, "info one.zarr") == 0
    assert ["prompts", "2"] in [line.split() for line in capfd.readouterr().out.splitlines()]
    assert call(monkeypatch, "plot one.zarr -o plots") == 0
    assert capfd.readouterr().out.startswith("16 files in plots")
    before = contents(place)
    assert call(monkeypatch, "plot one.zarr -o one.zarr") == 2
    assert "found a zarr store" in capfd.readouterr().err
    assert contents(place) == before


def test_the_table_has_an_erase_column_only_with_an_address(monkeypatch: pytest.MonkeyPatch, place: Path, capfd: Capture) -> None:
    for mixer in ("qed", "eda"):
        config = replace(qp.read_config("model"), mixer=mixer)
        qp.save_model(qp.LanguageModel(config), place / mixer)
        assert call(monkeypatch, f"trace {mixer} --text hi -o {mixer}.zarr") == 0
        _, heads, *_, legend, _ = capfd.readouterr().out.splitlines()
        assert ("erase" in heads.split()) == ("ᾱγ" in legend) == (mixer == "eda")
        assert {"decay", "delta"} < set(heads.split())
        assert legend.startswith("Means, but for the extremes e min and e max. share")


def test_resuming_with_other_prompts_says_what_made_the_store(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    assert call(monkeypatch, "trace model --text hi -o run.zarr") == 0
    capfd.readouterr()
    assert call(monkeypatch, "trace model --text ho -o run.zarr --resume") == 2
    err = capfd.readouterr().err
    assert "differ in prompts_digest" in err
    assert err.endswith("; what made the store: qed-probe trace model --text hi -o run.zarr\n")


def test_stopped_and_resumed_is_as_undisturbed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", SMALL, "trace", "../model", "--tokens", "../ids.npy", "--save-inputs", "--resume"]
    np.save(place / "ids.npy", np.random.default_rng(0).integers(0, 256, (8, 512)))
    for name in ("still", "stopped"):
        (place / name).mkdir()
    subprocess.run(command, cwd=place / "still", check=True, capture_output=True)
    for stop, status in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        store = place / "stopped" / "run.zarr"
        blocks = len(list(store.glob("done/c*")))
        with subprocess.Popen(command, cwd=place / "stopped", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while process.poll() is None and len(list(store.glob("done/c*"))) <= blocks:
                time.sleep(0.01)
            process.send_signal(stop)
            error = process.communicate(timeout=60)[1]
        assert (process.returncode, error) == (status, b"qed-probe: interrupted\n" if status == 130 else b"")
    subprocess.run(command, cwd=place / "stopped", check=True, capture_output=True)
    assert contents(place / "stopped") == contents(place / "still")


def test_ctrl_c_while_zarr_hands_over_what_it_writes_is_one_line(place: Path) -> None:
    """What it made and did not await yet would be warned of."""
    asking = """
import asyncio, os, signal
real = asyncio.run_coroutine_threadsafe
def asked(made, loop):
    asyncio.run_coroutine_threadsafe = real
    os.kill(os.getpid(), signal.SIGINT)
    return real(made, loop)
asyncio.run_coroutine_threadsafe = asked
"""
    command = [sys.executable, "-c", asking + SMALL, "trace", "model", "--text", "hi"]
    result = subprocess.run(command, cwd=place, capture_output=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (130, b"qed-probe: interrupted\n")


def test_values_cut_short_are_told_by_their_array(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    assert call(monkeypatch, "trace model --text hi --save-inputs -o run.zarr") == 0
    for command, key in (("plot", "rho"), ("memory", "inputs/k")):
        chunk = next((place / "run.zarr" / key).glob("c.*"))
        os.truncate(chunk, chunk.stat().st_size // 2)
        capfd.readouterr()
        assert call(monkeypatch, f"{command} run.zarr") == 2
        line = rf"qed-probe: error: \S*run\.zarr/{key}: expected values as they were written, found damaged ones: .+\n"
        assert re.fullmatch(line, capfd.readouterr().err)


def test_memory_that_runs_out_is_told_in_one_line(place: Path) -> None:
    np.save(place / "long.npy", np.zeros(200_000, np.int64))
    limited = (
        "import resource, torch, qed_probe; qed_probe.read_config(); resource.setrlimit(resource.RLIMIT_DATA, (1 << 29,) * 2); "
    )
    result = subprocess.run(
        [sys.executable, "-c", limited + SMALL, "trace", "model", "--tokens", "long.npy"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "prompts 1 to 1, in one pass: expected enough memory for it, found too little" in result.stderr
    assert "Traceback" not in result.stderr
