"""The parts of a layer around the memory: norm, short convolution, feed-forward, and a linear map a head."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qed_probe.kernels.backend import has_triton


def linear_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear map takes ``x``: its own, or that of autocast where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def normalise(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """X / √(mean x² + eps) · weight over the last axis, computed in float32, in ``dtype``."""
    if x.device.type == "cuda" and has_triton():
        from qed_probe.kernels.norm import norm

        return norm(x, weight.float(), eps, dtype)
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(dtype)


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) · weight over the last axis, in float32, returned in the dtype that a linear map would take it in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., size]`` normalised."""
        return normalise(x, self.weight, self.eps, linear_dtype(x))


class ShortConv(nn.Module):
    """SiLU of a causal depthwise convolution over the last ``width`` tokens, without bias, summed in float32.

    ``weight`` is ``[channels, 1, width]``, the newest token last, as in FLA's ShortConvolution.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.width = width

    def new_state(self, batch: int) -> Tensor:
        """Nothing seen yet: ``[batch, width − 1, channels]`` zeros in float32."""
        channels, _, width = self.weight.shape
        return torch.zeros(batch, width - 1, channels, device=self.weight.device)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve ``x`` ``[B, T, channels]`` after the inputs ``state`` ``[B, width − 1, channels]``; also the next state."""
        padded, length = torch.cat([state, x], 1), x.shape[1]
        return self._sum([padded[:, j : j + length] for j in range(self.width)]).to(x.dtype), padded[:, length:]

    def fresh(self, x: Tensor, first: Tensor | None) -> Tensor:
        """Convolve ``x`` ``[B, T, channels]`` after nothing; ``first`` ``[T]`` is where each token's packed sequence begins."""
        if x.device.type == "cuda" and has_triton():
            from qed_probe.kernels.convolution import convolution

            return convolution(x, self.weight[:, 0].float(), first)
        if first is None:
            return self.forward(x, self.new_state(len(x)))[0]
        length, past = len(first), self.width - 1
        padded, position = F.pad(x.float(), (0, 0, past, 0)), torch.arange(length, device=x.device) - first
        parts = [padded[:, j : j + length].where((position >= past - j)[:, None], 0) for j in range(self.width)]
        return self._sum(parts).to(x.dtype)

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """SiLU of what each tap is multiplied with, ``[B, T, channels]``, the newest token last."""
        taps = self.weight[:, 0].float().unbind(-1)
        return F.silu(torch.stack([part * tap for part, tap in zip(parts, taps, strict=True)]).sum(0))


class HeadLinear(nn.Module):
    """A linear map of its own for every head, without bias; ``weight`` is ``[heads, fan_in, fan_out]``."""

    def __init__(self, heads: int, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, fan_in, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., heads · fan_in]`` to ``[..., heads, fan_out]``."""
        return torch.einsum("...hr,hrk->...hk", x.view(*x.shape[:-1], *self.weight.shape[:2]), self.weight)


class SwiGLU(nn.Module):
    """down(SiLU(gate x) ⊙ up x)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., hidden]`` to the same shape."""
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y
