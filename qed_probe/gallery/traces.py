"""Every diagnostic that a trace can carry, as pictures."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xarray as xr
from matplotlib.figure import Figure

from qed_probe import analyses, figures
from qed_probe.analyses import budgets, correction, decay, geometry, saturation
from qed_probe.analyses.difference import TOLERANCE
from qed_probe.errors import StoreError
from qed_probe.gallery.files import folder_for, picture_for, save
from qed_probe.store import reader

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Diagnostic:
    """One row of the table: the name of its files, its analysis, its figure and the variables that it cannot do without.

    An analysis that cannot do without variables of the store's ``inputs`` takes these as its second argument.
    """

    name: str
    analysis: Callable[..., xr.Dataset]
    figure: Callable[[xr.Dataset], Figure]
    needs: tuple[str, ...]
    inputs: tuple[str, ...] = ()


DIAGNOSTICS = (
    Diagnostic("eigenvalues", analyses.eigenvalues, figures.draw_eigenvalues, ("eigenvalue",)),
    Diagnostic("rho", analyses.rho, figures.draw_rho, ("rho",)),
    Diagnostic("correction-share", analyses.correction_share, figures.draw_correction_share, correction.NAMES),
    Diagnostic("rho-read", analyses.rho_read, figures.draw_rho_read, ("rho", "read_norm")),
    Diagnostic("half-life", analyses.half_life, figures.draw_half_life, decay.NAMES),
    Diagnostic("gate-budgets", analyses.gate_budgets, figures.draw_gate_budgets, budgets.NAMES),
    Diagnostic("address-geometry", analyses.address_geometry, figures.draw_address_geometry, ("prompt_index",), geometry.INPUTS),
    Diagnostic("gate-saturation", analyses.gate_saturation, figures.draw_gate_saturation, (), saturation.INPUTS),
    Diagnostic("energy", analyses.energy_ledger, figures.draw_energy, ("prompt_index",), ("g", "k", "a", "u")),
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


def plot_traces(ds: xr.Dataset, folder: Path, formats: Collection[str], inputs: xr.Dataset | None = None) -> list[Path]:
    """Draw every row of DIAGNOSTICS that a trace, and its ``inputs`` if they were kept, can carry.

    What cannot be drawn is logged as a warning with the reason (``skipped`` returns the same). Raises StoreError for a trace that
    can carry nothing.
    """
    reasons = skipped(ds, inputs)
    if len(reasons) == len(DIAGNOSTICS):
        raise StoreError(f"expected a store with records to draw; {'; '.join(f'{k}: {v}' for k, v in reasons.items())}")
    for name, reason in reasons.items():
        log.warning("skipped %s: %s", name, reason)
    written: list[Path] = []
    for row in DIAGNOSTICS:
        if row.name not in reasons:
            found = row.analysis(ds, inputs) if row.inputs else row.analysis(ds)
            written += save(row.figure(found), folder / row.name, formats)
    return written


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
    folder = None if output is None else folder_for(output, formats)
    found = analyses.difference(opened(first), opened(second), tolerance)
    if folder is not None:
        save(figures.draw_difference(found), folder / "difference", formats)
    return found


def skipped(ds: xr.Dataset, inputs: xr.Dataset | None = None) -> dict[str, str]:
    """The diagnostics that this Dataset, and these inputs of its store, cannot carry, each with the reason."""
    reasons = {row.name: _reason(row, ds, inputs) for row in DIAGNOSTICS}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(row: Diagnostic, ds: xr.Dataset, inputs: xr.Dataset | None) -> str:
    if row.inputs and inputs is None:
        return "the store has no inputs; a trace with save_inputs keeps them"
    names = [name for name in row.needs if name not in ds]
    names += [f"inputs/{name}" for name in row.inputs if inputs is not None and name not in inputs]
    return f"the store has no {', '.join(names)}" if names else ""


def opened(stores: xr.Dataset | str | Path | Iterable[str | Path]) -> xr.Dataset:
    """One store or several as one Dataset, or a Dataset as it is."""
    if isinstance(stores, xr.Dataset):
        return stores
    paths = [stores] if isinstance(stores, str | Path) else list(stores)
    return reader.open(*paths)


def contrast_traces(stores: Sequence[xr.Dataset | str | Path], record: str, output: str | Path | None = None) -> xr.Dataset:
    """One record of two traces of a checkpoint, head by head, or of several checkpoints, by each layer's quantiles.

    ``analyses.record_contrast`` where there are two stores of one checkpoint, else ``analyses.record_quantiles``; drawn into the
    file ``output`` if that is given. Raises as these do, and InputError for an output that is no picture.
    """
    picture = picture_for(output)
    runs = [opened(store) for store in stores]
    alike = len(runs) == 2 and runs[0].attrs.get("checkpoint_digest") == runs[1].attrs.get("checkpoint_digest")
    found = analyses.record_contrast(runs[0], runs[1], record) if alike else analyses.record_quantiles(runs, record)
    if picture is not None:
        save((figures.draw_record_contrast if alike else figures.draw_record_quantiles)(found), *picture)
    return found
