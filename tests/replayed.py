"""The oracle of replays: one token of one head after another in float64, everything by its definition, and layers to replay."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qed_probe.kernels import MIXERS, Tokens, run
from qed_probe.models.capture import Captured
from qed_probe.replays import QUANTITIES, REGIMES, LayerInputs, captured_inputs
from tests.recurrences import make_tokens

Array = NDArray[np.float64]
ENDS = (0, 5, 19, 30)
BY_TOKEN = ("q", "k", "v", "g", "b", "w", "beta", "address", "gamma")


def layer_of(mixer: str, tokens: Tokens, ends: tuple[int, ...] | None = None, index: int = 0) -> LayerInputs:
    """A layer that has seen these tokens."""
    cu = None if ends is None else torch.tensor(ends)
    seen = run(MIXERS[mixer], tokens, cu_seqlens=cu, backend="torch")
    return captured_inputs(Captured(index, MIXERS[mixer], seen, 0.5 * seen.y, 0.5, None, cu))


def make_layer(mixer: str, ends: tuple[int, ...] = ENDS, **how: Any) -> LayerInputs:  # noqa: ANN401
    return layer_of(mixer, make_tokens(mixer, T=ends[-1], **how), ends)


def slow(
    layer: LayerInputs, tokens: Tokens, actual: Tensor, vector: Tensor, name: str, *, address: bool
) -> dict[str, dict[str, Tensor]]:
    """The quantities ``[T, H]`` of one direction by regime: at each token from the actual memory, and from its own."""
    x = {field: getattr(tokens, field)[0].double().numpy() for field in BY_TOKEN if getattr(tokens, field) is not None}
    real, other = actual.double().numpy(), vector.double().numpy()
    T, H, K = x["q"].shape
    found = {regime: {q: np.zeros((T, H)) for q in QUANTITIES} for regime in REGIMES}
    last = layer.mixer.address_last
    turned = last != (address and name == "reversed")
    for h in range(H):
        lam = {} if tokens.lam is None else {"lam": np.float64(tokens.lam[h])}
        for begin, end in itertools.pairwise(layer.ends):
            memory = own = np.zeros((K, x["v"].shape[-1]))
            for t in range(begin, end):
                at = {field: value[t, h] for field, value in x.items()} | lam
                step = token(at, memory, other[t, h], address, turned)
                memory, y, *_ = token(at, memory, real[t, h], address, last)
                own, *whole = token(at, own, other[t, h], address, turned)
                for regime, (out, before, read, overlap, gate) in zip(REGIMES, (step[1:], whole), strict=True):
                    row = {"gate": gate, "overlap": overlap, "read": read, "before": before, "shift": out - y, "output": y}
                    for q, value in row.items():
                        found[regime][q][t, h] = np.sqrt(np.sum(value * value))
    return {regime: {q: torch.from_numpy(value) for q, value in rows.items()} for regime, rows in found.items()}


def token(x: Mapping[str, Array], state: Array, vector: Array, address: bool, last: bool) -> tuple[Array, ...]:
    """New state, y, o⁻, what the direction reads, its overlap and its gate."""
    memory = np.exp(x["g"])[:, None] * state
    k, q = x["k"], x["q"]
    base, u = (x["b"] * k, x["w"] * x["v"]) if "b" in x else (x["beta"] * k, x["beta"] * x["v"])
    if not address:
        if "gamma" in x:
            memory = memory - np.outer(x["address"], x["gamma"] * memory.T @ x["address"])
        read, lam = memory.T @ vector, x["lam"]
        memory = memory + np.outer(k, u - memory.T @ (base + lam * vector))
        y, rho = memory.T @ q, q @ k
        return memory, y, y + lam * rho * read, read, rho, lam
    if "lam" in x:
        base = base + x["lam"] * (x["b"] * q - k * (k @ (x["b"] * q)))
    if last:
        memory = memory + np.outer(k, u - memory.T @ base)
    before, read = memory.T @ q, memory.T @ vector
    memory = memory - np.outer(x["gamma"] * vector, read)
    if not last:
        memory = memory + np.outer(k, u - memory.T @ base)
    return memory, memory.T @ q, before, read, q @ vector, x["gamma"]
