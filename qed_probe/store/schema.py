"""Every variable of a trace store, once: the table that the writer, the reader and the tests share.

A store is one zarr v3 group. All prompts are packed one after another along ``token`` without padding; ``boundary`` has one
entry more than ``prompt``. Tokens come in blocks of ``block_tokens`` (an attribute): every variable along ``token`` is chunked by
the block, and ``done`` says of each block whether all of it is there. The groups ``inputs`` and ``states`` are optional and carry
the static coordinates again. Where the attribute ``generated`` is N > 0, the last N tokens of each prompt are the model's own and
have the role ``generated``; ``token_id``, known no earlier, is written with the records and −1 until then.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SCHEMA_VERSION = 1
OUTCOMES = "qed-probe outcomes"
"""The attribute ``schema`` of a store of outcomes, which is no trace."""
REPLAYS = "qed-probe replay"
"""The same of a store of replays."""
EIGEN = "qed-probe eigen"
"""The same of a store of tallied eigenvalues."""
MEMORY = "qed-probe memory"
"""The same of a store of what reads contain and memories hold."""
PATCHES = "qed-probe patch"
"""The same of a store of what exchanging parts of two runs does to an answer."""

MARK = 64
"""The state's norm is taken at tokens 63, 127, … of each prompt and at its last one."""

MAX_BLOCK, MAX_CHUNK_BYTES, MAX_BLOCK_BYTES = 4096, 8_000_000, 1 << 30


@dataclass(frozen=True)
class Variable:
    """One variable: where it is, what it is and when it is known (``static``: before the first forward)."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    units: str
    long_name: str
    formula: str = ""
    group: str = ""
    coordinate: bool = False
    static: bool = False

    @property
    def key(self) -> str:
        """The variable's path in the store, ``inputs/q``."""
        return f"{self.group}/{self.name}" if self.group else self.name

    @property
    def fill(self) -> float | str | int:
        """What is read where nothing was written: NaN, the empty string, −1, or 0 of what has no sign."""
        if self.dtype == "str":
            return ""
        if self.dtype.startswith("float"):
            return float("nan")
        return 0 if self.dtype.startswith("u") else -1

    @property
    def itemsize(self) -> int:
        """Bytes an element, 16 taken for a string."""
        return 16 if self.dtype == "str" else np.dtype(self.dtype).itemsize


def _coordinate(name: str, dim: str, dtype: str, long_name: str, formula: str = "", static: bool = True) -> Variable:
    return Variable(name, (dim,), dtype, "1", long_name, formula, coordinate=True, static=static)


def _record(name: str, long_name: str, formula: str, units: str = "1") -> Variable:
    return Variable(name, ("layer", "token", "head"), "float32", units, long_name, formula)


def _input(name: str, axes: tuple[str, ...], long_name: str, formula: str = "") -> Variable:
    return Variable(name, ("layer", "token", "head", *axes), "float32", "1", long_name, formula, group="inputs")


COORDINATES = (
    _coordinate("layer", "layer", "int32", "layer", "the model's own index"),
    _coordinate("token_id", "token", "int32", "token id"),
    _coordinate("token_text", "token", "str", "text of the token", static=False),
    _coordinate("position", "token", "int32", "position in the prompt"),
    _coordinate("prompt_index", "token", "int32", "prompt of the token"),
    _coordinate("role", "token", "str", "role of the token in the task"),
    _coordinate("cu_seqlens", "boundary", "int64", "first token of each prompt, and the end of the last"),
    _coordinate("mark_token", "mark", "int64", "token after which the state's norm was taken"),
)

BOOKKEEPING = (
    Variable("done", ("block",), "uint8", "1", "1 where every token of the block is complete"),
    Variable("lambda", ("layer", "head"), "float32", "1", "strength of the direction d", "λ, after strength", static=True),
    Variable("nll", ("token",), "float32", "nat", "negative log likelihood", "−ln p(token | earlier), NaN at first tokens"),
    Variable("correct", ("prompt",), "float32", "1", "1 where the answer was right, 0 where wrong"),
)

