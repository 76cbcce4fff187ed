"""The grid: runs are done once, go on where they were, fail alone, and stop together; each is what it would be alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qed_probe as qp
from qed_probe.cli import main
from qed_probe.errors import CheckFailed, InputError
from qed_probe.models.checkpoint import read_provenance
from qed_probe.training import GRID, Job, Recipe, arm, find_recipe, train, train_grid
from qed_probe.training.arms import parameters
from tests.test_training import assert_same_run, state

RECIPE = Recipe(steps=3, batch=4, length=380, rate=1e-3, micro_batch=4, task="niah", warmup=1, log_every=1, save_every=1)
FAILING = Job("gdn2", 0, "tokens")
"""It lacks the file of tokens."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:  # noqa: ANN401 - a generator
    """As the processes of two runs have on two cores; sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max((os.cpu_count() or 1) // 2, 1))
    yield
    torch.set_num_threads(threads)


def recipe(task: str) -> Recipe:
    """``RECIPE`` for a task."""
    return replace(RECIPE, task=task)


def interrupted(job: Job, output: Path, step: int) -> None:
    """A run of the grid that Ctrl-C stopped."""

    def interrupt(done: int, line: dict[str, Any]) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(arm(job.arm), RECIPE, output / job.name, seed=job.seed, save_dtype=torch.bfloat16, progress=interrupt)


def test_the_grid_is_the_experiment() -> None:
    assert len({job.name for job in GRID}) == len(GRID)
    seeds = {
        name: len([job for job in GRID if job.arm == name and job.task == "niah" and job.lambda_max is None])
        for name in ("qed", "gdn2")
    }
    assert min(seeds.values()) >= 6
    assert Job("qed", 1, lambda_max=0.5).name == "niah/qed-max0.5-seed1"
    assert Job("qed", 1, lambda_max=1.0).name == "niah/qed-max1-seed1"
    assert Job("eda-gdn2", 0, "reassignment").name == "reassignment/eda-gdn2-seed0"


def test_runs_go_on_fail_alone_and_are_done_once(tmp_path: Path) -> None:
    job = Job("qed", 1)
    interrupted(job, tmp_path / "alone", 3)  # after the last step: only the fresh samples are missing
    interrupted(job, tmp_path / "grid", 2)
    assert state(tmp_path / "grid" / job.name)["done"] == 2
    seen: list[tuple[int, int]] = []
    with pytest.raises(CheckFailed, match=r"2 runs to finish, found 1 that did not: tokens/gdn2-seed0: .*found none$"):
        train_grid(
            tmp_path / "grid",
            [FAILING, job],
            recipe=recipe,
            devices=["cpu", "cpu"],
            progress=lambda *x: seen.append(x),
        )
    assert_same_run(tmp_path / "grid" / job.name, tmp_path / "alone" / job.name)
    total = 2 * 3 * RECIPE.batch * RECIPE.length
    assert {whole for _, whole in seen} == {total}
    assert seen[-1][0] == total // 2
    files = [*(tmp_path / "grid" / job.name).iterdir()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    found = train_grid(tmp_path / "grid", [job], recipe=recipe)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
    assert found == {job.name: read_provenance(tmp_path / "grid" / job.name)}
    made = found[job.name]
    assert made["parameters"] == parameters(arm("qed"))
    assert (made["learned_at"], made["fresh_samples"], made["steps"], made["seed"]) == (0, 200, 3, 1)
    # What is finished there is of this seed, this recipe and this arm, or it is another run.
    (tmp_path / "grid" / "niah" / "qed-seed2").symlink_to(tmp_path / "alone" / job.name, target_is_directory=True)
    with pytest.raises(CheckFailed, match=r"niah/qed-seed2: expected the run that is in .* found another: seed was 1, is 2"):
        train_grid(tmp_path / "grid", [Job("qed", 2)], recipe=recipe)


def test_a_directory_that_holds_something_else_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "niah" / "qed-seed0").mkdir(parents=True)
    (tmp_path / "niah" / "qed-seed0" / "notes.txt").touch()
    with pytest.raises(CheckFailed, match=r"niah/qed-seed0: expected an output that does not exist yet"):
        train_grid(tmp_path, [Job("qed", 0)], recipe=recipe)


@pytest.mark.parametrize(
    ("jobs", "options", "words"),
    [
        ([], {}, "runs that differ, found none"),
        ([Job("qed", 0), Job("gdn2", 0), Job("qed", 0)], {}, "found niah/qed-seed0 twice"),
        ([Job("qed", 0)], {"devices": []}, "found 0 and 1"),
        ([Job("qed", 0)], {"at_once": 0}, "found 1 and 0"),
        ([Job("qed", 0)], {"devices": ["cpu", "abacus"]}, "found 'abacus'"),
        ([Job("qed", 0), Job("eda-typo", 0)], {}, "mixer: .*found 'eda-typo'"),
        ([Job("qed", 0), Job("qed", 0, "poetry")], {}, "task: .*found 'poetry'"),
        ([Job("kda", 0, lambda_max=0.5)], {}, "kda adds no direction"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(
    jobs: list[Job], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        train_grid(tmp_path, jobs, recipe=recipe, **options)
    assert [*tmp_path.iterdir()] == []


LONG = """
import sys
from qed_probe.training import Job, Recipe, train_grid
if __name__ == "__main__":
    recipe = Recipe(steps=5000, batch=1, length=380, rate=1e-3, micro_batch=1, task="niah", log_every=1, save_every=5000)
    train_grid(sys.argv[1], [Job("qed", seed) for seed in range(3)], recipe=lambda task: recipe, devices=["cpu", "cpu"])
