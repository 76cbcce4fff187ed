"""``qed-probe contrast``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

Results = Annotated[list[Path] | None, typer.Argument(metavar="OUT.zarr...", help="Stores of outcomes.")]
Pairs = Annotated[
    list[str] | None, typer.Option("--pair", metavar="A:B", help="Arms, the first minus the second; may be repeated.")
]
Task = Annotated[str | None, typer.Option(help="The task, where the stores hold several.")]
OnlyLearned = Annotated[bool, typer.Option("--only-learned", help="Only pairs of runs that both learned the task: a selection.")]
Published = Annotated[bool, typer.Option("--published", help="The values that QED's paper prints, instead.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The figure: .png, .svg or .pdf.")]


def contrast(
    results: Results = None,
    pair: Pairs = None,
    task: Task = None,
    only_learned: OnlyLearned = False,
    published: Published = False,
    output: Output = Path("contrast.png"),
) -> None:
    """Differences between arms by length, seeds kept apart."""
    if published == bool(results):
        raise InputError("expected stores of outcomes or --published, found both or neither")
    if published:
        ds = qp.contrast_published(output)
    else:
        pairs = [_pair(text) for text in pair or []] or None
        ds = qp.contrast(results or [], output, pairs=pairs, task=task, only_learned=only_learned)
    lengths = [f"{n:,}" for n in ds["length"].values]
    for panel in ds["panel"].values:
        screen.table(f"{panel}, percentage points", ["", *lengths], _rows(ds.sel(panel=panel)))
    if published:
        typer.echo(f"{ds.attrs['source']}, {ds.attrs['place']}, p. {ds.attrs['page']}. –: not given. {ds.attrs['gaps']}")
    else:
        typer.echo(
            "(b/c): samples that only the first / only the second got right; *: p < 0.05 by exact McNemar's test, unadjusted,"
        )
        typer.echo("which compares two checkpoints, not two mechanisms.")
        typer.echo(f"{ds.attrs['task']}, {ds.attrs['selection']}. {ds.attrs['unpaired']}".rstrip(" ."))
    typer.echo(f"The figure is {output}")


def _rows(panel: "xr.Dataset") -> list[list[str]]:
    rows = [
        [f"seed {seed}", *(_cell(one.isel(length=at)) for at in range(one.sizes["length"]))]
        for seed, one in ((int(seed), panel.sel(seed=seed)) for seed in panel["seed"].values)
        if bool(one["difference"].notnull().any())
    ]
    if "mean" in panel and bool(panel["mean"].notnull().any()):
        ends = zip(panel["mean"].values, panel["low"].values, panel["high"].values, strict=True)
        cells = [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" if mean == mean else "–" for mean, low, high in ends]
        rows.append(["mean, 95 % t interval", *cells])
    return rows or [["not given", *["–"] * panel.sizes["length"]]]


def _cell(cell: "xr.Dataset") -> str:
    difference = float(cell["difference"])
    if difference != difference:
        return "–"
    if "gained" not in cell:
        return f"{difference:+.1f}"
    return f"{difference:+.1f} ({int(cell['gained'])}/{int(cell['lost'])}){'*' if float(cell['p']) < 0.05 else ''}"


def _pair(text: str) -> tuple[str, str]:
    first, colon, second = text.partition(":")
    if not (first and colon and second):
        raise InputError(f"--pair: expected two arms with a colon between them, found {text!r}")
    return first, second
