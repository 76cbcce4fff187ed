"""The training loop: a batch is a function of its step, so a run can be stopped anywhere and resumed to the same numbers.

On a CPU to the bit; a GPU does not repeat itself to the bit (docs/findings.md).
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qed_probe.errors import CheckFailed, InputError
from qed_probe.models import checkpoint
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import find_device
from qed_probe.models.language import LanguageModel
from qed_probe.models.layers import HeadLinear
from qed_probe.tasks.prompts import open_ids
from qed_probe.tasks.table import TASKS
from qed_probe.training.arms import parameters
from qed_probe.training.objective import batch, evaluate_task
from qed_probe.training.pull import Pull
from qed_probe.training.recipes import Recipe
from qed_probe.training.schedule import wsd
from qed_probe.training.state import PART, Line, Run, log, open_log, restore, save

FRESH = 200
LEARNED = 0.9
"""A batch's accuracy from which on a task counts as learned."""

Progress = Callable[[int, Line], None]
"""Called with the number of steps done and the line that was logged."""


def train(
    config: ModelConfig,
    recipe: Recipe,
    output: str | Path,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    resume: bool = False,
    tokens: str | Path | None = None,
    progress: Progress | None = None,
    save_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Train a model from random weights with AdamW, and keep in ``output`` all that is needed to use it and to go on.

    ``tokens`` is the ``.npy`` file of ids ``[tokens]`` that the task ``tokens`` reads. ``output`` gets config.json and
    model.safetensors (weights in ``save_dtype``), training.pt (the run, float32) and log.jsonl (every line has the loss and its
    parts, the rate, tokens a second, and λ of each layer and head). Ctrl-C saves after the step that is running. Returns the last
    line, the parameters, steps, tokens and seconds, and, if the task has answers, the accuracy of the saved model over 200 fresh
    samples and ``learned_at``, the first logged step whose batch was right to 90 %, 0 if there is none.

    Raises InputError if config, recipe, tokens or device do not fit together, if ``output`` holds something and ``resume`` is
    off, or if it is on and the run there was another one; CheckFailed if the loss is no longer finite.
    """
    began, output = time.perf_counter(), Path(output)
    _check_task(config, recipe, seed, tokens)
    if not resume and _is_taken(output):
        raise InputError(f"expected an output that does not exist yet, found {output}")
    ids = None if tokens is None else _open_tokens(tokens, recipe)
    model = _new_model(config, seed, find_device(device))
    run = Run(recipe, seed, ids, output, save_dtype, model, new_optimizer(model, recipe), Pull(model, recipe))
    if resume:
        restore(run)
    found: dict[str, float] = {"parameters": parameters(config)}
    with _interruptible() as interrupted:
        if not resume:
            save(run)  # from here on there is something to resume
        open_log(run)
        _loop(run, progress, interrupted)
        save(run, **found)
        if recipe.task in TASKS and not interrupted.is_set():
            saved = checkpoint.load(output, device=device)
            found |= {
                "learned_at": next((line["step"] for line in run.lines if line["accuracy"] >= LEARNED), 0),
                "fresh_samples": FRESH,
                "fresh_accuracy": evaluate_task(saved, recipe.task, recipe.length, FRESH, seed),
            }
            save(run, **found)
    if interrupted.is_set():
        raise KeyboardInterrupt
    seen = run.done * recipe.batch * recipe.length
    return run.lines[-1] | found | {"steps": run.done, "tokens": seen, "seconds": time.perf_counter() - began}


def new_optimizer(model: LanguageModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over the model's parameters, in one kernel where it is on a GPU."""
    on_gpu = model.embed.weight.is_cuda
    return torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.rate, betas=(0.9, 0.95), fused=on_gpu)


