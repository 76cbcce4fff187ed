"""Patching: one head's d, ε, γ or S of one run put into another that has read another needle, and what the answer is then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.evaluation.answers import log_probability
from qed_probe.evaluation.evaluate import TOGETHER, TOGETHER_ELSEWHERE
from qed_probe.kernels import MIXERS, Mixer
from qed_probe.models.checkpoint import load
from qed_probe.models.config import ModelConfig
from qed_probe.models.device import enough_memory, find_device, find_dtype
from qed_probe.models.language import Cache, LanguageModel
from qed_probe.models.opening import describe, identity
from qed_probe.models.patching import check_exchange, exchange_states, exchangeable, exchanging
from qed_probe.store.patching import make_patches
from qed_probe.tasks.pairs import Pair, needle_pairs

WAYS = ("denoising", "noising")
"""The clean run's part in the corrupted run, and the corrupted run's in the clean one."""
Array = NDArray[np.floating]
Progress = Callable[[int, int], None]
"""Called with the pairs that were patched, each time that one was, and how often that will be."""


@dataclass(frozen=True)
class Batch:
    """P pairs side by side: ``prompts`` ``[2P, T]`` without answers, the clean ones first; both ``answers`` ``[2P, n]`` of each.

    Up to token ``value`` both runs of each are the same; the question that ends the prompts begins at token ``question``.
    """

    prompts: Tensor
    answers: tuple[Tensor, Tensor]
    value: int
    question: int


@dataclass(frozen=True)
class Scores:
    """What all pairs come to: columns of ``store.patching.VARIABLES``, of an eigenvalue its range with own and patched d."""

    clean: Array
    corrupted: Array
    patched: Array
    eigenvalue_min: Array
    eigenvalue_max: Array


def patch(
    checkpoint: str | Path | None = None,
    *,
    what: Sequence[str] | None = None,
    task: str = "niah",
    length: int = 512,
    samples: int = 32,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> xr.Dataset:
    """Exchange one head's part of two runs that differ in the needle's value, head by head and both ways, and ask for the answer.

    ``what``, all that the mixer has if None, is "direction" (d), "address" (ε) and "gamma" (γ), token by token over the prompt,
    and "state" (S), once, right before the question that ends it. A run's score is ln p(clean answer) − ln p(corrupted answer),
    nats, of whole answers that it is made to read, unpatched. Gives, by ``store.patching.VARIABLES``, every pair's score
    unpatched and patched ``[what, way, layer, head, pair]``, and with d the range of e = 1 − aᵀk with the own and the other run's
    d. PyTorch runs the recurrence. Raises InputError for what the mixer has not, or cannot be exchanged, a model of another
    library or not over bytes, fewer than two pairs and what ``needle_pairs`` refuses, and CheckpointError.
    """
    place, kind, config = find_device(device), find_dtype(dtype), _config(checkpoint)
    parts = _parts(MIXERS[config.mixer], what)
    if samples < 2:
        raise InputError(f"samples: expected two pairs or more, found {samples}")
    pairs = list(needle_pairs(task, length, samples, seed))
    model = load(checkpoint, device=place, dtype=kind)
    for mixing in model.mixers.values():
        mixing.backend = "torch"  # as patched passes are
    found = _scores(model, pairs, parts, progress)
    columns: dict[str, object] = {name: getattr(found, name) for name in ("clean", "corrupted", "patched")}
    columns["depth"] = [pair.clean.details["depth"] for pair in pairs]
    coords: dict[str, object] = {"what": list(parts), "way": list(WAYS)}
    coords |= {"layer": np.arange(config.layers), "head": np.arange(config.heads)}
    if "direction" in parts:
        columns |= {name: getattr(found, name) for name in ("eigenvalue_min", "eigenvalue_max")}
        coords["erase"] = ["own", "patched"]
    about = {"mixer": config.mixer, "checkpoint": str(checkpoint or "qed-tiny"), **identity(checkpoint, model)}
    about |= {"task": task, "length": length, "seed": seed, "device": str(place), "dtype": dtype}
    return make_patches(columns, coords, about)


def _config(checkpoint: str | Path | None) -> ModelConfig:
    """What is known of a model in which that can be done."""
    config = describe(checkpoint)
    if not isinstance(config, ModelConfig):
        raise InputError(
            f"{checkpoint}: expected a model of this package, in which runs can exchange parts, found {config.family}"
        )
    if config.tokenizer != "bytes":
        raise InputError(f"{checkpoint}: expected a model over bytes, found one over other tokens")
    return config


def _parts(mixer: Mixer, what: Sequence[str] | None) -> tuple[str, ...]:
    """What is exchanged."""
    for name in what or ():
        check_exchange(mixer, name)
    if what is not None and (not what or len({*what}) < len(what)):
        raise InputError(f"what: expected some that differ, found {', '.join(what) or 'none'}")
    return exchangeable(mixer) if what is None else tuple(what)


@torch.inference_mode()
def _scores(model: LanguageModel, pairs: Sequence[Pair], parts: Sequence[str], progress: Progress | None) -> Scores:
    shape = model.config.layers, model.config.heads
    usual, patched = np.zeros((2, len(pairs))), np.zeros((len(parts), 2, *shape, len(pairs)))
    low, high = np.full((2, 2, *shape), np.inf), np.full((2, 2, *shape), -np.inf)
    done, total = 0, len(pairs) * len(parts) * shape[0] * shape[1]
    for numbers in _together(pairs, TOGETHER.get(model.device.type, TOGETHER_ELSEWHERE)):
        batch = make_batch([pairs[i] for i in numbers], model.device)
        with enough_memory(f"{len(numbers)} pairs of {batch.prompts.shape[1]} tokens, in one pass"):
            alike = model.new_cache(len(batch.prompts))
            model(batch.prompts[:, : batch.value], cache=alike)
            before = _until_question(model, batch, alike)
            usual[:, numbers] = score(model, batch, before.fork())
            for i, layer, head in product(range(len(parts)), range(shape[0]), range(shape[1])):
                if parts[i] == "state":
                    found = score(model, batch, exchange_states(model, before, layer, [head]))
                else:
                    found, e = _patched(model, batch, alike, parts[i], layer, head)
                    if parts[i] == "direction":
                        low[:, :, layer, head] = np.minimum(low[:, :, layer, head], e.min(-1))
                        high[:, :, layer, head] = np.maximum(high[:, :, layer, head], e.max(-1))
                patched[i, :, layer, head, numbers] = found[::-1].T  # the corrupted rows are patched with the clean ones'
                done += len(numbers)
                if progress is not None:
                    progress(done, total)
    return Scores(usual[0], usual[1], patched, low, high)


def _patched(model: LanguageModel, batch: Batch, alike: Cache, part: str, layer: int, head: int) -> tuple[Array, Array]:
    """Scores ``[2, P]`` with one head's d, ε or γ exchanged, and e of its main edits ``[way, own or patched, tokens]``.

    Exchanged from the first token on that differs: ``alike`` is what all have before it.
    """
    with exchanging(model, part, layer, [head]) as seen:
        cache = _until_question(model, batch, alike)
        hidden = model(batch.prompts[:, batch.question :], cache=cache)[:, -1]
    e: Array = torch.cat(seen, 2)[..., head].cpu().numpy()
    return _compared(model, batch, hidden, cache), e.reshape(2, 2, -1).swapaxes(0, 1)[::-1]


def _until_question(model: LanguageModel, batch: Batch, alike: Cache) -> Cache:
    cache = alike.fork()
    model(batch.prompts[:, batch.value : batch.question], cache=cache)
    return cache


def score(model: LanguageModel, batch: Batch, cache: Cache) -> Array:
    """Clean and corrupted runs' ln p(clean answer) − ln p(corrupted answer) ``[2, P]``, from their question on.

    ``cache`` is what they have before it, and is used up.
    """
    return _compared(model, batch, model(batch.prompts[:, batch.question :], cache=cache)[:, -1], cache)


def _compared(model: LanguageModel, batch: Batch, hidden: Tensor, cache: Cache) -> Array:
    clean, corrupted = (log_probability(model, hidden, cache, answer) for answer in batch.answers)
    found: Array = (clean - corrupted).view(2, -1).cpu().numpy()
    return found


def make_batch(pairs: Sequence[Pair], device: torch.device) -> Batch:
    """Pairs whose questions begin at one token, side by side."""
    rows = [np.stack([getattr(pair, name).tokens for pair in pairs]) for name in ("clean", "corrupted")]
    tokens, answer = torch.from_numpy(np.stack(rows)).to(device), pairs[0].clean.answer
    if answer is None:
        raise InputError("expected prompts with an answer, found one without")
    clean, corrupted = (x[:, answer].repeat(2, 1) for x in tokens)
    value = int((tokens[0] != tokens[1]).any(0).int().argmax())
    return Batch(tokens[:, :, : answer.start].flatten(0, 1), (clean, corrupted), value, pairs[0].question)


def _together(pairs: Sequence[Pair], most: int) -> list[list[int]]:
    """Numbers of the pairs of each pass: their questions begin at one token, and they have at most ``most`` tokens or are one."""
    starts = np.array([pair.question for pair in pairs])
    size = max(most // (2 * len(pairs[0].clean.tokens)), 1)
    by_start = (np.flatnonzero(starts == start).tolist() for start in np.unique(starts))
    return [numbers[i : i + size] for numbers in by_start for i in range(0, len(numbers), size)]
