"""Tally the erase factors of a checkpoint as it runs, keeping no store, or of a trace that has been kept."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, distributed

from qed_probe.analyses.blocks import blocks, complete_tokens
from qed_probe.eigen.claims import Claim, parse_claims
from qed_probe.eigen.counts import Subject
from qed_probe.eigen.parts import labelled, merge_eigen
from qed_probe.eigen.sample import Sample
from qed_probe.eigen.tally import Tally
from qed_probe.errors import CheckpointError, InputError
from qed_probe.kernels import MIXERS, Mixer, Tokens, erase
from qed_probe.models import checkpoint as native
from qed_probe.models.capture import capture_tokens
from qed_probe.models.device import enough_memory
from qed_probe.replays.inputs import stored_edits
from qed_probe.store import reader
from qed_probe.tasks.prompts import Prompt
from qed_probe.tracing.plan import Plan, make_plan
from qed_probe.tracing.run import Progress

KEPT = (
    "mixer", "checkpoint", "checkpoint_digest", "dtype", "strength", "direction", "at", "mode", "lambda_max", "gate_max",
    "prompts_digest",
)  # fmt: skip
"""Attributes of a trace that its tally has too."""
Seen = defaultdict[torch.device, dict[int, dict[str, Tensor]]]
"""The records of a pass by device and layer."""
RECORDS = ("eigenvalue", "eigenvalue_unit", "eigenvalue_projected", "key_norm", "operator_norm", "operator_norm_base")


def tally_eigen(
    checkpoint: str | Path | None,
    prompts: Sequence[Prompt],
    *,
    claims: Sequence[str] = (),
    part: tuple[int, int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    batch: int = 1,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Tally what a checkpoint's erase factors do, the bundled one's if None, while it runs over prompts.

    Neither states nor records are kept: what ``store.eigen.VARIABLES`` names, however many the tokens. ``claims`` are texts
    (``eigen.claims``), ``part`` (i, n) takes every n-th pack of prompts from the i-th on, to be merged with the others. Where
    torchrun runs several processes, each takes a part, on the GPU of its own if ``device`` is cuda, and all return the whole.
    The other keywords are those of ``trace``. Raises InputError and CheckpointError as ``trace`` does, and InputError for a claim
    that is none.
    """
    judged = parse_claims(claims)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and part is not None:
        raise InputError(f"part: expected none under torchrun, whose {world} processes are the parts, found {part[0]}/{part[1]}")
    index, count = part or (rank + 1, world)
    if not 1 <= index <= count:
        raise InputError(f"part: expected I/N with I from 1 to N, found {index}/{count}")
    if world > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    how: dict[str, Any] = {"device": device, "dtype": dtype, "batch": batch, "trust_remote_code": trust_remote_code}
    found = _stream(make_plan(checkpoint, prompts, vectors="none", **how), judged, index, count, progress)
    found.attrs.update(_provenance(checkpoint))
    return found if world == 1 else merge_eigen(_gathered(found, world))


def tally_eigen_store(
    stores: str | Path | Iterable[str | Path], *, claims: Sequence[str] = (), progress: Progress | None = None
) -> xr.Dataset:
    """Tally the erase factors of traces of one checkpoint: to the last count what ``tally_eigen`` gives over the same tokens.

    The steps of the sample need traces that kept their inputs, and are NaN without. Raises InputError for a claim that is none,
    and StoreError for a store that lacks a record or has no complete token.
    """
    paths = [stores] if isinstance(stores, str | Path) else [*stores]
    ds, kept = reader.open(*paths), all((Path(path) / "inputs").is_dir() for path in paths)
    return tally_trace(ds, reader.open_inputs(*paths) if kept else None, claims=claims, progress=progress)


def tally_trace(
    ds: xr.Dataset, inputs: xr.Dataset | None = None, *, claims: Sequence[str] = (), progress: Progress | None = None
) -> xr.Dataset:
    """As ``tally_eigen_store``, of what ``open`` and ``open_inputs`` return."""
    judged = parse_claims(claims)
    lam = ds["lambda"].values.astype(np.float64) if "lambda" in ds else np.zeros((ds.sizes["layer"], ds.sizes["head"]))
    mixer, bounds = MIXERS[ds.attrs["mixer"]], ds["cu_seqlens"].values.astype(np.int64)
    layers = tuple(ds["layer"].values.tolist())
    subject = Subject(mixer, ds.sizes.get("edit", 1), float(ds.attrs["gate_max"]), layers, lam, bounds, judged)
    tally, sample = Tally(subject), Sample(layers, int(bounds[-1]), lam.shape[1])
    by_edit = _by_edit(ds)
    for tokens, records in blocks(ds.assign(by_edit), [*RECORDS, *by_edit]):
        found = {name: torch.from_numpy(x) for name, x in records.items()}
        tally.add(layers, torch.from_numpy(tokens), _with_edits(_spoiled(found), subject))
        if progress is not None:
            progress(int(tokens[-1]) + 1, int(bounds[-1]))
    if inputs is not None:
        _sample_store(sample, ds, inputs)

    def named(at: NDArray[np.int64]) -> tuple[ArrayLike, ArrayLike]:
        texts = ds["token_text"].values[at] if "token_text" in ds else np.full(at.shape, "", object)
        return ds["token_id"].values[at], texts

    return labelled(tally, sample, named, {name: ds.attrs[name] for name in KEPT if name in ds.attrs})


