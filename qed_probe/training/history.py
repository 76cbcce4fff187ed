"""What moved while a model was trained, from the log of its run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from qed_probe.errors import InputError
from qed_probe.models.checkpoint import read_config, read_provenance
from qed_probe.training.state import LOG

MEASURED = {
    "loss": ("nat", "loss that was minimised"),
    "lm_loss": ("nat", "mean loss of all tokens"),
    "answer_loss": ("nat", "mean loss of the answer's tokens"),
    "accuracy": ("1", "share of the batch's answers that are right"),
    "rate": ("1", "learning rate"),
}
INITIAL = 1 / (1 + np.exp(2.0))
"""sigmoid θ at the start, where θ = −2 (QED, arXiv 2608.13668, App. A)."""


def read_history(run: str | Path) -> xr.Dataset:
    """The log of a training run: dims ``step``, and for ``lambda`` layer and head.

    Of ``MEASURED`` what the task has, float64; ``lambda`` is there where the mixer adds a direction, with the attributes
    ``lambda_max`` and ``lambda_init`` of the Dataset. Raises CheckpointError for a directory that is no run, and InputError, with
    file and line, for a log that is missing, empty or cut.
    """
    run = Path(run)
    config, seed = read_config(run), read_provenance(run).get("seed", -1)
    lines = _lines(run / LOG)
    steps = {"step": ("step", [line["step"] for line in lines])}
    values = {
        name: ("step", [line[name] for line in lines], {"units": units, "long_name": text})
        for name, (units, text) in MEASURED.items()
        if name in lines[0]
    }
    ds = xr.Dataset(values, steps, {"subject": f"{config.mixer}, seed {seed}"})
    layers = list(lines[0]["lambda"])
    if not layers:
        return ds
    lam = [[line["lambda"][layer] for layer in layers] for line in lines]
    ds["lambda"] = ("step", "layer", "head"), np.array(lam), {"units": "1", "long_name": "strength of the direction"}
    bound = config.lambda_max
    return ds.assign_coords(layer=[int(layer) for layer in layers]).assign_attrs(lambda_max=bound, lambda_init=bound * INITIAL)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path}: expected the log of a training run, found {(error.strerror or str(error)).lower()}") from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: expected a whole line of JSON, found {line[:40]!r}") from error
    if not lines:
        raise InputError(f"{path}: expected the log of a training run, found an empty file")
    return lines
