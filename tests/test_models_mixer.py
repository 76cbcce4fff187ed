"""The layer against its formulas, written out once more from the saved weights in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qed_probe.kernels import Tokens, reference
from qed_probe.kernels.packing import first_tokens
from qed_probe.models.config import NATIVE, ModelConfig
from qed_probe.models.layers import ShortConv
from qed_probe.models.mixer import DeltaMixer

H, K, V, RANK, T = 2, 8, 6, 4, 21


def config(mixer: str, **changes: object) -> ModelConfig:
    sizes = {
        "hidden": 24,
        "layers": 2,
        "heads": H,
        "key_dim": K,
        "value_dim": V,
        "ffn": 32,
        "vocab_size": 64,
        "tokenizer": "none",
    }
    return ModelConfig.from_dict({"mixer": mixer, "address_rank": RANK, **sizes, **changes})


def lively(layer: torch.nn.Module) -> None:
    """Weights large enough that gates and decays move."""
    for p in layer.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.4)


def by_hand(layer: DeltaMixer, x: Tensor) -> Tensor:
    """DESIGN's layer for one sequence ``x`` ``[T, hidden]``, from the state dict alone."""
    name, c = layer.config.mixer, layer.config
    W: dict[str, Tensor] = {key: value.detach().double() for key, value in layer.state_dict().items()}
    x = x.double()

    def linear(key: str) -> Tensor:
        return x @ W[f"{key}.weight"].T

    def conv(key: str) -> Tensor:
        y = linear(f"{key}_proj")
        taps = W[f"{key}_conv1d.weight"][:, 0]
        rows = []
        for t in range(T):
            rows.append(sum((taps[:, 3 - j] * y[t - j] for j in range(4) if t - j >= 0), torch.zeros_like(y[0])))
        z = torch.stack(rows)
        return z / (1 + torch.exp(-z))

    def unit(y: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return y / size

    n = (c.edits,) if name == "deltaproduct" else ()
    tokens: dict[str, Any] = {
        "q": unit(conv("q").view(T, H, K)), "k": unit(conv("k").view(T, H, *n, K)), "v": conv("v").view(T, H, *n, V),
    }  # fmt: skip
    if name in ("gdn", "deltaproduct"):
        a = torch.log1p(torch.exp(linear("a_proj") + W["dt_bias"]))
        tokens["g"] = -(torch.exp(W["A_log"]) * a)[..., None]
    elif name not in ("linear", "deltanet"):
        f = (linear("f_proj.0") @ W["f_proj.1.weight"].T + W["dt_bias"]).view(T, H, K)
        rate, step = torch.exp(W["A_log"])[:, None], torch.log1p(torch.exp(f))
        safe = name.startswith("eda") or name == "kda-safegate"
        tokens["g"] = -5 + 5 * torch.exp(-rate / 5 * step) if safe else -rate * step
    if "gdn2" in name or "qed" in name:
        tokens["b"] = c.gate_max / (1 + torch.exp(-linear("b_proj").view(T, H, K)))
        tokens["w"] = 1 / (1 + torch.exp(-linear("w_proj").view(T, H, V)))
    elif name != "linear":
        tokens["beta"] = c.gate_max / (1 + torch.exp(-linear("beta_proj").view(T, H, *n)))
    if name.startswith("eda"):
        tokens["gamma"] = 1 / (1 + torch.exp(-linear("gamma_proj")))
        if name == "eda-same":
            tokens["address"] = tokens["k"]
        elif name == "eda-rand":
            tokens["address"] = W["random_address"].expand(T, H, K)
        else:
            low = linear("e_proj.0").view(T, H, RANK)
            tokens["address"] = unit(torch.stack([low[:, h] @ W["e_proj.1.weight"][h] for h in range(H)], 1))
    shared: dict[str, Any] = {"lam": 0.25 / (1 + torch.exp(-W["theta"]))} if "qed" in name else {}
    if name == "qed-rand":
        shared["direction"] = W["random_direction"]
    y = reference(name, Tokens(**{key: value[None] for key, value in tokens.items()}, **shared)).y[0]
    o = y / math.sqrt(K)
    normed = o / torch.sqrt((o * o).mean(-1, keepdim=True) + c.norm_eps) * W["o_norm.weight"]
    gate = linear("g_proj.0") @ W["g_proj.1.weight"].T + W["g_proj.1.bias"]
    return (normed.reshape(T, -1) / (1 + torch.exp(-gate))) @ W["o_proj.weight"].T


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("gate_max", [1.0, 2.0])
def test_layer_is_its_formulas(name: str, gate_max: float) -> None:
    torch.manual_seed(0)
    layer = DeltaMixer(config(name, gate_max=gate_max))
    lively(layer)
    x = torch.randn(T, 24)
    expected = by_hand(layer, x)
    found = layer(x[None])[0].double()
    # float32 rounding through the norm of o, whose smallest rows amplify it.
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_short_convolution_is_torchs() -> None:
    torch.manual_seed(0)
    conv = ShortConv(5, 4)
    x = torch.randn(2, 11, 5)
    expected = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, groups=5)).transpose(1, 2)
    found, state = conv(x, conv.new_state(2))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, x[:, -3:])


