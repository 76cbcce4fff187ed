"""Tallies side by side, as tables and figures take them, and the verdict on what was claimed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe.eigen.counts import edges, mean
from qed_probe.errors import InputError

Array = NDArray[Any]
TABLE = "qed-probe eigen table"
"""The attribute ``schema`` of what ``compare_eigen`` returns."""
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
CONFIDENCE = 0.95
FILL: dict[str, Any] = {"worst_token_text": "", "judged": False, **dict.fromkeys(("first_nonfinite", "steps", "seed"), -1)}
COUNTS = (
    "n",
    "nonfinite",
    "outside",
    "below_zero",
    "above_one",
    "beyond_one",
    "above",
    "counts",
    "violations",
    "real_violations",
)
PLAIN = ("lambda", "low", "high", "step_norm", "step_norm_base", "step_radius", "step_radius_base")
_OF_WORST = ("excess", "value", "unit", "prompt", "position", "layer", "head", "edit", "token_id", "token_text")


@dataclass(frozen=True)
class Verdict:
    """What was found of one claim in one run.

    ``violations`` are those with the keys as used, ``real`` those that renormalising does not remove, in ``violating`` of
    ``prompts`` whole prompts and ``heads`` heads; ``rounding`` is the largest of the others. Where none is real, with 95 %
    confidence a new prompt has one with a chance of at most ``chance`` = 1 − 0.05^(1/prompts), else NaN.
    """

    run: str
    claim: str
    verdict: Literal["holds", "fails", "cannot be told"]
    violations: int
    real: int
    rounding: float
    prompts: int
    violating: int
    heads: int
    chance: float


def compare_eigen(tallies: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Tallies by the names of their runs as one Dataset along ``run``.

    ``n``, ``nonfinite``, ``outside``, ``below_zero``, ``above_one``, ``beyond_one``, ``minimum``, ``maximum`` and ``mean`` by
    (run, quantity, layer, head); ``above`` by (…, margin); ``counts`` (run, quantity, layer, bin) between ``bin_edges``
    (quantity, edge); ``quantiles`` (run, quantity, layer, quantile), and of all layers ``quantiles_all`` and ``mean_all``;
    theory's ``low`` and ``high``, and ``lambda`` (run, layer, head); ``violations``, ``real_violations`` (run, claim, layer,
    head), ``rounding`` (run, claim), and whether a run was ``judged`` by a claim; whole ``prompts`` of ``prompts_all``,
    ``tokens`` (run), ``prompts_violating`` (run, claim); the worst (run, claim, worst); ``step_…`` (run, sample). What a run
    lacks is 0 of counts, else NaN. Raises InputError for no run and for one without a token.
    """
    if not tallies:
        raise InputError("expected at least one run to judge, found none")
    rows = [_row(name, ds) for name, ds in tallies.items()]
    fill = {name: FILL.get(str(name), 0 if x.dtype.kind == "i" else np.nan) for row in rows for name, x in row.variables.items()}
    joined: xr.Dataset = xr.concat(rows, "run", join="outer", fill_value=fill)
    order = {label: list(dict.fromkeys(x for row in rows for x in row[label].values.tolist())) for label in ("quantity", "claim")}
    joined = joined.sel(order).assign_coords(run=[*tallies])
    joined["bin_edges"] = (("quantity", "edge"), np.stack([edges(quantity) for quantity in order["quantity"]]))
    joined.attrs = {"schema": TABLE, "subject": ", ".join(dict.fromkeys(joined["mixer"].values.tolist()))}
    return joined


def verdicts(ds: xr.Dataset, rate: float = 0.05) -> list[Verdict]:
    """The verdict on every claim of every run, of those that it was counted for.

    A claim fails with the first real violation. Without one it holds if the chance that a new prompt has one is at most ``rate``
    with 95 % confidence, prompts being independent and their tokens not, and else cannot be told. Raises InputError where a
    record is not finite, for no verdict can rest on it, and for a rate that is none.
    """
    check_rate(rate)
    for run in ds["run"].values:
        bad, (layer, token, head) = int(ds["nonfinite"].sel(run=run).sum()), ds["first_nonfinite"].sel(run=run).values
        if bad:
            found = f"{bad:,} values that are NaN or infinite, first at layer {layer}, token {token}, head {head}"
            raise InputError(f"{run}: expected finite records, found {found}")
    rows = [ds.sel(run=run, claim=claim) for run in ds["run"].values for claim in ds["claim"].values]
    return [_verdict(row, rate) for row in rows if row["judged"]]


def check_rate(rate: float) -> None:
    """Raise InputError for a rate that is no chance."""
    if not 0 < rate < 1:
        raise InputError(f"rate: expected a chance between 0 and 1, found {rate:g}")


