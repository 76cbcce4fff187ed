"""``qed-probe memory``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.prompts import Chat, Length, Prompts, Samples, Task, Text, Tokens, chosen_prompts, integers
from qed_probe.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT | RUN.zarr", help="A directory, or a trace with --save-inputs; the bundled model if left out."
    ),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="MEMORY.zarr", help="The store of memories to write.")]
Only = Annotated[str | None, typer.Option(metavar="PART,…", help="Some of sources, effects, growth, recall, capacity.")]
Seed = Annotated[int, typer.Option(help="Seed of the task.")]
Layers = Annotated[str | None, typer.Option(metavar="0,1,…", help="Layers to look into; all if left out.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ….")]
Dtype = Annotated[str, typer.Option(help="What the model runs in: float32 or bfloat16.")]
Strength = Annotated[float, typer.Option(help="Scale every λ, or γ of an erase address, by this.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of memories.")]

HEADS, NEAR = 32, 16
"""Heads that have rows of their own; tokens that are near."""


def memory(
    subject: Subject = None,
    output: Output = Path("memory.zarr"),
    only: Only = None,
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
    strength: Strength = 1.0,
    overwrite: Overwrite = False,
) -> None:
    """Take reads apart, and see what a memory keeps.

    What a read is made of, what an erase changes now and later, how a memory grows, recalls and fills.
    """
    from qed_probe.store import whole
    from qed_probe.store.schema import MEMORY

    how: dict[str, Any] = {"only": None if only is None else only.split(","), "layers": integers("--layers", layers)}
    sources = {"--text": text, "--prompts": prompts, "--tokens": tokens, "--task": task}
    run = {"device": (device, "cpu"), "dtype": (dtype, "float32"), "strength": (strength, 1.0)}
    whole.check_free(output, schema=MEMORY, overwrite=overwrite)
    with screen.progress("memory") as report:
        if subject is not None and (Path(subject) / "zarr.json").exists():
            asked = {**sources, "--chat": chat, "--length": length, "--samples": samples}
            asked |= {f"--{name}": value != usual for name, (value, usual) in run.items()}
            if given := [option for option, value in asked.items() if value]:
                raise InputError(f"{', '.join(given)}: expected with a checkpoint, found with the store {subject}")
            ds = qp.inspect_memory_store(subject, progress=report, **how)
        else:
            chosen = chosen_prompts(subject, sources, length, samples, seed, False, chat=chat)
            how |= {name: value for name, (value, _) in run.items()}
            ds = qp.inspect_memory(subject, chosen, progress=report, **how)
    ds = ds.assign_attrs(created_by=shlex.join(["qed-probe", *sys.argv[1:]]), qed_probe=qp.__version__)
    qp.save_memory(ds, output, overwrite=overwrite)
    _show(ds)
    typer.echo(f"The memories are in {output}; next: qed-probe plot {output}")


def _show(ds: "xr.Dataset") -> None:
    """A table a part, of what fits a screen."""
    if "share_role" in ds:
        _show_sources(ds)


def _show_sources(ds: "xr.Dataset") -> None:
    """What the reads of each head are made of; of many heads, those of each layer together."""
    roles, heads = [str(role) for role in ds["role"].values], ds.sizes["layer"] * ds.sizes["head"] <= HEADS
    places = [(int(layer), int(head)) for layer in ds["layer"] for head in (ds["head"] if heads else [-1])]
    rows = []
    for probe in ds["probe"].values:
        for layer, head in places:
            at = {"probe": probe, "layer": layer} | ({"head": head} if heads else {})
            one = ds.sel(at)
            shares, lags = (one[f"{'' if heads else 'layer_'}share_{name}"] for name in ("role", "lag"))
            near = float(lags.sel(lag=slice(0, NEAR - 1)).sum(skipna=False))
            cells = [*(float(x) for x in shares), near]
            rows.append([str(probe), f"{layer}:{head}" if heads else str(layer), *(f"{100 * x:.1f}" for x in cells)])
    screen.table(
        "what the reads that predict the answers are made of, Σ⟨c, r⟩/Σ‖r‖² in %, by role of the token that wrote",
        ["read by", "layer:head" if heads else "layer", *roles, f"last {NEAR} tokens"],
        rows,
    )
