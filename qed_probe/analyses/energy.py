"""The memory's energy ‖S‖²_F as a ledger: what decay takes and what each edit takes and puts, exact, from a store's inputs.

From the definitions in ``kernels/mixers.py``, with p = Sᵀa and r = u − p, S being what the edit finds::

    decay    Diag(exp g) S            Σ_i (e^{2g_i} − 1) ‖row_i of S‖²
    edit     S + k rᵀ                 2 rᵀ(Sᵀk) + ‖k‖²‖r‖²
     erase   S − k pᵀ, first          ‖k‖²‖p‖² − 2 pᵀ(Sᵀk)
     write   and then + k uᵀ          2 uᵀ(Sᵀk − ‖k‖²p) + ‖k‖²‖u‖²

A unit key that reads itself, a = βk, erases β(2 − β)‖Sᵀk‖²; so EDA's address (arXiv 2606.26560, Eq. 7–8) takes γ(2 − γ)‖Ŝᵀε‖².
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xarray as xr

from qed_probe.analyses.blocks import NOWHERE, Array, Field, complete_tokens, label_folded, mean
from qed_probe.analyses.difference import check_same_tokens
from qed_probe.errors import CheckFailed, StoreError
from qed_probe.kernels.mixers import MIXERS

NAMES = ("g", "k", "a", "u")
TOLERANCE = 1e-10
"""What a prompt's ledger may fail to close by, as a fraction of the largest amount in it."""
STATES, INPUTS = 1 << 22, 1 << 28
"""Bytes of memories that are replayed together, which should stay in a cache, and of inputs that are read together."""

CELL = "layer", "head", "role"
FIELDS: dict[str, Field] = {
    "change": ((*CELL, "part"), "1", "sum over tokens of the change of ‖S‖²"),
    "mean_change": ((*CELL, "part"), "1/token", "mean over tokens of the change of ‖S‖²"),
    "erase": ((*CELL, "part"), "1", "of it, what decay and the edits' erase do"),
    "write": ((*CELL, "part"), "1", "of it, what the edits' write does after the erase"),
    "erase_share": (("layer", "role", "part"), "1", "erase as a fraction of the energy held, over all heads"),
    "write_share": (("layer", "role", "part"), "1", "write as a fraction of the energy held, over all heads"),
    "held": (CELL, "1", "sum over tokens of ‖S‖² before the token"),
    "n": (CELL, "count", "tokens"),
    "start": (("layer", "head"), "1", "sum over prompts of ‖S‖² before the prompt"),
    "end": (("layer", "head"), "1", "sum over prompts of ‖S‖² after the prompt"),
    "closing_error": (("layer", "head"), "1", "largest error of a prompt's ledger, as a fraction of its largest amount"),
}


@dataclass(frozen=True)
class Job:
    """What is the same in every layer: which prompts are complete, where they are, and each token's role.

    ``ends`` is ``[boundary]``; ``prompts`` are the complete ones; ``roles`` the names, ``all`` first; ``role`` ``[token]``
    numbers them without ``all``, a token without a role last; ``parts`` are the names of decay and edits.
    """

    ends: Array
    prompts: Array
    roles: list[str]
    role: Array
    parts: list[str]


@dataclass(frozen=True)
class Book:
    """Sums over the tokens of each prompt: erase, write and change in this order along the last axis.

    ``total`` ``[prompt, role, head, part, 3]``, ``moved`` the same of sizes over all roles ``[prompt, head, part, 3]``, and
    ``held`` ``[prompt, role, head]``.
    """

    total: Array
    moved: Array
    held: Array


