"""What a capture sees is what the memory did, and the model does not notice."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from qed_probe.errors import CheckFailed, InputError
from qed_probe.kernels import MIXERS, Observation, Tokens, reference, run
from qed_probe.models.capture import Captured, capture
from qed_probe.models.config import NATIVE, ModelConfig
from qed_probe.models.language import LanguageModel
from qed_probe.models.selfcheck import check_heads


def small(mixer: str) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(
        mixer=mixer, hidden=24, layers=3, heads=2, key_dim=8, value_dim=6, ffn=32, vocab_size=64, tokenizer="none", address_rank=4
    )
    model = LanguageModel(config)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model.requires_grad_(False)


def check(seen: Captured, tolerance: float) -> None:
    expected = reference(seen.mixer.name, seen.observation.tokens, initial_state=seen.initial_state, cu_seqlens=seen.cu_seqlens)
    output = seen.scale * expected.y
    assert (seen.output - output).abs().max() <= tolerance * output.abs().max()
    assert seen.observation.records.keys() == expected.records.keys()
    for name, x in expected.records.items():
        # Records are float32 of the tokens as used, whatever the model's dtype.
        assert (seen.observation.records[name] - x).abs().max() <= 1e-5 * max(float(x.abs().max()), 1e-2), name


@pytest.mark.parametrize("mixer", NATIVE)
def test_logits_keep_their_bits(mixer: str) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 70))
    plain = model.logits(model(tokens))
    with capture(model) as records:
        watched = model.logits(model(tokens))
    assert torch.equal(watched, plain)
    assert [seen.layer for seen in records] == [0, 1, 2]
    assert torch.equal(model.logits(model(tokens)), plain)
    assert len(records) == 3


@pytest.mark.parametrize("mixer", ["linear", "gdn", "qed", "qed-rand", "eda-qed", "eda-reversed", "deltaproduct"])
def test_records_are_the_oracles_on_the_captured_tokens(mixer: str) -> None:
    model = small(mixer)
    with capture(model, layers=[1]) as records:
        model(torch.randint(64, (1, 37)), cu_seqlens=torch.tensor([0, 11, 37]))
        cache = model.new_cache(2)
        model(torch.randint(64, (2, 9)), cache=cache)
        model(torch.randint(64, (2, 1)), cache=cache)
    assert [seen.layer for seen in records] == [1, 1, 1]
    assert records[0].initial_state is None
    assert records[2].initial_state is not None
    assert records[2].initial_state.any()
    for seen in records:
        check(seen, 1e-5)


@pytest.mark.parametrize("mixer", ["qed", "eda-qed"])
def test_bfloat16_layer_feeds_its_memory_what_is_captured(mixer: str) -> None:
    model = small(mixer).to(torch.bfloat16)
    with capture(model) as records:
        model(torch.randint(64, (1, 40)))
    assert records[0].observation.tokens.k.dtype == records[0].output.dtype == torch.bfloat16
    for seen in records:
        # The output alone is rounded to bfloat16.
        check(seen, 2**-8)


def test_autocast_does_not_reach_the_recurrence() -> None:
    model = small("qed")
    with capture(model) as records, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randint(64, (1, 40)))
    for seen in records:
        exact = reference("qed", seen.observation.tokens).y
        assert (seen.observation.y - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_strength_reaches_the_captured_lambda() -> None:
    model = small("qed")
    for layer in model.mixers.values():
        layer.strength = 2.0
    with capture(model, layers=[0]) as records:
        model(torch.randint(64, (1, 20)))
    lam = records[0].observation.tokens.lam
    assert lam is not None
    torch.testing.assert_close(lam, torch.full((2,), 0.5) * torch.sigmoid(torch.tensor(-2.0)))
    check(records[0], 1e-5)


def test_states_are_kept_where_asked() -> None:
    model = small("qed")
    with capture(model, layers=[2], states_at=(3, 12)) as records:
        model(torch.randint(64, (1, 20)), cu_seqlens=torch.tensor([0, 8, 20]))
    expected = reference("qed", records[0].observation.tokens, cu_seqlens=torch.tensor([0, 8, 20])).states[0, [3, 12]]
    torch.testing.assert_close(records[0].observation.states.double(), expected, rtol=0, atol=1e-5)


def test_captured_state_outlives_the_next_step() -> None:
    model = small("qed")
    cache = model.new_cache(1)
    model(torch.randint(64, (1, 9)), cache=cache)
    before = cache.layers[0].state.clone()
    with capture(model, layers=[0]) as records:
        model(torch.randint(64, (1, 1)), cache=cache)
        model(torch.randint(64, (1, 1)), cache=cache)
    assert records[0].initial_state is not None
    assert torch.equal(records[0].initial_state, before)
    assert not torch.equal(cache.layers[0].state, before)


def test_a_sink_gets_each_layer_as_it_ends() -> None:
    model = small("kda")
    order: list[int] = []
    with capture(model, lambda seen: order.append(seen.layer), layers={2, 0}) as records:
        model(torch.randint(64, (1, 5)))
    assert order == [0, 2]
    assert records == []


def test_everything_is_restored_after_an_exception() -> None:
    model = small("qed")

    def fail(seen: Captured) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, fail, states_at=(1,)):
        model(torch.randint(64, (1, 5)))
    assert not any(layer.observers for layer in model.mixers.values())


def test_an_inner_capture_gives_back_to_the_outer() -> None:
    model = small("qed")
    tokens = torch.randint(64, (1, 5))
    with capture(model) as outer:
        with capture(model, layers=[1]) as inner:
            model(tokens)
        model(tokens)
    assert [seen.layer for seen in inner] == [1]
    assert [seen.layer for seen in outer] == [0, 2, 0, 1, 2]


def test_contexts_end_in_any_order() -> None:
    model, tokens = small("qed"), torch.randint(64, (1, 5))
    first, second = capture(model), capture(model, layers=[1])
    seen, others = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    model(tokens)
    second.__exit__(None, None, None)
    model(tokens)
    assert [x.layer for x in seen] == []
    assert [x.layer for x in others] == [1]


def test_a_module_around_the_model_is_looked_into() -> None:
    model, tokens = small("qed"), torch.randint(64, (1, 5))
    with capture(nn.DataParallel(model)) as records:
        model(tokens)
    assert [seen.layer for seen in records] == [0, 1, 2]
    with (
        pytest.raises(InputError, match="expected one model, found 2 in a Sequential"),
        capture(nn.Sequential(model, small("gdn"))),
    ):
        pass


def test_unknown_layers_are_named() -> None:
    with (
        pytest.raises(InputError, match="layers: expected some of 0, 1, 2, found -1, 7"),
        capture(small("qed"), layers=[7, 0, -1]),
    ):
        pass


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"expected a model, .*, found str"), capture("qed"):  # type: ignore[arg-type]
        pass


def test_captured_is_what_the_kernel_returned() -> None:
    model = small("qed")
    with capture(model, layers=[0]) as records:
        model(torch.randint(64, (1, 5)))
    seen = records[0]
    assert isinstance(seen.observation, Observation)
    assert torch.equal(seen.output, seen.scale * seen.observation.y)
    assert seen.scale == 8**-0.5
    assert replace(seen, layer=5).layer == 5
    assert "tensor" not in repr(seen)
    assert repr(seen).startswith("Captured(layer=0, mixer=Mixer(name='qed'")


def test_heads_are_replayed_beyond_a_short_first_sequence() -> None:
    model = small("qed")
    with torch.no_grad(), capture(model, layers=[1]) as records:
        model(torch.arange(103)[None] % model.config.vocab_size, cu_seqlens=torch.tensor([0, 3, 103]))
    check_heads(records[0], seed=0)
    wrong = records[0].output.clone()
    wrong[:, 50:] *= 1.5
    with pytest.raises(CheckFailed, match="at layer 1, head"):
        check_heads(replace(records[0], output=wrong), seed=0)


def test_a_direction_that_meets_hardly_anything_is_no_mismatch() -> None:
    """Of a read that is rounding itself no digit can be judged; a wrong one of a write's size still is."""
    rng = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 1, 8, generator=rng).double()
    basis = torch.linalg.qr(torch.cat([k[0, :, 0].T, torch.randn(8, 1, generator=rng).double()], 1)).Q
    ones = torch.ones(1, 2, 1, 8)
    tokens = Tokens(
        q=basis[:, 2].expand(1, 2, 1, 8).float(),
        k=torch.nn.functional.normalize(k, dim=-1).float(),
        v=torch.randn(1, 2, 1, 8, generator=rng),
        g=-0.1 * ones,
        b=0.5 * ones,
        w=ones,
        lam=torch.tensor([0.1]),
    )
    seen = run(MIXERS["qed"], tokens, record=True, backend="torch")
    captured = Captured(0, MIXERS["qed"], seen, seen.y, 1.0, None, None)
    assert seen.records["read"].abs().max() < 1e-6
    check_heads(captured, seed=0)
    wrong = replace(seen, records=seen.records | {"read": seen.records["read"] + 1e-4})
    with pytest.raises(CheckFailed, match="read S̄ᵀd"):
        check_heads(replace(captured, observation=wrong), seed=0)
