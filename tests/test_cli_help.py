"""The command line's manners: help is quick, whatever goes wrong is one line with the right exit status."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

import qed_probe as qp
from qed_probe import cli
from qed_probe.cli import app as application
from qed_probe.cli import screen
from qed_probe.errors import CheckFailed, InputError, StoreError

COMMANDS = (
    "trace", "plot", "diff", "info", "eigen", "replay", "memory", "evaluate", "sweep", "patch", "contrast", "train", "grid",
)  # fmt: skip
MAIN = "import sys; from qed_probe.cli import main; sys.exit(main())"


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *args], capture_output=True, text=True, env={**os.environ, **env}, timeout=60, check=False
    )


def test_help_lists_every_command_in_one_line_each() -> None:
    result = run("--help", COLUMNS="80")
    lines = [line.split() for line in result.stdout.split("Commands:")[1].splitlines() if line.strip()]
    assert result.returncode == 0
    assert tuple(line[0] for line in lines) == COMMANDS
    assert all(len(line) > 3 and not line[-1].endswith("...") for line in lines)
    assert run().stdout == result.stdout


def test_help_is_quick() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        run("--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"qed-probe {command}" in result.stdout.replace("-c ", "qed-probe ")


def test_version() -> None:
    assert run("--version").stdout == f"qed-probe {qp.__version__}\n"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["trce"], "trce"),
        (["trace", "--no-such-option"], "--no-such-option"),
        (["trace", "--samples", "many"], "--samples"),
        (["trace", "--strength", "strong"], "--strength"),
        (["trace", "a", "b"], "b"),
        (["trace", "-o"], "-o"),
        (["trace", "--text", "a", "--task", "niah"], "--text and --task"),
        (["trace", "--layers", "0,b"], "--layers"),
        (["trace", "--task", "reassign"], "reassign"),
        (["trace", "--task", "reassignment", "--length", "238"], "at least 239 bytes"),
        (["train", "qed", "--task", "poetry"], "poetry"),
        (["plot"], "RUN.zarr"),
        (["diff", "one.zarr"], "B.zarr"),
        (["info"], "CHECKPOINT"),
        (["info", "no/such/place"], "no/such/place"),
        (["info", "."], "config.json"),
        (["train", "no-such-mixer"], "no-such-mixer"),
        (["train", "qed", "--preset", "huge"], "huge"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_unusable_input_is_one_line(args: list[str], named: str) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("qed-probe: error: ")
    assert named in result.stderr


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (InputError("expected a,\n  found b"), 2, "qed-probe: error: expected a, found b"),
        (StoreError("full"), 2, "qed-probe: error: full"),
        (CheckFailed("layer 1, head 2"), 1, "qed-probe: error: layer 1, head 2"),
        (
            OSError(28, "No space left on device", "run.zarr"),
            2,
            "qed-probe: error: [Errno 28] No space left on device: 'run.zarr'",
        ),
        (KeyboardInterrupt(), 130, "qed-probe: interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_status(
    raised: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise raised

    monkeypatch.setattr(application, "app", failing)
    monkeypatch.setattr(sys, "argv", ["qed-probe", "--"])
    assert cli.main() == status
    assert capsys.readouterr().err.strip() == line


def test_ctrl_c_is_one_line() -> None:
    command = "import time\ndef wait():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    script = f"{command}import qed_probe.cli.app as a; a.app.command()(wait)\n{MAIN}"
    with subprocess.Popen([sys.executable, "-c", script, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert errors == b"qed-probe: interrupted\n"


@pytest.mark.parametrize("delay", [0.2, 0.5, 0.8, 1.2])
def test_ctrl_c_is_one_line_while_modules_load(delay: float, tmp_path: Path) -> None:
    """From when the command has begun: before, it is Python's own."""
    script = MAIN.replace("sys.exit(", "print('ready', flush=True); sys.exit(")
    words = [sys.executable, "-c", script, "trace", "--samples", "64", "-o", str(tmp_path / "run.zarr")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert errors == b"qed-probe: interrupted\n"


@pytest.mark.parametrize("inside", ["importlib._bootstrap", "safetensors.torch", "zarr.core.sync"])
def test_what_an_interrupt_would_break_is_left_first(inside: str) -> None:
    """The first two turn a KeyboardInterrupt into an error of their own, or into none; zarr drops what it was to await."""
    before = signal.getsignal(signal.SIGALRM)
    here: dict[str, Any] = {"__name__": inside, "stop": cli._interrupt, "sys": sys}
    exec("def load():\n    stop(2, sys._getframe())\n", here)
    try:
        here["load"]()
        assert 0 < signal.setitimer(signal.ITIMER_REAL, 0)[0] <= 0.02
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(KeyboardInterrupt):
        cli._interrupt(2, None)


def test_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        result = subprocess.run(
            [sys.executable, "-c", MAIN, "--help"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert result.returncode != 0
    assert result.stderr == ""


def test_a_table_goes_to_stdout_and_keeps_its_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    screen.table("means", ["layer", "|ρ|"], [["0", "[0.25]"], ["1", "0.5"]])
    captured = capsys.readouterr()
    assert [line.split() for line in captured.out.splitlines()] == [["means"], ["layer", "|ρ|"], ["0", "[0.25]"], ["1", "0.5"]]
    assert captured.err == ""


def test_a_wide_table_is_neither_folded_nor_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen.table("t", [f"column {i}" for i in range(30)], [["0.123456"] * 30])
    assert [len(line.split()) for line in capsys.readouterr().out.splitlines()] == [1, 60, 30]


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with screen.progress("train qed") as report:
        report(1, 4, "loss 3.2100")
        assert capfd.readouterr() == ("", "")
        monkeypatch.setattr(screen, "SILENCE", 0)
        report(2, 4, "loss 2.1000")
        report(3, 4)
        monkeypatch.setattr(screen, "SILENCE", 30)
        report(4, 4)
    assert capfd.readouterr() == ("", "train qed: 50% loss 2.1000\ntrain qed: 75%\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.9833719370197377, "3.983"),
        (12345.678, "12,346"),
        (2e-3, "0.002"),
        (float("nan"), "nan"),
        ({"rate": 0.1 + 0.2}, "rate 0.3"),
    ],
)
def test_facts_have_sensible_digits(value: object, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen.facts("run", [("loss", value)])
    assert capsys.readouterr().out.split(maxsplit=2)[2].strip() == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0:00:01"), (89.6, "0:01:30"), (3600.0, "1:00:00")])
def test_duration(seconds: float, text: str) -> None:
    assert screen.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-0.12345, "-0.123"), (1380.4, "1380"), (float("inf"), "inf"), (float("nan"), "nan")]
)
def test_number(value: float, text: str) -> None:
    assert screen.number(value) == text


def test_info_of_a_checkpoint(tmp_path: Path) -> None:
    config = replace(qp.preset("tiny", "qed"), hidden=8, layers=1, heads=1, key_dim=4, value_dim=4, ffn=8)
    qp.save_model(qp.LanguageModel(config), tmp_path, {"seed": 17, "recipe": {"length": 512, "rate": 0.002}})
    result = run("info", str(tmp_path))
    facts = dict(line.split(None, 1) for line in result.stdout.splitlines()[1:])
    expected = {"mixer": "qed", "hidden": "8", "key_dim": "4", "seed": "17", "recipe": "length 512, rate 0.002"}
    assert result.returncode == 0
    assert {name: facts[name].strip() for name in expected} == expected
    assert not {"edits", "address_rank", "lower_bound"} & set(facts)


def test_trace_needs_a_length_that_the_checkpoint_does_not_tell(tmp_path: Path) -> None:
    config = replace(qp.preset("tiny", "qed"), hidden=8, layers=1, heads=1, key_dim=4, value_dim=4, ffn=8)
    qp.save_model(qp.LanguageModel(config), tmp_path)
    result = run("trace", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("qed-probe: error: --length: expected a number")
