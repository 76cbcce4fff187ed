"""``qed-probe info``."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.trace import TrustRemoteCode
from qed_probe.errors import CheckpointError, InputError

if TYPE_CHECKING:
    import xarray as xr

    from qed_probe.models.foreign.description import Description

Subject = Annotated[Path, typer.Argument(metavar="RUN.zarr | CHECKPOINT", help="A store or a checkpoint.")]


def info(path: Subject, trust_remote_code: TrustRemoteCode = False) -> None:
    """Say what is in a store or a checkpoint."""
    from qed_probe.store import place
    from qed_probe.store.schema import EIGEN, MEMORY, OUTCOMES, PATCHES, REPLAYS

    where = place.found(path)
    where = where if where.exists() else qp.locate(path)
    if not where.exists():
        raise InputError(f"expected a store or a checkpoint, found nothing at {path}")
    store = (where / "zarr.json").exists()
    if not store:
        facts = list(_checkpoint(where, trust_remote_code))
    else:
        kinds = {
            OUTCOMES: (qp.open_outcomes, _outcomes), EIGEN: (qp.open_eigen, _eigen), PATCHES: (qp.open_patches, _patches),
            MEMORY: (qp.open_memory, _memory), REPLAYS: (qp.open_replays, _replays),
        }  # fmt: skip
        known = {place.KINDS[kind]: way for kind, way in kinds.items()}
        load, say = known.get(place.kind(where), (qp.open, partial(_trace, where)))
        ds = load(where)
        attrs = ((name, value) for name, value in ds.attrs.items() if name not in ("variables", "complete"))
        facts = [*say(ds), ("size", _size(where)), *attrs]
    screen.facts(str(path), facts)
    if store:
        typer.echo(f"next: qed-probe plot {path}")
    elif not any(name == "traceable" and str(value).startswith("no") for name, value in facts):
        typer.echo(f"what a trace costs: qed-probe trace {path} --dry-run")


def _outcomes(ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield "samples", f"{ds.sizes['sample']:,}"
    for name in ("model", "arm", "seed", "task", "length", "strength", "direction", "mode"):
        values = sorted({*ds[name].values.tolist()})
        yield name, ", ".join(map(str, values[:12])) + (f", +{len(values) - 12} more" if len(values) > 12 else "")


def _eigen(ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield "tokens", f"{int(ds['prompt_tokens'].sum()):,} of {int(ds['prompt_length'].sum()):,}"
    yield "claims", ", ".join(ds["claim"].values.tolist())


def _patches(ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield "pairs", f"{ds.sizes['pair']:,}"
    yield "exchanged", ", ".join(ds["what"].values.tolist())
    yield "heads", f"{ds.sizes['layer']} layers of {ds.sizes['head']}"


def _replays(ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield from ((f"{name}s", ", ".join(ds[name].values.tolist())) for name in ("direction", "regime"))
    yield "layers", f"{ds.sizes['layer']}"


def _memory(ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield "heads", f"{ds.sizes['layer']} layers of {ds.sizes['head']}"
    if lost := int(ds["nonfinite"].max()):
        yield "left out", f"up to {lost:,} prompts a layer whose inputs are not finite"


def _trace(path: Path, ds: "xr.Dataset") -> Iterator[tuple[str, object]]:
    yield "prompts", f"{ds.sizes['boundary'] - 1:,}"
    yield "tokens", f"{ds.sizes['token']:,}, {int(ds['complete'].sum()):,} of them complete"
    yield "variables", ", ".join(str(name) for name in ds.data_vars)
    yield "groups", ", ".join(group for group in ("inputs", "states") if (path / group).is_dir()) or "none"


def _checkpoint(path: Path, trust: bool) -> Iterator[tuple[str, object]]:
    config = qp.describe(path, trust_remote_code=trust)
    if not isinstance(config, qp.ModelConfig):
        yield from _foreign(config)
        return
    yield from config.used().items()
    yield "size", _size(path)
    yield from qp.read_provenance(path).items()


def _foreign(found: "Description") -> Iterator[tuple[str, object]]:
    """What is known of another library's checkpoint without its weights, and whether it can be traced."""
    yield "family", f"{found.family} ({found.model} of {found.library})"
    yield "mixer", found.mixer
    yield "layers", f"{len(found.layers)} of {found.depth}: {', '.join(map(str, found.layers))}"
    yield "heads", f"{found.heads}, of keys {found.key_heads}"
    names = ("key_dim", "value_dim", "hidden", "vocab_size", "longest", "gate_max")
    yield from ((name, getattr(found, name)) for name in names)
    yield "size", _size(found.directory)
    try:
        stored = found.weights
    except CheckpointError as error:
        yield "traceable", f"no: {error}"
    else:
        yield "dtype", stored.stored()
        yield "A_log", stored.stored("A_log")
        yield "traceable", "yes, if loading finds every weight"


def _size(path: Path) -> str:
    return screen.size(sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()))
