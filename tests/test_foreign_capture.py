"""Models of transformers are captured as they run: what their own kernels returned, and our records of what they were given."""

import copy
import functools
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qed_probe.errors import InputError
from qed_probe.models.capture import Captured, capture
from qed_probe.models.foreign import families
from qed_probe.models.foreign.families import find_layers
from qed_probe.models.selfcheck import check_heads, check_layer
from tests.foreign_models import MODELS, is_since, tiny
from tests.test_models_capture import check

transformers = pytest.importorskip("transformers", minversion="4.57")


recent = pytest.mark.skipif(not is_since(5, 15), reason="of functions that transformers calls since 5.15")


def some_tokens(B: int, T: int) -> Tensor:
    return torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(T))


def captured(model: nn.Module, *calls: Tensor, attention_mask: Tensor | None = None) -> list[Captured]:
    """What is captured of these calls, one after another with one cache if there are several; each is checked."""
    carried: dict[str, Any] = {}
    with torch.no_grad(), capture(model) as records:
        for tokens in calls:
            found = model(tokens, use_cache=len(calls) > 1, attention_mask=attention_mask, **carried)
            if len(calls) > 1:
                name = "cache" if "cache" in found else "past_key_values"
                carried = {name: found[name]}
    for seen in records:
        check_heads(seen, seed=0)
        check_layer(seen)
    return records


@pytest.mark.skipif(not is_since(5), reason="before, a model forgets its memory when several tokens go on with a cache")
@pytest.mark.parametrize("model_type", MODELS)
def test_prefill_continuation_and_decoding_are_the_full_pass(model_type: str) -> None:
    model, tokens = tiny(model_type), some_tokens(2, 13)
    pieces = captured(model, *torch.split(tokens, [7, 4, 1, 1], 1))
    assert [seen.layer for seen in pieces] == [0, 2] * 4
    for layer in (0, 2):
        calls = [seen for seen in pieces if seen.layer == layer]
        assert calls[0].initial_state is None
        for before, after in pairwise(calls):
            assert after.initial_state is not None
            torch.testing.assert_close(after.initial_state, before.observation.final_state, rtol=0, atol=1e-5)
        for seen in calls:
            check(seen, 1e-5)
        (full,) = [seen for seen in captured(model, tokens) if seen.layer == layer]
        together = torch.cat([seen.output for seen in calls], 1)
        torch.testing.assert_close(together, full.output, rtol=0, atol=2e-5 * float(full.output.abs().max()))
        # Lively: the memory matters and forgets.
        assert full.observation.records["residual_norm"].min() < full.observation.records["residual_norm"].max()
        assert 0.05 < full.observation.records["retention"].mean() < 0.95


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_keep_their_bits(model_type: str) -> None:
    model, tokens = tiny(model_type), some_tokens(2, 40)
    functions = [namespace[name] for layer in find_layers(model).values() for namespace, name in layer.kernels]
    plain = model(tokens).logits
    with capture(model) as records:
        assert torch.equal(model(tokens, output_hidden_states=True, output_attentions=False).logits, plain)
    assert torch.equal(model(tokens).logits, plain)
    assert len(records) == 2
    assert functions == [namespace[name] for layer in find_layers(model).values() for namespace, name in layer.kernels]


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_models_are_replayed(model_type: str) -> None:
    records = captured(tiny(model_type).to(torch.bfloat16), some_tokens(1, 30), some_tokens(1, 1))
    assert {seen.output.dtype for seen in records} == {torch.bfloat16}
    assert [seen.observation.tokens.v.dtype for seen in records] == [torch.bfloat16] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_replayed(dtype: torch.dtype) -> None:
    for model_type in ("qwen3_5_text", "kimi_linear"):
        records = captured(tiny(model_type).to(dtype), some_tokens(1, 20))
        assert {seen.output.dtype for seen in records} == {dtype}


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_grouped_heads(model_type: str, ratio: int) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
    model = tiny(model_type, **heads, linear_key_head_dim=24, linear_value_head_dim=10)
    for seen in captured(model, some_tokens(1, 20)):
        repeated = 1 if is_since(5, 24) else ratio  # transformers before 5.24 repeats heads before the call
        assert seen.observation.tokens.q.shape == (1, 20, 2 * repeated, 24)
        assert seen.output.shape == (1, 20, 2 * ratio, 10)
        assert seen.observation.records["rho"].shape == (1, 20, 2 * ratio)
        assert seen.scale == 24**-0.5


