"""What recomputes every record of a pass offline, with no model."""

import torch
from torch import Tensor

from qed_probe.kernels import edits
from qed_probe.models.capture import Captured


def inputs(captured: Captured) -> dict[str, Tensor]:
    """What the mixer has of the store's ``inputs``, by key, ``[1, T, head, ...]``; an address edit as γε read at the key ε."""
    tokens = captured.observation.tokens
    ready = edits(captured.mixer, tokens)
    k, a = ready.k, ready.a
    if ready.address is not None:
        at = torch.arange(k.shape[-2], device=k.device)[:, None] == ready.address
        k, a = torch.where(at, a, k), torch.where(at, k, a)
    found = {"q": ready.q, "g": ready.g.expand_as(ready.q), "d": ready.d, "k": k, "a": a, "u": ready.u}
    found |= {"o": captured.output, "b": tokens.b, "w": tokens.w, "v": tokens.v, "beta": tokens.beta, "gamma": tokens.gamma}
    return {f"inputs/{name}": x for name, x in found.items() if x is not None}
