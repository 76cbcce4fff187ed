"""The recurrence in chunks, in plain PyTorch: any mixer, any device, differentiable, any probe read in the same pass.

Inside a chunk what the edits read, ``P``, solves one unit lower-triangular system::

    (I + L) P = LU + A₀S₀,   L[(i,m), (j,n)] = a_imᵀ Diag(Π_{j<l≤i} exp g_l) k_jn   for (j,n) before (i,m)

what they write is ``R = U − P``, and the chunk's last state is ``(Π exp g) S₀ + K_endᵀR``. Solving for R would lose P where the
memory holds little beside what is written. Decays are only ever multiplied: blocks of s tokens are joined to
blocks of 2s, the rows of the second half carrying the decay from the joint to themselves, the columns of the first half the
decay from themselves to the joint. Every factor lies in [0, 1], so decays down to exp(−∞) = 0 neither overflow nor cancel, and
no token's result depends on a later one, to the bit.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from qed_probe.kernels.packing import Grid, bounds, grid


@dataclass(frozen=True)
class Read:
    """What the memory gave back.

    With Ŝ the decayed memory before a token's first edit: ``y`` ``[B, T, H, V]`` is Sᵀq after the last edit, without the output's
    scale, ``overlap`` ``[B, T, H, M]`` qᵀk and ``decayed_y`` Ŝᵀq; ``found`` ``[B, T, H, M, V]`` is Sᵀa, what each edit read, and
    ``residual`` u − Sᵀa, what it wrote; ``probes`` ``[B, T, H, P, V]`` is Ŝᵀp, with no rows where no probes were given.
    ``final_state`` ``[N, H, K, V]``; ``state_norm`` ``[marks, H]`` is ‖S‖_F at tokens 63, 127, … of each sequence and its last;
    ``states`` ``[positions, H, K, V]``.
    """

    y: Tensor
    overlap: Tensor
    decayed_y: Tensor
    residual: Tensor
    found: Tensor
    probes: Tensor
    final_state: Tensor
    state_norm: Tensor
    states: Tensor


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
    """Run S̄ = Diag(exp g)S; S ← S + k_m(u_m − Sᵀa_m)ᵀ, m = 1..M; y = Sᵀq over every sequence, all its chunks at once.

    ``q`` ``[B, T, H, K]``, ``g`` ``[B, T, H, K or 1]`` in [−∞, 0], ``k`` and ``a`` ``[B, T, H, M, K]``, ``u``
    ``[B, T, H, M, V]``, ``probes`` ``[B, T, H, P, K]``; ``initial_state`` ``[N, H, K, V]``, N sequences: the B rows, or those
    that ``cu_seqlens`` ``[N + 1]`` marks in a single row. ``states_at`` are packed token indices whose state is returned.
    ``chunk``, a power of two up to 64, is how many edits a chunk holds, at least one token's. Computes and returns float32
    (float64 if ``q`` is float64).
    """
    B, T, H, K = q.shape
    M, V = u.shape[-2:]
    ends = bounds(B, T, cu_seqlens)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    state = q.new_zeros(len(ends) - 1, H, K, V) if initial_state is None else initial_state
    longest = max(b - a for a, b in itertools.pairwise(ends))
    per_token = 1 << (M - 1).bit_length()
    layout = grid(ends, min(max(chunk // per_token, 1), 1 << max(longest - 1, 0).bit_length()), q.device)
    c, w = (_fill(layout, x, dtype).contiguous() for x in (k, u))
    w = w.flatten(2, 3)
    # Probes are products of their own: asking for them leaves the bits of y as they are.
    rows = [torch.cat([_fill(layout, x, dtype) for x in (a, q[..., None, :])], -2)]
    rows += [] if probes is None else [_fill(layout, probes, dtype).contiguous()]
    within, entering, leaving, total = couple(rows, c, _fill(layout, g[..., None, :], dtype).exp())
    lower = no_dust(add_own_edits(within[0][..., :M, :], rows[0][..., :M, :], c).flatten(2, 3))
    known = torch.cat([entering[0][..., :M, :].flatten(2, 3), lower @ w], -1)
    seen, found = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True).split([K, V], -1)
    carry = no_dust(_add(torch.diag_embed(total.expand(*total.shape[:2], K)), leaving, no_dust(seen), sign=-1))
    starts, norms, final = _scan(layout, carry, leaving @ (w - found), state.to(dtype))
    found = torch.baddbmm(found.flatten(0, 1), seen.flatten(0, 1), starts.flatten(0, 1)).view_as(w)
    residual = w - found

    def by_token(x: Tensor) -> Tensor:
        rows = x.shape[2] // layout.size
        return layout.take(x.view(layout.chunks, H, layout.size, rows, V)).view(B, T, H, rows, V)

    def read(kind: int, at: slice) -> Tensor:
        x, by = entering[kind][..., at, :].flatten(2, 3), within[kind][..., at, :].flatten(2, 3)
        return by_token(_add(x @ starts, by, residual))

    y = decayed_y = read(0, slice(M, None))[..., 0, :]
    found, overlap = by_token(found), torch.linalg.vecdot(q[..., None, :].to(dtype), k.to(dtype))
    wrote = u.to(dtype) - found
    for m in range(M):
        y = torch.addcmul(y, overlap[..., m, None], wrote[..., m, :])
    return Read(
        y=y,
        overlap=overlap,
        decayed_y=decayed_y,
        residual=wrote,
        found=found,
        probes=wrote[..., :0, :] if probes is None else read(1, slice(None)),
        final_state=final,
        state_norm=norms,
        states=states(layout, states_at, starts, *(x.to(dtype).flatten(0, 1) for x in (g, k, wrote))),
    )


def no_dust(x: Tensor) -> Tensor:
    """Set to 0, in place, what is so small that products of two such numbers have no full precision.

    A CPU takes a hundred times as long for them, and a memory that forgets fast is full of them. Not where a gradient can flow.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu":
        return x
    return torch.hardshrink(x, torch.finfo(x.dtype).tiny ** 0.5, out=x)


