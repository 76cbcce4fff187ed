"""Time the Triton programs on a GPU, without and with all records, beside those of flash-linear-attention without any.

``python -m benchmarks.kernels`` takes the peers from ``flash-linear-attention>=0.6``, and leaves them out where that is missing.
``--bounded`` adds the peers' forms for bounded decays; ``--float32`` times ours in float32, beside the chunked PyTorch form.
A time is the GPU's work, launched while the GPU is busy; ``alone`` is that of a call on an idle GPU, launching included.
``moved`` are the bytes of inputs and outputs, each once; memory is a percentage of them.

All forms of a shape are timed in turn, after each was checked against the float64 oracle on the very tensors: the start of the
last row's last head, which by causality is a short sequence's output. Nothing of a shape is printed where that fails.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import fla_functions
from benchmarks.recurrence import make_tokens
from qed_probe.kernels import MIXERS, Choice, Tokens, reference, run

ROUNDS, START, CHUNK, CHANNELS = 15, 130, 64, 128
SHAPES = ((1, 32768, 6), (16, 2048, 6), (1, 8192, 32), (8, 8192, 16))
TIMED = ("gdn2", "qed", "eda")
TOLERANCE = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
TOLERANCE_OF_PEERS = 2e-2
AGAINST = "chunk_gdn2"
HEAD = (
    "form", "GPU, ms", f"of {AGAINST}", "alone, ms", "moved, MB", "GFLOP", "at copy speed, ms", "at matrix rate, ms",
    "GPU / larger", "memory beyond inputs, %", "and outputs, %",
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One way to run a mixer's memory over its tokens: ``work`` returns the outputs by name, which may err by ``tolerance``."""

    mixer: str
    tokens: Tokens
    work: Callable[[], dict[str, Tensor]]
    record: bool
    tolerance: float


def tokens_of(mixer: str, B: int, T: int, H: int, dtype: torch.dtype) -> Tokens:
    """Random tokens on the GPU, their decays in float32; q, k, v and g are the same for every mixer."""
    given = make_tokens(mixer, T, H, CHANNELS, CHANNELS, rows=B, device="cuda")
    return with_tensors(given, lambda name, x: x.to(torch.float32 if name in ("g", "lam") else dtype))


def start_of_last_head(tokens: Tokens) -> Tokens:
    """What the oracle is given, on the CPU."""
    return with_tensors(tokens, lambda name, x: (x[-1:] if name == "lam" else x[-1:, :START, -1:]).cpu())


def with_tensors(tokens: Tokens, change: Callable[[str, Tensor], Tensor]) -> Tokens:
    """The tokens, each tensor changed."""
    changed: dict[str, Any] = {name: change(name, x) for name, x in tensors(tokens).items()}
    return replace(tokens, **changed)


def tensors(tokens: Tokens) -> dict[str, Tensor]:
    """What the tokens have, by name."""
    return {field.name: x for field in fields(tokens) if isinstance(x := getattr(tokens, field.name), Tensor)}


def our_form(mixer: str, tokens: Tokens, record: bool, backend: Choice) -> Form:
    """Our pass, from a layer's tokens to its outputs and, if asked for, all records."""

    def work() -> dict[str, Tensor]:
        seen = run(MIXERS[mixer], tokens, record=record, backend=backend)
        return {"y": seen.y, "final_state": seen.final_state} | seen.records

    return Form(mixer, tokens, work, record, TOLERANCE[tokens.v.dtype])


def peer_form(peer: fla_functions.Peer, tokens: Tokens) -> Form:
    """A function of flash-linear-attention."""
    call = peer.prepare(tokens)
    return Form(peer.mixer, tokens, lambda: {"y": call()}, record=False, tolerance=TOLERANCE_OF_PEERS)


def forms_of(shape: tuple[int, int, int], dtype: torch.dtype, timed: dict[str, fla_functions.Peer]) -> dict[str, Form]:
    """All forms to time at one shape, by name; the peers are the first to run."""
    tokens = {mixer: tokens_of(mixer, *shape, dtype) for mixer in {*TIMED, *(peer.mixer for peer in timed.values())}}
    backends: tuple[Choice, ...] = ("triton", "torch") if dtype == torch.float32 else ("triton",)
    ours = {
        f"{mixer}{', PyTorch' * (backend == 'torch')}{' + records' * record}": our_form(mixer, tokens[mixer], record, backend)
        for mixer in TIMED
        for backend in backends
        for record in (False, True)
    }
    return {name: peer_form(peer, tokens[peer.mixer]) for name, peer in timed.items()} | ours


def faults(forms: dict[str, Form]) -> Iterable[str]:
    """The forms whose output or read is not the oracle's, with their errors."""
    expected = {form.mixer: reference(form.mixer, start_of_last_head(form.tokens)) for form in forms.values()}
    for name, form in forms.items():
        found, right = form.work(), expected[form.mixer]
        for output, ref in (("y", right.y), ("read", right.records["read"])):
            if output in found:
                error = ((found[output][-1:, :START, -1:].cpu() - ref).abs().max() / ref.abs().max()).item()
                if not error <= form.tolerance:
                    yield f"{name}: {output} errs by {error:.1e}"


