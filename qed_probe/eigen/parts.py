"""A tally as a Dataset, and several parts of a run put together as if they had been one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from qed_probe.eigen.counts import BINS, COLUMNS, MARGINS, SIZES, WORST, Counts, edges
from qed_probe.eigen.sample import STEPS, Sample
from qed_probe.eigen.tally import Tally
from qed_probe.errors import InputError
from qed_probe.store.eigen import VARIABLES, make_eigen

Named = Callable[[NDArray[np.int64]], tuple[ArrayLike, ArrayLike]]
"""Ids and texts of packed tokens."""
SHARED = ("mixer", "checkpoint_digest", "dtype", "strength", "direction", "at", "mode", "gate_max", "prompts_digest")
"""What parts of one run have the same."""


WHOLE = ("prompt", "position", "layer", "head", "edit", "token_id")
Array = NDArray[Any]


def _same(values: Sequence[Array]) -> Array:
    return values[0]


JOINS: dict[str, Callable[[Sequence[Array]], Array]] = {
    **dict.fromkeys(("minimum", "first_nonfinite"), np.minimum.reduce),
    **dict.fromkeys(("maximum", "rounding"), np.maximum.reduce),
    **dict.fromkeys(STEPS, np.fmax.reduce),  # NaN in all parts but one
    **dict.fromkeys(("bin_edges", "lambda", "low", "high", "prompt_length"), _same),
    **dict.fromkeys(("sample_layer", "sample_token", "sample_head"), _same),
}
"""How what parts have is put together; all else is a count, and added."""


def labelled(tally: Tally, sample: Sample, named: Named, attrs: dict[str, object]) -> xr.Dataset:
    """Everything that was tallied, labelled; ``store.eigen.VARIABLES`` says what each is."""
    subject, counts = tally.subject, tally.counts or [Counts(tally.subject, tally.subject.layers)]
    order = np.argsort([subject.layers.index(layer) for each in counts for layer in each.layers])

    def by_layer(name: str, axis: int) -> Array:
        return np.concatenate([getattr(each, name).cpu().numpy() for each in counts], axis).take(order, axis)

    e, Q = len(subject.quantities) - len(SIZES), len(subject.quantities)
    numbers, sums, violations = by_layer("numbers", 2), by_layer("sums", 2), by_layer("violations", 2)
    beyond, above = numbers[3:].copy(), numbers[3:].copy()
    beyond[:, e:], above[:, :e] = 0, 0
    columns = {
        "n": numbers[0], "nonfinite": numbers[1], "outside": numbers[2], "above": above.swapaxes(0, 1),
        **dict(zip(("below_zero", "above_one", "beyond_one"), beyond, strict=True)),
        "sum_high": sums[0], "sum_low": sums[1], "first_nonfinite": by_layer("first_nonfinite", 1),
        "minimum": by_layer("minimum", 1).astype(np.float64), "maximum": by_layer("maximum", 1).astype(np.float64),
        "counts": np.concatenate([each.counts.view(Q, -1, BINS).cpu().numpy() for each in counts], 1)[:, order],
        "bin_edges": np.stack([edges(quantity) for quantity in subject.quantities]),
        "lambda": subject.lam, "low": subject.theory[0], "high": subject.theory[1],
        "violations": violations[:, 0], "real_violations": violations[:, 1],
        "rounding": np.maximum.reduce([each.rounding.cpu().numpy() for each in counts]),
        "prompt_violations": np.add.reduce([each.prompt_violations.cpu().numpy() for each in counts]),
        "prompt_tokens": tally.prompt_tokens,
        "prompt_length": np.diff(subject.cu_seqlens),
        "sample_layer": sample.layer, "sample_token": sample.token, "sample_head": sample.head,
        **dict(zip(STEPS, sample.steps(), strict=True)), **_worst(tally, named),
    }  # fmt: skip
    coords = {"quantity": list(subject.quantities), "margin": list(MARGINS), "layer": list(subject.layers)}
    return make_eigen(columns, coords | {"claim": [claim.text for claim in subject.claims]}, attrs | {"edits": subject.edits})


def _worst(tally: Tally, named: Named) -> dict[str, Array]:
    """The worst of each claim by their rank, ``[claim, worst]``."""
    rows = np.stack([np.pad(x, ((0, 0), (0, WORST - x.shape[1])), constant_values=np.nan) for x in tally.worst], 1)
    found = dict(zip(COLUMNS, rows, strict=True))
    there, bounds = np.isfinite(found["token"]), tally.subject.cu_seqlens
    token = np.where(there, found["token"], 0).astype(np.int64)
    ids, texts = named(token[there])
    found["token_id"], found["token_text"] = np.full(there.shape, -1), np.full(there.shape, "", object)
    found["token_id"][there], found["token_text"][there] = ids, texts
    found["prompt"] = np.searchsorted(bounds, token, "right") - 1
    found["position"] = token - bounds[found["prompt"]]
    del found["token"]
    whole = {name: np.where(there, found[name], -1).astype(np.int64) for name in WHOLE}
    return {f"worst_{name}": x for name, x in (found | whole | {"token_text": found["token_text"].astype(str)}).items()}


def merge_eigen(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Tallies of different prompts of one run as one: to the last count what a single run over all of them gives.

    Raises InputError for parts of different runs or claims, and for a prompt that two of them have.
    """
    if not parts:
        raise InputError("expected parts of a run, found none")
    first = parts[0]
    for part in parts[1:]:
        _check_together(first, part)
    twice = np.add.reduce([part["prompt_tokens"].values > 0 for part in parts], dtype=np.int64) > 1
    if twice.any():
        raise InputError(f"expected parts of different prompts, found prompt {int(twice.argmax()) + 1} in two of them")
    joined: dict[str, tuple[tuple[str, ...], Array]] = _worst_of(parts)
    for name in set(VARIABLES) - set(joined):
        values = [part[name].transpose(*VARIABLES[name].dims).values for part in parts]
        joined[name] = VARIABLES[name].dims, JOINS.get(name, np.add.reduce)(values)
    return first.assign({name: (dims, x, first[name].attrs) for name, (dims, x) in joined.items()})


def together(tallies: Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Tallies by name, those that are parts of one run merged under the first one's."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, ds in tallies.items():
        groups.setdefault(tuple(ds.attrs.get(key) for key in SHARED), []).append(name)
    return {names[0]: merge_eigen([tallies[name] for name in names]) for names in groups.values()}


def _worst_of(parts: Sequence[xr.Dataset]) -> dict[str, tuple[tuple[str, ...], Array]]:
    """The worst of all parts in their order."""
    names = [f"worst_{name}" for name in ("excess", "value", "unit", "token_text", *WHOLE)]
    found = {name: np.concatenate([part[name].values for part in parts], 1) for name in names}
    place = [found[f"worst_{name}"] for name in ("edit", "head", "layer", "position", "prompt")]
    order = np.lexsort([*place, -found["worst_excess"]], axis=1)[:, :WORST]
    return {name: (("claim", "worst"), np.take_along_axis(x, order, 1)) for name, x in found.items()}


def _check_together(one: xr.Dataset, other: xr.Dataset) -> None:
    for name in SHARED:
        if one.attrs.get(name) != other.attrs.get(name):
            raise InputError(f"expected parts of one run, found {name} {one.attrs.get(name)} and {other.attrs.get(name)}")
    for label in ("claim", "layer"):
        if one[label].values.tolist() != other[label].values.tolist():
            found = " and ".join(", ".join(map(str, x[label].values)) for x in (one, other))
            raise InputError(f"expected parts of one run, found the {label}s {found}")
