"""What was found, as rows of tables and as plain numbers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xarray as xr

from qed_probe.eigen.counts import MARGINS, SIZES
from qed_probe.eigen.table import Verdict

Row = list[str]
CAVEAT = "e speaks of the erase factor M_t alone, never of M_tD_t, which a step does to the memory."
EIGENVALUES = ("n", "min", "1 %", "median", "mean", "99 %", "max", "< 0", "> 1", "|e| > 1", "outside theory")
SIZED = ("n", "median", "mean", "99 %", "max", *(f"> {margin:g}" for margin in MARGINS))
LAYERS = ("theory", "λ", "e min", "mean", "max", "< 0", "> 1", "|e| > 1", "effect mean", "max", "‖M‖₂ − 1 max")
OFFENDERS = ("claim", "prompt", "position", "token", "layer", "head", "edit", "λ", "as used", "unit key", "beyond the bound by")


def eigenvalue_rows(ds: xr.Dataset) -> list[Row]:
    """Each run's eigenvalues over all layers and heads, in the columns of ``EIGENVALUES``."""
    counts = ("below_zero", "above_one", "beyond_one", "outside")
    return [
        [*_named(run, ds, quantity), *_spread(part, ("min", 0.01, 0.5, "mean", 0.99, "max")), *_totals(part, counts)]
        for run, quantity, part in _cells(ds, sizes=False)
    ]


def size_rows(ds: xr.Dataset) -> list[Row]:
    """Each run's sizes, in the columns of ``SIZED``."""
    return [
        [*_named(run, ds, quantity), *_spread(part, (0.5, "mean", 0.99, "max"))]
        + [f"{int(part['above'].sel(margin=margin).sum()):,}" for margin in ds["margin"].values]
        for run, quantity, part in _cells(ds, sizes=True)
    ]


def layer_rows(run: xr.Dataset) -> list[Row]:
    """One run layer by layer, in the columns of ``LAYERS``."""
    rows = []
    for layer in run["layer"].values:
        at = run.sel(layer=layer)
        e, effect, norm = (at.sel(quantity=name) for name in ("eigenvalue", "projection_effect", "norm_excess"))
        ends = f"{_short(float(at['low'].min()))} to {_short(float(at['high'].max()))}"
        strengths = [float(x) for x in (at["lambda"].min(), at["lambda"].max())]
        extremes = float(e["minimum"].min()), float(e["mean"].mean()), float(e["maximum"].max())
        counts = _totals(e, ("below_zero", "above_one", "beyond_one"))
        sizes = float(effect["mean"].mean()), float(effect["maximum"].max()), float(norm["maximum"].max())
        rows.append([str(layer), ends, "–".join(map(_short, strengths)), *map(_short, extremes), *counts, *map(_short, sizes)])
    return rows


def offender_rows(ds: xr.Dataset, most: int) -> list[Row]:
    """The worst of each claim, or, where nothing violates it, what comes nearest, in the columns of ``OFFENDERS``."""
    rows = []
    for run in ds["run"].values:
        for claim in ds["claim"].values:
            at = ds.sel(run=run, claim=claim)
            for i in np.flatnonzero(np.isfinite(at["worst_excess"].values))[:most]:
                x = {name: at[f"worst_{name}"].values[i].item() for name in ("prompt", "position", "layer", "head", "edit")}
                lam = float(at["lambda"].sel(layer=x["layer"], head=x["head"]))
                values = [at[f"worst_{name}"].values[i] for name in ("value", "unit", "excess")]
                text = f"{at['worst_token_text'].values[i]!s:.20}"
                place = [str(x["prompt"]), str(x["position"]), f"'{text}'" if text else f"id {at['worst_token_id'].values[i]}"]
                named = [str(run)] * (ds.sizes["run"] > 1) + [str(claim)]
                rows.append([*named, *place, *(str(x[n]) for n in ("layer", "head", "edit")), _short(lam), *map(_exact, values)])
    return rows


