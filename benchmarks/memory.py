"""What looking into memories costs beside a trace: ``python -m benchmarks.memory``.

A model over the same prompts: traced, every part of ``qed-probe memory`` alone and, on a CPU, all of them, in turns, loading and
planning left out. On a GPU it is a QED model of the 340M preset with random weights, in bfloat16; on a CPU the bundled model.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

import qed_probe as qp
from benchmarks.eigen import milliseconds, native
from qed_probe.memory import run as memory_run
from qed_probe.tracing import run as trace_run
from qed_probe.tracing.plan import make_plan

ROUNDS = 3
PROMPTS = {"cpu": (16, 512), "cuda": (8, 4096)}
"""So many prompts of so many tokens."""
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def forms(checkpoint: Path | None, prompts: Sequence[qp.Prompt], device: str, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each takes the plan that is there."""
    how = {"device": device, "dtype": DTYPE[device]}
    plan = make_plan(checkpoint, prompts, vectors="none", device=device, dtype=DTYPE[device])

    def traced() -> None:
        with patch.object(trace_run, "make_plan", lambda *_, **__: plan):
            qp.trace(checkpoint, prompts, folder / "run.zarr", overwrite=True, **how)  # type: ignore[arg-type]

    def looked(only: list[str] | None) -> None:
        with patch.object(memory_run, "make_plan", lambda *_, **__: plan):
            qp.inspect_memory(checkpoint, prompts, only=only, **how)  # type: ignore[arg-type]

    parts: dict[str, Callable[[], object]] = {name: partial(looked, [name]) for name in memory_run.PARTS}
    return {"trace": traced, **parts} | ({"everything": partial(looked, None)} if device == "cpu" else {})


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=PROMPTS, default="cpu")
    device: str = parser.parse_args().device
    where = torch.cuda.get_device_name() if device != "cpu" else f"{os.cpu_count()} cores"
    count, length = PROMPTS[device]
    print(f"{where}, Python {platform.python_version()}, torch {torch.__version__}; medians of {ROUNDS} rounds")
    print(f"{count} prompts of {length} tokens\n\n| what | ms | of the trace |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        prompts = qp.niah_prompts(length, count, seed=0)
        timed = forms(native(Path(folder) / "model", device), prompts, device, Path(folder))
        rounds = [{name: milliseconds(work, device) for name, work in timed.items()} for _ in range(ROUNDS + 1)][1:]
    medians = {name: statistics.median(one[name] for one in rounds) for name in timed}
    for name, ms in medians.items():
        print(f"| {name} | {ms:.0f} | {ms / medians['trace']:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
