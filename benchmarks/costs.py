"""What QED costs over GDN-2, and EDA over KDA, on a GPU with nothing recorded: ``python -m benchmarks.costs``.

Models of the 340M preset with random weights in bfloat16: a prefill, decoding one token at a time, a training step, and the
memory that each takes. Both of a pair are timed in turn, after a prefill and the same tokens decoded one by one were seen to
agree.
"""

import gc
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.training import milliseconds
from qed_probe.models.config import preset
from qed_probe.models.language import Cache, LanguageModel
from qed_probe.training.pull import Pull
from qed_probe.training.recipes import Recipe
from qed_probe.training.state import Run
from qed_probe.training.train import new_optimizer, step

PAIRS = (("gdn2", "qed"), ("kda", "eda"))
ROUNDS, LENGTH, CONTEXT, STEPS = 11, 2048, 256, 8
PREFILL, TRAINED, DECODED = 8, 4, (1, 64)
TOLERANCE = 0.1
"""Of the largest hidden state: bfloat16 rounds to 2⁻⁹ several times in each of 24 layers."""

Forms = Mapping[str, Callable[[], object]]


def new_model(mixer: str) -> LanguageModel:
    """The preset with random weights, on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LanguageModel(preset("340m", mixer))


def ids(batch: int, length: int) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 32000, (batch, length), generator=torch.Generator().manual_seed(1)).cuda()


def disagreement(model: LanguageModel) -> float:
    """How far the last hidden state of a prefill lies from that of the same tokens, the last of them decoded one by one."""
    tokens, cache = ids(2, 96), model.new_cache(2)
    whole = model(tokens)[:, -1]
    model(tokens[:, :88], cache=cache)
    for t in range(88, 96):
        last = model(tokens[:, t : t + 1], cache=cache)
    worst: float = ((last[:, 0] - whole).abs().max() / whole.abs().max()).item()
    return worst


def decode(model: LanguageModel, cache: Cache, token: Tensor) -> None:
    """Some steps, each from where the one before left off."""
    for _ in range(STEPS):
        model.logits(model(token, cache=cache))


def busy(work: Callable[[], object]) -> float:
    """Milliseconds of the GPU's own work in one call, without what it waits for launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    microseconds: float = sum(event.self_device_time_total for event in seen.key_averages())
    return microseconds / 1e3


def medians(forms: Forms) -> dict[str, float]:
    """Milliseconds of each form, which runs once a round."""
    rounds = [{name: milliseconds(work) for name, work in forms.items()} for _ in range(ROUNDS + 2)][2:]
    return {name: statistics.median(one[name] for one in rounds) for name in forms}


def peak(work: Callable[[], object]) -> float:
    """GB that the call takes beyond what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def show(what: str, found: dict[str, float], unit: str) -> None:
    """One row: both of the pair, and the second over the first."""
    (first, a), (second, b) = found.items()
    print(f"| {what} | {first} | {a:.4g} | {second} | {b:.4g} | {unit} | {b / a:.2f} |", flush=True)


def prefill(models: dict[str, LanguageModel]) -> None:
    """Hidden states of whole prompts."""
    prompt = ids(PREFILL, LENGTH)
    what, forms = f"prefill of {PREFILL} × {LENGTH}", {name: partial(model, prompt) for name, model in models.items()}
    show(what, medians(forms), "ms")
    show(f"{what}, the GPU's work", {name: busy(form) for name, form in forms.items()}, "ms")
    show(f"{what}, memory beyond the weights", {name: peak(form) for name, form in forms.items()}, "GB")


def decoding(models: dict[str, LanguageModel], batch: int) -> None:
    """Tokens one at a time, from a context that is the same for all."""
    context, token = ids(batch, CONTEXT), ids(batch, 1)
    forms: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        cache = model.new_cache(batch)
        model(context, cache=cache)
        forms[name] = partial(decode, model, cache, token)
    rates = {name: batch * STEPS / ms * 1e3 for name, ms in medians(forms).items()}
    show(f"decoding, batch {batch}", rates, "tokens/s")
    show(f"decoding, batch {batch}, the GPU's work a step", {name: busy(form) / STEPS for name, form in forms.items()}, "ms")


def training(pair: tuple[str, str]) -> None:
    """A training step, one model at a time: there is no room for two."""
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    tokens = ids(TRAINED, LENGTH)
    for name in pair:
        recipe = Recipe(
            steps=1000, batch=TRAINED, length=LENGTH, rate=3e-4, micro_batch=TRAINED, task="tokens", precision="bfloat16"
        )
        model = new_model(name)
        run = Run(recipe, 0, None, Path(), None, model, new_optimizer(model, recipe), Pull(model, recipe))
        work = partial(step, run, tokens, recipe.rate)
        memory[name] = peak(work)
        times |= medians({name: work})
        del model, run, work
        gc.collect()
        torch.cuda.empty_cache()
    show(f"training step of {TRAINED} × {LENGTH}", times, "ms")
    show(f"training step of {TRAINED} × {LENGTH}, memory beyond the weights", memory, "GB")


def main() -> int:
    """Print a table; 1 if a model's prefill and decoding disagree."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; medians of {ROUNDS} rounds\n")
    print("| what | of | | of | | unit | second / first |\n|---|---|---|---|---|---|---|")
    for pair in PAIRS:
        models = {name: new_model(name).to(torch.bfloat16).eval() for name in pair}
        show("parameters", {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in models.items()}, "M")
        with torch.inference_mode():
            for name, model in models.items():
                worst = disagreement(model)
                if not worst <= TOLERANCE:
                    print(f"{name}: prefill and decoding differ by {worst:.1e}, nothing timed")
                    return 1
            prefill(models)
            for batch in DECODED:
                decoding(models, batch)
        del models, model
        gc.collect()
        torch.cuda.empty_cache()
        training(pair)
    return 0


if __name__ == "__main__":
    sys.exit(main())
