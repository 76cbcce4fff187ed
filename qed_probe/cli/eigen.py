"""``qed-probe eigen``."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import BUNDLED, Dtype
from qed_probe.cli.prompts import Chat, Length, Prompts, Task, Text, Tokens, chosen_prompts
from qed_probe.cli.trace import Batch, Device, TrustRemoteCode
from qed_probe.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CHECKPOINT | RUN.zarr | TALLY.zarr", help=f"What is judged, a row each: directories, stores, or {BUNDLED}."
    ),
]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--claim", help='"abs<=1", "range=-0.25,1.25", "projection-effect<1e-3", "norm<=1.01", theory; may be repeated.'
    ),
]
Rate = Annotated[float, typer.Option(help="A claim holds if a new prompt violates it with a chance of at most this.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="TALLY.zarr", help="Keep what was counted.")]
Part = Annotated[str | None, typer.Option(metavar="I/N", help="Take one of N parts of the prompts, to be kept and merged.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Samples = Annotated[int | None, typer.Option(help="Samples of the task; 64 if left out, enough for a verdict.")]
Seed = Annotated[int, typer.Option(help="Seed of the task.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of eigenvalues.")]

SHOWN = 3
"""Offenders of each claim in the table; the store has twenty."""
STATUS = {"holds": 0, "cannot be told": 3, "fails": 1}
"""Exit status by verdict; of several, the last in this order counts."""


def eigen(
    sources: Sources = None,
    claim: Claims = None,
    rate: Rate = 0.05,
    output: Output = None,
    part: Part = None,
    text: Text = None,
    prompts: Prompts = None,
    tokens: Tokens = None,
    chat: Chat = False,
    task: Task = None,
    length: Length = None,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    batch: Batch = 1,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    overwrite: Overwrite = False,
) -> None:
    """Judge claims about the erase eigenvalue e of any checkpoint.

    A checkpoint runs over prompts and is tallied as it runs: nothing is kept but counts, however many the tokens.
    """
    ours = os.environ.get("RANK", "0") == "0"
    _check(rate, output if ours else None, overwrite=overwrite)
    named = {"--text": text, "--prompts": prompts, "--tokens": tokens, "--task": task}

    def run(checkpoint: str | None) -> "xr.Dataset":
        chosen = chosen_prompts(checkpoint, named, length, samples, seed, trust_remote_code, chat=chat, usual=64)
        how: dict[str, Any] = {"device": device, "dtype": dtype, "batch": batch, "trust_remote_code": trust_remote_code}
        with screen.progress("eigen") as report:
            return qp.tally_eigen(checkpoint, chosen, claims=claim or (), part=_part(part), progress=report, **how)

    asked = {**named, "--length": length, "--samples": samples, "--chat": chat, "--part": part}
    found = _tallies(sources or [None], claim or [], run, [option for option, value in asked.items() if value])
    if not ours:
        return
    if output is not None:
        if len(found) > 1:
            raise InputError(f"-o: expected one run to keep, found {len(found)}")
        qp.save_eigen(next(iter(found.values())), output, overwrite=overwrite)
    ds = qp.compare_eigen(found)
    verdicts = qp.verdicts(ds, rate)
    if as_json:
        from qed_probe.eigen.report import report

        typer.echo(json.dumps(report(ds, verdicts), ensure_ascii=False, allow_nan=False))
    else:
        _show(ds, verdicts, rate)
        if output is not None:
            typer.echo(f"The counts are in {output}")
    raise typer.Exit(max((STATUS[x.verdict] for x in verdicts), key=[*STATUS.values()].index))


def _check(rate: float, output: Path | None, *, overwrite: bool) -> None:
    """Refuse, before anything runs, what could not be judged or kept."""
    from qed_probe.eigen.table import check_rate
    from qed_probe.store import whole
    from qed_probe.store.schema import EIGEN

    check_rate(rate)
    if output is not None:
        whole.check_free(output, schema=EIGEN, overwrite=overwrite)


def _tallies(sources: "list[Any]", claims: list[str], run: Any, asked: list[str]) -> "dict[str, xr.Dataset]":  # noqa: ANN401
    """What each source comes to, by name; kept parts of one run are put together."""
    from qed_probe.eigen.claims import parse_claims
    from qed_probe.eigen.parts import together
    from qed_probe.store import place
    from qed_probe.store.schema import EIGEN

    if twice := [source for i, source in enumerate(sources) if source in sources[:i]]:
        raise InputError(f"expected sources that differ, found {twice[0]} twice")
    judged = [each.text for each in parse_claims(claims)]
    stores = [source for source in sources if source is not None and (place.found(Path(source)) / "zarr.json").exists()]
    if stores and asked:
        raise InputError(f"{', '.join(asked)}: expected with a checkpoint, found with the store {stores[0]}")
    kept = {source: qp.open_eigen(source) for source in stores if place.kind(place.found(Path(source))) == place.KINDS[EIGEN]}
    for source, ds in kept.items():
        if claims and ds["claim"].values.tolist() != judged:
            said = ", ".join(ds["claim"].values)
            raise InputError(f"--claim: expected what {source} was counted for, {said}, as claims come before the run")
    found = together(kept)
    for source in sources:
        if source in stores and source not in kept:
            found[source] = qp.tally_eigen_store(source, claims=claims)
        elif source not in stores:
            found[source or "qed-tiny"] = run(source)
    return found


def _part(text: str | None) -> tuple[int, int] | None:
    """I/N as two numbers."""
    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InputError(f"--part: expected I/N, two whole numbers, found {text!r}")
    return int(index), int(count)


def _show(ds: "xr.Dataset", verdicts: "list[qp.Verdict]", rate: float) -> None:
    from qed_probe.eigen import report

    several = ["run"] * (ds.sizes["run"] > 1)
    screen.table("Eigenvalues e = 1 − aᵀk", [*several, "", *report.EIGENVALUES], report.eigenvalue_rows(ds))
    screen.table("Sizes: |e − e projected|, ‖M‖₂ − 1", [*several, "", *report.SIZED], report.size_rows(ds))
    if not several:
        screen.table("Layer by layer", ["layer", *report.LAYERS], report.layer_rows(ds.isel(run=0)))
    screen.table("The worst, or the nearest", [*several, *report.OFFENDERS], report.offender_rows(ds, SHOWN))
    for run in ds["run"].values:
        at = ds.sel(run=run)
        typer.echo(f"{run}: {report.run_line(at)}")
        if line := report.step_line(at):
            typer.echo(f"  {line}")
        for found in verdicts:
            if found.run == run:
                typer.echo(f"  {report.verdict_line(found, rate)}")
    typer.echo(report.CAVEAT)
