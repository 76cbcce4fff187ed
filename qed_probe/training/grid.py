"""The experiment as a table of runs, and running them, several at once; what is done stays done."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from qed_probe.errors import CheckFailed, CheckpointError, InputError, QedProbeError
from qed_probe.models.checkpoint import read_provenance
from qed_probe.training.arms import arm
from qed_probe.training.recipes import RECIPES, Recipe
from qed_probe.training.train import train


@dataclass(frozen=True)
class Job:
    """One run: what is trained, on what, from which seed; ``lambda_max`` None is the usual one."""

    arm: str
    seed: int
    task: str = "niah"
    lambda_max: float | None = None

    @property
    def name(self) -> str:
        """The directory of the run."""
        parts = [self.arm, *([] if self.lambda_max is None else [f"max{self.lambda_max:g}"]), f"seed{self.seed}"]
        return "/".join((self.task, "-".join(parts)))


QED_ARMS = {"gdn2": 6, "qed": 6, "qed-nogate": 4, "qed-nogate-noproj": 4, "qed-rand": 4, "qed-noproj": 4}
EDA_ARMS = dict.fromkeys(("kda", "kda-safegate", "eda", "eda-same", "eda-rand", "eda-reversed", "eda-gdn2"), 3)
"""Arms and how many seeds each has, from 0 on: QED's (arXiv 2608.13668, Table 1, and the one it lacks) and EDA's."""
REASSIGNED = dict.fromkeys(("gdn2", "qed", "kda", "kda-safegate", "eda", "eda-same", "eda-gdn2"), 3)
"""What is trained on reassignment as well."""
GRID = (
    *(Job(name, seed) for name, seeds in (QED_ARMS | EDA_ARMS).items() for seed in range(seeds)),
    *(Job("qed", seed, lambda_max=most) for most in (0.1, 0.5, 1.0) for seed in range(3)),
    *(Job(name, seed, "reassignment") for name, seeds in REASSIGNED.items() for seed in range(seeds)),
)
"""All runs of docs/findings.md."""


def train_grid(
    output: str | Path,
    jobs: Sequence[Job] = GRID,
    *,
    recipe: Recipe = RECIPES["tiny"],
    devices: Sequence[str] = ("cpu",),
    at_once: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Train every job into ``output``/task/arm-seed with one recipe, ``at_once`` at a time on each device.

    Every run is a process of its own. Those that are finished there are left as they are, unfinished ones go on. ``progress`` is
    called with the tokens done and all of them. Returns what each run's provenance says, by its name. Raises InputError for no
    jobs or one twice, and CheckFailed, when all others are through, naming the runs that failed and why.
    """
    if not jobs or len(set(jobs)) < len(jobs):
        raise InputError(f"grid: expected runs that differ, found {len(jobs)} of which {len(set(jobs))} do")
    output, failed, a_step = Path(output), dict[str, str](), recipe.batch * recipe.length
    waiting = [job for job in jobs if not _is_finished(output / job.name, replace(recipe, task=job.task))]
    done = {job: 0 if job in waiting else recipe.steps for job in jobs}
    free = list(devices) * at_once
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and free:
                begun = _begin(waiting.pop(0), output, recipe, free.pop(0), threads=_threads(at_once))
                running[begun.said] = begun
            for said in wait(list(running)):
                run = running[said]  # type: ignore[index]
                message = _heard(run)
                if isinstance(message, int):
                    done[run.job] = message
                elif message is not None:
                    failed[run.job.name] = message
                else:
                    del running[run.said]
                    free.append(run.device)
                    if run.process.exitcode:
                        failed.setdefault(run.job.name, f"its process ended with status {run.process.exitcode}")
                if progress is not None:
                    progress(sum(done.values()) * a_step, recipe.steps * len(jobs) * a_step)
    except KeyboardInterrupt:
        _stop(running.values())
        raise
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise CheckFailed(f"expected {len(jobs)} runs to finish, found {len(failed)} that did not: {reasons}")
    return {job.name: read_provenance(output / job.name) for job in jobs}


@dataclass(frozen=True)
class _Running:
    """A process that trains, and what it says: the steps done, or why it failed."""

    job: Job
    device: str
    process: SpawnProcess
    said: Connection


def _begin(job: Job, output: Path, recipe: Recipe, device: str, threads: int) -> _Running:
    context = multiprocessing.get_context("spawn")
    said, say = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(job, output / job.name, replace(recipe, task=job.task), device, threads, say))
    # Ctrl-C reaches this process alone, which passes it on once: twice would stop a run without saving it.
    resource_tracker.ensure_running()  # or start() would, and let the signal through
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    say.close()
    return _Running(job, device, process, said)


def _run(job: Job, directory: Path, recipe: Recipe, device: str, threads: int, say: Connection) -> None:
    """What the process of a run does."""
    with suppress(KeyboardInterrupt, BrokenPipeError):  # asked to stop, or nobody listens any more
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        torch.set_num_threads(threads)
        try:
            config, resume = arm(job.arm, lambda_max=job.lambda_max), (directory / "training.pt").exists()
            train(
                config, recipe, directory, seed=job.seed, device=device, resume=resume, save_dtype=torch.bfloat16,
                progress=lambda step, _: say.send(step),
            )  # fmt: skip
        except QedProbeError as error:
            say.send(str(error))


def _heard(run: _Running) -> int | str | None:
    """The steps done, why the run failed, or None when its process has ended."""
    try:
        message: int | str = run.said.recv()
    except EOFError:
        run.process.join()
        return None
    return message


def _stop(running: Collection[_Running]) -> None:
    """Ask all to stop, and wait until each is saved."""
    for run in running:
        if run.process.pid is not None:
            os.kill(run.process.pid, signal.SIGINT)
    for run in running:
        while _heard(run) is not None:
            pass


def _is_finished(directory: Path, recipe: Recipe) -> bool:
    try:
        made = read_provenance(directory)
    except CheckpointError:
        return False
    return made.get("recipe") == asdict(recipe) and "fresh_accuracy" in made


def _threads(at_once: int) -> int:
    return max((os.cpu_count() or 1) // at_once, 1)
