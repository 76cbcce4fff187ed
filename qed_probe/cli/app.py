"""The application: its commands, in the order in which one needs them."""

from typing import Annotated

import typer

import qed_probe as qp
from qed_probe.cli.contrast import contrast
from qed_probe.cli.diff import diff
from qed_probe.cli.eigen import eigen
from qed_probe.cli.evaluate import evaluate, sweep
from qed_probe.cli.grid import grid
from qed_probe.cli.info import info
from qed_probe.cli.memory import memory
from qed_probe.cli.patch import patch
from qed_probe.cli.plot import plot
from qed_probe.cli.replay import replay
from qed_probe.cli.trace import trace
from qed_probe.cli.train import train


def version(asked: bool) -> None:
    """Print the version and stop, if asked."""
    if asked:
        typer.echo(f"qed-probe {qp.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=version, help="Print the version and stop.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (trace, plot, diff, info, eigen, replay, memory, evaluate, sweep, patch, contrast, train, grid):
    app.command()(command)


@app.callback()
def qed_probe(version: Version = False) -> None:
    """See what happens inside the fixed-size memory of delta-rule linear attention."""
