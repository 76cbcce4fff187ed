"""How an analysis walks a store's ``inputs``: a layer and a block of tokens at a time, as they are large."""

from collections.abc import Callable, Iterator, Sequence
from math import prod

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import BLOCK, NOWHERE, Array, Step, add, complete_tokens
from qed_probe.errors import StoreError
from qed_probe.kernels import Mixer

BYTES = 1 << 26
"""How much of the inputs is in memory at a time, unless one block of the store alone is more."""


def fold_inputs(ds: xr.Dataset, inputs: xr.Dataset, names: Sequence[str], start: Callable[[int], Step]) -> dict[str, Array]:
    """Apply to each block of inputs ``[token, head, ...]`` the step that ``start`` gives for its layer, and join what it returns.

    A step is told the packed indices of the block's complete tokens. Names in _min or _max are joined by that, all others by sum,
    and a new first axis is the layer. ``nonfinite`` and ``first_min`` come along as from ``fold``. Raises StoreError for inputs
    that are not of this trace or lack a variable, and for a store without a complete token.
    """
    check_inputs(ds, inputs, names)
    layers, heads = inputs.sizes["layer"], inputs.sizes["head"]
    rows: list[dict[str, Array]] = []
    first = np.full(len(names), NOWHERE)
    for layer in range(layers):
        step = start(layer)
        row: dict[str, Array] = {}
        for tokens, values in _blocks(ds, inputs, names, layer):
            bad = [~np.isfinite(x).reshape(*x.shape[:2], -1) for x in values.values()]
            add(row, step(tokens, values) | {"nonfinite": np.array([x.sum() for x in bad])})
            for i, x in enumerate(bad):
                for token, head, _ in np.argwhere(x)[:1]:
                    first[i] = min(first[i], (tokens[token] * layers + layer) * heads + head)
        rows.append(row)
    folded = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return folded | {"nonfinite": folded["nonfinite"].T, "first_min": first}


def check_inputs(ds: xr.Dataset, inputs: xr.Dataset, names: Sequence[str]) -> None:
    """Raise StoreError for inputs that are not of this trace or lack one of these, and for a store without a complete token."""
    missing = [name for name in names if name not in inputs]
    if missing:
        raise StoreError(f"expected the inputs {', '.join(names)}, found none of {', '.join(missing)}")
    sizes = [tuple(x.sizes[dim] for dim in ("layer", "token", "head")) for x in (ds, inputs)]
    if sizes[0] != sizes[1]:
        raise StoreError(f"expected inputs of the same trace, with {sizes[0]} layers, tokens and heads; found {sizes[1]}")
    if not complete_tokens(ds).any():
        raise StoreError(f"expected at least one complete token, found {ds.sizes['token']} tokens and none complete")


def main_edit(row: Mixer, edits: int) -> int:
    """Which of a token's edits the records speak of: the delta edit, the last of several, of RWKV-7 the first."""
    return 0 if row.address_last or row.gate == "in-context" else edits - 1


def other_edits(row: Mixer, edits: int) -> dict[str, int]:
    """A name for each of a token's edits beside the main one, and which of them it is."""
    main = main_edit(row, edits)
    return {"address edit" if row.address else f"edit {m + 1}": m for m in range(edits) if m != main}


def _blocks(ds: xr.Dataset, inputs: xr.Dataset, names: Sequence[str], layer: int) -> Iterator[tuple[Array, dict[str, Array]]]:
    complete, part = complete_tokens(ds), inputs[list(names)].isel(layer=layer)
    token_bytes = sum(x.dtype.itemsize * prod(n for dim, n in x.sizes.items() if dim != "token") for x in part.values())
    chunk = int(inputs.attrs.get("block_tokens", BLOCK))
    size = max(BYTES // token_bytes // chunk, 1) * chunk
    for begin in range(0, complete.size, size):
        keep = complete[begin : begin + size]
        if keep.any():
            block = part.isel(token=slice(begin, begin + size)).transpose("token", "head", ...).compute()
            yield begin + np.flatnonzero(keep), {name: block[name].values[keep] for name in names}
