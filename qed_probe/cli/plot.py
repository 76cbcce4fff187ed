"""``qed-probe plot``."""

from pathlib import Path
from typing import Annotated

import typer

import qed_probe as qp

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN.zarr",
        help="Traces of the same model, or stores of outcomes or of eigenvalues, or one of replays, memories or patches.",
    ),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the figures go.")]


def plot(runs: Runs, output: Output = Path("plots")) -> None:
    """Draw every diagnostic that the stores can carry, as PNG and SVG."""
    written = qp.plot(runs, output)
    typer.echo(f"{len(written)} files in {output}:")
    for path in written:
        typer.echo(f"  {path}")
