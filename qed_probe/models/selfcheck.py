"""Every trace checks itself: what the model's own kernel returned against a replay of the inputs that were captured."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qed_probe.errors import CheckFailed
from qed_probe.kernels import cut, edits, replay, run
from qed_probe.models.capture import Captured

FIRST = 256
"""Tokens of a call that are replayed in float64."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Max |x − ref| / max |ref| that the rounding of the model's dtype explains: in sixteen bits two steps of the dtype at 1, and in
float64 no less than in float32, as other libraries' kernels compute in float32 whatever they are given."""


@dataclass
class Past:
    """What a sequence's earlier calls leave for the checks of its next one.

    ``state`` ``[N, H, K, V]`` is the memory after them of the layer that is checked whole, by the check's own replay;
    ``largest`` the largest value so far of each layer's output and read, as one token's own may be next to nothing.
    """

    state: Tensor | None = None
    largest: dict[tuple[int, str], Tensor] = field(default_factory=dict)


def check_heads(captured: Captured, seed: int, start: int = 0, past: Past | None = None) -> None:
    """Replay two heads of a layer, drawn by ``seed``, in float64 over the first tokens of a call, sequence by sequence.

    Begins with the states that the call was given, and compares the model's output and the recorded read S̄ᵀd. Raises
    CheckFailed naming layer, head and token, the call having begun at token ``start``.
    """
    past, (_, T, heads, _) = past or Past(), captured.output.shape
    drawn = np.random.default_rng([seed, captured.layer]).choice(heads, min(2, heads), replace=False)
    pick = torch.as_tensor(np.sort(drawn), device=captured.output.device)
    ends = [0, T] if captured.cu_seqlens is None else captured.cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < min(end, FIRST):
            _check_span(captured, sequence, slice(begin, min(end, FIRST)), pick, start + begin, past)


def _check_span(captured: Captured, sequence: int, span: slice, pick: Tensor, start: int, past: Past) -> None:
    """Replay these heads over the first tokens of one sequence."""
    seen = captured.observation
    ready = edits(captured.mixer, cut(seen.tokens, span))
    q, g, k, a, u = (x[0].index_select(1, pick) for x in (ready.q, ready.g, ready.k, ready.a, ready.u))
    d = None if ready.d is None else ready.d[0].index_select(1, pick)
    state = None if captured.initial_state is None else captured.initial_state[sequence, pick]
    y, read = replay(q, g, k, a, u, main=ready.main, d=d, initial_state=state)
    tolerance = _tolerance(captured)
    output = captured.output[0, span].index_select(1, pick)
    _compare(captured, output, captured.scale * y, pick, tolerance, start, "output", past, captured.scale * _least(captured, q))
    if "read" in seen.records:
        recorded = seen.records["read"][0, span].index_select(1, pick)
        # The records are float32 whatever the model's dtype, but Triton's programs keep what is between them in the model's.
        tolerance = tolerance if seen.backend == "triton" else TOLERANCE[torch.float32]
        _compare(captured, recorded, read, pick, tolerance, start, "read S̄ᵀd", past, _least(captured, d))


def check_layer(captured: Captured, start: int = 0, past: Past | None = None) -> None:
    """Run all tokens of a layer again in smaller chunks, that is in other arithmetic; raises CheckFailed as ``check_heads``.

    A later call begins where the replay of the earlier ones ended: it has to go on with the memory that they left.
    """
    past = past or Past()
    again = run(
        captured.mixer,
        captured.observation.tokens,
        initial_state=captured.initial_state if past.state is None else past.state,
        cu_seqlens=captured.cu_seqlens,
        chunk=16,
        backend="torch",
    )
    past.state, heads = again.final_state, torch.arange(again.y.shape[2])
    tolerance = _tolerance(captured)
    found, expected = captured.output.flatten(0, 1), captured.scale * again.y.flatten(0, 1)
    least = captured.scale * _least(captured, captured.observation.tokens.q)
    _compare(captured, found, expected, heads, tolerance, start, "output", past, least)


def _tolerance(captured: Captured) -> float:
    """Of the output: that of its dtype, and what chunked kernels lose where they add log decays up in float32 over 64 tokens.

    The exponential of a difference of two such sums is off by as many steps as they are large; no more than bfloat16 may be.
    """
    tolerance, g = TOLERANCE[captured.output.dtype], captured.observation.tokens.g
    lost = 0.0 if g is None else 64 * float(g.abs().max()) * torch.finfo(torch.float32).eps
    return min(tolerance + lost, TOLERANCE[torch.bfloat16])


def _least(captured: Captured, probe: Tensor | None) -> Tensor:
    """The size that a read is judged against at least: a probe may meet hardly anything, and four float32 steps are rounding.

    Of ‖S‖‖p‖, that is, with the largest value or the initial state for ‖S‖.
    """
    held, state = captured.observation.tokens.v.norm(dim=-1).max(), captured.initial_state
    held = held if state is None else torch.maximum(held, state.norm(dim=(-2, -1)).max().to(held.dtype))
    size = held.new_zeros(()) if probe is None else probe.norm(dim=-1).max()
    return 4 * torch.finfo(torch.float32).eps / TOLERANCE[torch.float32] * held * size


def _compare(
    captured: Captured,
    found: Tensor,
    expected: Tensor,
    heads: Tensor,
    tolerance: float,
    start: int,
    what: str,
    past: Past,
    least: Tensor,
) -> None:
    """``[T, heads, V]`` each, judged against the largest number so far, or ``least``."""
    bad = (~found.isfinite()).any(-1).nonzero()
    if len(bad):
        token, head = bad[0].tolist()
        raise CheckFailed(
            f"self-check: expected a finite {what}, found NaN or infinity first at layer {captured.layer}, "
            f"head {int(heads[head])}, token {start + token}"
        )
    size = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    size = torch.maximum(size, least.to(size.dtype))
    key = captured.layer, what
    past.largest[key] = size = torch.maximum(size, past.largest.get(key, size))
    off = ((found.double() - expected.double()).abs() / size).amax(-1)
    if not (off <= tolerance).all():
        token, head = divmod(int(off.nan_to_num(torch.inf).argmax()), off.shape[1])
        raise CheckFailed(
            f"self-check: expected the {what} within {tolerance:.1e} of its replay, found {off[token, head].item():.1e} "
            f"at layer {captured.layer}, head {int(heads[head])}, token {start + token}"
        )
