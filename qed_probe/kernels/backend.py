"""Which code runs the recurrence: chosen here and nowhere else."""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from qed_probe.errors import InputError
from qed_probe.kernels.mixers import Tokens

Choice = Literal["auto", "triton", "torch", "reference"]
Backend = Literal["triton", "torch", "reference"]
EDITS, CHANNELS = 4, 256
"""What the Triton programs take at most: edits a token, key and value channels."""


def choose(choice: Choice, tokens: Tokens) -> Backend:
    """The backend that runs these tokens, as ``checked`` returns them.

    ``auto`` is Triton on a CUDA device where it is there, takes these sizes, is the faster (values of 16 bits, or at most 64
    channels: exact products are slow) and no gradient is asked for, else PyTorch. Raises InputError for a choice that is none or
    cannot run.
    """
    if choice not in get_args(Choice):
        raise InputError(f"backend: expected one of {', '.join(get_args(Choice))}, found {choice!r}")
    if choice in ("torch", "reference"):
        return choice
    hindrance = _hindrance(tokens)
    if choice == "triton" and hindrance:
        raise InputError(f"backend: expected triton, found {hindrance}")
    small = max(tokens.q.shape[-1], tokens.v.shape[-1]) <= 64
    faster = tokens.q.device.type == "cuda" and (tokens.v.dtype != torch.float32 or small)
    return "triton" if choice == "triton" or (faster and not hindrance) else "torch"


def _hindrance(tokens: Tokens) -> str:
    """Why Triton's programs cannot run these tokens; empty if they can."""
    edits = tokens.k.shape[-2] + (tokens.address is not None) + (tokens.removal_key is not None)
    channels = max(tokens.q.shape[-1], tokens.v.shape[-1])
    given = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, tokens.b, tokens.w, tokens.lam, tokens.address, tokens.gamma)
    if not _there():
        return "no triton"
    if tokens.q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors on {tokens.q.device.type} and TRITON_INTERPRET not set to 1"
    if edits > EDITS or channels > CHANNELS:
        return f"{edits} edits a token and {channels} channels, more than {EDITS} and {CHANNELS}"
    if tokens.v.dtype == torch.float64:
        return "float64 tensors"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return "a gradient to be computed"
    return ""


@cache
def _there() -> bool:
    return find_spec("triton") is not None
