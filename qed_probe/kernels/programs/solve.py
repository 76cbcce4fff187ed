"""A chunk solved for what its edits read, up to the state before it."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.rows import after, before, block_decay, decay_rows, edit_rows, given_rows, row, sizes


@triton.jit
def solve(
    coupled_a, keys, a, a_size, v, w, since, until, totals, first, size, seen, found, leaving, total,
    H: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``seen`` = (I + L)⁻¹A, ``found`` = (I + L)⁻¹LU = (I − (I + L)⁻¹)U and ``leaving`` = k decayed to the chunk's end.

    All are ``[chunks, H, ROWS, K or V]``. A are the rows of a decayed from the chunk's start, ``coupled_a`` is (I + L)⁻¹ − I by
    now, ``total`` ``[chunks, H, K]`` the decay of the whole chunk. Program (chunk, head, block of channels, then of values).
    """
    chunk, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, begin, place = tl.arange(0, ROWS), tl.load(first + chunk), chunk * H + h
    inverse = tl.load(coupled_a + place * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :])
    token, edit, ok = row(rows, tl.load(size + chunk), M, MP)
    blocks: tl.constexpr = ROWS // BLOCK
    block, parts = rows // BLOCK, tl.cdiv(K, BK)
    if part < parts:
        channels = part * BK + tl.arange(0, BK)
        there = (channels < K)[None, :]
        totals += place * blocks * G
        a, a_size, keys = a + begin * H * M * K, a_size + begin * H * M, keys + begin * KEYS * M * K
        since, until = since + begin * H * G, until + begin * H * G
        entering = edit_rows(a, token, edit, ok, h, H, M, K, channels) * sizes(a_size, token, edit, ok, h, H, M)
        entering *= decay_rows(since, token, ok, h, H, G, K, channels) * before(totals, block, blocks, G, K, channels)
        of_k = rows[:, None] * K + channels[None, :]
        both = entering + tl.dot(inverse, entering, input_precision=PRECISION)
        tl.store(seen + place * ROWS * K + of_k, both.to(seen.dtype.element_ty), mask=there)
        columns = edit_rows(keys, token, edit, ok, h // (H // KEYS), KEYS, M, K, channels)
        columns *= decay_rows(until, token, ok, h, H, G, K, channels) * after(totals, block, blocks, G, K, channels)
        tl.store(leaving + place * ROWS * K + of_k, columns.to(leaving.dtype.element_ty), mask=there)
        whole = tl.full([1, BK], 1.0, tl.float32)
        for other in tl.static_range(blocks):
            whole *= block_decay(totals, other, G, K, channels)
        tl.store(total + place * K + channels[None, :], whole, mask=there)
    else:
        values = (part - parts) * BV + tl.arange(0, BV)
        given = given_rows(v + begin * H * N * V, w + begin * H * W, token, edit, ok, h, H, FIRST, N, GATE, V, values)
        of_v = rows[:, None] * V + values[None, :]
        read = -tl.dot(inverse, given, input_precision=PRECISION)
        tl.store(found + place * ROWS * V + of_v, read, mask=(values < V)[None, :])