def test_wide_channels_of_kimi() -> None:
    seen = captured(tiny("kimi_linear", linear_head_dim=24), some_tokens(1, 20))[0]
    assert seen.mixer.name == "kda"
    assert seen.observation.tokens.g is not None
    assert seen.observation.tokens.g.shape == (1, 20, 3, 24)


def test_negative_eigenvalues_of_olmo() -> None:
    for allowed in (True, False):
        records = captured(tiny("olmo_hybrid", linear_allow_neg_eigval=allowed), some_tokens(1, 40))
        assert (min(float(seen.observation.records["eigenvalue"].min()) for seen in records) < -0.1) is allowed


@pytest.mark.parametrize("T", [1, 2, 63, 65, 300])
def test_lengths(T: int) -> None:
    records = captured(tiny("qwen3_5_text"), some_tokens(1, T))
    assert [seen.output.shape[1] for seen in records] == [T, T]


def test_strong_decays_cost_a_chunked_kernel_digits() -> None:
    model = tiny("kimi_linear")
    for name, p in model.named_parameters():
        if p.ndim > 1 and "A_log" not in name:
            p.mul_(10)
    seen = captured(model, some_tokens(1, 150))[0]  # which replays the output
    own = seen.scale * seen.observation.y
    assert (seen.output - own).abs().max() > 1e-5 * own.abs().max()


def test_generation_is_captured_step_by_step() -> None:
    model = tiny("qwen3_5_text")
    with capture(model, layers=[2]) as records:
        model.generate(some_tokens(1, 9), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert [(seen.layer, seen.output.shape[1], seen.initial_state is None) for seen in records] == [
        (2, 9, True),
        (2, 1, False),
        (2, 1, False),
    ]


@pytest.mark.parametrize("model_type", MODELS)
def test_pads_are_left_out(model_type: str) -> None:
    model, lengths = tiny(model_type), (12, 1, 30)
    rows = [some_tokens(1, n) for n in lengths]
    mask = torch.stack([torch.arange(30) >= 30 - n for n in lengths]).long()
    tokens = torch.cat([nn.functional.pad(row, (30 - row.shape[1], 0)) for row in rows])
    singles = [captured(model, row) for row in rows]
    for at, seen in enumerate(captured(model, tokens, attention_mask=mask)):
        assert seen.cu_seqlens is not None
        assert seen.cu_seqlens.tolist() == [0, 12, 13, 43]
        assert len(seen.observation.records["state_norm"]) == 3
        alone = [single[at] for single in singles]
        expected = torch.cat([one.output for one in alone], 1)
        torch.testing.assert_close(seen.output, expected, rtol=0, atol=3e-5 * float(expected.abs().max()))
        for name in ("rho", "read", "eigenvalue", "retention", "residual_norm"):
            expected = torch.cat([one.observation.records[name] for one in alone], 1)
            torch.testing.assert_close(
                seen.observation.records[name], expected, rtol=0, atol=1e-4 * float(expected.abs().max()), msg=name
            )


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear"])
def test_pads_that_the_memory_passes_through_are_tokens(model_type: str) -> None:
    model, tokens = tiny(model_type), some_tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 5:7] = mask[1, :3] = 0
    for seen in captured(model, tokens, attention_mask=mask):  # which replays the output
        assert seen.cu_seqlens is not None
        assert seen.cu_seqlens.tolist() == [0, 12, 21]
    first = model(tokens[:, :6], use_cache=True)
    name = "cache" if "cache" in first else "past_key_values"
    with torch.no_grad(), capture(model) as records:
        model(tokens[:, 6:], use_cache=True, attention_mask=mask.roll(6, 1), **{name: first[name]})
    for seen in records:
        assert seen.initial_state is not None
        check_heads(seen, seed=0)
        check_layer(seen)


