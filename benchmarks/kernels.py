"""Time the Triton programs against the chunked PyTorch form on a GPU, without and with records: ``python -m benchmarks.kernels``.

Both are timed in turn in one run, after each was checked against the float64 oracle on a shorter sequence; nothing is printed
where that fails.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.recurrence import make_tokens
from qed_probe.kernels import MIXERS, Choice, Tokens, reference, run

ROUNDS = 15
SHAPES = ((1, 32768, 6, 128), (16, 2048, 6, 128), (64, 512, 4, 64))
BACKENDS: tuple[Choice, ...] = ("triton", "torch")
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5}


def tokens_of(mixer: str, B: int, T: int, H: int, K: int, dtype: torch.dtype) -> Tokens:
    """Random tokens on the GPU, their decays in float32."""
    given = make_tokens(mixer, T, H, K, K, rows=B)
    moved: dict[str, Any] = {
        field.name: x.to("cuda", torch.float32 if field.name in ("g", "lam") else dtype)
        for field in fields(given)
        if isinstance(x := getattr(given, field.name), Tensor)
    }
    return replace(given, **moved)


def check(mixer: str, K: int, dtype: torch.dtype) -> float:
    """The largest error of either backend's output and read against the oracle, over 300 tokens of two heads."""
    tokens = tokens_of(mixer, 1, 300, 2, K, dtype)
    on_cpu: dict[str, Any] = {f.name: x.cpu() for f in fields(tokens) if isinstance(x := getattr(tokens, f.name), Tensor)}
    expected = reference(mixer, replace(tokens, **on_cpu))
    errors = []
    for backend in BACKENDS:
        seen = run(MIXERS[mixer], tokens, record=True, backend=backend)
        pairs = ((seen.y, expected.y), (seen.records["read"], expected.records["read"]))
        errors += [((x.cpu() - ref).abs().max() / ref.abs().max()).item() for x, ref in pairs]
    return max(errors)


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call, the GPU's work included."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def main() -> int:
    """Print one row for each dtype, mixer and shape; 1 if a form is wrong."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"medians of {ROUNDS} rounds in ms, each form once a round")
    print("dtype     mixer  B×T×H×K          triton  +records   torch  +records  torch/triton  with records")
    for dtype in TOLERANCE:
        for mixer in ("gdn2", "qed", "eda"):
            for B, T, H, K in SHAPES:
                worst = check(mixer, K, dtype)
                if not worst <= TOLERANCE[dtype]:
                    print(f"{mixer}, {dtype}: error {worst:.1e} against the oracle, nothing timed")
                    return 1
                tokens = tokens_of(mixer, B, T, H, K, dtype)
                forms: dict[tuple[Choice, bool], Callable[[], object]] = {
                    (backend, record): lambda b=backend, r=record, m=mixer, t=tokens: run(MIXERS[m], t, record=r, backend=b)  # type: ignore[misc]
                    for backend in BACKENDS
                    for record in (False, True)
                }
                with torch.inference_mode():
                    rounds = [{name: milliseconds(work) for name, work in forms.items()} for _ in range(ROUNDS + 2)][2:]
                ms = {name: statistics.median(r[name] for r in rounds) for name in forms}
                row = "".join(f"{ms[name]:9.2f}" for name in forms)
                ratios = [statistics.median(r["torch", on] / r["triton", on] for r in rounds) for on in (False, True)]
                name = str(dtype).removeprefix("torch.")
                print(f"{name:9} {mixer:6} {f'{B}×{T}×{H}×{K}':15} {row} {ratios[0]:13.1f} {ratios[1]:13.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