RECORDS = (
    _record("rho", "overlap of query and key", "ρ = qᵀk"),
    _record("eigenvalue", "non-trivial eigenvalue of the erase factor", "e = 1 − aᵀk"),
    Variable("edit_eigenvalue", ("layer", "token", "head", "edit"), "float32", "1", "eigenvalue of each edit", "1 − a_mᵀk_m"),
    Variable(
        "edit_eigenvalue_unit",
        ("layer", "token", "head", "edit"),
        "float32",
        "1",
        "eigenvalue of each edit with its key renormalised",
        "1 − a_mᵀk_m with k_m/‖k_m‖, and a_m rebuilt from it",
    ),
    _record("eigenvalue_projected", "eigenvalue after the added direction loses its key component", "1 − (b⊙k)ᵀk"),
    _record("eigenvalue_unit", "eigenvalue with the key renormalised", "e with k/‖k‖, and a, d rebuilt from it"),
    _record("key_norm", "norm of the key as used", "‖k‖"),
    _record("operator_norm", "norm of the erase factor", "‖I − kaᵀ‖₂"),
    _record("operator_norm_base", "norm of the erase factor without the added direction", "‖I − k(b⊙k)ᵀ‖₂"),
    _record("direction_norm", "norm of the erase direction d", "‖d‖"),
    _record("read_norm", "norm of what the erase direction d reads", "‖S̄ᵀd‖"),
    _record("base_read_norm", "norm of what the gated key reads", "‖S̄ᵀ(b⊙k)‖"),
    _record("correction_norm", "change of the output that comes from the erase direction d", "‖λρS̄ᵀd‖"),
    _record("correction_cosine", "cosine between correction and output without it", "cos(−ρS̄ᵀd, y + λρS̄ᵀd)"),
    _record("residual_norm", "norm of what is really written", "‖r‖"),
    _record("output_norm", "norm of the output, without scale", "‖y‖"),
    _record("retention", "mean decay factor over channels", "ᾱ = mean exp g"),
    _record("log_decay", "mean log decay over channels", "mean g", "1/token"),
    _record("log_decay_min", "log decay of the fastest channel", "min g", "1/token"),
    _record("log_decay_max", "log decay of the slowest channel", "max g", "1/token"),
    _record("budget_decay", "part of the memory lost to decay", "1 − ᾱ"),
    _record("budget_delta", "part of the memory replaced by the delta edit", "ᾱβ, β = bᵀ(k⊙k) for channel gates"),
    _record("budget_erase", "part of the memory erased at the address", "ᾱγ"),
    _record("address_cosine", "cosine of address and key", "εᵀk"),
    _record("query_address", "overlap of query and address", "qᵀε"),
    _record("address_read_norm", "norm of what the address reads", "‖Ŝᵀε‖"),
    _record("address_correction_norm", "change of the output that comes from the address edit", "γ|qᵀε|‖Ŝᵀε‖"),
    _record("pre_erase_output_norm", "norm of the output before any edit", "‖Ŝᵀq‖"),
    _record("cross_term", "interaction of address and delta edits", "γβ|kᵀε|"),
    Variable("state_norm", ("layer", "mark", "head"), "float32", "1", "Frobenius norm of the state at marks", "‖S‖_F"),
)

VECTORS = (Variable("read", ("layer", "token", "head", "value"), "float16", "1", "what the erase direction d reads", "S̄ᵀd"),)

INPUTS = (
    _input("q", ("key",), "unit query"),
    _input("g", ("key",), "log decay"),
    _input("d", ("key",), "erase direction, added or that QED would add"),
    _input("k", ("edit", "key"), "key of each edit"),
    _input("a", ("edit", "key"), "what each edit reads by"),
    _input("u", ("edit", "value"), "what each edit writes", "r = u − Sᵀa"),
    _input("o", ("value",), "output of the model's own kernel, before output norm and gate", "scale · y"),
    _input("b", ("key",), "channel gate of the erase"),
    _input("w", ("value",), "channel gate of the write"),
    _input("v", ("value",), "value before its gate"),
    _input("beta", (), "scalar gate"),
    _input("gamma", (), "gate of the address edit"),
    Variable(
        "initial_state", ("layer", "prompt", "head", "key", "value"), "float32", "1", "state before a prompt", "S₀", "inputs"
    ),
)

STATES = (
    Variable("state", ("layer", "snapshot", "head", "key", "value"), "float32", "1", "state after a token", "S_t", "states"),
    Variable("snapshot_token", ("snapshot",), "int64", "1", "token of the snapshot", "", "states", coordinate=True, static=True),
)

