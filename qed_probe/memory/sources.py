"""What a read of the memory is made of: an exact share for everything that was written before it.

A read is r = Σ_j c_j (+ what is left of an initial state), c_j = Σ_m ω_jm u_jm with the weights ω of ``kernels.sources``: of the
query, r = y_t = S_tᵀq_t over j ≤ t; of the added direction, r = S̄_tᵀd_t, the memory that the main edit reads. Norms do not add:
a source's share is ⟨c_j, r⟩/‖r‖², and the shares of a read add up to 1; they may be negative or beyond 1 where sources cancel,
and Σ‖c_j‖/‖r‖ says how much they do. Several reads are taken together as Σ⟨c_j, r⟩/Σ‖r‖². Source: this package; the implicit
attention of Zimerman et al. (arXiv 2405.16504) has no erase in it.
"""

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
BLOCK = 256
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
    if probe not in get_args(Probe):
        raise InputError(f"probe: expected one of {', '.join(get_args(Probe))}, found {probe!r}")
    e, begin = layer.edits, layer.ends[prompt]
    vectors = e.q if probe == "query" else e.d
    if vectors is None:
        raise InputError(f"mixer {layer.mixer.name}: expected a delta edit that QED could add a direction to, found none")
    at = slice(begin, begin + int(tokens.max()) + 1)
    g, k, a, u = (x[0, at] for x in (e.g, e.k, e.a, e.u))
    found, left = weights(factor(g, k, a), tokens, vectors[0, at][tokens], k.shape[2] if probe == "query" else e.main)
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
        for prompt, number in enumerate(layer.prompts):
            chosen = self.subject.chosen[number]
            at = torch.tensor([chosen], device=layer.edits.q.device)
            for i, probe in enumerate(self.probes):
                reads = take_apart(layer, prompt, at, probe)
                if probe == "query":
                    _check(layer, prompt, chosen, reads.read[0])
                self._keep(i, self.subject.at(layer), number, reads)
                if number == 0 and self.map is not None:
                    self.map[i, self.subject.at(layer)] = self._map(layer, prompt, probe)

    def _keep(self, probe: int, layer: int, number: int, reads: Reads) -> None:
        parts, to = reads.parts[0].double().cpu(), (probe, layer, slice(None), number)
        roles = torch.from_numpy(self.subject.roles[number][: parts.shape[1]])
        lags = bin_of(torch.arange(parts.shape[1] - 1, -1, -1))
        self.role[to] = parts.new_zeros(len(parts), self.role.shape[-1]).index_add_(1, roles, parts)
        self.lag[to] = parts.new_zeros(len(parts), len(self.lags)).index_add_(1, lags, parts)
        self.initial[to] = reads.initial[0].cpu()
        self.energy[to] = reads.read[0].double().square().sum(-1).cpu()
        self.size[to] = reads.size[0].double().cpu() * reads.read[0].double().norm(dim=-1).cpu()
        if number == 0:
            self.token[probe, layer] = parts

    def _map(self, layer: LayerInputs, prompt: int, probe: Probe) -> NDArray[np.float64]:
        """Shares ``[H, target, source]`` of all reads of a prompt, block by block; NaN of blocks whose reads are 0."""
        T, side = layer.ends[prompt + 1] - layer.ends[prompt], self.side
        n = -(-T // side)
        parts = torch.zeros(self.subject.heads, n * side, n, dtype=torch.float64)
        energy = torch.zeros(self.subject.heads, n * side, dtype=torch.float64)
        for start in range(0, T, BLOCK):
            at = torch.arange(start, min(start + BLOCK, T), device=layer.edits.q.device)
            reads = take_apart(layer, prompt, at, probe)
            by_source = pad(reads.parts.double(), (0, n * side - reads.parts.shape[-1]))
            parts[:, at.cpu()] = by_source.view(len(at), -1, n, side).sum(-1).transpose(0, 1).cpu()
            energy[:, at.cpu()] = reads.read.double().square().sum(-1).T.cpu()
        blocks, total = parts.view(-1, n, side, n).sum(2), energy.view(-1, n, side).sum(2)[..., None]
        return torch.where(total > 0, blocks / total, torch.nan).numpy()

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


def _check(layer: LayerInputs, prompt: int, token: int, read: Tensor) -> None:
    """Raise CheckFailed if what was written does not add up to what the model's own kernel returned."""
    output = layer.output[0, layer.ends[prompt] + token].double()
    off = (layer.scale * read.double() - output).abs().amax(-1) / layer.output.abs().max().double().clamp(min=1e-30)
    if not (off <= layer.tolerance).all():
        head = int(off.nan_to_num(torch.inf).argmax())
        raise CheckFailed(
            f"sources: expected a sum over tokens within {layer.tolerance:.1e} of the model's output, found "
            f"{float(off[head]):.1e} at layer {layer.index}, head {head}, prompt {layer.prompts[prompt] + 1}, token {token}"
        )