def _stream(plan: Plan, claims: tuple[Claim, ...], index: int, count: int, progress: Progress | None) -> xr.Dataset:
    """Run one part of the packs and tally what the layers feed their memories."""
    layout, model = plan.layout, plan.model
    bounds, lam = layout.cu_seqlens, np.zeros((0, 0)) if layout.lam is None else layout.lam.astype(np.float64)
    mixer, gate_max = MIXERS[str(layout.attrs["mixer"])], float(model.config.gate_max)
    subject = Subject(mixer, layout.edits, gate_max, layout.layers, lam, bounds, claims)
    tally, sample = Tally(subject), Sample(layout.layers, int(bounds[-1]), layout.heads)
    for pack in islice(plan.packs, index - 1, None, count):
        begin, end = int(bounds[pack.start]), int(bounds[pack.stop])
        seen: Seen = defaultdict(dict)

        def sink(layer: int, mixer: Mixer, tokens: Tokens, begin: int = begin, seen: Seen = seen) -> None:
            seen[tokens.v.device][layer] = {name: x[0] for name, x in erase(mixer, tokens).items()}
            sample.add(layer, mixer, tokens, begin)

        ids = torch.from_numpy(np.concatenate([prompt.tokens for prompt in plan.prompts[pack]])).to(
            model.device, non_blocking=True
        )
        ends = torch.from_numpy(bounds[pack.start : pack.stop + 1] - begin)
        with (
            enough_memory(f"prompts {pack.start + 1} to {pack.stop}, in one pass"),
            torch.inference_mode(),
            capture_tokens(model, sink, layout.layers),
        ):
            model(ids[None], cu_seqlens=ends)
            for device, found in seen.items():
                records = {name: torch.stack([x[name] for x in found.values()]) for name in next(iter(found.values()))}
                tally.add(tuple(found), torch.arange(begin, end, device=device), records)
        if progress is not None:
            progress(end, int(bounds[-1]))

    def named(at: NDArray[np.int64]) -> tuple[ArrayLike, ArrayLike]:
        prompts = np.searchsorted(bounds, at, "right") - 1
        ids = [int(plan.prompts[int(p)].tokens[t - bounds[p]]) for p, t in zip(prompts, at, strict=True)]
        return ids, [""] * len(ids) if plan.tokenizer is None else plan.tokenizer.pieces(np.array(ids, np.int64))

    known = {**layout.identity, **layout.provenance}
    return labelled(tally, sample, named, {name: known[name] for name in KEPT if name in known})


def _by_edit(ds: xr.Dataset) -> dict[str, xr.DataArray]:
    """The records of every edit, one by one, for blocks hold none with an axis more."""
    there = [name for name in ("edit_eigenvalue", "edit_eigenvalue_unit") if name in ds]
    return {f"{name} {m}": ds[name].isel(edit=m) for name in there for m in range(ds.sizes["edit"])}


def _spoiled(records: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with e of the unit key as NaN, which is counted, where a record is not finite that is not counted by itself."""
    uncounted = [x for name, x in records.items() if name == "key_norm" or name.startswith("edit_eigenvalue_unit")]
    good = torch.stack([x.isfinite() for x in uncounted]).all(0)
    return records | {"eigenvalue_unit": records["eigenvalue_unit"].where(good, torch.nan)}


def _with_edits(records: dict[str, Tensor], subject: Subject) -> dict[str, Tensor]:
    """The same with every edit's records stacked; older stores have no renormalised ones but the main edit's."""
    if subject.edits == 1:
        return records
    used = [records[f"edit_eigenvalue {m}"] for m in range(subject.edits)]
    alone = [records.get(f"edit_eigenvalue_unit {m}", x) for m, x in enumerate(used)]
    alone[subject.main] = records["eigenvalue_unit"]
    return records | {"edit_eigenvalue": torch.stack(used, -1), "edit_eigenvalue_unit": torch.stack(alone, -1)}


def _sample_store(sample: Sample, ds: xr.Dataset, inputs: xr.Dataset) -> None:
    """Fill the sample from the inputs that traces kept, where they are complete."""
    complete = complete_tokens(ds)
    for layer in ds["layer"].values.tolist():
        chosen = sample.wanted(layer, 0, len(complete))
        chosen = chosen[complete[sample.token[chosen]]]
        if len(chosen):
            part = inputs.drop_vars("initial_state", errors="ignore").sel(layer=layer).isel(token=sample.token[chosen]).load()
            sample.keep(chosen, stored_edits(part))


def _provenance(checkpoint: str | Path | None) -> dict[str, int]:
    """The training step and seed of a checkpoint that says them."""
    try:
        known = native.read_provenance(checkpoint)
    except CheckpointError:
        return {}
    return {name: int(known[name]) for name in ("steps", "seed") if isinstance(known.get(name), int)}


def _gathered(found: xr.Dataset, world: int) -> list[xr.Dataset]:
    """The parts of all processes that torchrun started."""
    parts: list[Any] = [None] * world
    distributed.init_process_group("gloo")
    try:
        distributed.all_gather_object(parts, found)
    finally:
        distributed.destroy_process_group()
    return parts
