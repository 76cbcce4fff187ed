"""The chunked form against the float64 oracle: outputs, states and every record of every mixer."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Tokens, cut, edits, packing, recurrence, reference, run
from qed_probe.store import schema
from tests.recurrences import compare, error, make_tokens

TOLERANCE = 1e-5
"""Float32 sums over at most a few hundred terms of one size."""
STRONG = 1e-4
"""Where decays beyond −5 meet, a read may be the small rest of large writes."""


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("T", [1, 63, 100])
def test_every_mixer_and_record(mixer: str, T: int) -> None:
    compare(mixer, make_tokens(mixer, T=T), TOLERANCE)


@pytest.mark.parametrize(("K", "V", "H", "Hk"), [(60, 100, 2, 1), (64, 128, 1, 1), (24, 8, 6, 2)], ids=str)
@pytest.mark.parametrize("mixer", ["qed", "eda-qed", "gdn"])
def test_odd_sizes_and_grouped_heads(mixer: str, K: int, V: int, H: int, Hk: int) -> None:
    compare(mixer, make_tokens(mixer, T=70, K=K, V=V, H=H, Hk=Hk), TOLERANCE)


@pytest.mark.parametrize("mixer", ["qed", "eda", "deltaproduct"])
def test_a_thousand_tokens(mixer: str) -> None:
    compare(mixer, make_tokens(mixer, T=1000, H=1, K=16, V=8, edits=3), TOLERANCE)


@pytest.mark.parametrize("edits", [1, 4])
def test_any_number_of_edits(edits: int) -> None:
    compare("deltaproduct", make_tokens("deltaproduct", edits=edits, T=70), TOLERANCE)


@pytest.mark.parametrize("decay", [0.0, -0.001, -5.0, -10.0, -90.0, -1e4, -torch.inf])
@pytest.mark.parametrize("mixer", ["gdn", "kda", "qed", "eda-qed"])
def test_decays_of_any_strength(mixer: str, decay: float) -> None:
    compare(mixer, make_tokens(mixer, T=70, decay=decay), TOLERANCE if decay >= -5 else STRONG)


@pytest.mark.parametrize("mixer", ["kda", "qed", "eda-gdn2"])
def test_strong_and_weak_decays_in_one_block(mixer: str) -> None:
    tokens = make_tokens(mixer, T=130)
    assert tokens.g is not None
    pick = torch.rand(tokens.g.shape, generator=torch.Generator().manual_seed(1))
    g = tokens.g.masked_fill(pick < 0.1, -90).masked_fill(pick < 0.05, -1e4).masked_fill(pick < 0.02, -torch.inf)
    compare(mixer, replace(tokens, g=g), STRONG)


@pytest.mark.parametrize("gate", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("mixer", ["deltanet", "qed", "eda"])
def test_gates_at_their_ends(mixer: str, gate: float) -> None:
    # At β = 2 nothing decays in a reflection, so the state and its rounding grow with the tokens.
    tokens = make_tokens(mixer, T=70, gate=gate)
    if gate == 2 and tokens.gamma is not None:
        tokens = replace(tokens, gamma=torch.ones_like(tokens.gamma))
    compare(mixer, tokens, TOLERANCE)


@pytest.mark.parametrize("mixer", MIXERS)
def test_bfloat16_inputs_are_used_as_they_are(mixer: str) -> None:
    rounded = make_tokens(mixer, T=70, dtype=torch.bfloat16)
    compare(mixer, rounded, TOLERANCE)
    assert run(MIXERS[mixer], rounded, record=True).records["rho"].dtype == torch.float32


@pytest.mark.parametrize("mixer", ["qed", "eda", "deltaproduct"])
def test_packed_sequences_with_states_and_empty_ones(mixer: str) -> None:
    ends = torch.tensor([0, 0, 5, 70, 70, 198, 199, 199])
    state = torch.randn(7, 2, 8, 6, generator=torch.Generator().manual_seed(3))
    compare(mixer, make_tokens(mixer, T=199), TOLERANCE, cu_seqlens=ends, initial_state=state)


def test_batches_of_rows() -> None:
    compare("qed", make_tokens("qed", B=3, T=70), TOLERANCE, initial_state=torch.randn(3, 2, 8, 6))


def test_no_tokens_at_all() -> None:
    seen = run(MIXERS["qed"], make_tokens("qed", T=0), record=True, initial_state=torch.ones(1, 2, 8, 6))
    assert seen.y.shape == (1, 0, 2, 6)
    assert seen.records["state_norm"].shape == (0, 2)
    assert torch.equal(seen.final_state, torch.ones(1, 2, 8, 6))


@pytest.mark.parametrize("mixer", MIXERS)
def test_records_leave_the_output_alone(mixer: str) -> None:
    tokens = make_tokens(mixer, T=150, K=64, V=64)
    plain, seen = run(MIXERS[mixer], tokens), run(MIXERS[mixer], tokens, record=True)
    assert plain.records == {}
    assert torch.equal(plain.y, seen.y)


@pytest.mark.parametrize("mixer", ["qed", "eda", "gdn", "deltaproduct"])
def test_nothing_depends_on_a_later_token(mixer: str) -> None:
    tokens, later = make_tokens(mixer, T=150), make_tokens(mixer, T=150, seed=9)
    for t in (0, 1, 31, 64, 100, 149):
        changed: dict[str, Any] = {}
        for field in fields(tokens):
            x, y = getattr(tokens, field.name), getattr(later, field.name)
            if isinstance(x, Tensor) and field.name not in ("lam", "direction"):
                changed[field.name] = torch.cat([x[:, :t], y[:, t:]], 1)
        before = run(MIXERS[mixer], tokens, record=True)
        after = run(MIXERS[mixer], replace(tokens, **changed), record=True)
        assert torch.equal(before.y[:, :t], after.y[:, :t])
        for name, x in before.records.items():
            if name != "state_norm":
                assert torch.equal(x[:, :t], after.records[name][:, :t]), name


@pytest.mark.parametrize("chunk", [1, 2, 16, 32])
def test_chunk_size_changes_rounding_only(chunk: int) -> None:
    ready = edits(MIXERS["eda-qed"], make_tokens("eda-qed", T=150))
    whole = recurrence(ready.q, ready.g, ready.k, ready.a, ready.u)
    parts = recurrence(ready.q, ready.g, ready.k, ready.a, ready.u, chunk=chunk)
    assert error(parts.y, whole.y) < TOLERANCE
    assert error(parts.final_state, whole.final_state) < TOLERANCE
    assert parts.state_norm.shape == whole.state_norm.shape
    assert error(parts.state_norm, whole.state_norm) < TOLERANCE


@pytest.mark.parametrize("cut", [1, 64, 77])
def test_a_carried_state_joins_two_halves(cut: int) -> None:
    ready = edits(MIXERS["eda-qed"], make_tokens("eda-qed", T=150))
    arguments = (ready.q, ready.g, ready.k, ready.a, ready.u)
    whole = recurrence(*arguments)
    first = recurrence(*(x[:, :cut] for x in arguments))
    second = recurrence(*(x[:, cut:] for x in arguments), initial_state=first.final_state)
    assert error(torch.cat([first.y, second.y], 1), whole.y) < TOLERANCE
    assert error(second.final_state, whole.final_state) < TOLERANCE


def test_states_at_chosen_tokens() -> None:
    tokens, ends = make_tokens("eda-qed", T=150), torch.tensor([0, 41, 150])
    at = (0, 40, 41, 104, 149)
    seen = run(MIXERS["eda-qed"], tokens, cu_seqlens=ends, states_at=at)
    assert error(seen.states, reference("eda-qed", tokens, cu_seqlens=ends).states[0, list(at)]) < TOLERANCE


def test_marks_are_where_the_store_expects_them() -> None:
    lengths = [1, 63, 64, 65, 130]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = make_tokens("qed", T=sum(lengths))
    marks = schema.mark_tokens(np.array(lengths))
    seen = run(MIXERS["qed"], tokens, record=True, cu_seqlens=ends, states_at=tuple(marks.tolist()))
    torch.testing.assert_close(seen.records["state_norm"], torch.linalg.matrix_norm(seen.states))


def test_inputs_need_not_be_contiguous() -> None:
    tokens = make_tokens("qed", B=2, T=70)
    turned: dict[str, Any] = {
        field.name: x.transpose(0, -1).contiguous().transpose(0, -1)
        for field in fields(tokens)
        if isinstance(x := getattr(tokens, field.name), Tensor)
    }
    assert not turned["q"].is_contiguous()
    assert torch.equal(run(MIXERS["qed"], tokens).y, run(MIXERS["qed"], Tokens(**turned)).y)


@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_equal_the_oracles(mixer: str) -> None:
    tokens = make_tokens(mixer, T=9, K=4, V=3, dtype=torch.float64)
    names = [f.name for f in fields(tokens) if isinstance(getattr(tokens, f.name), Tensor)]
    state = torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    weight = torch.randn(1, 9, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def gradients(form: str) -> list[Tensor]:
        leaves = [getattr(tokens, name).detach().clone().requires_grad_() for name in names] + [state.clone().requires_grad_()]
        given = Tokens(**dict(zip(names, leaves[:-1], strict=True)))
        if form == "oracle":
            made = reference(mixer, given, initial_state=leaves[-1])
            total = (made.y * weight).sum() + made.final_state.square().sum()
        else:
            seen = run(MIXERS[mixer], given, initial_state=leaves[-1])
            total = (seen.y * weight).sum() + seen.final_state.square().sum()
        return list(torch.autograd.grad(total, leaves))

    for name, ours, theirs in zip([*names, "initial_state"], gradients("chunked"), gradients("oracle"), strict=True):
        assert error(ours, theirs) < 1e-10, name


@pytest.mark.parametrize("mixer", ["linear", "deltanet", "eda"])
def test_records_of_an_empty_memory_and_closed_gates_have_gradients(mixer: str) -> None:
    tokens = make_tokens(mixer, T=3, gate=0.0)
    k, v = tokens.k.clone().requires_grad_(), tokens.v.clone().requires_grad_()
    records = run(MIXERS[mixer], replace(tokens, k=k, v=v), record=True).records
    torch.autograd.backward([x.sum() for x in records.values() if x.requires_grad])
    assert k.grad is not None
    assert v.grad is not None
    assert k.grad.isfinite().all()
    assert v.grad.isfinite().all()


def test_gradients_survive_a_wiped_memory() -> None:
    tokens = make_tokens("qed", T=40)
    assert tokens.g is not None
    g = tokens.g.clone()
    g[:, 20] = -torch.inf
    g.requires_grad_()
    torch.autograd.backward([run(MIXERS["qed"], replace(tokens, g=g)).y.sum()])
    assert g.grad is not None
    assert g.grad.isfinite().all()
    assert (g.grad[:, 20] == 0).all()


@pytest.mark.parametrize("mixer", ["qed", "eda-reversed"])
def test_segments_change_rounding_only(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, ends = make_tokens(mixer, T=600), torch.tensor([0, 0, 5, 70, 70, 333, 600, 600])
    state = torch.randn(7, 2, 8, 6, generator=torch.Generator().manual_seed(3))
    whole = run(MIXERS[mixer], tokens, record=True, cu_seqlens=ends, initial_state=state, states_at=(4, 130, 599))
    for module in ("packing", "observation"):
        monkeypatch.setattr(f"qed_probe.kernels.{module}.SEGMENT", 128)
    packing.segments.cache_clear()
    parts = run(MIXERS[mixer], tokens, record=True, cu_seqlens=ends, initial_state=state, states_at=(4, 130, 599))
    packing.segments.cache_clear()
    assert error(parts.y, whole.y) < TOLERANCE
    assert error(parts.final_state, whole.final_state) < TOLERANCE
    assert error(parts.states, whole.states) < TOLERANCE
    assert parts.records.keys() == whole.records.keys()
    for name, x in whole.records.items():
        assert error(parts.records[name], x) < TOLERANCE, name


def test_a_long_row_is_cut_into_segments() -> None:
    spans = packing.segments((0, 0, 5, 1030, 1030, 3000), torch.device("cpu"))
    assert [span.tokens for span in spans] == [slice(0, 965), slice(965, 1926), slice(1926, 2950), slice(2950, 3000)]
    assert [span.sequences for span in spans] == [slice(1, 3), slice(2, 5), slice(4, 5), slice(4, 5)]
    assert spans[1].cu_seqlens.tolist() == [0, 65, 65, 961]
    compare("qed", make_tokens("qed", T=2200, H=1, K=8, V=4), TOLERANCE, cu_seqlens=torch.tensor([0, 100, 2200]))


def test_segments_carry_the_state_in_the_working_dtype() -> None:
    tokens, state = make_tokens("gdn", T=1100), torch.randn(1, 2, 8, 6).bfloat16()
    seen = run(MIXERS["gdn"], tokens, initial_state=state)
    assert seen.final_state.dtype == torch.float32
    assert error(seen.y, reference("gdn", tokens, initial_state=state).y) < TOLERANCE


@pytest.mark.parametrize("T", [100, 1100])
def test_states_come_in_the_order_asked_for(T: int) -> None:
    tokens, at = make_tokens("gdn", T=T), (T - 1, 3, 70)
    seen = run(MIXERS["gdn"], tokens, states_at=at)
    for token, found in zip(at, seen.states, strict=True):
        assert error(found, run(MIXERS["gdn"], cut(tokens, slice(0, token + 1))).final_state[0]) < TOLERANCE
    with pytest.raises(InputError, match=f"expected packed tokens from 0 to {T - 1}, found {T}"):
        run(MIXERS["gdn"], tokens, states_at=(0, T))


@pytest.mark.parametrize("mixer", ["qed", "eda-reversed", "rwkv7"])
def test_several_delta_edits_beside_a_direction_or_an_address_are_refused(mixer: str) -> None:
    tokens, several = make_tokens(mixer, T=2), make_tokens("deltaproduct", T=2)
    with pytest.raises(InputError, match=rf"mixer {mixer}: expected one delta edit a token, found k of shape \[1, 2, 2, 2, 8\]"):
        run(MIXERS[mixer], replace(tokens, k=several.k, v=several.v))


@pytest.mark.parametrize("mixer", ["linear", "kda", "gdn2", "eda"])
def test_what_a_mixer_does_not_take_changes_nothing(mixer: str) -> None:
    tokens, more = make_tokens(mixer, T=5), make_tokens("eda-qed", T=5)
    more = replace(more, beta=make_tokens("kda", T=5, seed=1).beta)
    names = [field.name for field in fields(tokens) if field.name != "g" and getattr(tokens, field.name) is None]
    given: dict[str, Any] = {name: getattr(more, name) for name in names}
    plain, found = (run(MIXERS[mixer], x, record=True) for x in (tokens, replace(tokens, **given)))
    assert torch.equal(found.y, plain.y)
    for name, x in plain.records.items():
        assert torch.equal(found.records[name], x), name


def test_gradients_flow_after_a_pass_without() -> None:
    tokens = make_tokens("qed", T=7, B=2)
    with torch.inference_mode():
        run(MIXERS["qed"], tokens)
    v = tokens.v.clone().requires_grad_()
    torch.autograd.backward([run(MIXERS["qed"], replace(tokens, v=v)).y.sum()])
    assert v.grad is not None