def _verdict(ds: xr.Dataset, rate: float) -> Verdict:
    real, prompts = ds["real_violations"], int(ds["prompts"])
    chance = 1 - (1 - CONFIDENCE) ** (1 / prompts) if prompts else 1.0
    verdict: Literal["holds", "fails", "cannot be told"] = "holds" if chance <= rate else "cannot be told"
    return Verdict(
        run=str(ds["run"].item()),
        claim=str(ds["claim"].item()),
        verdict="fails" if int(real.sum()) else verdict,
        violations=int(ds["violations"].sum()),
        real=int(real.sum()),
        rounding=float(ds["rounding"]),
        prompts=prompts,
        violating=int(ds["prompts_violating"]),
        heads=int((real > 0).sum()),
        chance=np.nan if int(real.sum()) else chance,
    )


def _row(name: str, ds: xr.Dataset) -> xr.Dataset:
    """One run of the table."""
    tokens = ds["prompt_tokens"].values
    if not tokens.sum():
        raise InputError(f"{name}: expected at least one token, found none")
    n, by_layer = ds["n"].values, ds["counts"].values.sum(1)
    low, high = (ds[x].values for x in ("minimum", "maximum"))
    ends = ds["bin_edges"].values
    quantiles = [_quantiles(c, e, *span) for c, e, span in zip(ds["counts"].values, ends, _spans(low, high, 2), strict=True)]
    overall = [_quantiles(c[None], e, *span) for c, e, span in zip(by_layer, ends, _spans(low, high, (1, 2)), strict=True)]
    sums = ds["sum_high"].values, ds["sum_low"].values, n
    per_head, per_claim = ("quantity", "layer", "head"), ("claim",)
    found = ds[[*COUNTS, *PLAIN, *(f"worst_{x}" for x in _OF_WORST)]].assign(
        minimum=(per_head, np.where(n > 0, low, np.nan)),
        maximum=(per_head, np.where(n > 0, high, np.nan)),
        mean=(per_head, mean(*sums)),
        mean_all=(("quantity",), mean(*sums, axes=(1, 2))),
        quantiles=(("quantity", "layer", "quantile"), np.stack(quantiles)),
        quantiles_all=(("quantity", "quantile"), np.concatenate(overall)),
        rounding=(per_claim, np.where(np.isfinite(ds["rounding"].values), ds["rounding"].values, np.nan)),
        judged=(per_claim, np.ones(ds.sizes["claim"], bool)),
        prompts=int((tokens == ds["prompt_length"].values).sum()),
        prompts_all=tokens.size,
        tokens=int(tokens.sum()),
        prompts_violating=(per_claim, (ds["prompt_violations"].values > 0).sum(1)),
        first_nonfinite=(("place",), _first_nonfinite(ds)),
    )
    about: dict[str, Any] = {"mixer": ("run", [str(ds.attrs["mixer"])])}
    about |= {label: ("run", [int(ds.attrs.get(label, -1))]) for label in ("steps", "seed")}
    known: dict[str, Any] = {"head": np.arange(ds.sizes["head"]), "sample": np.arange(ds.sizes["sample"])}
    known |= {"place": ["layer", "token", "head"], "quantile": list(QUANTILES)}
    found = found.assign_coords(known).expand_dims(run=[name]).assign_coords(about)
    found.attrs = {}
    return found


def _spans(low: Array, high: Array, axes: int | tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Smallest and largest value of each quantity, over heads or over all, ``[layer or 1]`` each."""
    return [(np.atleast_1d(a), np.atleast_1d(b)) for a, b in zip(low.min(axes), high.max(axes), strict=True)]


def _quantiles(counts: Array, ends: Array, low: Array, high: Array) -> Array:
    """``QUANTILES`` of what is counted in bins ``[layer, bin]``, straight lines within a bin, between the extremes."""
    found = np.full((len(counts), len(QUANTILES)), np.nan)
    for layer, row in enumerate(counts):
        if row.any():
            inner = np.clip(ends, low[layer], high[layer])
            share = np.concatenate([[0], np.cumsum(row)]) / row.sum()
            there = np.flatnonzero(row)
            at = np.unique(np.concatenate([there, there + 1]))
            found[layer] = np.interp(QUANTILES, share[at], inner[at])
    return np.where(np.abs(found) < np.finfo(np.float32).tiny, 0, found)


def _first_nonfinite(ds: xr.Dataset) -> Array:
    """Layer, packed token and head of the first value that is not finite; −1 if there is none."""
    if not ds["nonfinite"].values.any():
        return np.full(3, -1)
    first = ds["first_nonfinite"].values.min(0)
    layer = int(first.argmin())
    token, head = divmod(int(first[layer]), ds.sizes["head"])
    return np.array([ds["layer"].values[layer], token, head])
