"""What the memory gives back: the output, the read by d, and the records of them."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.rows import before, decay_rows, given_rows, note, product, row, scale, sizes, token_rows

NOTES = (
    "residual_norm", "output_norm", "read_norm", "base_read_norm", "correction_norm", "correction_cosine",
    "pre_erase_output_norm", "address_read_norm", "address_correction_norm",
)  # fmt: skip
"""The records in the order in which ``conclude`` notes them."""
PARTS = tl.constexpr(8)
"""What ``read`` finds of each block of values: the norms of r, y, S̄ᵀd, S̄ᵀ(b⊙k), y without the correction, the cosine between the
third and that, and the norms of Ŝᵀq and Ŝᵀε."""
TINY, FAR = tl.constexpr(1e-30), tl.constexpr(2.0**96)


@triton.jit
def norms(x):
    """Row norms; where a square would leave float32's range, of rows multiplied by a power of two, which changes no other bit."""
    square = tl.sum(x * x, 1)
    lost = (square < TINY) | (square > 1 / TINY)
    by = tl.where(lost, tl.where(square < TINY, FAR, 1 / FAR), 0.0)
    moved = x * by[:, None]
    return tl.where(lost, tl.sqrt(tl.sum(moved * moved, 1)) / tl.where(lost, by, 1.0), tl.sqrt(square))


@triton.jit
def cosines(x, y, x_norm, y_norm):
    """Row by row, from the rows and their norms; 0 where either is 0."""
    x, y = x / tl.where(x_norm > 0, x_norm, 1.0)[:, None], y / tl.where(y_norm > 0, y_norm, 1.0)[:, None]
    return tl.minimum(tl.maximum(tl.sum(x * y, 1), -1.0), 1.0)


@triton.jit
def _through(x, state, PRECISION: tl.constexpr):
    """Rows times a state.

    bfloat16 has so few bits that those it drops are worth a product, float16 so small a range that long decayed rows need a size.
    """
    if state.dtype == tl.float16:
        size = scale(x)[:, None]
        return product((x * (1 / size)).to(tl.float16), state, PRECISION) * size
    near = x.to(state.dtype)
    found = product(near, state, PRECISION)
    if state.dtype == tl.bfloat16:
        found += product((x - near.to(tl.float32)).to(state.dtype), state, PRECISION)
    return found


@triton.jit
def _edit(
    v, w, found, token, edit, ok, h, H,
    FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr, MP: tl.constexpr, V, values,
):  # fmt: skip
    """What one edit of each token read and wrote."""
    mask = ok[:, None] & (values < V)[None, :]
    at = (token * MP + edit)[:, None] * V + values[None, :]
    read = tl.load(found + at, mask=mask, other=0.0)
    return read, given_rows(v, w, token, token * 0 + edit, ok, h, H, FIRST, N, GATE, V, values) - read


