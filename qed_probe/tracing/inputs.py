"""What recomputes every record of a pass offline, with no model."""

from torch import Tensor

from qed_probe.kernels import edits
from qed_probe.models.capture import Captured


def inputs(captured: Captured) -> dict[str, Tensor]:
    """What the mixer has of the store's ``inputs``, by key, ``[1, T, head, ...]``."""
    tokens = captured.observation.tokens
    ready = edits(captured.mixer, tokens)
    found = {"q": ready.q, "g": ready.g.expand_as(ready.q), "d": ready.d, "k": ready.k, "a": ready.a, "u": ready.u}
    found |= {"o": captured.output, "b": tokens.b, "w": tokens.w, "v": tokens.v, "beta": tokens.beta, "gamma": tokens.gamma}
    return {f"inputs/{name}": x for name, x in found.items() if x is not None}
