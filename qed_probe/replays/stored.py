"""Which prompts and layers of traces can be looked into offline, and what the layers fed their memories there."""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from qed_probe.errors import InputError, StoreError
from qed_probe.replays.inputs import LayerInputs, stored_inputs
from qed_probe.store import reader
from qed_probe.tracing.plan import PACK, packs


def inputs_of(paths: Sequence[str | Path]) -> xr.Dataset:
    """``open_inputs`` of traces that ``open`` has warned of already, where they are not complete."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reader.IncompleteStoreWarning)
        return reader.open_inputs(*paths)


def complete_prompts(trace: xr.Dataset) -> NDArray[np.int64]:
    """The numbers of the prompts of which every token is complete; raises StoreError if there is none."""
    bounds, complete = trace["cu_seqlens"].values, trace["complete"].values
    there = np.concatenate([[0], np.cumsum(complete)])[bounds]
    whole = np.flatnonzero(np.diff(there) == np.diff(bounds))
    if not len(whole):
        raise StoreError(f"expected a complete prompt to replay, found none of {len(bounds) - 1}")
    return whole


def chosen_layers(there: Sequence[int], asked: Sequence[int] | None) -> list[int]:
    """The layers that are asked for, in order, all if None; raises InputError for one that is not there and for none."""
    unknown = [layer for layer in asked or () if layer not in there]
    if unknown or (asked is not None and not asked):
        raise InputError(f"layers: expected some of {list(there)}, found {unknown or 'none'}")
    return list(there) if asked is None else sorted(set(asked))


def stored_packs(trace: xr.Dataset, inputs: xr.Dataset, layer: int, prompts: NDArray[np.int64]) -> Iterator[LayerInputs]:
    """One layer's inputs of these prompts, which are numbered anew, pack after pack."""
    for pack in packs(np.diff(trace["cu_seqlens"].values)[prompts].tolist(), PACK):
        yield stored_prompts(inputs, trace["lambda"], layer, prompts[pack], range(pack.start, pack.stop))


def stored_prompts(
    inputs: xr.Dataset, lam: xr.DataArray, layer: int, prompts: NDArray[np.int64], numbers: Sequence[int]
) -> LayerInputs:
    """One layer's inputs of some prompts of what ``open_inputs`` returns, which are numbered anew."""
    starts, stops = inputs["cu_seqlens"].values[prompts], inputs["cu_seqlens"].values[prompts + 1]
    tokens = np.concatenate([np.arange(begin, end) for begin, end in zip(starts, stops, strict=True)])
    part: dict[str, Any] = {"token": tokens} | ({"prompt": prompts} if "initial_state" in inputs else {})
    ds = inputs.sel(layer=layer).isel(part).load()
    ends = np.concatenate([[0], np.cumsum(stops - starts)]).tolist()
    return stored_inputs(ds, torch.from_numpy(lam.sel(layer=layer).values), ends, tuple(numbers))
