"""Time the chunked form, without and with records, against a token-by-token PyTorch loop: ``python -m benchmarks.recurrence``.

All three are timed in turn in one run, after each was checked against the float64 oracle; nothing is printed where that fails.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from qed_probe.kernels import MIXERS, Tokens, edits, replay, run

ROUNDS = 15
MIXERS_TIMED = ("gdn2", "qed", "eda", "gdn")


def make_tokens(mixer: str, T: int, H: int, K: int, V: int, rows: int = 1, device: str = "cpu") -> Tokens:
    """Random tokens of a size like a trained layer's."""
    rng, spec = torch.Generator(device).manual_seed(0), MIXERS[mixer]

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, T, H, *shape, generator=rng, device=device)

    def gate(*shape: int) -> Tensor:
        return torch.rand(rows, T, H, *shape, generator=rng, device=device)

    channel = spec.gate == "channel"
    return Tokens(
        q=normalize(normal(K), dim=-1),
        k=normalize(normal(K), dim=-1),
        v=normal(V),
        g=-0.2 * gate(1 if spec.decay == "head" else K),
        beta=None if channel else gate(),
        b=gate(K) if channel else None,
        w=gate(V) if channel else None,
        lam=None if spec.direction is None else torch.full((H,), 0.1, device=device),
        address=None if spec.address is None else normalize(normal(K), dim=-1),
        gamma=None if spec.address is None else gate(),
    )


def token_loop(mixer: str, tokens: Tokens) -> Tensor:
    """What a plain implementation does: one token after another, all heads at once, float32."""
    ready = edits(MIXERS[mixer], tokens)
    decay, state, outputs = ready.g.exp(), ready.q.new_zeros(1, *ready.q.shape[2:], ready.u.shape[-1]), []
    for t in range(ready.q.shape[1]):
        state = decay[:, t, :, :, None] * state
        for m in range(ready.k.shape[3]):
            residual = ready.u[:, t, :, m] - (ready.a[:, t, :, m, None] @ state)[..., 0, :]
            state = state + ready.k[:, t, :, m, :, None] * residual[..., None, :]
        outputs.append((ready.q[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(outputs, 1)


def check(mixer: str, tokens: Tokens) -> float:
    """Largest relative error of the loop and the chunked form against float64."""
    ready = edits(MIXERS[mixer], tokens)
    q, g, k, a, u = (x[0] for x in (ready.q, ready.g, ready.k, ready.a, ready.u))
    expected, _ = replay(q, g, k, a, u, main=ready.main, d=None)
    found = (token_loop(mixer, tokens)[0], run(MIXERS[mixer], tokens, record=True).y[0])
    return max(((x - expected).abs().max() / expected.abs().max()).item() for x in found)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> int:
    """Print one row a mixer; 1 if a form is wrong."""
    T, H, K, V = 4096, 4, 64, 64
    threads = torch.get_num_threads()
    print(
        f"T={T} H={H} K={K} V={V} float32, {threads} CPU threads, torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(f"medians of {ROUNDS} rounds, each form once a round; ratios are medians of the rounds' ratios")
    print("mixer   loop ms  chunked ms  +records ms  loop/chunked  records/plain")
    for mixer in MIXERS_TIMED:
        tokens = make_tokens(mixer, T, H, K, V)
        with torch.inference_mode():
            worst = check(mixer, tokens)
            if not worst <= 1e-5:
                print(f"{mixer}: error {worst:.1e} against the oracle, nothing timed")
                return 1
            forms: dict[str, Callable[[], object]] = {
                "loop": lambda m=mixer, t=tokens: token_loop(m, t),  # type: ignore[misc]
                "chunked": lambda m=mixer, t=tokens: run(MIXERS[m], t),  # type: ignore[misc]
                "records": lambda m=mixer, t=tokens: run(MIXERS[m], t, record=True),  # type: ignore[misc]
            }
            rounds = [{name: seconds(work) for name, work in forms.items()} for _ in range(ROUNDS)]
        middle = {name: statistics.median(r[name] for r in rounds) * 1e3 for name in forms}
        speed = statistics.median(r["loop"] / r["chunked"] for r in rounds)
        price = statistics.median(r["records"] / r["chunked"] for r in rounds)
        row = f"{middle['loop']:8.0f} {middle['chunked']:11.1f} {middle['records']:12.1f}"
        print(f"{mixer:6} {row} {speed:13.1f} {price:14.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
