"""Retrieval by length, and loss, of any number of checkpoints over the same samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.evaluation.answers import read_answers, read_losses
from qed_probe.models.checkpoint import find_weights, read_provenance
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import enough_memory, find_device, find_dtype
from qed_probe.models.foreign.description import Description
from qed_probe.models.intervention import UNCHANGED, Intervention, check_change, intervene
from qed_probe.models.language import LanguageModel
from qed_probe.models.model import Model
from qed_probe.models.opening import describe, open_model
from qed_probe.store.outcomes import KEY, make_outcomes
from qed_probe.tasks import TASKS, Prompt, task_prompts, token_prompts

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOGETHER = {"cuda": 1 << 18}
TOGETHER_ELSEWHERE = 1 << 13
"""Tokens a pass, or one sample."""

Configs = Mapping[str, ModelConfig | Description]

Progress = Callable[[int, int, str], None]
"""Called with the tokens done, their total, and the checkpoint."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one length: ``tokens`` int32 ``[N, T]``, their ``answer`` last, and ``depth`` and ``fingerprint`` of each."""

    tokens: NDArray[np.int32]
    answer: int
    depth: NDArray[np.float64]
    fingerprint: NDArray[np.int64]


def evaluate(
    checkpoints: Sequence[str | Path],
    *,
    task: str = "niah",
    lengths: Sequence[int] = LENGTHS,
    samples: int = 500,
    seed: int = 0,
    tokens: str | Path | None = None,
    changes: Sequence[Intervention] = (UNCHANGED,),
    device: str = "cpu",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> xr.Dataset:
    """What each checkpoint answers to the same samples of a task at each length, one row of outcomes a sample.

    The samples are those of ``task_prompts`` with this seed. With ``tokens``, a ``.npy`` file of ids ``[T]`` or ``[N, T]``, the
    task is ``tokens``: its rows are the samples, and there are losses alone, so that a phase would be of nothing. Each of
    ``changes`` is made in turn. Raises InputError for what cannot be run and for checkpoints that outcomes could not tell apart,
    and CheckpointError.
    """
    _check(checkpoints, changes)
    if tokens is not None and (phases := {change.phase for change in changes} - {UNCHANGED.phase}):
        raise InputError(f"phase: expected {UNCHANGED.phase}, as tokens have no answer, found {', '.join(sorted(phases))}")
    place, kind = find_device(device), find_dtype(dtype)
    configs = {str(path): describe(path, trust_remote_code=trust_remote_code) for path in checkpoints}
    _check_changes(configs, changes)
    asked = task if tokens is None else "tokens"
    abouts = {path: _about(path, config, asked) for path, config in configs.items()}
    _check_apart(abouts)
    of_length = _samples(configs, task, lengths, samples, seed, tokens)
    tables = []
    total = sum(part.tokens.size for part in of_length) * len(checkpoints) * len(changes)
    done = 0
    for path, about in abouts.items():
        model = open_model(path, device=place, dtype=kind, trust_remote_code=trust_remote_code)
        for change, part in product(changes, of_length):
            tables.append(make_outcomes(about | _columns(change) | _outcomes(model, part, change)))
            done += part.tokens.size
            if progress is not None:
                progress(done, total, path)
        del model  # before the next one is loaded
    outcomes: xr.Dataset = xr.concat(tables, "sample", combine_attrs="override")
    return outcomes


def _columns(change: Intervention) -> dict[str, Any]:
    if not change.changes:
        return {}
    how = {"strength": change.strength, "direction": change.direction, "mode": change.mode}
    return how | {"at": change.place, "phase": change.phase}


def _outcomes(model: Model, samples: Samples, change: Intervention) -> dict[str, Any]:
    """One length of one model: a column, or what all its rows share, under each name."""
    (n, T), answer = samples.tokens.shape, samples.answer
    together = max(TOGETHER.get(model.device.type, TOGETHER_ELSEWHERE) // T, 1)
    written, losses = [], []
    for part in np.split(samples.tokens, range(together, n, together)):
        tokens = torch.from_numpy(part.astype(np.int64)).to(model.device)
        with enough_memory(f"{len(part)} samples of {T} tokens, in one pass"):
            if isinstance(model, LanguageModel):
                intervene(model, change.during("prompt"))
            if isinstance(model, LanguageModel) and answer:
                said, nll = read_answers(model, tokens, answer, partial(intervene, model, change.during("answer")))
                written.append(said.cpu().numpy())
            else:
                nll = read_losses(model, tokens)
            losses.append(np.stack([nll.mean(1).cpu().numpy(), nll[:, T - 1 - answer :].mean(1).cpu().numpy()], 1))
    loss, answer_loss = np.concatenate(losses).astype(np.float64).T
    found: dict[str, Any] = {"length": T, "index": np.arange(n), "depth": samples.depth, "fingerprint": samples.fingerprint}
    if not answer:
        return found | {"loss": loss}
    expected, predicted = samples.tokens[:, -answer:], np.concatenate(written)
    found |= {"loss": loss, "answer_loss": answer_loss, "correct": (expected == predicted).all(1)}
    return found | {"answer": _text(expected), "prediction": _text(predicted)}


def _text(rows: NDArray[np.integer]) -> NDArray[np.object_]:
    return np.array([row.astype(np.uint8).tobytes().decode("utf-8", "backslashreplace") for row in rows], object)


def _samples(
    configs: Configs, task: str, lengths: Sequence[int], samples: int, seed: int, tokens: str | Path | None
) -> list[Samples]:
    if tokens is not None:
        found = _packed(token_prompts(tokens, min(config.vocab_size for config in configs.values())), 0)
        if found.tokens.shape[1] < 2:
            raise InputError(f"expected at least 2 tokens a row, as the first is only ever read, found 1 in {tokens}")
        return [found]
    for path, config in configs.items():
        if not isinstance(config, ModelConfig) or config.tokenizer != "bytes":
            raise InputError(f"{path}: expected a model over bytes for the task {task!r}, found one over other tokens")
    if len(set(lengths)) < len(lengths) or not lengths:
        raise InputError(f"lengths: expected some that differ, found {', '.join(map(str, lengths)) or 'none'}")
    return [_packed(task_prompts(task, length, samples, seed), TASKS[task].answer) for length in lengths]


def _packed(prompts: Sequence[Prompt], answer: int) -> Samples:
    # A prompt at a time: its roles take ten times the room of the tokens that are kept.
    rows = [(p.tokens.astype(np.int32), p.details.get("depth", math.nan), p.fingerprint) for p in prompts]
    tokens, depth, fingerprint = zip(*rows, strict=True)
    return Samples(np.stack(tokens), answer, np.array(depth), np.array(fingerprint))


def _about(path: str, config: ModelConfig | Description, task: str) -> dict[str, Any]:
    """What all outcomes of a checkpoint share; when it learned is known of the task that it was trained on alone."""
    made, used = {}, {}
    if isinstance(config, ModelConfig):
        find_weights(path)  # which are read when it is this one's turn
        made, used = read_provenance(path), config.used()
    recipe = made["recipe"] if isinstance(made.get("recipe"), dict) else {}
    return {
        "model": Path(path).resolve().name,
        "arm": config.mixer,
        "seed": _count(made.get("seed"), -1),
        "lambda_max": used.get("lambda_max", math.nan),
        "task": task,
        "trained_length": _count(recipe.get("length"), 0),
        "learned_at": _count(made.get("learned_at"), -1) if recipe.get("task") == task else -1,
    }


def _count(value: object, unknown: int) -> int:
    """What a provenance says, which anybody may have written, if it can be meant."""
    return value if type(value) is int and 0 <= value < 1 << 63 else unknown


def _check_apart(abouts: Mapping[str, Mapping[str, Any]]) -> None:
    """Answers are told apart by arm and seed, as far as that is known; all else by the model's name too."""
    seen: dict[str, str] = {}
    for path, about in abouts.items():
        names = KEY if about["task"] == "tokens" or about["seed"] < 0 else ("arm", "seed", "lambda_max")
        key = ", ".join(f"{name} {about[name]}" for name in names if name in about)
        if key in seen:
            raise InputError(f"expected checkpoints that outcomes can tell apart, found {seen[key]} and {path}, both {key}")
        seen[key] = path


def _check_changes(configs: Configs, changes: Sequence[Intervention]) -> None:
    for (path, config), change in product(configs.items(), changes):
        if isinstance(config, ModelConfig):
            try:
                check_change(config, change)
            except InputError as error:
                raise InputError(f"{path}: {error}") from error
        elif change != UNCHANGED:
            raise InputError(f"{path}: expected a model of this package, in which something can be changed, found {config.mixer}")


def _check(checkpoints: Sequence[str | Path], changes: Sequence[Intervention]) -> None:
    names = [str(path) for path in checkpoints]
    if not names or len(set(names)) < len(names):
        raise InputError(f"checkpoints: expected some that differ, found {', '.join(names) or 'none'}")
    if not changes or len(set(changes)) < len(changes):
        raise InputError(f"changes: expected some that differ, found {len(changes)} of which {len(set(changes))} do")
