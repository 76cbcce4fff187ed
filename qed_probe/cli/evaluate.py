"""``qed-probe evaluate`` and ``qed-probe sweep``."""

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qed_probe as qp
from qed_probe.cli import screen
from qed_probe.cli.options import Device, Dtype
from qed_probe.errors import InputError

if TYPE_CHECKING:
    import xarray as xr

Checkpoints = Annotated[list[Path] | None, typer.Argument(metavar="CHECKPOINT", help="Directories of checkpoints.")]
Swept = Annotated[list[Path], typer.Argument(metavar="CHECKPOINT", help="Directories of checkpoints that add a direction.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="OUT.zarr", help="The store of outcomes to write.")]
Task = Annotated[str, typer.Option(help="niah, niah-2, niah-3 or reassignment.")]
Lengths = Annotated[str, typer.Option(metavar="N,N,…", help="Lengths of the samples in tokens, the answer included.")]
Samples = Annotated[int, typer.Option(help="Samples a length.")]
Tokens = Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Token ids, [T] or [N, T], whose loss is wanted instead.")]
Harness = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Read lm-evaluation-harness's results and samples there instead of running.")
]
Arm = Annotated[str | None, typer.Option(help="With --harness: the arm that was evaluated.")]
Seed = Annotated[int, typer.Option(help="Seed of the samples; with --harness, the training seed.")]
Strength = Annotated[float, typer.Option(help="Ask again with every λ, or γ of an erase address, times this.")]
Direction = Annotated[str, typer.Option(help="Of QED: full, nogate, noproj, nogate-noproj, rand; of EDA: same, rand, reversed.")]
At = Annotated[list[str] | None, typer.Option(metavar="LAYER:HEAD", help="Change it there alone; may be repeated.")]
EachHead = Annotated[bool, typer.Option("--each-head", help="Change one head after another: which of them carry the answer?")]
Phase = Annotated[str, typer.Option(help="Change it for all tokens, those of the prompt, or those of the answer.")]
Mode = Annotated[
    list[str] | None,
    typer.Option(help="Ask again with the direction acting in part: immediate, lasting or none (strength 0); may be repeated."),
]
Strengths = Annotated[
    str, typer.Option(metavar="S,S,…", help="What every λ is multiplied by; 1 must be among them, unless there is a --direction.")
]
Export = Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Write the outcomes as JSON Lines as well.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let a checkpoint run code that it brings along.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of outcomes.")]

LENGTHS = "512,1024,2048,4096,8192,16384"
LEVELS = (0.9, 0.75, 0.5)


def evaluate(
    checkpoints: Checkpoints = None,
    output: Output = Path("outcomes.zarr"),
    task: Task = "niah",
    lengths: Lengths = LENGTHS,
    samples: Samples = 500,
    tokens: Tokens = None,
    harness: Harness = None,
    arm: Arm = None,
    seed: Seed = 0,
    strength: Strength = 1.0,
    direction: Direction = "own",
    at: At = None,
    phase: Phase = "all",
    mode: Mode = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    export: Export = None,
    overwrite: Overwrite = False,
) -> None:
    """Ask checkpoints for needles by length, and keep every answer.

    With a change, both as they are and changed.
    """
    if (harness is None) == (not checkpoints) or (harness is None) != (arm is None):
        raise InputError("expected checkpoints, or --harness with --arm, found both or neither")
    changes = [
        qp.Intervention(strength, direction, tuple(screen.heads("--at", at)), phase, name)
        for name in dict.fromkeys(mode or ["full"])
    ]
    changed = [change for change in changes if change.changes]
    if changes != [qp.Intervention()] and (harness is not None or tokens is not None):
        raise InputError("--strength, --direction, --mode, …: expected answers of a model to a task, found --harness or --tokens")
    if mode and (strength != 1 or direction != "own"):
        raise InputError("--mode: expected the model's own direction at strength 1, which it is held against, found another")
    qp.check_free(output, export, overwrite=overwrite)
    if harness is not None:
        ds = qp.read_harness(harness, arm=str(arm), seed=seed)
    else:
        how = {"task": task, "lengths": _numbers("--lengths", lengths, int), "samples": samples, "tokens": tokens, "seed": seed}
        how |= {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        how["changes"] = [*dict.fromkeys([qp.Intervention(), *changes])]
        ds = _run("evaluate", checkpoints or [], how)
    _keep(ds, output, export, overwrite)
    if "correct" not in ds:
        _show_losses(ds)
        typer.echo(f"The outcomes are in {output}")
        return
    _show(qp.analyses.accuracy(ds))
    if changed and mode:
        _show_modes(qp.analyses.modes(ds))
    elif changed:
        _show_changes(ds)
    typer.echo(f"The outcomes are in {output}; next: qed-probe plot {output}, or qed-probe contrast {output}")


def sweep(
    checkpoints: Swept,
    output: Output = Path("sweep.zarr"),
    strengths: Strengths = "-1,0,0.5,1,1.5,2",
    direction: Direction = "own",
    at: At = None,
    each_head: EachHead = False,
    phase: Phase = "all",
    task: Task = "niah",
    lengths: Lengths = LENGTHS,
    samples: Samples = 500,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    export: Export = None,
    overwrite: Overwrite = False,
) -> None:
    """Evaluate with every λ scaled, too.

    Or with another arm's direction, or at some heads, or one head after another; always against the same samples as it is.
    """
    places = screen.heads("--at", at)
    if each_head and places:
        raise InputError("expected --at or --each-head, found both")
    factors = [s for s in _factors(strengths, direction) if s != 1 or direction != "own"]
    if each_head and len(factors) > 1:
        found = f"found {', '.join(f'{s:g}' for s in factors)}"
        raise InputError(f"--each-head: expected one of --strengths for all heads, beside the model as it is, {found}")
    changes = [qp.Intervention()]
    for place in _heads(checkpoints) if each_head else [tuple(places)]:
        changes += [qp.Intervention(s, direction, place, phase) for s in factors]
    how = {"task": task, "lengths": _numbers("--lengths", lengths, int), "samples": samples, "seed": seed}
    how |= {"device": device, "dtype": dtype, "changes": changes}
    qp.check_free(output, export, overwrite=overwrite)
    ds = _run("sweep", checkpoints, how)
    _keep(ds, output, export, overwrite)
    if each_head:
        _show_heads(qp.analyses.head_effects(ds))
    elif direction != "own":
        _show_changes(ds)
    else:
        _show_sweep(ds)
    typer.echo(f"The outcomes are in {output}; next: qed-probe plot {output}")


def _heads(checkpoints: list[Path]) -> list[tuple[tuple[int, int], ...]]:
    """Every head alone, of models that have the same."""
    sizes = {(config.layers, config.heads) for config in map(qp.read_config, checkpoints)}
    if len(sizes) > 1:
        raise InputError(f"--each-head: expected checkpoints of one size, found {sorted(sizes)} layers and heads")
    return [((layer, head),) for layers, heads in sizes for layer in range(layers) for head in range(heads)]


def _show_sweep(ds: "xr.Dataset") -> None:
    found = qp.analyses.strengths(ds)
    for run in range(found.sizes["run"]):
        _show_strengths(found.isel(run=run))
    typer.echo(
        "b/c: samples that are right at s and not at 1 / at 1 and not at s; *: p < 0.05, exact McNemar, Holm over s × length.\n"
        "s = 0 of a QED model is not a trained GDN-2, and that answers depend on s does not show that λ_max binds."
    )


def _show_changes(ds: "xr.Dataset") -> None:
    found = qp.analyses.change_effects(ds)
    for run, at in product(range(found.sizes["run"]), range(found.sizes["length"])):
        one = found.isel(run=run, length=at)
        rows = []
        for change in range(one.sizes["change"]):
            cell = one.isel(change=change)
            names = [f"{cell['strength'].item():g}", *(str(cell[name].item()) for name in ("direction", "at", "phase"))]
            mark = "*" if float(cell["p_holm"]) < 0.05 else ""
            counts = f"{int(cell['gained'])}/{int(cell['lost'])}{mark}"
            rows.append([*names, f"{float(cell['usual']):.1%}", f"{float(cell['accuracy']):.1%}", counts, *_nats(cell)])
        heads = ["s", "direction", "at", "phase", "as it is", "changed", "b/c", "nats", "95 % interval"]
        screen.table(f"{_run_name(one)}: accuracy and change of ln p(answer)", heads, rows)
    typer.echo(
        "b/c: samples right only with / only without the change; *: p < 0.05, exact McNemar, Holm over changes × length.\n"
        "Another direction, or none, with the weights as they are is not a model trained so."
    )


def _nats(cell: "xr.Dataset") -> list[str]:
    """The change of ln p(answer) and its interval."""
    return [f"{float(cell['difference']):+.3g}", f"[{float(cell['low']):+.3g}, {float(cell['high']):+.3g}]"]


def _run_name(one: "xr.Dataset") -> str:
    return f"{one['arm'].item()} seed {_seed(one['seed'].item())}, {int(one['length']):,} tokens"


def _show_modes(ds: "xr.Dataset") -> None:
    names = [str(mode) for mode in ds["mode"].values]
    for run in range(ds.sizes["run"]):
        one = ds.isel(run=run)
        rows = [[f"{int(n):,}", *(_mode(one.sel(length=n, mode=mode)) for mode in names)] for n in ds["length"].values]
        about = "accuracy by mode in %, b/c against full, change of ln p(answer)"
        title = f"{one['arm'].item()} seed {_seed(one['seed'].item())}: {about}"
        screen.table(title, ["length", *names], rows)
    typer.echo(
        "immediate: acts on the token's own output alone; lasting: on what the memory keeps alone; none: s = 0.\n"
        "b/c: samples right in the mode alone / in full alone; *: p < 0.05, exact McNemar, Holm over mode × length; nats, 95 %.\n"
        "Layers see what those before them give: what the modes take and leave does not add up."
    )


def _mode(cell: "xr.Dataset") -> str:
    if str(cell["mode"].item()) == "full" or not int(cell["samples"]):
        return f"{float(cell['accuracy']):.1%}"
    ends = f"[{float(cell['difference_low']):+.2g}, {float(cell['difference_high']):+.2g}]"
    return f"{_paired(cell)}, {float(cell['difference']):+.2g} {ends}"


def _show_heads(ds: "xr.Dataset") -> None:
    for run, at in product(range(ds.sizes["run"]), range(ds.sizes["length"])):
        one = ds.isel(run=run, length=at)
        rows = []
        for layer, head in product(range(ds.sizes["layer"]), range(ds.sizes["head"])):
            cell = one.isel(layer=layer, head=head)
            nats, ends = _nats(cell)
            mark = "*" if float(cell["p_fdr"]) < 0.05 else ""
            counts = f"{int(cell['gained'])}/{int(cell['lost'])}"
            rows.append([str(layer), str(head), nats + mark, ends, counts])
        title = f"{_run_name(one)}: change of ln p(answer) when one head is changed"
        screen.table(title, ["layer", "head", "nats", "95 % interval", "b/c"], rows)
    typer.echo(
        "*: p < 0.05, paired t test, Benjamini and Hochberg over heads; b/c: samples right only with / only without the change."
    )


def _run(what: str, checkpoints: list[Path], how: dict[str, Any]) -> "xr.Dataset":
    with screen.progress(what) as report:
        ds = qp.evaluate(checkpoints, progress=report, **how)
    return ds.assign_attrs(created_by=shlex.join(["qed-probe", *sys.argv[1:]]), qed_probe=qp.__version__)


def _keep(ds: "xr.Dataset", output: Path, export: Path | None, overwrite: bool) -> None:
    qp.save_outcomes(ds, output, overwrite=overwrite)
    if export is not None:
        qp.export_outcomes(ds, export)


def _show(ds: "xr.Dataset") -> None:
    """Accuracy by length with its interval, and the lengths up to which a model can be used."""
    usable = qp.analyses.usable_length(ds, LEVELS)
    heads = [
        "model",
        "arm",
        "seed",
        "task",
        *(f"{n:,}" if n else "all" for n in ds["length"].values),
        *(f"L {level:.0%}" for level in LEVELS),
    ]
    rows = []
    for run in range(ds.sizes["run"]):
        one, ends = ds.isel(run=run), usable.isel(run=run)
        cells = [_share(*(float(x) for x in values)) for values in zip(one["accuracy"], one["low"], one["high"], strict=True)]
        marks = [_length(float(x), int(how)) for x, how in zip(ends["usable"], ends["censored"], strict=True)]
        names = [str(one[name].item()) for name in ("model", "arm")]
        rows.append([*names, _seed(one["seed"].item()), str(one["task"].item()), *cells, *marks])
    screen.table("accuracy by length in %, with exact 95 % intervals; L: up to which it stays at that, in tokens", heads, rows)


def _show_losses(ds: "xr.Dataset") -> None:
    """The mean loss of each checkpoint: two of one name are two."""
    frame = ds[["model", "arm", "seed", "lambda_max", "loss"]].to_dataframe()
    runs = [run for _, run in frame.groupby(["model", "arm", "seed", "lambda_max"], dropna=False)]
    rows = [[*run[["model", "arm"]].iloc[0], _seed(run["seed"].iloc[0]), f"{run['loss'].mean():.4f}"] for run in runs]
    screen.table("loss", ["model", "arm", "seed", "nats a token"], rows)


def _show_strengths(ds: "xr.Dataset") -> None:
    rows = []
    for at, length in enumerate(ds["length"].values):
        one = ds.isel(length=at)
        cells = [_strength(one.isel(strength=s)) for s in range(ds.sizes["strength"])]
        rows.append([f"{length:,}", *cells, f"{float(one['page_p']):.2g}"])
    title = (
        f"{ds['arm'].item()} seed {ds['seed'].item()}: accuracy by s in %, b/c against s = 1, and Page's p that it rises with s"
    )
    screen.table(title, ["length", *(f"s = {s:g}" for s in ds["strength"].values), "Page's p"], rows)


def _strength(cell: "xr.Dataset") -> str:
    return f"{float(cell['accuracy']):.1%}" if float(cell["strength"]) == 1 else _paired(cell)


def _paired(cell: "xr.Dataset") -> str:
    """Accuracy, and the samples that it gained and lost."""
    mark = "*" if float(cell["p_holm"]) < 0.05 else ""
    return f"{float(cell['accuracy']):.1%} {int(cell['gained'])}/{int(cell['lost'])}{mark}"


def _share(share: float, low: float, high: float) -> str:
    return "–" if share != share else f"{100 * share:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def _seed(seed: int) -> str:
    return str(seed) if seed >= 0 else "–"


def _length(tokens: float, censored: int) -> str:
    if censored == 0 and tokens != tokens:
        return "–"
    return "< shortest" if censored < 0 else f"{'> ' if censored else ''}{tokens:,.0f}"


def _factors(text: str, direction: str) -> list[float]:
    """Strengths; of the model's own direction 1 is the model as it is."""
    found: list[float] = _numbers("--strengths", text, float)
    if direction == "own" and (1 not in found or len(found) < 2):
        raise InputError(f"--strengths: expected 1, which the others are held against, and others, found {text!r}")
    return found


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option}: expected numbers with commas between them, found {text!r}") from None
