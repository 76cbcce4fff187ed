"""Triton programs of the chunked recurrence, one for each of its four steps.

A chunk holds ``ROWS`` rows: its tokens' edits, one after another, ``MP`` rows a token (M rounded up to a power of two). Only the
first row of a token decays. Between two rows lies the sum of the log decays after the one up to the other, and every such sum is
added up from its own terms, never taken as a difference: so no strong decay swallows a weak one, and none can overflow. Sums that
a block of ``BLOCK`` rows needs begin at or before the block's rows, so that no result depends on a later token.
"""

import triton
import triton.language as tl

ROWS, BLOCK = 64, 16


@triton.jit
def _row(index, first, size, M: tl.constexpr, MP: tl.constexpr):
    """The token of a chunk's row, its edit, and whether there is such a row."""
    token, edit = index // MP, index % MP
    return first + token, edit, (token < size) & (edit < M)


@triton.jit
def _decays(g, token, edit, ok, h, H, G: tl.constexpr, K, channels):
    """Log decay of each row, ``[rows, channels]``: the token's at its first edit, else 0."""
    at = (token * H + h)[:, None] * G + tl.where(G == 1, 0, channels)[None, :]
    return tl.load(g + at, mask=(ok & (edit == 0))[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _keys(k, token, edit, ok, h, H, M: tl.constexpr, K, channels):
    at = ((token * H + h) * M + edit)[:, None] * K + channels[None, :]
    return tl.load(k + at, mask=ok[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _reader(x, token, edit, ok, h, H, M: tl.constexpr, BY_EDIT: tl.constexpr, K, channels):
    """The rows that read, ``[rows, channels]``: one an edit, or one a token for all its edits."""
    at = ((token * H + h) * M + edit if BY_EDIT else token * H + h)[:, None] * K + channels[None, :]
    return tl.load(x + at, mask=ok[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def couple(
    a, q, p, k, g, first, size, by_a, by_q, by_p, H, HK, K,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """``by_x[i, j]`` = x_iᵀ Diag(exp Σ_{j<l≤i} g_l) k_j for rows j < i of a chunk, else 0.

    ``a`` is ``[T, H, M, K]``, ``q`` and, with ``PROBE``, ``p`` are ``[T, H, K]``; program (chunk · block, head).
    """
    blocks = ROWS // BLOCK
    chunk, block, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks, tl.program_id(1)
    first, size = tl.load(first + chunk), tl.load(size + chunk)
    hk = h // (H // HK)
    within, channels = tl.arange(0, BLOCK), tl.arange(0, BK)
    token, edit, ok = _row(block * BLOCK + within, first, size, M, MP)
    since = tl.exp(tl.cumsum(_decays(g, token, edit, ok, h, H, G, K, channels), 0))
    a = _reader(a, token, edit, ok, h, H, M, True, K, channels)
    q = _reader(q, token, edit, ok, h, H, M, False, K, channels)
    place = (chunk * H + h) * ROWS * ROWS + (block * BLOCK + within)[:, None] * ROWS + within[None, :]
    if PROBE:
        p = _reader(p, token, edit, ok, h, H, M, False, K, channels)
    between = tl.zeros([BK], tl.float32)
    for back in range(block):
        other = block - 1 - back
        token, edit, ok = _row(other * BLOCK + within, first, size, M, MP)
        early = _keys(k, token, edit, ok, hk, HK, M, K, channels)
        decay = _decays(g, token, edit, ok, h, H, G, K, channels)
        token, edit, ok = _row(other * BLOCK + within + 1, first, size, M, MP)
        after = _decays(g, token, edit, ok & (within + 1 < BLOCK), h, H, G, K, channels)
        early = tl.trans(early * tl.exp(tl.cumsum(after, 0, reverse=True) + between[None, :]))
        tl.store(by_a + place + other * BLOCK, tl.dot(a * since, early, input_precision=PRECISION))
        tl.store(by_q + place + other * BLOCK, tl.dot(q * since, early, input_precision=PRECISION).to(by_q.dtype.element_ty))
        if PROBE:
            tl.store(by_p + place + other * BLOCK, tl.dot(p * since, early, input_precision=PRECISION).to(by_p.dtype.element_ty))
        between += tl.sum(decay, 0)
    decayed = tl.zeros([BLOCK, BK], tl.float32)
    own_a, own_q, own_p = (tl.zeros([BLOCK, BLOCK], tl.float32),) * 3
    for back in range(1, BLOCK):
        j = BLOCK - 1 - back
        token_j, edit_j, ok_j = _row(block * BLOCK + j + 1 + tl.arange(0, 1), first, size, M, MP)
        decay_j = _decays(g, token_j, edit_j, ok_j, h, H, G, K, channels)
        decayed = tl.where((within == j + 1)[:, None], 1.0, decayed) * tl.exp(decay_j)
        token_j, edit_j, ok_j = _row(block * BLOCK + j + tl.arange(0, 1), first, size, M, MP)
        column = decayed * _keys(k, token_j, edit_j, ok_j, hk, HK, M, K, channels)
        here = (within == j)[None, :]
        own_a = tl.where(here, tl.sum(a * column, 1)[:, None], own_a)
        own_q = tl.where(here, tl.sum(q * column, 1)[:, None], own_q)
        if PROBE:
            own_p = tl.where(here, tl.sum(p * column, 1)[:, None], own_p)
    zero = tl.zeros([BLOCK, BLOCK], tl.float32)
    tl.store(by_a + place + block * BLOCK, own_a)
    tl.store(by_q + place + block * BLOCK, own_q.to(by_q.dtype.element_ty))
    if PROBE:
        tl.store(by_p + place + block * BLOCK, own_p.to(by_p.dtype.element_ty))
    for other in range(block + 1, blocks):
        tl.store(by_a + place + other * BLOCK, zero)
        tl.store(by_q + place + other * BLOCK, zero.to(by_q.dtype.element_ty))
        if PROBE:
            tl.store(by_p + place + other * BLOCK, zero.to(by_p.dtype.element_ty))


@triton.jit
def solve(
    lower, k, a, u, g, first, size, seen, written, leaving, total, H, HK, K, V,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """``seen`` = (I + L)⁻¹A, ``written`` = (I + L)⁻¹U with A decayed from the chunk's start; ``leaving`` = k decayed to its end.

    All ``[chunks, H, ROWS, K or V]``; ``total`` ``[chunks, H, K]`` is the decay of the whole chunk. Program (chunk, head).
    """
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, size = tl.load(first + chunk), tl.load(size + chunk)
    hk = h // (H // HK)
    rows = tl.arange(0, ROWS)
    place = (chunk * H + h) * ROWS
    inverse = tl.zeros([ROWS, ROWS], tl.float32)
    for i in range(ROWS):
        row = tl.load(lower + (place + i) * ROWS + rows)
        row = (rows == i).to(tl.float32) - tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where((rows == i)[:, None], row[None, :], inverse)
    token, edit, ok = _row(rows, first, size, M, MP)
    next_token, next_edit, next_ok = _row(rows + 1, first, size, M, MP)
    next_ok = next_ok & (rows + 1 < ROWS)
    at = ((token * H + h) * M + edit)[:, None]
    for block in range(0, K, BK):
        channels = block + tl.arange(0, BK)
        there = (channels < K)[None, :]
        decay = _decays(g, token, edit, ok, h, H, G, K, channels)
        entering = tl.load(a + at * K + channels[None, :], mask=ok[:, None] & there, other=0.0).to(tl.float32)
        entering = entering * tl.exp(tl.cumsum(decay, 0))
        to = (place + rows)[:, None] * K + channels[None, :]
        tl.store(seen + to, tl.dot(inverse, entering, input_precision=PRECISION).to(seen.dtype.element_ty), mask=there)
        tl.store(total + (chunk * H + h) * K + channels, tl.exp(tl.sum(decay, 0)), mask=channels < K)
        after = _decays(g, next_token, next_edit, next_ok, h, H, G, K, channels)
        columns = _keys(k, token, edit, ok, hk, HK, M, K, channels) * tl.exp(tl.cumsum(after, 0, reverse=True))
        tl.store(leaving + to, columns.to(leaving.dtype.element_ty), mask=there)
    for block in range(0, V, BV):
        values = block + tl.arange(0, BV)
        there = (values < V)[None, :]
        given = tl.load(u + at * V + values[None, :], mask=ok[:, None] & there, other=0.0).to(tl.float32)
        to = (place + rows)[:, None] * V + values[None, :]
        tl.store(written + to, tl.dot(inverse, given, input_precision=PRECISION).to(written.dtype.element_ty), mask=there)


@triton.jit
def scan(
    seen, written, leaving, total, chunks, initial, starts, residual, final, squares, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Chunk by chunk: R = written − seen S; S ← Diag(total) S + leavingᵀ R. Program (sequence, head, block of values).

    ``chunks`` ``[N + 1]`` marks each sequence's chunks. ``starts`` is S before each chunk, ``squares`` ``[chunks, H, V blocks]``
    each block's part of ‖S‖² after it.
    """
    sequence, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    rows, channels, values = tl.arange(0, ROWS), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    square = (channels < K)[:, None] & (values < V)[None, :]
    inside = channels[:, None] * V + values[None, :]
    state = tl.load(initial + (sequence * H + h) * K * V + inside, mask=square, other=0.0).to(tl.float32)
    begin, end = tl.load(chunks + sequence), tl.load(chunks + sequence + 1)
    for chunk in range(begin, end):
        place = chunk * H + h
        tl.store(starts + place * K * V + inside, state.to(starts.dtype.element_ty), mask=square)
        of_k = (place * ROWS + rows)[:, None] * K + channels[None, :]
        of_v = (place * ROWS + rows)[:, None] * V + values[None, :]
        x = tl.load(seen + of_k, mask=(channels < K)[None, :], other=0.0).to(tl.float32)
        r = tl.load(written + of_v, mask=(values < V)[None, :], other=0.0).to(tl.float32)
        r -= tl.dot(x, state, input_precision=PRECISION)
        tl.store(residual + of_v, r.to(residual.dtype.element_ty), mask=(values < V)[None, :])
        y = tl.load(leaving + of_k, mask=(channels < K)[None, :], other=0.0).to(tl.float32)
        decay = tl.load(total + place * K + channels, mask=channels < K, other=0.0)
        state = state * decay[:, None] + tl.dot(tl.trans(y), r, input_precision=PRECISION)
        tl.store(squares + place * tl.num_programs(2) + part, tl.sum(state * state))
    tl.store(final + (sequence * H + h) * K * V + inside, state, mask=square)


@triton.jit
def read(
    x, within, residual, starts, g, first, size, out, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BY_EDIT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``out`` = Ŝᵀx, the memory before a token's first edit: x decayed from the chunk's start on S, ``within`` on R.

    ``x`` and ``out`` as in ``couple``; program (chunk, head, block of values).
    """
    chunk, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    first, size = tl.load(first + chunk), tl.load(size + chunk)
    rows, channels, values = tl.arange(0, ROWS), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    token, edit, ok = _row(rows, first, size, M, MP)
    place, at = chunk * H + h, token * H + h
    if BY_EDIT:
        at = at * M + edit
    decay = tl.cumsum(_decays(g, token, edit, ok, h, H, G, K, channels), 0)
    mask = ok[:, None] & (channels < K)[None, :]
    reading = tl.load(x + at[:, None] * K + channels[None, :], mask=mask, other=0.0).to(tl.float32) * tl.exp(decay)
    square = (channels < K)[:, None] & (values < V)[None, :]
    state = tl.load(starts + place * K * V + channels[:, None] * V + values[None, :], mask=square, other=0.0).to(tl.float32)
    coupled = tl.load(within + place * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :]).to(tl.float32)
    # What a token's own edits write is not in Ŝ.
    coupled = tl.where((rows // MP)[None, :] < (rows // MP)[:, None], coupled, 0.0)
    of_v = (place * ROWS + rows)[:, None] * V + values[None, :]
    r = tl.load(residual + of_v, mask=(values < V)[None, :], other=0.0).to(tl.float32)
    found = tl.dot(reading, state, input_precision=PRECISION) + tl.dot(coupled, r, input_precision=PRECISION)
    keep = ok if BY_EDIT else ok & (edit == 0)
    tl.store(out + at[:, None] * V + values[None, :], found, mask=keep[:, None] & (values < V)[None, :])
