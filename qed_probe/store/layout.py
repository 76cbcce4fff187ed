"""The shape of a store, fixed before the first forward, and how it is laid out on disk."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import schema
from qed_probe.store.schema import Variable


@dataclass(frozen=True, eq=False)
class Layout:
    """Everything that is known of a trace beforehand.

    ``names`` are the keys of the variables that the trace writes (``rho``, ``read``, ``nll``, ``inputs/q``, ``states/state``).
    ``tokens`` are all prompts' token ids, packed, and ``lengths`` how many each prompt has; ``roles`` one string a token;
    ``details`` one number a prompt under each name; ``lam`` ``[layers, heads]``; ``snapshots`` the packed tokens, rising, whose
    state is kept; ``vectors`` the dtype of ``read``, "none" without it; ``edit_inputs`` whether ``v`` and ``beta`` have an edit
    axis. ``attrs`` determine the numbers (a run resumes only what has the same); ``provenance`` (the command, the path) does not.
    Raises StoreError if the lengths do not add up or a name is not in the schema.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    heads: int
    key: int
    value: int
    tokens: np.ndarray
    lengths: np.ndarray
    edits: int = 1
    roles: np.ndarray | None = None
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
        if not len(self.tokens) or min(self.lengths) < 1 or sum(self.lengths) != len(self.tokens):
            raise StoreError(f"store layout: expected lengths ≥ 1 that add up to {len(self.tokens)}, found {sum(self.lengths)}")

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """First token of each prompt and the end of the last, ``[prompts + 1]``."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @cached_property
    def marks(self) -> np.ndarray:
        """The packed token of every mark."""
        return schema.mark_tokens(self.lengths)

    @cached_property
    def rows(self) -> dict[str, Variable]:
        """The variables that the trace writes, by key."""
        return {key: schema.variable(key, vectors=self.vectors, edit_inputs=self.edit_inputs) for key in (*self.names, "done")}

    @cached_property
    def static(self) -> dict[Variable, np.ndarray]:
        """What is known already."""
        index = np.repeat(np.arange(len(self.lengths)), self.lengths)
        values = {
            "layer": self.layers,
            "token_id": self.tokens,
            "position": np.arange(len(self.tokens)) - self.cu_seqlens[index],
            "prompt_index": index,
            "cu_seqlens": self.cu_seqlens,
            "mark_token": self.marks,
            "role": self.roles,
            "lambda": self.lam,
            "states/snapshot_token": self.snapshots if "states/state" in self.names else None,
        }
        known = {schema.variable(key): np.asarray(x) for key, x in values.items() if x is not None}
        return known | {schema.detail(name): np.asarray(x) for name, x in self.details.items()}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of every dimension, ``block`` included."""
        return self._extents | {"block": -(-len(self.tokens) // self.block)}

    @cached_property
    def block(self) -> int:
        """Tokens in a block."""
        return schema.block_tokens((*self.static, *self.rows.values()), self._extents)

    @property
    def _extents(self) -> dict[str, int]:
        return {
            "layer": len(self.layers), "head": self.heads, "key": self.key, "value": self.value, "edit": self.edits,
            "token": len(self.tokens), "prompt": len(self.lengths), "boundary": len(self.lengths) + 1,
            "mark": len(self.marks), "snapshot": len(self.snapshots),
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
            "vectors": self.vectors,
            "variables": sorted({*self.rows} | {row.key for row in self.static}),
            "prompts_digest": _digest(self.tokens, self.lengths, *([] if self.roles is None else [self.roles])),
            "snapshots_digest": _digest(self.snapshots),
        }
        attrs: dict[str, object] = json.loads(json.dumps({**own, **self.attrs}))
        return attrs

    def lay_out(self, root: Path) -> None:
        """Create the store at ``root``: all metadata with its final shapes, and what is known already."""
        group = zarr.create_group(root, zarr_format=3)
        groups = sorted({row.group for row in self.rows.values()})
        for name in groups:
            here = group.require_group(name) if name else group
            static = [row for row in self.static if row.group == name or (not row.group and row.coordinate)]
            traced = [row for row in self.rows.values() if row.group == name]
            for row in (*static, *traced):
                array = self._create(here, row)
                if row in self.static:
                    values = self.static[row]
                    array[:] = values.astype(object) if row.dtype == "str" else values.astype(row.dtype)
            coordinates = [row.name for row in (*static, *traced) if row.coordinate and (row.name,) != row.dims]
            here.update_attributes({"coordinates": " ".join(coordinates)})
        group.update_attributes({**json.loads(json.dumps(self.provenance)), **self.identity})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Consolidated metadata", UserWarning)
            for name in groups[::-1]:
                zarr.consolidate_metadata(group.store, path=name)

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


def _digest(*arrays: np.ndarray) -> str:
    """Of values alone: neither the integer type nor the width of a string matters."""
    digest = hashlib.sha256()
    for x in arrays:
        digest.update("\0".join(x).encode() if x.dtype.kind in "UOT" else x.astype("<i8").tobytes())
    return digest.hexdigest()
