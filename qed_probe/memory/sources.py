"""What a read of the memory is made of: an exact share for everything that was written before it.

A read is r = Σ_j c_j (+ what is left of an initial state), c_j = Σ_m ω_jm u_jm with the weights ω of ``kernels.sources``: of the
query, r = y_t = S_tᵀq_t over j ≤ t; of the added direction, r = S̄_tᵀd_t, the memory that the main edit reads. Norms do not add:
a source's share is ⟨c_j, r⟩/‖r‖², and the shares of a read add up to 1; they may be negative or beyond 1 where sources cancel,
and Σ‖c_j‖/‖r‖ says how much they do. Several reads are taken together as Σ⟨c_j, r⟩/Σ‖r‖². Source: this package; the implicit
attention of Zimerman et al. (arXiv 2405.16504) has no erase in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import factor, weights
from qed_probe.memory.passes import over
from qed_probe.memory.subject import Subject, bin_of, lag_bins
from qed_probe.replays.inputs import LayerInputs
from qed_probe.store import whole
from qed_probe.store.schema import Variable

Probe = Literal["query", "direction"]
BINS = 128
"""Blocks of the map, at most, along either side."""
BLOCK, BLOCK_ON_GPU = 256, 2048
"""Reads that are taken apart at once."""
MAPPED = 4096
"""Tokens of the first prompt up to which all of its reads are mapped: their number is squared."""
_PLACE, _SHARE = ("probe", "layer", "head"), "Σ⟨c_j, r⟩/Σ‖r‖²"
VARIABLES = {
    row.name: row
    for row in (
        Variable("share_role", (*_PLACE, "role"), "float64", "1", "share of the reads by role of the source", _SHARE),
        Variable("share_lag", (*_PLACE, "lag"), "float64", "1", "share of the reads by lag of the source", _SHARE),
        Variable("share_initial", _PLACE, "float64", "1", "share of the reads that an initial state has", _SHARE),
        Variable("cancellation", _PLACE, "float64", "1", "size of the sources over that of the reads", "Σ‖c_j‖‖r‖/Σ‖r‖²"),
        Variable("reads", _PLACE, "int64", "count", "prompts whose read is not 0"),
        Variable("layer_share_role", ("probe", "layer", "role"), "float64", "1", "share of all heads' reads by role", _SHARE),
        Variable("layer_share_lag", ("probe", "layer", "lag"), "float64", "1", "share of all heads' reads by lag", _SHARE),
        Variable("parts_role", (*_PLACE, "prompt", "role"), "float64", "1", "part of each prompt's read by role", "Σ_j ⟨c_j, r⟩"),
        Variable("read_energy", (*_PLACE, "prompt"), "float64", "1", "each prompt's read", "‖r‖²"),
        Variable("share_token", (*_PLACE, "source"), "float64", "1", "share of the first prompt's read by token", _SHARE),
        Variable(
            "share_map", (*_PLACE, "target_block", "source_block"), "float64", "1",
            "share of the first prompt's reads, by blocks of reads and sources", _SHARE,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Reads:
    """P reads of one prompt taken apart, over its T tokens.

    ``weights`` ``[P, H, T, M]`` of what each edit wrote; ``read`` ``[P, H, V]``; ``parts`` ``[P, H, T]`` ⟨c_j, r⟩ of every token
    and ``initial`` ``[P, H]`` of the initial state, which add up to ‖r‖²; ``size`` ``[P, H]`` Σ‖c_j‖.
    """

    weights: Tensor
    read: Tensor
    parts: Tensor
    initial: Tensor
    size: Tensor


def take_apart(layer: LayerInputs, prompt: int, tokens: Tensor, probe: Probe = "query") -> Reads:
    """Take the reads at ``tokens`` ``[P]`` of the pack's prompt number ``prompt``, counted within it, apart.

    In the precision of the inputs. Of all T tokens of a long prompt ``weights`` has P·H·T·M numbers: ask for some at a time. What
    comes after the last of the tokens is not looked at. Raises InputError for a probe that is none, and for the direction where
    the mixer has none and QED could add none.
    """
    vectors, seen = _probes(layer, probe)
    begin = layer.ends[prompt]
    at = slice(begin, begin + int(tokens.max()) + 1)
    e = layer.edits
    factors = factor(e.g[0, at], e.k[0, at], e.a[0, at])
    found, left = weights(factors, tokens[None], vectors[at][tokens][None], seen)
    return _reads(layer, prompt, found, left[0])


def _probes(layer: LayerInputs, probe: Probe) -> tuple[Tensor, int]:
    """What reads ``[T, H, K]``, and after how many edits of its own token."""
    if probe not in get_args(Probe):
        raise InputError(f"probe: expected one of {', '.join(get_args(Probe))}, found {probe!r}")
    e = layer.edits
    if probe == "query":
        return e.q[0], e.k.shape[3]
    if e.d is None:
        raise InputError(f"mixer {layer.mixer.name}: expected a delta edit that QED could add a direction to, found none")
    return e.d[0], e.main


def _reads(layer: LayerInputs, prompt: int, found: Tensor, left: Tensor) -> Reads:
    """Reads with the weights ``[P, H, T, M]`` on the prompt's first T tokens, and ``left`` ``[P, H, K]`` on its initial state."""
    begin = layer.ends[prompt]
    u = layer.edits.u[0, begin : begin + found.shape[2]]
    read = torch.einsum("phtm,thmv->phv", found, u)
    initial = left.new_zeros(left.shape[:2])
    if layer.initial_state is not None:
        held = torch.einsum("phk,hkv->phv", left, layer.initial_state[prompt].to(left.dtype))
        read = read + held
        initial = torch.linalg.vecdot(held, read)
    parts = (found * torch.einsum("thmv,phv->phtm", u, read)).sum(-1)
    return Reads(found, read, parts, initial, _sizes(found, u))


