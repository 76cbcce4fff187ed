"""Models of flash-linear-attention are captured as they run, on a GPU or, in Triton's interpreter, on short sequences."""

import sys
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qed_probe.errors import InputError
from qed_probe.kernels import Observation, Tokens
from qed_probe.models.capture import Captured, capture
from qed_probe.models.foreign.families import find_layers
from qed_probe.models.selfcheck import TOLERANCE, check_heads, check_layer
from tests.fla_models import FAMILIES, MODELS, tiny
from tests.fla_naive import LOOPS, stand_in
from tests.test_models_capture import check

pytestmark = pytest.mark.filterwarnings("ignore")  # of its models, that they may be built or used otherwise


def some_tokens(device: str, B: int, T: int) -> Tensor:
    return torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(T)).to(device)


def captured(model: nn.Module, *calls: Tensor, **how: Any) -> list[Captured]:  # noqa: ANN401
    """What is captured of these calls, one after another with one cache if there are several; each is replayed."""
    cache = import_module("fla.models.utils").Cache() if len(calls) > 1 else None
    with torch.no_grad(), capture(model) as records:
        for tokens in calls:
            model(tokens, past_key_values=cache, use_cache=cache is not None, **how)
    for seen in records:
        check_heads(seen, seed=0)
        check_layer(seen)
    return records


def on_host(x: Any) -> Any:  # noqa: ANN401 - tensors, and what holds some
    """The same where the oracle computes."""
    if isinstance(x, Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {name: on_host(each) for name, each in x.items()}
    if isinstance(x, Captured | Observation | Tokens):
        return replace(x, **{field.name: on_host(getattr(x, field.name)) for field in fields(x)})
    return x


@pytest.fixture
def chunked(device: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Chunked kernels, with a dtype that they compute in as exactly as they are checked: on a CPU, loops stand in for them."""
    if device == "cuda":
        return torch.bfloat16
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.layers.")]:
        for name in LOOPS:
            if name in vars(module):
                monkeypatch.setattr(module, name, stand_in(name))
    return torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_prefill_continuation_and_decoding_are_the_full_pass(name: str, device: str) -> None:
    model, tokens = tiny(name, device), some_tokens(device, 2, 6)
    pieces = captured(model, *torch.split(tokens, [3, 2, 1], 1))
    for seen in pieces:
        check(on_host(seen), 1e-5)
    assert [seen.layer for seen in pieces] == [0, 1] * 3
    full = captured(model, tokens)
    for layer in range(2):
        calls = pieces[layer::2]
        assert calls[0].initial_state is None
        for before, after in pairwise(calls):
            torch.testing.assert_close(after.initial_state, before.observation.final_state, rtol=0, atol=1e-5)
        together = torch.cat([seen.output for seen in calls], 1)
        torch.testing.assert_close(together, full[layer].output, rtol=0, atol=2e-5 * float(full[layer].output.abs().max()))
    records = full[0].observation.records
    assert records["residual_norm"].min() < records["residual_norm"].max()
    assert ("no decay" in name or name.startswith("delta_net")) == bool((records["retention"] == 1).all())
    assert ("β up to 2" in name) <= (float(records["eigenvalue"].min()) < -0.1)
    assert name != "kda, bounded" or float(records["log_decay_min"].min()) >= -2


@pytest.mark.parametrize("name", MODELS)
def test_chunked_calls_with_and_without_a_state(name: str, device: str, chunked: torch.dtype) -> None:
    model = tiny(name, device).to(chunked)
    records = captured(model, *torch.split(some_tokens(device, 1, 133), [65, 68], 1))
    assert [seen.output.shape[1] for seen in records] == [65, 65, 68, 68]
    assert records[2].initial_state is not None


@pytest.mark.parametrize("T", [1, 2, 63, 65, 300])
def test_lengths(T: int, device: str, chunked: torch.dtype) -> None:
    records = captured(tiny("kda", device).to(chunked), some_tokens(device, 1, T))
    assert [seen.output.shape[1] for seen in records] == [T, T]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_keep_their_bits(name: str, device: str, chunked: torch.dtype) -> None:
    model = tiny(name, device).to(chunked)
    kernels = [kernel for layer in find_layers(model).values() for kernel in layer.kernels]
    before = [namespace[kernel] for namespace, kernel in kernels]
    with torch.no_grad():
        for T in (4, 65):
            plain = model(some_tokens(device, 1, T)).logits
            with capture(model) as records:
                assert torch.equal(model(some_tokens(device, 1, T)).logits, plain)
            assert [seen.layer for seen in records] == [0, 1]
    assert before == [namespace[kernel] for namespace, kernel in kernels]


@pytest.mark.parametrize("name", FAMILIES)
def test_left_pads_never_reach_the_memory(name: str, device: str) -> None:
    model, tokens = tiny(name, device), some_tokens(device, 2, 5)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    padded, alone = captured(model, tokens, attention_mask=mask)[0], captured(model, tokens[1:, 2:])[0]
    # The rows are packed without their pads.
    assert padded.cu_seqlens is not None
    assert padded.cu_seqlens.tolist() == [0, 5, 8]
    last = padded.output.flatten(0, 1)[-3:]
    torch.testing.assert_close(last, alone.output[0], rtol=0, atol=2e-5 * float(last.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_sequences_are_kept_apart(name: str, device: str, chunked: torch.dtype) -> None:
    ends = torch.tensor([0, 9, 66], device=device)
    packed = captured(tiny(name, device).to(chunked), some_tokens(device, 1, 66), cu_seqlens=ends)[0]
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 9, 66]
    assert packed.observation.final_state.shape[0] == 2


@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits(name: str, device: str) -> None:
    if (name, device) == ("rwkv7", "cpu"):
        pytest.skip("the interpreter makes NaN of its shifted tokens in bfloat16")
    records = captured(tiny(name, device).bfloat16(), some_tokens(device, 1, 6), some_tokens(device, 1, 1))
    assert {seen.output.dtype for seen in records} == {torch.bfloat16}
    for seen in records if device == "cpu" else []:  # on a GPU our own records are made of sixteen bits too
        check(seen, TOLERANCE[torch.bfloat16])


def test_what_is_not_understood_is_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, functions = tiny("kda", device), vars(sys.modules["fla.layers.kda"])
    with torch.no_grad(), capture(model, lambda _: None):
        recorder = functions["fused_recurrent_kda"]
        monkeypatch.setitem(functions, "fused_recurrent_kda", lambda **x: recorder(**x, gk=x["g"]))
        with pytest.raises(InputError, match=r"layer 0 \(kda\): .*found gk not understood"):
            model(some_tokens(device, 1, 3))
        monkeypatch.undo()
        model(some_tokens(device, 1, 3))


def test_a_layer_without_a_number_is_named() -> None:
    layer = import_module("fla.layers").DeltaNet(hidden_size=32, num_heads=2)
    with pytest.raises(InputError, match="expected a layer with its number, found layer_idx None"), capture(layer):
        pass


def test_memories_beyond_the_recurrence_are_refused() -> None:
    layer = import_module("fla.layers.momentum_deltanet").MomentumDeltaNet(hidden_size=32, head_dim=16, num_heads=2, layer_idx=0)
    with pytest.raises(InputError, match="found MomentumDeltaNet: its edits pass through a second memory"), capture(layer):
        pass
