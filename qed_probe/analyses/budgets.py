"""How strongly decay, delta edit and address erase are opened, as shares of their sum, by how much of the memory is kept."""

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, fold, label_folded, mean
from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS

NAMES = ("retention", "budget_decay", "budget_delta")
BUDGETS = ("decay", "delta", "erase")
OVER = {"share": (), "layer_share": (1,), "bin_share": (0,), "total_share": (0, 1)}
"""What each variable of shares is summed over, of (layer, bin)."""

BINS = 10
ROUNDING = 0.01
"""By how much β may pass 1 without a reflection: ‖k‖² of a key rounded to bfloat16 is off by up to half of it."""

FIELDS: dict[str, Field] = {
    "share": (("kind", "layer", "bin", "budget"), "1", "share of the budgets' sum"),
    "layer_share": (("kind", "layer", "budget"), "1", "share of the budgets' sum, all ᾱ"),
    "bin_share": (("kind", "bin", "budget"), "1", "share of the budgets' sum, all layers"),
    "total_share": (("kind", "budget"), "1", "share of the budgets' sum, all ᾱ and layers"),
    "n": (("layer", "bin"), "count", "token-heads whose budgets are finite and not all 0"),
    "zero": (("layer",), "count", "token-heads without any budget, left out"),
    "reflected": (("layer",), "count", "token-heads with β > 1.01 among them: an edit that reflects what it reads"),
    "edges": (("edge",), "1", "retention ᾱ"),
}


def gate_budgets(ds: xr.Dataset, bins: int = BINS) -> xr.Dataset:
    """Shares of b_D = 1 − ᾱ, b_Δ = ᾱβ and b_E = ᾱγ in their sum, by bins of the retention ᾱ, for each layer and all together.

    ᾱ is the mean decay factor over channels, β the main edit's gate (bᵀ(k⊙k) where it has channels) and γ the address edit's, 0
    without an address. ``bins`` are equally wide over [0, 1], each with its lower edge, the last with 1 too: of ten, it is EDA's
    ᾱ ≥ 0.9. Shares are of two kinds: Σ b / Σ Σ b over the token-heads ("of sums"), and the mean over them of b / Σ b ("of
    tokens"); NaN where there is none. A token-head with Σ b = 0 has no share of the second kind and adds nothing to the first:
    counted apart, as are those with β > 1.

    Needs ``retention``, ``budget_decay`` and ``budget_delta``, and takes ``budget_erase``. Raises StoreError if a record is not
    there, InputError for less than one bin. Source: EDA arXiv 2606.26560, Eq. 23–24 and Fig. 2a. A budget is no energy: what an
    edit removes depends on what lies where it reads. And none of the three contains QED's λd, for which dᵀk = 0.
    """
    if bins < 1:
        raise InputError(f"bins: expected 1 or more, found {bins}")
    names = [*NAMES, *(["budget_erase"] if "budget_erase" in ds else [])]
    folded = fold(ds, names, lambda _: lambda _, records: budget_sums(records, bins))
    values = {name: _shares(folded, axes) for name, axes in OVER.items()}
    values |= {name: folded[name] for name in ("n", "zero", "reflected")} | {"edges": np.linspace(0, 1, bins + 1)}
    coords = {"kind": ["of sums", "of tokens"], "budget": list(BUDGETS)}
    return label_folded(ds, names, folded, values, FIELDS, coords, delta_edits=_delta_edits(ds))


def _shares(folded: dict[str, Array], over: tuple[int, ...]) -> Array:
    """Both kinds of share ``[kind, ..., budget]``, NaN where there is no token-head."""
    budgets, shares, n = (folded[name].sum(over) for name in ("budgets", "shares", "n"))
    return np.stack(
        [mean(x, np.broadcast_to(whole[..., None], x.shape)) for x, whole in ((budgets, budgets.sum(-1)), (shares, n))]
    )


def _delta_edits(ds: xr.Dataset) -> int:
    row = MIXERS[ds.attrs["mixer"]]
    return ds.sizes.get("edit", 1) if row.gate == "scalar" and row.address is None else 1


def budget_sums(records: dict[str, Array], bins: int) -> dict[str, Array]:
    """What ``gate_budgets`` adds up, of one block ``[token, head]``: budgets and shares ``[bin, budget]``."""
    kept = records["retention"]
    budgets = [records[f"budget_{name}"] for name in BUDGETS if f"budget_{name}" in records]
    total = sum(budgets[1:], budgets[0])
    finite = np.isfinite(total) & np.isfinite(kept)
    good = finite & (total != 0)
    # By head: to add to a bin twice running takes several times as long as to add to two in turn.
    heads = kept.shape[1]
    lane = np.broadcast_to(bins * np.arange(heads), kept.shape)
    if not good.all():
        kept, total, lane, *budgets = (x[good] for x in (kept, total, lane, *budgets))
    cell = (np.minimum(kept * kept.dtype.type(bins), bins - 1).astype(np.intp) + lane).ravel()

    def summed(weights: Array) -> Array:
        found: Array = np.bincount(cell, weights.ravel(), heads * bins).reshape(heads, bins).sum(0)
        return found

    sums = np.zeros((2, bins, len(BUDGETS)))
    for i, budget in enumerate(budgets):
        if budget.any():  # all 0 without an address
            sums[0, :, i], sums[1, :, i] = summed(budget), summed(budget / total)
    return {
        "budgets": sums[0],
        "shares": sums[1],
        "n": np.bincount(cell, minlength=heads * bins).reshape(heads, bins).sum(0),
        "zero": np.array(np.count_nonzero(finite) - cell.size),
        "reflected": np.array(np.count_nonzero(budgets[1] > kept * (1 + ROUNDING))),
    }
