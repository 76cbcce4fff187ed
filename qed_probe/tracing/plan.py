"""What a trace will do, settled before anything is written: the model, the store's layout, and which prompts go together."""

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from qed_probe.errors import InputError
from qed_probe.kernels import edits
from qed_probe.models import checkpoint as checkpoints
from qed_probe.models.capture import Captured, capture
from qed_probe.models.device import find_device
from qed_probe.models.language import LanguageModel
from qed_probe.store import schema
from qed_probe.store.layout import Layout
from qed_probe.tasks.prompts import Prompt, check_prompts
from qed_probe.tracing.inputs import inputs

PACK = 8192
"""Tokens of a forward pass, each prompt rounded up to whole chunks: whole prompts, or one that is longer."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VECTORS = ("none", "float16", "float32")


class Settings(TypedDict, total=False):
    """What ``trace`` and ``estimate`` can be told, by keyword.

    ``layers`` are the model's own indices, all if None; ``device`` and ``dtype`` ("float32", "bfloat16") are what the model
    runs on and in; ``vectors`` is the dtype that the read S̄ᵀd is kept in ("float16", "float32") or "none"; ``save_inputs`` keeps
    what recomputes every record offline; ``state_at`` are positions in each prompt whose state is kept; ``strength`` scales every
    λ; ``seed`` draws the heads and the layer of the self-check; ``command`` is kept in the store.
    """

    layers: Sequence[int] | None
    device: str
    dtype: str
    vectors: str
    save_inputs: bool
    state_at: Sequence[int]
    strength: float
    seed: int
    command: str


@dataclass(frozen=True)
class Plan:
    """A model that is ready, the layout of its store, and the prompts of each forward pass."""

    model: LanguageModel
    device: torch.device
    layout: Layout
    prompts: Sequence[Prompt]
    packs: list[slice]
    seed: int


def make_plan(
    checkpoint: str | Path | None,
    prompts: Sequence[Prompt],
    *,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    vectors: str = "float16",
    save_inputs: bool = False,
    state_at: Sequence[int] = (),
    strength: float = 1.0,
    seed: int = 0,
    command: str = "",
) -> Plan:
    """Load the model, validate everything, and lay out the store; the keywords are ``Settings``.

    Raises InputError for what cannot be run, and CheckpointError.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if vectors not in VECTORS:
        raise InputError(f"vectors: expected one of {', '.join(VECTORS)}, found {vectors!r}")
    if not math.isfinite(strength):
        raise InputError(f"strength: expected a finite number, found {strength}")
    if seed < 0:
        raise InputError(f"seed: expected at least 0, found {seed}")
    place = find_device(device)
    check_prompts(prompts, checkpoints.read_config(checkpoint).vocab_size)
    model = checkpoints.load(checkpoint, device=place, dtype=DTYPES[dtype])
    chosen = _layers(model, layers)
    for mixer in model.mixers.values():
        mixer.strength = strength
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    _check_fit(model, lengths, place)
    first, config = _look(model, chosen[0]), model.config
    names = [name for name in first.observation.records if name != "read" or vectors != "none"]
    names += list(inputs(first)) if save_inputs else []
    names += ["nll"] + ["token_text"] * (config.tokenizer == "bytes") + ["states/state"] * (len(state_at) > 0)
    names += ["correct"] * any(prompt.answer is not None for prompt in prompts)
    layout = Layout(
        names=tuple(names),
        layers=chosen,
        heads=config.heads,
        key=config.key_dim,
        value=config.value_dim,
        tokens=np.concatenate([prompt.tokens for prompt in prompts]),
        lengths=lengths,
        edits=edits(first.mixer, first.observation.tokens).k.shape[-2],
        roles=_roles(prompts),
        details=_details(prompts),
        lam=np.stack([model.mixers[layer].lam().detach().cpu().numpy() for layer in chosen]),
        snapshots=_snapshots(lengths, state_at),
        vectors=vectors,
        edit_inputs=first.observation.tokens.v.ndim == 5,
        attrs=_identity(model, checkpoint, dtype, place) | {"strength": float(strength), "scale": first.scale},
        provenance={"checkpoint": "bundled qed-tiny" if checkpoint is None else str(checkpoint), "command": command},
    )
    return Plan(model, place, layout, prompts, _packs(lengths), seed)


