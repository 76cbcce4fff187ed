"""All that a claim about e needs of any number of tokens, in memory that does not grow with them.

Everything is an integer count, an extreme or a list of the worst, so that it comes out the same whatever the order in which the
tokens came and however they were shared out. It is kept where the records are made, layer by layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.analyses.blocks import NOWHERE
from qed_probe.analyses.bounds import eigenvalue_bounds
from qed_probe.analyses.inputs import main_edit, other_edits
from qed_probe.eigen.claims import Claim
from qed_probe.kernels import Mixer

BINS, WIDTH = 4096, 2.0**-9
"""Bins of each quantity, and the width of one of e; sizes have 16 an octave, their float's bits but for the last 19."""
MARGINS = (1e-3, 1e-2, 1e-1)
"""A size above each of these is counted."""
SIZES = ("projection_effect", "norm_excess", "norm_excess_base")
"""|e − e_projected|, and ‖M‖₂ − 1 of the main edit with and without the added direction."""
WORST = 20
"""Tokens and heads of each claim that are kept by name."""
COLUMNS = ("excess", "value", "unit", "token", "layer", "head", "edit")
"""What is kept of each: by how much the bound is passed with either key, the value as used and renormalised, and the place."""
_LIMIT, _STEP, _REST = 2.0**20, 2.0**20, 2.0**32
_LAST = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Subject:
    """What is judged: a mixer of so many edits a token, its layers, λ ``[layer, head]``, the prompts' bounds, the claims."""

    mixer: Mixer
    edits: int
    gate_max: float
    layers: tuple[int, ...]
    lam: NDArray[np.float64]
    cu_seqlens: NDArray[np.int64]
    claims: tuple[Claim, ...]

    @property
    def main(self) -> int:
        """The edit that the records speak of."""
        return main_edit(self.mixer, self.edits)

    @property
    def others(self) -> dict[str, int]:
        """The other edits by name."""
        return other_edits(self.mixer, self.edits)

    @property
    def quantities(self) -> tuple[str, ...]:
        """What is tallied: eigenvalues first, sizes last."""
        return ("eigenvalue", "eigenvalue_unit", *self.others, *SIZES)

    @cached_property
    def theory(self) -> NDArray[np.float64]:
        """Theory's ends for e of the main edit, ``[2, layer, head]``."""
        ends = [eigenvalue_bounds(self.mixer.name, self.gate_max, float(x)) for x in self.lam.flat]
        return np.array(ends).T.reshape(2, *self.lam.shape)

    def ends(self, claim: Claim, layer: int) -> NDArray[np.float64]:
        """The ends of a claim in a layer, ``[2, head]``."""
        at = self.layers.index(layer)
        if claim.quantity == "theory":
            return self.theory[:, at]
        return np.broadcast_to([[claim.low], [claim.high]], self.theory[:, at].shape)

    def values(self, records: Mapping[str, Tensor]) -> Tensor:
        """The quantities ``[quantity, T, H]`` of a layer's records."""
        e, norms = records["eigenvalue"], [records[name] - 1 for name in ("operator_norm", "operator_norm_base")]
        others = [records["edit_eigenvalue"][..., m] for m in self.others.values()]
        return torch.stack([e, records["eigenvalue_unit"], *others, (e - records["eigenvalue_projected"]).abs(), *norms])


