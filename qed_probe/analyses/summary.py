"""The table that a trace ends with: one row a layer."""

import numpy as np
import xarray as xr

from qed_probe.analyses import correction, decay
from qed_probe.analyses.blocks import Array, Field, all_finite, fold, label_folded, mean

MEANS: dict[str, Field] = {
    "rho": (("layer",), "1", "mean of ρ = qᵀk"),
    "rho_size": (("layer",), "1", "mean of |ρ|"),
    "eigenvalue": (("layer",), "1", "mean of e = 1 − aᵀk"),
    "correction_share": (("layer",), "1", "mean of the correction's size over the output's"),
    "correction_across": (("layer",), "1", "mean of the correction's part across the output"),
    "budget_decay": (("layer",), "1", "mean part of the memory lost to decay"),
    "budget_delta": (("layer",), "1", "mean part of the memory replaced by the delta edit"),
    "budget_erase": (("layer",), "1", "mean part of the memory erased at the address"),
}
FIELDS: dict[str, Field] = MEANS | {
    "eigenvalue_min": (("layer",), "1", "smallest e"),
    "eigenvalue_max": (("layer",), "1", "largest e"),
    "half_life": (("layer",), "token", "half-life ln ½ / mean g, over tokens, heads and channels"),
    "accuracy": ((), "1", "part of the prompts answered right"),
    "scored": ((), "count", "prompts whose answer was scored"),
}
RECORDS = ("rho", "eigenvalue", "budget_decay", "budget_delta", "budget_erase", "log_decay")


def summary(ds: xr.Dataset) -> xr.Dataset:
    """Per layer, over tokens and heads: means of ρ, |ρ|, e (with its extremes), correction share and budgets, and the half-life.

    What the store cannot carry is absent. Shares are per unit λ where every λ is 0 (attribute ``per_unit_lambda``). ``accuracy``
    is there where the task scored its prompts. Non-finite values are left out of the means, and counted and located. Raises
    StoreError if there is not one complete token.
    """
    names = [name for name in RECORDS if name in ds]
    shared = all(name in ds for name in correction.NAMES)
    per_unit = correction.no_strength(ds)
    names += [name for name in correction.NAMES if shared and name not in names]
    folded = fold(ds, names, lambda _: lambda _, records: layer_sums(records, shared, per_unit))
    values = {name: mean(folded[name], folded[f"{name}_n"]) for name in MEANS if name in folded}
    values |= {name: folded[name] for name in ("eigenvalue_min", "eigenvalue_max") if name in folded}
    if "log_decay" in folded:
        values["half_life"] = decay.half_life_of(mean(folded["log_decay"], folded["log_decay_n"]))
    if "correct" in ds:
        scored = ds["correct"].values[np.isfinite(ds["correct"].values)]
        values["scored"] = np.array(scored.size)
        values["accuracy"] = np.array(scored.mean() if scored.size else np.nan)
    return label_folded(ds, names, folded, values, FIELDS, {}, per_unit_lambda=int(per_unit))


def layer_sums(records: dict[str, Array], shared: bool, per_unit: bool) -> dict[str, Array]:
    """Sums and counts of what ``summary`` averages, of one block ``[token, head]``."""
    x = {name: value for name, value in records.items() if name in MEANS or name == "log_decay"}
    if "rho" in x:
        x["rho_size"] = np.abs(x["rho"])
    if shared:
        x["correction_share"], x["correction_across"] = correction.shares(records, per_unit)
    sums: dict[str, Array] = {}
    for name, value in x.items():
        if not all_finite(value):
            value = value[np.isfinite(value) | (np.isneginf(value) & (name == "log_decay"))]
        sums[name] = value.sum(dtype=np.float64)
        sums[f"{name}_n"] = np.array(value.size)
        if name == "eigenvalue":
            sums["eigenvalue_min"] = value.min(initial=np.inf)
            sums["eigenvalue_max"] = value.max(initial=-np.inf)
    return sums
