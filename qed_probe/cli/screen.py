"""What a terminal shows: tables on stdout, progress on stderr; rich, imported when used, draws both and heeds NO_COLOR."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import typer

from qed_probe.errors import InputError

UNFOLDED = 10_000
SILENCE = 30.0
"""Seconds between lines of progress where there is no terminal for a bar."""


class Report(Protocol):
    """Called as work proceeds; ``note`` is shown beside the bar."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Say that ``done`` of ``total`` are done."""


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose columns hold numbers, but for the first; no row is ever folded or cut."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None)
    for i, head in enumerate(heads):
        drawn.add_column(head, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*row)
    console = Console(width=UNFOLDED, markup=False, highlight=False)
    console.print(title)
    console.print(drawn)


def facts(title: str, rows: Iterable[tuple[str, object]]) -> None:
    """Print names and what they are, one a line."""
    typer.echo(title)
    for name, value in rows:
        typer.echo(f"  {name:<18} {_fact(value)}")


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_fact(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


@contextmanager
def progress(label: str) -> Iterator[Report]:
    """A bar with tokens a second and the time left, or now and then a line where stderr is no terminal; yields its report."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    text = TextColumn("{task.fields[rate]} {task.fields[note]}")
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), text, TimeRemainingColumn(elapsed_when_finished=True))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None, rate="", note="")
        said = time.monotonic()

        def report(done: int, total: int, note: str = "") -> None:
            nonlocal said
            if not console.is_terminal and time.monotonic() - said >= SILENCE:
                said = time.monotonic()
                typer.echo(f"{label}: {done / total:.0%} {note}".rstrip(), err=True)
            speed = bar.tasks[task].finished_speed or bar.tasks[task].speed
            bar.update(task, completed=done, total=total, note=note, rate=f"{speed:,.0f} tokens/s" if speed else "")

        yield report


def heads(option: str, texts: Iterable[str] | None) -> list[tuple[int, int]]:
    """Each "LAYER:HEAD" as two numbers; raises InputError naming the option."""
    found = []
    for text in texts or []:
        layer, colon, head = text.partition(":")
        if not (colon and layer.isdecimal() and head.isdecimal()):
            raise InputError(f"{option}: expected LAYER:HEAD, two numbers, found {text!r}")
        found.append((int(layer), int(head)))
    return found


def number(value: float) -> str:
    """Three decimals, none from 10 on."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


def size(count: int) -> str:
    """Bytes in powers of 1000: ``1.2 MB``."""
    from rich.filesize import decimal

    return decimal(count)


def duration(seconds: float) -> str:
    """``0:01:30``; whole seconds, at least one."""
    return str(timedelta(seconds=max(round(seconds), 1)))
