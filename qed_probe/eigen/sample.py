"""What a whole step does to the memory: ‖M_tD_t‖₂ − 1 and the spectral radius of M_tD_t, on a sample of tokens and heads."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import Edits, Mixer, Tokens, edits

SIZE = 1024
"""Tokens and heads of the sample, over all layers together."""
STEPS = ("step_norm", "step_norm_base", "step_radius", "step_radius_base")


class Sample:
    """Layers, packed tokens and heads drawn beforehand, so that all parts of a run share them."""

    def __init__(self, layers: tuple[int, ...], tokens: int, heads: int) -> None:
        total = len(layers) * tokens * heads
        drawn = np.sort(np.random.default_rng(0).choice(total, min(SIZE, total), replace=False, shuffle=False))
        at, rest = np.divmod(drawn, tokens * heads)
        self.layer, (self.token, self.head) = np.array(layers)[at], np.divmod(rest, heads)
        self._seen: list[tuple[NDArray[np.int64], Edits]] = []

    def wanted(self, layer: int, begin: int, end: int) -> NDArray[np.int64]:
        """Which of the sample are in this layer and these packed tokens."""
        return np.flatnonzero((self.layer == layer) & (self.token >= begin) & (self.token < end))

    def add(self, layer: int, mixer: Mixer, tokens: Tokens, begin: int) -> None:
        """Add what the sample wants of a layer's packed tokens, the first of which is ``begin``."""
        if len(chosen := self.wanted(layer, begin, begin + tokens.v.shape[1])):
            self.keep(chosen, edits(mixer, _picked(tokens, torch.from_numpy(self.token[chosen] - begin))))

    def keep(self, chosen: NDArray[np.int64], ready: Edits) -> None:
        """Keep the edits ``[1, n, H, ...]`` of the tokens at these places of the sample."""
        self._seen.append((chosen, ready))

    def steps(self) -> NDArray[np.float64]:
        """The rows ``STEPS``, ``[4, sample]``, NaN where a token has not come by."""
        found = np.full((len(STEPS), len(self.layer)), np.nan)

        def fill(chosen: NDArray[np.int64], ready: Edits) -> None:
            at, head = torch.arange(len(chosen)), torch.from_numpy(self.head[chosen])
            k, a, base, g = (x[0].cpu()[at, head].double() for x in (ready.k, ready.a, ready.base, ready.g))
            found[:, chosen] = step_sizes(k, a, base, g, main=ready.main).numpy()

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # LAPACK takes one matrix after another, on one core
            for _ in pool.map(fill, *zip(*self._seen, strict=True)) if self._seen else ():
                pass
        return found


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