def _sizes(found: Tensor, u: Tensor) -> Tensor:
    """Σ_j ‖Σ_m ω_jm u_jm‖, ``[P, H]``, through the products of what a token's edits write."""
    products = torch.einsum("thmv,thnv->htmn", u, u)
    return torch.einsum("phtm,htmn,phtn->pht", found, products, found).clamp(min=0).sqrt().sum(-1)


class Sources:
    """The read that predicts each prompt's answer, by role and lag; of the first prompt by token, and a map of all its reads."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.probes = get_args(Probe)[: 1 + (subject.mixer.recorded_direction is not None)]
        sizes, prompts = (len(self.probes), len(subject.layers), subject.heads), len(subject.lengths)
        self.lags = lag_bins(max(subject.chosen))
        self.role, self.lag = (np.zeros((*sizes, prompts, n)) for n in (len(subject.names), len(self.lags)))
        self.initial, self.energy, self.size = np.zeros((3, *sizes, prompts))
        self.token = np.zeros((*sizes, subject.chosen[0] + 1))
        self.side = -(-subject.lengths[0] // BINS)
        blocks = -(-subject.lengths[0] // self.side)
        self.map = np.full((*sizes, blocks, blocks), np.nan) if subject.lengths[0] <= MAPPED else None

    def add(self, layer: LayerInputs) -> None:
        """Take the chosen reads of these prompts apart, and hold those of the query against the model's output."""
        e, begins, chosen = layer.edits, layer.ends[:-1], [self.subject.chosen[number] for number in layer.prompts]
        factors = factor(e.g[0], e.k[0], e.a[0], layer.ends)
        tokens, starts = torch.tensor([chosen, begins], device=e.q.device)[..., None]
        spans = [slice(begin, begin + token + 1) for begin, token in zip(begins, chosen, strict=True)]
        for i, probe in enumerate(self.probes):
            vectors, seen = _probes(layer, probe)
            found, left = weights(factors, tokens, vectors[starts + tokens], seen)
            reads = [_reads(layer, prompt, found[:, :, at], left[prompt]) for prompt, at in enumerate(spans)]
            if probe == "query":
                _check(layer, chosen, torch.cat([one.read for one in reads]))
            self._keep(i, self.subject.at(layer), layer.prompts, reads)
        if 0 in layer.prompts and self.map is not None:
            self.map[:, self.subject.at(layer)] = self._maps(layer, layer.prompts.index(0))

    def _keep(self, probe: int, layer: int, numbers: Sequence[int], reads: list[Reads]) -> None:
        read = torch.cat([one.read for one in reads]).double()
        energy, size = read.square().sum(-1), torch.cat([one.size for one in reads]).double() * read.norm(dim=-1)
        initial = torch.cat([one.initial for one in reads]).double()
        for kept, x in zip((self.initial, self.energy, self.size), torch.stack([initial, energy, size]).mT.cpu(), strict=True):
            kept[probe, layer][:, numbers] = x
        every = torch.cat([one.parts[0] for one in reads], 1).double().cpu()
        for number, parts in zip(numbers, torch.split(every, [one.parts.shape[2] for one in reads], 1), strict=True):
            to = probe, layer, slice(None), number
            roles = torch.from_numpy(self.subject.roles[number][: parts.shape[1]])
            lags = bin_of(torch.arange(parts.shape[1] - 1, -1, -1))
            self.role[to] = parts.new_zeros(len(parts), self.role.shape[-1]).index_add_(1, roles, parts)
            self.lag[to] = parts.new_zeros(len(parts), len(self.lags)).index_add_(1, lags, parts)
            if number == 0:
                self.token[probe, layer] = parts

    def _maps(self, layer: LayerInputs, prompt: int) -> NDArray[np.float64]:
        """Shares ``[probe, H, target, source]`` of all reads of a prompt, block by block; NaN of blocks whose reads are 0."""
        span, side = slice(*layer.ends[prompt : prompt + 2]), self.side
        g, k, a = (x[0, span] for x in (layer.edits.g, layer.edits.k, layer.edits.a))
        factors, T, n = factor(g, k, a), len(k), -(-len(k) // side)
        parts = k.new_zeros(len(self.probes), k.shape[1], n * side, n, dtype=torch.float64)
        energy = k.new_zeros(parts.shape[:3], dtype=torch.float64)
        together = BLOCK if k.device.type == "cpu" else BLOCK_ON_GPU
        for i, probe in enumerate(self.probes):
            vectors, seen = _probes(layer, probe)
            for tokens in torch.split(torch.arange(T, device=k.device), together):
                found, left = weights(factors, tokens[None], vectors[span][tokens][None], seen)
                reads = _reads(layer, prompt, found[:, :, : int(tokens[-1]) + 1], left[0])
                by_source = pad(reads.parts.double(), (0, n * side - reads.parts.shape[-1]))
                parts[i, :, tokens] = by_source.view(*by_source.shape[:2], n, side).sum(-1).transpose(0, 1)
                energy[i, :, tokens] = reads.read.double().square().sum(-1).T
        by_block = *energy.shape[:2], n, side
        blocks, total = parts.view(*by_block, n).sum(3), energy.view(by_block).sum(3)[..., None]
        return torch.where(total > 0, blocks / total, torch.nan).cpu().numpy()

    def table(self) -> xr.Dataset:
        """``VARIABLES``: of each prompt's chosen read its parts, and shares of all prompts' reads together."""
        total = self.energy.sum(-1)
        columns = {
            "share_role": over(self.role.sum(3), total[..., None]),
            "share_lag": over(self.lag.sum(3), total[..., None]),
            "share_initial": over(self.initial.sum(3), total),
            "cancellation": over(self.size.sum(3), total),
            "reads": (self.energy > 0).sum(-1),
            "layer_share_role": over(self.role.sum((2, 3)), total.sum(2)[..., None]),
            "layer_share_lag": over(self.lag.sum((2, 3)), total.sum(2)[..., None]),
            "parts_role": self.role,
            "read_energy": self.energy,
            "share_token": over(self.token, self.energy[..., :1]),
        }
        columns |= {} if self.map is None else {"share_map": self.map}
        known = slice(self.token.shape[-1])
        roles = np.array(self.subject.names)[self.subject.roles[0][known]]
        coords = {"probe": [*self.probes], "role": [*self.subject.names], "lag": self.lags, "source_role": ("source", roles)}
        if self.subject.texts is not None:
            coords["source_text"] = ("source", np.array(self.subject.texts[known]))
        attrs = {"block_tokens": self.side, "first_prompt_tokens": self.subject.lengths[0]}
        return whole.table(VARIABLES, columns, coords, attrs)


def _check(layer: LayerInputs, tokens: Sequence[int], reads: Tensor) -> None:
    """Raise CheckFailed if what was written does not add up to what the model's own kernel returned."""
    at = [begin + token for begin, token in zip(layer.ends[:-1], tokens, strict=True)]
    off = (layer.scale * reads.double() - layer.output[0, at].double()).abs().amax(-1)
    off = (off / layer.output.abs().max().double().clamp(min=1e-30)).cpu()
    if not (off <= layer.tolerance).all():
        prompt, head = divmod(int(off.nan_to_num(torch.inf).argmax()), off.shape[1])
        raise CheckFailed(
            f"sources: expected a sum over tokens within {layer.tolerance:.1e} of the model's output, found "
            f"{float(off[prompt, head]):.1e} at layer {layer.index}, head {head}, prompt {layer.prompts[prompt] + 1}, "
            f"token {tokens[prompt]}"
        )
