"""``qed-probe patch``."""

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import BUNDLED, Device, Dtype

if TYPE_CHECKING:
    import xarray as xr

Checkpoint = Annotated[str | None, typer.Argument(metavar="CHECKPOINT", help=f"A directory, or {BUNDLED}.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="PATCH.zarr", help="The store of patches to write.")]
What = Annotated[
    list[str] | None,
    typer.Option(
        "--what", help="direction (d), address (ε), gamma (γ) or state (S); may be repeated; all there are if left out."
    ),
]
Task = Annotated[str, typer.Option(help="niah, niah-2 or niah-3.")]
Length = Annotated[int, typer.Option(help="Tokens a sample, the answer included.")]
Samples = Annotated[int, typer.Option(help="Pairs of samples.")]
Seed = Annotated[int, typer.Option(help="Seed of the samples.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of patches.")]


def patch(
    checkpoint: Checkpoint = None,
    output: Output = Path("patch.zarr"),
    what: What = None,
    task: Task = "niah",
    length: Length = 512,
    samples: Samples = 32,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
) -> None:
    """Put a head's d, ε, γ or S into another run.

    Of runs that differ in the needle's value, head by head and both ways: which head carries the answer, and in what?
    """
    from qed_probe.store import whole
    from qed_probe.store.schema import PATCHES

    whole.check_free(output, schema=PATCHES, overwrite=overwrite)
    with screen.progress("patch") as report:
        ds = qp.patch(
            checkpoint,
            what=what,
            task=task,
            length=length,
            samples=samples,
            seed=seed,
            device=device,
            dtype=dtype,
            progress=report,
        )
    ds = ds.assign_attrs(created_by=shlex.join(["qed-probe", *sys.argv[1:]]), qed_probe=qp.__version__)
    qp.save_patches(ds, output, overwrite=overwrite)
    _show(qp.analyses.patch_effects(ds))
    typer.echo(f"The patches are in {output}; next: qed-probe plot {output}")


def _show(ds: "xr.Dataset") -> None:
    for what, way in product(ds["what"].values, ds["way"].values):
        rows = []
        for layer, head in product(ds["layer"].values, ds["head"].values):
            cell = ds.sel(what=what, way=way, layer=layer, head=head)
            ends = f"[{float(cell['low']):+.3g}, {float(cell['high']):+.3g}]"
            mark, ratio = "*" * (float(cell["p_fdr"]) < 0.05), float(cell["ratio"])
            shares = "–" if ratio != ratio else f"{ratio:+.2g}"
            rows.append([str(layer), str(head), f"{float(cell['difference']):+.3g}{mark}", ends, shares])
        screen.table(f"{what}, {way}", ["layer", "head", "nats", "95 % interval", "of the whole"], rows)
    full = f"{float(ds['full']):.4g} [{float(ds['full_low']):.4g}, {float(ds['full_high']):.4g}]"
    typer.echo(
        f"Change of ln p(clean answer) − ln p(corrupted answer), {int(ds['pairs'])} pairs; whole runs are {full} nats apart.\n"
        "*: p < 0.05, paired t test, Benjamini and Hochberg over heads. Of the whole: ratio of means, 1: the other run."
    )
    if "eigenvalue_min" in ds:
        low, high = ds["eigenvalue_min"].min(("way", "layer", "head")), ds["eigenvalue_max"].max(("way", "layer", "head"))
        own, other = (f"[{float(low.sel(erase=x)):.3f}, {float(high.sel(erase=x)):.3f}]" for x in ("own", "patched"))
        typer.echo(f"e = 1 − aᵀk of the edits is in {own} with a run's own d, in {other} with the other's.")
