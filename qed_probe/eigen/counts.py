"""What is counted of the layers whose records are on one device: how it is added to, and what the numbers mean."""

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
from qed_probe.kernels.backend import has_triton

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

    def ends(self, claim: Claim) -> NDArray[np.float64]:
        """The ends of a claim, ``[2, layer, head]``."""
        return self.theory if claim.quantity == "theory" else np.full(self.theory.shape, [[[claim.low]], [[claim.high]]])

    def values(self, records: Mapping[str, Tensor]) -> Tensor:
        """The quantities ``[quantity, layer, T, H]`` of records."""
        e, norms = records["eigenvalue"], [records[name] - 1 for name in ("operator_norm", "operator_norm_base")]
        others = [records["edit_eigenvalue"][..., m] for m in self.others.values()]
        return torch.stack([e, records["eigenvalue_unit"], *others, (e - records["eigenvalue_projected"]).abs(), *norms])


class Counts:
    """The counts of the layers that have their records on one device; all layers at once, as launching a program takes time."""

    def __init__(self, subject: Subject, layers: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self.subject, self.layers = subject, layers
        Q, C, sizes = len(subject.quantities), len(subject.claims), (len(layers), subject.lam.shape[1])
        at = [subject.layers.index(layer) for layer in layers]
        self.counts = torch.zeros(Q * len(layers) * BINS, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(6, Q, *sizes, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, Q, *sizes, dtype=torch.int64, device=device)
        self.minimum = torch.full((Q, *sizes), torch.inf, device=device)
        self.maximum = torch.full((Q, *sizes), -torch.inf, device=device)
        self.first_nonfinite = torch.full((Q, len(layers)), NOWHERE, dtype=torch.int64, device=device)
        self.violations = torch.zeros(C, 2, *sizes, dtype=torch.int64, device=device)
        self.prompt_violations = torch.zeros(C, len(subject.cu_seqlens) - 1, dtype=torch.int64, device=device)
        self.rounding = torch.full((C,), -torch.inf, dtype=torch.float64, device=device)
        self.prompt_tokens = torch.zeros(len(subject.cu_seqlens) - 1, dtype=torch.int64, device=device)
        self.number = torch.tensor(layers, device=device)
        self.bounds = torch.tensor(subject.cu_seqlens, device=device)
        self.theory = torch.tensor(subject.theory[:, at, None].copy(), device=device)
        self.margins = torch.tensor(MARGINS, device=device)
        ends = np.stack([subject.ends(claim)[:, at, None, :, None] for claim in subject.claims])
        self.ends = torch.tensor(ends.copy(), device=device)  # copies are contiguous

    def prompts(self, tokens: Tensor) -> Tensor:
        """The prompts of packed tokens."""
        return torch.searchsorted(self.bounds, tokens, right=True) - 1

    def add_prompts(self, tokens: Tensor) -> None:
        """Count these packed tokens as seen."""
        self.prompt_tokens.index_add_(0, self.prompts(tokens), torch.ones_like(tokens))

    def reduce(self, x: Tensor, tokens: Tensor) -> None:
        """Add quantities ``[quantity, layer, T, H]`` of these packed tokens."""
        (self.count_by_triton if _by_triton(x) else self.count)(x, tokens)

    def count_by_triton(self, x: Tensor, tokens: Tensor) -> None:
        """As ``count``."""
        from qed_probe.eigen.programs import count
        from qed_probe.kernels.norm import tile

        Q, L, T, H = x.shape
        rows, wide = tile(H)
        kept = (self.numbers, self.sums, self.minimum, self.maximum, self.first_nonfinite, self.counts)
        sizes = {"H": H, "BH": wide, "BT": rows, "BINS": BINS, "BINS_OF_ONE": 1 / WIDTH, "LAST": NOWHERE}
        limits = {"LIMIT": _LIMIT, "STEP": _STEP, "REST": _REST}
        with torch.cuda.device(x.get_device()):  # Triton launches on the current GPU
            count[-(-T // rows), L, Q](x, tokens, self.theory, self.margins, *kept, T, Q, L, Q - len(SIZES), **sizes, **limits)

    def count(self, x: Tensor, tokens: Tensor) -> None:
        """What ``reduce`` does, in PyTorch."""
        e, (Q, L, _, H) = len(self.subject.quantities) - len(SIZES), x.shape
        good = x.isfinite()
        finite = x.where(good, 0)
        signed, sizes = finite[:e], finite[e:]
        beyond = torch.stack([signed < 0, signed > 1, signed.abs() > 1]), torch.stack([sizes > margin for margin in MARGINS])
        outside = torch.zeros_like(good)
        outside[:2] = (finite[:2].double() < self.theory[0]) | (finite[:2].double() > self.theory[1])
        self.numbers += torch.cat([torch.stack([good, ~good, outside & good]), torch.cat(beyond, 1)]).sum(3)
        first = BINS * torch.arange(Q * L, device=x.device).view(Q, L, 1, 1)
        bins = torch.cat([_bins(signed), _octaves(sizes)]) + first
        self.counts.scatter_add_(0, bins.flatten(), good.flatten().long())
        scaled = finite.double().clamp(-_LIMIT, _LIMIT) * _STEP
        whole = scaled.floor()
        self.sums += torch.stack([whole, (scaled - whole) * _REST]).long().sum(3)
        self.minimum = torch.minimum(self.minimum, x.where(good, torch.inf).amin(2))
        self.maximum = torch.maximum(self.maximum, x.where(good, -torch.inf).amax(2))
        place = tokens[:, None] * H + torch.arange(H, device=x.device)
        self.first_nonfinite = torch.minimum(self.first_nonfinite, place.where(~good, NOWHERE).amin((2, 3)))

    def judge(self, index: int, records: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Hold a claim against these tokens; the worst of them as ``COLUMNS``.

        A violation is real where it is there with the key as used and with the key renormalised.
        """
        values = self.subject.claims[index].values(self.subject.mixer, records)
        keys = (self.hold_by_triton if _by_triton(tokens) else self.hold)(index, *values, tokens)
        return self._worst(keys, values, tokens)

    def hold(self, index: int, used: Tensor, alone: Tensor, tokens: Tensor) -> Tensor:
        """Count violations of values ``[layer, T, H, edits]``; the excesses that last, as numbers that ``_worst`` tells apart."""
        (low, high), strict = self.ends[index], self.subject.claims[index].strict
        excess, other = (torch.maximum(low - x.double(), x.double() - high) for x in (used, alone))
        lasting = torch.minimum(excess, other)
        violated, real = (x >= 0 if strict else x > 0 for x in (excess, lasting))
        self.violations[index] += torch.stack([violated, real]).sum((2, 4))
        self.rounding[index] = torch.maximum(self.rounding[index], excess.where(violated & ~real, -torch.inf).max())
        self.prompt_violations[index].index_add_(0, self.prompts(tokens), real.sum((0, 2, 3)))
        return _keys(lasting)

    def hold_by_triton(self, index: int, used: Tensor, alone: Tensor, tokens: Tensor) -> Tensor:
        """As ``hold``."""
        from qed_probe.eigen.programs import hold
        from qed_probe.kernels.norm import tile

        L, T, H, M = used.shape
        (rows, wide), keys = tile(H * M), torch.empty(used.numel(), dtype=torch.int64, device=used.device)
        kept = (self.violations[index], self.rounding[index], self.prompt_violations[index])
        given = (used.contiguous(), alone.contiguous(), self.ends[index], self.prompts(tokens))
        how = {"M": M, "W": H * M, "BW": wide, "BT": rows, "STRICT": self.subject.claims[index].strict, "LAST": _LAST}
        with torch.cuda.device(used.get_device()):  # Triton launches on the current GPU
            hold[-(-T // rows), L](*given, *kept, keys, T, L, H, **how)
        return keys

    def _worst(self, keys: Tensor, values: Sequence[Tensor], tokens: Tensor) -> Tensor:
        """The largest excesses, and of equal ones the first, of ``values`` ``[layer, T, H, edits]``."""
        L, _, H, M = values[0].shape
        best = keys.topk(min(WORST, len(keys))).values
        bits, place = best >> 31, _LAST - (best & _LAST)
        excess = torch.where(bits < 0, bits ^ _LAST, bits).int().view(torch.float32)
        token, layer, head, edit = place // (M * H * L), place // (M * H) % L, place // M % H, place % M
        shown = [x[layer, token, head, edit] for x in values]
        named = edit if self.subject.edits == M else torch.full_like(edit, self.subject.main)
        rows = [excess, *shown, tokens[token], self.number[layer], head, named]
        return torch.stack([row.double() for row in rows])


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


def _by_triton(x: Tensor) -> bool:
    return x.device.type == "cuda" and has_triton()


def _keys(excess: Tensor) -> Tensor:
    """Excesses ``[layer, T, H, edits]`` by token as keys of 63 bits that order them: of equal ones the first has the largest.

    31 bits count down the places, those above order floats as integers: as they are, or from the other end where negative.
    """
    size = excess.transpose(0, 1).flatten().float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
    size += 0.0  # of the zeros only the positive one
    bits = size.view(torch.int32).long()
    place = torch.arange(len(size), device=size.device)
    return (torch.where(bits < 0, bits ^ _LAST, bits) << 31) + (_LAST - place)


def _bins(e: Tensor) -> Tensor:
    return ((e / WIDTH).ceil() + (BINS // 2 - 1)).clamp(0, BINS - 1).long()


def _octaves(size: Tensor) -> Tensor:
    return (size.clamp(min=0).abs().view(torch.int32) >> 19).long()
