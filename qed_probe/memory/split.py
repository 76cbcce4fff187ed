"""What an added direction λd does at once and what it does later: an exact split of y − y⁰, output with it less output without.

With c_j = S̄_jᵀd_j of the memory S that has it, c⁰_j of the memory S⁰ that has not, and ω, ω⁰ the weights that the transitions
of either give, in the read y_t, what the main edit of token j writes (``kernels.sources``)::

    y_t − y⁰_t = −λ Σ_{j≤t} ω⁰_tj c_j        "own reads": transitions of S⁰, reads of S
               = −λ Σ_{j≤t} ω_tj c⁰_j        "base reads": transitions of S, reads of S⁰

as the edit that reads a⁰ + λd and writes u is one that reads a⁰ and writes u − λc. j = t is immediate, ω_tt = ω⁰_tt = q_tᵀk_t
where the main edit is the last, j < t lasting. As a 2×2 of memory and step::

    immediate    −λω_tt c⁰_t                 the step alone, of a memory without the direction
    lasting      y_t + λω_tt c_t − y⁰_t      the memory alone, without the step: Σ_{j<t} of the own reads
    interaction  −λω_tt (c_t − c⁰_t)         what the step takes of what earlier steps have changed

Source: this package, from QED (arXiv 2608.13668), Eq. 10–12.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import Edits, Factors, factor, weights
from qed_probe.memory.passes import after_edits, without_direction
from qed_probe.memory.subject import bin_of, lag_bins
from qed_probe.replays.inputs import LayerInputs
from qed_probe.replays.layer import passes

CONVENTIONS = ("own reads", "base reads")
PARTS = ("immediate", "lasting", "interaction")
BLOCK = 1 << 24
"""Weights that are held at once."""
OFF = 1e-5
"""How far a sum over j may be from y − y⁰, over max |y|."""


@dataclass(frozen=True)
class Split:
    """P outputs of one prompt split; ``base`` ``[P, H, V]`` is y⁰.

    ``shares`` ``[2, P, H, L]`` ⟨part, Δ⟩ of the lags in each bin, Δ the sum over j in that convention, ``sizes`` ``[2, P, H]``
    Σ_j ‖part_j‖; ``parts`` ``[3, P, H, V]`` of the 2×2, whose sum is the Δ of the own reads; ``change`` ``[2, P, H, V]`` Δ.
    """

    base: Tensor
    shares: Tensor
    sizes: Tensor
    parts: Tensor
    change: Tensor


def split(layer: LayerInputs, prompt: int, tokens: Tensor) -> Split:
    """Split the outputs at ``tokens`` ``[P]`` of the pack's prompt number ``prompt``, counted within it.

    In the precision of the inputs; takes two passes over the pack, and P·H·T weights twice. Raises InputError where the mixer
    adds no direction, and CheckFailed if a sum over j is not y − y⁰ to 1e-5 of max |y|.
    """
    return Trajectories(layer).split(prompt, tokens)


def without(layer: LayerInputs) -> LayerInputs:
    """The same layer with λ = 0; raises InputError where no direction is added."""
    e = layer.edits
    if layer.mixer.direction is None or layer.lam is None:
        raise InputError(f"mixer {layer.mixer.name}: expected one that adds a direction, found none")
    return replace(layer, edits=without_direction(e), lam=torch.zeros_like(layer.lam))


class Trajectories:
    """A layer's own memory and that without the direction: y and S̄ᵀd of both, over all tokens of the pack."""

    def __init__(self, layer: LayerInputs) -> None:
        """Take both passes."""
        self.layer, self.base = layer, without(layer)
        (self.y, self.own_reads), (self.y_base, self.base_reads) = _read(self.layer), _read(self.base)

    def split(self, prompt: int, tokens: Tensor) -> Split:
        """Split outputs of one prompt, as the function does."""
        at = slice(self.layer.ends[prompt], self.layer.ends[prompt] + int(tokens.max()) + 1)
        y, y_base, *reads = (x[at] for x in (self.y, self.y_base, self.own_reads, self.base_reads))
        lam = _given(self.layer.lam)[:, None]
        pairs = zip((self.base.edits, self.layer.edits), reads, strict=True)
        found = [_by_lag(e, at, -lam * read, tokens) for e, read in pairs]
        change, shares, sizes, steps = (torch.stack(x) for x in zip(*found, strict=True))
        _check(self.layer, prompt, tokens, change, y, y_base)
        step, immediate = steps
        parts = torch.stack([immediate, change[0] - step, step - immediate])
        return Split(y_base[tokens], shares, sizes, parts, change)


def _read(layer: LayerInputs) -> tuple[Tensor, Tensor]:
    """What q and d read, y and S̄ᵀd, at every token of the pack, ``[T, H, V]``."""
    e, d = layer.edits, _given(layer.edits.d)
    y, reads = (torch.empty_like(e.u[0, ..., 0, :]) for _ in range(2))
    for span, part, read in passes(layer, d[..., None, :]):
        y[span], reads[span] = read.y[0], after_edits(read, part, d[0, span, :, None], e.main)[..., 0, :]
    return y, reads


def _by_lag(e: Edits, at: slice, written: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the reads by q hold of what the main edits also ``written`` ``[T, H, V]``: Δ, shares, sizes, and the part of lag 0."""
    g, k, a, q = (x[0, at] for x in (e.g, e.k, e.a, e.q))
    factors, together = factor(g, k, a), max(BLOCK // q[..., 0].numel(), 1)
    blocks = [_block(factors, part, q[part], written, e.main) for part in torch.split(tokens, together)]
    change, shares, sizes, step = (torch.cat(x) for x in zip(*blocks, strict=True))
    return change, shares, sizes, step


def _block(factors: Factors, tokens: Tensor, q: Tensor, written: Tensor, main: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    omega = weights(factors, tokens[None], q[None], factors.keys.shape[3])[0][..., main]
    P, H, T = omega.shape
    change = torch.einsum("pht,thv->phv", omega, written)
    share = (omega * torch.einsum("thv,phv->pht", written, change)).double()
    lag = tokens[:, None] - torch.arange(T, device=q.device)
    bins = bin_of(lag.clamp(min=0))[:, None].expand_as(share)  # what is later has weight 0
    shares = share.new_zeros(P, H, len(lag_bins(T - 1))).scatter_add_(2, bins, share)
    sizes = (omega.abs() * norms(written).T).sum(-1)
    now = omega.gather(2, tokens[:, None, None].expand(P, H, 1))
    return change, shares, sizes, now * written[tokens]


def _check(layer: LayerInputs, prompt: int, tokens: Tensor, change: Tensor, y: Tensor, y_base: Tensor) -> None:
    size = torch.maximum(y.abs().max(), y_base.abs().max()).double()
    off = (change.double() - (y.double() - y_base.double())[tokens]).abs().amax(-1)
    if not (off <= OFF * size).all():
        way, at, head = np.unravel_index(int(off.nan_to_num(torch.inf).argmax()), off.shape)
        raise CheckFailed(
            f"effects, {CONVENTIONS[way]}: expected a sum over tokens within {OFF:.0e} of the change of the output, found "
            f"{float(off[way, at, head] / size):.1e} at layer {layer.index}, head {head}, prompt {layer.prompts[prompt] + 1}, "
            f"token {int(tokens[at])}"
        )


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise InputError("expected a direction and its strength, found none")
    return x


def norms(x: Tensor) -> Tensor:
    """Euclidean, along the last axis, in float64."""
    found: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    return found
