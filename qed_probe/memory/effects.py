"""How much of what an added direction does is immediate and how much lasting, by lag, layer, head and role."""

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from qed_probe.memory.passes import over
from qed_probe.memory.split import CONVENTIONS, PARTS, Split, Trajectories, norms
from qed_probe.memory.subject import Subject, lag_bins, row
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store import whole

SAMPLED, TOGETHER, LEAST = 512, 1 << 15, 64
"""Tokens whose output is split, of a prompt and of all together at most, and of a prompt at least: one, at random, of each of as
many equal spans."""
_ROLE, _LAG = ("layer", "head", "effect_role"), ("layer", "head", "effect_convention", "effect_lag")
_PART = (*_ROLE, "effect_part")

VARIABLES = {
    x.name: x
    for x in (
        row("effect_lag_share", _LAG, "share of the direction's effect on outputs, by lag of the step", "Σ⟨part_j, Δ⟩/Σ‖Δ‖²"),
        row("effect_lag_n", _LAG[::3], "tokens that so long a lag reaches back from", units="count"),
        row(
            "effect_cancelling", _LAG[:3], "sizes of what single steps do over that of what they do together", "ΣΣ_j‖part_j‖/Σ‖Δ‖"
        ),
        row("effect_share", _PART, "share of the direction's effect on outputs", "Σ⟨part, Δ⟩/Σ‖Δ‖²"),
        row("effect_energy", _ROLE, "size of the direction's effect on outputs, the weight of a share", "Σ‖y − y⁰‖²"),
        row("effect_size", _PART, "size over that of the output without the direction", "Σ‖part‖/Σ‖y⁰‖"),
        row("effect_median", _PART, "median size over that of the output without the direction", "median ‖part‖/‖y⁰‖"),
        row("effect_n", _ROLE[::2], "tokens", units="count"),
        row("effect_silent", _ROLE, "tokens that have no size relative to an output without the direction", "‖y⁰‖ = 0", "count"),
        row("effect_still", _ROLE, "tokens at which the direction has no effect", "y = y⁰", "count"),
    )
}


class Effects:
    """Where outputs of the added direction come from: by lag in both conventions, and as the 2×2 by role."""

    def __init__(self, subject: Subject) -> None:
        layers, heads = len(subject.layers), subject.heads
        self.subject, self.roles = subject, ("all", "chosen", *subject.names)
        self.lags, roles = lag_bins(max(subject.lengths, default=1) - 1), len(self.roles)
        self.by_lag = np.zeros((layers, heads, 2, len(self.lags)))
        self.reach = np.zeros((layers, len(self.lags)), np.int64)
        self.whole = np.zeros((3, layers, heads, 2))  # Σ‖Δ‖², ΣΣ‖part‖ and Σ‖Δ‖ by convention
        self.n = np.zeros((layers, roles), np.int64)
        self.empty = np.zeros((2, layers, heads, roles), np.int64)  # tokens without an output, and without a change
        self.products = np.zeros((layers, heads, roles, 4))
        self.norms = np.zeros((layers, heads, roles, 5))
        self.ratios: list[list[NDArray[np.float32]]] = [[] for _ in subject.layers]
        self.masks: list[list[NDArray[np.bool_]]] = [[] for _ in subject.layers]

    def add(self, layer: LayerInputs) -> None:
        """Split the sampled outputs of each prompt."""
        if self.subject.mixer.direction is None:
            return
        found, at = Trajectories(layer), self.subject.at(layer)
        for prompt, number in enumerate(layer.prompts):
            tokens = self._tokens(number)
            one = found.split(prompt, torch.from_numpy(tokens).to(layer.edits.q.device))
            self._add_lags(at, one, tokens)
            self._add_roles(at, one, tokens, number)

    def _tokens(self, number: int) -> NDArray[np.int64]:
        """The tokens of a prompt that are looked at, the chosen one among them, the same in every layer."""
        length, prompts = self.subject.lengths[number], len(self.subject.lengths)
        ends = np.linspace(0, length, 1 + min(length, SAMPLED, max(TOGETHER // prompts, LEAST))).astype(np.int64)
        drawn = np.random.default_rng(number).integers(ends[:-1], ends[1:])
        return np.union1d(drawn, self.subject.chosen[number])

    def _add_lags(self, at: int, one: Split, tokens: NDArray[np.int64]) -> None:
        shares = one.shares.sum(1).movedim(0, 1).cpu().numpy()
        self.by_lag[at, :, :, : shares.shape[-1]] += shares
        self.reach[at] += (tokens[:, None] >= self.lags).sum(0)
        change = norms(one.change)
        for i, x in enumerate((change**2, one.sizes, change)):
            self.whole[i, at] += x.sum(1).T.cpu().numpy()

    def _add_roles(self, at: int, one: Split, tokens: NDArray[np.int64], number: int) -> None:
        change, role = one.change[0].double(), self.subject.roles[number][tokens]
        of = [np.ones(len(tokens), bool), tokens == self.subject.chosen[number]]
        mask = np.stack([*of, *(role == i for i in range(len(self.subject.names)))], 1)
        parts = torch.cat([one.parts.double(), change[None]])
        products = torch.einsum("iphv,phv->phi", parts, change).cpu().numpy()
        sizes = norms(torch.cat([parts, one.base.double()[None]])).movedim(0, 2).cpu().numpy()
        self.n[at] += mask.sum(0)
        self.products[at] += np.einsum("phi,pr->hri", products, mask)
        self.norms[at] += np.einsum("phi,pr->hri", sizes, mask)
        for i, column in enumerate((4, 3)):
            self.empty[i, at] += np.einsum("ph,pr->hr", sizes[..., column] == 0, mask.astype(np.int64))
        ratios = np.full(sizes[..., :4].shape, np.nan, np.float32)
        np.divide(sizes[..., :4], sizes[..., 4:], out=ratios, where=sizes[..., 4:] > 0, casting="same_kind")
        self.ratios[at].append(ratios)
        self.masks[at].append(mask)

    def table(self) -> xr.Dataset:
        """Shares are NaN of what has no effect, sizes of what has no output."""
        if self.subject.mixer.direction is None:
            return xr.Dataset()
        squares, sizes, changes = self.whole
        shares = np.where(self.reach[:, None, None] > 0, over(self.by_lag, squares[..., None]), np.nan)
        values = {
            "effect_lag_share": shares, "effect_lag_n": self.reach, "effect_cancelling": over(sizes, changes),
            "effect_share": over(self.products, self.products[..., 3:]), "effect_energy": self.products[..., 3],
            "effect_size": over(self.norms[..., :4], self.norms[..., 4:]), "effect_median": self._medians(),
            "effect_n": self.n, "effect_silent": self.empty[0], "effect_still": self.empty[1],
        }  # fmt: skip
        coords = {
            "effect_convention": [*CONVENTIONS], "effect_lag": self.lags, "effect_role": [*self.roles],
            "effect_part": [*PARTS, "total"],
        }  # fmt: skip
        return whole.table(VARIABLES, values, coords, {})

    def _medians(self) -> NDArray[np.float64]:
        found = np.full(self.products.shape, np.nan)
        for at, (ratios, masks) in enumerate(zip(self.ratios, self.masks, strict=True)):
            if not ratios:
                continue
            x, mask = np.concatenate(ratios), np.concatenate(masks)
            for role, head in np.ndindex(len(self.roles), self.subject.heads):
                known = x[mask[:, role] & np.isfinite(x[:, head, 3]), head]
                if len(known):
                    found[at, head, role] = np.median(known, 0)
        return found
