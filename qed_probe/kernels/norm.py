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
def shorten(x, y, rows, H, C, of_token, of_head, eps, ROWS: tl.constexpr, BC: tl.constexpr):
    """``y`` = x / √(Σ x² + eps) of ``[tokens, H, C]``; x's tokens and heads lie so far apart, y is contiguous."""
    at, ok, channel = _tile(rows, C, ROWS, BC)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    given = tl.load(x + (row // H * of_token + row % H * of_head)[:, None] + channel[None, :], mask=ok, other=0.0).to(tl.float32)
    tl.store(y + at, given * (1 / tl.sqrt(tl.sum(given * given, 1) + eps))[:, None], mask=ok)


def _programs(x: Tensor) -> int:
    """How many programs share the rows of ``x``."""
    programs: int = triton.cdiv(x.numel() // x.shape[-1], _held(x)["ROWS"])
    return programs


def _held(x: Tensor) -> dict[str, int]:
    """The rows and channels that a program holds."""
    wide = triton.next_power_of_2(x.shape[-1])
    return {"ROWS": max(ELEMENTS // wide, 1), "BC": wide}


def _launch(program: Any, x: Tensor, *others: Tensor, eps: float) -> None:
    C = x.shape[-1]
    program[(_programs(x),)](x, *others, x.numel() // C, C, eps, **_held(x))


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
    """X / √(Σ x² + eps) over the last axis of ``[..., T, H, C]`` in ``dtype``, computed in float32; without a gradient."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    y, given, (H, C) = x.new_empty(x.shape, dtype=dtype), x.flatten(0, -3), x.shape[-2:]
    with torch.cuda.device(x.get_device()):  # Triton launches on the current GPU
        shorten[(_programs(x),)](given, y, x.numel() // C, H, C, *given.stride()[:2], eps, **_held(x))
    return y
