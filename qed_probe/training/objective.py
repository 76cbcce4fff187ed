"""What a step reads and what it minimises."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.evaluation.answers import read_answers
from qed_probe.models.language import LanguageModel
from qed_probe.tasks.table import TASKS, task_prompts
from qed_probe.training.recipes import Recipe


def batch(recipe: Recipe, seed: int, step: int, ids: NDArray[np.integer] | None, vocab_size: int) -> Tensor:
    """The tokens of one step, int64 ``[batch, length]``: a function of recipe, seed, step and file alone.

    Windows of ``ids`` ``[tokens]`` start anywhere with equal chance. Raises InputError for an id outside ``[0, vocab_size)``.
    """
    if ids is None:
        samples = range(step * recipe.batch, (step + 1) * recipe.batch)
        return torch.from_numpy(TASKS[recipe.task].stream(recipe.length, samples, seed))
    starts = np.random.default_rng((seed, step)).integers(len(ids) - recipe.length + 1, size=recipe.batch)
    rows = np.stack([ids[start : start + recipe.length].astype(np.int64) for start in starts])
    outside = np.argwhere((rows < 0) | (rows >= vocab_size))
    if len(outside):
        row, column = outside[0]
        where = f"at token {starts[row] + column} of the token file"
        raise InputError(
            f"expected token ids from 0 to {vocab_size - 1}, the model's vocabulary; found {rows[row, column]} {where}"
        )
    return torch.from_numpy(rows)


def measure(model: LanguageModel, tokens: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """The loss to minimise and its parts over ``tokens`` ``[B, T]``, in nats a token, and the accuracy on answers."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        logits = model.logits(model(tokens)[:, :-1]).float()
    targets = tokens[:, 1:]
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    language = nll.mean()
    if recipe.task == "tokens":
        return {"loss": language}
    task, length = TASKS[recipe.task], targets.shape[1]
    spans = [slice(length - end - task.answer, length - end) for end in task.ends]
    answer = torch.stack([nll[:, span].mean() for span in spans]).mean()
    right = torch.stack([solved(logits[:, span], targets[:, span]).float().mean() for span in spans]).mean()
    return {"loss": recipe.lm_weight * language + answer, "lm_loss": language, "answer_loss": answer, "accuracy": right}


def solved(logits: Tensor, answer: Tensor) -> Tensor:
    """Whether greedy decoding gives the whole answer, ``[B]`` bool, from one pass over prompt and answer, ``[B, n, vocab]``.

    Decoding is fed its own tokens instead of the answer's, but these are the same up to its first mistake, and after that the
    answer is wrong either way.
    """
    return (logits.argmax(-1) == answer).all(-1)


def evaluate_task(model: LanguageModel, task: str, length: int, samples: int, seed: int, batch: int = 64) -> float:
    """The share of a task's fresh prompts whose whole answer greedy decoding gets right, ``batch`` prompts at a time.

    Raises InputError as ``task_prompts`` does.
    """
    tokens = torch.from_numpy(np.stack([prompt.tokens for prompt in task_prompts(task, length, samples, seed)]))
    right, size = 0, TASKS[task].answer
    for part in torch.split(tokens.to(model.embed.weight.device), batch):
        right += int((read_answers(model, part, size)[0] == part[:, -size:]).all(1).sum())
    return right / samples
