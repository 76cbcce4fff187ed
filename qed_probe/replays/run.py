"""Replay every erase direction: of a checkpoint as it runs over prompts, or of traces that kept their inputs."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import MIXERS, Choice
from qed_probe.models import opening
from qed_probe.replays.directions import Replaced, counterfactuals, what_is_replaced
from qed_probe.replays.inputs import LayerInputs
from qed_probe.replays.layer import REGIMES, Match, matches, replay_layer
from qed_probe.replays.live import kept, run_model
from qed_probe.replays.stored import chosen_layers, complete_prompts, inputs_of, stored_packs
from qed_probe.replays.tally import Tally
from qed_probe.store import reader
from qed_probe.store.replays import CELL, VARIABLES, make_replays
from qed_probe.store.schema import ran
from qed_probe.tasks.prompts import LazyPrompts, Prompt
from qed_probe.tracing.plan import make_plan
from qed_probe.tracing.run import Progress

Array = NDArray[Any]


@dataclass
class _Run:
    """What is asked for, and what has been found."""

    replaced: Replaced
    match: Match
    draws: int
    seed: int
    tallies: dict[int, Tally] = field(default_factory=dict)
    summaries: dict[int, dict[tuple[str, ...], dict[str, float]]] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    passes: int = 0
    off: float = 0.0

    def add(self, layer: LayerInputs) -> None:
        """Replay a layer's inputs, hold the actual pass against the model's output, and keep what was measured."""
        chosen = counterfactuals(layer, self.replaced, draws=self.draws, seed=self.seed)
        found = replay_layer(layer, chosen, self.match)
        if not found.off <= layer.tolerance:
            expected = f"the actual direction's replay within {layer.tolerance:.1e} of the model's output"
            raise CheckFailed(f"layer {layer.index}: expected {expected}, found {found.off:.1e}")
        self.names, self.absent = tuple(chosen.directions), chosen.absent
        self.passes, self.off = max(self.passes, found.passes), max(self.off, found.off)
        self.tallies[layer.index].add(found.measures)

    def close(self, layer: int) -> None:
        """Sum up a layer of which all is there."""
        keys = itertools.product(matches(self.replaced, self.match), REGIMES, self.names)
        self.summaries[layer] = {key: self.tallies[layer].summary(key) for key in keys}

    def dataset(self, attrs: dict[str, object]) -> xr.Dataset:
        """Everything, labelled."""
        layers, ways = sorted(self.summaries), matches(self.replaced, self.match)
        shape = len(ways), len(REGIMES), len(self.names), len(layers)
        rows = [self.summaries[layer][key] for key in itertools.product(ways, REGIMES, self.names) for layer in layers]
        columns: dict[str, Array] = {name: np.array([row[name] for row in rows]).reshape(shape) for name in rows[0]}
        columns |= {"ratio": against_actual(columns["mean"], self.names), **over_layers(columns, self.names)}
        coords = dict(zip(CELL, (list(ways), list(REGIMES), list(self.names), layers), strict=True))
        absent = "; ".join(f"{name}: {why}" for name, why in self.absent.items())
        asked = {"replaced": self.replaced, "draws": self.draws, "seed": self.seed, "absent": absent}
        done = {"passes": self.passes, "off": self.off, "subject": ran(attrs)}
        return make_replays({name: columns[name] for name in VARIABLES}, coords, attrs | asked | done)


def against_actual(mean: Array, names: Sequence[str]) -> Array:
    """Means ``[..., direction, layer]`` over the actual direction's, NaN where that is 0."""
    own = mean[..., names.index("actual"), None, :]
    ratio: Array = np.divide(mean, own, out=np.full(mean.shape, np.nan), where=own > 0)
    return ratio


