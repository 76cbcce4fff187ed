"""What a trace asks of a model; the native ones and those of other libraries give it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from qed_probe.models.config import ModelConfig
from qed_probe.models.foreign.description import Description


class Model(Protocol):
    """A language model with layers that own a memory, of which ``capture`` sees every pass."""

    @property
    def config(self) -> ModelConfig | Description:
        """Its mixer and its sizes."""

    @property
    def device(self) -> torch.device:
        """Where tokens are given to it."""

    @property
    def packs(self) -> bool:
        """Whether several sequences of a call share one row; else they are padded to rows of one length."""

    @property
    def longest(self) -> int | None:
        """The most tokens that a sequence may have, None if any number."""

    @property
    def scratch(self) -> int:
        """Float32 numbers a token and head that its own kernel holds while it runs, where they are many."""

    def strengths(self) -> dict[int, Tensor]:
        """λ ``[H]`` of every layer that owns a memory, by the layer's number."""

    def new_cache(self, batch: int) -> Any:  # noqa: ANN401 - each model's own
        """What carries ``batch`` sequences from call to call, nothing seen yet."""

    def __call__(self, tokens: Tensor, *, cache: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:  # noqa: ANN401
        """Hidden states ``[B, T, hidden]`` of ``tokens`` ``[B, T]``; ``cache`` goes on from what it has seen, and is updated."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., vocab]`` of the next token."""
