"""The oracle: one token after another in float64, every mixer and every record written out by its definition.

It shares no code with what it checks, takes the operator norm from a singular value decomposition and reads the memory itself
wherever a record is a read. Slow on purpose; differentiable through autograd.
"""

import itertools
from dataclasses import dataclass, fields
from math import inf

import torch
from torch import Tensor

from qed_probe.kernels.mixers import Tokens


@dataclass(frozen=True)
class Reference:
    """Outputs ``y`` ``[B, T, H, V]``, ``final_state`` ``[N, H, K, V]``, all ``states`` ``[B, T, H, K, V]`` and the records."""

    y: Tensor
    final_state: Tensor
    states: Tensor
    records: dict[str, Tensor]


def reference(mixer: str, tokens: Tokens, *, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Reference:
    """Run the mixer of this name, token by token and head by head, in float64; there is at least one token."""
    given = {f.name: x.double() if isinstance(x := getattr(tokens, f.name), Tensor) else x for f in fields(tokens)}
    B, T, H, V = *tokens.v.shape[:3], tokens.v.shape[-1]
    K = tokens.q.shape[-1]
    repeat = H // tokens.q.shape[2]
    for name in ("q", "k"):
        given[name] = given[name].repeat_interleave(repeat, 2)
    spans = (
        [(b, 0, T) for b in range(B)] if cu_seqlens is None else [(0, int(s), int(e)) for s, e in itertools.pairwise(cu_seqlens)]
    )
    rows: dict[tuple[int, int, int], dict[str, Tensor]] = {}
    finals, marks = [], []
    for n, (b, start, end) in enumerate(spans):
        state = torch.zeros(H, K, V, dtype=torch.float64) if initial_state is None else initial_state[n].double()
        heads = list(state)
        norms = []
        for t in range(start, end):
            for h in range(H):
                at = {f: _at(f, x, b, t, h) for f, x in given.items() if isinstance(x, Tensor)}
                heads[h], row = _token(mixer, heads[h], at, unit_key=tokens.unit_key)
                rows[b, t, h] = row
            if (t - start) % 64 == 63 or t == end - 1:
                norms.append(torch.stack([torch.sqrt((s * s).sum()) for s in heads]))
        finals.append(torch.stack(heads))
        marks += norms

    def stack(name: str) -> Tensor:
        flat = [rows[b, t, h][name] for b in range(B) for t in range(T) for h in range(H)]
        return torch.stack(flat).reshape(B, T, H, *flat[0].shape)

    stacked = {name: stack(name) for name in rows[0, 0, 0]}
    y, states = stacked.pop("y"), stacked.pop("state")
    return Reference(y, torch.stack(finals), states, stacked | {"state_norm": torch.stack(marks)})


def _at(name: str, x: Tensor, b: int, t: int, h: int) -> Tensor:
    return x[h] if name in ("lam", "direction") else x[b, t, h]


def _token(mixer: str, state: Tensor, x: dict[str, Tensor], *, unit_key: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """One token of one head: the new state, and the row of records."""
    g = x.get("g", torch.zeros(1, dtype=torch.float64)).expand(state.shape[0])
    decayed = torch.exp(g)[:, None] * state
    plan, main = _plan(mixer, x, g)
    seen, residuals, memory = decayed, [], decayed
    for m, (k, a, u) in enumerate(plan):
        if m == main:
            seen = memory
        residual = u - memory.T @ a
        memory = memory + torch.outer(k, residual)
        residuals.append(residual)
    y = memory.T @ x["q"]
    row = {"y": y, "state": memory} | _key_records(mixer, x, g, plan, main, unit_key=unit_key)
    row["residual_norm"] = _length(residuals[main])
    row["output_norm"] = _length(y)
    d = _direction(mixer, x, x["k"] if x["k"].ndim == 1 else x["k"][-1])
    if d is not None:
        lam = x.get("lam", torch.zeros((), dtype=torch.float64))
        rho, read = x["q"] @ plan[main][0], seen.T @ d
        row["read"] = read
        row["direction_norm"] = _length(d)
        row["read_norm"] = _length(read)
        row["base_read_norm"] = _length(seen.T @ _base(mixer, x))
        row["correction_norm"] = _length(lam * rho * read)
        without = y + lam * rho * read
        lengths = _length(rho * read) * _length(without)
        row["correction_cosine"] = -(rho * read) @ without / lengths if lengths > 0 else torch.zeros_like(lengths)
    if "gamma" in x:
        address, gamma, beta = x["address"], x["gamma"], _beta(x)
        row["address_cosine"] = address @ x["k"]
        row["query_address"] = x["q"] @ address
        row["address_read_norm"] = _length(decayed.T @ address)
        row["address_correction_norm"] = gamma * torch.abs(x["q"] @ address) * _length(decayed.T @ address)
        row["pre_erase_output_norm"] = _length(decayed.T @ x["q"])
        row["cross_term"] = gamma * beta * torch.abs(x["k"] @ address)
    return memory, row


def _plan(mixer: str, x: dict[str, Tensor], g: Tensor) -> tuple[list[tuple[Tensor, Tensor, Tensor]], int]:
    """The edits (k, a, u) of one token in their order, and which of them is the main one."""
    if mixer == "rwkv7":
        kappa, rate, zero = x["removal_key"], x["in_context_rate"], torch.zeros_like
        return [(rate * kappa, kappa * torch.exp(-g), zero(x["v"])), (x["k"], zero(kappa), x["v"])], 0
    if mixer == "deltaproduct":
        return [(k, beta * k, beta * v) for k, beta, v in zip(x["k"], x["beta"], x["v"], strict=True)], len(x["k"]) - 1
    if mixer == "linear":
        return [(x["k"], torch.zeros_like(x["k"]), x["v"])], 0
    a = _base(mixer, x)
    if mixer.startswith("qed") or mixer == "eda-qed":
        d = _direction(mixer, x, x["k"])
        a = a if d is None else a + x["lam"] * d
    delta = (x["k"], a, x["w"] * x["v"] if "w" in x else x["beta"] * x["v"])
    if not mixer.startswith("eda"):
        return [delta], 0
    erase = (x["address"], x["gamma"] * x["address"], torch.zeros_like(x["v"]))
    return ([delta, erase], 0) if mixer == "eda-reversed" else ([erase, delta], 1)


def _base(mixer: str, x: dict[str, Tensor]) -> Tensor:
    if mixer == "deltaproduct":
        return x["beta"][-1] * x["k"][-1]
    return x["b"] * x["k"] if "b" in x else x["beta"] * x["k"]


def _direction(mixer: str, x: dict[str, Tensor], k: Tensor) -> Tensor | None:
    if mixer in ("linear", "rwkv7"):
        return None
    gate = x["b"] if "b" in x else torch.ones_like(k) * (x["beta"] if x["beta"].ndim == 0 else x["beta"][-1])
    query = x["q"]
    if mixer == "qed-nogate-noproj":
        return query
    if mixer == "qed-noproj":
        return gate * query
    raw = {"qed-nogate": query, "qed-rand": gate * x["direction"] if "direction" in x else query}.get(mixer, gate * query)
    return raw - k * (k @ raw)


def _beta(x: dict[str, Tensor]) -> Tensor:
    if "b" in x:
        return x["b"] @ (x["k"] * x["k"])
    return x["beta"] if x["beta"].ndim == 0 else x["beta"][-1]


def _key_records(
    mixer: str, x: dict[str, Tensor], g: Tensor, plan: list[tuple[Tensor, Tensor, Tensor]], main: int, *, unit_key: bool
) -> dict[str, Tensor]:
    k, a, _ = plan[main]
    plain = mixer in ("linear", "rwkv7")
    base = a if plain else _base(mixer, x)
    eye = torch.eye(len(k), dtype=torch.float64)
    row = {
        "rho": x["q"] @ k,
        "eigenvalue": 1 - a @ k,
        "eigenvalue_projected": 1 - base @ k,
        "key_norm": _length(k),
        "operator_norm": torch.linalg.matrix_norm(eye - torch.outer(k, a), 2),
        "operator_norm_base": torch.linalg.matrix_norm(eye - torch.outer(k, base), 2),
        "retention": torch.exp(g).mean(),
        "log_decay": g.mean(),
        "log_decay_min": g.min(),
        "log_decay_max": g.max(),
    }
    unit = dict(x)
    for name in {"k", "address", "removal_key"} & set(x) - ({"k"} if mixer == "rwkv7" else set()):
        unit[name] = x[name] / torch.linalg.vector_norm(x[name], dim=-1, keepdim=True).clamp(min=1e-30)
    units = _plan(mixer, unit, g)[0] if unit_key else plan
    row["eigenvalue_unit"] = 1 - units[main][1] @ units[main][0]
    if len(plan) > 1:
        row["edit_eigenvalue"] = torch.stack([1 - am @ km for km, am, _ in plan])
        row["edit_eigenvalue_unit"] = torch.stack([1 - am @ km for km, am, _ in units])
    beta = a @ k if plain else _beta(x)
    row["budget_decay"] = 1 - row["retention"]
    row["budget_delta"] = row["retention"] * beta
    if mixer != "rwkv7":
        row["budget_erase"] = row["retention"] * x.get("gamma", torch.zeros_like(beta))
    return row


def _length(x: Tensor) -> Tensor:
    # The norm by its definition, with a gradient of 0 at 0.
    total = (x * x).sum()
    return torch.sqrt(total) if 0 < total < inf else total


def replay(
    q: Tensor, g: Tensor, k: Tensor, a: Tensor, u: Tensor, *, main: int, d: Tensor | None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the canonical inputs of one sequence in float64, token by token.

    ``q`` and ``d`` ``[T, H, K]``, ``g`` ``[T, H, K or 1]``, ``k`` and ``a`` ``[T, H, M, K]``, ``u`` ``[T, H, M, V]``,
    ``initial_state`` ``[H, K, V]``; d reads what edit ``main`` reads, −1 being the last. Returns y = Sᵀq and S̄ᵀd (zeros where d
    is None), ``[T, H, V]`` each.
    """
    q, g, k, a, u = (x.double() for x in (q, g, k, a, u))
    d = torch.zeros_like(q) if d is None else d.double()
    zero = q.new_zeros(q.shape[1], q.shape[2], u.shape[-1])
    state = zero if initial_state is None else initial_state.double()
    outputs, reads = [], []
    for t in range(len(q)):
        state = torch.exp(g[t])[..., None] * state
        for m in range(k.shape[2]):
            if m == main % k.shape[2]:
                reads.append(torch.einsum("hkv,hk->hv", state, d[t]))
            residual = u[t, :, m] - torch.einsum("hkv,hk->hv", state, a[t, :, m])
            state = state + torch.einsum("hk,hv->hkv", k[t, :, m], residual)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), torch.stack(reads)
