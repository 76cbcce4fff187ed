"""A trace whose every value is a formula of its place, written as a real one is: pack after pack, layer after layer.

Run as ``python -m tests.store_run PATH`` it creates PATH or, if that is there, resumes it; the store tests also import it.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np

from qed_probe.store import schema, writer
from qed_probe.store.layout import Layout
from qed_probe.tasks import Prompt

NAMES = ("rho", "edit_eigenvalue", "read", "state_norm", "nll", "token_text", "correct", "inputs/k", "inputs/o", "states/state")
BLOCK = 64  # what schema.MAX_BLOCK is made here, so that a store of some hundred tokens has many blocks
LENGTHS = (70, 9, 130, 1, 64, 250, 33, 128, 90)


def make_prompts(lengths: tuple[int, ...]) -> list[Prompt]:
    tokens = np.arange(sum(lengths))
    roles = np.where(tokens % 3 == 0, "needle", "noise")
    ends = itertools.accumulate(lengths, initial=0)
    return [Prompt(tokens[begin:end] % 256, roles[begin:end]) for begin, end in itertools.pairwise(ends)]


def make_layout(lengths: tuple[int, ...] = LENGTHS, names: tuple[str, ...] = NAMES, **attrs: object) -> Layout:
    prompts = make_prompts(lengths)
    return Layout(
        names=names,
        layers=(0, 3),
        heads=2,
        key=4,
        value=3,
        edits=2,
        prompts=prompts,
        lengths=np.array(lengths),
        fingerprints=np.array([prompt.fingerprint for prompt in prompts]),
        roles=True,
        details={"length": np.array(lengths)},
        lam=np.array([[0.25, 0.5], [1.0, 2.0]]),
        snapshots=np.array([5, sum(lengths) - 1]),
        attrs={"mixer": "eda-qed", "checkpoint_digest": "c0ffee", "strength": 1.0, **attrs},
        provenance={"command": "store_run"},
    )


def value(name: str, layer: int, places: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``[places, *shape]`` of multiples of 1/64 in [−1, 1], exact in float16; one in about a hundred is NaN."""
    index = [np.arange(n).reshape(-1, *[1] * (len(shape) - i - 1)) for i, n in enumerate(shape)]
    place = np.asarray(places).reshape(-1, *[1] * len(shape))
    mixed = 7 * layer + 31 * place + len(name) + sum((5 * (i + 1) * x for i, x in enumerate(index)), start=np.zeros((), np.int64))
    whole = (mixed % 129 - 64).astype(np.float32) / 64
    return np.where(mixed % 101 == 0, np.float32("nan"), whole)


def shape_of(layout: Layout, name: str) -> tuple[int, ...]:
    return tuple(layout.sizes[dim] for dim in schema.VARIABLES[name].dims[2:])


def packs(layout: Layout, budget: int) -> list[range]:
    """Prompts of each pack: as many whole ones as fit into the budget, at least one."""
    found, first = [], 0
    for last in range(1, len(layout.lengths) + 1):
        if last == len(layout.lengths) or layout.cu_seqlens[last + 1] - layout.cu_seqlens[first] > budget:
            found.append(range(first, last))
            first = last
    return found


def trace(out: writer.Writer, *, budget: int = 150, packs_at_most: int | None = None, pause: float = 0) -> None:
    layout = out.layout
    todo = [pack for pack in packs(layout, budget) if layout.cu_seqlens[pack.stop] > out.first_token]
    for pack in todo[:packs_at_most]:
        start, stop = int(layout.cu_seqlens[pack.start]), int(layout.cu_seqlens[pack.stop])
        tokens = np.arange(start, stop)
        marks = start + schema.mark_tokens(layout.lengths[pack.start : pack.stop])
        snapshots = layout.snapshots[(layout.snapshots >= start) & (layout.snapshots < stop)]
        for layer in layout.layers:
            for name in layout.names:
                dims = schema.VARIABLES[name].dims
                if "mark" in dims or "snapshot" in dims:
                    places = marks if "mark" in dims else snapshots
                    out.write_marks(name, value(name, layer, places, shape_of(layout, name)), layer=layer, start=start)
                elif dims[:2] == ("layer", "token"):
                    out.write(name, value(name, layer, tokens, shape_of(layout, name)), layer=layer, start=start)
                time.sleep(pause)
        out.write_tokens("nll", value("nll", 0, tokens, ()), start=start)
        out.write_tokens("token_text", [f"é{t}" for t in tokens], start=start)
        out.write_prompts("correct", value("correct", 0, np.array(pack), ()), start=pack.start)
        out.commit(stop)


def main(path: Path) -> None:
    print("ready", flush=True)  # noqa: T201
    with (writer.resume if path.exists() else writer.create)(path, make_layout()) as out:
        trace(out, pause=0.002)
        out.finish()


if __name__ == "__main__":
    schema.MAX_BLOCK = BLOCK
    main(Path(sys.argv[1]))
