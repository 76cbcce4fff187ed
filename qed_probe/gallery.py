"""Every diagnostic that a store can carry, as pictures."""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib as mpl
import xarray as xr
from matplotlib.figure import Figure

from qed_probe import analyses, figures
from qed_probe.analyses import Analysis, correction, decay
from qed_probe.analyses.difference import TOLERANCE
from qed_probe.errors import InputError, StoreError
from qed_probe.figures import style
from qed_probe.store import reader

FORMATS = ("png", "svg", "pdf")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Diagnostic:
    """One row of the table: the name of its files, its analysis, its figure and the variables that it cannot do without."""

    name: str
    analysis: Analysis
    figure: Callable[[xr.Dataset], Figure]
    needs: tuple[str, ...]


DIAGNOSTICS = (
    Diagnostic("eigenvalues", analyses.eigenvalues, figures.draw_eigenvalues, ("eigenvalue",)),
    Diagnostic("rho", analyses.rho, figures.draw_rho, ("rho",)),
    Diagnostic("correction-share", analyses.correction_share, figures.draw_correction_share, correction.NAMES),
    Diagnostic("rho-read", analyses.rho_read, figures.draw_rho_read, ("rho", "read_norm")),
    Diagnostic("half-life", analyses.half_life, figures.draw_half_life, decay.NAMES),
    Diagnostic(
        "tokens-written",
        partial(analyses.token_strip, record="residual_norm"),
        figures.draw_token_strip,
        ("residual_norm", "token_text"),
    ),
    Diagnostic(
        "tokens-read", partial(analyses.token_strip, record="read_norm"), figures.draw_token_strip, ("read_norm", "token_text")
    ),
)


def plot(
    stores: xr.Dataset | str | Path | Iterable[str | Path],
    output: str | Path,
    *,
    formats: Collection[str] = ("png", "svg"),
) -> list[Path]:
    """Draw every row of DIAGNOSTICS that the stores can carry into the directory ``output``, and return the files.

    ``stores`` is one store, several of the same checkpoint, or what ``open`` made of them. PNG has 300 dots an inch. What cannot
    be drawn is logged as a warning with the reason (``skipped`` returns the same). Files of the same name are replaced. Raises
    InputError for an unknown format or an output that is no directory, StoreError for stores that cannot be read or that can
    carry nothing.
    """
    folder = _folder(output, formats)
    ds = _opened(stores)
    reasons = skipped(ds)
    if len(reasons) == len(DIAGNOSTICS):
        raise StoreError(f"expected a store with records to draw; {'; '.join(f'{k}: {v}' for k, v in reasons.items())}")
    for name, reason in reasons.items():
        log.warning("skipped %s: %s", name, reason)
    drawn = [row for row in DIAGNOSTICS if row.name not in reasons]
    return [path for row in drawn for path in save(row.figure(row.analysis(ds)), folder / row.name, formats)]


def diff(
    first: xr.Dataset | str | Path,
    second: xr.Dataset | str | Path,
    output: str | Path | None = None,
    *,
    tolerance: float = TOLERANCE,
    formats: Collection[str] = ("png", "svg"),
) -> xr.Dataset:
    """Where two runs over the same tokens part, as ``analyses.difference`` says it; drawn into ``output`` if that is given.

    Raises as ``analyses.difference`` and ``plot`` do.
    """
    folder = None if output is None else _folder(output, formats)
    found = analyses.difference(_opened(first), _opened(second), tolerance)
    if folder is not None:
        save(figures.draw_difference(found), folder / "difference", formats)
    return found


def skipped(ds: xr.Dataset) -> dict[str, str]:
    """The diagnostics that this Dataset cannot carry, each with the reason."""
    absent = {row.name: [name for name in row.needs if name not in ds] for row in DIAGNOSTICS}
    return {name: f"the store has no {', '.join(names)}" for name, names in absent.items() if names}


def save(figure: Figure, stem: Path, formats: Collection[str]) -> list[Path]:
    """Write a figure as ``stem.FORMAT``, the same bytes each time, its directory made if need be, and return the files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with mpl.rc_context(style.RC):
        # Laid out once: each further draw would move things by parts of a point.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for path, kind in zip(paths, formats, strict=True):
            fresh = path.with_name(f".{path.name}.new")
            try:
                figure.savefig(fresh, format=kind, metadata=undated[kind])
                fresh.replace(path)
            except OSError as error:
                raise InputError(f"{path}: writing failed: {error}; what was there is as it was") from error
            finally:
                fresh.unlink(missing_ok=True)
    return paths


def _folder(output: str | Path, formats: Collection[str]) -> Path:
    """The directory for figures, once it and their formats are known to be fit."""
    unknown = [x for x in formats if x not in FORMATS]
    if unknown or not formats:
        raise InputError(f"expected formats among {', '.join(FORMATS)}; found {', '.join(unknown) or 'none'}")
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"expected a directory to write figures to, found a file: {folder}")
    if (folder / "zarr.json").exists():
        raise InputError(f"expected a directory to write figures to, found a zarr store: {folder}")
    return folder


def _opened(stores: xr.Dataset | str | Path | Iterable[str | Path]) -> xr.Dataset:
    if isinstance(stores, xr.Dataset):
        return stores
    paths = [stores] if isinstance(stores, str | Path) else list(stores)
    return reader.open(*paths)