"""


def processes(group: Path) -> list[str]:
    """Command lines of processes that name a directory or are its children's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"GRID_TEST={group}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_ctrl_c_saves_both_runs_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text(LONG)
    environment = {**os.environ, "GRID_TEST": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "grid")], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        logs = [tmp_path / "grid" / "niah" / f"qed-seed{seed}" / "log.jsonl" for seed in range(2)]
        while process.poll() is None and not all(log.exists() and log.read_text().count("\n") >= 2 for log in logs):
            time.sleep(0.05)
        assert len(processes(tmp_path)) >= 3
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert processes(tmp_path) == []
    for log in logs:
        assert state(log.parent)["done"] == log.read_text().count("\n") >= 2
    assert not (tmp_path / "grid" / "niah" / "qed-seed2").exists()  # two devices, two runs at once


def test_ctrl_c_while_a_process_begins_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Process.start

    def interrupted_start(self: Any) -> None:  # noqa: ANN401
        start(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(context.Process, "start", interrupted_start)
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        train_grid(tmp_path, [Job("qed", 0)], recipe=lambda task: replace(RECIPE, task=task, steps=5000))
    assert multiprocessing.active_children() == []
    assert time.perf_counter() - began < 60


def finished(output: Path, name: str, **found: Any) -> None:  # noqa: ANN401
    job = next(job for job in GRID if job.name == name)
    made = {"recipe": asdict(find_recipe("tiny", job.task)), "seed": job.seed, "parameters": 1186118} | found
    qp.save_model(qp.LanguageModel(arm(job.arm)), output / name, made)


def test_the_command_lists_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["qed-probe", "grid", "-o", str(tmp_path), *words])
        return main()

    finished(tmp_path, "niah/gdn2-seed0", learned_at=370, fresh_accuracy=0.995)
    finished(tmp_path, "reassignment/gdn2-seed0", learned_at=0, fresh_accuracy=0.25)
    assert call("--arm", "gdn2", "--seeds", "1") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["niah/gdn2-seed0", "1,186,118", "370", "99.5%"] in lines
    assert ["reassignment/gdn2-seed0", "1,186,118", "–", "25.0%"] in lines
    assert f"Next: qed-probe evaluate {tmp_path}/reassignment/* --task reassignment -o reassignment.zarr".split() in lines
    for words, named in (
        (("--arm", "gdn2", "--arm", "eda-typo"), "--arm: expected one of .*found eda-typo"),
        (("--task", "poetry"), "--task: expected one of niah, reassignment, found poetry"),
        (("--arm", "gdn2", "--seeds", "0"), "found none"),
        (("--arm", "gdn2", "--device", "cpu,"), "device: expected one that is there, found ''"),
        (("--at-once", "0"), "at-once"),
    ):
        assert call(*words) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert pytest.raises(AssertionError, match=named).matches(AssertionError(errors))
