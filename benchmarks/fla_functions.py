"""The functions of flash-linear-attention that run the same recurrences, made ready to be timed.

Each takes our ``Tokens`` and returns the call to time: forward only, from a zero state, with scale 1. The call returns ``y``
``[B, T, H, V]`` in the values' dtype and nothing else, neither a record nor the last state. Queries and keys come normalised,
gates and log decays (float32) as they are used. Whatever the function does with them is timed; what is prepared is said at each.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import triton
from torch import Tensor
from triton.runtime import Autotuner

from qed_probe.kernels import MIXERS, Tokens, edits

FLOOR = -0.2
"""The strongest log decay that the forms of ``BOUNDED`` are told to expect."""


@dataclass(frozen=True)
class Peer:
    """The mixer that a function runs, and how its call is prepared from that mixer's tokens."""

    mixer: str
    prepare: Callable[[Tokens], Callable[[], Tensor]]


def chunk_gdn2(tokens: Tokens, *, bounded: bool = False) -> Callable[[], Tensor]:
    """GDN-2 in chunks of 64 tokens; nothing is prepared."""
    from fla.ops.gdn2 import chunk_gdn2 as peer

    x = tokens
    return lambda: peer(x.q, x.k, x.v, x.g, x.b, x.w, scale=1.0, safe_gate=bounded)[0]


def fused_recurrent_gdn2(tokens: Tokens) -> Callable[[], Tensor]:
    """GDN-2 token by token; nothing is prepared."""
    from fla.ops.gdn2 import fused_recurrent_gdn2 as peer

    x = tokens
    return lambda: peer(x.q, x.k, x.v, x.g, x.b, x.w, scale=1.0)[0]


def chunk_kda(tokens: Tokens, *, bounded: bool = False) -> Callable[[], Tensor]:
    """KDA in chunks of 64 tokens; nothing is prepared."""
    from fla.ops.kda import chunk_kda as peer

    x = tokens
    return lambda: peer(x.q, x.k, x.v, x.g, x.beta, scale=1.0, safe_gate=bounded)[0]


def chunk_dplr(tokens: Tokens, *, bounded: bool = False) -> Callable[[], Tensor]:
    """QED through S ← Diag(exp g)S + b(aᵀS) + kuᵀ, in chunks of 16 tokens (64 if the decay is bounded).

    Prepared beforehand, which favours the peer: QED's a = b⊙k + λd, turned into the a = −(b⊙k + λd)⊙exp(g) that reads the memory
    before its decay, and u = w⊙v, both rounded to the values' dtype. Its b is our k.
    """
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule as peer

    x, ready = tokens, edits(MIXERS["qed"], tokens)
    a = (-ready.a[:, :, :, 0] * ready.g.exp()).to(x.v.dtype)
    u = ready.u[:, :, :, 0].to(x.v.dtype)
    return lambda: peer(x.q, x.k, u, a, x.k, x.g, scale=1.0, lower_bound=FLOOR if bounded else None)[0]


PEERS = {
    "chunk_gdn2": Peer("gdn2", chunk_gdn2),
    "fused_recurrent_gdn2": Peer("gdn2", fused_recurrent_gdn2),
    "chunk_kda": Peer("kda", chunk_kda),
    "qed by chunk_dplr_delta_rule": Peer("qed", chunk_dplr),
}
"""As they are called where decays may be of any strength, which is what our programs take."""
BOUNDED = {
    "chunk_gdn2, safe gate": Peer("gdn2", partial(chunk_gdn2, bounded=True)),
    "chunk_kda, safe gate": Peer("kda", partial(chunk_kda, bounded=True)),
    "qed by chunk_dplr_delta_rule, bounded": Peer("qed", partial(chunk_dplr, bounded=True)),
}
"""The forms that are wrong where decays are stronger than they were told."""


def absence() -> str:
    """Why the peers cannot run, in one line; empty if they can."""
    try:
        import fla.ops.gdn2  # noqa: F401
    except ImportError as error:
        return f"no peers ({error}): pip install 'flash-linear-attention>=0.6'"
    return ""


def hasten_tuning() -> None:
    """Have flash-linear-attention tune its kernels in two minutes instead of many, and choose as it would.

    It tries every configuration of a kernel at each new number of heads. Here those of a kernel are compiled side by side, not
    one after another, and each is timed for 20 ms instead of 100. What it finds stays in Triton's cache on disk.
    """
    listed = Autotuner.prune_configs

    def compiled(self: Autotuner, kwargs: dict[str, Any]) -> list[triton.Config]:
        configs: list[triton.Config] = listed(self, kwargs)
        given = {name: x for name, x in (self.nargs | kwargs).items() if name != "warmup"}
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.warmup(**given, **config.all_kwargs())
        return configs

    Autotuner.prune_configs = compiled
    Autotuner.do_bench = staticmethod(partial(triton.testing.do_bench, warmup=5, rep=20))