VARIABLES: dict[str, Variable] = {v.key: v for v in (*COORDINATES, *BOOKKEEPING, *RECORDS, *VECTORS, *INPUTS, *STATES)}

# Attributes that stores must share to be read as one: they hold the same measurement of the same model.
SHARED_ATTRS = (
    "mixer", "checkpoint_digest", "dtype", "strength", "direction", "at", "mode", "gate_max", "lambda_max", "scale",
    "layers", "heads", "key", "value", "edits", "variables",
)  # fmt: skip

UNCHANGED = {"strength": 1, "direction": "own", "at": "all", "phase": "all", "mode": "full"}
"""What is said of a model that runs as it is, and meant where nothing is said."""


def ran(attrs: Mapping[Any, Any]) -> str:
    """What ran, in words, from a trace's attributes: the mixer, and what of it is not the model's own."""
    known = {"mixer": "unknown", **UNCHANGED, **attrs}
    found = f"Mixer {known['mixer']}"
    if known["direction"] != UNCHANGED["direction"]:
        found += " (not the model's own)"
    if known["strength"] != UNCHANGED["strength"]:
        found += f", strength {known['strength']:g}"
    if known["mode"] != UNCHANGED["mode"]:
        found += f", mode {known['mode']}"
    if known["at"] != UNCHANGED["at"]:
        found += f" at {known['at']}"
    return found


def plain(attrs: Mapping[str, object]) -> dict[str, object]:
    """Attributes as netCDF can hold them: numbers and strings, a list of names or a table of versions as one string."""
    return {name: _plain(value) for name, value in attrs.items()}


def _plain(value: object) -> object:
    match value:
        case {**table}:
            return ", ".join(f"{name} {x}" for name, x in table.items())
        case [str(), *_]:
            return ", ".join(map(str, value))
    return value


def detail(name: str) -> Variable:
    """What a task knows of each prompt beforehand (``length``, ``depth``…): a coordinate along ``prompt``."""
    known = {"depth": "share of the noise that comes before what is asked for", "updates": "earlier values of what is asked for"}
    return _coordinate(name, "prompt", "float64", known.get(name, f"{name} of the prompt"))


def variable(key: str, *, vectors: str = "float16", edit_inputs: bool = False) -> Variable:
    """The row of a variable in a store whose vectors have this dtype and whose ``v`` and ``beta`` may differ for every edit."""
    row = VARIABLES[key]
    if row in VECTORS:
        return replace(row, dtype=vectors)
    if edit_inputs and key in ("inputs/v", "inputs/beta"):
        return replace(row, dims=(*row.dims[:3], "edit", *row.dims[3:]))
    return row


def chunks(row: Variable, sizes: Mapping[str, int], block: int) -> tuple[int, ...]:
    """Chunk shape: a block of tokens, whole along heads and channels; one layer at a time where all would be large."""
    most = {"token": block, "block": 1, "snapshot": 1, "prompt": 4096, "mark": 4096, "boundary": 4096}
    if {"key", "value", "mark"} & set(row.dims):
        most["layer"] = 1
    if row.key == "inputs/initial_state":
        most["prompt"] = 1
    return tuple(block if dim == "token" else max(min(sizes[dim], most.get(dim, sizes[dim])), 1) for dim in row.dims)


def block_tokens(rows: tuple[Variable, ...], sizes: Mapping[str, int]) -> int:
    """The largest power of two ≤ 4096 (and no larger than the tokens need) whose chunks are ≤ 8 MB and whose blocks ≤ 1 GiB."""
    along = [row for row in rows if "token" in row.dims]
    chunk = max(int(np.prod(chunks(row, sizes, 1))) * row.itemsize for row in along)
    whole = sum(int(np.prod([sizes[dim] for dim in row.dims if dim != "token"])) * row.itemsize for row in along)
    limit = min(MAX_BLOCK, max(MAX_CHUNK_BYTES // chunk, 1), max(MAX_BLOCK_BYTES // whole, 1))
    return int(min(1 << (limit.bit_length() - 1), 1 << (sizes["token"] - 1).bit_length()))


def mark_tokens(lengths: np.ndarray) -> np.ndarray:
    """The packed tokens after which the state's norm is taken: 63, 127, … of each prompt and its last."""
    ends = np.cumsum(lengths, dtype=np.int64)
    marks = [np.append(np.arange(MARK - 1, n - 1, MARK), n - 1) + end - n for n, end in zip(lengths, ends, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *marks])