def _identity(model: LanguageModel, checkpoint: str | Path | None, dtype: str, device: torch.device) -> dict[str, object]:
    """All that determines the numbers beside the prompts: a run resumes only a store that has the same."""
    return {
        "mixer": model.config.mixer,
        "checkpoint_digest": checkpoints.digest(checkpoint),
        "dtype": dtype,
        "gate_max": model.config.gate_max,
        "lambda_max": model.config.lambda_max,
        "backend": "torch",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "pack_tokens": PACK,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "numpy", "xarray", "zarr")},
    }


def _look(model: LanguageModel, layer: int) -> Captured:
    """One layer's pass over a single token: which records, inputs and sizes a trace of this model has."""
    seen: list[Captured] = []
    with torch.inference_mode(), capture(model, seen.append, [layer]):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.embed.weight.device))
    return seen[0]


def _packs(lengths: Iterable[int]) -> list[slice]:
    """Prompts of one forward each; they depend on the prompts alone, so that a resumed run repeats the same arithmetic."""
    packs, start, filled = [], 0, 0
    lengths = list(lengths)
    for index, length in enumerate(lengths):
        size = -(-length // schema.MARK) * schema.MARK
        if filled and filled + size > PACK:
            packs.append(slice(start, index))
            start, filled = index, 0
        filled += size
    return [*packs, slice(start, len(lengths))]


def _layers(model: LanguageModel, asked: Sequence[int] | None) -> tuple[int, ...]:
    there = tuple(model.mixers)
    unknown = [layer for layer in asked or () if layer not in there]
    if unknown or (asked is not None and not asked):
        raise InputError(f"layers: expected some of {[*there]}, found {unknown or 'none'}")
    return there if asked is None else tuple(sorted(set(asked)))


def _check_fit(model: LanguageModel, lengths: NDArray[np.int64], device: torch.device) -> None:
    """Refuse a prompt whose pass would not fit in memory; the factor is measured on the chunked form with records."""
    config = model.config
    per_token = 4 * (40 * config.heads * (config.key_dim + config.value_dim) + 8 * config.hidden)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    longest = int(lengths.argmax())
    if free is not None and lengths[longest] * per_token > free:
        raise InputError(
            f"prompt {longest}: expected at most about {free // per_token:,} tokens, what {free / 1e9:.1f} GB holds, "
            f"found {lengths[longest]:,}"
        )


def _free_memory() -> int | None:
    """Bytes that Linux would give to a new program; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _roles(prompts: Sequence[Prompt]) -> NDArray[np.str_] | None:
    if all(prompt.roles is None for prompt in prompts):
        return None
    return np.concatenate([np.full(len(p.tokens), "") if p.roles is None else p.roles for p in prompts])


def _details(prompts: Sequence[Prompt]) -> dict[str, NDArray[np.float64]]:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.details)
    return {name: np.array([prompt.details.get(name, np.nan) for prompt in prompts]) for name in names}


def _snapshots(lengths: NDArray[np.int64], positions: Sequence[int]) -> NDArray[np.int64]:
    """Packed tokens of these positions, in every prompt that reaches them."""
    for position in positions:
        if not 0 <= position < max(lengths):
            raise InputError(f"state-at: expected positions from 0 to {max(lengths) - 1}, found {position}")
    starts = np.cumsum(lengths) - lengths
    return np.array([s + p for s, n in zip(starts, lengths, strict=True) for p in sorted(set(positions)) if p < n], np.int64)
