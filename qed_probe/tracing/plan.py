"""What a trace will do, settled before anything is written: the model, the store's layout, and which prompts go together."""

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from qed_probe.errors import CheckpointError, InputError
from qed_probe.kernels import MIXERS, Choice, edits
from qed_probe.models import opening
from qed_probe.models.capture import Captured, capture
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import find_device, find_dtype
from qed_probe.models.foreign.tokenizer import ForeignTokenizer
from qed_probe.models.intervention import Intervention
from qed_probe.models.model import Model
from qed_probe.models.tokenizer import ByteTokenizer
from qed_probe.store import schema
from qed_probe.store.layout import Layout
from qed_probe.tasks.prompts import Prompt
from qed_probe.tasks.survey import Survey, survey, unchanged
from qed_probe.tracing.inputs import inputs

PACK, PACK_ON_GPU = 8192, 32768
"""Tokens of a forward pass, each prompt rounded up to whole chunks: whole prompts, or one that is longer.

With fewer than it is given, a GPU waits for its programs to be launched.
"""
VECTORS = ("none", "float16", "float32")


class Settings(TypedDict, total=False):
    """What ``trace`` and ``estimate`` can be told, by keyword.

    ``layers`` are the model's own indices, all if None; ``device`` and ``dtype`` ("float32", "bfloat16") are what the model runs
    on and in, "auto" being all GPUs and the CPU together, for other libraries' models; ``vectors`` is the dtype that the read
    S̄ᵀd is kept in ("float16", "float32") or "none"; ``save_inputs`` keeps what recomputes every record offline; ``state_at``
    are positions in each prompt whose state is kept; ``strength``, ``direction``, ``at`` and ``mode`` are those of an
    ``Intervention``, of which another direction holds for all heads, as a trace replays whole layers, and the mode is in what
    flows on and not in the output that is recorded, which is the memory's; ``backend`` ("auto", "triton", "torch",
    "reference") runs the recurrence; ``generate`` is the number of tokens that the model goes on with after each prompt, the
    likeliest each time, and that are traced as well; ``batch`` is the number of prompts in a pass of a model that takes them in
    rows of one length, the shorter ones padded; ``trust_remote_code`` lets a checkpoint run code that it brings along; ``seed``
    draws the heads and the layer of the self-check; ``command`` is kept in the store.
    """

    layers: Sequence[int] | None
    device: str
    dtype: str
    vectors: str
    save_inputs: bool
    state_at: Sequence[int]
    strength: float
    direction: str
    at: Sequence[tuple[int, int]]
    mode: str
    backend: Choice
    generate: int
    batch: int
    trust_remote_code: bool
    seed: int
    command: str


@dataclass(frozen=True)
class Plan:
    """A model that is ready, the layout of its store, and the prompts, which are made again each time they are asked for."""

    model: Model
    tokenizer: ByteTokenizer | ForeignTokenizer | None
    layout: Layout
    prompts: Sequence[Prompt]
    batch: int
    seed: int

    @property
    def packs(self) -> Iterator[slice]:
        """The prompts of one forward each."""
        count, tokens = len(self.layout.lengths), _pack(self.model, self.layout.generated)
        if tokens:
            return packs(self.layout.lengths, tokens)
        return (slice(start, min(start + self.batch, count)) for start in range(0, count, self.batch))


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
    direction: str = "own",
    at: Sequence[tuple[int, int]] = (),
    mode: str = "full",
    backend: Choice = "auto",
    generate: int = 0,
    batch: int = 1,
    trust_remote_code: bool = False,
    seed: int = 0,
    command: str = "",
) -> Plan:
    """Load the model, validate everything, and lay out the store; the keywords are ``Settings``.

    Raises InputError for what cannot be run, and CheckpointError.
    """
    change = Intervention(strength, direction, tuple(at), mode=mode)
    kind = find_dtype(dtype)
    _check_settings(vectors, change, generate, seed)
    place = None if device == "auto" else find_device(device)
    known = survey(prompts, opening.describe(checkpoint, trust_remote_code=trust_remote_code).vocab_size)
    prompts, lengths = unchanged(prompts, known.fingerprints), known.lengths + generate
    tokenizer = _tokenizer(checkpoint, trust_remote_code)
    model = opening.open_model(
        checkpoint,
        device=place,
        dtype=kind,
        change=change,
        backend=backend,
        trust_remote_code=trust_remote_code,
    )
    chosen = _layers(model, layers)
    _check_batch(model, batch, generate)
    _check_fit(model, lengths, generate, batch)
    layout = _layout(
        model,
        chosen,
        prompts,
        known,
        lengths,
        generate,
        vectors=vectors,
        save_inputs=save_inputs,
        state_at=state_at,
        texts=tokenizer is not None,
        attrs=_identity(model, checkpoint, dtype, generate) | _changed(change) | {"batch": batch},
        provenance={"checkpoint": "bundled qed-tiny" if checkpoint is None else str(checkpoint), "command": command},
    )
    return Plan(model, tokenizer, layout, prompts, batch, seed)


