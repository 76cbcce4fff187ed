"""How much of a layer's output comes from the added direction, and how much of that an output norm lets through."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, all_finite, fold, label_folded, mean, over_tokens

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
    output is 0 have no share and are counted apart. Shares are float32; medians come from counts over 128 bins an octave and are
    right to 0.4 %, from 1e-9 to 65536. Raises StoreError if a record is not there.

    cos is recorded between the correction c = −λρS̄ᵀd and the output y₀ = y − c without it, and share is taken of ‖y‖. Together
    they give just what is wanted: c and y span with y₀ the same parallelogram, so ‖c‖‖y₀‖ sin(c, y₀) = ‖y‖‖y₀‖ sin(y, y₀), and
    share·√(1 − cos²) = sin(y, y₀), the sine of the angle by which the correction turns the output. A norm that follows undoes
    every change of length and lets this through. The cosine against y would not do: ‖c‖ sin(c, y)/‖y‖ = sin(y, y₀)·‖y₀‖/‖y‖
    exceeds any angle where the correction shrinks the output. Per unit λ, y₀ = y and it is the angle's rate of change. cos is
    float32: √(1 − cos²) below 4e-4 is rounding.
    """
    per_unit = no_strength(ds)
    folded = fold(ds, NAMES, lambda _: lambda _, records: share_sums(shares(records, per_unit), records["output_norm"] == 0))
    values = {name: folded[name] for name in ("n", "zero_output")}
    for i, name in enumerate(("share", "across")):
        values[f"{name}_mean"] = mean(folded["total"][:, i], folded["n"])
        values[f"{name}_median"] = median(folded["counts"][:, i])
    return label_folded(ds, NAMES, folded, values, FIELDS, {}, per_unit_lambda=int(per_unit))


def no_strength(ds: xr.Dataset) -> bool:
    """Whether every λ is 0, so that the correction has a size only per unit λ."""
    return "lambda" not in ds or not np.any(ds["lambda"].values)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def shares(records: dict[str, Array], per_unit: bool) -> Array:
    """Share and across of every token ``[2, token, head]``, not finite where the output is 0; see ``correction_share``."""
    size = np.abs(records["rho"]) * records["read_norm"] if per_unit else records["correction_norm"]
    cosine = records["correction_cosine"]
    found = np.empty((2, *size.shape), size.dtype)
    np.divide(size, records["output_norm"], out=found[0])
    np.multiply(found[0], np.sqrt(np.maximum((1 - cosine) * (1 + cosine), 0)), out=found[1])
    return found


def share_sums(x: Array, silent: Array) -> dict[str, Array]:
    """What ``correction_share`` adds up of both shares ``[2, token, head]`` of one block."""
    good = np.ones(silent.shape, bool) if all_finite(x) else np.isfinite(x).all(0)
    return {
        "n": np.count_nonzero(good, 0),
        "zero_output": np.count_nonzero(silent, 0),
        "total": np.stack([over_tokens(each) for each in (x if good.all() else np.where(good, x, 0))]),
        "counts": fine_counts(x, np.broadcast_to(good, x.shape)),
    }


def fine_counts(x: Array, good: Array) -> Array:
    """Counts ``[row, head, bin]`` of values ≥ 0 ``[row, token, head]``, 128 bins an octave; bin 0 holds 0 and all below 2⁻³⁰."""
    R, _, H = x.shape
    size = OCTAVES * PER_OCTAVE + 1
    # Exponent and first seven bits of a float32's fraction number such bins by themselves.
    place = (np.asarray(x, np.float32).view(np.int32) >> 16) - ((127 + LOWEST_OCTAVE) * PER_OCTAVE - 1)
    cell = np.clip(place, 0, size - 1) + size * np.arange(R * H).reshape(R, 1, H)
    return np.bincount(cell.ravel() if good.all() else cell[good], minlength=R * H * size).reshape(R, H, size)


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
