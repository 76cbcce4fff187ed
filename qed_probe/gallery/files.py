"""Where figures go, and how they are written."""

from collections.abc import Collection
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from qed_probe.errors import InputError
from qed_probe.figures import style

FORMATS = ("png", "svg", "pdf")


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


def folder_for(output: str | Path, formats: Collection[str]) -> Path:
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


def picture_for(output: str | Path | None) -> tuple[Path, list[str]] | None:
    """Where a single figure goes, without its ending, and its formats, as ``save`` takes them; None for none."""
    if output is None:
        return None
    path = Path(output)
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise InputError(f"output: expected a file that ends in {', '.join('.' + x for x in FORMATS)}, found {path}")
    folder_for(path.parent, [kind])
    return path.with_suffix(""), [kind]