def run_line(run: xr.Dataset) -> str:
    """What one run is, and how much of its prompts was seen."""
    seen, known = int(run["prompts"]), int(run["prompts_all"])
    prompts = f"{seen:,}" if seen == known else f"{seen:,} of {known:,}"
    return f"mixer {run['mixer'].item()}, {prompts} prompts, {int(run['tokens']):,} tokens"


def verdict_line(found: Verdict, rate: float) -> str:
    """One verdict in words, with what it rests on."""
    if found.real:
        why = f"{found.real:,} real violations in {found.violating:,} of {found.prompts:,} prompts, at {found.heads:,} heads"
    else:
        why = f"no real violation in {found.prompts:,} prompts: with 95 % confidence a new one has some with a chance below "
        why += f"{found.chance:.2%}, asked for {rate:.2%}"
    lost = found.violations - found.real
    why += f"; {lost:,} by rounding alone, by {found.rounding:.2g} at most" if lost else ""
    return f"{found.claim}: {found.verdict}: {why}"


def step_line(run: xr.Dataset) -> str:
    """What the sample says of whole steps; empty without one."""
    steps = {name: run[name].values[np.isfinite(run[name].values)] for name in ("step_norm", "step_norm_base", "step_radius")}
    if not (n := len(steps["step_norm"])):
        return ""
    grown, without = (int((steps[name] > MARGINS[0]).sum()) for name in ("step_norm", "step_norm_base"))
    return (
        f"Of {n:,} sampled steps ‖M_tD_t‖₂ − 1 is {steps['step_norm'].max():.3g} at most and above {MARGINS[0]:g} in {grown:,} "
        f"({without:,} without the added direction); the spectral radius of M_tD_t is {steps['step_radius'].max():.5g} at most."
    )


def report(ds: xr.Dataset, found: Sequence[Verdict]) -> dict[str, Any]:
    """Everything but histograms as plain numbers and texts, NaN and infinity as null: verdicts, runs and the worst."""
    kept = ds.drop_vars(["counts", "bin_edges", *(name for name in ds if str(name).startswith("step_"))])
    return {
        "note": CAVEAT,
        "verdicts": [{name: _plain(x) for name, x in asdict(verdict).items()} for verdict in found],
        "coords": {str(name): _plain(x.values.tolist()) for name, x in kept.coords.items() if name != "sample"},
        "data": {str(name): {"dims": list(x.dims), "values": _plain(x.values.tolist())} for name, x in kept.data_vars.items()},
        "steps": {str(run): step_line(ds.sel(run=run)) for run in ds["run"].values},
    }


def _cells(ds: xr.Dataset, *, sizes: bool) -> list[tuple[str, str, xr.Dataset]]:
    """Runs and what they have of these quantities."""
    pairs = [(run, quantity) for run in ds["run"].values for quantity in ds["quantity"].values if (quantity in SIZES) == sizes]
    cells = [(str(run), str(quantity), ds.sel(run=run, quantity=quantity)) for run, quantity in pairs]
    return [cell for cell in cells if int(cell[2]["n"].sum())]


def _named(run: str, ds: xr.Dataset, quantity: str) -> Row:
    return [run] * (ds.sizes["run"] > 1) + [quantity.replace("_", " ")]


def _spread(part: xr.Dataset, which: Sequence[float | str]) -> Row:
    found = {"min": float(part["minimum"].min()), "max": float(part["maximum"].max()), "mean": float(part["mean_all"])}
    shown = [found[x] if isinstance(x, str) else float(part["quantiles_all"].sel(quantile=x)) for x in which]
    return [f"{int(part['n'].sum()):,}", *map(_short, shown)]


def _totals(part: xr.Dataset, names: Sequence[str]) -> Row:
    return [f"{int(part[name].sum()):,}" for name in names]


def _short(x: float) -> str:
    return f"{x:.4g}"


def _exact(x: float) -> str:
    return f"{x:.9g}"


def _plain(x: Any) -> Any:  # noqa: ANN401 - numbers in lists of any depth
    if isinstance(x, list):
        return [_plain(each) for each in x]
    return None if isinstance(x, float) and not np.isfinite(x) else x