def _tokenizer(checkpoint: str | Path | None, trust_remote_code: bool) -> ByteTokenizer | ForeignTokenizer | None:
    """What names the tokens in the store; without one that can be used they have numbers alone."""
    try:
        return opening.find_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    except CheckpointError:
        return None


def _changed(change: Intervention) -> dict[str, object]:
    """What the store says of it: the strength, and where it is not as usual, the rest."""
    unusual = {"direction": change.direction, "at": change.place, "mode": change.mode}
    usual = {"direction": "own", "at": "all", "mode": "full"}
    return {"strength": float(change.strength)} | {name: x for name, x in unusual.items() if x != usual[name]}


def _check_settings(vectors: str, change: Intervention, generate: int, seed: int) -> None:
    if vectors not in VECTORS:
        raise InputError(f"vectors: expected one of {', '.join(VECTORS)}, found {vectors!r}")
    if change.direction != "own" and change.at:
        raise InputError(f"at: expected all heads for another direction in a trace, found {change.place}; evaluate takes some")
    if not isinstance(generate, int) or not 0 <= generate < 1 << 31:
        raise InputError(f"generate: expected a whole number of tokens, from 0 to {(1 << 31) - 1:,}, found {generate}")
    if seed < 0:
        raise InputError(f"seed: expected at least 0, found {seed}")


def _layout(
    model: Model,
    chosen: tuple[int, ...],
    prompts: Sequence[Prompt],
    known: Survey,
    lengths: NDArray[np.int64],
    generate: int,
    *,
    vectors: str,
    save_inputs: bool,
    state_at: Sequence[int],
    texts: bool,
    attrs: dict[str, object],
    provenance: dict[str, object],
) -> Layout:
    """What a trace of this model writes, and in which shapes."""
    first, config, strengths = _look(model, chosen[0]), model.config, model.strengths()
    names = [name for name in first.observation.records if name != "read" or vectors != "none"]
    names += list(inputs(first)) if save_inputs else []
    names += ["nll"] + ["token_text"] * texts + ["states/state"] * (len(state_at) > 0)
    names += ["correct"] * known.answers
    return Layout(
        names=tuple(names),
        layers=chosen,
        heads=config.heads,
        key=config.key_dim,
        value=config.value_dim,
        prompts=prompts,
        fingerprints=known.fingerprints,
        lengths=lengths,
        edits=edits(first.mixer, first.observation.tokens).k.shape[-2],
        roles=known.roles,
        generated=generate,
        details=known.details,
        lam=np.stack([strengths[layer].detach().cpu().numpy() for layer in chosen]),
        snapshots=_snapshots(lengths, state_at),
        vectors=vectors,
        edit_inputs=first.observation.tokens.v.ndim == 5,
        attrs={**attrs, "mixer": first.mixer.name, "scale": first.scale, "backend": first.observation.backend},
        provenance=provenance,
    )


def _identity(model: Model, checkpoint: str | Path | None, dtype: str, generate: int) -> dict[str, object]:
    """All that determines the numbers beside the prompts: a run resumes only a store that has the same."""
    config = model.config
    safe = isinstance(config, ModelConfig) and MIXERS[config.mixer].decay == "safe"
    floor: dict[str, object] = {"lower_bound": config.lower_bound} if isinstance(config, ModelConfig) and safe else {}
    return (
        opening.identity(checkpoint, model)
        | floor
        | {
            "dtype": dtype,
            "gate_max": config.gate_max,
            "lambda_max": config.lambda_max,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type,
            "threads": torch.get_num_threads(),
            "pack_tokens": _pack(model, generate),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "triton", "numpy", "xarray", "zarr") if find_spec(name)},
        }
    )


