"""What recomputes every record of a pass offline, with no model."""

import torch
from torch import Tensor

from qed_probe.kernels import edits
from qed_probe.models.capture import Captured


def inputs(captured: Captured) -> dict[str, Tensor]:
    """What the mixer has of the store's ``inputs``, by key, ``[1, T, head, ...]``; an address edit as γε read at the key ε."""
    tokens = captured.observation.tokens
    ready = edits(captured.mixer, tokens)
    k, a = turn_address(ready.k, ready.a, ready.address)
    found = {"q": ready.q, "g": ready.g.expand_as(ready.q), "d": ready.d, "k": k, "a": a, "u": ready.u}
    found |= {"o": captured.output, "b": tokens.b, "w": tokens.w, "v": tokens.v, "beta": tokens.beta, "gamma": tokens.gamma}
    return {f"inputs/{name}": x for name, x in found.items() if x is not None}


def turn_address(k: Tensor, a: Tensor, address: int | None) -> tuple[Tensor, Tensor]:
    """Keys and reads ``[..., M, K]`` with those of the address edit exchanged: ε read at γε is the same edit as γε read at ε."""
    if address is None:
        return k, a
    at = torch.arange(k.shape[-2], device=k.device)[:, None] == address
    return torch.where(at, a, k), torch.where(at, k, a)
