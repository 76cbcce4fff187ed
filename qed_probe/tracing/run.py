"""Run a checkpoint over prompts and stream what every memory does into a store."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.errors import CheckFailed, InputError
from qed_probe.models.capture import Captured, capture
from qed_probe.models.device import enough_memory
from qed_probe.models.model import Model
from qed_probe.models.selfcheck import FIRST, Past, check_heads, check_layer
from qed_probe.store import place, reader, writer
from qed_probe.store.layout import Layout
from qed_probe.store.writer import Writer
from qed_probe.tasks.prompts import Prompt
from qed_probe.tracing.inputs import inputs
from qed_probe.tracing.passes import forward
from qed_probe.tracing.plan import Plan, Settings, make_plan

Progress = Callable[[int, int], None]
"""Called with the tokens done and their total."""

LOGITS = 1 << 26
"""Scores that are held at once: 1024 tokens' worth, or fewer where the vocabulary is large."""


@dataclass(frozen=True)
class Estimate:
    """What a trace would cost: tokens, bytes on disk, seconds at the speed of a timed pass, and tokens in a block."""

    tokens: int
    bytes: int
    seconds: float
    block: int


def trace(
    checkpoint: str | Path | None,
    prompts: Sequence[Prompt],
    output: str | Path = "run.zarr",
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[Settings],
) -> xr.Dataset:
    """Trace a checkpoint, the bundled one if None, over prompts into the store ``output`` and open it.

    ``resume`` finishes an incomplete store or begins one; ``overwrite`` replaces a store once the new one is complete;
    ``progress`` is called with (tokens done, total). The other keywords are ``Settings``. Raises InputError for what cannot be
    run, CheckpointError, StoreError, and CheckFailed if a replay disagrees with the model.
    """
    if resume and overwrite:
        raise InputError("expected resume or overwrite, found both")
    plan = make_plan(checkpoint, prompts, **settings)
    going_on = resume and place.found(Path(output)).exists()
    with writer.resume(output, plan.layout) if going_on else writer.create(output, plan.layout, overwrite=overwrite) as store:
        resumed_at = store.first_token
        left = (pack for pack in plan.packs if plan.layout.cu_seqlens[pack.stop] > resumed_at)
        replayed = 0
        for pack in left:
            with enough_memory(f"prompts {pack.start + 1} to {pack.stop}, in one pass"):
                _run(plan, pack, store, replays=replayed < FIRST, progress=progress)
            done = int(plan.layout.cu_seqlens[pack.stop])
            replayed += done - int(plan.layout.cu_seqlens[pack.start])
            store.commit(done)
        store.finish()
    return reader.open(output)


def estimate(checkpoint: str | Path | None, prompts: Sequence[Prompt], **settings: Unpack[Settings]) -> Estimate:
    """Say what ``trace`` would cost.

    From the store's layout, a timed pass over the first tokens of its prompts, at most 1024, and a timed step if it generates.
    """
    plan = make_plan(checkpoint, prompts, **settings)
    layout, total = plan.layout, plan.layout.sizes["token"]
    sizes = (math.prod(layout.sizes[dim] for dim in row.dims) * row.itemsize for row in (*layout.rows.values(), *layout.static))
    given = layout.cu_seqlens - layout.generated * np.arange(len(layout.cu_seqlens))
    some = plan.prompts[: int(np.searchsorted(given, 1024))]
    ids = torch.from_numpy(np.concatenate([prompt.tokens for prompt in some])[:1024])[None].to(plan.model.device)
    seconds = _time(plan, ids) / ids.shape[1] * int(given[-1])
    if layout.generated:
        seconds += _time(plan, ids[:, :1], cache=plan.model.new_cache(1)) * (total - int(given[-1]))
    return Estimate(total, sum(sizes), seconds, plan.layout.block)


def _time(plan: Plan, ids: Tensor, **how: Any) -> float:  # noqa: ANN401 - what the model takes
    """Seconds of a call with its records."""
    seconds = math.inf
    for _ in range(2):  # the first call warms up
        begun = time.perf_counter()
        with torch.inference_mode(), capture(plan.model, lambda _: None, plan.layout.layers):
            plan.model.logits(plan.model(ids, **how)).argmax().item()
        seconds = time.perf_counter() - begun
    return seconds