def milliseconds(work: Callable[[], object], before: Tensor | None) -> float:
    """Time of one call on an idle GPU, or behind the writing of ``before``, which clears its cache and outlasts the launching."""
    begun, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    if before is not None:
        before.zero_()
    begun.record()
    work()
    ended.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(ended)


def in_turns(forms: dict[str, Form], before: Tensor | None) -> dict[str, list[float]]:
    """The times of each form, which runs once a round."""
    rounds = [{name: milliseconds(form.work, before) for name, form in forms.items()} for _ in range(ROUNDS + 2)][2:]
    return {name: [one[name] for one in rounds] for name in forms}


def ceilings(x: Tensor) -> tuple[float, float]:
    """What the card does now, a ms: bytes read and written by a copy of 2 GiB, operations of a bfloat16 product of 8192³."""
    into, square = torch.empty_like(x[0]), torch.randn(8192, 8192, device=x.device, dtype=torch.bfloat16)
    copying, multiplying = (
        statistics.median([milliseconds(work, x) for _ in range(ROUNDS + 5)][5:])
        for work in (lambda: into.copy_(x[0]), lambda: square @ square)
    )
    return 2 * into.nbytes / copying, 2 * 8192**3 / multiplying


def memory(work: Callable[[], dict[str, Tensor]]) -> tuple[int, int]:
    """Bytes of the outputs, and bytes that were taken at the peak of the call, the outputs included."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = work()
    return sum(x.nbytes for x in outputs.values()), torch.cuda.max_memory_allocated() - before


def flops(form: Form) -> int:
    """Operations of the recurrence in chunks of 64 tokens: M edits and M + 1 reads a token, one read more for the records.

    The memory ``[K, V]`` is read and edited by matrix products, and each read meets the edits before it in its chunk, on average
    half of them. What solves a chunk, and what makes gates and scalars, is not counted.
    """
    K, V = form.tokens.q.shape[-1], form.tokens.v.shape[-1]
    edits = 1 + (form.tokens.address is not None)
    reads = edits + 1 + form.record
    return form.tokens.v[..., 0].numel() * (2 * K * V * (reads + edits) + reads * edits * CHUNK * (K + V))


def row(form: Form, busy: list[float], alone: list[float], against: list[float] | None, copy: float, matrix: float) -> list[str]:
    """What ``HEAD`` names after the form, from its times and those of the peer it is held against, round by round."""
    ms = statistics.median(busy)
    ratio = "–" if against is None else f"{statistics.median(a / b for a, b in zip(busy, against, strict=True)):.2f}"
    inputs = sum(x.nbytes for x in tensors(form.tokens).values())
    outputs, peak = memory(form.work)
    moved, done = inputs + outputs, flops(form)
    floors = moved / copy, done / matrix
    taken = [f"{100 * x / moved:.0f}" for x in (peak, peak - outputs)]
    sizes = [f"{moved / 1e6:.0f}", f"{done / 1e9:.0f}", *(f"{x:.3f}" for x in floors)]
    return [f"{ms:.2f}", ratio, f"{statistics.median(alone):.2f}", *sizes, f"{ms / max(floors):.1f}", *taken]


def line(cells: Iterable[str]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print a table for each shape; 1 if a form is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--bounded", action="store_true", help="the peers' forms for bounded decays too")
    parser.add_argument("--float32", action="store_true", help="ours in float32, beside the chunked PyTorch form")
    chosen = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    absent = "" if chosen.float32 else fla_functions.absence()
    dtype = torch.float32 if chosen.float32 else torch.bfloat16
    timed = {} if absent or chosen.float32 else fla_functions.PEERS | (fla_functions.BOUNDED if chosen.bounded else {})
    if absent:
        print(absent)
    if timed:
        fla_functions.hasten_tuning()
    before = torch.empty(2, 1 << 31, dtype=torch.uint8, device="cuda")
    copy, matrix = ceilings(before)
    print(f"copy {copy / 1e9:.2f} TB/s, bfloat16 product {matrix / 1e9:.0f} TFLOP/s; medians of {ROUNDS} rounds")
    for B, T, H in SHAPES:
        begun = time.perf_counter()
        with torch.inference_mode():
            forms = forms_of((B, T, H), dtype, timed)
            wrong = [*faults(forms)]
            if wrong:
                print(f"{B}×{T}×{H}: nothing timed, by the oracle\n" + "\n".join(wrong))
                return 1
            ready = time.perf_counter() - begun
            busy, alone = in_turns(forms, before), in_turns(forms, None)
            print(f"\nB×T×H = {B}×{T}×{H}, K = V = {CHANNELS}, {str(dtype).removeprefix('torch.')}; ready after {ready:.0f} s\n")
            print(line(HEAD), line("---" for _ in HEAD), sep="\n")
            for name, form in forms.items():
                print(line([name, *row(form, busy[name], alone[name], busy.get(AGAINST), copy, matrix)]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
