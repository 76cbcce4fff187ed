"""The experiment as a table of runs, and running them, several at once; what is done stays done."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from qed_probe.errors import CheckFailed, CheckpointError, InputError, QedProbeError
from qed_probe.models.checkpoint import read_config, read_provenance
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import find_device
from qed_probe.training.arms import arm
from qed_probe.training.recipes import Recipe, find_recipe
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
        parts = [
            self.arm,
            *([] if self.lambda_max is None else [f"max{repr(float(self.lambda_max)).removesuffix('.0')}"]),
            f"seed{self.seed}",
        ]
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


def _tiny(task: str) -> Recipe:
    return find_recipe("tiny", task)


def train_grid(
    output: str | Path,
    jobs: Sequence[Job] = GRID,
    *,
    recipe: Callable[[str], Recipe] = _tiny,
    devices: Sequence[str] = ("cpu",),
    at_once: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Train every job into ``output``/task/arm-seed with its task's recipe, ``at_once`` at a time on each device.

    Every run is a process of its own. Those that are finished there are left as they are, unfinished ones go on. ``progress`` is
    called with the tokens done and all of them. Returns what each run's provenance says, by its name. Raises InputError for no
    jobs or one twice, arms or devices that are not there, and nowhere to run, and CheckFailed, when all others are through,
    naming the runs that failed and why.
    """
    _check(jobs, devices, at_once)
    output, failed = Path(output), dict[str, str]()
    plans = {job: (arm(job.arm, lambda_max=job.lambda_max), recipe(job.task)) for job in jobs}
    a_step = {job: plan.batch * plan.length for job, (_, plan) in plans.items()}
    tokens = sum(plan.steps * a_step[job] for job, (_, plan) in plans.items())
    waiting = [job for job, plan in plans.items() if not _is_finished(output / job.name, *plan, job.seed)]
    done = {job: 0 if job in waiting else plan.steps for job, (_, plan) in plans.items()}
    free = list(devices) * at_once
    threads = max((os.cpu_count() or 1) // len(free), 1)
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and free:
                with _uninterrupted():
                    job = waiting.pop(0)
                    begun = _begin(job, *plans[job], output / job.name, free.pop(0), threads)
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
                    progress(sum(steps * a_step[job] for job, steps in done.items()), tokens)
    except BaseException:
        _stop(running.values())
        raise
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise CheckFailed(f"expected {len(jobs)} runs to finish, found {len(failed)} that did not: {reasons}")
    return {job.name: read_provenance(output / job.name) for job in jobs}


def _check(jobs: Sequence[Job], devices: Sequence[str], at_once: int) -> None:
    names = [job.name for job in jobs]
    if not jobs or len(set(names)) < len(names):
        twice = [name for i, name in enumerate(names) if name in names[:i]]
        raise InputError(f"grid: expected runs that differ, found {f'{twice[0]} twice' if twice else 'none'}")
    if not devices or at_once < 1:
        raise InputError(f"grid: expected devices and 1 run or more at once on each, found {len(devices)} and {at_once}")
    for device in devices:
        find_device(device)


@dataclass(frozen=True)
class _Running:
    """A process that trains, and what it says: the steps done, or why it failed."""

    job: Job
    device: str
    process: SpawnProcess
    said: Connection


def _begin(job: Job, config: ModelConfig, recipe: Recipe, directory: Path, device: str, threads: int) -> _Running:
    context = multiprocessing.get_context("spawn")
    said, say = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(config, recipe, directory, job.seed, device, threads, say))
    process.start()
    say.close()
    return _Running(job, device, process, said)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until a process that is begun is known, so that it is stopped with the others.

    The process inherits that. Ctrl-C reaches this one alone, which passes it on once: twice would stop a run without saving it.
    """
    resource_tracker.ensure_running()  # or the first process would start it, and let the signal through
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    previous = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))  # for another thread may take the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, previous)
    if asked:
        raise KeyboardInterrupt


def _run(config: ModelConfig, recipe: Recipe, directory: Path, seed: int, device: str, threads: int, say: Connection) -> None:
    """What the process of a run does."""
    with suppress(KeyboardInterrupt, BrokenPipeError):  # asked to stop, or nobody listens any more
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        torch.set_num_threads(threads)
        try:
            resume = (directory / "training.pt").exists()
            train(
                config, recipe, directory, seed=seed, device=device, resume=resume, save_dtype=torch.bfloat16,
                progress=lambda step, _: say.send(step),
            )  # fmt: skip
        except (QedProbeError, OSError) as error:
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
        if run.process.pid is not None and run.process.is_alive():
            os.kill(run.process.pid, signal.SIGINT)
    for run in running:
        while _heard(run) is not None:
            pass


def _is_finished(directory: Path, config: ModelConfig, recipe: Recipe, seed: int) -> bool:
    try:
        there, made = read_config(directory), read_provenance(directory)
    except CheckpointError:
        return False
    same = there == config and made.get("recipe") == asdict(recipe) and made.get("seed") == seed
    return same and {"learned_at", "fresh_accuracy"} <= made.keys()