def parameter_groups(model: LanguageModel, recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW's groups: the weights of linear maps decay, nothing else does; θ takes a faster rate."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | HeadLinear)}
    theta = {id(parameter) for name, parameter in model.named_parameters() if name.endswith(".theta")}
    parameters = list(model.parameters())
    groups = (
        ([p for p in parameters if id(p) in linear], recipe.weight_decay, 1.0),
        ([p for p in parameters if id(p) not in linear | theta], 0.0, 1.0),
        ([p for p in parameters if id(p) in theta], 0.0, recipe.theta_rate_factor),
    )
    return [{"params": ps, "weight_decay": decay, "factor": factor} for ps, decay, factor in groups if ps]


def _loop(run: Run, progress: Progress | None, interrupted: threading.Event) -> None:
    recipe, model = run.recipe, run.model
    since, logged = time.perf_counter(), run.done
    while run.done < recipe.steps and not interrupted.is_set():
        rate = recipe.rate * wsd(run.done, steps=recipe.steps, warmup=recipe.warmup, decay=recipe.decay)
        tokens = batch(recipe, run.seed, run.done, run.ids, model.config.vocab_size).to(model.embed.weight.device)
        measured = step(run, tokens, rate)
        run.done += 1
        if run.done % recipe.log_every and run.done != recipe.steps:
            continue
        line = {"step": run.done} | {name: float(value) for name, value in measured.items()} | {"rate": rate}
        if not math.isfinite(line["loss"]):
            raise CheckFailed(f"expected a finite loss, found {line['loss']} at step {run.done} in {run.output}")
        speed = (run.done - logged) * tokens.numel() / (time.perf_counter() - since)
        since, logged = time.perf_counter(), run.done
        log(run, line | {"tokens_per_second": speed, "lambda": _strengths(model)})
        if progress is not None:
            progress(run.done, run.lines[-1])
        if run.done % recipe.save_every == 0:
            save(run)


def step(run: Run, tokens: Tensor, rate: float) -> dict[str, Tensor]:
    """One optimizer step over a batch, part by part; the batch's means."""
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["factor"]
    run.optimizer.zero_grad(set_to_none=False)
    measured = [run.pull(part) for part in torch.split(tokens, run.recipe.micro_batch)]
    nn.utils.clip_grad_norm_(run.model.parameters(), run.recipe.clip)
    run.optimizer.step()
    return {name: torch.stack([found[name] for found in measured]).mean() for name in measured[0]}


def _strengths(model: LanguageModel) -> dict[str, list[float]]:
    """λ of every head, by layer; empty where the mixer adds no direction."""
    return {str(layer): mixer.lam().tolist() for layer, mixer in model.mixers.items() if mixer.kind.direction is not None}


def _new_model(config: ModelConfig, seed: int, device: torch.device) -> LanguageModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(config).to(device)


def _is_taken(output: Path) -> bool:
    """Whether there is anything; what a killed run had not finished writing is nothing."""
    return output.exists() and (not output.is_dir() or any(path.suffix != PART for path in output.iterdir()))


def _check_task(config: ModelConfig, recipe: Recipe, seed: int, tokens: str | Path | None) -> None:
    if seed < 0:
        raise InputError(f"expected a seed of at least 0, found {seed}")
    if recipe.task not in TASKS:
        if tokens is None:
            raise InputError(f"expected a .npy file of token ids for the task {recipe.task!r}, found none")
        return
    task = TASKS[recipe.task]
    if tokens is not None:
        raise InputError(f"expected no token file for the task {task.name!r}, found {tokens}")
    if config.tokenizer != "bytes":
        raise InputError(f"expected a model with tokenizer 'bytes' for the task {task.name!r}, found {config.tokenizer!r}")
    if recipe.length < task.shortest():
        raise InputError(
            f"expected a length of at least {task.shortest()} bytes for the task {task.name!r}, found {recipe.length}"
        )


def _open_tokens(path: str | Path, recipe: Recipe) -> NDArray[np.integer]:
    ids = open_ids(path)
    if ids.ndim != 1 or len(ids) < recipe.length:
        raise InputError(f"expected one row of at least {recipe.length} ids, found shape {ids.shape} in {path}")
    return ids


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, instead of stopping in the middle of a step; the second one stops at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        interrupted.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
