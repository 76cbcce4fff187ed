"""One call of a kernel, read: what a layer of another library fed its memory, by the flags of that very call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import Tokens

POSITIONAL = ("query", "key", "value", "g", "beta")
FLAGS = {*POSITIONAL, "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "chunk_size"}
"""What is understood; the last token's state and the size of a chunk change nothing."""
PASSED_ON = {
    "cu_seq_lens_k", "input_ids", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "use_cache",
}  # fmt: skip
"""What a model hands to every layer and the delta rule has no use for."""


@dataclass(frozen=True)
class Call:
    """What one call asks of the recurrence: its tokens, the output's scale, and where its sequences begin.

    ``initial_state`` ``[N, H, K, V]`` is a copy, for caches are written in place; None where the memory started empty.
    """

    tokens: Tokens
    scale: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Call:
    """Read the arguments of one call.

    ``query`` and ``key`` are ``[B, T, Hk, K]``, ``value`` ``[B, T, H, V]``, ``g`` ``[B, T, H]`` or ``[B, T, H, K]``, ``beta``
    ``[B, T, H]``. Raises InputError, naming ``where``, for a flag that is not understood.
    """
    given = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
    unknown = sorted(name for name, x in given.items() if x is not None and name not in FLAGS | PASSED_ON)
    unknown += [f"argument {i + 1}" for i in range(len(POSITIONAL), len(args))]
    missing = [name for name in POSITIONAL if given.get(name) is None]
    if unknown or missing:
        found = [f"{name} not understood" for name in unknown] + [f"no {name}" for name in missing]
        raise InputError(f"{where}: expected a call with {', '.join(POSITIONAL)} and known flags, found {', '.join(found)}")
    q, k, v, g, beta = (given[name].detach() for name in POSITIONAL)
    unit = bool(given.get("use_qk_l2norm_in_kernel"))
    state = given.get("initial_state")
    return Call(
        tokens=Tokens(
            q=_unit(q) if unit else q,
            k=_unit(k) if unit else k,
            v=v,
            g=g if g.ndim == 4 else g[..., None],
            beta=beta,
            unit_key=unit,
        ),
        scale=q.shape[-1] ** -0.5,
        initial_state=None if state is None else state.detach().clone(),
        cu_seqlens=given.get("cu_seqlens"),
    )


def without_pads(call: Call, keep: Tensor) -> Call:
    """The tokens of all rows that ``keep`` ``[B, T]`` names, packed into one row: each row's are a sequence."""
    tokens = {name: x[keep][None] for name in ("q", "k", "v", "g", "beta") if (x := getattr(call.tokens, name)) is not None}
    ends = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
    return replace(call, tokens=replace(call.tokens, **tokens), cu_seqlens=ends)


def _unit(x: Tensor) -> Tensor:
    # As flash-linear-attention and transformers do it, in float32: a key much shorter than 1e-3 is no unit vector.
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
