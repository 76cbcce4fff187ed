"""One prompt's text with a record's value at each token."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Field, complete_tokens, label
from qed_probe.errors import InputError, StoreError

LONGEST = 3000
FIELDS: dict[str, Field] = {
    "value": (("token",), "1", ""),
    "text": (("token",), "1", "text of the token"),
    "role": (("token",), "1", "role of the token in the task"),
}


def token_strip(ds: xr.Dataset, record: str, prompt: int = 0, layer: int | None = None, head: int | None = None) -> xr.Dataset:
    """``record`` over the tokens of one prompt, at one layer (the last if None) and head (the mean over heads if None).

    Needs ``token_text``; ``role`` is "" where the task knows none. Of a prompt longer than 3000 characters the end is kept, and
    the attribute ``tokens_before`` counts the rest; ``nonfinite`` counts the values that are no number. Raises StoreError if the
    store lacks the record or the text, InputError if it has no such prompt, layer or head.
    """
    for name in (record, "token_text"):
        if name not in ds:
            raise StoreError(f"expected {name}, found a store without it")
    start, stop = _tokens_of(ds, prompt)
    layers, heads = ds["layer"].values, np.arange(ds.sizes["head"])
    layer = int(layers[-1]) if layer is None else layer
    if layer not in layers or (head is not None and head not in heads):
        raise InputError(f"expected a layer of {layers.tolist()} and a head of {heads.tolist()}, found {layer} and {head}")
    kept = start + np.flatnonzero(complete_tokens(ds)[start:stop])
    if not kept.size:
        raise StoreError(f"expected a prompt with complete tokens, found none complete in prompt {prompt}")
    text = [str(x) for x in ds["token_text"].isel(token=kept).values]
    after = np.cumsum([len(x) for x in text[::-1]])[::-1]
    first = min(int((after > LONGEST).sum()), len(text) - 1)
    part = ds[record].isel(layer=int(np.flatnonzero(layers == layer)[0]), token=kept[first:]).transpose("token", "head")
    value = (part.isel(head=head) if head is not None else part.mean("head", skipna=False)).values
    role = [str(x) for x in ds["role"].isel(token=kept[first:]).values] if "role" in ds else [""] * len(value)
    long_name = str(part.attrs.get("formula") or part.attrs.get("long_name", record))
    where = f"layer {layer}, " + ("mean over heads" if head is None else f"head {head}")
    return label(
        ds,
        {"value": value, "text": np.array(text[first:]), "role": np.array(role)},
        FIELDS | {"value": (("token",), str(part.attrs.get("units", "1")), long_name)},
        {"token": kept[first:]},
        record=record,
        prompt=prompt,
        where=where,
        tokens_before=first,
        nonfinite=int((~np.isfinite(value)).sum()),
    )


def _tokens_of(ds: xr.Dataset, prompt: int) -> tuple[int, int]:
    ends = ds["cu_seqlens"].values
    if not 0 <= prompt < len(ends) - 1:
        raise InputError(f"expected a prompt from 0 to {len(ends) - 2}, found {prompt}")
    return int(ends[prompt]), int(ends[prompt + 1])
