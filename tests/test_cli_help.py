"""The command line's manners: help is quick, whatever goes wrong is one line with the right exit status."""

import os
import signal
import subprocess
import sys
import time

import pytest
import typer

from qed_probe import __version__, cli
from qed_probe.cli import app as application
from qed_probe.cli import screen
from qed_probe.errors import CheckFailed, InputError, StoreError

COMMANDS = ("trace", "plot", "info", "train")
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
    assert run("--version").stdout == f"qed-probe {__version__}\n"


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
        (["plot"], "RUN.zarr"),
        (["info"], "CHECKPOINT"),
        (["info", "no/such/place"], "no/such/place"),
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


def test_progress_is_silent_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with screen.progress("trace") as report:
        report(1, 2, "half")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0:00:01"), (89.6, "0:01:30"), (3600.0, "1:00:00")])
def test_duration(seconds: float, text: str) -> None:
    assert screen.duration(seconds) == text