def test_nothing_is_seen_of_pads_alone() -> None:
    model = tiny("qwen3_next")
    with torch.no_grad(), capture(model) as records:
        model(some_tokens(1, 5), attention_mask=torch.zeros(1, 5, dtype=torch.long))
    assert not records


def test_pads_of_the_right_are_left_out_too() -> None:
    model, tokens = tiny("qwen3_next"), some_tokens(1, 12)
    mask = (torch.arange(17) < 12).long()[None]
    padded = captured(model, nn.functional.pad(tokens, (0, 5)), attention_mask=mask)[0]
    alone = captured(model, tokens)[0]
    torch.testing.assert_close(padded.output, alone.output, rtol=0, atol=1e-6)
    torch.testing.assert_close(padded.observation.final_state, alone.observation.final_state, rtol=0, atol=1e-6)


def test_states_are_kept_where_asked() -> None:
    model, tokens = tiny("kimi_linear"), some_tokens(1, 20)
    with capture(model, layers=[0], states_at=(7, 19)) as records:
        model(tokens)
    with capture(model, layers=[0]) as short:
        model(tokens[:, :8])
    torch.testing.assert_close(records[0].observation.states[0], short[0].observation.final_state[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(records[0].observation.states[1], records[0].observation.final_state[0], rtol=0, atol=1e-6)


def test_a_training_step_is_captured_once_and_keeps_its_gradients() -> None:
    model, tokens = tiny("qwen3_5_text").train().requires_grad_(True), some_tokens(1, 20)
    # The backward pass runs every layer again.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with capture(model) as records:
        watched = gradients()
    assert [seen.layer for seen in records] == [0, 2]
    assert not any(seen.output.requires_grad or seen.observation.y.requires_grad for seen in records)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_everything_is_restored_after_an_exception() -> None:
    model = tiny("olmo_hybrid")
    layers = find_layers(model).values()
    before = [namespace[name] for layer in layers for namespace, name in layer.kernels]

    def fail(seen: Captured) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, fail):
        model(some_tokens(1, 5))
    assert [namespace[name] for layer in layers for namespace, name in layer.kernels] == before
    assert not any(layer.module._forward_hooks or layer.module._forward_pre_hooks for layer in layers)
    assert len(captured(model, some_tokens(1, 5))) == 2


def test_an_inner_capture_gives_back_to_the_outer() -> None:
    model, unwatched, tokens = tiny("qwen3_5_text"), tiny("qwen3_5_text"), some_tokens(1, 5)
    with capture(model) as outer:
        with capture(model, layers=[2]) as inner:
            model(tokens)
        unwatched(tokens)
        model(tokens)
    assert [seen.layer for seen in inner] == [2]
    assert [seen.layer for seen in outer] == [0, 0, 2]


def test_a_wrapper_around_a_kernel_keeps_acting(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny("qwen3_5_text"), some_tokens(1, 5)
    plain = model(tokens).logits
    for namespace, name in {name: (namespace, name) for namespace, name in find_layers(model)[0].kernels}.values():
        kernel = namespace[name]

        @functools.wraps(kernel)
        def twice(*args: Any, kernel: Any = kernel, **kwargs: Any) -> Any:  # noqa: ANN401 - the kernel's own
            output, state = kernel(*args, **kwargs)
            return 2 * output, state

        monkeypatch.setitem(namespace, name, twice)
    wrapped = model(tokens).logits
    assert not torch.equal(wrapped, plain)
    with capture(model):
        assert torch.equal(model(tokens).logits, wrapped)


def test_a_copy_made_meanwhile_is_seen_until_the_end() -> None:
    model, tokens = tiny("qwen3_5_text"), some_tokens(1, 5)
    with capture(model) as records:
        copied = copy.deepcopy(model)
        assert torch.equal(copied(tokens).logits, model(tokens).logits)
    assert [seen.layer for seen in records] == [0, 2] * 2
    with capture(model) as later:
        copied(tokens)
        model(tokens)
    assert [seen.layer for seen in later] == [0, 2]
    assert len(records) == 4


def test_contexts_end_in_any_order_and_see_their_own_model() -> None:
    one, other, tokens = tiny("qwen3_5_text"), tiny("qwen3_5_text"), some_tokens(1, 5)
    first, second = capture(one), capture(other, layers=[0])
    seen, others = first.__enter__(), second.__enter__()
    one(tokens)
    first.__exit__(None, None, None)
    one(tokens)
    other(tokens)
    second.__exit__(None, None, None)
    assert [x.layer for x in seen] == [0, 2]
    assert [x.layer for x in others] == [0]
    assert "Recorder" not in repr([namespace[name] for x in find_layers(one).values() for namespace, name in x.kernels])


@recent
def test_what_is_not_understood_is_refused_by_name() -> None:
    model = tiny("qwen3_5_text")
    with pytest.raises(InputError, match=r"layer 0 \(qwen3_5\): expected .*found scale not understood"), capture(model):
        model(some_tokens(1, 5), scale=0.5)
    model = tiny("kimi_linear")
    ends = torch.tensor([0, 2, 5])
    # This layer would let one document's memory reach the next.
    with pytest.raises(InputError, match=r"layer 0 \(kimi_linear\): .*cu_seq_lens_q not understood"), capture(model):
        model(some_tokens(1, 5), cu_seq_lens_q=ends)


def test_unknown_layers_and_models_are_named() -> None:
    with pytest.raises(InputError, match="layers: expected some of 0, 2, found 1"), capture(tiny("qwen3_5_text"), layers=[1]):
        pass
    with pytest.raises(InputError, match=r"layers of qwen3_5, .*, found none in Linear"), capture(nn.Linear(2, 2)):
        pass


@recent
def test_a_layer_whose_kernel_is_not_called_is_named() -> None:
    model, tokens = tiny("qwen3_5_text"), some_tokens(1, 5)
    with pytest.raises(InputError, match="in layers 0, 2: was the model run"), capture(model):
        pass
    model.model.layers[2].linear_attn.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(InputError, match=r"torch_chunk_gated_delta_rule or .* in layers 2:"), capture(model):
        model(tokens)
    with capture(model, layers=[0]) as records:
        model(tokens)
    assert [seen.layer for seen in records] == [0]


class Bound(nn.Module):
    """A layer whose kernels are its own attributes, as before transformers 5.15."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 4
        module = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"]
        self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = module.torch_chunk_gated_delta_rule.__wrapped__

    def forward(self, x: dict[str, Tensor], state: Tensor) -> Tensor:
        output: Tensor = self.chunk_gated_delta_rule(*x.values(), initial_state=state, use_qk_l2norm_in_kernel=True)[0]
        return output


@recent
def test_kernels_bound_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("qwen3_5_text")
    monkeypatch.setitem(families._BY_LAYER, f"{__name__}.Bound", families.FAMILIES[0])
    layer, (B, T, H) = Bound(), (1, 9, 2)
    kernel = layer.chunk_gated_delta_rule
    q, k, v = (torch.randn(B, T, H, 4) for _ in range(3))
    x = {"query": q, "key": k, "value": v, "g": -torch.rand(B, T, H), "beta": torch.rand(B, T, H)}
    with capture(layer) as records:
        layer(x, torch.randn(B, H, 4, 4))
    assert [seen.layer for seen in records] == [4]
    check(records[0], 1e-5)
    assert layer.chunk_gated_delta_rule is kernel
