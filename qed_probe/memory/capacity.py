"""How much of a memory is used: the singular values of S at marks, and the ranks that they come to.

With σ the singular values of S_t, the effective rank is exp(−Σ p ln p), p = σ/Σσ (Roy and Vetterli, 2007), and the stable rank
‖S‖²_F/σ₁². Both are 1 for one association, and n for n equal ones with orthogonal keys and values.
"""

import itertools

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from qed_probe.kernels.packing import MARK
from qed_probe.memory.passes import Running, passes
from qed_probe.memory.singular import singular_values
from qed_probe.memory.subject import Subject, row
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store.whole import table

MEASURES = {
    "effective_rank": ("effective rank of the state", "exp(−Σ p ln p), p = σ/Σσ"),
    "stable_rank": ("stable rank of the state", "‖S‖²_F/σ₁²"),
    "capacity_norm": ("norm of the state", "‖S‖_F"),
}
_CELL = ("layer", "head", "capacity_position")


VARIABLES = {
    x.name: x
    for x in (
        *(row(name, _CELL, f"{words}, mean over prompts", formula) for name, (words, formula) in MEASURES.items()),
        *(
            row(f"{name}_variance", _CELL, f"{words}, variance over prompts", f"Var {formula}, over n − 1")
            for name, (words, formula) in MEASURES.items()
        ),
        row("singular_values", (*_CELL, "singular"), "singular values over the largest, mean over prompts", "σ_i/σ₁"),
        row("capacity_n", _CELL, "prompts with such a state", units="count"),
        row("capacity_undefined", _CELL, "of these 0 or not finite: without ranks", units="count"),
        row("capacity_tokens", _CELL[::2], "tokens seen, mean over prompts", units="tokens"),
    )
}


class Capacity:
    """States after 64, 128, 256 … tokens and after each prompt's last, over prompts: singular values, ranks and norms.

    A prompt's last state stands at the next of these positions; ``capacity_tokens`` is the mean of what was really seen.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.positions = MARK << np.arange(slot(max(subject.lengths)) + 1)
        self.values: Running | None = None
        self.tokens = Running((len(subject.layers), len(self.positions)))

    @torch.no_grad()
    def add(self, layer: LayerInputs) -> None:
        """Work through one layer's prompts."""
        at = self.subject.at(layer)
        seen = [(n, a + n - 1) for a, b in itertools.pairwise(layer.ends) for n in self._marks(b - a)]
        found = torch.cat([measure(read.states) for _, _, read in passes(layer, layer.edits, [t for _, t in seen])])
        if self.values is None:
            self.values = Running((*self.tokens.n.shape, *found.shape[1:]))
        for (tokens, _), x in zip(seen, found.cpu().numpy(), strict=True):
            place = at, slot(tokens)
            self.values.add(place, x)
            self.tokens.add(place, np.array(float(tokens)))

    def _marks(self, length: int) -> list[int]:
        return [*(int(n) for n in self.positions if n < length), length]

    def table(self) -> xr.Dataset:
        """What was found."""
        if self.values is None:
            return xr.Dataset()
        mean, variance, ranked = (x.swapaxes(1, 2) for x in (self.values.mean, self.values.variance, self.values.n))
        n, kept = np.repeat(self.tokens.n[:, None], self.subject.heads, 1), len(MEASURES)
        found: dict[str, object] = {"singular_values": mean[..., kept:], "capacity_tokens": self.tokens.mean}
        for i, name in enumerate(MEASURES):
            found |= {name: mean[..., i], f"{name}_variance": variance[..., i]}
        found |= {"capacity_n": n, "capacity_undefined": n - ranked[..., 0]}
        coords = {"capacity_position": self.positions, "singular": 1 + np.arange(mean.shape[-1] - kept)}
        return table(VARIABLES, found, coords, {})


def slot(tokens: int) -> int:
    """The place among 64, 128, 256 … of the first that is no less."""
    return (-(-tokens // MARK) - 1).bit_length()


def measure(states: Tensor) -> Tensor:
    """Effective rank, stable rank, ‖S‖_F and σ_i/σ₁ of ``states`` ``[N, H, K, V]``, ``[N, H, 3 + min(K, V)]``, float64.

    NaN but the norm where S is 0, and all of it where S is not finite.
    """
    finite = states.isfinite().all(-1).all(-1)
    values = singular_values(states.where(finite[..., None, None], 0))
    shares = values / values.sum(-1, keepdim=True)
    rank = torch.special.entr(shares).sum(-1).exp()
    squares = values.square().sum(-1)
    found = torch.cat([torch.stack([rank, squares / values[..., 0].square(), squares.sqrt()], -1), values / values[..., :1]], -1)
    return found.masked_fill(~finite[..., None], torch.nan)
