"""What a command's model runs in: options that several commands share."""

from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ….")]
Dtype = Annotated[str, typer.Option(help="What the model runs in: float32 or bfloat16.")]
Strength = Annotated[float, typer.Option(help="Scale every λ, or γ of an erase address, by this.")]

BUNDLED = "qed-tiny (if left out) or eda-tiny, the bundled models"
USUAL: dict[str, object] = {"device": "cpu", "dtype": "float32", "strength": 1.0}