def _add(base: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> Tensor:
    """Add ±xy to base, batched matrices, in place."""
    base.flatten(0, -3).baddbmm_(x.flatten(0, -3), y.flatten(0, -3), alpha=sign)
    return base


def _fill(layout: Grid, x: Tensor, dtype: torch.dtype) -> Tensor:
    return layout.fill(x.to(dtype).flatten(0, 1))


def couple(rows: list[Tensor], c: Tensor, decay: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The decayed products of every row with every column of an earlier token, and what decays from the start and to the end.

    ``rows`` are ``[n, H, C, R, K]`` each, ``c`` ``[n, H, C, M, K]`` the columns k_1..k_M, ``decay`` ``[n, H, C, 1, K or 1]``.
    Returns, for each of the rows, a strictly lower ``[n, H, C, R, C·M]`` and the rows decayed from the chunk's start to
    themselves ``[n, H, C, R, K]``; the columns decayed from themselves to the chunk's end, transposed, ``[n, H, K, C·M]``; the
    decay of the whole chunk ``[n, H, K or 1]``.
    """
    n, H, C, M, K = c.shape
    within = [c.new_zeros(n, H, C, x.shape[3], C * M) for x in rows]
    entering, leaving, total = [x * decay for x in rows], c.clone(), decay
    size = 1
    while size < C:
        pairs = (n, H, C // (2 * size), 2)
        first, second = total.view(*pairs, 1, -1).unbind(3)
        leaving = leaving.view(*pairs, size * M, K)
        early = leaving[:, :, :, 0].transpose(-1, -2)
        for i, product in enumerate(within):
            x = entering[i].view(*pairs, -1, K)
            halves = product.view(*pairs, x.shape[4], *pairs[2:], size * M)
            halves[:, :, :, 1, :, :, 0].diagonal(0, 2, 4).copy_((x[:, :, :, 1] @ early).movedim(2, -1))
            entering[i] = _decay_half(x, 1, first)
        leaving, total = _decay_half(leaving, 0, second), no_dust(first * second)
        size *= 2
    entering = [x.view_as(row) for x, row in zip(entering, rows, strict=True)]
    return within, entering, leaving.view(n, H, C * M, K).transpose(-1, -2), total.flatten(2)


def _decay_half(pairs: Tensor, half: int, decay: Tensor) -> Tensor:
    """Decay the first or the second of each pair ``[n, H, pairs, 2, ...]``, in place where no gradient can flow."""
    if torch.is_grad_enabled():
        both = list(pairs.unbind(3))
        both[half] = both[half] * decay
        return torch.stack(both, 3)
    pairs[:, :, :, half].mul_(decay)
    return pairs


def add_own_edits(lower: Tensor, a: Tensor, k: Tensor) -> Tensor:
    """Let edit m of a token see its own token's edits before m: nothing to add where M = 1."""
    n, H, C, M, _ = a.shape
    if M == 1:
        return lower
    own = torch.tril(a @ k.transpose(-1, -2), -1)
    mask = torch.eye(C, dtype=torch.bool, device=a.device)[:, None, :, None]
    return torch.where(mask, own[:, :, :, :, None], lower.view(n, H, C, M, C, M)).view(n, H, C, M, C * M)


def _scan(layout: Grid, carry: Tensor, gain: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S ← carry·S + gain, chunk by chunk, all sequences at once.

    The states before every chunk, the norms of those at the marks, and each sequence's last state.
    """
    state = state[layout.order]
    states = [state]
    for at in layout.steps:
        running = state[: len(gain[at])]
        left = torch.baddbmm(gain[at].flatten(0, 1), carry[at].flatten(0, 1), running.flatten(0, 1)).view_as(running)
        states.append(left)
        state = torch.cat([left, state[len(left) :]]) if len(left) < len(state) else left
    final = torch.zeros_like(state).index_copy(0, layout.order, state)
    known = torch.cat(states)
    return layout.before(known), torch.linalg.vector_norm(known, dim=(-2, -1))[layout.marks], final


def states(layout: Grid, positions: tuple[int, ...], starts: Tensor, g: Tensor, k: Tensor, residual: Tensor) -> Tensor:
    """The state right after each of these packed tokens, ``[positions, H, K, V]``, from those before their chunks."""
    found = [starts[:0]]
    for token in positions:
        place = token if layout.slot is None else int(layout.slot[token])
        at, last = divmod(place, layout.size)
        part = slice(token - last, token + 1)
        decay = g[part].exp().flip(0).cumprod(0).flip(0)
        since = torch.cat([decay[1:], torch.ones_like(decay[:1])])[:, :, None]
        keys, wrote = ((x.transpose(0, 1).flatten(1, 2)) for x in (k[part] * since, residual[part]))
        found.append((decay[0, :, :, None] * starts[at] + keys.transpose(-1, -2) @ wrote)[None])
    return torch.cat(found)
