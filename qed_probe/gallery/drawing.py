"""Every figure of whatever kind of store."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import xarray as xr

from qed_probe import analyses, figures
from qed_probe.eigen.parts import together
from qed_probe.eigen.table import TABLE, compare_eigen
from qed_probe.errors import StoreError
from qed_probe.gallery.eigen import plot_eigen
from qed_probe.gallery.files import folder_for, save
from qed_probe.gallery.memory import plot_memory
from qed_probe.gallery.outcomes import plot_outcomes
from qed_probe.gallery.traces import opened, plot_traces
from qed_probe.store import eigen, memory, outcomes, patching, place, reader, replays
from qed_probe.store.schema import EIGEN, MEMORY, OUTCOMES, PATCHES, REPLAYS
from qed_probe.training import read_history
from qed_probe.training.state import LOG


def plot(
    stores: xr.Dataset | str | Path | Iterable[str | Path],
    output: str | Path,
    *,
    formats: Collection[str] = ("png", "svg"),
    inputs: xr.Dataset | None = None,
) -> list[Path]:
    """Draw every diagnostic that the stores can carry into the directory ``output``, and return the files.

    ``stores`` is one store or several of a kind: traces of the same checkpoint, outcomes, eigenvalues, or one of replays,
    memories or patches; or what ``open``, ``open_outcomes``, ``compare_eigen``, ``open_replays`` … made of them; or the directory
    of a training run. Traces are drawn with the ``inputs`` that they have, a Dataset of a trace with those given. PNG has 300
    dots an inch. What a trace cannot carry is logged as a warning with the reason. Files of the same name are replaced. Raises
    InputError for an unknown format or an output that is no directory, StoreError for stores that cannot be read, of several
    kinds, or that can carry nothing.
    """
    folder = folder_for(output, formats)
    if isinstance(stores, xr.Dataset):
        drawn = {OUTCOMES: plot_outcomes, TABLE: plot_eigen, **{schema: draw for schema, (_, draw) in SINGLE.items()}}
        results = drawn.get(str(stores.attrs.get("schema")))
        return results(stores, folder, formats) if results else plot_traces(stores, folder, formats, inputs)
    paths = [Path(stores)] if isinstance(stores, str | Path) else [Path(path) for path in stores]
    if len(paths) == 1 and (paths[0] / LOG).is_file():
        return _plot_training(paths[0], folder, formats)
    kind = _one_kind(paths)
    if kind == place.KINDS[OUTCOMES]:
        return plot_outcomes(outcomes.open_outcomes(paths), folder, formats)
    if kind == place.KINDS[EIGEN]:
        return plot_eigen(compare_eigen(together({str(path): eigen.open_eigen(path) for path in paths})), folder, formats)
    for schema, (load, draw) in SINGLE.items():
        if kind == place.KINDS[schema]:
            if len(paths) > 1:
                raise StoreError(f"expected one {kind.removeprefix('a ')}, found {', '.join(map(str, paths))}")
            return draw(load(paths[0]), folder, formats)
    kept = all((place.found(path) / "inputs").is_dir() for path in paths)
    return plot_traces(opened(paths), folder, formats, reader.open_inputs(*paths) if kept else None)


def _one_kind(paths: Sequence[Path]) -> str:
    """What all of these are, in words; what is no store is left to who opens it."""
    kinds = [place.kind(place.found(path)) for path in paths]
    kinds = [kind if kind in place.KINDS.values() else "a trace store" for kind in kinds]
    for path, kind in zip(paths, kinds, strict=True):
        if kind != kinds[0]:
            raise StoreError(f"expected stores of one kind, found {kinds[0]} at {paths[0]} beside {kind} at {path}")
    return kinds[0] if kinds else "a trace store"


def _plot_replays(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    return save(figures.draw_replay(ds), folder / "replay", formats)


def _plot_patches(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    return save(figures.draw_patches(analyses.patch_effects(ds)), folder / "patching", formats)


SINGLE = {
    REPLAYS: (replays.open_replays, _plot_replays),
    MEMORY: (memory.open_memory, plot_memory),
    PATCHES: (patching.open_patches, _plot_patches),
}
"""Stores of which one is drawn at a time: how each is opened and drawn."""


def _plot_training(run: Path, folder: Path, formats: Collection[str]) -> list[Path]:
    ds = read_history(run)
    if "lambda" not in ds:
        raise StoreError(
            f"{run}: expected the run of a model that adds a direction, whose λ could be drawn, found {ds.attrs['subject']}"
        )
    return save(figures.draw_lambda(ds), folder / "lambda", formats)
