"""The decayed products of a chunk's rows with the keys of its earlier rows, and the inverse that they make."""

import triton
import triton.language as tl

from qed_probe.kernels.programs.rows import block_decay, decay_rows, edit_rows, row, sizes, token_rows

BLOCK = 16
DEEP = tl.constexpr(1.8e-35)
"""Down to exp(−80) a product of decays and its inverse are far from the ends of float32."""


@triton.jit
def couple(
    a, a_size, q, d, d_size, keys, since, until, totals, first, size, coupled_a, coupled_q, coupled_d,
    H: tl.constexpr, HQ: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, READS: tl.constexpr, BLOCK: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """``coupled_x[i, j]`` = x_iᵀ Diag(exp Σ_{j<l≤i} g_l) k_j for rows j < i of a chunk, else 0.

    The first reader is ``a`` ``[T, H, M, K]`` and ``coupled_a`` ``[chunks, H, ROWS, ROWS]``; the others are ``q`` and ``d``
    ``[T, H, K]``, and theirs ``[chunks, H, READS, ROWS]`` couple a token with the edits of earlier tokens. Inside blocks whose
    decays reach beyond DEEP, and wherever products are exact, ``couple_deep`` has to follow. Program (chunk · reader, head).
    """
    chunk, reader, h = (tl.program_id(0) // READERS).to(tl.int64), tl.program_id(0) % READERS, tl.program_id(1)
    rows, begin, place = tl.arange(0, ROWS), tl.load(first + chunk), chunk * H + h
    block = rows // BLOCK
    token, edit, ok = row(rows, tl.load(size + chunk), M, MP)
    a, a_size, q, d, d_size = (
        a + begin * H * M * K,
        a_size + begin * H * M,
        q + begin * HQ * K,
        d + begin * H * K,
        d_size + begin * H,
    )
    keys, since, until = keys + begin * KEYS * M * K, since + begin * H * G, until + begin * H * G
    totals += place * (ROWS // BLOCK) * G
    strip = tl.zeros([ROWS, ROWS], tl.float32)
    for start in range(0, K, BK):
        channels = start + tl.arange(0, BK)
        # Rows decay from their block's start; keys decay to its end, or grow back to its start.
        s = decay_rows(since, token, ok, h, H, G, K, channels)
        ending = decay_rows(until, token, ok, h, H, G, K, channels)
        key = edit_rows(keys, token, edit, ok, h // (H // KEYS), KEYS, M, K, channels)
        if reader == 0:
            x = edit_rows(a, token, edit, ok, h, H, M, K, channels) * sizes(a_size, token, edit, ok, h, H, M)
        elif reader == 1:
            x = token_rows(q, token, ok, h // (H // HQ), HQ, K, channels)
        else:
            x = token_rows(d, token, ok, h, H, K, channels) * sizes(d_size, token, 0, ok, h, H, 1)
        x *= s
        if PRECISION != "ieee":
            grown = tl.trans(key / tl.maximum(s, DEEP))
            strip += tl.where(block[:, None] == block[None, :], tl.dot(x, grown, input_precision=PRECISION), 0.0)
        key *= ending
        beside = tl.dot(x, tl.trans(key), input_precision=PRECISION)
        strip += tl.where((block[None, :] % 2 == 0) & (block[:, None] == block[None, :] + 1), beside, 0.0)
        if ROWS == 4 * BLOCK:
            x *= tl.where((block == 3)[:, None], block_decay(totals, 2, G, K, channels), 1.0)
            key *= tl.where((block == 0)[:, None], block_decay(totals, 1, G, K, channels), 1.0)
            afar = tl.dot(x, tl.trans(key), input_precision=PRECISION)
            strip += tl.where((block[None, :] < 2) & (block[:, None] >= 2), afar, 0.0)
    if reader == 0:
        strip = tl.where(rows[None, :] < rows[:, None], strip, 0.0)
        tl.store(coupled_a + place * ROWS * ROWS + rows[:, None] * ROWS + rows[None, :], strip)
    else:
        strip = tl.where((rows // MP)[None, :] < (rows // MP)[:, None], strip, 0.0)
        at = (rows // MP)[:, None] * ROWS + rows[None, :]
        reads = (rows % MP == 0)[:, None]
        if reader == 1:
            tl.store(coupled_q + place * READS * ROWS + at, strip, mask=reads)
        else:
            tl.store(coupled_d + place * READS * ROWS + at, strip, mask=reads)


@triton.jit
def couple_deep(
    a, a_size, q, d, d_size, keys, g, since, least, first, size, coupled_a, coupled_q, coupled_d,
    H: tl.constexpr, HQ: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, MP: tl.constexpr, G: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, READS: tl.constexpr, BLOCK: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """As ``couple``, inside one block, for its rows whose decay is beyond DEEP.

    Column by column from the last, no factor but products of decays. ``least`` ``[chunks, H, blocks]`` is the smallest ``since``
    of each block. Program (chunk · block, head).
    """
    blocks: tl.constexpr = ROWS // BLOCK
    chunk, block, h = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks, tl.program_id(1)
    exact: tl.constexpr = PRECISION == "ieee"
    if (tl.load(least + (chunk * H + h) * blocks + block) < DEEP) | exact:
        begin, count, place = tl.load(first + chunk), tl.load(size + chunk), chunk * H + h
        within, channels, hk = tl.arange(0, BLOCK), tl.arange(0, BK), h // (H // KEYS)
        index = block * BLOCK + within
        token, edit, ok = row(index, count, M, MP)
        deep = (tl.min(decay_rows(since + begin * H * G, token, ok, h, H, G, K, channels), 1) < DEEP) | exact
        x = edit_rows(a + begin * H * M * K, token, edit, ok, h, H, M, K, channels)
        x *= sizes(a_size + begin * H * M, token, edit, ok, h, H, M)
        y = token_rows(q + begin * HQ * K, token, ok, h // (H // HQ), HQ, K, channels)
        z = y
        if PROBE:
            z = token_rows(d + begin * H * K, token, ok, h, H, K, channels)
            z *= sizes(d_size + begin * H, token, 0, ok, h, H, 1)
        to_a = coupled_a + place * ROWS * ROWS + index * ROWS + block * BLOCK
        to_q = coupled_q + place * READS * ROWS + index // MP * ROWS + block * BLOCK
        to_d = coupled_d + place * READS * ROWS + index // MP * ROWS + block * BLOCK
        chain = tl.zeros([BLOCK, BK], tl.float32)
        for back in range(1, BLOCK):
            j = BLOCK - 1 - back
            token_j, edit_j, ok_j = row(block * BLOCK + j + 1 + tl.arange(0, 1), count, M, MP)
            at = (token_j * H + h)[:, None] * G + tl.where(G == 1, 0, channels)[None, :]
            decay = tl.load(g + begin * H * G + at, mask=(ok_j & (edit_j == 0))[:, None] & (channels < K)[None, :], other=0.0).to(
                tl.float32
            )
            token_j, edit_j, ok_j = row(block * BLOCK + j + tl.arange(0, 1), count, M, MP)
            chain = tl.where((within == j + 1)[:, None], 1.0, chain) * tl.exp(decay)
            column = chain * edit_rows(keys + begin * KEYS * M * K, token_j, edit_j, ok_j, hk, KEYS, M, K, channels)
            reads = deep & (j // MP < within // MP) & (index % MP == 0)
            tl.store(to_a + j, tl.sum(x * column, 1), mask=deep & (j < within))
            tl.store(to_q + j, tl.sum(y * column, 1), mask=reads)
            if PROBE:
                tl.store(to_d + j, tl.sum(z * column, 1), mask=reads)


@triton.jit
def _block(lower, i, j, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    within = tl.arange(0, BLOCK)
    return tl.load(lower + (i * BLOCK + within)[:, None] * ROWS + j * BLOCK + within[None, :])


@triton.jit
def invert(coupled_a, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """``coupled_a``, strictly lower L ``[matrices, ROWS, ROWS]``, becomes (I + L)⁻¹ − I. Program (matrix).

    Each diagonal block row by row, then each block below from those above it: T_ij = −T_ii Σ_{j≤l<i} L_il T_lj.
    """
    lower = coupled_a + tl.program_id(0).to(tl.int64) * ROWS * ROWS
    blocks: tl.constexpr = ROWS // BLOCK
    block, within = tl.arange(0, blocks), tl.arange(0, BLOCK)
    diagonal = block[:, None] * BLOCK * (ROWS + 1) + within[None, :]
    one = (within[:, None] == within[None, :]).to(tl.float32)
    inverse = tl.zeros([blocks, BLOCK, BLOCK], tl.float32) + one[None, :, :]
    for i in range(1, BLOCK):
        line = tl.load(lower + diagonal + i * ROWS)
        line = (within == i).to(tl.float32)[None, :] - tl.sum(line[:, :, None] * inverse, 1)
        inverse = tl.where((within == i)[None, :, None], line[:, None, :], inverse)
    at = diagonal[:, None, :] + within[None, :, None] * ROWS
    # What one thread stores here another loads: hence the barriers.
    tl.debug_barrier()
    tl.store(lower + at, inverse)
    tl.debug_barrier()
    for i in tl.static_range(1, blocks):
        for j in tl.static_range(i):
            summed = tl.zeros([BLOCK, BLOCK], tl.float32)
            for between in tl.static_range(j, i):
                left, right = _block(lower, i, between, ROWS, BLOCK), _block(lower, between, j, ROWS, BLOCK)
                summed += tl.dot(left, right, input_precision=PRECISION)
            below = -tl.dot(_block(lower, i, i, ROWS, BLOCK), summed, input_precision=PRECISION)
            tl.debug_barrier()
            tl.store(lower + (i * BLOCK + within)[:, None] * ROWS + j * BLOCK + within[None, :], below)
            tl.store(lower + (j * BLOCK + within)[:, None] * ROWS + i * BLOCK + within[None, :], tl.zeros_like(below))
            tl.debug_barrier()
    tl.store(lower + at, inverse - one[None, :, :])
