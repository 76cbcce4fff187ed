"""What a model writes after a prompt, and how likely it finds what is there."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qed_probe.models.language import Cache, LanguageModel
from qed_probe.models.model import Model

LOGITS = 1 << 26
"""Scores that are held at once."""


@torch.inference_mode()
def read_answers(
    model: LanguageModel, tokens: Tensor, answer: int, between: Callable[[], None] | None = None
) -> tuple[Tensor, Tensor]:
    """What greedy decoding writes in place of the last ``answer`` ≥ 1 tokens, and −ln p of all but the first of ``tokens``.

    ``tokens`` ``[B, T]`` are prompts with their answers. The prompt is read once; from there the model goes on with its own
    tokens, ``[B, answer]``, and apart from that reads the answer, for its part of ``[B, T − 1]``. ``between`` is called in
    between.
    """
    cache = model.new_cache(len(tokens))
    prompt = model(tokens[:, :-answer], cache=cache)
    if between is not None:
        between()
    written = _decode(model, prompt[:, -1], cache.fork(), answer)
    hidden = [prompt] if answer == 1 else [prompt, model(tokens[:, -answer:-1], cache=cache)]
    return written, _surprise(model, torch.cat(hidden, 1), tokens[:, 1:])


@torch.inference_mode()
def log_probability(model: LanguageModel, hidden: Tensor, cache: Cache, answers: Tensor) -> Tensor:
    """Return ln p of ``answers`` ``[B, n]`` after prompts whose last state is ``hidden`` ``[B, hidden]``, ``[B]`` float64.

    ``cache`` is what the prompts have left, and stays as it is.
    """
    states = [hidden[:, None]]
    if answers.shape[1] > 1:
        states.append(model(answers[:, :-1], cache=cache.fork()))
    return -_surprise(model, torch.cat(states, 1), answers).double().sum(1)


@torch.inference_mode()
def read_losses(model: Model, tokens: Tensor) -> Tensor:
    """−ln p of all but the first of ``tokens`` ``[B, T]``, ``[B, T − 1]`` float32."""
    return _surprise(model, model(tokens)[:, :-1], tokens[:, 1:])


def _decode(model: LanguageModel, hidden: Tensor, cache: Cache, count: int) -> Tensor:
    """The likeliest tokens one after another, ``[B, count]``, the first after ``hidden`` ``[B, hidden]``."""
    written = [model.logits(hidden).argmax(-1)]
    while len(written) < count:
        written.append(model.logits(model(written[-1][:, None], cache=cache)[:, -1]).argmax(-1))
    return torch.stack(written, 1)


def _surprise(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    """−ln p of ``targets`` ``[B, T]`` by the scores of ``hidden`` ``[B, T, hidden]``."""
    columns = max(LOGITS // (len(targets) * model.config.vocab_size), 1)
    found = []
    for states, following in zip(torch.split(hidden, columns, 1), torch.split(targets, columns, 1), strict=True):
        logits = model.logits(states).float()
        found.append(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(following))
    return torch.cat(found, 1)
