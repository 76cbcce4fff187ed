"""The delta-rule family as one recurrence: each mixer is a choice of what an edit reads, writes and where.

A token decays the memory ``S`` (``[K, V]`` a head), makes ``M`` rank-one edits and reads::

    S̄ = Diag(exp g) S
    S ← S + k_m (u_m − Sᵀa_m)ᵀ    for m = 1..M
    y = Sᵀq

Sources: GDN-2 arXiv 2605.22791; QED arXiv 2608.13668, Eq. 4–15; EDA arXiv 2606.26560, Eq. 7–18.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qed_probe.errors import InputError


@dataclass(frozen=True)
class Direction:
    """How the added erase direction ``d`` is made: from the query or a fixed random vector, gated by b, made orthogonal to k."""

    source: Literal["query", "random"] = "query"
    gated: bool = True
    projected: bool = True


@dataclass(frozen=True)
class Mixer:
    """One row of the family's table: its decay, its gates, its added direction and its erase address."""

    name: str
    decay: Literal["none", "head", "channel", "safe"]
    gate: Literal["none", "scalar", "channel", "in-context"]
    direction: Direction | None = None
    address: Literal["learned", "key", "random"] | None = None
    address_last: bool = False

    @property
    def recorded_direction(self) -> Direction | None:
        """The direction whose read is recorded: the mixer's own, else the one QED would add; None without an erase gate."""
        return (self.direction or Direction()) if self.gate in ("scalar", "channel") else None


MIXERS: dict[str, Mixer] = {
    mixer.name: mixer
    for mixer in (
        Mixer("linear", "none", "none"),
        Mixer("deltanet", "none", "scalar"),
        Mixer("gdn", "head", "scalar"),
        Mixer("kda", "channel", "scalar"),
        Mixer("kda-safegate", "safe", "scalar"),
        Mixer("gdn2", "channel", "channel"),
        Mixer("qed", "channel", "channel", Direction()),
        Mixer("qed-nogate", "channel", "channel", Direction(gated=False)),
        Mixer("qed-nogate-noproj", "channel", "channel", Direction(gated=False, projected=False)),
        Mixer("qed-rand", "channel", "channel", Direction(source="random")),
        Mixer("qed-noproj", "channel", "channel", Direction(projected=False)),
        Mixer("eda", "safe", "scalar", address="learned"),
        Mixer("eda-same", "safe", "scalar", address="key"),
        Mixer("eda-rand", "safe", "scalar", address="random"),
        Mixer("eda-reversed", "safe", "scalar", address="learned", address_last=True),
        Mixer("eda-gdn2", "safe", "channel", address="learned"),
        Mixer("eda-qed", "safe", "channel", Direction(), address="learned"),
        Mixer("deltaproduct", "head", "scalar"),
        Mixer("comba", "head", "channel"),
        Mixer("rwkv7", "channel", "in-context"),
    )
}


