"""The norm by the root of the mean square, forward and back, and that to unit length, by Triton programs, whatever the dtypes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ELEMENTS = 4096
"""How many a program holds."""


@triton.jit
def _tile(rows, C, ROWS: tl.constexpr, BC: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BC)
    return row[:, None] * C + channel[None, :], (row < rows)[:, None] & (channel < C)[None, :], channel


@triton.jit
def normalise(x, weight, y, rows, C, eps, ROWS: tl.constexpr, BC: tl.constexpr):
    """``y`` = x / √(mean x² + eps) · weight, of ``[rows, C]``."""
    at, ok, channel = _tile(rows, C, ROWS, BC)
    given = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    given *= tl.rsqrt(tl.sum(given * given, 1) / C + eps)[:, None]
    tl.store(y + at, given * tl.load(weight + channel, mask=channel < C, other=0.0)[None, :], mask=ok)


@triton.jit
def normalise_back(x, weight, d_y, d_x, d_weight, rows, C, eps, ROWS: tl.constexpr, BC: tl.constexpr):
    """The gradients of ``x`` and, each program's part of it, of ``weight``: ``[programs, C]``."""
    at, ok, channel = _tile(rows, C, ROWS, BC)
    unit = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    size = tl.rsqrt(tl.sum(unit * unit, 1) / C + eps)[:, None]
    unit *= size
    given = tl.load(d_y + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(d_weight + tl.program_id(0) * C + channel, tl.sum(given * unit, 0), mask=channel < C)
    given *= tl.load(weight + channel, mask=channel < C, other=0.0)[None, :]
    tl.store(d_x + at, (given - unit * (tl.sum(given * unit, 1) / C)[:, None]) * size, mask=ok)


@triton.jit
def to_unit(x, y, T, H, C, of_token, of_head, of_channel, eps, ROWS: tl.constexpr, BC: tl.constexpr):
    """``y`` = x / √(Σ x² + eps) of ``[T, H, C]``: x has these strides, y is contiguous. Program (block of tokens, head)."""
    token, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BC).to(tl.int64)
    ok = (token < T)[:, None] & (channel < C)[None, :]
    at = token[:, None] * of_token + head * of_head + channel[None, :] * of_channel
    given = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    given *= (1 / tl.sqrt(tl.sum(given * given, 1) + eps))[:, None]
    tl.store(y + (token * H + head)[:, None] * C + channel[None, :], given, mask=ok)


def tile(columns: int) -> tuple[int, int]:
    """How many rows, and columns, a program holds of so many columns."""
    wide: int = triton.next_power_of_2(columns)
    return max(ELEMENTS // wide, 1), wide


def _programs(x: Tensor) -> int:
    """How many programs share the rows of ``x``."""
    programs: int = triton.cdiv(x.numel() // x.shape[-1], tile(x.shape[-1])[0])
    return programs


def _launch(program: Any, x: Tensor, *others: Tensor, eps: float) -> None:
    C = x.shape[-1]
    rows, wide = tile(C)
    program[(_programs(x),)](x, *others, x.numel() // C, C, eps, ROWS=rows, BC=wide)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        y = x.new_empty(x.shape, dtype=dtype)
        _launch(normalise, x, weight, y, eps=eps)
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), weight.new_empty(_programs(x), x.shape[-1])
        _launch(normalise_back, x, weight, d_y.contiguous(), d_x, d_weight, eps=ctx.eps)
        return d_x, d_weight.sum(0) if ctx.needs_input_grad[1] else None, None, None


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """X / √(mean x² + eps) · weight over the last axis in ``dtype``, computed in float32 and differentiable."""
    with torch.cuda.device(x.get_device()):  # Triton launches on the current GPU
        y: Tensor = _Norm.apply(x.contiguous(), weight, eps, dtype)  # type: ignore[no-untyped-call]
    return y


def unit(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """X / √(Σ x² + eps) over the last axis of ``[..., T, H, C]``, contiguous in ``dtype``, computed in float32; no gradient."""
    y, given = x.new_empty(x.shape, dtype=dtype), x.flatten(0, -3)
    T, H, C = given.shape
    rows, wide = tile(C)
    with torch.cuda.device(x.get_device()):  # Triton launches on the current GPU
        to_unit[triton.cdiv(T, rows), H](given, y, T, H, C, *given.stride(), eps, ROWS=rows, BC=wide)
    return y
