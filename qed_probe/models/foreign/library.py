"""The one door to other libraries: imported when a checkpoint of theirs is opened, kept quiet, refusals told in one line."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qed_probe.errors import CheckpointError, QedProbeError
from qed_probe.models.foreign.families import FLA

OLDEST = (4, 57)
"""The oldest version whose checkpoints have been verified."""


def transformers(directory: Path) -> Any:  # noqa: ANN401 - the library
    """The library; raises CheckpointError if it is not there, or too old."""
    expected = f"{directory}: expected transformers {OLDEST[0]}.{OLDEST[1]} or later, as this is a checkpoint for it"
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise CheckpointError(f"{expected}, found none ({error}): pip install 'qed-probe[hf]'") from error
    if tuple(int(part) for part in library.__version__.split(".")[:2]) < OLDEST:
        raise CheckpointError(f"{expected}, found {library.__version__}")
    return library


def fla() -> str:
    """Import flash-linear-attention, which adds its models to those of transformers; its version, or why there is none."""
    try:
        with quiet():
            return str(import_module("fla").__version__)
    except ImportError as error:
        return f"(none: {error}): pip install 'qed-probe[fla]'"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's progress bars and remarks off the terminal; what matters of them is an error of ours."""
    log = import_module("transformers.utils.logging")
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


@contextmanager
def refusals(directory: Path, expected: str) -> Iterator[None]:
    """Turn what the library raises at a checkpoint that it cannot use, which may be any exception, into a CheckpointError."""
    try:
        yield
    except QedProbeError:
        raise
    except Exception as error:  # tokenizers raise no other, and what a model's builder raises is listed nowhere
        raise CheckpointError(f"{directory}: expected {expected}, found {type(error).__name__}: {_short(str(error))}") from error


def read_config(directory: Path, model_type: str, *, code: bool, trust_remote_code: bool) -> Any:  # noqa: ANN401 - of the library
    """The configuration as the library reads it; the checkpoint's own code is run only where no library knows the model type.

    ``code`` says whether the checkpoint brings code. Raises CheckpointError.
    """
    library = transformers(directory)
    types = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    # Once it is imported, transformers knows the model types of flash-linear-attention too.
    other = "" if model_type in types else fla()
    known = model_type in types
    if not known and not (code and trust_remote_code):
        found = f"{model_type!r}, which transformers {library.__version__} does not know, nor {FLA} {other}"
        found += "; it comes with code of its own, which --trust-remote-code runs" if code else ""
        raise CheckpointError(f"{directory}: expected a model type of transformers or {FLA}, found {found}")
    with quiet(), refusals(directory, "a configuration that transformers can read"):
        return library.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=not known)


def refuse_elsewhere(content: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError where a checkpoint's code lies in another repository, which would have to be fetched."""
    code = content.get("auto_map") or {}
    if not isinstance(code, dict):
        raise CheckpointError(f"{directory}: expected an object under 'auto_map', found {type(code).__name__}")
    elsewhere = [
        name
        for entry in code.values()
        for name in (entry if isinstance(entry, list) else [entry])
        if isinstance(name, str) and "--" in name
    ]
    if elsewhere:
        raise CheckpointError(f"{directory}: expected code in the directory, found that of another repository, {elsewhere[0]}")


def auto_class(config: Any, directory: Path) -> Any:  # noqa: ANN401 - both of the library
    """What builds and loads a language model of this configuration: of text if there is one, else of text and pictures."""
    library, auto = transformers(directory), import_module("transformers.models.auto.modeling_auto")
    if type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return library.AutoModelForCausalLM
    if type(config) in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return library.AutoModelForImageTextToText
    raise CheckpointError(f"{directory}: expected a language model with an output over its vocabulary, found {config.model_type}")


def skeleton(config: Any, directory: Path, *, trust_remote_code: bool) -> nn.Module:  # noqa: ANN401 - of the library
    """The model without its weights, which takes no memory; raises CheckpointError."""
    auto = auto_class(config, directory)
    with torch.device("meta"), quiet(), refusals(directory, "a configuration that a model can be built from"):
        model: nn.Module = auto.from_config(config, trust_remote_code=trust_remote_code)
    return model


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:300]}…"