@dataclass(frozen=True)
class Tokens:
    """What a layer feeds its memory at each token, as the model used it and before anything is combined.

    ``q``, ``k`` ``[B, T, Hk, K]`` and ``v`` ``[B, T, H, V]``, with H a multiple of Hk; ``g`` is the log decay
    ``[B, T, H, K]`` or ``[B, T, H, 1]``. ``beta`` ``[B, T, H]`` is a scalar gate, ``b`` ``[B, T, H, K]`` and ``w``
    ``[B, T, H, V]`` are channel gates.
    ``lam`` ``[H]`` is λ and ``direction`` ``[H, K]`` a fixed random z. ``address`` ``[B, T, H, K]`` and ``gamma`` ``[B, T, H]``
    are EDA's ε and γ; ``removal_key`` and ``in_context_rate`` ``[B, T, H, K]`` are RWKV-7's κ and η. A mixer that makes several
    delta edits (``deltaproduct``) has ``k`` ``[B, T, Hk, n, K]``, ``v`` ``[B, T, H, n, V]`` and ``beta`` ``[B, T, H, n]``.
    ``unit_key`` says whether the layer normalises its keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None
    lam: Tensor | None = None
    direction: Tensor | None = None
    address: Tensor | None = None
    gamma: Tensor | None = None
    removal_key: Tensor | None = None
    in_context_rate: Tensor | None = None
    unit_key: bool = True


@dataclass(frozen=True)
class Edits:
    """The canonical inputs of the recurrence, float32 (float64 if given float64), and the vectors that its records speak of.

    ``q`` ``[B, T, H, K]``, ``g`` ``[B, T, H, K or 1]``, ``k`` and ``a`` ``[B, T, H, M, K]``, ``u`` ``[B, T, H, M, V]``.
    ``main`` is the index of the edit that the records describe; ``base`` ``[B, T, H, K]`` is what it reads without the added
    direction ``d``. ``address`` is the index of EDA's address edit, None without one: it reads ε at the key γε, which is the same
    edit as γε at ε and needs no probe for the read by ε.
    """

    q: Tensor
    g: Tensor
    k: Tensor
    a: Tensor
    u: Tensor
    main: int
    base: Tensor
    d: Tensor | None
    address: int | None


def by_token(tokens: Tokens) -> dict[str, Tensor]:
    """What has a token axis, by name."""
    return {name: x for name, x in _tensors(tokens).items() if name not in ("lam", "direction")}


def cut(tokens: Tokens, part: slice | Tensor) -> Tokens:
    """The tokens of one span, or at some places."""
    given: dict[str, Any] = {name: x[:, part] for name, x in by_token(tokens).items()}
    return replace(tokens, **given)


def edits(mixer: Mixer, tokens: Tokens) -> Edits:
    """Combine keys, gates, direction and address into the edits of each token.

    Raises InputError if the mixer needs a tensor that ``tokens`` lacks, or a tensor's shape does not fit.
    """
    tokens = canonical(checked(mixer, tokens))
    q, v = tokens.q, tokens.v
    g = tokens.g if tokens.g is not None else q.new_zeros(*q.shape[:3], 1)
    if mixer.gate == "in-context":
        return _rwkv7(tokens, g)
    k = tokens.k
    if mixer.gate == "scalar":
        beta = _need(tokens.beta)
        gate = beta[..., None].expand_as(k)
        u = beta[..., None] * v
    elif mixer.gate == "channel":
        gate = _need(tokens.b)[..., None, :]
        u = _need(tokens.w)[..., None, :] * v
    else:
        gate, u = torch.zeros_like(k), v
    a = gate * k
    base = _last(a)
    d = _added_direction(mixer, tokens, _last(k), _last(gate))
    if mixer.direction is not None and d is not None:
        a = torch.addcmul(base, _need(tokens.lam)[:, None], d)[..., None, :]
    main, at = k.shape[-2] - 1, None
    if mixer.address is not None:
        address = _need(tokens.address)[..., None, :]
        erased = _need(tokens.gamma)[..., None, None] * address
        silent = torch.zeros_like(u[..., :1, :])
        pairs = ((erased, k), (address, a), (silent, u))
        k, a, u = (torch.cat(pair[::-1] if mixer.address_last else pair, -2) for pair in pairs)
        main, at = (0, 1) if mixer.address_last else (main + 1, 0)
    return Edits(q=q, g=g, k=k, a=a, u=u, main=main, base=base, d=d, address=at)


def _last(x: Tensor) -> Tensor:
    # The gradient of a squeeze is a view, that of a choice a tensor of zeros to be filled.
    return x.squeeze(-2) if x.shape[-2] == 1 else x[..., -1, :]


def project_out(x: Tensor, k: Tensor) -> Tensor:
    """P⊥ₖ(x) = x − k(kᵀx), along the last axis, with the key as used and no division by ‖k‖² (QED, Eq. 6)."""
    return torch.addcmul(x, k, torch.linalg.vecdot(k, x)[..., None], value=-1)


def _added_direction(mixer: Mixer, tokens: Tokens, k: Tensor, gate: Tensor) -> Tensor | None:
    how = mixer.recorded_direction
    if how is None:
        return None
    x = tokens.q if how.source == "query" else _need(tokens.direction).expand_as(k)
    if how.gated:
        x = gate * x
    return project_out(x, k) if how.projected else x


def _rwkv7(tokens: Tokens, g: Tensor) -> Edits:
    kappa, rate = _need(tokens.removal_key), _need(tokens.in_context_rate)
    read = removal_read(kappa, g)
    k = torch.stack([rate * kappa, tokens.k[..., 0, :]], -2)
    a = torch.stack([read, torch.zeros_like(read)], -2)
    u = torch.cat([torch.zeros_like(tokens.v), tokens.v], -2)
    return Edits(q=tokens.q, g=g, k=k, a=a, u=u, main=0, base=read, d=None, address=None)


def removal_read(kappa: Tensor, g: Tensor) -> Tensor:
    """κ⊙exp(−g): RWKV-7 and Comba read the memory as it was before its decay, and this recurrence reads it after.

    Raises InputError beyond float32.
    """
    read = kappa * torch.exp(-g)
    if not read.isfinite().all():
        found = f"found one of {g.min().item():.4g}"
        raise InputError(f"a memory read before its decay: expected log decays whose exp(-g) is finite, {found}")
    return read


_NEEDS = {"none": (), "scalar": ("beta",), "channel": ("b", "w"), "in-context": ("removal_key", "in_context_rate")}


def checked(mixer: Mixer, tokens: Tokens) -> Tokens:
    """Validate, drop what the mixer does not take, and give k, v and beta an edit axis. Raises InputError as ``edits`` does."""
    needs = [*_NEEDS[mixer.gate]]
    needs += ["g"] * (mixer.decay != "none")
    needs += ["lam"] * (mixer.direction is not None)
    needs += ["direction"] * (mixer.direction is not None and mixer.direction.source == "random")
    needs += ["address", "gamma"] * (mixer.address is not None)
    missing = [name for name in needs if getattr(tokens, name) is None]
    if missing:
        raise InputError(f"mixer {mixer.name} needs {', '.join(missing)}; Tokens has none")
    unused: dict[str, Any] = {name: None for name in _tensors(tokens) if name not in ("q", "k", "v", "g", *needs)}
    tokens = replace(tokens, **unused)
    B, T, H, V = *tokens.v.shape[:3], tokens.v.shape[-1]
    K = tokens.q.shape[-1]
    several = (tokens.k.shape[-2],) if tokens.k.ndim == 5 else ()
    alone = mixer.direction is not None or mixer.address is not None or mixer.gate == "in-context"
    if alone and several not in ((), (1,)):
        raise InputError(f"mixer {mixer.name}: expected one delta edit a token, found k of shape {list(tokens.k.shape)}")
    expected: dict[str, tuple[int, ...]] = {
        "q": (B, T, H, K), "k": (B, T, H, *several, K), "v": (B, T, H, *several, V), "g": (B, T, H, K),
        "beta": (B, T, H, *several), "b": (B, T, H, K), "w": (B, T, H, V), "lam": (H,), "direction": (H, K),
        "address": (B, T, H, K), "gamma": (B, T, H),
        "removal_key": (B, T, H, K), "in_context_rate": (B, T, H, K),
    }  # fmt: skip
    for name, x in _tensors(tokens).items():
        wanted, axis = expected[name], _head_axis(name)
        heads = x.shape[axis] if x.ndim > axis else 0
        found = (*x.shape[:axis], H, *x.shape[axis + 1 :]) if heads and H % heads == 0 else tuple(x.shape)
        if found != wanted and not (name == "g" and found == (*wanted[:3], 1)):
            raise InputError(f"mixer {mixer.name}: expected {name} of shape {list(wanted)}, found {list(x.shape)}")
    if several:
        return tokens
    beta = tokens.beta if tokens.beta is None else tokens.beta[..., None]
    return replace(tokens, k=tokens.k[..., None, :], v=tokens.v[..., None, :], beta=beta)


def canonical(tokens: Tokens) -> Tokens:
    """Tokens as ``checked`` returns them, every tensor brought to the value heads and to float32 (float64 if v is float64)."""
    H, dtype = tokens.v.shape[2], torch.float64 if tokens.v.dtype == torch.float64 else torch.float32
    ready: dict[str, Any] = {name: to_heads(x, H, _head_axis(name)).to(dtype) for name, x in _tensors(tokens).items()}
    return replace(tokens, **ready)


def to_heads(x: Tensor, heads: int, axis: int = 2) -> Tensor:
    """Repeat grouped heads in consecutive blocks; nothing is copied where there are ``heads`` already."""
    return x if x.shape[axis] == heads else x.repeat_interleave(heads // x.shape[axis], axis)


def _tensors(tokens: Tokens) -> dict[str, Tensor]:
    return {field.name: x for field in fields(tokens) if isinstance(x := getattr(tokens, field.name), Tensor)}


def _head_axis(name: str) -> int:
    return 0 if name in ("lam", "direction") else 2


def _need(x: Tensor | None) -> Tensor:
    if x is None:
        raise InputError("a tensor that the mixer needs is missing")
    return x
