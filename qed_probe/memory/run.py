"""Every table of a run: of a checkpoint as it runs over prompts, or of traces that kept their inputs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from qed_probe.errors import CheckpointError, InputError
from qed_probe.kernels import MIXERS, Choice
from qed_probe.memory.capacity import Capacity
from qed_probe.memory.effects import Effects
from qed_probe.memory.growth import Growth
from qed_probe.memory.recall import Recall
from qed_probe.memory.sources import BLOCK, Probe, Sources, take_apart
from qed_probe.memory.subject import Part, Subject, subject_of
from qed_probe.models.checkpoint import read_provenance
from qed_probe.replays.inputs import LayerInputs
from qed_probe.replays.layer import cut
from qed_probe.replays.live import kept, run_model
from qed_probe.replays.stored import chosen_layers, complete_prompts, inputs_of, stored_packs, stored_prompts
from qed_probe.store import reader
from qed_probe.store.memory import make_memory
from qed_probe.store.schema import ran
from qed_probe.tasks.prompts import Prompt
from qed_probe.tracing.plan import make_plan
from qed_probe.tracing.run import Progress

PARTS: dict[str, type[Part]] = {
    "sources": Sources,
    "effects": Effects,
    "growth": Growth,
    "recall": Recall,
    "capacity": Capacity,
}
"""What can be asked for, by name; all of it if nothing is."""


@dataclass
class _Run:
    """The parts that were asked for, and what could not be taken."""

    subject: Subject
    names: list[str]
    parts: list[Part]
    nonfinite: dict[int, set[int]] = field(default_factory=dict)

    def add(self, layer: LayerInputs) -> None:
        """Let every part see a layer's finite prompts."""
        good, bad = _finite(layer)
        self.nonfinite.setdefault(layer.index, set()).update(bad)
        if good is not None:
            for part in self.parts:
                part.add(good)

    def dataset(self, attrs: dict[str, object]) -> xr.Dataset:
        """All tables as one, with the number of prompts of each layer whose inputs were not all finite."""
        lost = [len(self.nonfinite.get(layer, ())) for layer in self.subject.layers]
        tables = [part.table() for part in self.parts]
        mixer = self.subject.mixer
        supposed = mixer.direction is None and mixer.recorded_direction is not None and "sources" in self.names
        attrs |= {"subject": ran(attrs) + " (d is what QED would add)" * supposed, "parts": ",".join(self.names)}
        return make_memory(tables, self.subject.layers, self.subject.heads, np.array(lost, np.int64), attrs)


def inspect_memory(
    checkpoint: str | Path | None,
    prompts: Sequence[Prompt],
    *,
    only: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    strength: float = 1.0,
    backend: Choice = "auto",
    progress: Progress | None = None,
) -> xr.Dataset:
    """Look into the memories of a checkpoint, the bundled one's if None, while it runs over prompts, once.

    What there is to see is ``PARTS``: ``only`` some of them, or all; docs/memory.md says what each variable is. The other
    keywords are those of ``trace``. Prompts whose inputs are not all finite in a layer are left out there, and counted.
    Raises InputError for a part that is none and for what ``trace`` refuses, CheckpointError, and CheckFailed if the weights of
    what was written do not add up to what the model read.
    """
    parts = _chosen(only)
    how: dict[str, Any] = {"layers": layers, "device": device, "dtype": dtype, "strength": strength, "backend": backend}
    plan = make_plan(checkpoint, prompts, vectors="none", **how)
    layout = plan.layout
    mixer = MIXERS[str(layout.attrs["mixer"])]
    texts = None if plan.tokenizer is None else plan.tokenizer.pieces(np.asarray(plan.prompts[0].tokens))
    subject = subject_of(mixer, layout.layers, layout.heads, ((len(x.tokens), x.roles) for x in plan.prompts), texts)
    run = _Run(subject, parts, [PARTS[name](subject) for name in parts])
    attrs = run_model(plan, run.add, progress)
    return run.dataset(attrs | {"prompts": len(prompts)} | _trained_length(checkpoint))


