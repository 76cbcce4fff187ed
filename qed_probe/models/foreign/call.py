"""One call of a kernel, read: what a layer of another library fed its memory, by the flags of that very call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.kernels import Tokens
from qed_probe.kernels.backend import has_triton
from qed_probe.kernels.mixers import removal_read, to_heads
from qed_probe.models.foreign.families import FLA, Layer

POSITIONAL = ("query", "key", "value", "g", "beta")
TENSORS = {
    "scalar": ("q", "k", "v", "g", "beta"),
    "channel": ("q", "k", "v", "g", "b", "w"),
    "comba": ("q", "k", "p", "v", "g", "beta"),
    "in-context": ("r", "w", "k", "v", "kk", "a", "b"),
}
"""What a kernel is fed, by the mixer's gate or its name. Of "in-context", ``kk`` and ``a`` are κ and η, or ``a`` and ``b`` are
−κ and η⊙κ."""
OPTIONAL = {"g", "kk", "b"}
FLAGS = {
    "transformers": {"initial_state", "use_qk_l2norm_in_kernel", "cu_seqlens"},
    FLA: {
        "initial_state", "state_v_first", "cu_seqlens", "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log",
        "dt_bias", "lower_bound", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "num_householder",
    },
}  # fmt: skip
"""What is understood, by library: a kernel of transformers does not look at most of these."""
IDLE = {"output_final_state", "chunk_size", "safe_gate"}
"""What changes no number: whether the last state is returned, and how the work is cut up."""
ROUNDING = {
    "chunk_gated_delta_rule", "chunk_kda", "chunk_delta_rule", "fused_recurrent_delta_rule", "chunk_gdn2",
    "chunk_gated_delta_product", "chunk_comba",
}  # fmt: skip
"""The kernels whose unit vectors have the dtype of what they are fed, and are no unit vectors in sixteen bits; else float32."""
EPS = 1e-6
"""What is added to a vector's square length before it is made a unit vector."""
PASSED_ON = {
    "cu_seq_lens_k", "input_ids", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "use_cache",
}  # fmt: skip
"""What a model of transformers hands to every layer and the delta rule has no use for."""


@dataclass(frozen=True)
class Call:
    """What one call asks of the recurrence: its tokens, the output's scale, and where its sequences begin.

    ``initial_state`` ``[N, H, K, V]`` is a copy, for caches are written in place; None where the memory started empty. Of the
    kernel's output, every ``rows``-th row is a token's.
    """

    tokens: Tokens
    scale: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    rows: int = 1

    def of_tokens(self, output: Tensor) -> Tensor:
        """The output after each token's last edit, ``[B, T, H, V]``."""
        return output[:, self.rows - 1 :: self.rows]


def read_call(kernel: str, args: Sequence[Any], kwargs: Mapping[str, Any], layer: Layer) -> Call:
    """Read the arguments of one call of a layer's kernel, by its name there.

    ``q`` and ``k`` are ``[B, T, Hk, K]``, ``v`` ``[B, T, H, V]``, ``g`` ``[B, T, H]`` or ``[B, T, H, K]``, ``beta``
    ``[B, T, H]``; several edits a token follow one another along T. Raises InputError, naming the layer, for a flag that is not
    understood.
    """
    given = {name: x for name, x in (*zip(POSITIONAL, args, strict=False), *kwargs.items()) if x is not None}
    for long, short in zip(POSITIONAL[:3], "qkv", strict=True):
        given |= {short: given.pop(long)} if long in given else {}
    mixer, library = layer.family.mixer, layer.family.library
    tensors = TENSORS.get(mixer.name) or TENSORS[mixer.gate]
    known = {*tensors, *FLAGS[library], *IDLE, *(PASSED_ON if library == "transformers" else ())}
    found = [f"{name} not understood" for name in sorted(given.keys() - known)]
    found += [f"argument {i + 1} not understood" for i in range(len(POSITIONAL), len(args))]
    found += [f"no {name}" for name in tensors if name not in given.keys() | OPTIONAL]
    if found:
        raise InputError(
            f"layer {layer.index} ({layer.family.name}): expected a call with {', '.join(tensors)} and known flags, "
            f"found {', '.join(found)}"
        )
    x = {name: value.detach() if isinstance(value, Tensor) else value for name, value in given.items()}
    state = x.get("initial_state")
    if state is not None:
        state = (state.mT if x.get("state_v_first") else state).clone()
    tokens = _in_context(x) if mixer.gate == "in-context" else _delta(x, rounded=kernel in ROUNDING)
    if mixer.name == "comba":
        tokens = _before_decay(tokens, _unit(x["p"], tokens.k.dtype) if tokens.unit_key else x["p"])
    call = Call(tokens, x.get("scale", tokens.q.shape[-1] ** -0.5), state, x.get("cu_seqlens"))
    if mixer.name != "deltaproduct":
        return call
    return _by_token(call, edits=int(x.get("num_householder", layer.edits)))


