"""The shape of a store, fixed before the first forward, and how it is laid out on disk."""

import hashlib
import itertools
import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import schema
from qed_probe.store.schema import Variable

GROUP = 1 << 16
"""Tokens of the prompts that are laid out at a time: whole prompts, or one that is longer."""


class Packed(Protocol):
    """A prompt, as the store sees it."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids, ``[T]``."""

    @property
    def roles(self) -> np.ndarray | None:
        """One string a token, ``[T]``."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything that is known of a trace beforehand.

    ``names`` are the keys of the variables that the trace writes (``rho``, ``read``, ``nll``, ``inputs/q``, ``states/state``).
    ``prompts`` are asked for a few at a time, and again each time, when their tokens are laid out. Of each prompt there is one
    number in ``lengths``, in ``fingerprints``, which tell it from others, and under each name of ``details``; ``roles`` says
    whether any has roles. The last ``generated`` of each length follow the prompt's own tokens: their ids are traced. ``lam`` is
    ``[layers, heads]``; ``snapshots`` the packed tokens, rising, whose state is kept; ``vectors`` the dtype of ``read``, "none"
    without it; ``edit_inputs`` whether ``v`` and ``beta`` have an edit axis. ``attrs`` determine the numbers (a run resumes only
    what has the same); ``provenance`` (the command, the path) does not. Raises StoreError if there is not one length ≥ 1 for each
    prompt or a name is not in the schema.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    heads: int
    key: int
    value: int
    prompts: Sequence[Packed]
    lengths: np.ndarray
    fingerprints: np.ndarray
    edits: int = 1
    roles: bool = False
    generated: int = 0
    details: Mapping[str, np.ndarray] = field(default_factory=dict)
    lam: np.ndarray | None = None
    snapshots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    vectors: str = "float16"
    edit_inputs: bool = False
    attrs: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in schema.VARIABLES or schema.VARIABLES[name].static]
        if unknown:
            raise StoreError(f"store layout: expected names of traced variables, found {', '.join(unknown)}")
        taken = [name for name in self.details if name in schema.VARIABLES]
        if taken:
            raise StoreError(f"store layout: expected details with names of their own, found {', '.join(taken)}")
        if not len(self.prompts) or len(self.lengths) != len(self.prompts) or min(self.lengths) < 1:
            found = f"{len(self.prompts)} prompts and {len(self.lengths)} lengths from {min(self.lengths, default=0)}"
            raise StoreError(f"store layout: expected prompts and for each a length ≥ 1, found {found}")

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """First token of each prompt and the end of the last, ``[prompts + 1]``."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def cu_marks(self) -> np.ndarray:
        """First mark of each prompt and the end of the last, ``[prompts + 1]``."""
        return np.concatenate([[0], np.cumsum(-(-self.lengths // schema.MARK))]).astype(np.int64)

    def marks_before(self, token: int) -> int:
        """How many marks come before a packed token."""
        prompt = int(np.searchsorted(self.cu_seqlens, token, "right")) - 1
        return int(self.cu_marks[prompt]) + (token - int(self.cu_seqlens[prompt])) // schema.MARK

    @cached_property
    def rows(self) -> dict[str, Variable]:
        """The variables that the trace writes, by key."""
        keys = (*self.names, *["token_id"] * (self.generated > 0), "done")
        return {key: schema.variable(key, vectors=self.vectors, edit_inputs=self.edit_inputs) for key in keys}

    @cached_property
    def static(self) -> tuple[Variable, ...]:
        """The variables that are known already, by key."""
        keys = ["layer", "position", "prompt_index", "cu_seqlens", "mark_token"]
        keys += ["token_id"] * (not self.generated) + ["role"] * (self.roles or self.generated > 0)
        keys += ["lambda"] * (self.lam is not None) + ["states/snapshot_token"] * ("states/state" in self.names)
        return (*map(schema.variable, keys), *map(schema.detail, self.details))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of every dimension, ``block`` included."""
        return self._extents | {"block": -(-self._extents["token"] // self.block)}

    @cached_property
    def block(self) -> int:
        """Tokens in a block."""
        return schema.block_tokens((*self.static, *self.rows.values()), self._extents)

    @property
    def _extents(self) -> dict[str, int]:
        return {
            "layer": len(self.layers), "head": self.heads, "key": self.key, "value": self.value, "edit": self.edits,
            "token": int(self.cu_seqlens[-1]), "prompt": len(self.lengths), "boundary": len(self.lengths) + 1,
            "mark": int(self.cu_marks[-1]), "snapshot": len(self.snapshots),
        }  # fmt: skip

    @cached_property
    def identity(self) -> dict[str, object]:
        """The attributes that two runs must share for one to finish the other."""
        own = {
            "qed_probe_schema": schema.SCHEMA_VERSION,
            "block_tokens": self.block,
            "layers": [int(layer) for layer in self.layers],
            "heads": self.heads,
            "key": self.key,
            "value": self.value,
            "edits": self.edits,
            "generated": self.generated,
            "vectors": self.vectors,
            "variables": sorted({*self.rows} | {row.key for row in self.static}),
            "prompts_digest": _digest(self.fingerprints),
            "snapshots_digest": _digest(self.snapshots),
        }
        return schema.plain(json.loads(json.dumps({**own, **self.attrs})))

    def lay_out(self, root: Path) -> None:
        """Create the store at ``root``: all metadata with its final shapes, and what is known already."""
        group = zarr.create_group(root, zarr_format=3)
        groups = sorted({row.group for row in self.rows.values()})
        known: dict[str, list[zarr.Array[Any]]] = defaultdict(list)
        for name in groups:
            here = group.require_group(name) if name else group
            static = [row for row in self.static if row.group == name or (not row.group and row.coordinate)]
            traced = [row for row in self.rows.values() if row.group == name]
            for row in (*static, *traced):
                known[row.key].append(self._create(here, row))
            coordinates = [row.name for row in (*static, *traced) if row.coordinate and (row.name,) != row.dims]
            here.update_attributes({"coordinates": " ".join(coordinates)})
        for key, start, values in self._values():
            for array in known[key]:
                array[start : start + len(values)] = values.astype(array.dtype)
        group.update_attributes({**schema.plain(json.loads(json.dumps(self.provenance))), **self.identity})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
            for name in groups[::-1]:
                zarr.consolidate_metadata(group.store, path=name)

    def _values(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """What is known already: key, place and values, those of tokens and marks a few prompts at a time."""
        whole = {"layer": self.layers, "cu_seqlens": self.cu_seqlens, "lambda": self.lam, "states/snapshot_token": self.snapshots}
        whole |= self.details
        yield from ((key, 0, np.asarray(x)) for key, x in whole.items() if x is not None)
        for first, last in self._groups():
            prompts, lengths = self.prompts[first:last], self.lengths[first:last]
            start, index = int(self.cu_seqlens[first]), np.repeat(np.arange(first, last), lengths)
            tokens, roles = zip(*((prompt.tokens, prompt.roles) for prompt in prompts), strict=True)
            yield "position", start, np.arange(start, start + len(index)) - self.cu_seqlens[index]
            yield "prompt_index", start, index
            yield "mark_token", self.marks_before(start), start + schema.mark_tokens(lengths)
            if not self.generated:
                yield "token_id", start, np.concatenate(tokens)
            if self.roles or self.generated:
                own, made = lengths - self.generated, np.full(self.generated, "generated")
                named = ([np.full(n, "") if x is None else x, made] for n, x in zip(own, roles, strict=True))
                yield "role", start, np.concatenate([*itertools.chain(*named)])

    def _groups(self) -> Iterator[tuple[int, int]]:
        """First prompt of each group, and the one after its last."""
        first = 0
        while first < len(self.lengths):
            full = int(np.searchsorted(self.cu_seqlens, self.cu_seqlens[first] + GROUP, "right")) - 1
            last = max(full, first + 1)
            yield first, last
            first = last

    def _create(self, group: zarr.Group, row: Variable) -> "zarr.Array[Any]":
        described = {"long_name": row.long_name, "units": row.units, "formula": row.formula}
        return group.create_array(
            row.name,
            shape=tuple(self.sizes[dim] for dim in row.dims),
            chunks=schema.chunks(row, self.sizes, self.block),
            dtype=str if row.dtype == "str" else row.dtype,
            fill_value=row.fill,
            compressors=None,
            dimension_names=row.dims,
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes={name: text for name, text in described.items() if text},
        )


def _digest(x: np.ndarray) -> str:
    """Of values alone: the integer type does not matter."""
    return hashlib.sha256(x.astype("<i8").tobytes()).hexdigest()
