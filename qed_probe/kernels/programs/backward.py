"""Triton programs of training: the chunked recurrence and its gradients, three programs forward and three more back.

A chunk holds ``ROWS`` rows: its tokens' edits, one after another, ``MP`` rows a token (M rounded up to a power of two). Only the
first row of a token decays, only that of its last edit reads with q. With D(j, i] the decay after row j up to row i, and S the
memory before the chunk::

    L[i, j] = a_iᵀD(j, i]k_j for j < i    A[i, j] = q_iᵀD(j, i]k_j for j ≤ i    T = (I + L)⁻¹
    R = T(U − âS)    Y = q̂S + AR    S ← D S + k̂ᵀR    with â_i, q̂_i = D(0, i]a_i, D(0, i]q_i and k̂_j = D(j, end]k_j

Given dY and G, the gradient of the memory after the chunk, the gradient of R is dR = AᵀdY + k̂G, that of U is Z = TᵀdR, and::

    G ← D G + q̂ᵀdY − (Tâ)ᵀdR    dA = dY Rᵀ    dL = −Z Rᵀ    dq̂ = dY Sᵀ    dâ = −Z Sᵀ    dk̂ = R Gᵀ    dD = rowsum(S ⊙ G)

Every pair of rows j < i lies on the two sides of one joint: between halves of a block of 2, 4, 8, … rows. So D(j, i] is the decay
of j to the joint times that from the joint to i, each the exponential of a sum of log decays of one sign, and the gradient of a
log decay is a sum over the rows beyond it on its side of each joint: a matrix of ones and zeros and its transpose give both.
Nothing overflows, and no decay swallows another's gradient.
"""

import triton
import triton.language as tl


@triton.jit
def _row(first, size, M: tl.constexpr, MP: tl.constexpr, ROWS: tl.constexpr):
    """Of each row of a chunk its number, its token, its edit, and whether there is such an edit."""
    row = tl.arange(0, ROWS)
    return row, first + row // MP, row % MP, (row // MP < size) & (row % MP < M)