def _look(model: Model, layer: int) -> Captured:
    """One layer's pass over a single token: which records, inputs and sizes a trace of this model has."""
    seen: list[Captured] = []
    with torch.inference_mode(), capture(model, seen.append, [layer]):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    return seen[0]


def _pack(model: Model, generate: int) -> int:
    """Tokens of a packed forward pass, 0 where prompts are not packed."""
    if generate or not model.packs:
        return 0
    return PACK if model.device.type == "cpu" else PACK_ON_GPU


def packs(lengths: Iterable[int], tokens: int) -> Iterator[slice]:
    """Prompts of one packed forward each: several if they fit in ``tokens``.

    They depend on the prompts alone, so that a resumed run repeats the same arithmetic.
    """
    start, filled, index = 0, 0, -1
    for index, length in enumerate(lengths):
        size = -(-length // schema.MARK) * schema.MARK
        if filled and filled + size > tokens:
            yield slice(start, index)
            start, filled = index, 0
        filled += size
    yield slice(start, index + 1)


def _layers(model: Model, asked: Sequence[int] | None) -> tuple[int, ...]:
    there = tuple(model.strengths())
    unknown = [layer for layer in asked or () if layer not in there]
    if unknown or (asked is not None and not asked):
        raise InputError(f"layers: expected some of {[*there]}, found {unknown or 'none'}")
    return there if asked is None else tuple(sorted(set(asked)))


def _check_batch(model: Model, batch: int, generate: int) -> None:
    if not isinstance(batch, int) or batch < 1:
        raise InputError(f"batch: expected a whole number of prompts, at least 1, found {batch}")
    if batch > 1 and model.packs:
        raise InputError(f"batch: expected 1, as this model takes prompts packed in a row, without pads, found {batch}")
    if batch > 1 and generate:
        raise InputError(f"batch: expected 1, as tokens are generated for one prompt at a time, found {batch}")


def _check_fit(model: Model, lengths: NDArray[np.int64], generate: int, batch: int) -> None:
    """Refuse a prompt that, with what follows it, is too long for the model or whose pass would not fit in memory.

    The factors are measured; a CPU works segment by segment.
    """
    config, device, longest = model.config, model.device, int(lengths.argmax())
    found = f"found {lengths[longest]:,}" + (f", {generate:,} of them to generate" if generate else "")
    if model.longest is not None and lengths[longest] > model.longest:
        raise InputError(f"prompt {longest + 1}: expected at most {model.longest:,} tokens, what the model is made for, {found}")
    held = 12 if device.type == "cpu" else 40
    waiting = 26 * config.heads * len(model.strengths())  # the writer's: a chunk of a scalar record spans the layers
    per_head = held * (config.key_dim + config.value_dim) + model.scratch
    rows = min(batch, len(lengths))
    per_token = 4 * rows * (config.heads * per_head + 8 * config.hidden + waiting)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_memory()
    if free is not None and lengths[longest] * per_token > free:
        raise InputError(
            f"prompt {longest + 1}: expected at most about {free // per_token:,} tokens, what {free / 1e9:.1f} GB holds"
            f"{f' of {rows} prompts at once' if rows > 1 else ''}, {found}"
        )


def _free_memory() -> int | None:
    """Bytes that Linux would give to a new program; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _snapshots(lengths: NDArray[np.int64], positions: Sequence[int]) -> NDArray[np.int64]:
    """Packed tokens of these positions, in every prompt that reaches them."""
    for position in positions:
        if not 0 <= position < lengths.max():
            raise InputError(f"state-at: expected positions from 0 to {lengths.max() - 1}, found {position}")
    starts, wanted = np.cumsum(lengths) - lengths, np.unique(np.array(positions, np.int64))
    return (starts[:, None] + wanted)[wanted < lengths[:, None]]
