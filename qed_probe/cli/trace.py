"""``qed-probe trace``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import BUNDLED, Dtype, Strength
from qed_probe.cli.prompts import Chat, Length, Prompts, Samples, Task, Text, Tokens, chosen_prompts, integers

if TYPE_CHECKING:
    import xarray as xr

Checkpoint = Annotated[str | None, typer.Argument(metavar="CHECKPOINT", help=f"A directory, or {BUNDLED}.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="RUN.zarr", help="The store to write.")]
Seed = Annotated[int, typer.Option(help="Seed of the task and of the self-check.")]
Layers = Annotated[str | None, typer.Option(metavar="0,1,…", help="Layers to record; all if left out.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto: all GPUs and the CPU.")]
Vectors = Annotated[str, typer.Option(help="What the read of the memory by d is kept in: none, float16 or float32.")]
SaveInputs = Annotated[bool, typer.Option("--save-inputs", help="Keep what recomputes every record without the model.")]
StateAt = Annotated[str | None, typer.Option(metavar="POSITIONS", help="Keep the memory itself after these positions: 63,511.")]
Direction = Annotated[str, typer.Option(help="Of QED: full, nogate, noproj, nogate-noproj, rand; of EDA: same, rand, reversed.")]
At = Annotated[list[str] | None, typer.Option(metavar="LAYER:HEAD", help="Scale there alone; may be repeated.")]
Mode = Annotated[str, typer.Option(help="What an added direction does: full, immediate, lasting, or none, which is strength 0.")]
Backend = Annotated[str, typer.Option(help="What runs the recurrence: auto, triton, torch or reference.")]
Generate = Annotated[int, typer.Option(metavar="N", help="Go on with each prompt for N tokens, greedily; they are traced too.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Prompts a pass, for other libraries' models; the shorter are padded.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let a checkpoint run code that it brings along.")]
Resume = Annotated[bool, typer.Option("--resume", help="Finish an incomplete store.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store, once the new one is complete.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and stop.")]

COLUMNS = {
    "rho": "ρ",
    "rho_size": "|ρ|",
    "eigenvalue": "e",
    "eigenvalue_min": "e min",
    "eigenvalue_max": "e max",
    "correction_share": "share",
    "correction_across": "across",
    "budget_decay": "decay",
    "budget_delta": "delta",
    "budget_erase": "erase",
    "half_life": "half-life",
}
LEGEND = {
    "correction_share": "share: ‖λρS̄ᵀd‖ / ‖y‖, the correction in the output",
    "correction_across": "across: its part across the output",
    "budget_decay": "decay: 1 − ᾱ of the memory is lost",
    "budget_delta": "delta: ᾱβ is replaced",
    "budget_erase": "erase: ᾱγ is erased at the address",
    "half_life": "half-life: in tokens",
}
PER_UNIT = {"correction_share": "share / λ: |ρ|·‖S̄ᵀd‖ / ‖y‖, of the correction that d would make"}


def trace(
    checkpoint: Checkpoint = None,
    output: Output = Path("run.zarr"),
    text: Text = None,
    prompts: Prompts = None,
    tokens: Tokens = None,
    chat: Chat = False,
    task: Task = None,
    length: Length = None,
    samples: Samples = None,
    seed: Seed = 0,
    layers: Layers = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    vectors: Vectors = "float16",
    save_inputs: SaveInputs = False,
    state_at: StateAt = None,
    strength: Strength = 1.0,
    direction: Direction = "own",
    at: At = None,
    mode: Mode = "full",
    backend: Backend = "auto",
    generate: Generate = 0,
    batch: Batch = 1,
    trust_remote_code: TrustRemoteCode = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Run a checkpoint over prompts and record how its memory is used."""
    settings: dict[str, Any] = {"layers": integers("--layers", layers), "state_at": integers("--state-at", state_at) or []}
    settings |= {"device": device, "dtype": dtype, "vectors": vectors, "save_inputs": save_inputs}
    settings |= {"strength": strength, "direction": direction, "at": screen.heads("--at", at), "mode": mode}
    settings |= {"backend": backend, "generate": generate, "batch": batch, "seed": seed}
    settings |= {"trust_remote_code": trust_remote_code}
    sources = {"--text": text, "--prompts": prompts, "--tokens": tokens, "--task": task}
    chosen = chosen_prompts(checkpoint, sources, length, samples, seed, trust_remote_code, chat=chat)
    if dry_run:
        cost = qp.estimate(checkpoint, chosen, **settings)
        blocks = f"in blocks of {cost.block:,}, each there to resume from once it is whole"
        typer.echo(f"{cost.tokens:,} tokens, {screen.size(cost.bytes)}, about {screen.duration(cost.seconds)}; {blocks}")
        return
    settings |= {"resume": resume, "overwrite": overwrite, "command": shlex.join(["qed-probe", *sys.argv[1:]])}
    with screen.progress("trace") as report:
        ds = qp.trace(checkpoint, chosen, output, progress=report, **settings)
    _show(qp.analyses.summary(ds))
    typer.echo(f"The records are in {output}; next: qed-probe plot {output}")


def _show(summary: "xr.Dataset") -> None:
    if qp.MIXERS[summary.attrs["mixer"]].address is None:
        summary = summary.drop_vars("budget_erase", errors="ignore")  # 0 throughout
    per_unit = " / λ" if summary.attrs["per_unit_lambda"] else ""
    heads = {name: head + per_unit * name.startswith("correction") for name, head in COLUMNS.items() if name in summary}
    layers = summary["layer"].values
    rows = [[str(layer), *(screen.number(summary[name].values[i]) for name in heads)] for i, layer in enumerate(layers)]
    screen.table(f"{summary.attrs['subject']}, over tokens and heads", ["layer", *heads.values()], rows)
    legends = LEGEND | (PER_UNIT if per_unit else {})
    legend = "; ".join(text for name, text in legends.items() if name in heads)
    typer.echo(f"Means, but for the extremes e min and e max. {legend}.")
    if "accuracy" in summary:
        typer.echo(f"Right answers: {float(summary['accuracy']):.1%} of {int(summary['scored'])} prompts")
