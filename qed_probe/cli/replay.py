"""``qed-probe replay``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import BUNDLED, Device, Dtype, Strength
from qed_probe.cli.prompts import Chat, Length, Prompts, Samples, Task, Text, Tokens, chosen_prompts, integers, is_store

if TYPE_CHECKING:
    import xarray as xr

Subject = Annotated[
    str | None,
    typer.Argument(metavar="CHECKPOINT | RUN.zarr", help=f"A directory, a trace with --save-inputs, or {BUNDLED}."),
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="REPLAY.zarr", help="The store of replays to write.")]
Of = Annotated[str | None, typer.Option("--of", help="What is replaced where a mixer has both: direction or address.")]
Matched = Annotated[
    str, typer.Option("--match", help="What directions are scaled to share: norm, read, correction, or none: as they are made.")
]
Draws = Annotated[int, typer.Option(help="Random directions.")]
Seed = Annotated[int, typer.Option(help="Seed of the task, of random directions and of what is shuffled.")]
Layers = Annotated[str | None, typer.Option(metavar="0,1,…", help="Layers to replay; all if left out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of replays.")]

COLUMNS = {
    "layers_mean": "mean",
    "layers_median": "median",
    "layers_sum_ratio": "Σ/Σ",
    "ratio_of_means": "ratio of means",
    "mean_of_ratios": "mean of ratios",
    "layers_drift_mean": "drift",
}
FORMULAS = {
    "direction": "o⁻ = y + λρS̄ᵀd, δo = −λρS̄ᵀd",
    "address": "o⁻ = Ŝᵀq, δo = −γ(qᵀε)Ŝᵀε",
}


def replay(
    subject: Subject = None,
    output: Output = Path("replay.zarr"),
    text: Text = None,
    prompts: Prompts = None,
    tokens: Tokens = None,
    chat: Chat = False,
    task: Task = None,
    length: Length = None,
    samples: Samples = None,
    match: Matched = "norm",
    draws: Draws = 3,
    of: Of = None,
    seed: Seed = 0,
    layers: Layers = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    strength: Strength = 1.0,
    overwrite: Overwrite = False,
) -> None:
    """Replay a mixer's erase in other directions.

    Random, shuffled, reversed …: what each changes in the output, in one step and over the whole trajectory.
    """
    from qed_probe.store import whole
    from qed_probe.store.schema import REPLAYS

    how: dict[str, Any] = {"match": match, "draws": draws, "replaced": of, "seed": seed, "layers": integers("--layers", layers)}
    sources = {"--text": text, "--prompts": prompts, "--tokens": tokens, "--task": task}
    run: dict[str, Any] = {"device": device, "dtype": dtype, "strength": strength}
    whole.check_free(output, schema=REPLAYS, overwrite=overwrite)
    with screen.progress("replay") as report:
        if is_store(subject, {**sources, "--chat": chat, "--length": length, "--samples": samples}, run):
            ds = qp.replay_store(subject, progress=report, **how)
        else:
            _check_mixer(subject, of)
            chosen = chosen_prompts(subject, sources, length, samples, seed, False, chat=chat)
            ds = qp.replay(subject, chosen, progress=report, **how, **run)
    ds = ds.assign_attrs(created_by=shlex.join(["qed-probe", *sys.argv[1:]]), qed_probe=qp.__version__)
    qp.save_replays(ds, output, overwrite=overwrite)
    _show(ds)
    typer.echo(f"The replays are in {output}; next: qed-probe plot {output}")


def _check_mixer(checkpoint: str | None, of: Any) -> None:  # noqa: ANN401 - what the command was given
    """Refuse a mixer without anything to replace before its prompts are asked for."""
    from qed_probe.replays.directions import what_is_replaced  # with torch, which --help does without

    what_is_replaced(qp.MIXERS[qp.describe(checkpoint).mixer], of)


def _show(ds: "xr.Dataset") -> None:
    """A table for directions as they are made and one for those that are matched; the regimes in rows of their own."""
    from qed_probe.store.replays import left_out  # with xarray, which --help does without

    for match in ds["match"].values:
        rows = []
        for name in ds["direction"].values:
            for regime in ds["regime"].values:
                cell = ds.sel(match=match, regime=regime, direction=name)
                rows.append([str(name), str(regime), *(f"{float(cell[column]):.4g}" for column in COLUMNS)])
        how = "as they are made" if match == "none" else f"with the actual one's {match} at every token"
        screen.table(f"‖δo‖/‖o⁻‖ of directions {how}", ["direction", "regime", *COLUMNS.values()], rows)
    counts, layers = ds["n"].sel(direction="actual"), ds.sizes["layer"]
    typer.echo(
        f"{FORMULAS[ds.attrs['replaced']]}; drift: mean ‖y' − y‖/‖y‖. n = {int(counts.min()):,} tokens and heads a layer, "
        f"{layers} layer{'s' * (layers != 1)}, {ds.attrs['draws']} random draws.\n"
        "Mean, median, Σ/Σ and drift are means over layers; ratios are to the actual direction. EDA's bars (Fig. 2b)\n"
        "are the mean of per-layer ratios, with the trajectory replayed; they do not follow from means. A smaller\n"
        "perturbation is not better by itself: none has the smallest."
    )
    if left := left_out(ds):
        typer.echo(f"Left out: {'; '.join(left)}.")
