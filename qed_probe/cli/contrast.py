"""``qed-probe contrast``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

Results = Annotated[list[str] | None, typer.Argument(metavar="OUT.zarr", help="Stores of outcomes or, with --record, of traces.")]
Pairs = Annotated[
    list[str] | None, typer.Option("--pair", metavar="A:B", help="Arms, the first minus the second; may be repeated.")
]
Task = Annotated[str | None, typer.Option(help="The task, where the stores hold several.")]
OnlyLearned = Annotated[bool, typer.Option("--only-learned", help="Only pairs of runs that both learned the task: a selection.")]
Record = Annotated[str | None, typer.Option(help="Compare this record of traces: read_norm, eigenvalue ….")]
Published = Annotated[bool, typer.Option("--published", help="The values that QED's paper prints, instead.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The figure: .png, .svg or .pdf.")]


def contrast(
    results: Results = None,
    pair: Pairs = None,
    task: Task = None,
    only_learned: OnlyLearned = False,
    record: Record = None,
    published: Published = False,
    output: Output = Path("contrast.png"),
) -> None:
    """Say how arms, or two traces, differ.

    Arms: their accuracy by length, seeds kept apart. Two traces of one checkpoint over the same tokens: a record, head by head;
    traces of different checkpoints: its quantiles, layer by layer.
    """
    if published == bool(results):
        raise InputError("expected stores or --published, found both or neither")
    if record is not None and (pair or task or only_learned or published):
        raise InputError("expected --record, or --pair, --task, --only-learned and --published, found both")
    if record is not None:
        _show_traces(qp.contrast_traces(results or [], record, output))
    elif published:
        _show_published(qp.contrast_published(output))
    else:
        pairs = [_pair(text) for text in pair or []] or None
        _show_measured(qp.contrast(results or [], output, pairs=pairs, task=task, only_learned=only_learned))
    typer.echo(f"The figure is {output}")


def _show_measured(ds: "xr.Dataset") -> None:
    _show_panels(ds)
    typer.echo("(b/c): samples that only the first / only the second got right; *: p < 0.05 by exact McNemar's test, which")
    typer.echo("compares two checkpoints, not two mechanisms; not adjusted for the number of tests.")
    typer.echo(f"{ds.attrs['task']}, {ds.attrs['selection']}. {ds.attrs['unpaired']}".rstrip(" ."))


def _show_published(ds: "xr.Dataset") -> None:
    _show_panels(ds)
    typer.echo(f"{ds.attrs['source']}, {ds.attrs['place']}, p. {ds.attrs['page']}. –: not given. {ds.attrs['gaps']}")


def _show_panels(ds: "xr.Dataset") -> None:
    lengths = [f"{n:,}" for n in ds["length"].values]
    for panel in ds["panel"].values:
        screen.table(f"{panel}, percentage points", ["", *lengths], _rows(ds.sel(panel=panel)))


def _show_traces(ds: "xr.Dataset") -> None:
    """Cell by cell, with its interval, or by store and layer, with its quantiles."""
    if "quantile" in ds:
        heads = ["store", "layer", *(f"{level:.0%}" for level in ds["level"].values)]
        rows = [
            [str(store), str(layer), *(f"{x:.4g}" for x in ds["quantile"].sel(store=store, layer=layer).values)]
            for store in ds["store"].values
            for layer in ds["layer"].values
        ]
        screen.table(f"{ds.attrs['record']}, quantiles over tokens and heads", heads, rows)
        return
    rows = []
    for layer in ds["layer"].values:
        for head in range(ds.sizes["head"]):
            cell = ds.sel(layer=layer).isel(head=head)
            ends = f"[{float(cell['low']):+.4g}, {float(cell['high']):+.4g}]"
            values = [f"{float(cell[name]):.4g}" for name in ("first_mean", "second_mean")]
            rows.append([str(layer), str(head), *values, f"{float(cell['difference']):+.4g}", ends])
    title = (
        f"{ds.attrs['record']}, second minus first, means over {ds.attrs['tokens']:,} tokens of {ds.attrs['prompts']:,} prompts"
    )
    screen.table(title, ["layer", "head", "first", "second", "difference", "95 % interval"], rows)
    typer.echo(f"{ds.attrs['subject']}. Interval: {ds.attrs['interval']}; each head is judged alone.")


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
        rows.append(["seeds to find 10 points", *(f"{int(n):,}" if n else "–" for n in panel["needed"].values)])
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
