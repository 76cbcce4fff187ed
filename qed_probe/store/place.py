"""Where a store lies on disk: is it one, who writes it, and how a new one takes the place of an old one.

Beside ``NAME`` there may be hidden siblings: ``.NAME.lock`` while somebody writes, ``.NAME.tmp`` while a store is being laid out,
``.NAME.new`` until a replacement is complete and ``.NAME.old`` while it is put in place.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from qed_probe.errors import StoreError
from qed_probe.store import schema

KINDS = {
    schema.OUTCOMES: "a store of outcomes",
    schema.REPLAYS: "a store of replays",
    schema.EIGEN: "a store of eigenvalues",
    schema.MEMORY: "a store of memories",
    schema.PATCHES: "a store of patches",
}
"""Stores that are no traces, in words, by their attribute ``schema``."""


def sibling(path: Path, kind: str) -> Path:
    """The hidden neighbour ``.NAME.kind``."""
    return path.with_name(f".{path.name}.{kind}")


def stored_attrs(path: Path) -> dict[str, object]:
    """The attributes of the store at ``path``, read from its metadata alone.

    Raises StoreError if there is nothing, or something that qed-probe did not write.
    """
    if not path.exists():
        raise StoreError(f"{path}: expected a qed-probe store, found nothing there")
    attrs = group_attrs(path)
    if not isinstance(attrs.get("qed_probe_schema"), int):
        expected = "a qed-probe store (a zarr v3 group with attribute qed_probe_schema)"
        raise StoreError(f"{path}: expected {expected}, found something else: {kind(path)}")
    return schema.plain(attrs)


def group_attrs(path: Path) -> dict[str, Any]:
    """The attributes of a zarr group, anybody's; none if there is no group."""
    try:
        attrs = json.loads((path / "zarr.json").read_text("utf-8"))["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return attrs if isinstance(attrs, dict) else {}


def kind(path: Path) -> str:
    """What is at a path, in words."""
    if not path.is_dir():
        return "a file" if os.path.lexists(path) else "nothing there"
    attrs = group_attrs(path)
    if attrs.get("schema") in KINDS:
        return KINDS[attrs["schema"]]
    if "qed_probe_schema" in attrs:
        return "a trace store"
    return "another zarr group" if (path / "zarr.json").is_file() else "a directory that is no store"


def lock(path: Path) -> int:
    """Become the only writer of ``path`` and return what ``unlock`` needs; the system frees the lock of a killed process.

    Raises StoreError if somebody else is writing it, or if it is the root of the file system.
    """
    if not path.name:
        raise StoreError(f"{path}: expected the path of a store, found the root of the file system")
    name = sibling(path, "lock")
    while True:
        held = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            raise StoreError(f"{path}: expected to be its only writer, found another process that is writing it") from None
        # The file may have been removed by its last holder between open and flock: then this lock is on nothing.
        if name.exists() and os.path.samestat(os.stat(name), os.fstat(held)):
            return held
        os.close(held)


def unlock(path: Path, held: int) -> None:
    """Remove the lock file, then let go."""
    sibling(path, "lock").unlink(missing_ok=True)
    os.close(held)


def restore(path: Path) -> None:
    """Undo a replacement that was stopped between its two renames."""
    old = sibling(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)


def found(path: Path) -> Path:
    """Where a store is: at ``path`` or, after a replacement that was stopped between its two renames, at its old place."""
    old = sibling(path, "old") if path.name else path
    return old if old.exists() and not path.exists() else path


def sweep(path: Path) -> None:
    """Remove what stopped writers left beside ``path``, which never is the only copy of a store."""
    restore(path)
    for kind in ("tmp", "new", "old"):
        if sibling(path, kind).exists():
            shutil.rmtree(sibling(path, kind))


def replace(path: Path) -> None:
    """Put the complete ``.NAME.new`` in the place of ``NAME``; at every moment one of them is whole."""
    path.rename(sibling(path, "old"))
    sibling(path, "new").rename(path)
    shutil.rmtree(sibling(path, "old"))
