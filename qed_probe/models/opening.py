"""Open any checkpoint, one of this package or of another library: its ``config.json`` says which."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from qed_probe.errors import InputError
from qed_probe.kernels import Choice
from qed_probe.models import checkpoint as native
from qed_probe.models import lit_gpt
from qed_probe.models.config import ModelConfig
from qed_probe.models.foreign import checkpoint as foreign
from qed_probe.models.foreign import description
from qed_probe.models.foreign.checkpoint import ForeignModel
from qed_probe.models.foreign.description import Description
from qed_probe.models.foreign.families import FLA
from qed_probe.models.foreign.tokenizer import ForeignTokenizer
from qed_probe.models.foreign.tokenizer import find_tokenizer as find_foreign_tokenizer
from qed_probe.models.intervention import UNCHANGED, Intervention, intervene
from qed_probe.models.model import Model
from qed_probe.models.tokenizer import ByteTokenizer


def describe(checkpoint: str | Path | None = None, *, trust_remote_code: bool = False) -> ModelConfig | Description:
    """What a checkpoint, the bundled one if None, holds, without loading its weights; raises CheckpointError."""
    directory = _foreign(checkpoint)
    if directory is None:
        return native.read_config(checkpoint)
    return description.describe(directory, trust_remote_code=trust_remote_code)


def find_tokenizer(
    checkpoint: str | Path | None = None, *, trust_remote_code: bool = False, chat: bool = False
) -> ByteTokenizer | ForeignTokenizer | None:
    """The tokenizer that a checkpoint's texts are read with, None if it has none.

    With ``chat``, a text is a user's message, and becomes a prompt by the tokenizer's own chat template. Raises CheckpointError,
    and InputError if there is no such template.
    """
    directory = _foreign(checkpoint)
    found: ByteTokenizer | ForeignTokenizer | None
    if directory is not None:
        found = find_foreign_tokenizer(directory, trust_remote_code=trust_remote_code, chat=chat)
    else:
        found = ByteTokenizer() if native.read_config(checkpoint).tokenizer == "bytes" else None
    if chat and not isinstance(found, ForeignTokenizer):
        what = "no tokenizer" if found is None else "one of bytes, which has none"
        raise InputError(f"chat: expected a tokenizer with a chat template in {checkpoint or 'the bundled model'}, found {what}")
    return found


def open_model(
    checkpoint: str | Path | None,
    *,
    device: torch.device | None,
    dtype: torch.dtype,
    change: Intervention = UNCHANGED,
    backend: Choice = "auto",
    trust_remote_code: bool = False,
) -> Model:
    """Load a checkpoint as a model that can be traced; without ``device``, another library's is spread over all there are.

    ``change`` is made in a native model and ``backend`` runs its recurrence; InputError says that another library's model has
    neither. Raises CheckpointError.
    """
    directory = _foreign(checkpoint)
    if directory is None:
        if device is None:
            raise InputError("device: expected one device for a model of this package, found 'auto'")
        model = native.load(checkpoint, device=device, dtype=dtype)
        intervene(model, change)
        for mixer in model.mixers.values():
            mixer.backend = backend
        return model
    if change != UNCHANGED:
        found = f"{change.strength:g}, {change.direction!r}, {change.place} and {change.mode!r}"
        expected = "1, direction 'own', at all and mode 'full'"
        raise InputError(f"strength: expected {expected}, as {directory} adds no direction, found {found}")
    if backend != "auto":
        raise InputError(f"backend: expected auto, as {directory} runs its own kernels, found {backend!r}")
    return foreign.load(directory, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def identity(checkpoint: str | Path | None, model: Model) -> dict[str, object]:
    """What a store says of where its model came from."""
    if not isinstance(model, ForeignModel):
        return {"checkpoint_digest": native.digest(checkpoint)}
    config = model.config
    return {
        "checkpoint_digest": native.digest(config.directory, config.weights.files),
        "family": config.family,
        "dtype_stored": config.weights.stored(),
        "A_log_stored": config.weights.stored("A_log"),
        "A_log_dtype": model.decay_dtype,
        "transformers": version("transformers"),
        "flash_linear_attention": version(FLA) if find_spec("fla") else "none",
    }


def _foreign(checkpoint: str | Path | None) -> Path | None:
    """The directory, if it is not one of this package's."""
    directory = native.locate(checkpoint)
    if directory.suffix == lit_gpt.SUFFIX:
        return None
    content = native.read_json(directory)
    return directory if "model_type" in content and "format" not in content else None
