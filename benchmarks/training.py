"""Time a training step with the recurrence by Triton programs and by PyTorch on a GPU: ``python -m benchmarks.training``.

Both step in turn in one run, forward, backward and optimizer, after loss and gradients of one batch were seen to agree; nothing
is timed where they do not.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor, nn

from qed_probe.kernels import Choice
from qed_probe.models.config import ModelConfig
from qed_probe.models.language import LanguageModel
from qed_probe.training.objective import batch
from qed_probe.training.pull import Pull
from qed_probe.training.recipes import Recipe
from qed_probe.training.state import Run
from qed_probe.training.train import new_optimizer, step

ROUNDS = 15
MIXERS_TIMED = ("gdn", "gdn2", "qed", "eda")
BACKENDS: tuple[Choice, ...] = ("triton", "torch")
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
"""Of the norm of all gradients. Around the recurrence, autocast rounds to 2⁻⁹ whatever runs it."""


def new_run(mixer: str, precision: str, backend: Choice) -> Run:
    """Two layers of four heads of 64 channels, whose memories this backend runs, and batches of 64 × 512 bytes."""
    sizes = {"hidden": 256, "layers": 2, "heads": 4, "key_dim": 64, "value_dim": 64, "ffn": 512, "vocab_size": 256}
    recipe = Recipe(steps=1000, batch=64, length=512, rate=2e-3, micro_batch=64, task="niah", precision=precision)
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig.from_dict({"mixer": mixer, "tokenizer": "bytes", **sizes})).to("cuda")
    for layer in model.mixers.values():
        layer.backend = backend
    return Run(recipe, 0, None, Path(), None, model, new_optimizer(model, recipe), Pull(model, recipe))


def check(runs: Iterable[Run], tokens: Tensor) -> float:
    """The largest relative difference between two new runs, of the loss and of all gradients' norm."""
    losses, gradients = [], []
    for run in runs:
        losses.append(run.pull(tokens)["loss"].item())
        gradients.append(nn.utils.parameters_to_vector([p.grad for p in run.model.parameters() if p.grad is not None]))
    first, second = gradients
    difference: float = (torch.linalg.vector_norm(first - second) / torch.linalg.vector_norm(second)).item()
    return max(abs(losses[0] / losses[1] - 1), difference)


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call, the GPU's work included."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def main() -> int:
    """Print one row for each precision and mixer; 1 if the backends disagree."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"a step of 2 layers, batch 64 × 512, 4 heads × 64; medians of {ROUNDS} rounds in ms, each backend once a round")
    print("precision  mixer   disagreement  triton   torch  torch/triton")
    for precision, tolerance in TOLERANCE.items():
        for mixer in MIXERS_TIMED:
            runs = {backend: new_run(mixer, precision, backend) for backend in BACKENDS}
            tokens = batch(runs["triton"].recipe, 0, 0, None, 256).to("cuda")
            worst = check(runs.values(), tokens)
            if not worst <= tolerance:
                print(f"{mixer}, {precision}: the backends disagree by {worst:.1e}, nothing timed")
                return 1
            steps = {backend: partial(step, run, tokens, run.recipe.rate) for backend, run in runs.items()}
            rounds = [{backend: milliseconds(work) for backend, work in steps.items()} for _ in range(ROUNDS + 2)][2:]
            ms = [statistics.median(r[backend] for r in rounds) for backend in BACKENDS]
            ratio = statistics.median(r["torch"] / r["triton"] for r in rounds)
            print(f"{precision:10} {mixer:7} {worst:12.1e} {ms[0]:7.1f} {ms[1]:7.1f} {ratio:13.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
