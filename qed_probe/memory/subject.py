"""What the tables of a run are about, and what each of them is made by."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import Mixer
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store.schema import Variable

PLAIN = "text"
"""The role of a token where the task knows none."""


@dataclass(frozen=True)
class Subject:
    """A mixer's layers and heads, and the prompts that they see.

    ``names`` are the roles there are, ``roles`` ``[T]`` of each prompt the index of each token's; ``chosen`` is, by prompt, the
    token whose read predicts the answer's first token, the last one where there is no answer. ``texts`` are those of the first
    prompt's tokens, None where they are not known.
    """

    mixer: Mixer
    layers: tuple[int, ...]
    heads: int
    names: tuple[str, ...]
    roles: tuple[NDArray[np.int64], ...]
    chosen: tuple[int, ...]
    texts: tuple[str, ...] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(map(len, self.roles))

    def at(self, layer: LayerInputs) -> int:
        """The place of a layer among all."""
        return self.layers.index(layer.index)


class Part(Protocol):
    """One of the tables: sees each layer's inputs over some prompts once, and says what they come to."""

    def __init__(self, subject: Subject) -> None:
        """Begin with nothing."""

    def add(self, layer: LayerInputs) -> None:
        """Work through one layer's prompts, all of them finite."""

    def table(self) -> xr.Dataset:
        """Variables with their words, along ``layer``, ``head`` and dims of their own; empty where the mixer has none of it."""


def subject_of(
    mixer: Mixer,
    layers: tuple[int, ...],
    heads: int,
    prompts: Iterable[tuple[int, NDArray[np.str_] | None]],
    texts: Sequence[str] | None = None,
) -> Subject:
    """``prompts`` are the length of each and its tokens' roles, ``texts`` those of the first one's tokens."""
    lists = [np.full(length, PLAIN) if roles is None else np.where(roles == "", PLAIN, roles) for length, roles in prompts]
    names = tuple(dict.fromkeys(str(name) for roles in lists for name in dict.fromkeys(roles.tolist())))
    number = {name: i for i, name in enumerate(names)}
    numbered = tuple(np.array([number[str(name)] for name in roles.tolist()], np.int64) for roles in lists)
    chosen = tuple(map(_predicts_answer, lists))
    return Subject(mixer, layers, heads, names, numbered, chosen, None if texts is None else tuple(texts))


def _predicts_answer(roles: NDArray[np.str_]) -> int:
    answer = np.flatnonzero(roles == "answer")
    return int(answer[0]) - 1 if len(answer) and answer[0] else len(roles) - 1


def row(name: str, dims: tuple[str, ...], long_name: str, formula: str = "", units: str = "1") -> Variable:
    """One variable of a table, whole numbers if it is a count."""
    return Variable(name, dims, "int64" if units == "count" else "float64", units, long_name, formula)


def lag_bins(longest: int) -> NDArray[np.int64]:
    """The shortest lag of each bin: 0, 1, 2, 4, 8 … up to ``longest``."""
    return np.array([0, *(1 << np.arange(max(longest, 1).bit_length()))][: 1 + longest.bit_length()], np.int64)


def bin_of(lags: Tensor) -> Tensor:
    """Which of ``lag_bins`` lags lie in."""
    return torch.frexp(lags.double()).exponent.long()  # a GPU's log2 is not exact
