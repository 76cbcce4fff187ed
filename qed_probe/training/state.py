"""A run in progress, and the files that hold it: every one is replaced whole, so that a kill leaves the last save."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.models import checkpoint
from qed_probe.models.language import LanguageModel
from qed_probe.training.pull import Pull
from qed_probe.training.recipes import Recipe

LOG = "log.jsonl"
PART = ".part"
"""The end of the name of a file that is not whole yet."""
Line = dict[str, Any]
"""One line of log.jsonl."""


@dataclass
class Run:
    """What is fixed in a run (recipe, seed, token file, where and in which dtype it is kept) and what changes with every step."""

    recipe: Recipe
    seed: int
    ids: NDArray[np.integer] | None
    output: Path
    dtype: torch.dtype | None
    model: LanguageModel
    optimizer: torch.optim.AdamW
    pull: Pull
    done: int = 0
    lines: list[Line] = field(default_factory=list)


def save(run: Run, **found: float) -> None:
    """Write training.pt, then the checkpoint, whose provenance takes ``found``."""
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "done": run.done, "lines": run.lines}
    _replace(run.output / "training.pt", lambda path: torch.save(state | {"identity": _identity(run)}, path))
    provenance = {"recipe": asdict(run.recipe), "seed": run.seed, "steps": run.done, **found}
    checkpoint.save(run.model, run.output, provenance, dtype=run.dtype)


def restore(run: Run) -> None:
    """Continue from the last save; raises InputError if there is none, or if it is of another run, naming what differs."""
    path = run.output / "training.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"expected a run to resume in {run.output}, found no training.pt") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"expected a run to resume in {run.output}, found a training.pt that cannot be read") from error
    there, here = _flat(state["identity"]), _flat(_identity(run))
    differing = [
        f"{name} was {there.get(name)}, is {here.get(name)}" for name in there | here if there.get(name) != here.get(name)
    ]
    if differing:
        raise InputError(f"expected the run that is in {run.output}, found another: {'; '.join(differing)}")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.done, run.lines = state["done"], state["lines"]


def open_log(run: Run) -> None:
    """Write the log without the steps that a killed run did after its last save: they will be done again."""
    text = "".join(json.dumps(line) + "\n" for line in run.lines)
    _replace(run.output / LOG, lambda path: path.write_text(text, encoding="utf-8"))


def log(run: Run, line: Line) -> None:
    """Add a line to the log."""
    run.lines.append(line)
    with (run.output / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _identity(run: Run) -> dict[str, Any]:
    """What two runs must share for the one to continue the other."""
    tokens = "none"
    if run.ids is not None:
        digest = hashlib.sha256(run.ids[:65536].astype(np.int64).tobytes()).hexdigest()[:16]
        tokens = f"{len(run.ids)} ids, the first of sha256 {digest}"
    return {"config": run.model.config.to_dict(), "recipe": asdict(run.recipe), "seed": run.seed, "tokens": tokens}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:  # torch has only RuntimeError for a disk that is full
        raise InputError(f"{path}: writing failed: {error}; what was saved before is as it was") from error
    finally:
        with suppress(OSError):
            part.unlink()
