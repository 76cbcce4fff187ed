"""flash-linear-attention's own loops over tokens stand in for its chunked programs, which Triton's interpreter does not run."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Given = dict[str, Any]
"""A call's arguments, for one sequence or for rows of equal length."""


def _unit(x: Tensor) -> Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def _beta(x: Given) -> Tensor:
    beta: Tensor = x["beta"].float().sigmoid() * (1 + x["allow_neg_eigval"])
    return beta


def _gated_delta_rule(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule as loop

    g = naive_gdn_gate(x["g"], x["A_log"], x["dt_bias"])
    q, k = (_unit(x[name]).repeat_interleave(x["v"].shape[2] // x[name].shape[2], 2) for name in "qk")
    found: tuple[Tensor, Tensor] = loop(q, k, x["v"], _beta(x), g, initial_state=state, output_final_state=True)
    return found


def _kda(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda as loop

    gate = x["g"], x["A_log"], x["dt_bias"]
    g = naive_kda_gate(*gate) if x["lower_bound"] is None else naive_kda_lowerbound_gate(*gate, x["lower_bound"])
    found: tuple[Tensor, Tensor] = loop(_unit(x["q"]), _unit(x["k"]), x["v"], g, _beta(x), None, state, True)
    return found


def _delta_rule(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.delta_rule.naive import delta_rule_recurrence as loop

    q, k = (_unit(x[name]) if x["use_qk_l2norm_in_kernel"] else x[name] for name in "qk")
    y, last = loop(*(each.transpose(1, 2) for each in (q, k, x["v"], x["beta"])), state)
    return y.transpose(1, 2), last


def _gdn2(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.gdn2.naive import naive_recurrent_gdn2 as loop

    rest = (x[name] for name in "vgbw")
    found: tuple[Tensor, Tensor] = loop(_unit(x["q"]), _unit(x["k"]), *rest, None, state, True)
    return found


def _gated_delta_product(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product as loop

    q, k, n = _unit(x["q"]), _unit(x["k"]), x["num_householder"]
    found: tuple[Tensor, Tensor] = loop(
        q, k, x["v"], x["g"], x["beta"], q.shape[-1] ** -0.5, initial_state=state, num_householder=n
    )
    return found


def _comba(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    # Its own loop over tokens reads the memory after the decay; its programs read it before.
    H = x["v"].shape[2]
    q, k, p = (_unit(x[name]).repeat_interleave(H // x[name].shape[2], 2) for name in "qkp")
    S = q.new_zeros(len(q), H, q.shape[-1], x["v"].shape[-1]) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        wrote = x["beta"][:, t, :, None] * (x["v"][:, t] - torch.einsum("bhk,bhkv->bhv", p[:, t], S))
        S = x["g"][:, t, :, None, None].exp() * S + k[:, t, :, :, None] * wrote[:, :, None]
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1), S


def _rwkv7(x: Given, state: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence as loop

    y, last = loop(*(x[name].transpose(1, 2) for name in "rkvabw"), state)
    return y.transpose(1, 2) * x["r"].shape[-1] ** 0.5, last  # the loop scales as attention does, and the program does not


LOOPS = {
    "chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kda": _kda,
    "chunk_delta_rule": _delta_rule,
    "chunk_gdn2": _gdn2,
    "chunk_gated_delta_product": _gated_delta_product,
    "chunk_comba": _comba,
    "chunk_rwkv7": _rwkv7,
}


def stand_in(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel of this name that runs the loop: over each packed sequence by itself, and states as the call has them."""

    def kernel(**x: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - flags of any kind
        state, cu_seqlens, flipped = x.pop("initial_state"), x.pop("cu_seqlens"), x.pop("state_v_first", False)
        T, state = x["k"].shape[1] // x.get("num_householder", 1), state.mT if flipped and state is not None else state
        found = []
        for i, (begin, end) in enumerate(itertools.pairwise([0, T] if cu_seqlens is None else cu_seqlens.tolist())):
            part = {
                key: each[:, begin * (each.shape[1] // T) : end * (each.shape[1] // T)]
                if isinstance(each, Tensor) and each.ndim > 2
                else each
                for key, each in x.items()
            }
            found.append(LOOPS[name](part, state if state is None or cu_seqlens is None else state[i : i + 1]))
        y, last = torch.cat([y for y, _ in found], 1), torch.cat([last for _, last in found])
        return y.to(x["v"].dtype), last.mT.contiguous() if flipped else last

    return kernel
