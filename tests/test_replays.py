"""Counterfactual directions of one layer: against a loop over tokens in float64, and cases whose answers are known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, run
from qed_probe.replays import OWN, QUANTITIES, REGIMES, Match, Replay, counterfactuals, derangement, replay_layer
from qed_probe.replays.directions import Replaced, what_is_replaced
from tests.recurrences import error, make_tokens
from tests.replayed import ENDS, layer_of, make_layer, slow

ADDED = ("qed", "qed-nogate", "qed-noproj", "qed-nogate-noproj", "qed-rand", "eda-qed")
ADDRESSED = ("eda", "eda-reversed", "eda-rand", "eda-gdn2", "eda-qed")


def measured(found: Replay, match: str, regime: str, name: str) -> dict[str, Tensor]:
    """``[draws, T, H]`` by quantity."""
    return dict(zip(QUANTITIES, found.measures[match, regime, name].unbind(1), strict=True))


def perturbation(found: Replay, name: str, regime: str = "one-step", match: str = "none") -> Tensor:
    x = measured(found, match, regime, name)
    return x["gate"] * x["overlap"] * x["read"] / x["before"]


@pytest.mark.parametrize(
    ("mixer", "replaced"), [(name, "direction") for name in ADDED] + [(name, "address") for name in ADDRESSED]
)
def test_every_direction_is_what_a_loop_over_tokens_finds(mixer: str, replaced: Replaced) -> None:
    tokens = make_tokens(mixer, T=ENDS[-1], H=3)
    layer = layer_of(mixer, tokens, ENDS)
    chosen = counterfactuals(layer, replaced, draws=2)
    found = replay_layer(layer, chosen, "none")
    assert found.off < 1e-6
    assert found.passes == sum(len(x) for x in chosen.directions.values())
    actual = chosen.directions["actual"][0]
    for name, x in chosen.directions.items():
        for draw in range(len(x)):
            expected = slow(layer, tokens, actual, x[draw], name, address=replaced == "address")
            check(found, "none", name, draw, expected)


@pytest.mark.parametrize("match", ["norm", "read", "correction"])
def test_matched_directions_have_the_size_of_the_actual_one(match: Match) -> None:
    tokens = make_tokens("qed", T=ENDS[-1], H=3)
    layer = layer_of("qed", tokens, ENDS)
    chosen = counterfactuals(layer, draws=2)
    found = replay_layer(layer, chosen, match)
    actual, read = chosen.directions["actual"][0], measured(found, "none", "one-step", "actual")["read"][0]
    for name, x in chosen.directions.items():
        if name in OWN:
            assert all(found.measures[match, regime, name].equal(found.measures["none", regime, name]) for regime in REGIMES)
            continue
        for draw in range(len(x)):
            raw = measured(found, "none", "one-step", name)["read"][draw]
            by_read = torch.where(raw > 0, read / raw, 1)
            scale = actual.norm(dim=-1) / x[draw].norm(dim=-1) if match == "norm" else by_read
            expected = slow(layer, tokens, actual, scale[..., None] * x[draw], name, address=False)
            check(found, match, name, draw, expected)
            if match != "norm":
                torch.testing.assert_close(measured(found, match, "one-step", name)["read"][draw], read)
    assert found.passes <= 2 * sum(len(x) for x in chosen.directions.values())


def check(found: Replay, match: str, name: str, draw: int, expected: dict[str, dict[str, Tensor]]) -> None:
    """A shift is what is left of two outputs, and is judged by the size of these."""
    for regime, rows in expected.items():
        mine = measured(found, match, regime, name)
        for quantity, wanted in rows.items():
            size = rows["output" if quantity == "shift" else quantity].max().clamp(min=1e-30)
            assert (mine[quantity][draw].double() - wanted).abs().max() / size < 1e-5, (name, regime, quantity)


def test_none_is_the_mixer_without_its_direction() -> None:
    tokens = make_tokens("qed", T=ENDS[-1])
    layer, ends = layer_of("qed", tokens, ENDS), torch.tensor(ENDS)
    y = run(MIXERS["gdn2"], tokens, cu_seqlens=ends).y
    with_d = run(MIXERS["qed"], tokens, cu_seqlens=ends).y
    found = measured(replay_layer(layer, counterfactuals(layer)), "none", "trajectory", "none")
    assert error(found["shift"][0], (y - with_d).norm(dim=-1)[0]) < 1e-5
    assert found["read"].count_nonzero() == 0
    assert error(found["before"][0], y.norm(dim=-1)[0]) < 1e-5


def test_an_arm_is_the_model_of_that_arm() -> None:
    tokens = make_tokens("qed", T=ENDS[-1])
    layer, ends = layer_of("qed", tokens, ENDS), torch.tensor(ENDS)
    actual = run(MIXERS["qed"], tokens, cu_seqlens=ends).y
    found = replay_layer(layer, counterfactuals(layer), "none")
    for arm in ("nogate", "nogate-noproj", "noproj"):
        y = run(MIXERS[f"qed-{arm}"], tokens, cu_seqlens=ends, record=True)
        mine = measured(found, "none", "trajectory", arm)
        assert error(mine["shift"][0], (y.y - actual).norm(dim=-1)[0]) < 1e-5
        assert error(mine["read"][0], y.records["read_norm"][0]) < 1e-5


@pytest.mark.parametrize(("mixer", "other"), [("eda", "eda-reversed"), ("eda-reversed", "eda")])
def test_reversed_edits_are_the_other_mixer(mixer: str, other: str) -> None:
    tokens = make_tokens(mixer, T=ENDS[-1])
    layer, ends = layer_of(mixer, tokens, ENDS), torch.tensor(ENDS)
    found = replay_layer(layer, counterfactuals(layer))
    expected = run(MIXERS[other], tokens, cu_seqlens=ends).y - run(MIXERS[mixer], tokens, cu_seqlens=ends).y
    assert error(measured(found, "none", "trajectory", "reversed")["shift"][0], expected.norm(dim=-1)[0]) < 1e-5
    same = run(MIXERS["eda-same"], replace(tokens, address=tokens.k), cu_seqlens=ends).y
    if mixer == "eda":
        moved = (same - run(MIXERS["eda"], tokens, cu_seqlens=ends).y).norm(dim=-1)[0]
        assert error(measured(found, "none", "trajectory", "same-address")["shift"][0], moved) < 1e-5


def test_the_records_are_those_of_the_actual_direction() -> None:
    for mixer, read, correction in (
        ("qed", "read_norm", "correction_norm"), ("eda", "address_read_norm", "address_correction_norm"),
    ):  # fmt: skip
        tokens = make_tokens(mixer, T=ENDS[-1])
        layer = layer_of(mixer, tokens, ENDS)
        seen = run(MIXERS[mixer], tokens, cu_seqlens=torch.tensor(ENDS), record=True, backend="torch").records
        found = replay_layer(layer, counterfactuals(layer))
        for regime in ("one-step", "trajectory"):
            mine = measured(found, "none", regime, "actual")
            torch.testing.assert_close(mine["read"], seen[read])
            torch.testing.assert_close(mine["gate"] * mine["overlap"] * mine["read"], seen[correction])
            assert mine["shift"].count_nonzero() == 0
        if mixer == "eda":
            torch.testing.assert_close(measured(found, "none", "one-step", "actual")["before"], seen["pre_erase_output_norm"])


def test_no_strength_no_perturbation() -> None:
    tokens = make_tokens("qed", T=ENDS[-1])
    still = replace(tokens, lam=torch.zeros(2))
    layer = layer_of("qed", still, ENDS)
    found = replay_layer(layer, counterfactuals(layer), "read")
    for key, x in found.measures.items():
        gate, _, _, before, shift, output = x.unbind(1)
        assert gate.count_nonzero() == shift.count_nonzero() == 0, key
        assert before.equal(output)


def test_a_shut_gate_erases_nowhere_and_same_address_is_the_delta_rules_own() -> None:
    shut = replace(make_tokens("eda", T=ENDS[-1]), gamma=torch.zeros(1, ENDS[-1], 2))
    layer = layer_of("eda", shut, ENDS)
    found = replay_layer(layer, counterfactuals(layer))
    assert all(x[:, QUANTITIES.index("gate")].count_nonzero() == 0 for x in found.measures.values())
    assert max(x[:, QUANTITIES.index("shift")].max() for x in found.measures.values()) < 1e-6
    tokens = make_tokens("eda", T=ENDS[-1])
    layer = layer_of("eda", replace(tokens, address=tokens.k), ENDS)
    found = replay_layer(layer, counterfactuals(layer))
    for regime in ("one-step", "trajectory"):
        same = found.measures["none", regime, "same-address"]
        torch.testing.assert_close(same, found.measures["none", regime, "actual"], atol=1e-6, rtol=1e-5)


def test_an_orthogonal_address_perturbs_no_output_at_its_step() -> None:
    tokens = make_tokens("eda", T=ENDS[-1], K=8)
    q = torch.nn.functional.pad(tokens.q[..., :4], (0, 4))
    address = torch.nn.functional.pad(tokens.q[..., 4:], (4, 0))
    address = address / address.norm(dim=-1, keepdim=True)
    layer = layer_of("eda", replace(tokens, q=q / q.norm(dim=-1, keepdim=True), address=address), ENDS)
    found = replay_layer(layer, counterfactuals(layer))
    assert perturbation(found, "actual").nan_to_num().max() == 0
    assert perturbation(found, "random").nan_to_num().max() > 0
    assert measured(found, "none", "trajectory", "none")["shift"].max() > 1e-3


def test_one_token_and_one_head_have_no_others_and_say_so() -> None:
    for mixer in ("qed", "eda"):
        layer = make_layer(mixer, ends=(0, 1), H=1)
        chosen = counterfactuals(layer)
        assert chosen.absent["shuffled-head"] == "one head, so that there is no other"
        assert chosen.absent["shuffled-token"] == "a prompt of one token, so that there is no other"
        found = replay_layer(layer, chosen)
        assert not any("shuffled" in name for _, _, name in found.measures)
        # Nothing is there to be read, unless the delta edit comes first.
        reads = {key: x[:, QUANTITIES.index("read")].count_nonzero() for key, x in found.measures.items()}
        assert {key[2] for key, n in reads.items() if n} == ({"reversed"} if mixer == "eda" else set())
    assert counterfactuals(make_layer("qed")).absent == {"same-address": "empty, as P⊥ₖk = 0"}
    assert counterfactuals(make_layer("eda-same")).absent == {"same-address": "the mixer's own"}
    assert counterfactuals(make_layer("eda-rand")).absent == {"shuffled-token": "the vector is the same at all tokens"}
    assert "same-address" in counterfactuals(make_layer("qed-noproj")).directions


def test_directions_are_made_by_the_mixers_recipe() -> None:
    tokens = make_tokens("qed", T=ENDS[-1], H=3)
    layer = layer_of("qed", tokens, ENDS)
    directions = counterfactuals(layer, draws=3, seed=5).directions
    q, k, b = (x[0] for x in (tokens.q, tokens.k, tokens.b) if x is not None)
    for name, x in directions.items():
        assert x.shape == (3 if name == "random" else 1, ENDS[-1], 3, 8)
        if "noproj" not in name:
            assert float(torch.linalg.vecdot(x, k).abs().max()) < 1e-6, name
    for h in range(3):
        made = [b[:, h] * q[:, other] - k[:, h] * (k[:, h] * b[:, h] * q[:, other]).sum(-1, keepdim=True) for other in range(3)]
        near = [error(directions["shuffled-head"][0, :, h], x) < 1e-5 for x in made]
        assert sum(near) == 1
        assert not near[h]
    plain = make_layer("qed-nogate-noproj", H=3)
    shuffled, q = counterfactuals(plain).directions["shuffled-token"][0], plain.edits.q[0]
    taken = (shuffled[:, None] == q[None]).all(-1).all(-1)
    assert taken.sum(0).eq(1).all()
    assert not taken.diagonal().any()


def test_addresses_are_shuffled_within_prompts_and_none_keeps_its_own() -> None:
    layer = make_layer("eda", H=3, seed=3)
    address = layer.address[0]
    directions = counterfactuals(layer, draws=3).directions
    torch.testing.assert_close(directions["random"].norm(dim=-1), torch.ones(3, ENDS[-1], 3))
    taken = (directions["shuffled-token"][0][:, None] == address[None]).all(-1).all(-1)
    assert taken.sum(1).eq(1).all()
    assert taken.sum(0).eq(1).all()
    assert not taken.diagonal().any()
    prompt = torch.bucketize(torch.arange(ENDS[-1]), torch.tensor(ENDS[1:]), right=True)
    assert prompt[taken.int().argmax(1)].equal(prompt)
    heads = (directions["shuffled-head"][0][:, :, None] == address[:, None]).all(-1)
    assert heads.sum(2).eq(1).all()
    assert not heads.diagonal(dim1=1, dim2=2).any()


def test_draws_depend_on_seed_layer_and_prompt_alone() -> None:
    tokens = make_tokens("eda", T=ENDS[-1])
    whole = layer_of("eda", tokens, ENDS, index=4)
    first = counterfactuals(whole).directions
    begin, end = ENDS[1:3]
    part = {name: getattr(tokens, name)[:, begin:end] for name in ("q", "k", "v", "g", "beta", "address", "gamma")}
    alone = replace(layer_of("eda", replace(tokens, **part), (0, end - begin), index=4), prompts=(1,))
    for name, x in counterfactuals(alone).directions.items():
        assert x.equal(first[name][:, begin:end]), name
    assert not counterfactuals(whole, seed=1).directions["random"].equal(first["random"])
    other = counterfactuals(replace(whole, index=5)).directions
    assert not other["random"].equal(first["random"])
    orders = [derangement(np.random.default_rng(seed), 3).tolist() for seed in range(40)]
    assert {tuple(x) for x in orders} == {(1, 2, 0), (2, 0, 1)}


@pytest.mark.parametrize("mixer", ["gdn2", "kda", "linear", "rwkv7"])
def test_a_mixer_without_a_direction_is_refused(mixer: str) -> None:
    with pytest.raises(InputError, match=f"mixer {mixer}: expected one that adds an erase direction .* nothing to replace"):
        what_is_replaced(MIXERS[mixer])


def test_what_cannot_be_asked_is_refused() -> None:
    assert what_is_replaced(MIXERS["eda-qed"]) == "address"
    assert what_is_replaced(MIXERS["eda-qed"], "direction") == "direction"
    with pytest.raises(InputError, match="mixer eda: expected address to replace, found 'direction'"):
        what_is_replaced(MIXERS["eda"], "direction")
    layer = make_layer("eda")
    with pytest.raises(InputError, match="expected norm or none where an address is replaced, found 'read'"):
        replay_layer(layer, counterfactuals(layer), "read")
    with pytest.raises(InputError, match="draws: expected at least 1, found 0"):
        counterfactuals(layer, draws=0)


def test_a_long_row_is_replayed_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("eda", ends=(0, 300, 420))
    whole = replay_layer(layer, counterfactuals(layer))
    monkeypatch.setattr("qed_probe.kernels.packing.SEGMENT", 128)
    from qed_probe.kernels import packing

    packing.segments.cache_clear()
    parts = replay_layer(layer, counterfactuals(layer))
    packing.segments.cache_clear()
    for key, x in whole.measures.items():
        torch.testing.assert_close(parts.measures[key], x, atol=1e-6, rtol=1e-4)


def test_packed_prompts_do_not_see_each_other() -> None:
    tokens = make_tokens("qed", T=ENDS[-1])
    together = replay_layer(layer_of("qed", tokens, ENDS), counterfactuals(layer_of("qed", tokens, ENDS)))
    changed = replace(tokens, v=torch.cat([10 * tokens.v[:, :5], tokens.v[:, 5:]], 1))
    other = replay_layer(layer_of("qed", changed, ENDS), counterfactuals(layer_of("qed", changed, ENDS)))
    for key, x in together.measures.items():
        assert x[..., 5:, :].equal(other.measures[key][..., 5:, :]), key
