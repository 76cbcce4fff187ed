"""The whole model: cache, packing, causality, gradients, precision."""

import pytest
import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.models.config import NATIVE, ModelConfig
from qed_probe.models.language import LanguageModel

# The same float32 sums in another order: chunks of another size, matrix products of another shape, two layers deep.
CLOSE = 5e-5


def small(mixer: str) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(
        mixer=mixer, hidden=24, layers=2, heads=2, key_dim=8, value_dim=6, ffn=32, vocab_size=64, tokenizer="none", address_rank=4
    )
    model = LanguageModel(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("mixer", NATIVE)
def test_cache_continues_the_full_forward(mixer: str) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 90))
    with torch.no_grad():
        full = model(tokens)
        cache = model.new_cache(2)
        pieces = [model(part, cache=cache) for part in torch.split(tokens, [70, 2, 9, *[1] * 9], 1)]
        steps = model.new_cache(2)
        one_by_one = [model(token, cache=steps) for token in torch.split(tokens[:, :20], 1, 1)]
    assert far(torch.cat(pieces, 1), full) <= CLOSE
    assert far(torch.cat(one_by_one, 1), full[:, :20]) <= CLOSE


@pytest.mark.parametrize("mixer", NATIVE)
def test_packed_sequences_are_alone(mixer: str) -> None:
    model = small(mixer)
    ends = torch.tensor([0, 1, 40, 40, 43, 115])
    tokens = torch.randint(64, (1, 115))
    with torch.no_grad():
        packed = model(tokens, cu_seqlens=ends)
        alone = [model(tokens[:, a:b]) for a, b in ((0, 1), (1, 40), (40, 43), (43, 115))]
        changed = tokens.clone()
        changed[:, 1:40] = (changed[:, 1:40] + 1) % 64
        other = model(changed, cu_seqlens=ends)
    assert far(packed, torch.cat(alone, 1)) <= CLOSE
    assert torch.equal(other[:, 40:], packed[:, 40:])
    assert not torch.equal(other[:, 1:40], packed[:, 1:40])


@pytest.mark.parametrize("mixer", ["qed", "eda-qed", "deltaproduct"])
def test_a_token_never_moves_what_came_before(mixer: str) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 80))
    changed = tokens.clone()
    changed[:, 66] = (changed[:, 66] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :66], after[:, :66])
    assert not torch.equal(before[:, 66:], after[:, 66:])


@pytest.mark.parametrize("mixer", NATIVE)
def test_every_parameter_learns(mixer: str) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 33))
    logits = model.logits(model(tokens))
    assert logits.shape == (2, 33, 64)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gradient_of_theta_is_the_slope_of_the_loss() -> None:
    model = small("qed")
    tokens = torch.randint(64, (1, 30))
    theta = model.mixers[1].theta
    probe = torch.randn(1, 30, 24)

    def loss() -> Tensor:
        return torch.sum(model(tokens) * probe)

    loss().backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    with torch.no_grad():
        sides = []
        for step in (0.05, -0.05):
            theta[0] += step
            sides.append(loss())
            theta[0] -= step
    assert theta.grad[0].item() == pytest.approx(float(sides[0] - sides[1]) / 0.1, rel=2e-2)


@pytest.mark.parametrize("mixer", NATIVE)
def test_bfloat16_is_float32_but_for_rounding(mixer: str) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 50))
    with torch.no_grad():
        full = model(tokens)
        half = model.to(torch.bfloat16)(tokens)
    assert half.dtype == model.logits(half).dtype == torch.bfloat16
    # 2^-8 a rounding, a dozen roundings a layer; single elements differ more, so the mean is bounded.
    assert (half.float() - full).abs().mean() <= 0.05 * full.abs().mean()


def test_tied_embedding_scores_the_vocabulary() -> None:
    model = small("qed")
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embed.weight.T)
    assert list(model.mixers) == [0, 1]


def test_input_that_does_not_fit_is_named() -> None:
    model = small("qed")
    row = torch.zeros(1, 5, dtype=torch.int64)
    for tokens in (row[0], row.int(), row[:, :0]):
        with pytest.raises(InputError, match=r"tokens: expected \[B, T\] int64 with T of at least 1, found"):
            model(tokens)
    with pytest.raises(InputError, match="cu_seqlens: expected integers rising from 0 to 5"):
        model(row, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(InputError, match="cu_seqlens: expected one packed row"):
        model(row.expand(2, 5), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(InputError, match="cache: expected one of 1 sequences, found one of 2"):
        model(row, cache=model.new_cache(2))
    with pytest.raises(InputError, match="expected a cache or cu_seqlens, found both"):
        model(row, cache=model.new_cache(1), cu_seqlens=torch.tensor([0, 5]))
