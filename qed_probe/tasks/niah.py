"""S-NIAH-1: one "special magic number" in a haystack of repeated sentences, over bytes.

The wording is that of RULER's ``niah_single_1`` (arXiv 2404.06654; NVIDIA/RULER, scripts/data/synthetic/niah.py), with its
singular for one needle and one question: a line of five noise sentences repeated, the needle on a line of its own, a key of two
words, a number of seven digits. Of our own are the word lists, and that a sample has exactly the length that was asked for: the
haystack is a window around the needle into an endless one, whole lines next to the needle and a cut one at either end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.tasks.prompts import LazyPrompts, Prompt

DIGITS = 7
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is "
)
_ADJECTIVES = (
    "able agile amber ample azure bold brave brisk broad calm candid clean clever cosy crisp curly daring deep eager early "
    "exact fancy fine fond frosty gentle glad golden grand handy happy humble ideal jolly keen kind lively loyal lucid "
    "merry mild neat noble quick quiet rapid silver sunny tidy vivid"
)
_NOUNS = (
    "acorn anchor apple arrow badge basket beacon bottle bridge candle canyon carpet castle cedar cherry cloud coral cradle "
    "dolphin engine falcon feather forest garden glacier hammer harbor island jacket kettle ladder lantern meadow mirror "
    "needle orchard paper pebble pencil pepper pillow planet ribbon river saddle shelter ticket tunnel violin window"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


@dataclass(frozen=True)
class _Sample:
    text: bytes
    needle: slice
    question: int
    depth: float


def niah_prompts(length: int, samples: int, seed: int, *, depth: float | None = None) -> Sequence[Prompt]:
    """Fresh samples of ``length`` bytes, each made when it is asked for, the seven digits of the answer included as the last.

    ``depth`` in [0, 1] is the share of the noise that comes before the needle, drawn uniformly unless given. Sample i depends on
    ``length``, ``seed``, i and ``depth`` alone. Roles are noise, needle, question (the opening instruction included) and
    answer; details are length and depth. Raises InputError for a length below the shortest possible, no samples, a negative seed
    or a depth outside [0, 1].
    """
    _check(length, samples, seed, depth)
    return LazyPrompts(samples, lambda index: _prompt(_sample(length, (seed, index), depth)))


def niah_tokens(length: int, indices: Iterable[int], seed: int) -> NDArray[np.int64]:
    """Samples to train on, ``[samples, length]``: an endless stream for each seed, apart from that of ``niah_prompts``.

    Raises InputError for a length below the shortest possible or a negative seed.
    """
    _check(length, 1, seed, None)
    texts = b"".join(_sample(length, (seed, index, 1), None).text for index in indices)
    return np.frombuffer(texts, np.uint8).reshape(-1, length).astype(np.int64)


def shortest() -> int:
    """The least length that holds every sample: no noise, the longest key."""
    key = f"{max(ADJECTIVES, key=len)}-{max(NOUNS, key=len)}"
    return len(INSTRUCTION) + len(NEEDLE.format(key=key, value="0" * DIGITS)) + len(QUESTION.format(key=key)) + DIGITS


def _sample(length: int, entropy: tuple[int, ...], depth: float | None) -> _Sample:
    rng = np.random.default_rng(entropy)
    adjective, noun = rng.integers(len(ADJECTIVES)), rng.integers(len(NOUNS))
    value = str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))
    depth = rng.random() if depth is None else depth
    key = f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"
    needle, question = NEEDLE.format(key=key, value=value), QUESTION.format(key=key)
    noise = length - len(INSTRUCTION) - len(needle) - len(question) - DIGITS
    before = round(depth * noise)
    start = len(INSTRUCTION) + before
    text = INSTRUCTION + _noise(before, NOISE + "\n", end=True) + needle + _noise(noise - before, "\n" + NOISE) + question + value
    return _Sample(text.encode(), slice(start, start + len(needle)), length - DIGITS - len(question), depth)


def _noise(size: int, line: str, *, end: bool = False) -> str:
    """The first, or the last, ``size`` characters of a line repeated."""
    lines = line * -(-size // len(line))
    return lines[len(lines) - size :] if end else lines[:size]


def _prompt(sample: _Sample) -> Prompt:
    length = len(sample.text)
    answer, needle = slice(length - DIGITS, length), sample.needle
    parts = ["question", "noise", "needle", "noise", "question", "answer"]
    ends = [len(INSTRUCTION), needle.start, needle.stop, sample.question, answer.start, length]
    roles = np.repeat(parts, np.diff(ends, prepend=0))
    tokens = np.frombuffer(sample.text, np.uint8).astype(np.int64)
    return Prompt(tokens, roles, answer, {"length": float(length), "depth": float(sample.depth)})


def _check(length: int, samples: int, seed: int, depth: float | None) -> None:
    if length < shortest():
        raise InputError(f"expected a length of at least {shortest()} bytes, the shortest needle prompt; found {length}")
    if samples < 1:
        raise InputError(f"expected at least one sample, found {samples}")
    if seed < 0:
        raise InputError(f"expected a seed of at least 0, found {seed}")
    if depth is not None and not 0 <= depth <= 1:
        raise InputError(f"expected a depth from 0 to 1, found {depth}")
