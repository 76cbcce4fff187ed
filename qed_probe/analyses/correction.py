"""How much of a layer's output comes from the added direction, and how much of that an output norm lets through."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, fold, label_folded, mean

NAMES = ("rho", "read_norm", "output_norm", "correction_norm", "correction_cosine")
LOWEST_OCTAVE, OCTAVES, PER_OCTAVE = -30, 46, 128

FIELDS: dict[str, Field] = {
    "share_mean": (("layer", "head"), "1", "mean of the correction's size over the output's"),
    "share_median": (("layer", "head"), "1", "median of the correction's size over the output's"),
    "across_mean": (("layer", "head"), "1", "mean of the correction's part across the output"),
    "across_median": (("layer", "head"), "1", "median of the correction's part across the output"),
    "n": (("layer", "head"), "count", "tokens whose share is finite"),
    "zero_output": (("layer", "head"), "count", "tokens with ‖y‖ = 0, left out"),
}


def correction_share(ds: xr.Dataset) -> xr.Dataset:
    """Mean and median over tokens of share = ‖λρS̄ᵀd‖/‖y‖ and across = share·√(1 − cos²), for each layer and head.

    Where every λ is 0 both are taken per unit λ, with |ρ|·‖S̄ᵀd‖ for the correction (attribute ``per_unit_lambda``). Tokens whose
    output is 0 have no share and are counted apart. Means are exact; medians come from counts over 128 bins an octave and are
    right to 0.4 %, from 1e-9 to 65536. Raises StoreError if a record is not there.

    cos is recorded between the correction c = −λρS̄ᵀd and the output y₀ = y − c without it, and share is taken of ‖y‖. Together
    they give just what is wanted: c and y span with y₀ the same parallelogram, so ‖c‖‖y₀‖ sin(c, y₀) = ‖y‖‖y₀‖ sin(y, y₀), and
    share·√(1 − cos²) = sin(y, y₀), the sine of the angle by which the correction turns the output. A norm that follows undoes
    every change of length and lets this through. The cosine against y would not do: ‖c‖ sin(c, y)/‖y‖ = sin(y, y₀)·‖y₀‖/‖y‖
    exceeds any angle where the correction shrinks the output. Per unit λ, y₀ = y and it is the angle's rate of change. cos is
    float32: √(1 − cos²) below 4e-4 is rounding.
    """
    per_unit = no_strength(ds)
    folded = fold(ds, NAMES, lambda records: share_sums(*shares(records, per_unit), records["output_norm"] == 0))
    values = {name: folded[name] for name in ("n", "zero_output")}
    for name in ("share", "across"):
        values[f"{name}_mean"] = mean(folded[name], folded["n"])
        values[f"{name}_median"] = median(folded[f"{name}_counts"])
    return label_folded(ds, NAMES, folded, values, FIELDS, {}, per_unit_lambda=int(per_unit))


def no_strength(ds: xr.Dataset) -> bool:
    """Whether every λ is 0, so that the correction has a size only per unit λ."""
    return "lambda" not in ds or not np.any(ds["lambda"].values)


def shares(records: dict[str, Array], per_unit: bool) -> tuple[Array, Array]:
    """Share and across of every token, float64, NaN where the output is 0; see ``correction_share``."""
    x = {name: value.astype(np.float64) for name, value in records.items()}
    size = np.abs(x["rho"]) * x["read_norm"] if per_unit else x["correction_norm"]
    share = np.divide(size, x["output_norm"], out=np.full(size.shape, np.nan), where=x["output_norm"] != 0)
    cosine = x["correction_cosine"]
    return share, share * np.sqrt(np.clip((1 - cosine) * (1 + cosine), 0, None))


def share_sums(share: Array, across: Array, silent: Array) -> dict[str, Array]:
    """What ``correction_share`` adds up, of one block ``[layer, token, head]``."""
    good = np.isfinite(share) & np.isfinite(across)
    return {
        "n": good.sum(1),
        "zero_output": silent.sum(1),
        "share": np.where(good, share, 0).sum(1),
        "across": np.where(good, across, 0).sum(1),
        "share_counts": fine_counts(share, good),
        "across_counts": fine_counts(across, good),
    }


def fine_counts(x: Array, good: Array) -> Array:
    """Counts ``[layer, head, bin]`` of non-negative values, 128 bins an octave; bin 0 holds 0 and all below 2⁻³⁰."""
    L, _, H = x.shape
    size = OCTAVES * PER_OCTAVE + 1
    fraction, exponent = np.frexp(np.where(good, x, 0))
    place = np.floor((exponent - 1 - LOWEST_OCTAVE + 2 * fraction - 1) * PER_OCTAVE).astype(np.int64) + 1
    place = np.clip(np.where(fraction == 0, 0, place), 0, size - 1)
    cell = np.arange(L)[:, None, None] * H + np.arange(H)
    return np.bincount((cell * size + place)[good], minlength=L * H * size).reshape(L, H, size)


def median(counts: Array) -> Array:
    """The centre of the bin that holds the middle value (the lower of two), NaN where nothing was counted."""
    return quantile(counts, 0.5)


def quantile(counts: Array, level: float) -> Array:
    """The centre of the bin below or in which this part of the values lies, NaN where nothing was counted; ``[..., bin]`` in."""
    total = counts.sum(-1)
    place = (counts.cumsum(-1) >= level * total[..., None]).argmax(-1)
    octave, step = np.divmod(place - 1, PER_OCTAVE)
    value = np.ldexp(1 + (step + 0.5) / PER_OCTAVE, octave + LOWEST_OCTAVE)
    return np.where(total > 0, np.where(place == 0, 0, value), np.nan)
