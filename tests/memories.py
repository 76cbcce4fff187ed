"""What tests of memories share: subjects, layers by hand, and the oracle, one token of one head after another in numpy."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from qed_probe.kernels import MIXERS, Edits
from qed_probe.memory.subject import Subject, subject_of
from qed_probe.replays import LayerInputs
from qed_probe.store.schema import ran
from tests.replayed import make_layer

Array = NDArray[np.float64]


def subject_for(*layers: LayerInputs) -> Subject:
    """A subject of these layers' prompts, of which packs of the same layer follow each other."""
    first = layers[0]
    lengths = [b - a for layer in layers if layer.index == first.index for a, b in itertools.pairwise(layer.ends)]
    indices = tuple(dict.fromkeys(layer.index for layer in layers))
    return subject_of(first.mixer, indices, first.edits.q.shape[2], [(length, None) for length in lengths])


def with_state(layer: LayerInputs, seed: int = 0) -> LayerInputs:
    """The same from memories that are not empty."""
    _, _, H, K = layer.edits.q.shape
    state = np.random.default_rng(seed).normal(size=(len(layer.ends) - 1, H, K, layer.edits.u.shape[-1]))
    return replace(layer, initial_state=torch.from_numpy(state).float())


def by_hand(mixer: str, ends: tuple[int, ...], lam: float = 0, **edits: ArrayLike) -> LayerInputs:
    """A layer of one head: ``q``, ``g`` and ``base`` ``[T, K]``, ``k``, ``a`` ``[T, M, K]``, ``u`` ``[T, M, V]``, and ``d``."""
    given = {name: torch.tensor(np.asarray(x, np.float64))[None, :, None] for name, x in edits.items()}
    main = given["k"].shape[3] - 1
    layer = make_layer(mixer, ends, H=1)
    made = Edits(**{"base": given["a"][..., main, :], "d": None} | given, main=main, address=None)  # type: ignore[arg-type]
    return replace(layer, edits=made, lam=torch.tensor([lam]), initial_state=None)


def arrays(layer: LayerInputs, *, base: bool = False) -> dict[str, Any]:
    """The layer's edits in numpy, ``[T, H, …]``, the added direction taken from them if ``base``."""
    e = layer.edits
    names = [name for name in ("q", "g", "k", "a", "u", "base", "d") if getattr(e, name) is not None]
    x = {name: getattr(e, name)[0].double().numpy().copy() for name in names}
    if base:
        x["a"][:, :, e.main] = x["base"]
    x["g"] = np.broadcast_to(x["g"], x["q"].shape)
    return x


def transition(x: dict[str, Any], t: int, h: int) -> Array:
    """What token t makes of the memory, but for what it writes."""
    phi = np.diag(np.exp(x["g"][t, h]))
    for m in range(x["k"].shape[2]):
        phi = (np.eye(len(phi)) - np.outer(x["k"][t, h, m], x["a"][t, h, m])) @ phi
    return phi


def states(layer: LayerInputs, h: int, *, base: bool = False) -> Iterator[tuple[int, int, list[Array]]]:
    """Prompt, token within it, and the memory before each of the token's edits and after the last."""
    x = arrays(layer, base=base)
    for p, (begin, end) in enumerate(itertools.pairwise(layer.ends)):
        S = np.zeros((x["q"].shape[-1], x["u"].shape[-1]))
        S = S if layer.initial_state is None else layer.initial_state[p, h].double().numpy()
        for t in range(begin, end):
            seen = [np.exp(x["g"][t, h])[:, None] * S]
            for m in range(x["k"].shape[2]):
                k, a, u = (x[name][t, h, m] for name in "kau")
                seen.append(seen[-1] + np.outer(k, u - seen[-1].T @ a))
            S = seen[-1]
            yield p, t - begin, seen


def labelled(ds: xr.Dataset, **attrs: object) -> xr.Dataset:
    """A part's table as ``inspect_memory`` returns it."""
    about = {"mixer": "qed", "prompts": 3, "tokens": 100, "tokens_incomplete": 0}
    about |= attrs
    return ds.assign(nonfinite=("layer", np.zeros(ds.sizes["layer"], np.int64))).assign_attrs(about, subject=ran(about))


DELTA = [name for name in MIXERS if name != "comba"]
