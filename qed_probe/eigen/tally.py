"""All that a claim about e needs of any number of tokens, in memory that does not grow with them.

Everything is an integer count, an extreme or a list of the worst, so that it comes out the same whatever the order in which the
tokens came and however they were shared out. It is kept where the records are made.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.eigen.counts import COLUMNS, WORST, Counts, Subject

AT_ONCE, AT_ONCE_ON_GPU = 1 << 17, 1 << 23
"""Tokens, layers and heads together that are counted at once: on a CPU what its caches hold, on a GPU what its memory does."""
PENDING = 64
"""Passes whose worst are left on the device until they are told apart."""
Part = tuple[Tensor, Mapping[str, Tensor]]
"""Packed tokens and their records."""


def _in_order(parts: Sequence[Part]) -> Part:
    """Tokens and records that came in any order, so that of equals the first are kept."""
    tokens, order = torch.cat([part for part, _ in parts]).sort()
    return tokens, {name: torch.cat([records[name] for _, records in parts], 1)[:, order] for name in parts[0][1]}


class Tally:
    """A run's counts, of every device that its layers are on, its prompts, and the worst of each claim."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._counts: list[Counts] = []
        self._waiting: dict[tuple[int, ...], list[Part]] = {}
        self._worst = [np.empty((len(COLUMNS), 0)) for _ in subject.claims]
        self._found: list[list[Tensor]] = [[] for _ in subject.claims]

    @property
    def counts(self) -> list[Counts]:
        """What has been counted, of every device that layers are on."""
        self._count_rest()
        return self._counts

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """The tokens of each prompt that have been added."""
        found: NDArray[np.int64] = sum((x.prompt_tokens.cpu().numpy() for x in self.counts), np.zeros(1, np.int64))
        return np.broadcast_to(found, len(self.subject.cu_seqlens) - 1)

    @property
    def worst(self) -> list[NDArray[np.float64]]:
        """The worst of each claim as rows ``COLUMNS``, of equals the first."""
        self._count_rest()
        self._tell_apart()
        return self._worst

    def _tell_apart(self) -> None:
        """Bring what has been found from the device, and keep the worst of it."""
        for index, found in enumerate(self._found):
            rows = np.concatenate([self._worst[index], *(x.cpu().numpy() for x in found)], 1)
            self._worst[index] = rows[:, np.lexsort([*rows[:2:-1], -rows[0]])[:WORST]]
            found.clear()

    def add(self, layers: tuple[int, ...], tokens: Tensor, records: Mapping[str, Tensor]) -> None:
        """Add these layers' records ``[layer, T, H]``, those of edits ``[layer, T, H, M]``, of the packed tokens ``[T]``.

        All are on one device; a layer never changes its companions. Few tokens wait for more: the programs that count them
        take as long to launch as for many. A GPU is not waited for.
        """
        waiting = self._waiting.setdefault(layers, [])
        waiting.append((tokens, records))
        if sum(len(part) for part, _ in waiting) >= self._at_once(layers, tokens.device):
            self._count(layers)

    def _at_once(self, layers: tuple[int, ...], device: torch.device) -> int:
        """Tokens of these layers that are counted at once."""
        heads: int = self.subject.lam.shape[1]
        return max((AT_ONCE if device.type == "cpu" else AT_ONCE_ON_GPU) // (len(layers) * heads), 1)

    def _count_rest(self) -> None:
        for layers in [*self._waiting]:
            self._count(layers)

    @torch.inference_mode()
    def _count(self, layers: tuple[int, ...]) -> None:
        """Count what is waiting."""
        waiting = self._waiting.pop(layers)
        tokens, records = waiting[0] if len(waiting) == 1 else _in_order(waiting)
        kept = next((counts for counts in self._counts if counts.layers == layers), None)
        if kept is None:
            kept = Counts(self.subject, layers, tokens.device)
            self._counts.append(kept)
        if self.subject.layers[0] in layers:
            kept.add_prompts(tokens)
        step = self._at_once(layers, tokens.device)
        for start in range(0, len(tokens), step):
            at = slice(start, start + step)
            part = {name: x[:, at] for name, x in records.items()}
            kept.reduce(self.subject.values(part), tokens[at])
            for index, found in enumerate(self._found):
                found.append(kept.judge(index, part, tokens[at]))
        if len(self._found[0]) >= PENDING:
            self._tell_apart()
