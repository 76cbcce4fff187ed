"""One prompt's text with a record's value at each token."""

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe.analyses.blocks import Field, complete_tokens, label
from qed_probe.errors import InputError, StoreError

LONGEST, NEAR = 3000, 120
QUANTILE = 0.99
PLAIN = ("", "noise")
FIELDS: dict[str, Field] = {
    "value": (("token",), "1", ""),
    "text": (("token",), "1", "text of the token"),
    "role": (("token",), "1", "role of the token in the task"),
    "skipped": (("token",), "count", "tokens left out just before this one"),
    "top": ((), "1", "99 % quantile of |value|: a colour scale that ends here is not ruled by one huge value"),
}


def token_strip(ds: xr.Dataset, record: str, prompt: int = 0, layer: int | None = None, head: int | None = None) -> xr.Dataset:
    """``record`` over the tokens of one prompt, at one layer (the last if None) and head (the mean over heads if None).

    Needs ``token_text``; ``role`` is "" where the task knows none. Of a prompt longer than 3000 characters the tokens near a role
    other than noise are kept, or, if those are none or still too many, the end; ``skipped`` counts what is left out before each
    token, the attribute ``prompt_tokens`` all tokens of the prompt, ``nonfinite`` the values that are no number.

    Raises StoreError if the store lacks the record or the text, InputError if it has no such prompt, layer or head.
    """
    for name in (record, "token_text"):
        if name not in ds:
            raise StoreError(f"expected {name}, found a store without it")
    start, stop = _tokens_of(ds, prompt)
    layers, heads = ds["layer"].values, np.arange(ds.sizes["head"])
    layer = int(layers[-1]) if layer is None else layer
    if layer not in layers or (head is not None and head not in heads):
        raise InputError(f"expected a layer of {layers.tolist()} and a head of {heads.tolist()}, found {layer} and {head}")
    complete = start + np.flatnonzero(complete_tokens(ds)[start:stop])
    if not complete.size:
        raise StoreError(f"expected a prompt with complete tokens, found none complete in prompt {prompt}")
    text = np.array(ds["token_text"].isel(token=complete).values.tolist())
    role = np.array(ds["role"].isel(token=complete).values.tolist()) if "role" in ds else np.full(len(text), "")
    keep = shown(text, role)
    kept = complete[keep]
    part = ds[record].isel(layer=int(np.flatnonzero(layers == layer)[0]), token=kept).transpose("token", "head")
    value = (part.isel(head=head) if head is not None else part.mean("head", skipna=False)).values
    finite = np.abs(value[np.isfinite(value)]).astype(float)
    top = np.array(np.quantile(finite, QUANTILE) if finite.size else np.nan)
    names = [str(part.attrs[name]) for name in ("formula", "long_name") if part.attrs.get(name)]
    return label(
        ds,
        [record],
        {"value": value, "text": text[keep], "role": role[keep], "skipped": np.diff(kept, prepend=start - 1) - 1, "top": top},
        FIELDS | {"value": (("token",), str(part.attrs.get("units", "1")), ", ".join(names) or record)},
        {"token": kept},
        record=record,
        prompt=prompt,
        prompts=ds.sizes["boundary"] - 1,
        prompt_tokens=stop - start,
        where=f"layer {layer}, " + ("mean over heads" if head is None else f"head {head}"),
        nonfinite=len(value) - len(finite),
    )


def shown(text: NDArray[np.str_], role: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Which tokens of a prompt a strip has room for."""
    sizes = np.char.str_len(text)
    keep = np.ones(len(text), dtype=np.bool_)
    marks = np.append(0, np.cumsum(~np.isin(role, PLAIN)))
    if sizes.sum() > LONGEST and marks[-1]:
        at = np.arange(len(text))
        keep = marks[np.minimum(at + NEAR + 1, len(text))] > marks[np.maximum(at - NEAR, 0)]
    after = np.cumsum((sizes * keep)[::-1])[::-1]
    keep &= after <= LONGEST
    keep[-1] = True
    return keep


def _tokens_of(ds: xr.Dataset, prompt: int) -> tuple[int, int]:
    ends = ds["cu_seqlens"].values
    if not 0 <= prompt < len(ends) - 1:
        raise InputError(f"expected a prompt from 0 to {len(ends) - 2}, found {prompt}")
    return int(ends[prompt]), int(ends[prompt + 1])
