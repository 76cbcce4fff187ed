"""A checkpoint is a directory with ``config.json`` and ``model.safetensors``; what is wrong with one is said in one line.

A file of GDN-2's own training code is read as well, as ``lit_gpt`` says.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qed_probe.errors import CheckpointError, InputError
from qed_probe.models import lit_gpt
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import enough_memory
from qed_probe.models.language import LanguageModel

FORMAT, FORMAT_VERSION = "qed_probe", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
BUNDLED = ("qed-tiny", "eda-tiny")
"""Checkpoints that come with the package."""


def save(
    model: LanguageModel, directory: str | Path, provenance: dict[str, object] | None = None, *, dtype: torch.dtype | None = None
) -> None:
    """Write a checkpoint, each of its two files whole or not at all.

    ``dtype`` is that of the weights on disk, the model's own if None; θ, A_log, dt_bias and the random vectors stay float32.
    ``provenance`` is kept in ``config.json`` and must be fit for JSON. Raises CheckpointError if the disk does not allow it.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT, "format_version": FORMAT_VERSION, "model": model.config.to_dict(), "provenance": provenance or {},
    }  # fmt: skip
    wanted = _without_storage(model.config).to(dtype or model.embed.weight.dtype).state_dict()
    state = {name: x.detach().to("cpu", wanted[name].dtype).contiguous() for name, x in model.state_dict().items()}
    fresh = {name: directory / f".{name}.new" for name in (WEIGHTS, CONFIG)}
    try:
        save_file(state, fresh[WEIGHTS], metadata={"format": "pt"})
        fresh[CONFIG].write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copymode(fresh[CONFIG], fresh[WEIGHTS])  # safetensors makes files that nobody else may read
        for name, path in fresh.items():
            os.replace(path, directory / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: writing failed: {error}; what was there is as it was") from error
    finally:
        for path in fresh.values():
            path.unlink(missing_ok=True)


def load(
    directory: str | Path | None = None, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """Read a checkpoint, the bundled one if ``directory`` is None, as a model in evaluation mode.

    θ, A_log, dt_bias and the random vectors are float32 whatever ``dtype``. Raises CheckpointError that names what is wrong.
    """
    directory = locate(directory)
    config = read_config(directory)
    path, found = _read_weights(directory)
    with enough_memory(f"{directory}: a model of this size"):
        model = _without_storage(config)
    wanted = model.to(dtype).state_dict()
    _check(found, wanted, path)
    model.load_state_dict({name: x.to(device, wanted[name].dtype) for name, x in found.items()}, assign=True)
    return model.eval()


def _read_weights(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file of the weights, and what is in it."""
    path = find_weights(directory)
    if path.suffix == lit_gpt.SUFFIX:
        return path, lit_gpt.read_weights(path)
    try:
        return path, load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: expected a whole safetensors file, found one that cannot be read ({error})") from error


def find_weights(directory: str | Path | None = None) -> Path:
    """The file of the weights, unread; raises CheckpointError if there is none."""
    directory = locate(directory)
    if directory.suffix == lit_gpt.SUFFIX:
        return directory
    if not (directory / WEIGHTS).is_file():
        raise CheckpointError(f"{directory}: expected {CONFIG} and {WEIGHTS}, found no {WEIGHTS}")
    return directory / WEIGHTS


def read_config(directory: str | Path | None = None) -> ModelConfig:
    """The model's configuration, without its weights; raises CheckpointError."""
    if locate(directory).suffix == lit_gpt.SUFFIX:
        return lit_gpt.read_config(locate(directory))
    path = locate(directory) / CONFIG
    try:
        return ModelConfig.from_dict(_section(path, "model"))
    except InputError as error:
        raise CheckpointError(f"{path}: {error}") from error


def read_provenance(directory: str | Path | None = None) -> dict[str, Any]:
    """What ``save`` was told of how the model was made; raises CheckpointError."""
    if locate(directory).suffix == lit_gpt.SUFFIX:
        return {}
    return _section(locate(directory) / CONFIG, "provenance")


def digest(directory: str | Path | None = None, weights: Sequence[str] = (WEIGHTS,)) -> str:
    """What identifies a checkpoint: the hexadecimal SHA-256 of ``config.json`` followed by the files of its weights."""
    directory = locate(directory)
    total = hashlib.sha256()
    for name in ("",) if directory.suffix == lit_gpt.SUFFIX else (CONFIG, *weights):
        try:
            with (directory / name).open("rb") as file:
                while block := file.read(1 << 20):
                    total.update(block)
        except OSError as error:
            raise CheckpointError(
                f"{directory}: expected {CONFIG} and {' and '.join(weights)}, found no readable {name}"
            ) from error
    return total.hexdigest()


def locate(checkpoint: str | Path | None) -> Path:
    """Where a checkpoint is: a path as it is, the first bundled one if None, or one by its name where no such path exists."""
    if checkpoint is not None and (str(checkpoint) not in BUNDLED or Path(checkpoint).exists()):
        return Path(checkpoint)
    return Path(str(files("qed_probe.data")), BUNDLED[0] if checkpoint is None else str(checkpoint))


def read_json(directory: Path) -> dict[str, Any]:
    """``config.json``, of whatever format; raises CheckpointError if there is no such file or it holds no object."""
    path = directory / CONFIG
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing; nothing is downloaded"
        raise CheckpointError(f"{directory}: expected a directory with {CONFIG} and {WEIGHTS}, found {found}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{directory}: expected {CONFIG} and {WEIGHTS}, found no readable {CONFIG}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, found something else ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _section(path: Path, name: str) -> dict[str, Any]:
    """One object of ``config.json``, once the file is known to be of this format."""
    content = read_json(path.parent)
    kind, version = content.get("format"), content.get("format_version")
    if (kind, version) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path}: expected format {FORMAT} version {FORMAT_VERSION}, found {kind} version {version}")
    section = content.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: expected an object under '{name}', found {type(section).__name__}")
    return section


class _NoRandomStart(TorchFunctionMode):
    """Leaves weights that are about to be replaced as they are allocated."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _without_storage(config: ModelConfig) -> LanguageModel:
    # Made on the CPU, where memory that is never touched costs nothing: on the meta device torch imports its compiler first.
    with _NoRandomStart(), torch.random.fork_rng(devices=[]):
        return LanguageModel(config).to("meta")


def _check(found: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    missing = [name for name in wanted if name not in found]
    if missing:
        raise CheckpointError(f"{path}: expected {len(wanted)} tensors, missing {_list(missing)}")
    extra = [name for name in found if name not in wanted]
    if extra:
        raise CheckpointError(f"{path}: expected {len(wanted)} tensors, found besides them {_list(extra)}")
    for name, x in found.items():
        if x.shape != wanted[name].shape:
            raise CheckpointError(f"{path}: {name}: expected shape {list(wanted[name].shape)}, found {list(x.shape)}")
        if not x.is_floating_point():
            raise CheckpointError(f"{path}: {name}: expected a floating-point dtype, found {x.dtype}")
    bad = [name for name, x in found.items() if not x.to(wanted[name].dtype).isfinite().all()]
    if bad:
        raise CheckpointError(f"{path}: expected finite weights, found NaN or infinity in {_list(bad)}")


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f", +{len(names) - 5} more" if len(names) > 5 else "")