def energy_ledger(ds: xr.Dataset, inputs: xr.Dataset) -> xr.Dataset:
    """Where the memory's energy ‖S‖²_F comes from and goes to, by layer, head and role of the token.

    The memory is replayed in float64 from ``inputs``, what ``open_inputs`` gives, starting at its ``initial_state`` or at 0.
    Every part follows from its own formula (above) and none is what the others leave; that they add up is then checked.

    Dims (layer, head, role, part), float64, in units of ‖S‖²: ``change``, the sum over tokens, and ``mean_change``, per token;
    ``erase`` and ``write``, which make it up. Parts are ``decay``, which only erases, EDA's ``address`` and the ``edit`` (or
    ``edit 1`` …), in the order of the edits. The first role is ``all``, the store's own follow; a token without a role counts in
    ``all`` alone. ``held``, Σ ‖S‖² before each token, and ``n`` tokens, by (layer, head, role); ``erase_share`` and
    ``write_share`` (layer, role, part), sums over heads as a fraction of what they held, NaN where that is 0. By (layer, head):
    ``start``, ``end``, and ``closing_error`` of the worst prompt: |‖S_T‖² − ‖S_0‖² − Σ change|, or if larger
    |Σ erase + Σ write − Σ change|, over the largest of ‖S_T‖², ‖S_0‖² and what any part moved in sum over tokens.

    Prompts that are not complete are left out whole, and so is a head over a prompt where it has an input that is not finite
    (a g of −∞ is fine); both are counted. Raises StoreError for inputs of other tokens, without g, k, a or u, or without a
    complete prompt; CheckFailed, with layer, head and prompt, for a ledger that does not close to 1e-10.
    """
    job = _job(ds, inputs)
    layers = [_layer(inputs, job, i) for i in range(inputs.sizes["layer"])]
    x = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    total, held = x.pop("total"), x["held"]
    values = dict(zip(("erase", "write", "change"), np.moveaxis(total, -1, 0), strict=True))
    values["mean_change"] = mean(values["change"], x["n"][..., None])
    values |= {f"{name}_share": mean(values[name].sum(1), held.sum(1)[..., None]) for name in ("erase", "write")}
    values |= {name: x[name] for name in ("held", "n", "start", "end", "closing_error")}
    folded = {"nonfinite": x["nonfinite"].T, "first_min": x["first"].min(0)}
    whole = np.isin(np.arange(len(job.ends) - 1), job.prompts)
    store = ds.assign_coords(layer=inputs["layer"].values, complete=("token", np.repeat(whole, np.diff(job.ends))))
    names = [f"inputs/{name}" for name in NAMES]
    counts = {"prompts": len(job.prompts), "prompts_incomplete": int((~whole).sum()), "left_out": int(x["flawed"].sum())}
    return label_folded(store, names, folded, values, FIELDS, {"role": job.roles, "part": job.parts}, **counts)


def _job(ds: xr.Dataset, inputs: xr.Dataset) -> Job:
    missing = [name for name in NAMES if name not in inputs]
    if missing:
        raise StoreError(f"expected the inputs {', '.join(NAMES)}, found a store without {', '.join(missing)}")
    check_same_tokens(ds, inputs)
    for name in ("layer", "head"):
        if ds.sizes[name] != inputs.sizes[name]:
            raise StoreError(f"expected records and inputs of one trace, found {ds.sizes[name]} and {inputs.sizes[name]} {name}s")
    ends = np.asarray(inputs["cu_seqlens"].values)
    if ends[0] != 0 or ends[-1] != inputs.sizes["token"]:
        raise StoreError(f"expected whole prompts, of {ends[-1]:,} tokens, found {inputs.sizes['token']:,}")
    counted = np.append(0, np.cumsum(complete_tokens(ds) & complete_tokens(inputs)))[ends]
    prompts = np.flatnonzero((np.diff(counted) == np.diff(ends)) & (np.diff(ends) > 0))
    if not prompts.size:
        raise StoreError(f"expected a complete prompt, found none of {len(ends) - 1}")
    names = ds["role"].values.astype(str) if "role" in ds.coords else np.full(ends[-1], "")
    known = [str(name) for name in dict.fromkeys(names.tolist()) if name]
    number = {name: i for i, name in enumerate([*known, ""])}
    role: Array = np.array([number[name] for name in names.tolist()], np.int64)
    return Job(ends, prompts, ["all", *known], role, ["decay", *_edits(inputs)])


def _edits(inputs: xr.Dataset) -> list[str]:
    """The names of the edits in their order."""
    mixer = MIXERS.get(str(inputs.attrs.get("mixer")))
    count = inputs.sizes["edit"]
    if mixer is not None and mixer.address is not None and count == 2:
        return ["edit", "address"] if mixer.address_last else ["address", "edit"]
    return ["edit"] if count == 1 else [f"edit {i + 1}" for i in range(count)]


