"""A schema-true trace Dataset of made-up numbers, whose records a test sets by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from qed_probe.store import schema

TEXT = (
    "The grass is green. The sky is blue.\nOne of the special magic numbers for wandering-age is: 8253719.\nHere we go. "
    "There and back again.\nWhat is the special magic number for wandering-age mentioned in the text? It is 8253719"
)


def synthetic_store(
    layers: int = 2,
    heads: int = 3,
    prompts: int = 2,
    text: str = TEXT,
    mixer: str = "qed",
    strength: float = 1.0,
    records: Mapping[str, ArrayLike] | None = None,
    complete: ArrayLike | None = None,
) -> xr.Dataset:
    """Every record of a mixer with an added direction, plausible and random by a fixed seed, or ``records`` where given.

    A given record is broadcast to ``(layer, token, head)``.
    """
    length = len(text)
    T = prompts * length
    shape = (layers, T, heads)
    values = _plausible(np.random.default_rng(0), shape, length, strength)
    values |= {name: np.broadcast_to(np.asarray(x, np.float32), shape).copy() for name, x in (records or {}).items()}
    lam = np.full((layers, heads), 0.25 * strength) * (0.2 + 0.6 * np.arange(1, heads + 1) / heads)
    variables: dict[str, Any] = {name: _described(name, x) for name, x in values.items()}
    variables["lambda"] = _described("lambda", lam.astype(np.float32))
    variables["correct"] = _described("correct", (np.arange(prompts) % 2 == 0).astype(np.float32))
    coords = {
        "layer": np.arange(layers, dtype=np.int32),
        "token_id": np.array([ord(letter) for letter in text] * prompts, dtype=np.int32),
        "token_text": np.array(list(text) * prompts, dtype=object),
        "role": np.array(_roles(text) * prompts, dtype=object),
        "position": np.tile(np.arange(length, dtype=np.int32), prompts),
        "prompt_index": np.repeat(np.arange(prompts, dtype=np.int32), length),
        "cu_seqlens": np.arange(prompts + 1, dtype=np.int64) * length,
    }
    labels: dict[str, Any] = {name: _described(name, x) for name, x in coords.items()}
    if complete is not None:
        labels["complete"] = (("token",), np.broadcast_to(np.asarray(complete, bool), (T,)))
    attrs = {"mixer": mixer, "gate_max": 1.0, "lambda_max": 0.25, "strength": strength, "qed_probe_schema": schema.SCHEMA_VERSION}
    return xr.Dataset(variables, coords=labels, attrs=attrs)


def _described(name: str, x: NDArray[Any]) -> tuple[tuple[str, ...], NDArray[Any], dict[str, str]]:
    row = schema.VARIABLES[name]
    return row.dims, x, {"units": row.units, "long_name": row.long_name, "formula": row.formula}


def _roles(text: str) -> list[str]:
    roles = np.full(len(text), "noise", dtype=object)
    needle, question, answer = text.find("One of"), text.find("What is"), text.rfind("8253719")
    if needle >= 0:
        roles[needle : text.find("\n", needle)] = "needle"
        roles[question:answer] = "question"
        roles[answer:] = "answer"
    return list(roles)


def _plausible(rng: np.random.Generator, shape: tuple[int, int, int], length: int, strength: float) -> dict[str, NDArray[Any]]:
    L, _, H = shape
    depth = np.linspace(0.5, 2.0, L)[:, None, None] * np.linspace(0.7, 1.3, H)
    rho = np.clip(rng.normal(0.1, 0.25, shape) * depth, -0.99, 0.99)
    read = rng.lognormal(-2, 0.8, shape) * depth
    read[:, ::length] = 0
    output = rng.lognormal(0, 0.5, shape)
    correction = 0.1 * strength * np.abs(rho) * read
    decay = -rng.gamma(2, 0.02, shape) * depth**3
    base = rng.beta(5 / depth + np.zeros(shape), 1.5)
    alpha = np.exp(decay)
    found = {
        "rho": rho,
        "eigenvalue": base,
        "eigenvalue_unit": base,
        "read_norm": read,
        "output_norm": output,
        "residual_norm": rng.lognormal(-1, 0.7, shape),
        "correction_norm": correction,
        "correction_cosine": np.clip(rng.normal(-0.3, 0.4, shape), -1, 1),
        "log_decay": decay,
        "log_decay_max": decay * 0.05,
        "retention": alpha,
        "budget_decay": 1 - alpha,
        "budget_delta": alpha * (1 - base),
        "budget_erase": np.zeros(shape),
    }
    return {name: x.astype(np.float32) for name, x in found.items()}
