"""One record of two traces or more: cell by cell within a checkpoint, by each layer's quantiles between checkpoints."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import Array, Field, Step, complete_tokens, fold, label_folded, mean
from qed_probe.analyses.difference import check_same_tokens
from qed_probe.analyses.quantiles import layer_quantiles
from qed_probe.analyses.statistics import DRAWS, LEVEL, bootstrap_interval
from qed_probe.errors import InputError, StoreError
from qed_probe.store.schema import UNCHANGED

RUNS = ("first", "second")
SCALAR = ("layer", "token", "head")
SEED = 0
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
SETTINGS = ("mixer", "direction", "strength", "at", "mode", "dtype", "backend", "device")
"""Attributes in which two traces of one checkpoint over the same tokens may differ."""


def record_contrast(first: xr.Dataset, second: xr.Dataset, record: str) -> xr.Dataset:
    """How much larger a scalar record is in the second of two traces of one checkpoint over the same tokens, head by head.

    Dims (layer, head), in the record's units: ``difference``, the mean over tokens of x₂ − x₁, with ``low`` and ``high``, its
    95 % percentile bootstrap over prompts, which are what is independent (2000 draws of a fixed seed; NaN with fewer than two
    prompts, as the attribute ``interval`` says); ``first_mean`` and ``second_mean`` over the same tokens; ``n``, tokens that are
    finite in both. Layers that both traces have are compared; tokens that either has not complete are left out and counted, and
    so are values that are not finite, with their place. Attributes: ``prompts``, ``tokens``, and what differs. Memory grows with
    prompts × layers × heads, not with tokens.

    Raises StoreError for other tokens, another checkpoint, no layer in common, no token complete in both and a record that one
    trace lacks; InputError for a record that has other dims than layer, token and head.
    """
    pair = _pair(first, second, record)
    sums, n, folded = _by_prompt(pair)
    low, high = bootstrap_interval(sums["difference"], n, LEVEL, DRAWS, SEED)
    means = {name: mean(x.sum(0), n.sum(0)) for name, x in sums.items()}
    values = {
        "difference": means["difference"],
        "low": low,
        "high": high,
        "first_mean": means["first"],
        "second_mean": means["second"],
        "n": n.sum(0),
    }
    one, other = _varied([first, second])
    apart = f"{other} minus {one}" if one else "two runs of the same settings"
    interval = f"{100 * LEVEL:g} % percentile bootstrap over prompts, {DRAWS} draws, seed {SEED}"
    return label_folded(
        pair,
        [f"{record} ({name})" for name in RUNS],
        folded,
        values,
        _contrast_fields(record, str(first[record].attrs.get("units", "1"))),
        {},
        **_described(first, record),
        subject=f"Mixer {pair.attrs['mixer']}: {apart}",
        prompts=len(n),
        interval=interval if len(n) >= 2 else "none: fewer than two prompts",
        bootstrap_level=LEVEL,
        bootstrap_draws=DRAWS,
        bootstrap_seed=SEED,
    )


def record_quantiles(stores: Sequence[xr.Dataset], record: str, levels: Sequence[float] = LEVELS) -> xr.Dataset:
    """How a scalar record is distributed over tokens and heads, layer by layer, in traces whose heads do not correspond.

    Dims (store, layer, level): ``quantile``, exact, in the record's units, of the finite values of all complete tokens (see
    ``layer_quantiles``; memory does not grow with tokens), NaN at layers that a store has not; ``difference``, the quantile minus
    the first store's at the layer of the same number, NaN where there is none and where the tokens are not the same, as
    ``same_tokens(store)`` says. ``n(store, layer)`` finite values; ``tokens``, ``tokens_incomplete`` and ``prompts`` by store;
    values that are not finite are left out, counted and located. Stores are named after their checkpoints and settings.

    Raises InputError for no stores, levels that do not increase within [0, 1], and a record that has other dims than layer, token
    and head; StoreError for a store given twice, a store without the record, and one without a complete token.
    """
    shares = np.asarray(levels, np.float64)
    if not (shares.ndim == 1 and shares.size and (shares >= 0).all() and (shares <= 1).all() and (np.diff(shares) > 0).all()):
        raise InputError(f"levels: expected shares that increase from 0 to 1, found {levels}")
    if not stores:
        raise InputError("stores: expected one trace or more, found none")
    names = _names(stores)
    _check_differ(stores, names)
    for ds, name in zip(stores, names, strict=True):
        _check_record(ds, record, name)
    parts = [_of_store(ds, record, levels) for ds in stores]
    whole = xr.concat(
        parts, "store", data_vars="all", coords="minimal", compat="override", join="outer", combine_attrs="drop_conflicts",
        fill_value={"n": 0, "nonfinite": 0},
    )  # fmt: skip
    same = [_same_tokens(stores[0], ds) for ds in stores]
    whole = whole.assign_coords(store=names, mixer=("store", [str(ds.attrs.get("mixer", "unknown")) for ds in stores]))
    whole["same_tokens"] = "store", same, {"long_name": "over the same tokens as the first store"}
    difference = (whole["quantile"] - whole["quantile"].isel(store=0)).where(whole["same_tokens"])
    whole["difference"] = difference.assign_attrs(whole["quantile"].attrs, long_name="quantile minus the first store's")
    return whole.assign_attrs(_described(stores[0], record))


def _pair(first: xr.Dataset, second: xr.Dataset, record: str) -> xr.Dataset:
    """The record of both traces as one Dataset, at the layers that both have."""
    for ds, name in zip((first, second), RUNS, strict=True):
        _check_record(ds, record, f"the {name} trace")
    digests = [str(ds.attrs.get("checkpoint_digest", ""))[:12] or "none" for ds in (first, second)]
    if "none" in digests or digests[0] != digests[1]:
        found = f"found checkpoint_digest {' and '.join(digests)}; between checkpoints only quantiles can be compared"
        raise StoreError(f"expected two traces of one checkpoint, {found}")
    check_same_tokens(first, second)
    layers = [layer for layer in first["layer"].values if layer in second["layer"].values]
    if not layers:
        raise StoreError(f"expected a layer in common, found {first['layer'].values} and {second['layer'].values}")
    together = complete_tokens(first) & complete_tokens(second)
    if not together.any():
        raise StoreError(f"expected a token that is complete in both traces, found none of {together.size:,}")
    records = {name: ds[record].sel(layer=layers).variable for name, ds in zip(RUNS, (first, second), strict=True)}
    coords = {"layer": layers, "complete": ("token", together), "prompt_index": ("token", first["prompt_index"].values)}
    mixers = dict.fromkeys(str(ds.attrs.get("mixer", "unknown")) for ds in (first, second))
    return xr.Dataset(records, coords, {"mixer": " and ".join(mixers)})


def _by_prompt(pair: xr.Dataset) -> tuple[dict[str, Array], Array, dict[str, Array]]:
    """Sums of both records and of their difference, and counts of tokens, ``[prompt, layer, head]``; and what ``fold`` found."""
    prompt = pair["prompt_index"].values
    prompts = np.unique(prompt[complete_tokens(pair)])
    shape = len(prompts), pair.sizes["layer"], pair.sizes["head"]
    sums, n = {name: np.zeros(shape) for name in (*RUNS, "difference")}, np.zeros(shape, np.int64)

    def start(layer: int) -> Step:
        def step(tokens: Array, records: dict[str, Array]) -> dict[str, Array]:
            good = np.isfinite(records["first"]) & np.isfinite(records["second"])
            x, y = (np.where(good, records[name], 0).astype(np.float64) for name in RUNS)
            starts = np.flatnonzero(np.diff(prompt[tokens], prepend=-1))
            rows = np.searchsorted(prompts, prompt[tokens[starts]])
            for total, part in ((sums["first"], x), (sums["second"], y), (sums["difference"], y - x), (n, good)):
                np.add.at(total[:, layer], rows, np.add.reduceat(part, starts, dtype=total.dtype))
            return {}

        return step

    folded = fold(pair, RUNS, start)
    return sums, n, folded


def _of_store(ds: xr.Dataset, record: str, levels: Sequence[float]) -> xr.Dataset:
    """The quantiles of one store, with its counts as variables, so that stores can be joined."""
    found, folded = layer_quantiles(ds, record, levels)
    fields: dict[str, Field] = {
        "quantile": (("layer", "level"), str(ds[record].attrs.get("units", "1")), f"quantile of {record}"),
        "n": (("layer",), "count", "finite values"),
        "tokens": ((), "count", "complete tokens"),
        "tokens_incomplete": ((), "count", "tokens left out"),
        "prompts": ((), "count", "prompts with a complete token"),
    }
    complete = complete_tokens(ds)
    values = {"quantile": found, "n": folded["n"], "tokens": complete.sum(), "tokens_incomplete": (~complete).sum()}
    values["prompts"] = np.array(len(np.unique(ds["prompt_index"].values[complete])))
    labelled = label_folded(ds, [record], folded, values, fields, {"level": np.asarray(levels, np.float64)})
    return labelled.drop_attrs(deep=False)


def _contrast_fields(record: str, units: str) -> dict[str, Field]:
    cell = "layer", "head"
    return {
        "difference": (cell, units, f"mean over tokens of {record} in the second trace minus the first"),
        "low": (cell, units, "lower end of the interval of the difference"),
        "high": (cell, units, "upper end of the interval of the difference"),
        "first_mean": (cell, units, f"mean of {record} in the first trace"),
        "second_mean": (cell, units, f"mean of {record} in the second trace"),
        "n": (cell, "count", "tokens that are finite in both traces"),
    }


def _described(ds: xr.Dataset, record: str) -> dict[str, str]:
    """What a figure calls the record."""
    attrs = ds[record].attrs
    return {"record": record, "units": str(attrs.get("units", "1")), "formula": str(attrs.get("formula", ""))}


def _check_record(ds: xr.Dataset, record: str, where: str) -> None:
    if record not in ds:
        raise StoreError(f"{where}: expected the record {record}, found a store without it")
    if {*ds[record].dims} != {*SCALAR}:
        dims = ", ".join(map(str, ds[record].dims))
        raise InputError(f"{record}: expected a scalar record with dims {', '.join(SCALAR)}, found {dims} in {where}")


def _varied(stores: Sequence[xr.Dataset]) -> list[str]:
    """Of each trace, the settings that are not the same in all."""
    settings = [{name: ds.attrs.get(name, UNCHANGED.get(name, "unknown")) for name in SETTINGS} for ds in stores]
    several = [name for name in SETTINGS if len({each[name] for each in settings}) > 1]
    return [", ".join(f"{name} {_short(each[name])}" for name in several) for each in settings]


def _short(x: object) -> str:
    return f"{x:g}" if isinstance(x, float) else str(x)


def _names(stores: Sequence[xr.Dataset]) -> list[str]:
    """A name for each store: its checkpoint's, with the settings or else a number where that does not tell them apart."""
    plain = [PurePath(str(ds.attrs.get("checkpoint", ds.attrs.get("mixer", "unknown")))).name for ds in stores]
    shared = {name: _varied([ds for ds, other in zip(stores, plain, strict=True) if other == name]) for name in plain}
    settings = {name: iter(several) for name, several in shared.items()}
    full = [", ".join(filter(None, (name, next(settings[name])))) for name in plain]
    times = Counter(full)
    return [f"{name} ({full[: i + 1].count(name)})" if times[name] > 1 else name for i, name in enumerate(full)]


def _check_differ(stores: Sequence[xr.Dataset], names: Sequence[str]) -> None:
    for i, ds in enumerate(stores):
        for earlier, other in enumerate(stores[:i]):
            if ds is other or (_same_run(ds, other) and _same_tokens(ds, other)):
                raise StoreError(f"expected stores that differ, found {names[earlier]} and {names[i]} to be the same run twice")


def _same_run(one: xr.Dataset, other: xr.Dataset) -> bool:
    digests = {ds.attrs.get("checkpoint_digest") for ds in (one, other)}
    return len(digests) == 1 and None not in digests and not any(_varied([one, other]))


def _same_tokens(one: xr.Dataset, other: xr.Dataset) -> bool:
    try:
        check_same_tokens(one, other)
    except StoreError:
        return False
    return True