class LayerTally:
    """The counts of one layer, on the device of its records."""

    def __init__(self, subject: Subject, layer: int, device: torch.device) -> None:
        self.subject, self.layer = subject, layer
        Q, H, C = len(subject.quantities), subject.lam.shape[1], len(subject.claims)
        self.counts = torch.zeros(Q * BINS, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(6, Q, H, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, Q, H, dtype=torch.int64, device=device)
        self.minimum = torch.full((Q, H), torch.inf, device=device)
        self.maximum = torch.full((Q, H), -torch.inf, device=device)
        self.first_nonfinite = torch.full((Q,), NOWHERE, dtype=torch.int64, device=device)
        self.violations = torch.zeros(C, 2, H, dtype=torch.int64, device=device)
        self.rounding = torch.full((C,), -torch.inf, dtype=torch.float64, device=device)
        self.theory = torch.tensor(subject.theory[:, subject.layers.index(layer)], device=device)
        ends = np.stack([subject.ends(claim, layer) for claim in subject.claims])
        self.ends = torch.tensor(ends, device=device)[..., None]

    def reduce(self, x: Tensor, tokens: Tensor) -> None:
        """Add quantities ``[quantity, T, H]`` of these packed tokens."""
        e = len(self.subject.quantities) - len(SIZES)
        good = x.isfinite()
        finite = x.where(good, 0)
        signed, sizes = finite[:e], finite[e:]
        beyond = torch.stack([signed < 0, signed > 1, signed.abs() > 1]), torch.stack([sizes > margin for margin in MARGINS])
        outside = torch.zeros_like(good)
        outside[:2] = (finite[:2].double() < self.theory[0]) | (finite[:2].double() > self.theory[1])
        self.numbers += torch.cat([torch.stack([good, ~good, outside & good]), torch.cat(beyond, 1)]).sum(2)
        bins = torch.cat([_bins(signed), _octaves(sizes)]) + BINS * torch.arange(len(x), device=x.device)[:, None, None]
        self.counts.scatter_add_(0, bins.flatten(), good.flatten().long())
        scaled = finite.double().clamp(-_LIMIT, _LIMIT) * _STEP
        whole = scaled.floor()
        self.sums += torch.stack([whole, (scaled - whole) * _REST]).long().sum(2)
        self.minimum = torch.minimum(self.minimum, x.where(good, torch.inf).amin(1))
        self.maximum = torch.maximum(self.maximum, x.where(good, -torch.inf).amax(1))
        place = tokens[:, None] * x.shape[2] + torch.arange(x.shape[2], device=x.device)
        self.first_nonfinite = torch.minimum(self.first_nonfinite, place.where(~good, NOWHERE).flatten(1).amin(1))

    def judge(self, index: int, records: Mapping[str, Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hold a claim against these tokens; the real violations of each token, and the worst, as ``COLUMNS``.

        A violation is real where it is there with the key as used and with the key renormalised.
        """
        claim, (low, high) = self.subject.claims[index], self.ends[index]
        values = claim.values(self.subject.mixer, records)
        used, alone = (torch.maximum(low - x.double(), x.double() - high) for x in values)
        lasting = torch.minimum(used, alone)
        violated, real = (x >= 0 if claim.strict else x > 0 for x in (used, lasting))
        self.violations[index] += torch.stack([violated, real]).sum((1, 3))
        self.rounding[index] = torch.maximum(self.rounding[index], used.where(violated & ~real, -torch.inf).max())
        return real.sum((1, 2)), self._worst(lasting, values, tokens)

    def _worst(self, excess: Tensor, values: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """The largest excesses of ``[T, H, edits]``, of equal ones the first: one key of 63 bits each has no equals."""
        _, H, M = excess.shape
        size = excess.flatten().float() + 0.0  # of the zeros only the positive one
        bits = size.view(torch.int32).long()
        place = torch.arange(len(size), device=size.device)
        key = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 31) + (_LAST - place)
        best = key.topk(min(WORST, len(size))).indices
        head, edit = best // M % H, best % M if M > 1 else torch.full_like(best, self.subject.main)
        rows = [size[best], *(x.flatten()[best] for x in values), tokens[best // (M * H)], torch.full_like(best, self.layer)]
        return torch.stack([row.double() for row in (*rows, head, edit)])


class Tally:
    """A run's layers, its prompts, and the worst of each claim."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._layers: dict[int, LayerTally] = {}
        self.worst = [np.empty((len(COLUMNS), 0)) for _ in subject.claims]
        self._waiting: list[tuple[int, Tensor]] = []
        self._bounds: dict[torch.device, Tensor] = {}
        self._violations: dict[torch.device, Tensor] = {}
        self.prompt_tokens = np.zeros(len(subject.cu_seqlens) - 1, np.int64)

    def layer(self, layer: int, device: torch.device | str = "cpu") -> LayerTally:
        """The counts of a layer, which are on the device of its first records."""
        if layer not in self._layers:
            self._layers[layer] = LayerTally(self.subject, layer, torch.device(device))
        return self._layers[layer]

    def add(self, layer: int, tokens: Tensor, records: Mapping[str, Tensor]) -> None:
        """Add a layer's records ``[T, H]``, those of edits ``[T, H, M]``, of the packed tokens ``[T]`` on the same device."""
        device, claims = tokens.device, range(len(self.subject.claims))
        kept = self.layer(layer, device)
        if device not in self._bounds:
            self._bounds[device] = torch.from_numpy(self.subject.cu_seqlens).to(device)
            self._violations[device] = torch.zeros(len(claims), len(self.prompt_tokens), dtype=torch.int64, device=device)
        prompts = torch.searchsorted(self._bounds[device], tokens, right=True) - 1
        if layer == self.subject.layers[0]:
            self.prompt_tokens += np.bincount(prompts.cpu().numpy(), minlength=len(self.prompt_tokens))
        kept.reduce(self.subject.values(records), tokens)
        for index in claims:
            real, worst = kept.judge(index, records, tokens)
            self._violations[device][index].index_add_(0, prompts, real)
            self._waiting.append((index, worst))
        if len(self._waiting) >= 256:
            self.settle()

    def settle(self) -> None:
        """Take over the worst that wait on their devices, of each claim ``COLUMNS`` in order."""
        for claim, before in enumerate(self.worst):
            rows = np.concatenate([before, *(x.cpu().numpy() for index, x in self._waiting if index == claim)], 1)
            self.worst[claim] = rows[:, np.lexsort([*rows[:2:-1], -rows[0]])[:WORST]]
        self._waiting = []

    @property
    def prompt_violations(self) -> NDArray[np.int64]:
        """Real violations by claim and prompt."""
        found = np.zeros((len(self.subject.claims), len(self.prompt_tokens)), np.int64)
        for counts in self._violations.values():
            found += counts.cpu().numpy()
        return found


def edges(quantity: str) -> NDArray[np.float64]:
    """The ends of a quantity's bins, ``[BINS + 1]``; those of e hold their upper end, those of sizes their lower one."""
    if quantity not in SIZES:
        inner = (np.arange(1, BINS) - BINS // 2) * WIDTH
        return np.array([-np.inf, *inner, np.inf])
    bits = np.minimum(np.arange(BINS + 1, dtype=np.int64) << 19, 0x7F800000)
    found: NDArray[np.float64] = bits.astype(np.int32).view(np.float32).astype(np.float64)
    return found


def mean(
    high: NDArray[np.int64], low: NDArray[np.int64], n: NDArray[np.int64], axes: tuple[int, ...] = ()
) -> NDArray[np.float64]:
    """The mean of values whose sum is high · 2⁻²⁰ + low · 2⁻⁵², taken together over ``axes``; NaN where there is none.

    Values beyond ±2²⁰ count as these.
    """
    whole, rest, count = (x.astype(object).sum(axis=axes) if axes else x.astype(object) for x in (high, low, n))

    def one(a: int, b: int, n: int) -> float:
        return (a * int(_REST) + b) / (int(_REST * _STEP) * n) if n else np.nan

    found: NDArray[np.float64] = np.vectorize(one, otypes=[np.float64])(whole, rest, count)
    return found


def _bins(e: Tensor) -> Tensor:
    return ((e / WIDTH).ceil() + (BINS // 2 - 1)).clamp(0, BINS - 1).long()


def _octaves(size: Tensor) -> Tensor:
    return (size.clamp(min=0).abs().view(torch.int32) >> 19).long()
