"""Which code runs the recurrence: chosen here and nowhere else."""

import os
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels.mixers import Tokens

Choice = Literal["auto", "triton", "torch", "reference"]
Backend = Literal["triton", "torch", "reference"]
EDITS, CHANNELS = 4, 256
"""What the Triton programs take at most: edits a token, key and value channels."""


def choose(choice: Choice, tokens: Tokens, *, seen: bool, trained: bool) -> Backend:
    """The backend that runs these tokens, as ``checked`` returns them.

    ``seen`` says whether records or states are asked for, ``trained`` whether a gradient is. ``auto`` is Triton on a CUDA device
    where it is there, takes these sizes and is not asked for records and a gradient at once, else PyTorch. Raises InputError for
    a choice that is none or cannot run.
    """
    if choice not in get_args(Choice):
        raise InputError(f"backend: expected one of {', '.join(get_args(Choice))}, found {choice!r}")
    if choice in ("torch", "reference"):
        return choice
    hindrance = _hindrance(tokens) or ("records and their gradient to be computed" if seen and trained else "")
    if choice == "triton" and hindrance:
        raise InputError(f"backend: expected triton, found {hindrance}")
    return "triton" if choice == "triton" or (tokens.q.device.type == "cuda" and not hindrance) else "torch"


def trains(tokens: Tokens, initial_state: Tensor | None) -> bool:
    """Whether a gradient is asked for."""
    given = [getattr(tokens, field.name) for field in fields(tokens)] + [initial_state]
    return torch.is_grad_enabled() and any(x.requires_grad for x in given if isinstance(x, Tensor))


def _hindrance(tokens: Tokens) -> str:
    """Why Triton's programs cannot run these tokens; empty if they can."""
    edits = tokens.k.shape[-2] + (tokens.address is not None) + (tokens.removal_key is not None)
    channels = max(tokens.q.shape[-1], tokens.v.shape[-1])
    if not has_triton():
        return "no triton"
    if tokens.q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on {tokens.q.device.type}, where only its interpreter runs (TRITON_INTERPRET=1)"
    if edits > EDITS or channels > CHANNELS:
        return f"{edits} edits a token and {channels} channels, more than {EDITS} and {CHANNELS}"
    if tokens.v.dtype == torch.float64:
        return "float64 tensors"
    return ""


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
