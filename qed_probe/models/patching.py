"""Two runs side by side that exchange what one head has: its d, ε or γ, token by token, or its S.

A batch is ``[2P, …]``: the rows of its second half are the partners of those of the first, in the same order. What is exchanged
in one layer is what both runs have without any exchange, as all below it is theirs alone: a pass patches both ways at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Edits, Mixer, Tokens, edits
from qed_probe.models.language import Cache, LanguageModel


def exchangeable(mixer: Mixer) -> tuple[str, ...]:
    """What a mixer has of it: d if it adds one, ε if it is each token's own, γ if there is an address, S always."""
    has = {
        "direction": mixer.direction is not None,
        "address": mixer.address in ("learned", "key"),
        "gamma": mixer.address is not None,
        "state": True,
    }
    return tuple(name for name, there in has.items() if there)


def check_exchange(mixer: Mixer, what: str) -> None:
    """Raise InputError for what cannot be exchanged in this mixer, with the reason."""
    if what in exchangeable(mixer):
        return
    reason = f"found {what!r}"
    if what == "lambda":
        reason = "found 'lambda', a parameter: it is the same in both runs, and exchanging it does nothing"
    elif what == "address" and mixer.address == "random":
        reason = "found 'address', a fixed vector here: it is the same in both runs, and exchanging it does nothing"
    raise InputError(f"what: expected some of {', '.join(exchangeable(mixer))} in a model of {mixer.name}, {reason}")


@contextmanager
def exchanging(model: LanguageModel, what: str, layer: int, heads: Sequence[int]) -> Iterator[list[Tensor]]:
    """Let these heads of a layer have their partner's d, ε or γ in every pass while the context lasts.

    Yields a list that fills, pass by pass, with e = 1 − aᵀk of the main edit as it would be and as it is, ``[2, 2P, T, H]``: a
    partner's d need not be orthogonal to the key. Raises InputError as ``check_exchange`` does, and for S.
    """
    check_exchange(MIXERS[model.config.mixer], what)
    if what == "state":
        raise InputError("what: expected direction, address or gamma, which each token has, found 'state'")
    mixing, seen = model.mixers[layer], list[Tensor]()
    chosen = _chosen(heads, model)

    def edit(mixer: Mixer, tokens: Tokens) -> Edits:
        own = edits(mixer, tokens)
        made = _exchanged_edits(mixer, tokens, own, what, chosen)
        seen.append(torch.stack([1 - torch.linalg.vecdot(e.a, e.k)[..., e.main] for e in (own, made)]))
        return made

    mixing.editor = edit
    try:
        yield seen
    finally:
        mixing.editor = None


def exchange_states(model: LanguageModel, cache: Cache, layer: int, heads: Sequence[int]) -> Cache:
    """A cache in which these heads of a layer have their partner's S ``[K, V]``; the one that is given stays as it is."""
    fork = cache.fork()
    memory = fork.layers[layer]
    memory.state = _swapped(memory.state[:, None], _chosen(heads, model))[:, 0]
    return fork


def _exchanged_edits(mixer: Mixer, tokens: Tokens, own: Edits, what: str, heads: Tensor) -> Edits:
    if what != "direction":
        given: dict[str, Any] = {what: _swapped(getattr(tokens, what), heads)}
        return edits(mixer, replace(tokens, **given))
    if own.d is None or tokens.lam is None:
        raise InputError("expected edits with an added direction, found none")
    d, a = _swapped(own.d, heads), own.a.clone()
    a[..., own.main, :] = torch.addcmul(own.base, tokens.lam.to(d.dtype)[:, None], d)
    return replace(own, a=a, d=d)


def _chosen(heads: Sequence[int], model: LanguageModel) -> Tensor:
    return torch.isin(torch.arange(model.config.heads), torch.tensor([*heads])).to(model.device)


def _swapped(x: Tensor, heads: Tensor) -> Tensor:
    """``x`` ``[2P, T, H, ...]`` with these heads of either half in the place of the other's."""
    return torch.where(heads.view(-1, *[1] * (x.ndim - 3)), x.roll(len(x) // 2, 0), x)