def test_convolution_of_width_one_carries_nothing() -> None:
    conv = ShortConv(3, 1)
    x = torch.randn(1, 4, 3)
    found, state = conv(x, conv.new_state(1))
    torch.testing.assert_close(found, F.silu(x * conv.weight[:, 0, 0]))
    assert state.shape == (1, 0, 3)


def test_the_first_token_of_each_packed_sequence() -> None:
    assert first_tokens((0, 2, 2, 5), torch.device("cpu")).tolist() == [0, 0, 2, 2, 2]


def test_a_packed_row_is_convolved_as_its_sequences_are() -> None:
    torch.manual_seed(0)
    conv, x = ShortConv(3, 4), torch.randn(1, 9, 3)
    x[0, 2] = torch.inf  # which is nothing to others
    first = first_tokens((0, 1, 3, 3, 9), x.device)
    alone = [conv.fresh(x[:, a:b], None) for a, b in ((0, 1), (1, 3), (3, 9))]
    # SiLU's last bit may hang on where in a vector of the processor a number lies.
    torch.testing.assert_close(conv.fresh(x, first), torch.cat(alone, 1), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert conv.fresh(x, first)[:, 3:].isfinite().all()


def test_parameters_start_as_published() -> None:
    torch.manual_seed(0)
    layer = DeltaMixer(config("qed", heads=64))
    # QED, Eq. 13: 0.25·sigmoid(−2) ≈ 0.0298.
    torch.testing.assert_close(layer.lam(), torch.full((64,), 0.0298), rtol=0, atol=5e-5)
    rate, step = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert rate.min() >= 1
    assert rate.max() <= 16
    assert rate.max() - rate.min() > 10
    assert step.min() >= 1e-3 * (1 - 1e-4)
    assert step.max() <= 1e-1 * (1 + 1e-4)
    for name, vectors in (("qed-rand", "random_direction"), ("eda-rand", "random_address")):
        drawn = getattr(DeltaMixer(config(name)), vectors)
        torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(H))


def test_strength_zero_makes_qed_gdn2_and_is_not_saved() -> None:
    torch.manual_seed(0)
    qed, gdn2 = DeltaMixer(config("qed")), DeltaMixer(config("gdn2"))
    lively(qed)
    weights = qed.state_dict()
    gdn2.load_state_dict({name: weights[name] for name in gdn2.state_dict()})
    x = torch.randn(2, T, 24)
    assert not torch.equal(qed(x), gdn2(x))
    once = qed.lam()
    qed.strength = -1.5
    assert torch.equal(qed.lam(), -1.5 * once)
    qed.strength = 0.0
    assert torch.equal(qed(x), gdn2(x))
    assert weights.keys() - gdn2.state_dict().keys() == {"theta"}


def test_bfloat16_never_rounds_what_must_be_exact() -> None:
    for name, exact in (
        ("qed-rand", {"theta", "A_log", "dt_bias", "random_direction"}), ("eda-rand", {"A_log", "dt_bias", "random_address"}),
    ):  # fmt: skip
        layer = DeltaMixer(config(name))
        before = {key: value.clone() for key, value in layer.state_dict().items()}
        after = layer.to(torch.bfloat16).state_dict()
        assert {key for key, value in after.items() if value.dtype == torch.float32} == exact
        assert all(torch.equal(after[key], before[key]) for key in exact)
