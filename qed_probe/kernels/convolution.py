"""The short convolution of a layer by Triton programs, one forward and two back, where PyTorch would run dozens of kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = {"ROWS": 64, "BC": 64}


@triton.jit
def _tile(L, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """A program's sequence, tokens and channels: program (sequence · block of tokens, block of channels)."""
    blocks = tl.cdiv(L, ROWS)
    token = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    return (tl.program_id(0) // blocks).to(tl.int64), token, tl.program_id(1) * BC + tl.arange(0, BC)


@triton.jit
def _begins(first, token, length, PACKED: tl.constexpr):
    """Where the sequence of each token begins: at 0 but in a packed row."""
    return tl.load(first + token, mask=token < length, other=0) if PACKED else tl.zeros_like(token)


@triton.jit
def _row(x, row, token, ok, length, channel, C):
    at = (row * length + token)[:, None] * C + channel[None, :]
    return tl.load(x + at, mask=ok[:, None] & (channel < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _earlier(x, row, token, back, begin, length, channel, C):
    """What came so many tokens before each, 0 where its sequence had not begun."""
    return _row(x, row, token - back, (token - back >= begin) & (token - back < length), length, channel, C)


@triton.jit
def _store(x, row, token, length, channel, C, value):
    ok = (token < length)[:, None] & (channel < C)[None, :]
    tl.store(x + (row * length + token)[:, None] * C + channel[None, :], value, mask=ok)


@triton.jit
def _tap(taps, j, channel, C, WIDTH: tl.constexpr):
    return tl.load(taps + channel * WIDTH + j, mask=channel < C, other=0.0)[None, :]


@triton.jit
def _sum(x, taps, row, token, begin, L, channel, C, WIDTH: tl.constexpr):
    """Σ_j taps_j x_{t+j+1−WIDTH} for each token t."""
    total = _tap(taps, WIDTH - 1, channel, C, WIDTH) * _earlier(x, row, token, 0, begin, L, channel, C)
    for j in tl.static_range(WIDTH - 1):
        total += _tap(taps, j, channel, C, WIDTH) * _earlier(x, row, token, WIDTH - 1 - j, begin, L, channel, C)
    return total


@triton.jit
def convolve(
    x, taps, first, y, L, C,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """``y`` = SiLU(Σ_j taps_j x_{t+j+1−WIDTH}), both ``[B, L, C]``; ``taps`` ``[C, WIDTH]``.

    Where one row packs several sequences, ``first`` ``[L]`` is the first token of each token's.
    """
    row, token, channel = _tile(L, C, ROWS, BC)
    total = _sum(x, taps, row, token, _begins(first, token, L, PACKED), L, channel, C, WIDTH)
    _store(y, row, token, L, channel, C, total * tl.sigmoid(total))


@triton.jit
def convolve_back(
    x, taps, first, d_y, d_sum, d_taps, L, C,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradients of the sum and, each program's part of it, of ``taps``: ``[WIDTH, programs, C]``."""
    row, token, channel = _tile(L, C, ROWS, BC)
    begin = _begins(first, token, L, PACKED)
    total = _sum(x, taps, row, token, begin, L, channel, C, WIDTH)
    share = tl.sigmoid(total)
    given = _row(d_y, row, token, token < L, L, channel, C) * share * (1 + total * (1 - share))
    _store(d_sum, row, token, L, channel, C, given)
    for j in tl.static_range(WIDTH):
        part = tl.sum(given * _earlier(x, row, token, WIDTH - 1 - j, begin, L, channel, C), 0)
        tl.store(d_taps + (j * tl.num_programs(0) + tl.program_id(0)) * C + channel, part, mask=channel < C)


@triton.jit
def spread_back(
    d_sum, taps, first, d_x, L, C,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of ``x``: Σ_j taps_j d_sum_{t−j−1+WIDTH}."""
    row, token, channel = _tile(L, C, ROWS, BC)
    total = _tap(taps, WIDTH - 1, channel, C, WIDTH) * _row(d_sum, row, token, token < L, L, channel, C)
    for j in tl.static_range(WIDTH - 1):
        later = token + (WIDTH - 1 - j)
        ok = (later < L) & (token >= _begins(first, later, L, PACKED))
        total += _tap(taps, j, channel, C, WIDTH) * _row(d_sum, row, later, ok, L, channel, C)
    _store(d_x, row, token, L, channel, C, total)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, first: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        how = {"WIDTH": taps.shape[1], "PACKED": first is not None}
        convolve[_programs(x)](x, taps, first, y, *x.shape[1:], **how, **TILE)
        ctx.save_for_backward(x, taps, first)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps, first = ctx.saved_tensors
        programs, width, how = _programs(x), taps.shape[1], {"WIDTH": taps.shape[1], "PACKED": first is not None}
        d_x, d_sum, d_taps = torch.empty_like(x), taps.new_empty(x.shape), taps.new_empty(width, programs[0], x.shape[2])
        convolve_back[programs](x, taps, first, d_y.contiguous(), d_sum, d_taps, *x.shape[1:], **how, **TILE)
        spread_back[programs](d_sum, taps, first, d_x, *x.shape[1:], **how, **TILE)
        return d_x, d_taps.sum(1).T, None


def _programs(x: Tensor) -> tuple[int, int]:
    return len(x) * triton.cdiv(x.shape[1], TILE["ROWS"]), triton.cdiv(x.shape[2], TILE["BC"])


def convolution(x: Tensor, taps: Tensor, first: Tensor | None = None) -> Tensor:
    """SiLU of Σ_j taps_j x_{t+j+1−width} over each sequence, summed in float32 and differentiable.

    ``x`` and what is returned are ``[B, L, C]`` of one dtype, ``taps`` ``[C, width]`` float32, the newest token last. Where the
    row packs several sequences, ``first`` ``[L]`` is the first token of each token's.
    """
    with torch.cuda.device(x.get_device()):  # Triton launches on the current GPU
        y: Tensor = _Convolution.apply(x.contiguous(), taps.contiguous(), first)  # type: ignore[no-untyped-call]
    return y