def not_pads(call: Call, mask: Tensor) -> Tensor:
    """Which tokens matter, ``[B, T]``: not the pads after a row's last token, nor those before its first if they leave no trace.

    They leave none where the memory is empty before them and they write nothing; others are tokens to the memory.
    """
    begun, ahead = mask.cumsum(1) > 0, mask.flip(1).cumsum(1).flip(1) > 0
    silent = call.initial_state is None and not call.tokens.v[~begun].any()
    return ahead & begun if silent else ahead


def pack(call: Call, keep: Tensor) -> Call:
    """The tokens of all rows that ``keep`` ``[B, T]`` names, packed into one row: each row's are a sequence."""
    given = {field.name: getattr(call.tokens, field.name) for field in fields(call.tokens)}
    tokens: dict[str, Any] = {name: x[keep][None] for name, x in given.items() if isinstance(x, Tensor)}
    return replace(call, tokens=replace(call.tokens, **tokens), cu_seqlens=F.pad(keep.sum(1).cumsum(0), (1, 0)))


def _delta(x: Mapping[str, Any], *, rounded: bool) -> Tokens:
    unit = bool(x.get("use_qk_l2norm_in_kernel"))
    q, k = (_unit(x[name], x[name].dtype if rounded else torch.float32) if unit else x[name] for name in "qk")
    return Tokens(q=q, k=k, v=x["v"], g=_decay(x), beta=_beta(x), b=x.get("b"), w=x.get("w"), unit_key=unit)


def _before_decay(tokens: Tokens, p: Tensor) -> Tokens:
    """Comba's: S ← exp(g) S + βk(v − Sᵀp)ᵀ is an edit with gates b = β exp(−g) p/k and w = β, as p is a multiple of k."""
    H, beta = tokens.v.shape[2], tokens.beta
    if beta is None or tokens.g is None or ((p != 0) & (tokens.k == 0)).any():
        raise InputError("comba: expected p to be a multiple of k, found a channel in which only k is 0")
    ratio = (p.float() / tokens.k.float()).nan_to_num(0, 0, 0)
    b = removal_read(to_heads(ratio, H) * beta.float()[..., None], tokens.g)
    return replace(tokens, beta=None, b=b, w=beta[..., None].expand_as(tokens.v))


def _unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    # As flash-linear-attention and transformers do it, in float32: a key much shorter than 1e-3 is no unit vector.
    if x.device.type == "cuda" and has_triton():
        from qed_probe.kernels.norm import unit

        return unit(x, EPS, dtype)
    x = x.float()
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)).to(dtype)


def _decay(x: Mapping[str, Any]) -> Tensor | None:
    """Log decays ``[B, T, H, K or 1]``: as they are given, or −exp(A) softplus(g + bias), or ℓ sigmoid(exp(A) (g + bias))."""
    g: Tensor | None = x.get("g")
    if g is not None and x.get("use_gate_in_kernel"):
        rate = x["A_log"].float().exp().view(-1, *[1] * (g.ndim - 3))
        g = g.float() + (x["dt_bias"].float().view(g.shape[2:]) if "dt_bias" in x else 0)
        g = x["lower_bound"] * torch.sigmoid(rate * g) if "lower_bound" in x else -rate * F.softplus(g)
    return g if g is None or g.ndim == 4 else g[..., None]


def _beta(x: Mapping[str, Any]) -> Tensor | None:
    beta: Tensor | None = x.get("beta")
    if beta is not None and x.get("use_beta_sigmoid_in_kernel"):
        beta = torch.sigmoid(beta.float()) * (2 if x.get("allow_neg_eigval") else 1)
    return beta


def _in_context(x: Mapping[str, Any]) -> Tokens:
    """RWKV-7's: one of its kernels takes κ and η, the other −κ and η⊙κ, of which η is read where κ is not 0."""
    kappa, rate = (x["kk"], x["a"]) if "kk" in x else (-x["a"], (x["b"].float() / -x["a"].float()).nan_to_num(0, 0, 0))
    return Tokens(q=x["r"], k=x["k"], v=x["v"], g=x["w"], removal_key=kappa, in_context_rate=rate, unit_key=False)


def _by_token(call: Call, *, edits: int) -> Call:
    """Give each token its edits; a kernel for one edit a token is fed the decay with a token's first, the query with its last."""
    x, ends = call.tokens, call.cu_seqlens
    rows = edits if x.q.shape[1] == x.k.shape[1] else 1
    k, v, beta = (torch.unflatten(each, 1, (-1, edits)).transpose(2, 3) for each in (x.k, x.v, x.beta) if each is not None)
    g = x.q.new_zeros(*x.q.shape[:2], x.v.shape[2], 1) if x.g is None else x.g
    tokens = replace(x, q=x.q[:, rows - 1 :: rows], k=k, v=v, g=g[:, ::rows], beta=beta)
    return replace(call, tokens=tokens, cu_seqlens=None if ends is None else ends // rows, rows=rows)
