"""What outcomes show, as pictures: accuracy, depth, strengths, contrasts."""

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from qed_probe import analyses, figures
from qed_probe.analyses.contrasts import PANELS
from qed_probe.analyses.heads import WAY, one_head
from qed_probe.analyses.runs import judged
from qed_probe.errors import StoreError
from qed_probe.gallery.files import picture_for, save
from qed_probe.store.outcomes import open_outcomes

log = logging.getLogger(__name__)


def plot_outcomes(ds: xr.Dataset, folder: Path, formats: Collection[str]) -> list[Path]:
    """Draw accuracy by length, or of tasks without one, by depth for each arm; by strength, mode and head where these changed."""
    written: list[Path] = []
    other_mode = ds["mode"] != "full"
    changed = (ds["strength"] != 1) | (ds["direction"] != "own") | other_mode
    usual = bool((~changed).any())
    if "correct" not in ds or not usual:
        raise StoreError("expected outcomes with answers, at strength 1, to draw; found none")
    shares = analyses.accuracy(ds)
    lengths = [bool(n) for n in shares["length"].values]
    if any(lengths):
        written += save(figures.draw_accuracy(shares.isel(length=lengths)), folder / "accuracy", formats)
    if not all(lengths):
        written += save(figures.draw_dots(shares), folder / "tasks", formats)
    if ds["depth"].notnull().any():
        found = analyses.by_depth(ds)
        for task, arm in sorted({*zip(found["task"].values, found["arm"].values, strict=True)}):
            mine = found.isel(run=(found["task"].values == task) & (found["arm"].values == arm))
            written += save(figures.draw_depth(mine), folder / f"depth-{task}-{arm}", formats)
    alone = _one_way_heads(ds)
    if (other_mode & ~alone).any():
        written += save(figures.draw_modes(analyses.modes(ds.isel(sample=~alone))), folder / "modes", formats)
    if (changed & ~alone & (ds["direction"] == "own") & ~other_mode).any():
        written += save(figures.draw_strengths(analyses.strengths(ds.isel(sample=~alone))), folder / "strengths", formats)
    if alone.any():
        written += save(figures.draw_heads(analyses.head_effects(ds)), folder / "heads", formats)
    if (changed & ~alone & (ds["direction"] != "own")).any():
        log.warning(
            "skipped other directions, which are no strengths of the model's own: analyses.change_effects has the numbers"
        )
    return written


def _one_way_heads(ds: xr.Dataset) -> NDArray[np.bool_]:
    """Which samples are of a head that was changed alone; none if heads were changed in several ways."""
    frame = judged(ds)
    rows = one_head(frame)
    return frame.index.isin(rows.index if len(rows[WAY].drop_duplicates()) == 1 else [])


def contrast(
    results: xr.Dataset | str | Path | Iterable[str | Path],
    output: str | Path | None = None,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    task: str | None = None,
    only_learned: bool = False,
) -> xr.Dataset:
    """Differences between arms, as ``analyses.contrast`` says them, drawn into the file ``output`` if that is given.

    Without ``pairs``, those of QED's Figure 2, and the one that it lacks, of which there are outcomes. Raises as
    ``analyses.contrast`` and ``open_outcomes`` do, StoreError if there are outcomes of none of them, and InputError for an output
    that is no picture.
    """
    picture = picture_for(output)
    ds = (
        results
        if isinstance(results, xr.Dataset)
        else open_outcomes([results] if isinstance(results, str | Path) else [*results])
    )
    found = analyses.contrast(ds, pairs or _known(ds), task=task, only_learned=only_learned)
    if picture is not None:
        save(figures.draw_contrast(found), *picture)
    return found


def contrast_published(output: str | Path | None = None) -> xr.Dataset:
    """The differences that QED's paper prints, or that follow from what it prints, drawn as ``contrast`` draws measured ones."""
    picture = picture_for(output)
    found = analyses.published_contrast()
    if picture is not None:
        save(figures.draw_contrast(found), *picture)
    return found


def _known(ds: xr.Dataset) -> Sequence[tuple[str, str]]:
    arms = sorted(set(judged(ds)["arm"]))
    pairs = [pair for pair in PANELS if set(pair) <= set(arms)]
    if not pairs:
        wanted = ", ".join(f"{first} and {second}" for first, second in PANELS)
        raise StoreError(f"expected outcomes of {wanted}, or pairs of the arms that are there; found {', '.join(arms)}")
    return pairs
