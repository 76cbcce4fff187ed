"""The first prompt's text with what the read that predicts its answer took from each token."""

import numpy as np
import xarray as xr

from qed_probe.analyses.strip import shown
from qed_probe.errors import StoreError

FAR = 16
"""Tokens beyond which a source is far."""


def farthest_head(ds: xr.Dataset) -> tuple[int, int]:
    """The layer and head whose reads by the query, that predict the answers, take most from more than 16 tokens back.

    Takes what ``inspect_memory`` returns; of heads that read nothing in the first prompt, or whose inputs are not finite there,
    only if all are such. Raises StoreError if it has no sources.
    """
    if "share_lag" not in ds:
        raise StoreError("expected a table with sources, found one without share_lag")
    mine = ds.sel(probe="query").transpose("layer", "head", ...)
    far = mine["share_lag"].sel(lag=slice(FAR, None)).sum("lag").where(mine["share_token"].notnull().any("source"), -np.inf)
    layer, head = np.unravel_index(int(np.argmax(far.values)), far.shape)
    return int(ds["layer"][layer]), int(ds["head"][head])


def source_strip(ds: xr.Dataset, probe: str = "query", layer: int | None = None, head: int | None = None) -> xr.Dataset:
    """What ``figures.draw_token_strip`` draws: shares ⟨c_j, r⟩/‖r‖² of the first prompt's read by ``probe``, token by token.

    At ``farthest_head`` where no layer and head are given. Of a long text the tokens are shown that ``token_strip`` shows. Raises
    StoreError if the table has no sources or no texts.
    """
    found = farthest_head(ds)
    if "source_text" not in ds.coords:
        raise StoreError("expected a table with the first prompt's text, found one without source_text")
    layer, head = found[0] if layer is None else layer, found[1] if head is None else head
    text, role = ds["source_text"].values, np.where(ds["source_role"].values == "text", "", ds["source_role"].values)
    kept = np.flatnonzero(shown(text, role))
    value = ds["share_token"].sel(probe=probe, layer=layer, head=head).values[kept]
    what = {"query": "read by the query, y", "direction": "read by the direction, S̄ᵀd"}[probe]
    last = len(text) == ds.attrs["first_prompt_tokens"]
    nothing = np.isnan(value).all() and not ds["nonfinite"].sel(layer=layer)
    return xr.Dataset(
        {
            "value": ("token", value, {"long_name": f"share of what is {what}: ⟨c, r⟩/‖r‖²", "units": "1"}),
            "text": ("token", text[kept]),
            "role": ("token", role[kept]),
            "skipped": ("token", np.diff(kept, prepend=-1) - 1),
            "top": ((), np.abs(value).max()),
        },
        attrs={
            "subject": ds.attrs["subject"],
            "where": f"layer {layer}, head {head}, at the {'last token' if last else 'token that predicts the answer'}"
            + ", which reads nothing" * bool(nothing),
            "prompt": 0,
            "prompts": ds.attrs["prompts"],
            "prompt_tokens": len(text),
            "nonfinite": int((~np.isfinite(value)).sum()),
        },
    )
