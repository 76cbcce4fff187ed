"""``qed-probe diff``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen

if TYPE_CHECKING:
    import xarray as xr

First = Annotated[str, typer.Argument(metavar="A.zarr", help="A store; differences are fractions of its largest values.")]
Second = Annotated[str, typer.Argument(metavar="B.zarr", help="A store of another run over the same tokens.")]
Tolerance = Annotated[float, typer.Option(help="The difference, as such a fraction, up to which two values agree.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the figure goes.")]

HEADS = ("record", "parts at layer", "prompt", "position", "head", "largest", "at layer", "prompt", "position", "head", "beyond")


def diff(first: First, second: Second, tolerance: Tolerance = 1e-3, output: Output = Path("plots")) -> None:
    """Say where two runs over the same tokens first part.

    Exit status 1 if they do.
    """
    ds = qp.open(first)
    found = qp.diff(ds, second, output, tolerance=tolerance)
    rows = [_row(found.sel(record=name), ds) for name in found["record"].values]
    screen.table(f"{first} and {second}, beyond {tolerance:g} of the largest value of a record and layer", HEADS, rows)
    typer.echo(f"{output / 'difference.png'} shows it.")
    beyond = int(found["beyond"].sum())
    if beyond:
        typer.echo(f"The runs part: {beyond:,} values are beyond {tolerance:g}.")
        raise typer.Exit(1)
    typer.echo(f"The runs agree to {tolerance:g}.")


def _row(record: "xr.Dataset", ds: "xr.Dataset") -> list[str]:
    """One record: where it first parts, in the first layer where it does, and where its largest difference is."""
    parts, most = record["beyond"].values.astype(bool), int(record["largest"].values.argmax())
    at = int(parts.argmax())
    first = _place(record, ds, "first_at", at) if parts.any() else ["–"] * 4
    largest = float(record["largest"].values[most])
    last = _place(record, ds, "largest_at", most) if largest else ["–"] * 4
    return [str(record["record"].item()), *first, f"{largest:.1e}", *last, f"{int(record['beyond'].sum()):,}"]


def _place(record: "xr.Dataset", ds: "xr.Dataset", name: str, at: int) -> list[str]:
    token, head = (int(x) for x in record[name].values[at])
    layer, prompt, position = record["layer"].values[at], ds["prompt_index"].values[token], ds["position"].values[token]
    return [str(layer), str(prompt), str(position), str(head)]
