"""A small decoder language model: embedding, blocks of a delta-rule mixer and a SwiGLU, output."""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qed_probe.errors import InputError
from qed_probe.kernels.packing import bounds
from qed_probe.models.config import ModelConfig
from qed_probe.models.layers import HeadLinear, RMSNorm, SwiGLU
from qed_probe.models.mixer import DeltaMixer, Memory


@dataclass
class Cache:
    """What a model carries from call to call: every layer's memory. A forward replaces its tensors and never writes into them."""

    layers: list[Memory]

    def fork(self) -> "Cache":
        """Another that goes on from the same, apart from this one."""
        return Cache([copy(memory) for memory in self.layers])


class Block(nn.Module):
    """x + mixer(norm x), then x + ffn(norm x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mixer = DeltaMixer(config)
        self.ffn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ffn = SwiGLU(config.hidden, config.ffn)

    def forward(self, x: Tensor, memory: Memory | None, cu_seqlens: Tensor | None) -> Tensor:
        """``x`` ``[B, T, hidden]`` to the same shape; ``memory`` is updated in place."""
        x = x + self.mixer(self.mixer_norm(x), memory, cu_seqlens)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class LanguageModel(nn.Module):
    """A decoder language model over token ids; random weights are drawn from torch's global generator."""

    packs, longest, scratch = True, None, 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        # Normal weights of 0.02, and 1/√(2·layers) of that where a branch joins the residual stream (GPT-2).
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | HeadLinear):
                joins = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.02 / (2 * self.config.layers) ** 0.5 if joins else 0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.embed.weight.device

    @property
    def mixers(self) -> dict[int, DeltaMixer]:
        """The layers that have a memory, by layer index."""
        return {index: block.mixer for index, block in enumerate(self.layers) if isinstance(block, Block)}

    def strengths(self) -> dict[int, Tensor]:
        """λ ``[H]`` of every layer that has a memory, by layer index."""
        return {index: mixer.lam() for index, mixer in self.mixers.items()}

    def new_cache(self, batch: int) -> Cache:
        """A cache in which nothing has been seen, for ``batch`` sequences."""
        return Cache([mixer.new_memory(batch) for mixer in self.mixers.values()])

    def forward(self, tokens: Tensor, *, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states ``[B, T, hidden]`` after the final norm, for ``tokens`` ``[B, T]`` int64.

        ``cache`` continues from what it has seen and is updated in place. ``cu_seqlens`` ``[N + 1]`` are the boundaries of N
        independent sequences packed in one row, best on the CPU, where every layer looks at them. Raises InputError if the
        tokens, cache or boundaries do not fit.
        """
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.shape[1] == 0:
            raise InputError(f"tokens: expected [B, T] int64 with T of at least 1, found {list(tokens.shape)} {tokens.dtype}")
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.cpu()  # or every layer would wait for the GPU
        bounds(tokens.shape[0], tokens.shape[1], cu_seqlens)
        if cache is not None and cu_seqlens is not None:
            raise InputError("expected a cache or cu_seqlens, found both")
        if cache is not None and len(cache.layers[0].state) != len(tokens):
            raise InputError(f"cache: expected one of {len(tokens)} sequences, found one of {len(cache.layers[0].state)}")
        x: Tensor = self.embed(tokens)
        for index, block in enumerate(self.layers):
            x = block(x, None if cache is None else cache.layers[index], cu_seqlens)
        y: Tensor = self.norm(x)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., vocab]`` of the next token, through the embedding where that is tied."""
        return F.linear(hidden, self.embed.weight if self.config.tied else self.head.weight)