def inspect_memory_store(
    stores: str | Path | Iterable[str | Path],
    *,
    only: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """As ``inspect_memory``, from traces that kept their inputs, layer by layer, with no model.

    Prompts that are not complete are left out. Raises InputError and CheckFailed as ``inspect_memory`` does, and StoreError for
    traces without inputs or without a complete prompt.
    """
    parts = _chosen(only)
    paths = [stores] if isinstance(stores, str | Path) else [*stores]
    trace, inputs = reader.open(*paths), inputs_of(paths)
    bounds = trace["cu_seqlens"].values
    whole = complete_prompts(trace)
    roles = trace["role"].values.astype(str) if "role" in trace else None
    spans = ((int(bounds[i]), int(bounds[i + 1])) for i in whole)
    known = ((b - a, None if roles is None else roles[a:b]) for a, b in spans)
    wanted = tuple(chosen_layers(trace["layer"].values.tolist(), layers))
    first = slice(*bounds[whole[0] : whole[0] + 2])
    texts = trace["token_text"].values[first].tolist() if "token_text" in trace else None
    subject = subject_of(MIXERS[str(trace.attrs["mixer"])], wanted, trace.sizes["head"], known, texts)
    run = _Run(subject, parts, [PARTS[name](subject) for name in parts])
    done, tokens = 0, sum(subject.lengths)
    for layer in wanted:
        for given in stored_packs(trace, inputs, layer, whole):
            run.add(given)
            done += given.ends[-1]
            if progress is not None:
                progress(done, len(wanted) * tokens)
    counts = {"prompts": len(whole), "tokens": tokens, "tokens_incomplete": int(bounds[-1]) - tokens, "source": "store"}
    return run.dataset(kept(trace.attrs) | counts)


def read_weights(
    stores: str | Path | Iterable[str | Path],
    layer: int,
    prompt: int = 0,
    *,
    probe: Probe = "query",
    tokens: Sequence[int] | None = None,
) -> xr.Dataset:
    """The exact weights ω of everything written, in the reads of one prompt of traces that kept their inputs.

    ``weight`` ``(token, head, source, edit)`` float32 with r = Σ_j Σ_m ω_jm u_jm, of the reads by ``probe`` at ``tokens``
    (counted within the prompt; all if None); ``share`` ``(token, head, source)`` is ⟨c_j, r⟩/‖r‖², NaN where r is 0. All reads of
    T tokens have H·T²·(M + 1) numbers. The key of an erase address, which writes nothing, counts as γε. Raises InputError for a
    layer, prompt, token or probe that is not there, and for no token, and StoreError for traces without inputs.
    """
    paths = [stores] if isinstance(stores, str | Path) else [*stores]
    trace, inputs = reader.open(*paths), inputs_of(paths)
    if prompt not in complete_prompts(trace):
        raise InputError(f"prompt: expected a complete one of {trace.sizes['boundary'] - 1}, counted from 0, found {prompt}")
    (layer,) = chosen_layers(trace["layer"].values.tolist(), [layer])
    given = stored_prompts(inputs, trace["lambda"], layer, np.array([prompt]), (0,))
    at = range(given.ends[-1]) if tokens is None else tokens
    beyond = [token for token in at if not 0 <= token < given.ends[-1]]
    if beyond or not len(at):
        raise InputError(f"tokens: expected some from 0 to {given.ends[-1] - 1}, found {beyond[0] if beyond else 'none'}")
    parts = [take_apart(given, 0, some, probe) for some in torch.split(torch.tensor(at), BLOCK)]
    T = given.ends[-1]
    weight = torch.cat([pad(x.weights, (0, 0, 0, T - x.weights.shape[2])) for x in parts])
    share = torch.cat([pad(x.parts, (0, T - x.parts.shape[2])) / x.read.square().sum(-1, keepdim=True) for x in parts])
    dims = ("token", "head", "source")
    found = {"weight": ((*dims, "edit"), weight.numpy()), "share": (dims, share.numpy())}
    return xr.Dataset(found, {"token": [*at]}, {"layer": layer, "prompt": prompt, "probe": probe})


def _trained_length(checkpoint: str | Path | None) -> dict[str, int]:
    """The length of the prompts that a checkpoint was trained on, where it says one."""
    try:
        recipe = read_provenance(checkpoint).get("recipe")
    except CheckpointError:
        return {}
    length = recipe.get("length") if isinstance(recipe, dict) else None
    return {"trained_length": length} if type(length) is int and length > 0 else {}


def _chosen(only: Sequence[str] | None) -> list[str]:
    unknown = [name for name in only or () if name not in PARTS]
    if unknown or (only is not None and not only):
        raise InputError(f"only: expected some of {', '.join(PARTS)}, found {', '.join(unknown) or 'none'}")
    return [name for name in PARTS if only is None or name in only]


def _finite(layer: LayerInputs) -> tuple[LayerInputs | None, list[int]]:
    """A layer's inputs over the prompts of which all are finite (a decay may be −∞), and the numbers of the others."""
    e, lost = layer.edits, torch.zeros(layer.edits.q.shape[1], dtype=torch.bool, device=layer.edits.q.device)
    for x in (e.q, e.k, e.a, e.u, e.base, e.g.nan_to_num(torch.nan, torch.nan, 0)):
        lost |= ~x[0].flatten(1).isfinite().all(1)
    spans = list(itertools.pairwise(layer.ends))
    keep = [not bool(lost[a:b].any()) for a, b in spans]
    bad = [number for number, good in zip(layer.prompts, keep, strict=True) if not good]
    if not bad:
        return layer, bad
    if len(bad) == len(spans):
        return None, bad
    tokens = torch.cat([torch.arange(a, b, device=lost.device) for (a, b), good in zip(spans, keep, strict=True) if good])
    return _at(layer, tokens, keep), bad


def _at(layer: LayerInputs, tokens: Tensor, keep: list[bool]) -> LayerInputs:
    """The same over some of its prompts, whose packed tokens are given."""
    lengths = [b - a for (a, b), good in zip(itertools.pairwise(layer.ends), keep, strict=True) if good]
    state = layer.initial_state
    return replace(
        layer,
        edits=cut(layer.edits, tokens),
        gate=None if layer.gate is None else layer.gate[:, tokens],
        value=layer.value[:, tokens],
        gamma=None if layer.gamma is None else layer.gamma[:, tokens],
        source=None if layer.source is None else layer.source[:, tokens],
        ends=(0, *itertools.accumulate(lengths)),
        prompts=tuple(number for number, good in zip(layer.prompts, keep, strict=True) if good),
        initial_state=None if state is None else state[torch.tensor(keep, device=state.device)],
        output=layer.output[:, tokens],
    )
