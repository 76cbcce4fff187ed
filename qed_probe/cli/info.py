"""``qed-probe info``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.errors import InputError

Subject = Annotated[Path, typer.Argument(metavar="RUN.zarr | CHECKPOINT", help="A store or a checkpoint's directory.")]


def info(path: Subject) -> None:
    """Say what is in a store or a checkpoint."""
    if not path.exists():
        raise InputError(f"expected a store or a checkpoint, found nothing at {path}")
    store = (path / "zarr.json").exists()
    screen.facts(str(path), list(_store(path) if store else _checkpoint(path)))
    typer.echo(f"next: qed-probe plot {path}" if store else f"what a trace costs: qed-probe trace {path} --dry-run")


def _store(path: Path) -> Iterator[tuple[str, object]]:
    ds = qp.open(path)
    yield "prompts", f"{ds.sizes['boundary'] - 1:,}"
    yield "tokens", f"{ds.sizes['token']:,}, {int(ds['complete'].sum()):,} of them complete"
    yield "size", _size(path)
    yield "variables", ", ".join(str(name) for name in ds.data_vars)
    yield "groups", ", ".join(group for group in ("inputs", "states") if (path / group).is_dir()) or "none"
    yield from ((name, value) for name, value in ds.attrs.items() if name not in ("variables", "complete"))


def _checkpoint(path: Path) -> Iterator[tuple[str, object]]:
    yield from qp.read_config(path).used().items()
    yield "size", _size(path)
    yield from qp.read_provenance(path).items()


def _size(path: Path) -> str:
    return screen.size(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
