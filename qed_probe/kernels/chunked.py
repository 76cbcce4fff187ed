"""The recurrence in chunks, in plain PyTorch: any mixer, any device, differentiable, any probe read in the same pass.

Inside a chunk the residuals ``r`` of all edits solve one unit lower-triangular system::

    (I + L) R = U − A₀S₀,   L[(i,m), (j,n)] = a_imᵀ Diag(Π_{j<l≤i} exp g_l) k_jn   for (j,n) before (i,m)

and the chunk's last state is ``(Π exp g) S₀ + K_endᵀ R``. Decays are only ever multiplied: blocks of s tokens are joined to
blocks of 2s, the rows of the second half carrying the decay from the joint to themselves, the columns of the first half the
decay from themselves to the joint. Every factor lies in [0, 1], so decays down to exp(−∞) = 0 neither overflow nor cancel, and
no token's result depends on a later one, to the bit.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from qed_probe.kernels.packing import Grid, bounds, grid, segments


@dataclass(frozen=True)
class Read:
    """What the memory gave back.

    With Ŝ the decayed memory before a token's first edit: ``y`` ``[B, T, H, V]`` is Sᵀq after the last edit, without the output's
    scale, and ``decayed_y`` Ŝᵀq; ``residual`` ``[B, T, H, M, V]`` is what each edit wrote; ``probes`` ``[B, T, H, P, V]`` is Ŝᵀp
    and ``decayed_a`` ``[B, T, H, M, V]`` is Ŝᵀa, with no M where no probes were asked for; ``final_state`` ``[N, H, K, V]``;
    ``state_norm`` ``[marks, H]`` is ‖S‖_F at tokens 63, 127, … of each sequence and its last; ``states``
    ``[positions, H, K, V]``.
    """

    y: Tensor
    decayed_y: Tensor
    residual: Tensor
    probes: Tensor
    decayed_a: Tensor
    final_state: Tensor
    state_norm: Tensor
    states: Tensor


BY_TOKEN = ("y", "decayed_y", "residual", "probes", "decayed_a")
"""The fields of a Read that have a token axis, the second."""


def recurrence(
    q: Tensor,
    g: Tensor,
    k: Tensor,
    a: Tensor,
    u: Tensor,
    *,
    probes: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    states_at: tuple[int, ...] = (),
    chunk: int = 64,
) -> Read:
    """Run S̄ = Diag(exp g)S; S ← S + k_m(u_m − Sᵀa_m)ᵀ, m = 1..M; y = Sᵀq over every sequence.

    ``q`` ``[B, T, H, K]``, ``g`` ``[B, T, H, K or 1]`` in [−∞, 0], ``k`` and ``a`` ``[B, T, H, M, K]``, ``u``
    ``[B, T, H, M, V]``, ``probes`` ``[B, T, H, P, K]``; ``initial_state`` ``[N, H, K, V]``, N sequences: the B rows, or those
    that ``cu_seqlens`` ``[N + 1]`` marks in a single row. ``states_at`` are packed token indices whose state is returned.
    ``chunk`` is a power of two up to 64. Computes and returns float32 (float64 if ``q`` is float64).
    """
    ends = bounds(q.shape[0], q.shape[1], cu_seqlens)
    if initial_state is None:
        initial_state = q.new_zeros(len(ends) - 1, *q.shape[2:], u.shape[-1])
    probes = q[..., None, :][..., :0, :] if probes is None else probes
    spans = segments(ends) if q.device.type == "cpu" and q.shape[0] == 1 else []
    if len(spans) < 2:
        return _recurrence(ends, [q, g, k, a, u, probes], initial_state, states_at, chunk)
    state, reads = initial_state, []
    for span in spans:
        part = slice(span.start, span.stop)
        inputs = [x[:, part] for x in (q, g, k, a, u, probes)]
        wanted = tuple(token - span.start for token in states_at if span.start <= token < span.stop)
        read = _recurrence(span.ends, inputs, state[span.sequences], wanted, chunk)
        state = torch.cat([state[: span.sequences.start], read.final_state, state[span.sequences.stop :]])
        reads.append(read)
    joined = {name: torch.cat([getattr(read, name) for read in reads], 1) for name in BY_TOKEN}
    once = {name: torch.cat([getattr(read, name) for read in reads]) for name in ("state_norm", "states")}
    return Read(**joined, **once, final_state=state)


def _recurrence(
    ends: tuple[int, ...], inputs: list[Tensor], initial_state: Tensor, states_at: tuple[int, ...], chunk: int
) -> Read:
    """Run one segment of the packed rows, all its chunks at once; ``inputs`` are q, g, k, a, u and probes."""
    q, g, k, a, u, probes = inputs
    B, T, H, K = q.shape
    M, V = u.shape[-2:]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    longest = max(b - a for a, b in itertools.pairwise(ends))
    layout = grid(ends, min(chunk, 1 << max(longest - 1, 0).bit_length()), q.device)
    c, w = (_fill(layout, t, dtype).contiguous() for t in (k, u))
    x = torch.cat([_fill(layout, t, dtype) for t in (a, q[..., None, :])], -2)
    # Probes are rows of their own, so that asking for them leaves the bits of y as they are.
    p = _fill(layout, probes, dtype).contiguous()
    within, from_start, to_end = _couple([x, p], c, _fill(layout, g[..., None, :], dtype).exp())
    n, C = layout.chunks, layout.size
    entering = x * from_start
    leaving = (c * to_end).flatten(2, 3).transpose(-1, -2)
    known = torch.cat([entering[..., :M, :], w], -1).flatten(2, 3)
    lower = _add_own_edits(within[0][..., :M, :], x[..., :M, :], c).flatten(2, 3)
    seen, written = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True).split([K, V], -1)
    carry = _plus(torch.diag_embed(from_start[:, :, -1, 0].expand(n, H, K)), leaving, seen, sign=-1)
    starts, after, final = _scan(layout, carry, leaving @ written, initial_state.to(dtype))
    residual = _plus(written, seen, starts, sign=-1)
    decayed_y = _plus(entering[..., M, :] @ starts, within[0][..., M, :], residual)
    read = _plus((p * from_start).flatten(2, 3) @ starts, within[1].flatten(2, 3), residual)
    reading = M if p.shape[-2] else 0
    inside = within[0][..., :reading, :].flatten(2, 3)
    decayed_a = _plus(entering[..., :reading, :].flatten(2, 3) @ starts, inside, residual)
    residual = residual.view(n, H, C, M, V)
    y = decayed_y + ((x[..., M:, :] @ c.transpose(-1, -2)) @ residual)[..., 0, :]
    return Read(
        y=layout.take(y).view(B, T, H, V),
        decayed_y=layout.take(decayed_y).view(B, T, H, V),
        residual=layout.take(residual).view(B, T, H, M, V),
        probes=layout.take(read.view(n, H, C, p.shape[-2], V)).view(B, T, H, p.shape[-2], V),
        decayed_a=layout.take(decayed_a.view(n, H, C, reading, V)).view(B, T, H, reading, V),
        final_state=final,
        state_norm=torch.linalg.vector_norm(after, dim=(-2, -1))[layout.marks],
        states=_states(layout, states_at, starts, g.to(dtype).flatten(0, 1), c, residual),
    )


def _plus(base: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> Tensor:
    """Add ±xy to base, batched matrices, without a product of its own."""
    return torch.baddbmm(base.flatten(0, 1), x.flatten(0, 1), y.flatten(0, 1), alpha=sign).view_as(base)


def _fill(layout: Grid, x: Tensor, dtype: torch.dtype) -> Tensor:
    return layout.fill(x.to(dtype).flatten(0, 1))


def _couple(rows: list[Tensor], c: Tensor, decay: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The decayed products of every row with every column of an earlier token, and the decays from the start and to the end.

    ``rows`` are ``[n, H, C, R, K]`` each, ``c`` ``[n, H, C, M, K]`` the columns k_1..k_M. Returns a strictly lower
    ``[n, H, C, R, C·M]`` for each of the rows, and two decays ``[n, H, C, 1, K]``.
    """
    n, H, C, M, K = c.shape
    G = decay.shape[-1]
    within = [c.new_zeros(n, H, C, x.shape[-2], C * M) for x in rows]
    prefix, suffix = decay, torch.ones_like(decay)
    size = 1
    while size < C:
        pairs = (n, H, C // (2 * size), 2, size)
        upper, lower = prefix.view(*pairs, 1, G).unbind(3)
        left, right = suffix.view(*pairs, 1, G).unbind(3)
        early = (c.view(*pairs, M, K)[:, :, :, 0] * left).flatten(3, 4).transpose(-1, -2)
        for x, product in zip(rows, within, strict=True):
            R = x.shape[-2]
            late = (x.view(*pairs, R, K)[:, :, :, 1] * lower).flatten(3, 4)
            halves = product.view(*pairs[:4], size * R, *pairs[2:4], size * M)
            halves[:, :, :, 1, :, :, 0].diagonal(0, 2, 4).copy_((late @ early).movedim(2, -1))
        prefix = torch.cat([upper, lower * upper[:, :, :, -1:]], 3)
        suffix = torch.cat([left * lower[:, :, :, -1:], right], 3)
        size *= 2
    return within, prefix.view(n, H, C, 1, G), suffix.view(n, H, C, 1, G)


def _add_own_edits(lower: Tensor, a: Tensor, k: Tensor) -> Tensor:
    """Let edit m of a token see its own token's edits before m: nothing to add where M = 1."""
    n, H, C, M, _ = a.shape
    if M == 1:
        return lower
    own = torch.tril(a @ k.transpose(-1, -2), -1)
    mask = torch.eye(C, dtype=torch.bool, device=a.device)[:, None, :, None]
    return torch.where(mask, own[:, :, :, :, None], lower.view(n, H, C, M, C, M)).view(n, H, C, M, C * M)


def _scan(layout: Grid, carry: Tensor, gain: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S ← carry·S + gain, chunk by chunk, all sequences at once: the states around every chunk, and each sequence's last."""
    state = state[layout.order]
    before, after = [state[:0]], [state[:0]]
    for at in layout.steps:
        running = state[: len(gain[at])]
        left = _plus(gain[at], carry[at], running)
        before.append(running)
        after.append(left)
        state = torch.cat([left, state[len(left) :]]) if len(left) < len(state) else left
    final = torch.zeros_like(state).index_copy(0, layout.order, state)
    return torch.cat(before)[layout.back], torch.cat(after)[layout.back], final


def _states(layout: Grid, positions: tuple[int, ...], starts: Tensor, g: Tensor, c: Tensor, residual: Tensor) -> Tensor:
    """The state right after each of these packed tokens, ``[positions, H, K, V]``."""
    states = [starts[:0]]
    for token in positions:
        place = token if layout.slot is None else int(layout.slot[token])
        at, last = divmod(place, layout.size)
        decay = g[token - last : token + 1].exp().flip(0).cumprod(0).flip(0)
        since = torch.cat([decay[1:], torch.ones_like(decay[:1])]).transpose(0, 1)[:, :, None]
        writes = (c[at, :, : last + 1] * since).flatten(1, 2).transpose(-1, -2) @ residual[at, :, : last + 1].flatten(1, 2)
        states.append((decay[0, :, :, None] * starts[at] + writes)[None])
    return torch.cat(states)
