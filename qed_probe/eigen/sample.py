"""What a whole step does to the memory: ‖M_tD_t‖₂ − 1 and the spectral radius of M_tD_t, on a sample of tokens and heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from qed_probe.kernels import Edits, Mixer, Tokens, edits
from qed_probe.kernels.mixers import by_token, cut
from qed_probe.models.device import workers

SIZE, TOGETHER = 1024, 128
"""Tokens and heads of the sample, over all layers together, and those whose steps are made at once."""
STEPS = ("step_norm", "step_norm_base", "step_radius", "step_radius_base")


class Sample:
    """Layers, packed tokens and heads drawn beforehand, so that all parts of a run share them."""

    def __init__(self, layers: tuple[int, ...], tokens: int, heads: int) -> None:
        total = len(layers) * tokens * heads
        drawn = np.sort(np.random.default_rng(0).choice(total, min(SIZE, total), replace=False, shuffle=False))
        at, rest = np.divmod(drawn, tokens * heads)
        self.layer, (self.token, self.head) = np.array(layers)[at], np.divmod(rest, heads)
        self._seen: list[tuple[NDArray[np.int64], Edits]] = []
        self._picked: dict[int, list[tuple[NDArray[np.int64], Mixer, Tokens]]] = {}

    def wanted(self, layer: int, begin: int, end: int) -> NDArray[np.int64]:
        """Which of the sample are in this layer and these packed tokens."""
        return np.flatnonzero((self.layer == layer) & (self.token >= begin) & (self.token < end))

    def add(self, layer: int, mixer: Mixer, tokens: Tokens, begin: int) -> None:
        """Add what the sample wants of a layer's packed tokens, the first of which is ``begin``."""
        if len(chosen := self.wanted(layer, begin, begin + tokens.v.shape[1])):
            at = torch.from_numpy(self.token[chosen] - begin).to(tokens.v.device, non_blocking=True)
            self._picked.setdefault(layer, []).append((chosen, mixer, cut(tokens, at)))

    def keep(self, chosen: NDArray[np.int64], ready: Edits) -> None:
        """Keep the edits ``[1, n, H, ...]`` of the tokens at these places of the sample."""
        self._seen.append((chosen, ready))

    @torch.inference_mode()
    def steps(self) -> NDArray[np.float64]:
        """The rows ``STEPS``, ``[4, sample]``, NaN where a token has not come by."""
        found = np.full((len(STEPS), len(self.layer)), np.nan)
        for chosen, (mixer, *_), picked in (zip(*parts, strict=True) for parts in self._picked.values()):
            self.keep(np.concatenate(chosen), edits(mixer, _joined(picked)))
        self._picked.clear()
        if not self._seen:
            return found
        main, places = self._seen[0][1].main, np.concatenate([chosen for chosen, _ in self._seen])
        given = (torch.cat(x) for x in zip(*(self._rows(*one) for one in self._seen), strict=True))
        blocks = zip(*(torch.split(x, TOGETHER) for x in given), strict=True)
        found[:, places] = torch.cat([step_sizes(*block, main=main) for block in blocks], 1).numpy()
        return found

    def _rows(self, chosen: NDArray[np.int64], ready: Edits) -> tuple[Tensor, ...]:
        """What ``step_sizes`` takes of the edits of these tokens, of each the head that the sample wants."""
        at, head = torch.arange(len(chosen)), torch.from_numpy(self.head[chosen])
        return tuple(x[0].cpu()[at, head].double() for x in (ready.k, ready.a, ready.base, ready.g))


def step_sizes(k: Tensor, a: Tensor, base: Tensor, g: Tensor, *, main: int) -> Tensor:
    """The rows ``STEPS`` of n steps S ← Π_m (I − k_m a_mᵀ) Diag(exp g) S, ``[4, n]``, NaN of a step that is not finite.

    ``k`` and ``a`` are ``[n, M, K]``, ``g`` ``[n, K or 1]``; ``base`` ``[n, K]`` is what edit ``main`` reads without the added
    direction.
    """
    without = a.clone()
    without[:, main] = base
    both = [_steps(k, reads, g) for reads in ((a,) if torch.equal(a, without) else (a, without))]
    parts = torch.chunk(torch.cat(both), 4 * torch.get_num_threads())
    with workers() as pool:
        sizes = torch.cat([*pool.map(_sizes, parts)]).view(len(both), -1, 2)
    return torch.stack([sizes[0, :, 0], sizes[-1, :, 0], sizes[0, :, 1], sizes[-1, :, 1]])


def _steps(k: Tensor, reads: Tensor, g: Tensor) -> Tensor:
    """The matrices ``[n, K, K]``; no bit of one hangs on the others, as it could in a product of all."""
    step = torch.diag_embed(g.exp().expand_as(k[:, 0]))
    for m in range(k.shape[1]):
        step = step - k[:, m, :, None] * (reads[:, m, :, None] * step).sum(1, keepdim=True)
    return step


def _sizes(steps: Tensor) -> Tensor:
    """‖step‖₂ − 1 and the spectral radius of each, ``[n, 2]``, NaN where it is not finite."""
    known = steps.isfinite().flatten(1).all(1)
    # With rows and columns of zeros all begin alike in memory, on which LAPACK's last bits may hang.
    rest = -steps.shape[-1] % 8
    steps = pad(steps.where(known[:, None, None], 0), (0, rest, 0, rest))
    sizes = torch.linalg.svdvals(steps)[:, 0] - 1, torch.linalg.eigvals(steps).abs().amax(-1)
    return torch.stack(sizes, -1).where(known[:, None], torch.nan)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    """Tokens of one layer, one part after another."""
    given: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in by_token(parts[0])}
    return replace(parts[0], **given)
