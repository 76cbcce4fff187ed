"""``qed-probe grid``."""

from pathlib import Path
from typing import Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.errors import InputError

Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the runs are, and go on.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", help="Only this arm; may be repeated.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Only this task; may be repeated.")]
Seeds = Annotated[int | None, typer.Option(help="Only the seeds below this.")]
Devices = Annotated[str, typer.Option("--device", help="cpu, cuda, or several: cuda:0,cuda:1.")]
AtOnce = Annotated[int, typer.Option(min=1, help="Runs at a time on each device; 9 suit an H200.")]


def grid(
    output: Output = Path("runs"),
    arms: Arms = None,
    tasks: Tasks = None,
    seeds: Seeds = None,
    device: Devices = "cpu",
    at_once: AtOnce = 1,
) -> None:
    """Train every reference model, or go on with it.

    Finished runs are left as they are.
    """
    for option, asked, known in (("--arm", arms, {job.arm for job in qp.GRID}), ("--task", tasks, {job.task for job in qp.GRID})):
        if unknown := [name for name in asked or [] if name not in known]:
            raise InputError(f"{option}: expected one of {', '.join(sorted(known))}, found {unknown[0]}")
    jobs = [
        job
        for job in qp.GRID
        if (not arms or job.arm in arms) and (not tasks or job.task in tasks) and (seeds is None or job.seed < seeds)
    ]
    with screen.progress("grid") as report:
        found = qp.train_grid(
            output, jobs, devices=[name.strip() for name in device.split(",")], at_once=at_once, progress=report
        )
    rows = [
        [
            name,
            f"{made['parameters']:,}",
            f"{made['learned_at']:,}" if made["learned_at"] else "–",
            f"{made['fresh_accuracy']:.1%}",
        ]
        for name, made in found.items()
    ]
    screen.table(f"{len(rows)} runs in {output}", ["run", "parameters", "learned at step", "fresh samples right"], rows)
    for task in dict.fromkeys(job.task for job in jobs):
        typer.echo(f"Next: qed-probe evaluate {output}/{task}/* --task {task} -o {task}.zarr")
