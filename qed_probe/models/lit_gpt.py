"""GDN-2's own checkpoints, as its training code (lit_gpt) leaves them: one ``.pth`` file of weights, and no configuration."""

import re
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile

import torch
from torch import Tensor

from qed_probe.errors import CheckpointError, InputError
from qed_probe.models.config import ModelConfig

SUFFIX = ".pth"
NAMES = (
    (r"lm_head\.", "head."),
    (r"transformer\.wte\.", "embed."),
    (r"transformer\.ln_f\.", "norm."),
    (r"transformer\.h\.(\d+)\.attn\.", r"layers.\1.mixer."),
    (r"transformer\.h\.(\d+)\.norm_1\.", r"layers.\1.mixer_norm."),
    (r"transformer\.h\.(\d+)\.norm_2\.", r"layers.\1.ffn_norm."),
    (r"transformer\.h\.(\d+)\.mlp\.swiglu\.w1\.", r"layers.\1.ffn.gate_proj."),
    (r"transformer\.h\.(\d+)\.mlp\.swiglu\.w2\.", r"layers.\1.ffn.up_proj."),
    (r"transformer\.h\.(\d+)\.mlp\.swiglu\.w3\.", r"layers.\1.ffn.down_proj."),
)
"""How names begin there, and here."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights under their names here, memory-mapped; no code of the file's is run.

    Raises CheckpointError for a file that is not whole or holds something else.
    """
    expected = f"{path}: expected a file of GDN-2's training code, with the weights under 'model'"
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{expected}, found nothing") from error
    except (OSError, RuntimeError, UnpicklingError, EOFError, BadZipFile) as error:
        raise CheckpointError(f"{expected}, found one damaged, or that would run its own code") from error
    found = content.get("model") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise CheckpointError(f"{expected}, found none there")
    return {_name(str(name)): x for name, x in found.items()}


def read_config(path: Path) -> ModelConfig:
    """The model's sizes, told by the shapes of its weights; raises CheckpointError for a model that is not GDN-2 throughout."""
    shapes = {name: tuple(x.shape) for name, x in read_weights(path).items()}
    layers = 1 + max((int(name.split(".")[1]) for name in shapes if name.startswith("layers.")), default=-1)
    others = [layer for layer in range(layers) if f"layers.{layer}.mixer.w_proj.weight" not in shapes]
    if not layers or others:
        found = f"layer {others[0]} without its w_proj: attention, or RWKV-7" if others else "no layer"
        raise CheckpointError(f"{path}: expected layers of GDN-2 alone, found {found}")
    try:
        (heads,), (keys,) = shapes["layers.0.mixer.A_log"], shapes["layers.0.mixer.dt_bias"]
        (value_dim,), (vocab_size, hidden) = shapes["layers.0.mixer.o_norm.weight"], shapes["embed.weight"]
        ffn, conv = shapes["layers.0.ffn.gate_proj.weight"][0], shapes["layers.0.mixer.q_conv1d.weight"][-1]
        # The code's own constants; b up to 2 and more value than key heads, which it can also do, none of its models has.
        return ModelConfig(
            mixer="gdn2",
            hidden=hidden,
            layers=layers,
            heads=heads,
            key_dim=keys // heads,
            value_dim=value_dim,
            ffn=ffn,
            vocab_size=vocab_size,
            tokenizer="none",
            conv=conv,
            norm_eps=1e-5,
            unit_eps=1e-6,
            output_gate="silu",
            tied=False,
        )
    except (KeyError, ValueError, ZeroDivisionError, InputError) as error:
        raise CheckpointError(f"{path}: expected the weights of GDN-2's layers, found others: {error}") from error


def _name(name: str) -> str:
    for theirs, ours in NAMES:
        changed, times = re.subn(f"^{theirs}", ours, name)
        if times:
            return changed
    return name
