"""One look at all prompts: what is kept of each is a few numbers, so that memory does not grow with their tokens."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.tasks.prompts import LazyPrompts, Prompt, checked


@dataclass(frozen=True, eq=False)
class Survey:
    """What is kept of prompts.

    ``lengths`` and ``fingerprints`` are int64 ``[prompts]``, ``details`` float64 ``[prompts]`` under each name, NaN for a prompt
    that has none; ``roles`` and ``answers`` say whether any prompt has them.
    """

    lengths: NDArray[np.int64]
    fingerprints: NDArray[np.int64]
    details: dict[str, NDArray[np.float64]]
    roles: bool
    answers: bool


def survey(prompts: Sequence[Prompt], vocab_size: int) -> Survey:
    """Make, check and measure each prompt once; raises InputError as ``checked`` does."""
    lengths, fingerprints = array("q"), array("q")
    details: dict[str, array[float]] = {}
    roles = answers = False
    for index, prompt in enumerate(checked(prompts, vocab_size)):
        lengths.append(len(prompt.tokens))
        fingerprints.append(prompt.fingerprint)
        for name in prompt.details:
            details.setdefault(name, array("d", [math.nan]) * index)
        for name, values in details.items():
            values.append(prompt.details.get(name, math.nan))
        roles |= prompt.roles is not None
        answers |= prompt.answer is not None
    columns = {name: np.array(values) for name, values in details.items()}
    return Survey(np.array(lengths), np.array(fingerprints), columns, roles, answers)


def unchanged(prompts: Sequence[Prompt], fingerprints: NDArray[np.int64]) -> Sequence[Prompt]:
    """The same prompts; asking for one raises InputError if it is no longer what was surveyed."""

    def make(index: int) -> Prompt:
        prompt = prompts[index]
        if prompt.fingerprint != fingerprints[index]:
            raise InputError(
                f"prompt {index + 1}: expected the tokens that it had at first, found others; its source has changed"
            )
        return prompt

    return LazyPrompts(len(prompts), make)
