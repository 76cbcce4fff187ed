"""Write a trace block by block, so that whatever happens, what ``done`` marks is complete and right.

Values gather in one host buffer a chunk; a full buffer is written, whole, and dropped. ``done`` of a block is written after
everything else of it, and zarr renames each chunk into place, so a killed writer leaves no half of anything.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import place, schema
from qed_probe.store.layout import Layout
from qed_probe.store.schema import Variable


def create(path: str | Path, layout: Layout, *, overwrite: bool = False) -> "Writer":
    """Lay out a new store at ``path``, which appears there whole; with ``overwrite`` once it is finished, in place of the old.

    Raises StoreError, and touches nothing, if something is there already (with ``overwrite``: something that is no qed-probe
    store), if another process writes there, or if the disk does not allow it.
    """
    path = Path(os.path.realpath(path))
    with _held(path, "nothing was created") as held:
        place.restore(path)
        if os.path.lexists(path):
            if not overwrite:
                raise StoreError(
                    f"{path}: expected nothing there, found something; resume finishes a store, overwrite replaces it"
                )
            place.stored_attrs(path)
        place.sweep(path)
        root = place.sibling(path, "new") if os.path.lexists(path) else path
        try:
            layout.lay_out(place.sibling(path, "tmp"))
            place.sibling(path, "tmp").rename(root)
        except BaseException:
            place.sweep(path)
            raise
        return Writer(path, root, layout, held)


def resume(path: str | Path, layout: Layout) -> "Writer":
    """Go on with an incomplete store; ``Writer.first_token`` says where.

    Raises StoreError, and touches nothing, if there is no store, if another process writes it, or if its identity differs
    from the layout's, naming what differs and the command that made the store.
    """
    path = Path(os.path.realpath(path))
    with _held(path, "nothing was changed") as held:
        place.restore(path)
        stored = place.stored_attrs(path)
        differs = [name for name, value in layout.identity.items() if stored.get(name) != value]
        if differs:
            pairs = (f"{name} (expected {_short(layout.identity[name])}, found {_short(stored.get(name))})" for name in differs)
            made = f"; what made the store: {stored['command']}" if stored.get("command") else ""
            made += f", with OMP_NUM_THREADS={stored['threads']}" if "threads" in differs else ""
            raise StoreError(f"{path}: this run cannot finish that store, they differ in {', '.join(pairs)}{made}")
        for leftover in path.rglob("*.partial"):
            leftover.unlink()
        return Writer(path, path, layout, held)


class Writer:
    """The only writer of one store; leaving its ``with`` block lets go of it, finished or not."""

    def __init__(self, path: Path, root: Path, layout: Layout, held: int) -> None:
        self.path = path
        self.layout = layout
        self._root = root
        self._held: int | None = held
        # Where a block equals the fill value its file must be there all the same: the setting is not stored, handles take it up.
        with zarr.config.set({"array.write_empty_chunks": True}):
            group = zarr.open_group(root, mode="r+")
            self._arrays: dict[str, zarr.Array[Any]] = {key: _array(group, key) for key in layout.rows}
        self._done = np.asarray(self._arrays["done"][:]).astype(bool)
        self._resumed_at = self.first_token
        self._chunk = {key: schema.chunks(row, layout.sizes, layout.block) for key, row in layout.rows.items()}
        self._buffers: dict[tuple[str, int, int], tuple[np.ndarray, int]] = {}
        self._written: dict[int, Counter[str]] = {}

    @property
    def first_token(self) -> int:
        """Start of the first block that is not done; all tokens of a finished store."""
        blocks = len(self._done) if self._done.all() else int(np.argmin(self._done))
        return min(blocks * self.layout.block, self.layout.sizes["token"])

    def write(self, name: str, values: np.ndarray, *, layer: int, start: int) -> None:
        """Take what one layer recorded of the tokens from ``start`` on, ``[t, head, ...]``.

        ``layer`` is the model's own index. Tokens of blocks that are done are dropped; every other token comes once. Raises
        StoreError if the shape does not fit, a finite value is beyond the range of the stored dtype, or the disk is full.
        """
        at = self.layout.layers.index(layer)
        row = self.layout.rows[name]
        values = self._cast(row, values, layer, start)
        per_chunk = self._chunk[name][0]
        self._gather(row, values, at // per_chunk, at % per_chunk, start)

    def write_tokens(self, name: str, values: np.ndarray | Sequence[str], *, start: int) -> None:
        """Take one value a token (``nll``, ``token_text``) from ``start`` on."""
        row = self.layout.rows[name]
        self._gather(row, np.asarray(values, dtype=object if row.dtype == "str" else row.dtype), 0, 0, start)

    def write_marks(self, name: str, values: np.ndarray, *, layer: int, start: int) -> None:
        """Write what one layer has at marks (``state_norm``) or snapshots (``states/state``), ``[marks, head, ...]``.

        The first of them is the first at or after token ``start``.
        """
        row = self.layout.rows[name]
        first, fresh = (self._before(row, token) for token in (start, max(start, self._resumed_at)))
        if fresh < first + len(values):
            with self._disk():
                self._arrays[name][self.layout.layers.index(layer), fresh : first + len(values)] = values[fresh - first :]

    def write_prompts(self, name: str, values: np.ndarray, *, start: int, layer: int | None = None) -> None:
        """Write a value a prompt from prompt ``start`` on, before its commit: ``correct``, or a layer's initial states."""
        prompts = slice(start, start + len(values))
        with self._disk():
            self._arrays[name][prompts if layer is None else (self.layout.layers.index(layer), prompts)] = values

    def commit(self, tokens_complete: int) -> None:
        """Mark the blocks that lie within the first ``tokens_complete`` tokens, of which everything has been written.

        Raises StoreError if something of such a block was never written, naming it.
        """
        rows = {key: row for key, row in self.layout.rows.items() if "token" in row.dims}
        for block in np.flatnonzero(~self._done).tolist():
            if min((block + 1) * self.layout.block, self.layout.sizes["token"]) > tokens_complete:
                break
            written = self._written.pop(block, Counter())
            missing = [key for key in rows if written[key] * self._layers_in_chunk(key) < self._layers(key)]
            if missing:
                raise StoreError(f"{self.path}: block {block} cannot be done, expected all of {', '.join(missing)} to be written")
            with self._disk():
                self._arrays["done"][block] = 1
            self._done[block] = True

    def finish(self) -> None:
        """Check that every block is done, and put a replacement in the place of the old store.

        Raises StoreError if tokens are missing.
        """
        if not self._done.all():
            raise StoreError(
                f"{self.path}: expected {self.layout.sizes['token']} tokens to be complete, found {self.first_token}"
            )
        if self._root != self.path:
            with self._disk():
                place.replace(self.path)
            self._root = self.path
        self.close()

    def close(self) -> None:
        """Let go of the store; a replacement that is not complete is removed and the old store stays as it was."""
        if self._held is not None:
            if self._root != self.path:
                place.sweep(self.path)
            place.unlock(self.path, self._held)
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _before(self, row: Variable, token: int) -> int:
        """How many of the variable's marks or snapshots come before a token."""
        return self.layout.marks_before(token) if "mark" in row.dims else int(np.searchsorted(self.layout.snapshots, token))

    def _cast(self, row: Variable, values: np.ndarray, layer: int, start: int) -> np.ndarray:
        expected = (len(values), *(self.layout.sizes[dim] for dim in row.dims[2:]))
        if values.shape != expected or start + len(values) > self.layout.sizes["token"]:
            raise StoreError(f"{row.key}, layer {layer}, token {start}: expected shape {expected}, found {values.shape}")
        with np.errstate(over="ignore"):
            cast = values.astype(row.dtype, copy=False)
        if cast.dtype.itemsize < values.dtype.itemsize and (infinite := np.isinf(cast)).any():
            beyond = np.argwhere(infinite & np.isfinite(values))
            if len(beyond):
                token, head, *_ = (int(i) for i in beyond[0])
                found = f"{values[tuple(beyond[0])]:.4g} at layer {layer}, token {start + token}, head {head}"
                raise StoreError(f"{row.key}: expected values within {row.dtype} (±{np.finfo(row.dtype).max:.5g}), found {found}")
        return cast

    def _gather(self, row: Variable, values: np.ndarray, chunk: int, at: int, start: int) -> None:
        """Spread values over the buffers of their blocks, at place ``at`` of the layers of ``chunk``, and write the full ones."""
        size, end = self.layout.block, self.layout.sizes["token"]
        for block in range(start // size, -(-(start + len(values)) // size)):
            if self._done[block]:
                continue
            low, high = block * size, min((block + 1) * size, end)
            first, last = max(start, low), min(start + len(values), high)
            key = (row.key, chunk, block)
            buffer, filled = self._buffers.pop(key) if key in self._buffers else (self._empty(row, chunk, high - low), 0)
            buffer[at, first - low : last - low] = values[first - start : last - start]
            filled += last - first
            if filled < buffer.shape[0] * buffer.shape[1]:
                self._buffers[key] = buffer, filled
            else:
                self._flush(row, chunk, block, buffer)

    def _empty(self, row: Variable, chunk: int, tokens: int) -> np.ndarray:
        """A buffer ``[layers of the chunk, tokens, ...]``, one layer where the variable has none."""
        per_chunk = self._layers_in_chunk(row.key)
        layers = min(per_chunk, self._layers(row.key) - chunk * per_chunk)
        rest = (self.layout.sizes[dim] for dim in row.dims[row.dims.index("token") + 1 :])
        return np.full((layers, tokens, *rest), row.fill, dtype=object if row.dtype == "str" else row.dtype)

    def _flush(self, row: Variable, chunk: int, block: int, buffer: np.ndarray) -> None:
        tokens = slice(block * self.layout.block, block * self.layout.block + buffer.shape[1])
        with self._disk():
            if row.dims[0] == "layer":
                first = chunk * self._layers_in_chunk(row.key)
                self._arrays[row.key][first : first + buffer.shape[0], tokens] = buffer
            else:
                self._arrays[row.key][tokens] = buffer[0]
        self._written.setdefault(block, Counter())[row.key] += 1

    def _layers(self, key: str) -> int:
        return self.layout.sizes["layer"] if self.layout.rows[key].dims[0] == "layer" else 1

    def _layers_in_chunk(self, key: str) -> int:
        return self._chunk[key][0] if self.layout.rows[key].dims[0] == "layer" else 1

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            whole = f"{self.first_token} of {self.layout.sizes['token']} tokens are complete, and resume goes on from there"
            kept = whole if self._root == self.path else "the store that was to be replaced is as it was"
            raise StoreError(f"{self.path}: writing failed: {error.strerror or error}; {kept}") from error


@contextlib.contextmanager
def _held(path: Path, consequence: str) -> Iterator[int]:
    """Hold the lock of ``path``, and keep it if the body succeeds: the writer lets go of it."""
    try:
        held = place.lock(path)
        try:
            yield held
        except BaseException:
            place.unlock(path, held)
            raise
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; {consequence}") from error


def _array(group: zarr.Group, key: str) -> "zarr.Array[Any]":
    array = group[key]
    if not isinstance(array, zarr.Array):
        raise StoreError(f"{group.name}: expected array {key}, found a group")
    return array


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
