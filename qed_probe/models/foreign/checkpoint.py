"""Load a checkpoint of another library as a model that can be traced; what does not fit is said in one line."""

import inspect
import os
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qed_probe.errors import CheckpointError, InputError
from qed_probe.models.capture import capture
from qed_probe.models.device import enough_memory
from qed_probe.models.foreign.description import Description, describe
from qed_probe.models.foreign.families import FLA, find_layers
from qed_probe.models.foreign.library import auto_class, quiet, refusals, transformers
from qed_probe.models.foreign.weights import DTYPES, Weights


class RoundedDecayWarning(UserWarning):
    """A model's A_log, whose exponential every log decay is a multiple of, has fewer bits than float32."""


ForeignCache = dict[str, Any]
"""What a model of another library carries from call to call, by the keyword that it takes: its first call makes it."""


class ForeignModel(nn.Module):
    """A language model of another library, as a trace asks for it: sequences as padded rows, logits from hidden states."""

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

    def new_cache(self, batch: int) -> ForeignCache:
        """A cache in which nothing has been seen; it takes any number of sequences."""
        return {}

    def forward(self, tokens: Tensor, *, cache: ForeignCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states ``[B, T, hidden]`` after the final norm, for ``tokens`` ``[B, T]`` int64.

        ``cache`` continues from what it has seen and is updated in place. The sequences of ``cu_seqlens`` become rows, padded on
        the left: not every family keeps packed ones apart.
        """
        if cu_seqlens is not None and len(cu_seqlens) > 2:
            lengths = cu_seqlens.diff()
            # A mask without a pad is dropped by transformers, and what is seen of the rows would not be packed.
            longest = int(lengths.max()) + bool((lengths == lengths[0]).all())
            keep = torch.arange(-longest, 0, device=tokens.device) >= -lengths[:, None].to(tokens.device)
            rows = tokens.new_zeros(keep.shape).masked_scatter(keep, tokens)
            hidden = self._hidden(rows, attention_mask=keep.long())
            return hidden[keep.to(hidden.device)][None]
        return self._hidden(tokens, cache)

    def _hidden(self, tokens: Tensor, cache: ForeignCache | None = None, **how: Tensor) -> Tensor:
        with quiet():
            found = self.inner.base_model(input_ids=tokens, use_cache=cache is not None, return_dict=True, **(cache or {}), **how)
        if cache is not None:
            # The output's name of it and the argument's need not be the same: each library renames in its own time.
            taken = inspect.signature(self.inner.base_model.forward).parameters
            name = "past_key_values" if "past_key_values" in taken else "cache"
            cache[name] = found["cache" if "cache" in found else "past_key_values"]
        hidden: Tensor = found.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores ``[..., vocab]`` of the next token."""
        scores: Tensor = self.inner.get_output_embeddings()(hidden)
        return scores

    @property
    def device(self) -> torch.device:
        """Where tokens are given to it."""
        embedding = self.inner.get_input_embeddings()
        hook = getattr(embedding, "_hf_hook", None)
        return torch.device(embedding.weight.device if hook is None else hook.execution_device)

    @property
    def decay_dtype(self) -> str:
        """The dtype that A_log is computed with, ``none`` where there is none."""
        modules = [layer.module for layer in find_layers(self).values()]
        found = {_name(p.dtype) for module in modules for name, p in module.named_parameters() if name.endswith("A_log")}
        return ", ".join(sorted(found)) or "none"


def load(directory: Path, *, device: torch.device | None, dtype: torch.dtype, trust_remote_code: bool = False) -> ForeignModel:
    """Load a checkpoint in evaluation mode; local files only.

    Without ``device``, its layers are spread over all GPUs and, where these are full, the CPU. ``dtype`` is that of all weights
    but those that the library keeps in float32. Warns of an A_log that is rounded. Raises InputError if accelerate, which spreads
    it, is not there, and for a device that the library's kernels do not run on; CheckpointError as ``describe`` does, and where
    weights are missing, left over, of the wrong shape or quantised.
    """
    if device is None and find_spec("accelerate") is None:
        raise InputError("device: expected the package accelerate for 'auto', found none: pip install 'qed-probe[hf]'")
    config = describe(directory, trust_remote_code=trust_remote_code)
    if config.library == FLA:
        _prepare_fla(config, device, dtype)
    stored, auto = config.weights, auto_class(config.config, directory)
    _check_tying(config, stored)
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
            generation_config=transformers(directory).GenerationConfig(),  # or a file would be read that nothing here needs
            device_map="auto" if device is None else None,
        )
    _check(loading, directory)
    _check_values(inner, stored, directory)
    with enough_memory(f"{directory}: a model of this size"):
        model = ForeignModel(inner if device is None else inner.to(device), config).eval()
    _check_runs(model)
    if model.decay_dtype not in ("none", "float32"):
        found = f"{model.decay_dtype} in the model and {stored.stored('A_log')} on disk"
        warnings.warn(f"{directory}: A_log, which every decay hangs on, is {found}", RoundedDecayWarning, stacklevel=2)
    return model


def _prepare_fla(config: Description, device: torch.device | None, dtype: torch.dtype) -> None:
    """Choose kernels that run on this device, and compute in this dtype."""
    cpu = not torch.cuda.is_available() if device is None else device.type == "cpu"
    if cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(f"{config.directory}: expected a GPU, which the kernels of {FLA} need: --device cuda; found a CPU")
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


def _check_tying(config: Description, stored: Weights) -> None:
    """Refuse an output over the vocabulary that is the embedding by the configuration, and not by the weights."""
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config.config, config.config.get_text_config()))
    head, embedding = (
        next((name for name in stored.dtypes if name.endswith(end)), None)
        for end in ("lm_head.weight", ("embed_tokens.weight", "embeddings.weight"))
    )
    if tied and head and embedding and not torch.equal(stored.tensor(head), stored.tensor(embedding)):
        raise CheckpointError(
            f"{config.directory}: expected {head} to equal {embedding}, as tie_word_embeddings says, found another output"
        )


def _check_values(inner: nn.Module, stored: Weights, directory: Path) -> None:
    """Refuse weights and buffers that are not finite, or no floating-point numbers on disk and some in the model.

    The beginnings of names may differ between the two: a buffer of integers is known by its last part.
    """
    held: dict[str, Tensor] = inner.state_dict()
    integers = {name.rpartition(".")[2] for name, x in held.items() if not x.is_floating_point()} | {"position_ids"}
    ignored = getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()
    whole = [
        f"{dtype} in {name}"
        for name, dtype in stored.dtypes.items()
        if dtype not in DTYPES
        and name.rpartition(".")[2] not in integers
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    bad = [f"NaN or infinity in {name}" for name, x in held.items() if not x.is_meta and not x.isfinite().all()]
    if whole or bad:
        raise CheckpointError(f"{directory}: expected finite floating-point weights, found {(whole + bad)[0]}")


def _check_runs(model: ForeignModel) -> None:
    """Refuse sizes that fit the weights and not each other, and code that fails, before anything hangs on the model."""
    with (
        torch.inference_mode(),
        capture(model, lambda _: None),  # which chooses kernels that run on this device
        refusals(model.config.directory, "a model that runs"),
        enough_memory(f"{model.config.directory}: a model of this size"),
    ):
        model.logits(model(torch.zeros(1, 1, dtype=torch.int64, device=model.device)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
