"""Counterfactual directions: what the erase would read and write by, if it were not what the model made it.

Gates are kept. Of a mixer that adds λd (QED's arms) d is made anew from another vector, by the mixer's own recipe: gate, then
project. Of one with an erase address (EDA) ε itself is another vector of norm 1. Source: EDA (arXiv 2606.26560), Sec. 4.5 and
Fig. 2b.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from qed_probe.errors import InputError
from qed_probe.kernels import Direction, Mixer
from qed_probe.kernels.mixers import project_out
from qed_probe.replays.inputs import LayerInputs

Replaced = Literal["direction", "address"]

ARMS = {
    "gated-projected": Direction(),
    "noproj": Direction(projected=False),
    "nogate": Direction(gated=False),
    "nogate-noproj": Direction(gated=False, projected=False),
}
"""QED and its ablation arms, by how they make d from the query."""


@dataclass(frozen=True)
class Counterfactuals:
    """What is replaced, by what, and what there is nothing of: ``directions`` ``[draws, T, H, K]``, ``absent`` with the reason.

    ``turned`` are directions under which the erase and the delta edit of a token change places.
    """

    replaced: Replaced
    directions: dict[str, Tensor]
    absent: dict[str, str]
    turned: frozenset[str] = frozenset()


def what_is_replaced(mixer: Mixer, asked: Replaced | None = None) -> Replaced:
    """The erase direction of a mixer: its address if it has one, else the direction that it adds, unless one is asked for.

    Raises InputError for a mixer that has none, or not the one asked for.
    """
    parts: dict[Replaced, object] = {"address": mixer.address, "direction": mixer.direction}
    there = [name for name, part in parts.items() if part is not None]
    if not there:
        raise InputError(
            f"mixer {mixer.name}: expected one that adds an erase direction or has an erase address, as the QED and EDA arms do; "
            "found neither, so that there is nothing to replace"
        )
    if asked is None:
        return there[0]
    if asked not in there:
        raise InputError(f"mixer {mixer.name}: expected {' or '.join(there)} to replace, found {asked!r}")
    return asked


def counterfactuals(layer: LayerInputs, replaced: Replaced | None = None, *, draws: int = 3, seed: int = 0) -> Counterfactuals:
    """Every direction that this layer's erase could have, by name, ``[draws, T, H, K]``.

    ``actual``; ``none`` (0); ``reversed`` (−d, or with an address the delta edit first); ``random``, a new unit vector for every
    token, head and draw; ``shuffled-head`` and ``shuffled-token``, another head's at the same token and another token's of the
    same prompt, where none keeps its own; ``same-address``, the key; and of a mixer that adds a direction the other ``ARMS``.
    Random numbers depend on ``seed``, the layer's and the prompt's number alone. Raises InputError as ``what_is_replaced`` does.
    """
    replaced = what_is_replaced(layer.mixer, replaced)
    if replaced == "address":
        return _addresses(layer, draws, seed)
    return _directions(layer, draws, seed)


def _directions(layer: LayerInputs, draws: int, seed: int) -> Counterfactuals:
    how, d = layer.mixer.direction, layer.edits.d
    if how is None or d is None:
        raise InputError(f"layer {layer.index}: expected the direction d, found none")
    found = {"actual": d, "none": torch.zeros_like(d), "reversed": -d}
    found["random"] = _make(layer, how, _random(layer, draws, seed))
    others, absent = _shuffled(layer, layer.source, how.source == "random", seed)
    found |= {name: _make(layer, how, x) for name, x in others.items()}
    if how.projected:
        absent["same-address"] = "empty, as P⊥ₖk = 0"
    else:
        found["same-address"] = _make(layer, how, layer.key)
    found |= {name: _make(layer, arm, layer.edits.q) for name, arm in ARMS.items() if arm != how}
    return Counterfactuals("direction", found, absent)


def _addresses(layer: LayerInputs, draws: int, seed: int) -> Counterfactuals:
    address = layer.address
    found = {"actual": address, "none": torch.zeros_like(address), "reversed": address, "random": _random(layer, draws, seed)}
    others, absent = _shuffled(layer, address, layer.mixer.address == "random", seed)
    found |= others
    if layer.mixer.address == "key":
        absent["same-address"] = "the mixer's own"
    else:
        found["same-address"] = layer.key
    return Counterfactuals("address", found, absent, frozenset({"reversed"}))


def _make(layer: LayerInputs, how: Direction, source: Tensor) -> Tensor:
    """Make d from another vector, by a recipe: the gate first, then the projection."""
    if layer.gate is None:
        raise InputError(f"mixer {layer.mixer.name}: expected an erase gate, found none")
    x = layer.gate * source if how.gated else source
    return project_out(x, layer.key.expand_as(x)) if how.projected else x


def _shuffled(layer: LayerInputs, x: Tensor | None, fixed: bool, seed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The vectors of other heads and of other tokens, and why there are none."""
    lengths, heads = np.diff(layer.ends), layer.edits.q.shape[2]
    found: dict[str, Tensor] = {}
    absent: dict[str, str] = {}
    if heads < 2:
        absent["shuffled-head"] = "one head, so that there is no other"
    elif x is None:
        absent["shuffled-head"] = "the store does not keep the fixed vectors that d is made of"
    else:
        found["shuffled-head"] = x[:, :, torch.from_numpy(derangement(np.random.default_rng([1, seed, layer.index]), heads))]
    if fixed:
        absent["shuffled-token"] = "the vector is the same at all tokens"
    elif (lengths < 2).any():
        absent["shuffled-token"] = "a prompt of one token, so that there is no other"
    elif x is not None:
        order = [
            begin + derangement(np.random.default_rng([2, seed, layer.index, prompt]), end - begin)
            for (begin, end), prompt in zip(itertools.pairwise(layer.ends), layer.prompts, strict=True)
        ]
        found["shuffled-token"] = x[:, torch.from_numpy(np.concatenate(order))]
    return found, absent


