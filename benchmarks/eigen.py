"""What ``qed-probe eigen`` costs over the forward that it judges: ``python -m benchmarks.eigen``.

A model of this package and one of another library, with random weights, run over the same packs of tokens: the forward alone,
then with every erase factor tallied, in turns. On a GPU the models are of the 340M preset and of Qwen3.5's shape, in bfloat16; on
a CPU the bundled model and a tiny one of that shape (left out where transformers is missing). The steps of a sample take the same
time however many the tokens: what a token costs is in the longer run's row.
"""

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import qed_probe as qp
from qed_probe.eigen import run
from qed_probe.tracing.plan import Plan, make_plan

ROUNDS = {16: 3, 128: 3, 1024: 1}
"""Rounds by the number of prompts; the longest run, of a billion token-heads or nearly so, is for a GPU."""
LENGTH = {"cpu": 512, "cuda": 8192}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def native(directory: Path, device: str) -> Path | None:
    """A model of this package: the bundled one, or one of the 340M preset with random weights."""
    if device == "cpu":
        return None
    torch.manual_seed(0)
    qp.save_model(qp.LanguageModel(qp.preset("340m", "qed")), directory)
    return directory


def foreign(directory: Path, device: str) -> Path:
    """A model of Qwen3.5's shape."""
    from benchmarks.peers import save_model  # with transformers, which the other row does without

    save_model(directory, device)
    return directory


def forward(plan: Plan) -> None:
    """The model alone over the packs, as ``tally_eigen`` runs it."""
    bounds = plan.layout.cu_seqlens
    with torch.inference_mode():
        for pack in plan.packs:
            ids = torch.from_numpy(np.concatenate([prompt.tokens for prompt in plan.prompts[pack]])).to(plan.model.device)
            ends = torch.from_numpy(bounds[pack.start : pack.stop + 1] - bounds[pack.start])
            plan.model(ids[None], cu_seqlens=ends)


def milliseconds(work: Callable[[], object], device: str) -> float:
    """One call, all that it launches included."""
    begun = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun)


def measure(checkpoint: Path | None, device: str, count: int) -> tuple[float, float, int]:
    """Milliseconds of the forward and with the tally, and token-heads."""
    rng = np.random.default_rng(1)
    prompts = [qp.Prompt(rng.integers(0, 256, LENGTH[device])) for _ in range(count)]
    plan = make_plan(checkpoint, prompts, vectors="none", device=device, dtype=DTYPE[device])

    def tallied() -> None:
        with patch.object(run, "make_plan", lambda *_, **__: plan):
            qp.tally_eigen(checkpoint, prompts, device=device, dtype=DTYPE[device])

    cold = ROUNDS[count] > 1  # the longest run comes after others
    times = [(milliseconds(lambda: forward(plan), device), milliseconds(tallied, device)) for _ in range(ROUNDS[count] + cold)]
    times = times[cold:]
    alone, with_tally = (statistics.median(column) for column in zip(*times, strict=True))
    return alone, with_tally, count * LENGTH[device] * len(plan.layout.layers) * plan.layout.heads


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=LENGTH, default="cpu")
    device: str = parser.parse_args().device
    where = torch.cuda.get_device_name() if device != "cpu" else f"{os.cpu_count()} cores"
    print(f"{where}, Python {platform.python_version()}, torch {torch.__version__}; medians of 3 rounds, 1024 prompts once\n")
    print("| model | prompts | token-heads, M | forward, ms | with the tally, ms | of forward | ns a token-head |")
    print("|---|---|---|---|---|---|---|")
    makers = {"native": native, **({"Qwen3.5's shape": foreign} if find_spec("transformers") else {})}
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = make(Path(folder) / "model", device)
            for count in [count for count in ROUNDS if count < 1024 or device != "cpu"]:
                alone, both, heads = measure(checkpoint, device, count)
                of = f"{count} × {LENGTH[device]} | {heads / 1e6:.1f}"
                cost = f"{both / alone:.2f} | {1e6 * (both - alone) / heads:.1f}"
                print(f"| {name} | {of} | {alone:.0f} | {both:.0f} | {cost} |", flush=True)
                gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
