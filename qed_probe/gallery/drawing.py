"""Every figure of whatever kind of store."""

from collections.abc import Collection, Iterable
from pathlib import Path

import xarray as xr

from qed_probe import figures
from qed_probe.errors import StoreError
from qed_probe.gallery.files import folder_for, save
from qed_probe.gallery.outcomes import plot_outcomes
from qed_probe.gallery.traces import opened, plot_traces
from qed_probe.store import outcomes, place, reader, replays
from qed_probe.store.schema import OUTCOMES, REPLAYS
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

    ``stores`` is one store or several, traces of the same checkpoint or outcomes, or one of replays, or what ``open``,
    ``open_outcomes`` or ``open_replays`` made of them, or the directory of a training run. Stores are drawn with the ``inputs``
    that they have, a Dataset of a trace with those given. PNG has 300 dots an inch. What a trace cannot carry is logged as a
    warning with the reason. Files of the same name are replaced. Raises InputError for an unknown format or an output that is no
    directory, StoreError for stores that cannot be read, of several kinds, or that can carry nothing.
    """
    folder = folder_for(output, formats)
    if isinstance(stores, xr.Dataset):
        results = {OUTCOMES: plot_outcomes, REPLAYS: _plot_replays}.get(str(stores.attrs.get("schema")))
        return results(stores, folder, formats) if results else plot_traces(stores, folder, formats, inputs)
    paths = [Path(stores)] if isinstance(stores, str | Path) else [Path(path) for path in stores]
    if len(paths) == 1 and (paths[0] / LOG).is_file():
        return _plot_training(paths[0], folder, formats)
    if any(place.kind(path) == place.KINDS[REPLAYS] for path in paths):
        if len(paths) > 1:
            raise StoreError(f"expected one store of replays, or traces or outcomes alone, found {', '.join(map(str, paths))}")
        return _plot_replays(replays.open_replays(paths[0]), folder, formats)
    kinds = [place.kind(path) == place.KINDS[OUTCOMES] for path in paths]
    if not any(kinds):
        kept = all((place.found(path) / "inputs").is_dir() for path in paths)
        return plot_traces(opened(paths), folder, formats, reader.open_inputs(*paths) if kept else None)
    if not all(kinds):
        raise StoreError(
            f"expected traces or outcomes alone, found {paths[kinds.index(True)]} of outcomes beside {paths[kinds.index(False)]}"
        )
    return plot_outcomes(outcomes.open_outcomes(paths), folder, formats)


def _plot_replays(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    return save(figures.draw_replay(ds), folder / "replay", formats)


def _plot_training(run: Path, folder: Path, formats: Collection[str]) -> list[Path]:
    ds = read_history(run)
    if "lambda" not in ds:
        raise StoreError(
            f"{run}: expected the run of a model that adds a direction, whose λ could be drawn, found {ds.attrs['subject']}"
        )
    return save(figures.draw_lambda(ds), folder / "lambda", formats)
