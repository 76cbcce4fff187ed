"""The short convolution of a layer by Triton programs, one forward and one back, where PyTorch would run dozens of kernels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = {"ROWS": 32, "BC": 64}


@triton.jit
def _tile(L, C, ROWS: tl.constexpr, BC: tl.constexpr):
    """A program's sequence, tokens and channels: program (sequence · block of tokens, block of channels)."""
    blocks = tl.cdiv(L, ROWS)
    token = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    return (tl.program_id(0) // blocks).to(tl.int64), token, tl.program_id(1) * BC + tl.arange(0, BC)


@triton.jit
def _row(x, row, token, length, channel, C):
    ok = ((token >= 0) & (token < length))[:, None] & (channel < C)[None, :]
    return tl.load(x + (row * length + token)[:, None] * C + channel[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _sum(x, taps, row, token, length, channel, C, WIDTH: tl.constexpr):
    """Σ_j taps_j x_{t+j} for each token t."""
    total = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    for j in tl.static_range(WIDTH):
        tap = tl.load(taps + channel * WIDTH + j, mask=channel < C, other=0.0)
        total += tap[None, :] * _row(x, row, token + j, length, channel, C)
    return total


@triton.jit
def convolve(x, taps, y, L, C, WIDTH: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr):
    """``y`` ``[B, L, C]`` = SiLU(Σ_j taps_j x_{t+j}); ``x`` ``[B, L + WIDTH − 1, C]``, ``taps`` ``[C, WIDTH]``."""
    row, token, channel = _tile(L, C, ROWS, BC)
    total = _sum(x, taps, row, token, L + WIDTH - 1, channel, C, WIDTH)
    ok = (token < L)[:, None] & (channel < C)[None, :]
    tl.store(y + (row * L + token)[:, None] * C + channel[None, :], total * tl.sigmoid(total), mask=ok)


@triton.jit
def convolve_back(x, taps, d_y, d_x, d_taps, L, C, WIDTH: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr):
    """The gradients of ``x`` and, each program's part of it, of ``taps``: ``[programs, C, WIDTH]``."""
    length = L + WIDTH - 1
    row, token, channel = _tile(length, C, ROWS, BC)
    by_x = tl.zeros([ROWS, BC], tl.float32)
    for back in tl.static_range(WIDTH):
        j = WIDTH - 1 - back
        total = _sum(x, taps, row, token - j, length, channel, C, WIDTH)
        share = tl.sigmoid(total)
        given = _row(d_y, row, token - j, L, channel, C) * share * (1 + total * (1 - share))
        by_x += tl.load(taps + channel * WIDTH + j, mask=channel < C, other=0.0)[None, :] * given
    # The last of them is each token's own.
    for j in tl.static_range(WIDTH):
        by_tap = tl.sum(given * _row(x, row, token + j, length, channel, C), 0)
        tl.store(d_taps + (tl.program_id(0) * C + channel) * WIDTH + j, by_tap, mask=channel < C)
    ok = (token < length)[:, None] & (channel < C)[None, :]
    tl.store(d_x + (row * length + token)[:, None] * C + channel[None, :], by_x, mask=ok)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, dtype: torch.dtype) -> Tensor:
        B, length, C = x.shape
        L = length - taps.shape[1] + 1
        y = x.new_empty(B, L, C, dtype=dtype)
        convolve[B * triton.cdiv(L, TILE["ROWS"]), triton.cdiv(C, TILE["BC"])](x, taps, y, L, C, taps.shape[1], **TILE)
        ctx.save_for_backward(x, taps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps = ctx.saved_tensors
        B, length, C = x.shape
        programs, width = B * triton.cdiv(length, TILE["ROWS"]), taps.shape[1]
        d_x, d_taps = torch.empty_like(x), taps.new_empty(programs, C, width)
        given = (x, taps, d_y.contiguous(), d_x, d_taps, length - width + 1, C, width)
        convolve_back[programs, triton.cdiv(C, TILE["BC"])](*given, **TILE)
        return d_x, d_taps.sum(0), None


def convolution(x: Tensor, taps: Tensor, dtype: torch.dtype) -> Tensor:
    """SiLU of Σ_j taps_j x_{t+j}, ``[B, L, C]`` in ``dtype``, summed in float32 and differentiable.

    ``x`` is ``[B, L + width − 1, C]``, ``taps`` ``[C, width]``, both float32.
    """
    y: Tensor = _Convolution.apply(x.contiguous(), taps.contiguous(), dtype)  # type: ignore[no-untyped-call]
    return y