def _layer(inputs: xr.Dataset, job: Job, i: int) -> dict[str, Array]:
    """Sums over all prompts of one layer, the role ``all`` first: ``total`` is ``[head, role, part, 3]``."""
    layer = inputs[[name for name in (*NAMES, "initial_state") if name in inputs]].isel(layer=i)
    layer = layer.transpose("token", "prompt", "head", "edit", "key", "value", missing_dims="ignore")
    sums: dict[str, Array] = {}
    for prompts in _groups(layer, job):
        for name, value in _group(layer, job, prompts, i, inputs.sizes["layer"]).items():
            join = {"first": np.minimum, "closing_error": np.fmax}.get(name, np.add)
            sums[name] = join(sums[name], value) if name in sums else value
    for name in ("total", "held", "n"):
        each = np.moveaxis(sums[name], 0, 1)
        sums[name] = np.concatenate([each.sum(1, keepdims=True), each[:, :-1]], 1)
    return sums


def _groups(layer: xr.Dataset, job: Job) -> Iterator[Array]:
    """Complete prompts that follow each other, as many as are replayed together: several that fit, or one of any length."""
    size = layer.sizes
    most = max(1, STATES // (8 * size["head"] * size["key"] * size["value"]))
    group: list[int] = []
    for prompt in job.prompts:
        if group and (len(group) == most or job.ends[prompt + 1] - job.ends[group[0]] > _most_tokens(layer)):
            yield np.array(group)
            group = []
        group.append(prompt)
    yield np.array(group)


def _most_tokens(layer: xr.Dataset) -> int:
    size = layer.sizes
    return max(1, INPUTS // (4 * size["head"] * (size["key"] + size["edit"] * (2 * size["key"] + size["value"]))))


@np.errstate(over="ignore", invalid="ignore")
def _group(layer: xr.Dataset, job: Job, prompts: Array, i: int, layers: int) -> dict[str, Array]:
    """Replay these prompts and sum over those heads of them whose inputs are finite, ``[role, head, …]``."""
    lengths = job.ends[prompts + 1] - job.ends[prompts]
    begin, end = int(job.ends[prompts[0]]), int(job.ends[prompts[-1] + 1])
    prompts = prompts[np.argsort(-lengths, kind="stable")]  # those that go on are then the first ones
    H, R, parts = layer.sizes["head"], len(job.roles), len(job.parts)
    state = _initial_state(layer, prompts)
    start = _energy(state)
    book = Book(np.zeros((len(prompts), R, H, parts, 3)), np.zeros((len(prompts), H, parts, 3)), np.zeros((len(prompts), R, H)))
    bad = np.zeros((len(NAMES), end - begin, H), bool)
    for first in range(begin, end, _most_tokens(layer)):
        last = min(first + _most_tokens(layer), end)
        part = layer[list(NAMES)].isel(token=slice(first, last)).compute()
        x = {name: part[name].values for name in NAMES}
        bad[:, first - begin : last - begin] = [_not_finite(name, x[name]) for name in NAMES]
        starts, stops = (np.clip(job.ends[prompts + after], first, last) - first for after in (0, 1))
        _replay(x, state, starts, stops - starts, job.role[first:last], book)
    of_prompt = [slice(job.ends[prompt] - begin, job.ends[prompt + 1] - begin) for prompt in prompts]
    good = ~np.stack([bad[:, tokens].any((0, 1)) for tokens in of_prompt])
    final = _energy(state)
    error = np.where(good, _closing_error(start, final, book), np.nan)
    _check_closes(error, good, prompts, int(layer["layer"]))
    n = np.stack([np.bincount(job.role[begin:end][tokens], minlength=R) for tokens in of_prompt])
    used = np.zeros(end - begin, bool)
    for tokens in of_prompt:
        used[tokens] = True
    return {
        "total": np.where(good[:, None, :, None, None], book.total, 0).sum(0),
        "held": np.where(good[:, None], book.held, 0).sum(0),
        "n": (n[:, :, None] * good[:, None]).sum(0),
        "start": np.where(good, start, 0).sum(0),
        "end": np.where(good, final, 0).sum(0),
        "closing_error": np.fmax.reduce(error, 0),
        "flawed": np.array((~good).sum()),
        **_places(bad & used[:, None], begin, i, layers),
    }


def _initial_state(layer: xr.Dataset, prompts: Array) -> Array:
    """The memories before the first tokens, float64 ``[prompt, head, key, value]``."""
    if "initial_state" in layer:
        return np.array(layer["initial_state"].isel(prompt=prompts).values, np.float64, order="C")
    return np.zeros((len(prompts), *(layer.sizes[name] for name in ("head", "key", "value"))))


def _replay(x: dict[str, Array], state: Array, starts: Array, lengths: Array, role: Array, book: Book) -> None:
    """Run ``state`` ``[prompt, head, key, value]`` through the packed tokens of ``x``, all prompts at once, and keep the book.

    Prompts stand in order of falling length, so that at each step the first ones are those that go on.
    """
    for t in range(lengths.max(initial=0)):
        going = int((lengths > t).sum())
        at = starts[:going] + t
        values, held = step(state[:going], *(x[name][at].astype(np.float64) for name in NAMES))
        book.total[np.arange(going), role[at]] += values
        book.moved[:going] += np.abs(values)
        book.held[np.arange(going), role[at]] += held


def step(state: Array, g: Array, k: Array, a: Array, u: Array) -> tuple[Array, Array]:
    """One token: ``state`` ``[…, K, V]`` is changed in place; erase, write and change of each part ``[…, 1 + M, 3]``, and ‖S‖².

    ``g`` is ``[…, K]``, ``k`` and ``a`` ``[…, M, K]``, ``u`` ``[…, M, V]``, float64.
    """
    rows = _dot(state, state)
    lost = _dot(np.expm1(2 * g), rows)
    parts = [(lost, np.zeros_like(lost), lost)]
    state *= np.exp(g)[..., None]
    for m in range(k.shape[-2]):
        key, write = k[..., m, :], u[..., m, :]
        read, at_key = np.moveaxis(np.stack([a[..., m, :], key], -2) @ state, -2, 0)
        residual, size = write - read, _dot(key, key)
        erased = size * _dot(read, read) - 2 * _dot(read, at_key)
        written = 2 * _dot(write, at_key - size[..., None] * read) + size * _dot(write, write)
        changed = 2 * _dot(residual, at_key) + size * _dot(residual, residual)
        state += key[..., None] * residual[..., None, :]
        parts.append((erased, written, changed))
    return np.stack([np.stack(part, -1) for part in parts], -2), rows.sum(-1)


def _dot(x: Array, y: Array) -> Array:
    found: Array = np.einsum("...i,...i->...", x, y)
    return found


def _energy(state: Array) -> Array:
    found: Array = _dot(state, state).sum(-1)
    return found


def _closing_error(start: Array, end: Array, book: Book) -> Array:
    """How far each prompt's ledger is from closing, ``[prompt, head]``, as a fraction of its largest amount."""
    erase, write, change = np.moveaxis(book.total.sum((1, 3)), -1, 0)
    off: Array = np.maximum(np.abs(end - start - change), np.abs(erase + write - change))
    largest: Array = np.maximum(np.maximum(start, end), book.moved.max((2, 3)))
    return np.divide(off, largest, out=np.zeros_like(off), where=largest != 0)


def _check_closes(error: Array, good: Array, prompts: Array, layer: int) -> None:
    wrong = np.argwhere(good & ~(error <= TOLERANCE))
    if len(wrong):
        row, head = wrong[0]
        where = f"at layer {layer}, head {head}, prompt {prompts[row]}"
        raise CheckFailed(
            f"expected an energy ledger that closes to {TOLERANCE:g}, found an error of {error[row, head]:.3g} {where}"
        )


def _not_finite(name: str, x: Array) -> Array:
    """Which tokens and heads ``[token, head]`` have an input that is not finite; a log decay may be −∞."""
    good = np.isfinite(x)
    if name == "g":
        good |= np.isneginf(x)
    return np.asarray(~good.all(tuple(range(2, x.ndim))))


def _places(bad: Array, begin: int, layer: int, layers: int) -> dict[str, Array]:
    """How many of each input are not finite, and the first of them as one number, as ``fold`` counts."""
    first = []
    for each in bad:
        token, head = each.nonzero()
        first.append((((begin + token) * layers + layer) * each.shape[1] + head).min(initial=NOWHERE))
    return {"nonfinite": bad.sum((1, 2)), "first": np.array(first)}