def over_layers(columns: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """What the layers, of ``[..., direction, layer]`` each, come to: every layer counts the same, but in the ratio of means.

    EDA's bars (Fig. 2b) are the mean of ratios, which does not follow from means over all layers.
    """
    n = columns["n"]
    pooled = np.divide((columns["mean"] * n).sum(-1), n.sum(-1), out=np.full(n.shape[:-1], np.nan), where=n.sum(-1) > 0)
    found = {f"layers_{name}": columns[name].mean(-1) for name in ("mean", "median", "sum_ratio", "drift_mean")}
    ratio_of_means = against_actual(pooled[..., None], names)[..., 0]
    return found | {"ratio_of_means": ratio_of_means, "mean_of_ratios": against_actual(columns["mean"], names).mean(-1)}


def replay(
    checkpoint: str | Path | None,
    prompts: Sequence[Prompt],
    *,
    replaced: Replaced | None = None,
    match: Match = "norm",
    draws: int = 3,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    strength: float = 1.0,
    backend: Choice = "auto",
    progress: Progress | None = None,
) -> xr.Dataset:
    """Replay a checkpoint's erase, the bundled one's if None, in every direction while it runs over prompts, once.

    Dims (match, regime, direction, layer), what ``store.replays.VARIABLES`` says of each: match ``none`` for directions as they
    are made, and ``match`` for the same with the actual one's size; regime ``one-step`` from the actual state and ``trajectory``
    with the memory replayed. ``replaced`` ("direction" or "address") is what is replaced, where a mixer has both; ``draws`` are
    random directions; ``seed`` draws these and what is shuffled. The other keywords are those of ``trace``. Prompts of one token
    are left out where there are longer ones, and counted. Raises InputError for a mixer without an erase direction or address and
    for what ``trace`` refuses, CheckpointError, and CheckFailed if the actual direction's replay disagrees with the model.
    """
    mixer = opening.describe(checkpoint).mixer
    run = _start(mixer, replaced, match, draws, seed)
    longer = [index for index, prompt in enumerate(prompts) if len(prompt.tokens) > 1] or [*range(len(prompts))]
    chosen = LazyPrompts(len(longer), lambda index: prompts[longer[index]])
    how: dict[str, Any] = {"layers": layers, "device": device, "dtype": dtype, "strength": strength, "backend": backend}
    plan = make_plan(checkpoint, chosen, vectors="none", seed=seed, **how)
    with ExitStack() as stack:
        run.tallies = {layer: stack.enter_context(Tally()) for layer in plan.layout.layers}
        attrs = run_model(plan, run.add, progress)
        for layer in plan.layout.layers:
            run.close(layer)
    return run.dataset(attrs | {"prompts": len(longer), "prompts_of_one_token": len(prompts) - len(longer)})


def replay_store(
    stores: str | Path | Iterable[str | Path],
    *,
    replaced: Replaced | None = None,
    match: Match = "norm",
    draws: int = 3,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """Replay from traces that kept their inputs what ``replay`` replays from a model, layer by layer, with no model.

    Prompts that are not complete are left out, as is what ``replay`` leaves out. Raises InputError and CheckFailed as ``replay``
    does, and StoreError for traces without inputs or without a complete prompt.
    """
    paths = [stores] if isinstance(stores, str | Path) else [*stores]
    trace = reader.open(*paths)
    run = _start(str(trace.attrs["mixer"]), replaced, match, draws, seed)
    inputs = inputs_of(paths)
    chosen, left = _longer_prompts(trace)
    wanted = chosen_layers(trace["layer"].values.tolist(), layers)
    done, tokens = 0, int(np.diff(trace["cu_seqlens"].values)[chosen].sum())
    for layer in wanted:
        with Tally() as run.tallies[layer]:
            for given in stored_packs(trace, inputs, layer, chosen):
                run.add(given)
                done += given.ends[-1]
                if progress is not None:
                    progress(done, len(wanted) * tokens)
            run.close(layer)
    return run.dataset(kept(trace.attrs) | left | {"prompts": len(chosen), "tokens": tokens, "source": "store"})


def _start(mixer: str, replaced: Replaced | None, match: Match, draws: int, seed: int) -> _Run:
    """Refuse what cannot be replayed before anything is loaded."""
    what = what_is_replaced(MIXERS[mixer], replaced)
    matches(what, match)
    for name, value, least in (("draws", draws, 1), ("seed", seed, 0)):
        if value < least:
            raise InputError(f"{name}: expected at least {least}, found {value}")
    return _Run(what, match, draws, seed)


def _longer_prompts(trace: xr.Dataset) -> tuple[NDArray[np.int64], dict[str, int]]:
    """The prompts that are complete, longer than a token where there is such a one, and how much is left out otherwise."""
    whole, lengths = complete_prompts(trace), np.diff(trace["cu_seqlens"].values)
    longer = whole[lengths[whole] > 1]
    chosen = longer if len(longer) else whole
    left = {"prompts_of_one_token": len(whole) - len(chosen), "tokens_incomplete": int(lengths.sum() - lengths[whole].sum())}
    return chosen, left
