"""``qed-probe memory``."""

import shlex
import sys
from itertools import product
from math import exp
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
Output = Annotated[Path, typer.Option("-o", "--output", metavar="MEMORY.zarr", help="The store of memories to write.")]
Only = Annotated[str | None, typer.Option(metavar="PART,…", help="Some of sources, effects, growth, recall, capacity.")]
Seed = Annotated[int, typer.Option(help="Seed of the task.")]
Layers = Annotated[str | None, typer.Option(metavar="0,1,…", help="Layers to look into; all if left out.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a store of memories.")]

HEADS, LAYERS, NEAR = 32, 6, 16
"""Heads, and layers, that have rows of their own; tokens that are near."""
PARTS = ("immediate", "lasting", "interaction")
GROWTH = {"norm": "‖Φ‖₂", "realised": "‖Φk‖/‖k‖", "decay": "mean decay", "volume": "Π|e|"}


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

    how: dict[str, Any] = {
        "only": None if only is None else [part.strip() for part in only.split(",")],
        "layers": integers("--layers", layers),
    }
    sources = {"--text": text, "--prompts": prompts, "--tokens": tokens, "--task": task}
    run: dict[str, Any] = {"device": device, "dtype": dtype, "strength": strength}
    whole.check_free(output, schema=MEMORY, overwrite=overwrite)
    with screen.progress("memory") as report:
        if is_store(subject, {**sources, "--chat": chat, "--length": length, "--samples": samples}, run):
            ds = qp.inspect_memory_store(subject, progress=report, **how)
        else:
            chosen = chosen_prompts(subject, sources, length, samples, seed, False, chat=chat)
            ds = qp.inspect_memory(subject, chosen, progress=report, **how, **run)
    ds = ds.assign_attrs(created_by=shlex.join(["qed-probe", *sys.argv[1:]]), qed_probe=qp.__version__)
    qp.save_memory(ds, output, overwrite=overwrite)
    _show(ds)
    drawn = set(ds.data_vars) - {"nonfinite"}
    typer.echo(f"The memories are in {output}" + f"; next: qed-probe plot {output}" * bool(drawn))


def _show(ds: "xr.Dataset") -> None:
    """A table a part, of what fits a screen."""
    shown = {
        "share_role": _show_sources,
        "effect_share": _show_effects,
        "growth_layer": _show_growth,
        "layer_recall_gain": _show_recall,
        "effective_rank": _show_capacity,
    }
    for variable, show in shown.items():
        if variable in ds:
            show(ds)
    if ds.sizes["layer"] > LAYERS:
        typer.echo(f"Of {ds.sizes['layer']} layers the last tables show every {_step(ds)}th; the store has all.")
    parts = str(ds.attrs["parts"]).split(",")
    if "effects" in parts and "effect_share" not in ds:
        typer.echo(f"No effects: {ds.attrs['mixer']} adds no direction.")
    if lost := int(ds["nonfinite"].max()):
        typer.echo(f"Left out: up to {lost:,} prompts a layer whose inputs are not finite.")


def _number(x: float, how: str) -> str:
    """A dash where there is none."""
    return "–" if x != x else format(x, how)


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
            rows.append([str(probe), f"{layer}:{head}" if heads else str(layer), *(_number(100 * x, "z.1f") for x in cells)])
    screen.table(
        "what the reads that predict the answers, or are the last, are made of: Σ⟨c, r⟩/Σ‖r‖² in %, by the writing token's role",
        ["read by", "layer:head" if heads else "layer", *roles, f"last {NEAR} tokens"],
        rows,
    )


def _show_effects(ds: "xr.Dataset") -> None:
    """Of each layer and head what the direction does at once and later."""
    rows = []
    for layer in ds["layer"].values:
        for head in ds["head"].values if ds.sizes["layer"] * ds.sizes["head"] <= HEADS else []:
            one = ds.sel(layer=layer, head=head, effect_role="all")
            shares = [_number(100 * float(one["effect_share"].sel(effect_part=part)), "z.1f") for part in PARTS]
            size = _number(float(one["effect_median"].sel(effect_part="total")), ".2g")
            rows.append([f"{layer}:{head}", *shares, size])
    if rows:
        title = "what the added direction does to outputs, Δ = y − y⁰: Σ⟨part, Δ⟩/Σ‖Δ‖² in %, and the median of ‖Δ‖/‖y⁰‖"
        screen.table(title, ["layer:head", *PARTS, "size"], rows)


def _step(ds: "xr.Dataset") -> int:
    """Every how many layers one is shown."""
    return -(-ds.sizes["layer"] // LAYERS)


def _show_growth(ds: "xr.Dataset") -> None:
    """Of each layer medians over windows that double twice."""
    rows = []
    for layer, gates in product(ds["layer"].values[:: _step(ds)], ds["gates"].values):
        for window in ds["window"].values[::2]:
            one = ds["growth_layer"].sel(layer=layer, gates=gates, window=window)
            cells = [_number(exp(float(one.sel(growth_of=of, growth_level=0.5))), ".3g") for of in GROWTH]
            top = _number(exp(float(one.sel(growth_of="norm", growth_level=1))), ".3g")
            rows.append([str(layer), str(gates), str(window), *cells, top])
    title = "how memories grow over windows of tokens: medians over tokens and heads; base: without the added direction"
    screen.table(title, ["layer", "gates", "tokens", *GROWTH.values(), "largest ‖Φ‖₂"], rows)


def _show_recall(ds: "xr.Dataset") -> None:
    """Of each layer what keys that were not rewritten find of their values."""
    rows = []
    for layer in ds["layer"].values[:: _step(ds)]:
        for lag in ds["recall_lag"].values[::3]:
            one = ds.sel(layer=layer, recall_keys="kept", recall_lag=lag)
            cells = [_number(float(one[f"layer_recall_{name}"]), "z.3f") for name in ("gain", "null", "own")]
            rows.append([str(layer), str(lag), *cells, f"{int(one['layer_recall_n']):,}"])
    title = "strict recall, Σ⟨S_{t+Δ}ᵀk_t, v⟩/Σ‖v‖², of keys that nothing has rewritten since; null: of another token's value"
    screen.table(title, ["layer", "Δ", "gain", "null", "own write", "n"], rows)


def _show_capacity(ds: "xr.Dataset") -> None:
    """Of each layer means over heads."""
    names = {"effective_rank": "effective rank", "stable_rank": "stable rank", "capacity_norm": "‖S‖"}
    rows = []
    for layer, position in product(ds["layer"].values[:: _step(ds)], ds["capacity_position"].values):
        one = ds.sel(layer=layer, capacity_position=position)
        cells = [_number(float(one[name].mean()), ".3g") for name in names]
        rows.append([str(layer), _number(float(one["capacity_tokens"]), ".0f"), *cells])
    screen.table("how full memories are, means over heads and prompts", ["layer", "tokens seen", *names.values()], rows)
