"""The layer that owns a memory: from hidden states to the tokens that the recurrence takes, and from its reads back.

Parameters are named as in GDN-2's public layer; ``theta``, ``beta_proj``, ``gamma_proj`` and ``e_proj`` are added to them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Choice, Edits, Mixer, Observation, Tokens, merged, run, run_edits
from qed_probe.kernels.packing import bounds, first_tokens
from qed_probe.models.config import ModelConfig
from qed_probe.models.layers import HeadLinear, RMSNorm, ShortConv, normalise

Observer = Callable[[Observation, Tensor, Tensor | None, Tensor | None], None]
"""Called after a layer's pass with what was seen, the output ``[B, T, H, V]``, the initial state and cu_seqlens."""
Editor = Callable[[Mixer, Tokens], Edits]
"""Makes the edits of a pass in the place of ``kernels.edits``."""


@dataclass
class Memory:
    """What one layer carries on: the last inputs of its convolutions ``[B, conv − 1, channels]`` and S ``[B, H, K, V]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Tensor


class DeltaMixer(nn.Module):
    """One delta-rule memory: projections, short convolutions, gates, recurrence, gated output norm.

    ``strength``, one number or one a head, scales λ, or γ where there is an address and no added direction, and ``backend`` says
    what runs the recurrence. ``step`` ``[H]`` scales λ of the output of the token itself, where that is to be another than the
    memory's. The heads ``acting_at`` (all if None) run as the arm ``acting``, whose random vectors, if it needs some that this
    mixer has not, are ``drawn``. None of it is saved. While there are ``observers``, every pass is handed to the last of them,
    recorded and with the states after the packed tokens that it comes with, with None for these it is not recorded, and with the
    output of the memory, whatever ``step`` is. Nor is it recorded while there is an ``editor``, whose edits are run then, in
    PyTorch.
    """

    random_direction: Tensor
    random_address: Tensor
    acting: Mixer
    acting_at: Tensor | None
    drawn: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kind = MIXERS[config.mixer]
        self.scale = config.key_dim**-0.5
        self.strength: float | Tensor = 1.0
        self.step: Tensor | None = None
        self.acting, self.acting_at, self.drawn = self.kind, None, None
        self.backend: Choice = "auto"
        self.editor: Editor | None = None
        self.observers: list[tuple[Observer, tuple[int, ...] | None]] = []
        hidden, heads, K, V = config.hidden, config.heads, config.key_dim, config.value_dim
        self.edits = config.edits if config.mixer == "deltaproduct" else 1
        self.q_proj = nn.Linear(hidden, heads * K, bias=False)
        self.k_proj = nn.Linear(hidden, heads * self.edits * K, bias=False)
        self.v_proj = nn.Linear(hidden, heads * self.edits * V, bias=False)
        self.q_conv1d = ShortConv(heads * K, config.conv)
        self.k_conv1d = ShortConv(heads * self.edits * K, config.conv)
        self.v_conv1d = ShortConv(heads * self.edits * V, config.conv)
        self._add_gates()
        self._add_decay()
        if self.kind.direction is not None:
            self.theta = nn.Parameter(torch.full((heads,), -2.0))
            if self.kind.direction.source == "random":
                self.register_buffer("random_direction", F.normalize(torch.randn(heads, K), dim=-1))
        self.g_proj = nn.Sequential(nn.Linear(hidden, V, bias=False), nn.Linear(V, heads * V))
        self.o_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(heads * V, hidden, bias=False)

    def _add_gates(self) -> None:
        config = self.config
        hidden, heads, K, V = config.hidden, config.heads, config.key_dim, config.value_dim
        if self.kind.gate == "scalar":
            self.beta_proj = nn.Linear(hidden, heads * self.edits, bias=False)
        elif self.kind.gate == "channel":
            self.b_proj = nn.Linear(hidden, heads * K, bias=False)
            self.w_proj = nn.Linear(hidden, heads * V, bias=False)
        if self.kind.address is not None:
            self.gamma_proj = nn.Linear(hidden, heads, bias=False)
        if self.kind.address == "learned":
            rank = config.address_rank
            self.e_proj = nn.Sequential(nn.Linear(hidden, heads * rank, bias=False), HeadLinear(heads, rank, K))
        elif self.kind.address == "random":
            self.register_buffer("random_address", F.normalize(torch.randn(heads, K), dim=-1))

    def _add_decay(self) -> None:
        config = self.config
        hidden, heads, K, V = config.hidden, config.heads, config.key_dim, config.value_dim
        if self.kind.decay == "none":
            return
        if self.kind.decay == "head":
            self.a_proj = nn.Linear(hidden, heads, bias=False)
        else:
            self.f_proj = nn.Sequential(nn.Linear(hidden, V, bias=False), nn.Linear(V, heads * K, bias=False))
        # FLA's start: A uniform in [1, 16], softplus(dt_bias) log-uniform in [1e-3, 1e-1].
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        step = torch.empty(heads * (1 if self.kind.decay == "head" else K)).uniform_(log(1e-3), log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # θ, A_log, dt_bias and the random vectors are this module's own: .to(bfloat16) moves them but never rounds them.
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        super()._apply(lambda x: _at_least_float32(x, fn(x)), recurse=False)  # type: ignore[no-untyped-call]
        return self

    def new_memory(self, batch: int) -> Memory:
        """An empty memory for ``batch`` sequences."""
        config = self.config
        state = torch.zeros(batch, config.heads, config.key_dim, config.value_dim, device=self.q_proj.weight.device)
        return Memory(self.q_conv1d.new_state(batch), self.k_conv1d.new_state(batch), self.v_conv1d.new_state(batch), state)

    def forward(self, x: Tensor, memory: Memory | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix ``x`` ``[B, T, hidden]`` through the memory, which is updated in place, to ``[B, T, hidden]``.

        A packed row, which comes with ``cu_seqlens``, begins with empty memories: ``memory`` is None then.

        o = scale · Sᵀq; output = o_proj(RMSNorm(o) ⊙ gate(g_proj x)), the gate a sigmoid or SiLU.
        """
        initial_state = None if memory is None else memory.state
        convolved = self._convolve(x, memory, cu_seqlens)
        seen = self._see(self.acting, x, convolved, initial_state, cu_seqlens)
        if self.acting_at is not None:
            seen = merged(seen, self._see(self.kind, x, convolved, initial_state, cu_seqlens), self.acting_at)
        if memory is not None:
            memory.state = seen.final_state
        o = (self.scale * seen.y).to(seen.tokens.v.dtype)
        if self.observers:
            self.observers[-1][0](seen, o, initial_state, cu_seqlens)
        if self.step is not None:
            o = (self.scale * self._restep(seen, self.step)).to(o.dtype)
        gate = (F.silu if self.config.output_gate == "silu" else torch.sigmoid)(self.g_proj(x)).view_as(o)
        y: Tensor = self.o_proj((self.o_norm(o) * gate).flatten(2))
        return y

    def _see(
        self, kind: Mixer, x: Tensor, convolved: tuple[Tensor, Tensor, Tensor], state: Tensor | None, cu_seqlens: Tensor | None
    ) -> Observation:
        """The memory's pass as an arm, recorded while there is an observer of records, or a step of its own."""
        tokens, states_at = self._tokens(kind, x, *convolved), self.observers[-1][1] if self.observers else None
        # The recurrence chooses its own precision: autocast would round the products inside it.
        with torch.autocast(x.device.type, enabled=False):
            if self.editor is not None:
                return run_edits(tokens, self.editor(kind, tokens), initial_state=state, cu_seqlens=cu_seqlens)
            return run(
                kind,
                tokens,
                record=states_at is not None or self.step is not None,
                initial_state=state,
                cu_seqlens=cu_seqlens,
                states_at=states_at or (),
                backend=self.backend,
            )

    def _convolve(self, x: Tensor, memory: Memory | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values after their convolutions, ``[B, T, channels]``."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if memory is None:
            first = None if cu_seqlens is None else first_tokens(bounds(len(x), x.shape[1], cu_seqlens), x.device)
            return self.q_conv1d.fresh(q, first), self.k_conv1d.fresh(k, first), self.v_conv1d.fresh(v, first)
        q, memory.q = self.q_conv1d(q, memory.q)
        k, memory.k = self.k_conv1d(k, memory.k)
        v, memory.v = self.v_conv1d(v, memory.v)
        return q, k, v

    def lam(self) -> Tensor:
        """λ_h = strength · λ_max · sigmoid(θ_h), ``[H]`` float32 (QED, Eq. 13); zeros where the mixer adds no direction."""
        if self.kind.direction is None:
            return torch.zeros(self.config.heads, device=self.q_proj.weight.device)
        return self.strength * self.config.lambda_max * torch.sigmoid(self.theta)

    def _restep(self, seen: Observation, step: Tensor) -> Tensor:
        """Make the last step with another λ', that of strength ``step``: y + (λ − λ')ρS̄ᵀd, float32."""
        lam = (self.strength - step) * self.config.lambda_max * torch.sigmoid(self.theta)
        return torch.addcmul(seen.y, (lam * seen.records["rho"])[..., None], seen.records["read"])

    def _tokens(self, kind: Mixer, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tokens:
        config = self.config
        heads = (*x.shape[:2], config.heads)
        several = (self.edits,) if config.mixer == "deltaproduct" else ()
        k = _unit(k.view(*heads, *several, config.key_dim), config.unit_eps)
        return Tokens(
            q=_unit(q.view(*heads, config.key_dim), config.unit_eps),
            k=k,
            v=v.view(*heads, *several, config.value_dim),
            g=None if kind.decay == "none" else self._log_decay(x),
            beta=config.gate_max * torch.sigmoid(self.beta_proj(x)).view(*heads, *several) if kind.gate == "scalar" else None,
            b=config.gate_max * torch.sigmoid(self.b_proj(x)).view(*heads, -1) if kind.gate == "channel" else None,
            w=torch.sigmoid(self.w_proj(x)).view(*heads, -1) if kind.gate == "channel" else None,
            lam=None if kind.direction is None else self.lam(),
            direction=self._random("direction") if kind.direction is not None and kind.direction.source == "random" else None,
            address=None if kind.address is None else self._address(kind, x, k),
            gamma=None if kind.address is None else self._erase_gate(x),
        )

    def _erase_gate(self, x: Tensor) -> Tensor:
        gamma: Tensor = torch.sigmoid(self.gamma_proj(x))
        return gamma if self.kind.direction is not None else self.strength * gamma

    def _random(self, what: str) -> Tensor:
        """The fixed random vectors of the heads, ``[H, K]``: this mixer's own, or those that were drawn for it."""
        own: Tensor = getattr(self, f"random_{what}") if hasattr(self, f"random_{what}") else _given(self.drawn)
        return own

    def _log_decay(self, x: Tensor) -> Tensor:
        """−A·softplus(f + bias), or with EDA's safe gate ℓ + |ℓ|exp(−A·softplus(f + bias)/|ℓ|) (its Eq. 14–15), in float32."""
        raw: Tensor = self.a_proj(x) if self.kind.decay == "head" else self.f_proj(x)
        step = F.softplus(raw.float() + self.dt_bias)
        fall = step.view(*x.shape[:2], self.config.heads, -1) * self.A_log.exp()[:, None]
        bound = self.config.lower_bound
        return -bound * torch.expm1(fall / bound) if self.kind.decay == "safe" else -fall

    def _address(self, kind: Mixer, x: Tensor, k: Tensor) -> Tensor:
        if kind.address == "key":
            return k
        if kind.address == "random":
            return self._random("address").to(k.dtype).expand_as(k)
        return _unit(self.e_proj(x), self.config.unit_eps)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise InputError("expected random vectors, drawn for an arm that needs some, found none")
    return x


def _unit(x: Tensor, eps: float) -> Tensor:
    # x / √(‖x‖² + eps) by the norm that divides by the mean's root.
    size = x.shape[-1]
    return normalise(x, torch.full((size,), size**-0.5, device=x.device), eps / size, x.dtype)


def _at_least_float32(before: Tensor, after: Tensor) -> Tensor:
    return after if after.dtype in (torch.float32, torch.float64) else before.to(after.device)