@triton.jit
def read(
    q, d, d_size, v, w, since, totals, lam, cosine, found, starts, coupled_q, coupled_d, by_q, by_d,
    first, size, y, heard, parts, step,
    H: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr,
    MAIN: tl.constexpr, ADDRESS: tl.constexpr, ADDED: tl.constexpr, PROBE: tl.constexpr, RECORD: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, READS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y`` = Sᵀq and, with PROBE, ``heard`` = S̄ᵀd ``[T, H, V]``; with RECORD also ``parts`` ``[blocks of values, PARTS, T, H]``.

    Of the memory before a token's first edit, Ŝᵀx = xᵀDS + Σ_j coupled[i, j] r_j; own edits are added by qᵀk_m and dᵀk_m, as
    ``prepare`` left them. Program (chunk, head, block of values).
    """
    chunk, h, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    begin, size, place = tl.load(first + chunk), tl.load(size + chunk), chunk * H + h
    values, rows, local = part * BV + tl.arange(0, BV), tl.arange(0, ROWS), tl.arange(0, READS)
    blocks: tl.constexpr = ROWS // BLOCK
    starts, totals, found = starts + place * K * V, totals + place * blocks * G, found + place * ROWS * V
    q, d, d_size, since = q + begin * HQ * K, d + begin * H * K, d_size + begin * H, since + begin * H * G
    v, w, y, heard = v + begin * H * N * V, w + begin * H * W, y + begin * H * V, heard + begin * H * V
    by_q, by_d, cosine = by_q + begin * H * M, by_d + begin * H * M, cosine + begin * H
    token, edit, ok = row(rows, size, M, MP)
    all_found = tl.load(found + rows[:, None] * V + values[None, :], mask=(values < V)[None, :], other=0.0)
    all_wrote = given_rows(v, w, token, edit, ok, h, H, FIRST, N, GATE, V, values) - all_found
    coupled = local[:, None] * ROWS + rows[None, :]
    coupled_q, coupled_d = coupled_q + place * READS * ROWS, coupled_d + place * READS * ROWS
    there = (local < ROWS // MP)[:, None]
    decayed = tl.dot(tl.load(coupled_q + coupled, mask=there, other=0.0), all_wrote, input_precision=PRECISION)
    heard_d = tl.zeros([READS, BV], tl.float32)
    ok = local < size
    for start in range(0, K, BK):
        channels = start + tl.arange(0, BK)
        decay = decay_rows(since, local, ok, h, H, G, K, channels) * before(totals, local * MP // BLOCK, blocks, G, K, channels)
        inside = (channels < K)[:, None] & (values < V)[None, :]
        state = tl.load(starts + channels[:, None] * V + values[None, :], mask=inside, other=0.0)
        x = token_rows(q, local, ok, h // (H // HQ), HQ, K, channels) * decay
        decayed += _through(x, state, PRECISION)
        if PROBE:
            x = token_rows(d, local, ok, h, H, K, channels) * decay
            heard_d += _through(x, state, PRECISION)
    at = local * H + h
    out = at[:, None] * V + values[None, :]
    mask = ok[:, None] & (values < V)[None, :]
    output, main, wrote = decayed, all_found, all_wrote
    for m in tl.static_range(M):
        if MP > 1:
            main, wrote = _edit(v, w, found, local, m, ok, h, H, FIRST, N, GATE, MP, V, values)
        output += tl.load(by_q + at * M + m, mask=ok, other=0.0)[:, None] * wrote
    tl.store(y + out, output.to(y.dtype.element_ty), mask=mask)
    if RECORD:
        if MAIN < M - 1:
            main, wrote = _edit(v, w, found, local, MAIN, ok, h, H, FIRST, N, GATE, MP, V, values)
        parts += (part * PARTS).to(tl.int64) * step + begin * H + at
        parts = note(parts, norms(wrote), ok, step)
        parts = note(parts, norms(output), ok, step)
        if PROBE:
            heard_d *= sizes(d_size, local, 0, ok, h, H, 1)
            heard_d += tl.dot(tl.load(coupled_d + coupled, mask=there, other=0.0), all_wrote, input_precision=PRECISION)
            for m in tl.static_range(MAIN):
                _, wrote_m = _edit(v, w, found, local, m, ok, h, H, FIRST, N, GATE, MP, V, values)
                heard_d += tl.load(by_d + at * M + m, mask=ok, other=0.0)[:, None] * wrote_m
            tl.store(heard + out, heard_d.to(heard.dtype.element_ty), mask=mask)
            if ADDED:
                strength = tl.load(lam + h).to(tl.float32)
                main -= strength * heard_d
                output += (strength * tl.load(by_q + at * M + MAIN, mask=ok, other=0.0))[:, None] * heard_d
            heard_norm, output_norm = norms(heard_d), norms(output)
            parts = note(parts, heard_norm, ok, step)
            parts = note(parts, norms(main), ok, step)
            parts = note(parts, output_norm, ok, step)
            parts = note(parts, cosines(heard_d, output, heard_norm, output_norm), ok, step)
        if ADDRESS >= 0:
            by_address, _ = _edit(v, w, found, local, ADDRESS, ok, h, H, FIRST, N, GATE, MP, V, values)
            if ADDRESS > MAIN:
                by_address -= tl.load(cosine + at, mask=ok, other=0.0)[:, None] * wrote
            parts = note(parts, norms(decayed), ok, step)
            parts = note(parts, norms(by_address), ok, step)


@triton.jit
def _joined(parts, which: tl.constexpr, BLOCKS: tl.constexpr, step, ok):
    """The norm of what lies in several blocks of values."""
    largest = tl.zeros(ok.shape, tl.float32)
    for block in tl.static_range(BLOCKS):
        largest = tl.maximum(largest, tl.load(parts + (block * PARTS + which) * step, mask=ok, other=0.0))
    square, size = tl.zeros(ok.shape, tl.float32), tl.where(largest > 0, largest, 1.0)
    for block in tl.static_range(BLOCKS):
        share = tl.load(parts + (block * PARTS + which) * step, mask=ok, other=0.0) / size
        square += share * share
    return largest * tl.sqrt(square)


@triton.jit
def conclude(
    parts, by_q, lam, gamma, query, noted, step,
    H: tl.constexpr, M: tl.constexpr, MAIN: tl.constexpr, ADDRESS: tl.constexpr,
    ADDED: tl.constexpr, PROBE: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The notes ``noted`` ``[len(NOTES), T, H]`` from ``parts``. Program (tokens and heads)."""
    at = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    ok, step = at < step, tl.zeros([1], tl.int64) + step
    parts, notes = parts + at, noted + at
    notes = note(notes, _joined(parts, 0, BLOCKS, step, ok), ok, step)
    notes = note(notes, _joined(parts, 1, BLOCKS, step, ok), ok, step)
    if PROBE:
        rho = tl.load(by_q + at * M + MAIN, mask=ok, other=0.0)
        read_norm, without_norm = _joined(parts, 2, BLOCKS, step, ok), _joined(parts, 4, BLOCKS, step, ok)
        cosine = tl.zeros([BN], tl.float32)
        for block in tl.static_range(BLOCKS):
            share = tl.load(parts + (block * PARTS + 2) * step, mask=ok, other=0.0) / tl.where(read_norm > 0, read_norm, 1.0)
            share *= tl.load(parts + (block * PARTS + 4) * step, mask=ok, other=0.0)
            share /= tl.where(without_norm > 0, without_norm, 1.0)
            cosine += share * tl.load(parts + (block * PARTS + 5) * step, mask=ok, other=0.0)
        strength = tl.zeros([BN], tl.float32)
        if ADDED:
            strength += tl.load(lam + at % H, mask=ok, other=0.0).to(tl.float32)
        sign = tl.where(rho > 0, -1.0, tl.where(rho < 0, 1.0, 0.0))
        notes = note(notes, read_norm, ok, step)
        notes = note(notes, _joined(parts, 3, BLOCKS, step, ok), ok, step)
        notes = note(notes, tl.abs(strength * rho) * read_norm, ok, step)
        notes = note(notes, sign * tl.minimum(tl.maximum(cosine, -1.0), 1.0), ok, step)
    if ADDRESS >= 0:
        address_norm = _joined(parts, 7, BLOCKS, step, ok)
        erased = tl.load(gamma + at, mask=ok, other=0.0).to(tl.float32)
        aimed = tl.abs(tl.load(query + at, mask=ok, other=0.0))
        notes = note(notes, _joined(parts, 6, BLOCKS, step, ok), ok, step)
        notes = note(notes, address_norm, ok, step)
        notes = note(notes, erased * aimed * address_norm, ok, step)
