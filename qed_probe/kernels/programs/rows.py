"""Where the rows of a chunk lie in the tensors of the tokens.

A chunk holds ``ROWS`` rows: its tokens' edits, one after another, ``MP`` rows a token (M rounded up to a power of two), in blocks
of ``BLOCK`` rows. Only the first row of a token decays. Tensors of tokens are ``[T, H, ...]``, contiguous; q and k may have fewer
heads. Programs move their pointers to a chunk once, by 64 bits, and count from there: there are registers for no more.

Between two rows lies the product of the decays after the one up to the other, made of three kinds of factors that ``prepare``
leaves: ``since`` the start of a token's block up to and with the token, ``until`` the end of the block after the token, and the
``totals`` of whole blocks. Each is an exponential of a sum of its own terms and at most 1: no decay is taken for a difference, so
that a strong one swallows no weak one and none overflows; and no factor of a row depends on a later token.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def row(index, size, M: tl.constexpr, MP: tl.constexpr):
    """The token of a chunk's row, from the chunk's first, its edit, and whether there is such a row."""
    token, edit = index // MP, index % MP
    return token, edit, (token < size) & (edit < M)


@triton.jit
def decay_rows(x, token, ok, h, H, G: tl.constexpr, K, channels):
    """Decays ``[T, H, G]`` of the rows' tokens, ``[rows, channels]``; 1 where there is no token."""
    at = (token * H + h)[:, None] * G + tl.where(G == 1, 0, channels)[None, :]
    return tl.load(x + at, mask=ok[:, None] & (channels < K)[None, :], other=1.0)


@triton.jit
def block_decay(totals, block, G: tl.constexpr, K, channels):
    """The decay of one whole block of a chunk, ``[1, channels]``, from ``totals`` ``[blocks, G]``."""
    at = block * G + tl.where(G == 1, 0, channels)
    return tl.load(totals + at, mask=channels < K, other=1.0)[None, :]


@triton.jit
def before(totals, block, blocks: tl.constexpr, G: tl.constexpr, K, channels):
    """The decay of all blocks of a chunk before each row's."""
    decay = tl.full([block.shape[0], channels.shape[0]], 1.0, tl.float32)
    for other in tl.static_range(blocks):
        decay *= tl.where((block > other)[:, None], block_decay(totals, other, G, K, channels), 1.0)
    return decay


@triton.jit
def after(totals, block, blocks: tl.constexpr, G: tl.constexpr, K, channels):
    """The decay of all blocks of a chunk after each row's."""
    decay = tl.full([block.shape[0], channels.shape[0]], 1.0, tl.float32)
    for other in tl.static_range(blocks):
        decay *= tl.where((block < other)[:, None], block_decay(totals, other, G, K, channels), 1.0)
    return decay


@triton.jit
def edit_rows(x, token, edit, ok, h, H, M: tl.constexpr, K, channels):
    """Rows of a tensor ``[T, H, M, K]``, one an edit."""
    at = ((token * H + h) * M + edit)[:, None] * K + channels[None, :]
    return tl.load(x + at, mask=ok[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def scale(x):
    """The power of two at or below each row's largest entry: rows divided by it fill the range of float16, exactly."""
    largest = tl.max(tl.abs(x), 1)
    size = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(largest > 0, tl.maximum(size, 1.1754944e-38), 1.0)


@triton.jit
def token_rows(x, token, ok, h, H, K, channels):
    """Rows of a tensor ``[T, H, K]``, one a token."""
    at = (token * H + h)[:, None] * K + channels[None, :]
    return tl.load(x + at, mask=ok[:, None] & (channels < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def given_rows(v, w, token, edit, ok, h, H, FIRST: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr, V, values):
    """What each edit is given to write, u ``[rows, values]``: v times its gate for the N delta edits from FIRST on, else 0."""
    ok = ok & (edit >= FIRST) & (edit < FIRST + N)
    at = (token * H + h) * N + edit - FIRST
    mask = ok[:, None] & (values < V)[None, :]
    u = tl.load(v + at[:, None] * V + values[None, :], mask=mask, other=0.0).to(tl.float32)
    if GATE == 1:
        u *= tl.load(w + at, mask=ok, other=0.0).to(tl.float32)[:, None]
    elif GATE == 2:
        u *= tl.load(w + (token * H + h)[:, None] * V + values[None, :], mask=mask, other=0.0).to(tl.float32)
    return u


@triton.jit
def sizes(x, token, edit, ok, h, H, M: tl.constexpr):
    """The scales of rows that ``prepare`` left, ``[T, H, M]``."""
    return tl.load(x + (token * H + h) * M + edit, mask=ok, other=0.0)[:, None]


@triton.jit
def note(notes, x, ok, step):
    """Store one record of each token and head, and go on to the next record's place."""
    tl.store(notes, x, mask=ok)
    return notes + step


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Matrix product in the dtype of x, with float32 sums."""
    if INTERPRETED:  # Triton's interpreter would multiply the bits of bfloat16
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)
