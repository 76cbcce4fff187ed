"""Load a checkpoint of another library as a model that can be traced; what does not fit is said in one line."""

import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qed_probe.errors import CheckpointError, InputError
from qed_probe.models.device import enough_memory
from qed_probe.models.foreign.description import Description, describe
from qed_probe.models.foreign.families import FLA, find_layers
from qed_probe.models.foreign.library import auto_class, quiet, refusals, transformers
from qed_probe.models.foreign.weights import DTYPES, Weights


class RoundedDecayWarning(UserWarning):
    """A model's A_log, whose exponential every log decay is a multiple of, has fewer bits than float32."""


class ForeignModel(nn.Module):
    """A language model of another library, as a trace asks for it: one sequence a pass, logits from hidden states."""

    packs = False

    def __init__(self, inner: Any, config: Description) -> None:  # noqa: ANN401 - a model of the library
        super().__init__()
        self.inner = inner
        self.config = config

    @property
    def longest(self) -> int | None:
        """The tokens that the model is made for."""
        return self.config.longest

    @property
    def scratch(self) -> int:
        """The KDA of transformers compares all channels' decays in all pairs of a chunk of 64, in three tensors at once."""
        return 3 * 64 * self.config.key_dim if (self.config.library, self.config.mixer) == ("transformers", "kda") else 0

    def strengths(self) -> dict[int, Tensor]:
        """λ of every layer that owns a memory, by layer, ``[H]``: 0, as none adds a direction."""
        return {layer: torch.zeros(self.config.heads) for layer in self.config.layers}

    def new_cache(self, batch: int) -> Any:  # noqa: ANN401 - of the library
        """A cache in which nothing has been seen; it takes any number of sequences."""
        if self.config.library == FLA:
            return import_module("fla.models.utils").Cache()
        return transformers(self.config.directory).DynamicCache(config=self.inner.config)

    def forward(self, tokens: Tensor, *, cache: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:  # noqa: ANN401
        """Hidden states ``[B, T, hidden]`` after the final norm, for ``tokens`` ``[B, T]`` int64.

        ``cache`` continues from what it has seen and is updated in place. Raises InputError for ``cu_seqlens`` of more than one
        sequence: not every family keeps packed ones apart.
        """
        if cu_seqlens is not None and len(cu_seqlens) != 2:
            raise InputError(f"cu_seqlens: expected one sequence a pass, found {len(cu_seqlens) - 1}")
        with quiet():
            carried = {} if cache is None else {"past_key_values" if self.config.library == FLA else "cache": cache}
            found = self.inner.base_model(input_ids=tokens, use_cache=bool(carried), return_dict=True, **carried)
        hidden: Tensor = found.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., vocab]`` of the next token."""
        scores: Tensor = self.inner.get_output_embeddings()(hidden)
        return scores

    @property
    def decay_dtype(self) -> str:
        """The dtype that A_log is computed with, ``none`` where there is none."""
        modules = [layer.module for layer in find_layers(self).values()]
        found = {_name(p.dtype) for module in modules for name, p in module.named_parameters() if name.endswith("A_log")}
        return ", ".join(sorted(found)) or "none"


def load(directory: Path, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False) -> ForeignModel:
    """Load a checkpoint in evaluation mode; local files only.

    ``dtype`` is that of all weights but those that the library keeps in float32. Warns of an A_log that is rounded. Raises
    CheckpointError as ``describe`` does, and where weights are missing, left over, of the wrong shape or quantised; InputError
    for a device that the library's kernels do not run on.
    """
    config = describe(directory, trust_remote_code=trust_remote_code)
    if config.library == FLA:
        _prepare_fla(config, device, dtype)
    stored, auto = config.weights, auto_class(config.config, directory)
    with (
        quiet(),
        refusals(directory, "a checkpoint that transformers can load"),
        enough_memory(f"{directory}: a model of this size"),
    ):
        inner, loading = auto.from_pretrained(
            directory,
            config=config.config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=config.remote,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check(loading, directory)
    _check_values(inner, stored, directory)
    with enough_memory(f"{directory}: a model of this size"):
        model = ForeignModel(inner.to(device), config).eval()
    if model.decay_dtype not in ("none", "float32"):
        found = f"{model.decay_dtype} in the model and {stored.stored('A_log')} on disk"
        warnings.warn(f"{directory}: A_log, which every decay hangs on, is {found}", RoundedDecayWarning, stacklevel=2)
    return model


def _prepare_fla(config: Description, device: torch.device, dtype: torch.dtype) -> None:
    """Choose kernels that run on this device, and compute in this dtype."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            f"{config.directory}: expected a GPU, which the kernels of {FLA} need: --device cuda; found --device cpu"
        )
    if dtype == torch.float32:
        # The chunked kernels round products to TF32, or refuse float32; the token-by-token ones do neither.
        config.config.attn_mode = "fused_recurrent"


def _check(loading: dict[str, Any], directory: Path) -> None:
    """Refuse what transformers would make up or drop."""
    for kind, found in (("missing_keys", "no"), ("unexpected_keys", "besides them"), ("mismatched_keys", "of another shape")):
        names = sorted(name if isinstance(name, str) else name[0] for name in loading[kind])
        if names:
            listed = ", ".join(names[:5]) + (f", +{len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{directory}: expected the weights of the configuration's model, found {found} {listed}")
    if loading["error_msgs"]:
        raise CheckpointError(f"{directory}: expected weights that can be loaded, found {loading['error_msgs'][0]}")


def _check_values(inner: nn.Module, stored: Weights, directory: Path) -> None:
    """Refuse parameters that are not finite, or no floating-point numbers on disk."""
    whole = [
        f"{stored.dtypes[name]} in {name}" for name, _ in inner.named_parameters() if stored.dtypes.get(name, "F32") not in DTYPES
    ]
    bad = [f"NaN or infinity in {name}" for name, x in inner.named_parameters() if not x.isfinite().all()]
    if whole or bad:
        raise CheckpointError(f"{directory}: expected finite floating-point weights, found {(whole + bad)[0]}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
