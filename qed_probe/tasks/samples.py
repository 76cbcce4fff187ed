"""What the tasks over bytes share: samples of a length to the byte, made of parts with roles; noise, keys and numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.tasks.prompts import LazyPrompts, Prompt

DIGITS = 7
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
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
LONGEST_KEY = f"{max(ADJECTIVES, key=len)}-{max(NOUNS, key=len)}"


@dataclass(frozen=True)
class Sample:
    """Parts, each a role and its text, the answer last; and numbers that belong to the whole."""

    parts: Sequence[tuple[str, str]]
    details: dict[str, float]

    @property
    def text(self) -> bytes:
        """All parts, one after another."""
        return "".join(text for _, text in self.parts).encode("ascii")

    def prompt(self) -> Prompt:
        """The bytes as tokens, each with its part's role."""
        tokens = np.frombuffer(self.text, np.uint8).astype(np.int64)
        roles = np.repeat([role for role, _ in self.parts], [len(text) for _, text in self.parts])
        answer = slice(len(tokens) - len(self.parts[-1][1]), len(tokens))
        return Prompt(tokens, roles, answer, {"length": float(len(tokens)), **self.details})


Draw = Callable[[int, np.random.Generator, float | None], Sample]
"""Makes a sample of so many bytes; the depth is drawn too where it is None."""


@dataclass(frozen=True)
class Task:
    """A task over bytes with a known answer of ``answer`` bytes; ``shortest`` is the least length that holds every sample.

    What is trained on is made by ``practice``, where that is not ``draw``. It may ask more than once: ``ends`` says how many
    bytes before the sample's end each answer ends.
    """

    name: str
    answer: int
    shortest: Callable[[], int]
    draw: Draw
    practice: Draw | None = None
    ends: tuple[int, ...] = (0,)

    def prompts(self, length: int, samples: int, seed: int, *, depth: float | None = None) -> Sequence[Prompt]:
        """Fresh samples of ``length`` bytes, each made when it is asked for, the answer included as the last of them.

        ``depth`` in [0, 1] is the share of the noise before what is asked for, drawn unless given. Sample i depends on the task,
        ``length``, ``seed``, i and ``depth`` alone. Raises InputError for a length below the shortest possible, no samples, a
        negative seed or a depth outside [0, 1].
        """
        self._check(length, seed)
        if samples < 1:
            raise InputError(f"expected at least one sample, found {samples}")
        if depth is not None and not 0 <= depth <= 1:
            raise InputError(f"expected a depth from 0 to 1, found {depth}")
        return LazyPrompts(samples, lambda index: self.draw(length, np.random.default_rng((seed, index)), depth).prompt())

    def stream(self, length: int, indices: Iterable[int], seed: int) -> NDArray[np.int64]:
        """Samples to train on, ``[samples, length]``: an endless stream for each seed, apart from that of ``prompts``.

        Raises InputError for a length below the shortest possible or a negative seed.
        """
        self._check(length, seed)
        draw = self.practice or self.draw
        texts = (draw(length, np.random.default_rng((seed, index, 1)), None).text for index in indices)
        return np.frombuffer(b"".join(texts), np.uint8).reshape(-1, length).astype(np.int64)

    def _check(self, length: int, seed: int) -> None:
        if length < self.shortest():
            raise InputError(f"expected a length of at least {self.shortest()} bytes for the task {self.name!r}, found {length}")
        if seed < 0:
            raise InputError(f"expected a seed of at least 0, found {seed}")


def number(rng: np.random.Generator) -> str:
    """Seven digits, the first of them not 0."""
    return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))


def key(rng: np.random.Generator) -> str:
    """An adjective and a noun."""
    adjective, noun = rng.integers(len(ADJECTIVES)), rng.integers(len(NOUNS))
    return f"{ADJECTIVES[adjective]}-{NOUNS[noun]}"


def lines_before(size: int, lines: Iterator[str]) -> str:
    """The last ``size`` characters of lines that end where something else begins: whole lines next to it, a cut one far off."""
    text = "".join(line + "\n" for line in _enough(size, lines))
    return text[len(text) - size :]


def lines_after(size: int, lines: Iterator[str]) -> str:
    """The first ``size`` characters of lines that begin where something else ends."""
    return "".join("\n" + line for line in _enough(size, lines))[:size]


def _enough(size: int, lines: Iterator[str]) -> Iterator[str]:
    while size > 0:
        line = next(lines)
        size -= len(line) + 1
        yield line
