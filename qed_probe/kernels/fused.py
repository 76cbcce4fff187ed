"""The recurrence by Triton programs: what ``chunked.recurrence`` does, on a GPU."""

from typing import Any

import torch
import triton
from torch import Tensor

from qed_probe.kernels import chunked
from qed_probe.kernels.chunked import Read, states
from qed_probe.kernels.packing import bounds, chunk_table, grid
from qed_probe.kernels.programs import BLOCK, ROWS, couple, read, scan, solve


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
    kept: torch.dtype = torch.float32,
) -> Read:
    """As ``chunked.recurrence``, with at most four edits a token, K and V at most 256, and no gradient.

    ``kept`` (float32, bfloat16 or float16) is the dtype of the largest tensors between the steps: the solved rows, the decayed
    keys and the states of the chunks. Products are exact where it is float32, else TF32, which rounds less than 16 bits do. Sums
    and the running state are float32, and so is what is returned.
    """
    B, T, H, K = q.shape
    M, V = u.shape[-2:]
    ends = bounds(B, T, cu_seqlens)
    exact, width = kept == torch.float32, triton.next_power_of_2(M)
    # Exact products are unrolled by the compiler: smaller blocks of them, or it takes a minute.
    rows = ROWS // 2 if exact else ROWS
    table = chunk_table(ends, rows // width, q.device)
    n, N = len(table.first), len(ends) - 1
    if not n:
        return chunked.recurrence(q, g, k, a, u, probes=probes, initial_state=initial_state, cu_seqlens=cu_seqlens)
    state = q.new_zeros(N, H, K, V) if initial_state is None else initial_state.contiguous()
    q, g, k, a, u = (x.flatten(0, 1).contiguous() for x in (q, g, k, a, u))
    p = [] if probes is None else [x.flatten(0, 1).contiguous() for x in probes.unbind(-2)]
    HK, (BK, BV) = k.shape[1], (max(16, triton.next_power_of_2(x)) for x in (K, V))
    fixed: dict[str, Any] = {"M": M, "MP": width, "G": g.shape[-1], "PRECISION": "ieee" if exact else "tf32", "ROWS": rows}

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(n, H, *shape, dtype=dtype)

    by_a, by_q, *by_p = (new(rows, rows) for _ in (a, q, *p))
    for reader, by in [(q, by_q), *zip(p[1:], by_p[1:], strict=True)]:
        fused = reader is q and bool(p)  # one pass for the rows that every trace reads with
        into = (a, reader, p[0] if fused else reader, k, g, table.first, table.size, by_a, by, by_p[0] if fused else by)
        couple[(n * rows // BLOCK, H)](*into, H, HK, K, BK=BK, BLOCK=BLOCK, PROBE=fused, num_warps=2, **fixed)
    seen, leaving, starts = new(rows, K, dtype=kept), new(rows, K, dtype=kept), new(K, V, dtype=kept)
    written, total = new(rows, V), new(K)
    given: tuple[Any, ...] = (by_a, k, a, u, g, table.first, table.size, seen, written, leaving, total)
    wide = 32 if exact else 64
    solve[(n, H)](*given, H, HK, K, V, BK=min(BK, wide), BV=min(BV, wide), num_warps=2, **fixed)
    # The scan is the serial part: where few sequences run side by side, many programs share the values of each.
    part = min(BV, 16 if exact or N * H < 64 else 64)
    parts, stages = triton.cdiv(V, part), 1 if exact else 3 if part == 16 else 2
    residual, squares = new(rows, V), new(parts)
    final = state.new_empty(N, H, K, V, dtype=torch.float32)
    given = (seen, written, leaving, total, table.chunks, state, starts, residual, final, squares)
    scan[(N, H, parts)](*given, H, K, V, BK=BK, BV=part, PRECISION=fixed["PRECISION"], ROWS=rows, num_stages=stages)

    def heard(x: Tensor, by: Tensor) -> Tensor:
        out, block = q.new_empty(*x.shape[:-1], V, dtype=torch.float32), min(BV, 32 if exact else 64)
        into = (x, by, residual, starts, g, table.first, table.size, out)
        read[(n, H, triton.cdiv(V, block))](*into, H, K, V, BY_EDIT=x.ndim == 4, BK=BK, BV=block, num_stages=1, **fixed)
        return out.view(B, T, *out.shape[1:])

    layout = grid(ends, rows // width, q.device)
    wrote = layout.take(residual.view(n, H, rows // width, width, V)[..., :M, :])
    y = decayed_y = heard(q, by_q)
    overlap = torch.linalg.vecdot(q[:, :, None].float(), k.float()).view(B, T, H, M, 1)
    for m in range(M):
        y = torch.addcmul(y, overlap[..., m, :], wrote.view(B, T, H, M, V)[..., m, :])
    none = y[..., None, :][..., :0, :]
    found = none
    if probes is not None:
        found = heard(a, by_a)
        for m in range(1, M):
            own = torch.linalg.vecdot(a[:, :, m, None].float(), k[:, :, :m].float()).view(B, T, H, m, 1)
            found[..., m, :] += (own * wrote.view(B, T, H, M, V)[..., :m, :]).sum(-2)
    return Read(
        y=y,
        overlap=overlap[..., 0],
        decayed_y=decayed_y,
        residual=wrote.view(B, T, H, M, V),
        found=found,
        probes=none if probes is None else torch.stack([heard(x, by) for x, by in zip(p, by_p, strict=True)], -2),
        final_state=final,
        state_norm=squares.sum(-1).sqrt()[table.marked],
        states=states(layout, states_at, starts.float(), g.float(), k.float(), wrote),
    )
