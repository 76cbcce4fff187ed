"""``qed-probe train``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import Device

Arm = Annotated[str, typer.Argument(metavar="ARM", help="The mixer: qed, gdn2, eda, kda ….")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="The checkpoint; else runs/ARM-seedSEED.")]
Preset = Annotated[str, typer.Option(help="Sizes and recipe: tiny or 340m.")]
Task = Annotated[str | None, typer.Option(help="niah, niah-2, niah-3, reassignment or tokens, if not the recipe's.")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps, if not the recipe's.")]
Batch = Annotated[int | None, typer.Option(help="Sequences a step, if not the recipe's.")]
MicroBatch = Annotated[int | None, typer.Option(help="Sequences at a time, if not the recipe's or --batch.")]
Length = Annotated[int | None, typer.Option(help="Tokens a sequence, if not the recipe's.")]
LambdaMax = Annotated[float | None, typer.Option(help="The upper end of λ, if not 0.25.")]
Rate = Annotated[float | None, typer.Option(help="Peak learning rate, if not the recipe's.")]
Precision = Annotated[str | None, typer.Option(help="float32 or bfloat16 (autocast), if not the recipe's.")]
Tokens = Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Token ids to train on, where the recipe reads them.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the data.")]
SaveBfloat16 = Annotated[bool, typer.Option("--save-bfloat16", help="Round the checkpoint's weights to bfloat16.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in DIR, with the same recipe: the number of steps cannot change.")
]


def train(
    arm: Arm,
    output: Output = None,
    preset: Preset = "tiny",
    task: Task = None,
    steps: Steps = None,
    batch: Batch = None,
    micro_batch: MicroBatch = None,
    length: Length = None,
    rate: Rate = None,
    lambda_max: LambdaMax = None,
    precision: Precision = None,
    tokens: Tokens = None,
    seed: Seed = 0,
    device: Device = "cpu",
    save_bfloat16: SaveBfloat16 = False,
    resume: Resume = False,
) -> None:
    """Train a reference model with any arm of the family."""
    import torch

    config = qp.arm(arm, preset, lambda_max=lambda_max)
    asked: dict[str, Any] = {"steps": steps, "batch": batch, "micro_batch": batch if micro_batch is None else micro_batch}
    asked |= {"length": length, "rate": rate, "precision": precision}
    recipe = replace(qp.find_recipe(preset, task), **{name: value for name, value in asked.items() if value is not None})
    output = output or Path("runs", f"{arm}-seed{seed}")
    settings: dict[str, Any] = {"seed": seed, "device": device, "tokens": tokens, "resume": resume}
    settings["save_dtype"] = torch.bfloat16 if save_bfloat16 else None
    step_tokens = recipe.batch * recipe.length
    with screen.progress(f"train {arm}") as report:

        def progress(step: int, line: dict[str, Any]) -> None:
            report(step * step_tokens, recipe.steps * step_tokens, f"loss {line['loss']:.4f}")

        found = qp.train(config, recipe, output, progress=progress, **settings)
    screen.facts(f"{arm}, {preset}", [(name, value) for name, value in found.items() if name != "lambda"])
    typer.echo(f"The checkpoint is in {output}; next: qed-probe trace {output}")