@triton.jit
def _load(x, at, ok, channels, K):
    """Rows ``at`` of ``x`` ``[..., K]``, zeros where there are none."""
    return tl.load(x + at[:, None] * K + channels[None, :], mask=ok[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store(x, at, ok, channels, K, value):
    tl.store(x + at[:, None] * K + channels[None, :], value, mask=ok[:, None] & (channels < K)[None, :])


@triton.jit
def _log_decays(g, token, edit, ok, h, H, G: tl.constexpr, K, channels):
    """The log decay of each row, ``[rows, channels]``: the token's at its first edit, else 0. All below −1e30 are as −∞."""
    at = (token * H + h)[:, None] * G + tl.where(G == 1, 0, channels)[None, :]
    decay = tl.load(g + at, mask=(ok & (edit == 0))[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)
    return tl.maximum(decay, -1e30)


@triton.jit
def _decay(between, g):
    """What is left over ``between``, the rows (in columns) whose log decays ``g`` ``[rows, channels]`` count for each row."""
    return tl.exp(tl.dot(between.to(tl.float32), g, input_precision="ieee"))


@triton.jit
def _joint(row, S: tl.constexpr):
    """Which rows i, j meet at a joint of S and S rows, and which rows l lie between each row and that joint: i ≥ l or j < l."""
    i, j = row[:, None], row[None, :]
    beyond = tl.where(i // S % 2 == 1, j <= i, j > i)
    return ((i ^ j) // S == 1) & (i > j), (i // S == j // S) & beyond


@triton.jit
def solve(
    q, g, k, a, u, first, size, inverse, by_q, seen, written, asking, leaving, total, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """T and A ``[chunks, H, ROWS, ROWS]``; Tâ, TU, q̂ and k̂ ``[chunks, H, ROWS, K or V]``; D ``[chunks, H, K]``.

    ``q`` is ``[T, H, K]``, ``g`` ``[T, H, G]``, ``k`` and ``a`` ``[T, H, M, K]``, ``u`` ``[T, H, M, V]``. Program (chunk, head).
    """
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, size = tl.load(first + chunk), tl.load(size + chunk)
    row, token, edit, ok = _row(first, size, M, MP, ROWS)
    at, place = (token * H + h) * M + edit, (chunk * H + h) * ROWS
    square = (place + row)[:, None] * ROWS + row[None, :]
    same = row[:, None] == row[None, :]
    lower = tl.zeros([ROWS, ROWS], tl.float32)
    reads = tl.zeros([ROWS, ROWS], tl.float32)
    for block in range(0, K, BK):
        channels = block + tl.arange(0, BK)
        decay = _log_decays(g, token, edit, ok, h, H, G, K, channels)
        queries = _load(q, token * H + h, ok & (edit == M - 1), channels, K)
        keys, erased = _load(k, at, ok, channels, K), _load(a, at, ok, channels, K)
        reads += tl.where(same, tl.sum(queries * keys, 1)[:, None], 0.0)
        for level in tl.static_range(LEVELS):
            joined, between = _joint(row, 1 << level)
            part = _decay(between, decay)
            early = tl.trans(keys * part)
            lower += tl.where(joined, tl.dot(erased * part, early, input_precision=PRECISION), 0.0)
            reads += tl.where(joined, tl.dot(queries * part, early, input_precision=PRECISION), 0.0)
    tl.store(by_q + square, reads)
    solved = tl.where(same, 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        joined, between = _joint(row, 1 << level)
        part = tl.dot(solved, tl.where(joined, lower, 0.0), input_precision=PRECISION)
        solved -= tl.dot(part, solved, input_precision=PRECISION)
    tl.store(inverse + square, solved)
    here = row >= 0
    for block in range(0, K, BK):
        channels = block + tl.arange(0, BK)
        decay = _log_decays(g, token, edit, ok, h, H, G, K, channels)
        since, until = _decay(row[:, None] >= row[None, :], decay), _decay(row[:, None] < row[None, :], decay)
        erased = tl.dot(solved, since * _load(a, at, ok, channels, K), input_precision=PRECISION)
        _store(seen, place + row, here, channels, K, erased)
        _store(asking, place + row, here, channels, K, since * _load(q, token * H + h, ok & (edit == M - 1), channels, K))
        _store(leaving, place + row, here, channels, K, until * _load(k, at, ok, channels, K))
        tl.store(total + (chunk * H + h) * K + channels, tl.exp(tl.sum(decay, 0)), mask=channels < K)
    for block in range(0, V, BV):
        values = block + tl.arange(0, BV)
        given = tl.dot(solved, _load(u, at, ok, values, V), input_precision=PRECISION)
        _store(written, place + row, here, values, V, given)


@triton.jit
def scan(
    seen, written, leaving, total, chunks, initial, starts, final, H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """S before each chunk, ``[chunks, H, K, V]``, and after the last. Program (sequence, head, block of values)."""
    sequence, h, values = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV + tl.arange(0, BV)
    row, channels = tl.arange(0, ROWS), tl.arange(0, BK)
    here, there = row >= 0, channels < K
    of_sequence = (sequence * H + h) * K + channels
    state = _load(initial, of_sequence, there, values, V)
    for chunk in range(tl.load(chunks + sequence), tl.load(chunks + sequence + 1)):
        place = chunk * H + h
        _store(starts, place * K + channels, there, values, V, state)
        wrote = _load(written, place * ROWS + row, here, values, V)
        wrote -= tl.dot(_load(seen, place * ROWS + row, here, channels, K), state, input_precision=PRECISION)
        early = tl.trans(_load(leaving, place * ROWS + row, here, channels, K))
        decay = tl.load(total + place * K + channels, mask=there, other=0.0)
        state = state * decay[:, None] + tl.dot(early, wrote, input_precision=PRECISION)
    _store(final, of_sequence, there, values, V, state)


@triton.jit
def read(
    asking, by_q, seen, written, starts, first, size, y, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Y ``[T, H, V]``. Program (chunk, head, block of values)."""
    chunk, h, values = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV + tl.arange(0, BV)
    row, token, edit, ok = _row(tl.load(first + chunk), tl.load(size + chunk), M, MP, ROWS)
    here, place = row >= 0, (chunk * H + h) * ROWS + row
    wrote = _load(written, place, here, values, V)
    found = tl.zeros([ROWS, BV], tl.float32)
    for block in range(0, K, BK):
        channels = block + tl.arange(0, BK)
        state = _load(starts, (chunk * H + h) * K + channels, channels < K, values, V)
        wrote -= tl.dot(_load(seen, place, here, channels, K), state, input_precision=PRECISION)
        found += tl.dot(_load(asking, place, here, channels, K), state, input_precision=PRECISION)
    within = tl.load(by_q + place[:, None] * ROWS + row[None, :])
    found += tl.dot(within, wrote, input_precision=PRECISION)
    _store(y, token * H + h, ok & (edit == M - 1), values, V, found)


@triton.jit
def scan_back(
    asking, by_q, seen, leaving, total, first, size, chunks, d_y, d_final, ends, d_wrote, d_initial, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """G after each chunk, ``[chunks, H, K, V]``, and before the first; dR ``[chunks, H, ROWS, V]``. Programs as of ``scan``."""
    sequence, h, values = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV + tl.arange(0, BV)
    channels = tl.arange(0, BK)
    there, of_sequence = channels < K, (sequence * H + h) * K + channels
    begin, end = tl.load(chunks + sequence), tl.load(chunks + sequence + 1)
    state = _load(d_final, of_sequence, there, values, V)
    for back in range(end - begin):
        chunk = end - 1 - back
        row, token, edit, ok = _row(tl.load(first + chunk), tl.load(size + chunk), M, MP, ROWS)
        here, place = row >= 0, chunk * H + h
        _store(ends, place * K + channels, there, values, V, state)
        asked = _load(d_y, token * H + h, ok & (edit == M - 1), values, V)
        within = tl.load(by_q + (place * ROWS + row)[:, None] * ROWS + row[None, :])
        wrote = tl.dot(tl.trans(within), asked, input_precision=PRECISION)
        wrote += tl.dot(_load(leaving, place * ROWS + row, here, channels, K), state, input_precision=PRECISION)
        _store(d_wrote, place * ROWS + row, here, values, V, wrote)
        state *= tl.load(total + place * K + channels, mask=there, other=0.0)[:, None]
        state += tl.dot(tl.trans(_load(asking, place * ROWS + row, here, channels, K)), asked, input_precision=PRECISION)
        state -= tl.dot(tl.trans(_load(seen, place * ROWS + row, here, channels, K)), wrote, input_precision=PRECISION)
    _store(d_initial, of_sequence, there, values, V, state)


@triton.jit
def solve_back(
    inverse, seen, written, starts, first, size, d_y, d_wrote, wrote, d_u, d_lower, d_by_q, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """R ``[chunks, H, ROWS, V]``, Z as the gradient of ``u``, dL and dA ``[chunks, H, ROWS, ROWS]``. Program (chunk, head)."""
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, token, edit, ok = _row(tl.load(first + chunk), tl.load(size + chunk), M, MP, ROWS)
    here, place = row >= 0, (chunk * H + h) * ROWS + row
    square = place[:, None] * ROWS + row[None, :]
    solved = tl.trans(tl.load(inverse + square))
    lower = tl.zeros([ROWS, ROWS], tl.float32)
    reads = tl.zeros([ROWS, ROWS], tl.float32)
    for part in range(0, V, BV):
        values = part + tl.arange(0, BV)
        residual = _load(written, place, here, values, V)
        for block in range(0, K, BK):
            channels = block + tl.arange(0, BK)
            state = _load(starts, (chunk * H + h) * K + channels, channels < K, values, V)
            residual -= tl.dot(_load(seen, place, here, channels, K), state, input_precision=PRECISION)
        given = tl.dot(solved, _load(d_wrote, place, here, values, V), input_precision=PRECISION)
        asked = _load(d_y, token * H + h, ok & (edit == M - 1), values, V)
        _store(wrote, place, here, values, V, residual)
        _store(d_u, (token * H + h) * M + edit, ok, values, V, given)
        residual = tl.trans(residual)
        lower -= tl.dot(given, residual, input_precision=PRECISION)
        reads += tl.dot(asked, residual, input_precision=PRECISION)
    i, j = row[:, None], row[None, :]
    tl.store(d_lower + square, tl.where(i > j, lower, 0.0))
    tl.store(d_by_q + square, tl.where(i >= j, reads, 0.0))


@triton.jit
def couple_back(
    q, g, k, a, first, size, starts, ends, wrote, d_y, d_u, d_lower, d_by_q, d_q, d_g, d_k, d_a, H, K, V,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k, a and, by channel ``[T, H, K]``, of g. Program (chunk, head, block of channels)."""
    chunk, h, channels = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BK + tl.arange(0, BK)
    first, size = tl.load(first + chunk), tl.load(size + chunk)
    row, token, edit, ok = _row(first, size, M, MP, ROWS)
    here, asks = row >= 0, ok & (edit == M - 1)
    at, place = (token * H + h) * M + edit, (chunk * H + h) * ROWS + row
    by_query = tl.zeros([ROWS, BK], tl.float32)
    by_key = tl.zeros([ROWS, BK], tl.float32)
    by_erased = tl.zeros([ROWS, BK], tl.float32)
    by_total = tl.zeros([BK], tl.float32)
    for part in range(0, V, BV):
        values = part + tl.arange(0, BV)
        state = _load(starts, (chunk * H + h) * K + channels, channels < K, values, V)
        after = _load(ends, (chunk * H + h) * K + channels, channels < K, values, V)
        by_total += tl.sum(state * after, 1)
        state = tl.trans(state)
        by_query += tl.dot(_load(d_y, token * H + h, asks, values, V), state, input_precision=PRECISION)
        by_erased -= tl.dot(_load(d_u, at, ok, values, V), state, input_precision=PRECISION)
        by_key += tl.dot(_load(wrote, place, here, values, V), tl.trans(after), input_precision=PRECISION)
    decay = _log_decays(g, token, edit, ok, h, H, G, K, channels)
    queries = _load(q, token * H + h, asks, channels, K)
    keys, erased = _load(k, at, ok, channels, K), _load(a, at, ok, channels, K)
    i, j = row[:, None], row[None, :]
    since = _decay(i >= j, decay)
    by_query, by_erased = by_query * since, by_erased * since
    by_key *= _decay(i < j, decay)
    by_decay = tl.dot((i <= j).to(tl.float32), queries * by_query + erased * by_erased, input_precision=PRECISION)
    by_decay += tl.dot((i > j).to(tl.float32), keys * by_key, input_precision=PRECISION)
    by_decay += (by_total * tl.exp(tl.sum(decay, 0)))[None, :]
    square = place[:, None] * ROWS + row[None, :]
    lower, reads = tl.load(d_lower + square), tl.load(d_by_q + square)
    own = tl.sum(tl.where(i == j, reads, 0.0), 1)[:, None]
    by_query += own * keys
    by_key += own * queries
    for level in tl.static_range(LEVELS):
        joined, between = _joint(row, 1 << level)
        decayed = _decay(between, decay)
        some_lower, some_reads, early = tl.where(joined, lower, 0.0), tl.where(joined, reads, 0.0), keys * decayed
        of_query = tl.dot(some_reads, early, input_precision=PRECISION) * decayed
        of_erased = tl.dot(some_lower, early, input_precision=PRECISION) * decayed
        of_key = tl.dot(tl.trans(some_reads), queries * decayed, input_precision=PRECISION)
        of_key = (of_key + tl.dot(tl.trans(some_lower), erased * decayed, input_precision=PRECISION)) * decayed
        by_query += of_query
        by_erased += of_erased
        by_key += of_key
        of_decay = queries * of_query + erased * of_erased + keys * of_key
        by_decay += tl.dot(tl.trans(between.to(tl.float32)), of_decay, input_precision=PRECISION)
    _store(d_q, token * H + h, asks, channels, K, by_query)
    _store(d_k, at, ok, channels, K, by_key)
    _store(d_a, at, ok, channels, K, by_erased)
    _store(d_g, token * H + h, ok & (edit == 0), channels, K, by_decay)
