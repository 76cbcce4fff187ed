"""What a whole step does to the memory: ‖M_tD_t‖₂ − 1 and the spectral radius of M_tD_t, on a sample of tokens and heads."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import Edits, Mixer, Tokens, edits
from qed_probe.models.device import workers

SIZE = 1024
"""Tokens and heads of the sample, over all layers together."""
STEPS = ("step_norm", "step_norm_base", "step_radius", "step_radius_base")


class Sample:
    """Layers, packed tokens and heads drawn beforehand, so that all parts of a run share them.

    Their steps are measured on the CPU: while the run goes on where that is on a GPU, else when they are asked for.
    """

    def __init__(self, layers: tuple[int, ...], tokens: int, heads: int) -> None:
        total = len(layers) * tokens * heads
        drawn = np.sort(np.random.default_rng(0).choice(total, min(SIZE, total), replace=False, shuffle=False))
        at, rest = np.divmod(drawn, tokens * heads)
        self.layer, (self.token, self.head) = np.array(layers)[at], np.divmod(rest, heads)
        self._pool = workers()
        self._kept: list[tuple[NDArray[np.int64], Callable[[], Edits]]] = []
        self._measured: list[tuple[NDArray[np.int64], Future[NDArray[np.float64]]]] = []

    def wanted(self, layer: int, begin: int, end: int) -> NDArray[np.int64]:
        """Which of the sample are in this layer and these packed tokens."""
        return np.flatnonzero((self.layer == layer) & (self.token >= begin) & (self.token < end))

    def add(self, layer: int, mixer: Mixer, tokens: Tokens, begin: int) -> None:
        """Add what the sample wants of a layer's packed tokens, the first of which is ``begin``."""
        if len(chosen := self.wanted(layer, begin, begin + tokens.v.shape[1])):
            picked = _picked(tokens, torch.from_numpy(self.token[chosen] - begin))
            self.keep(chosen, lambda: edits(mixer, picked))
            if tokens.v.device.type != "cpu":
                self._measure()

    def keep(self, chosen: NDArray[np.int64], made: Callable[[], Edits]) -> None:
        """Keep what makes the edits ``[1, n, H, ...]`` of the tokens at these places of the sample."""
        self._kept.append((chosen, made))

    def steps(self) -> NDArray[np.float64]:
        """The rows ``STEPS``, ``[4, sample]``, NaN where a token has not come by."""
        found = np.full((len(STEPS), len(self.layer)), np.nan)
        self._measure()
        for chosen, measured in self._measured:
            found[:, chosen] = measured.result()
        self._pool.shutdown()
        return found

    def _measure(self) -> None:
        """Measure what is kept, in the background."""
        self._measured += [(chosen, self._pool.submit(_steps, made, self.head[chosen])) for chosen, made in self._kept]
        self._kept.clear()


@torch.inference_mode()
def _steps(made: Callable[[], Edits], heads: NDArray[np.int64]) -> NDArray[np.float64]:
    """The rows ``STEPS`` of edits ``[1, n, H, ...]``, of one head of each token."""
    ready, at, head = made(), torch.arange(len(heads)), torch.from_numpy(heads)
    k, a, base, g = (x[0].cpu()[at, head].double() for x in (ready.k, ready.a, ready.base, ready.g))
    return step_sizes(k, a, base, g, main=ready.main).numpy()


def step_sizes(k: Tensor, a: Tensor, base: Tensor, g: Tensor, *, main: int) -> Tensor:
    """The rows ``STEPS`` of n steps S ← Π_m (I − k_m a_mᵀ) Diag(exp g) S, ``[4, n]``.

    ``k`` and ``a`` are ``[n, M, K]``, ``g`` ``[n, K or 1]``; ``base`` ``[n, K]`` is what edit ``main`` reads without the added
    direction.
    """
    without = a.clone()
    without[:, main] = base
    found = []
    for reads in (a,) if torch.equal(a, without) else (a, without):
        step = torch.diag_embed(g.exp().expand_as(base))
        for m in range(k.shape[1]):
            step = step - k[:, m, :, None] * (reads[:, m, None] @ step)
        found.append((torch.linalg.matrix_norm(step, 2) - 1, torch.linalg.eigvals(step).abs().amax(-1)))
    (norm, radius), (norm_base, radius_base) = found[0], found[-1]
    return torch.stack([norm, norm_base, radius, radius_base])


def _picked(tokens: Tokens, at: Tensor) -> Tokens:
    given: dict[str, Any] = {
        field.name: x.index_select(1, at.to(x.device, non_blocking=True))
        for field in fields(tokens)
        if field.name not in ("lam", "direction") and isinstance(x := getattr(tokens, field.name), Tensor)
    }
    return replace(tokens, **given)
