"""Look into a model of Qwen3.5's shape, by this package and by TransformerLens: ``python -m benchmarks.peers``.

The same weights and prompt for all, each form in a process of its own, which first runs it once on a short prompt. ``forward`` is
the model alone, ``capture`` adds every record of every layer, ``trace`` is the command without its loading: records, the
self-check and the store. TransformerLens (4.3 or later, left out where it is missing) runs the model with its cache of
activations, then replays the states by ``compute_ssm_state``; its last states are held against ours first. Peak memory is what
the process, on a GPU the device, takes beyond what it holds before. ``--device cuda`` runs our forms there, in bfloat16.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

import qed_probe as qp
from qed_probe.models.foreign.checkpoint import ForeignModel, load
from qed_probe.tracing import run
from qed_probe.tracing.plan import make_plan

ROUNDS, TOLERANCE = 7, 1e-4
"""Of the largest of a state's numbers: both are float32, summed in other orders."""
LENGTH = {"cpu": 1024, "cuda": 4096}
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "cuda": {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip
"""A tiny model with the memories of Qwen3.5-0.8B, and one of all its sizes but its depth and vocabulary."""
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
Work = Callable[[Tensor], object]


def save_model(directory: Path, device: str) -> None:
    """Random weights, with gates that forget at every rate."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_5_text", **SIZES[device])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        if "A_log" in name:
            torch.nn.init.uniform_(p, -5, 1)
    model.to(DTYPE[device]).save_pretrained(directory)


def prompt(device: str) -> Tensor:
    """Token ids, ``[1, T]``."""
    return torch.randint(SIZES[device]["vocab_size"], (1, LENGTH[device]), generator=torch.Generator().manual_seed(1))


def plain(directory: Path, device: str, undo: ExitStack) -> ForeignModel:
    """The model's own forward, without the output over the vocabulary."""
    return load(directory, device=torch.device(device), dtype=DTYPE[device])


def captured(directory: Path, device: str, undo: ExitStack) -> Work:
    """The forward, and all records of each layer, which are let go of when the next one is there."""
    model = plain(directory, device, undo)

    def work(ids: Tensor) -> None:
        with qp.capture(model, lambda _: None):
            model(ids)

    return work


def traced(directory: Path, device: str, undo: ExitStack) -> Work:
    """A trace into a store, planned beforehand."""
    where = Path(undo.enter_context(tempfile.TemporaryDirectory()))
    dtype = str(DTYPE[device]).removeprefix("torch.")
    plans = {
        length: make_plan(directory, [qp.Prompt(prompt(device)[0, :length].numpy())], device=device, dtype=dtype)
        for length in (64, LENGTH[device])
    }

    def work(ids: Tensor) -> None:
        plan = plans[ids.shape[1]]
        with patch.object(run, "make_plan", lambda *_, **__: plan):
            qp.trace(directory, plan.prompts, where / "run.zarr", overwrite=True)

    return work


def transformer_lens(directory: Path, device: str, undo: ExitStack) -> Callable[[Tensor], dict[int, Tensor]]:
    """The model with TransformerLens' cache, then the states of all tokens of every layer."""
    from transformer_lens.model_bridge import TransformerBridge

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    bridge = TransformerBridge.boot_transformers(str(directory), hf_model=model, device="cpu")

    def work(ids: Tensor) -> dict[int, Tensor]:
        _, cache = bridge.run_with_cache(ids, use_cache=False)
        states: dict[int, Tensor] = cache.compute_ssm_state()
        return states

    return work


FORMS: dict[str, Callable[[Path, str, ExitStack], Work]] = {
    "forward": plain,
    "capture": captured,
    "trace": traced,
    "TransformerLens": transformer_lens,
}


def memory(device: str) -> float:
    """MB that the process, or the device, has taken at most since ``forget``."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e6


def forget(device: str) -> None:
    """Begin to count from what is held now."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.reset_peak_memory_stats()


def measure(form: str, directory: Path, device: str) -> tuple[float, float]:
    """Milliseconds and MB of one form, in a process of its own."""
    ids = prompt(device).to(device)
    with ExitStack() as undo, torch.inference_mode():
        work = FORMS[form](directory, device, undo)
        times = []
        for one in [ids[:, :64]] + [ids] * (ROUNDS + (device != "cpu")):
            if device != "cpu":
                torch.cuda.synchronize()
            forget(device)
            before, begun = memory(device), time.perf_counter()
            work(one)
            if device != "cpu":
                torch.cuda.synchronize()
            times.append((1e3 * (time.perf_counter() - begun), memory(device) - before))
    counted = times[-ROUNDS:]
    return statistics.median(ms for ms, _ in counted), max(mb for _, mb in counted)


def apart(form: str, directory: Path, device: str) -> tuple[float, float]:
    """``measure`` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (form, directory, device))


def disagreement(directory: Path) -> float:
    """How far TransformerLens' last states lie from ours, of the largest."""
    ids, model = prompt("cpu")[:, :200], load(directory, device=torch.device("cpu"), dtype=torch.float32)
    with ExitStack() as undo, torch.inference_mode(), qp.capture(model) as records:
        model(ids)
        theirs = transformer_lens(directory, "cpu", undo)(ids)
    ours = {seen.layer: seen.observation.final_state for seen in records}
    off = [(ours[layer] - theirs[layer][:, -1]).abs().max() / ours[layer].abs().max() for layer in ours]
    return torch.stack(off).max().item()


def main() -> int:
    """Print a table; 1 if TransformerLens' states are not ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SIZES, default="cpu", help="where our forms run; TransformerLens runs on the CPU")
    device: str = parser.parse_args().device
    lens = device == "cpu" and find_spec("transformer_lens") is not None
    names = ["transformers", *["transformer_lens"] * lens]
    versions = ", ".join(f"{name.replace('_', '-')} {version(name.replace('_', '-'))}" for name in names)
    where = torch.cuda.get_device_name() if device != "cpu" else f"{os.cpu_count()} cores"
    print(
        f"{where}, Python {platform.python_version()}, torch {torch.__version__}, {versions}; medians of {ROUNDS} rounds",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_model(directory, device)
        if lens and not (worst := disagreement(directory)) <= TOLERANCE:
            print(f"TransformerLens: states differ by {worst:.1e}, nothing timed")
            return 1
        sizes = SIZES[device]
        print(
            f"T = {LENGTH[device]}, {sizes['num_hidden_layers']} layers, {sizes['linear_num_value_heads']} heads, "
            f"K = V = {sizes['linear_key_head_dim']}\n\n| form | ms | of forward | peak, MB |\n|---|---|---|---|"
        )
        forward = None
        for form in FORMS:
            if lens or form != "TransformerLens":
                ms, mb = apart(form, directory, device)
                forward = forward or ms
                print(f"| {form} | {ms:.0f} | {ms / forward:.2f} | {mb:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
