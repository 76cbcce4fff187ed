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
from torch import Tensor

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import factor, weights
from qed_probe.memory.subject import Subject, bin_of, lag_bins
from qed_probe.replays.inputs import LayerInputs

Probe = Literal["query", "direction"]
BINS = 128
"""Blocks of the map, at most, along either side."""
BLOCK = 256
"""Reads that are taken apart at once."""


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
    """The read that predicts each prompt's answer, by role and lag; of the first prompt by token, and the map of all its reads."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
