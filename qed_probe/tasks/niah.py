"""S-NIAH: one "special magic number", or UUID, in a haystack, over bytes.

The wording is that of RULER's ``niah_single_1`` to ``_3`` (arXiv 2404.06654; NVIDIA/RULER, scripts/data/synthetic/niah.py), with
its singular for one needle and one question: a haystack in lines, the needle on a line of its own, a key of two words, a value.
``niah`` has a line of five noise sentences repeated and a number of seven digits, as RULER's first; ``niah-2`` prose and a
number, ``niah-3`` prose and a UUID of 36 characters, as its second and third. RULER's prose is that of essays, here it is made by
``prose`` in their place. Of our own are the word lists, too, and that a sample has exactly the length that was asked for: the
haystack is a window around the needle into an endless one, whole lines next to the needle and a cut one at either end. Of the
same seed and index, all three have the same key, and the first two the same number and depth.

Roles are noise, needle, question (the opening instruction included) and answer; details are length and depth, which is drawn
uniformly unless given.
"""

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat

import numpy as np

from qed_probe.tasks.prose import prose
from qed_probe.tasks.samples import DIGITS, LONGEST_KEY, NOISE, Sample, Task, key, lines_after, lines_before, number

INSTRUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is "
)
UUID = 36

Lines = Callable[[np.random.Generator], Iterator[str]]


def _noise(rng: np.random.Generator) -> Iterator[str]:
    return repeat(NOISE)


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _draw(
    length: int,
    rng: np.random.Generator,
    depth: float | None,
    *,
    kind: str,
    make: Callable[[np.random.Generator], str],
    haystack: Lines,
) -> Sample:
    words = {"kind": kind, "key": key(rng), "value": make(rng)}
    depth = rng.random() if depth is None else depth
    opening, needle, question = (template.format(**words) for template in (INSTRUCTION, NEEDLE, QUESTION))
    noise = length - len(opening) - len(needle) - len(question) - len(words["value"])
    before = round(depth * noise)
    lines = haystack(rng)
    parts = [("question", opening), ("noise", lines_before(before, lines)), ("needle", needle)]
    parts += [("noise", lines_after(noise - before, lines)), ("question", question), ("answer", words["value"])]
    return Sample(parts, {"depth": float(depth)})


def _shortest(kind: str, answer: int) -> int:
    """No noise, the longest key."""
    words = {"kind": kind, "key": LONGEST_KEY, "value": "0" * answer}
    return sum(len(template.format(**words)) for template in (INSTRUCTION, NEEDLE, QUESTION)) + answer


def _task(name: str, kind: str, answer: int, make: Callable[[np.random.Generator], str], haystack: Lines) -> Task:
    return Task(name, answer, partial(_shortest, kind, answer), partial(_draw, kind=kind, make=make, haystack=haystack))


NIAH = (
    _task("niah", "number", DIGITS, number, _noise),
    _task("niah-2", "number", DIGITS, number, prose),
    _task("niah-3", "uuid", UUID, _uuid, prose),
)
