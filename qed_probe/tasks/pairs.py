"""Pairs of prompts that differ in the needle's value alone: the same length, every other token the same and in its place."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.tasks.niah import NIAH
from qed_probe.tasks.prompts import Prompt
from qed_probe.tasks.samples import Task


@dataclass(frozen=True)
class Pair:
    """A sample, the same with another value in its needle and its answer, and the first token of the question at its end."""

    clean: Prompt
    corrupted: Prompt
    question: int


def needle_pairs(task: str, length: int, samples: int, seed: int) -> Iterator[Pair]:
    """Each sample of ``task_prompts`` beside one with the value of another draw; raises InputError as that does.

    Also for a task that has no single needle.
    """
    tasks = {one.name: one for one in NIAH}
    if task not in tasks:
        raise InputError(f"task: expected one with a needle, {', '.join(tasks)}, found {task!r}")
    return (_pair(tasks[task], i, seed, clean) for i, clean in enumerate(tasks[task].prompts(length, samples, seed)))


def _pair(task: Task, index: int, seed: int, clean: Prompt) -> Pair:
    roles = np.asarray(clean.roles)
    needle, value = np.flatnonzero(roles == "needle"), _bytes(clean.tokens[clean.answer])
    other = _other_value(task, len(clean.tokens), (seed, index), value)
    at = int(needle[0]) + _bytes(clean.tokens[needle]).rindex(value)
    tokens = clean.tokens.copy()
    for start in (at, len(tokens) - task.answer):
        tokens[start : start + task.answer] = np.frombuffer(other, np.uint8)
    question = int(np.flatnonzero((roles == "needle") | (roles == "noise"))[-1]) + 1
    return Pair(clean, replace(clean, tokens=tokens), question)


def _other_value(task: Task, length: int, place: tuple[int, int], value: bytes) -> bytes:
    """The answer of the first further draw at this place of the seed that has another."""
    draws = (task.draw(length, np.random.default_rng((*place, again)), None) for again in count(2))
    return next(found for draw in draws if (found := draw.parts[-1][1].encode("ascii")) != value)


def _bytes(tokens: NDArray[np.int64]) -> bytes:
    return tokens.astype(np.uint8).tobytes()