def _random(layer: LayerInputs, draws: int, seed: int) -> Tensor:
    """Unit vectors, ``[draws, T, H, K]``."""
    if draws < 1:
        raise InputError(f"draws: expected at least 1, found {draws}")
    q = layer.edits.q
    shape = q.shape[2:]
    parts = [
        np.random.default_rng([3, seed, layer.index, prompt]).standard_normal((draws, end - begin, *shape), np.float32)
        for (begin, end), prompt in zip(itertools.pairwise(layer.ends), layer.prompts, strict=True)
    ]
    return normalize(torch.from_numpy(np.concatenate(parts, 1)).to(q), dim=-1)


def derangement(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """A permutation of ``count`` ≥ 2 things that leaves none where it is, each of these as likely as another."""
    while True:
        order = rng.permutation(count)
        if (order != np.arange(count)).all():
            return order


def with_direction(layer: LayerInputs, chosen: Counterfactuals, name: str, x: Tensor) -> LayerInputs:
    """The layer as it would be with the direction ``x`` ``[1, T, H, K]`` of this name."""
    ready = layer.edits
    k, a, u, main, at = ready.k, ready.a, ready.u, ready.main, ready.address
    if chosen.replaced == "direction":
        a = _put(a, main, torch.addcmul(ready.base, _there(layer.lam)[:, None], x))
        return replace(layer, edits=replace(ready, a=a, d=x))
    at = at or 0
    k, a = _put(k, at, _there(layer.gamma)[..., None] * x), _put(a, at, x)
    if name in chosen.turned:
        k, a, u, main, at = k.flip(-2), a.flip(-2), u.flip(-2), at, main
    return replace(layer, edits=replace(ready, k=k, a=a, u=u, main=main, address=at))


def _put(x: Tensor, at: int, value: Tensor) -> Tensor:
    """``x`` ``[..., M, K]`` with row ``at`` replaced."""
    rows = list(x.unbind(-2))
    rows[at] = value
    return torch.stack(rows, -2)


def _there(x: Tensor | None) -> Tensor:
    if x is None:
        raise InputError("expected the strength of what is replaced, found none")
    return x