def _run(plan: Plan, pack: slice, store: Writer, *, replays: bool, progress: Progress | None) -> None:
    """Forward whole prompts and what follows them, check what was seen and write it; progress goes on with every layer."""
    layout = plan.layout
    begin, prompts = int(layout.cu_seqlens[pack.start]), [*plan.prompts[pack]]
    starts = layout.cu_seqlens[pack] - begin
    sampled, past = int(np.random.default_rng(plan.seed).choice(layout.layers)), Past()

    seen = 0

    def sink(captured: Captured, start: int) -> None:
        nonlocal seen
        if replays:
            check_heads(captured, plan.seed, start, past)
        if captured.layer == sampled:
            check_layer(captured, start, past)
        _write(captured, layout, store, start)
        seen += captured.output.shape[1]
        if progress is not None:
            progress(begin + seen // len(layout.layers), layout.sizes["token"])

    with torch.inference_mode():
        given = torch.from_numpy(np.concatenate([prompt.tokens for prompt in prompts])).to(plan.model.device)
        ids, hidden = forward(plan, pack, given, sink)
        nll, hit = _likelihood(plan.model, hidden, ids, starts)
    if len(unknown := np.setdiff1d(np.flatnonzero(np.isnan(nll)), starts)):
        raise CheckFailed(f"self-check: expected a likelihood of every token, found NaN first at token {begin + unknown[0]}")
    tokens = ids.cpu().numpy()
    store.write_tokens("nll", nll, start=begin)
    if layout.generated:
        store.write_tokens("token_id", tokens, start=begin)
    if plan.tokenizer is not None:
        store.write_tokens("token_text", plan.tokenizer.pieces(tokens), start=begin)
    if "correct" in layout.names:
        spans = zip(prompts, starts, strict=True)
        right = [np.nan if p.answer is None else float(hit[at : at + len(p.tokens)][p.answer].all()) for p, at in spans]
        store.write_prompts("correct", np.array(right, np.float32), start=pack.start)


def _write(captured: Captured, layout: Layout, store: Writer, begin: int) -> None:
    """Hand one layer's call to the writer: records, marks, inputs and states."""
    found = captured.observation.records
    # A call ends with a mark of its own, which is none of the prompt where the prompt goes on.
    marks = layout.marks_before(begin + captured.output.shape[1]) - layout.marks_before(begin)
    if any(name.startswith("inputs/") for name in layout.names):
        found = found | inputs(captured)
    for name, x in found.items():
        if name == "state_norm":
            store.write_marks(name, _numpy(x[:marks]), layer=captured.layer, start=begin)
        elif name in layout.names:
            store.write(name, _stored(x[0], layout.rows[name].dtype), layer=captured.layer, start=begin)
    states = captured.observation.states
    if len(states):
        store.write_marks("states/state", _numpy(states), layer=captured.layer, start=begin)


def _likelihood(
    model: Model, hidden: Tensor, ids: Tensor, starts: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """−ln p of each token given the earlier ones of its prompt, NaN for the first, and whether it was the likeliest."""
    ids = ids.to(hidden.device)
    nll, hit = [hidden.new_full((1,), math.nan, dtype=torch.float32)], [ids.new_zeros(1, dtype=torch.bool)]
    rows = max(min(1024, LOGITS // model.config.vocab_size), 1)
    for states, following in zip(torch.split(hidden[:-1], rows), torch.split(ids[1:], rows), strict=True):
        logits = model.logits(states).float()
        nll.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
        hit.append(logits.argmax(-1) == following)
    likelihood = _numpy(torch.cat(nll))
    likelihood[starts] = math.nan
    return likelihood, torch.cat(hit).cpu().numpy()


def _stored(x: Tensor, dtype: str) -> NDArray[np.floating]:
    # NumPy takes a hundred times as long to round to float16; what is beyond its range is left to the writer, which says where.
    if dtype == "float16" and (half := x.half()).isfinite().all():
        return half.cpu().numpy()
    return _numpy(x)


def _numpy(x: Tensor) -> NDArray[np.float32]:
    return x.float().cpu().numpy()
