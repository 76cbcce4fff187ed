"""Cases small enough to be worked out by hand, and the algebra that holds for any input."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qed_probe.kernels import MIXERS, Observation, Read, Tokens, edits, recurrence, run
from tests.recurrences import make_tokens


def one(*values: float) -> Tensor:
    """One row, one token, one head."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1)


def state(*rows: float) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).view(1, 1, -1, 1)


def seen(mixer: str, tokens: Tokens, before: Tensor) -> Observation:
    return run(MIXERS[mixer], tokens, record=True, initial_state=before)


def memory(mixer: str, tokens: Tokens, before: Tensor) -> Read:
    """What the memory gives back, its read by the direction included."""
    ready = edits(MIXERS[mixer], tokens)
    probes = None if ready.d is None else ready.d[..., None, :]
    return recurrence(ready.q, ready.g, ready.k, ready.a, ready.u, probes=probes, initial_state=before)


def direction(mixer: str, tokens: Tokens) -> Tensor:
    """The added direction, flat."""
    d = edits(MIXERS[mixer], tokens).d
    assert d is not None
    return d.flatten()


STEP = Tokens(
    q=one(0.6, 0.8), k=one(1, 0), v=one(1), g=one(0, 0), b=one(0.5, 0.5), w=one(1), lam=torch.tensor([0.2], dtype=torch.float64)
)


def test_gdn2_step() -> None:
    step = seen("gdn2", STEP, state(2, 3))
    assert memory("gdn2", STEP, state(2, 3)).residual.item() == 0
    assert step.y.item() == pytest.approx(3.6)


def test_qed_step() -> None:
    step = seen("qed", STEP, state(2, 3))
    assert direction("qed", STEP).tolist() == pytest.approx([0, 0.4])
    assert step.records["read"].item() == pytest.approx(1.2)
    assert step.final_state.flatten().tolist() == pytest.approx([1.76, 3])
    assert step.y.item() == pytest.approx(3.456)
    assert step.records["correction_norm"].item() == pytest.approx(3.6 - 3.456)
    assert step.records["correction_cosine"].item() == -1


def test_eigenvalues_inside_the_unit_interval_and_a_norm_above_one() -> None:
    step = seen("qed", replace(STEP, q=one(0, 1)), state(2, 3))
    ready = edits(MIXERS["qed"], replace(STEP, q=one(0, 1)))
    k, a = ready.k.flatten(), ready.a.flatten()
    factor = torch.eye(2) - torch.outer(k, a)
    assert sorted(torch.linalg.eigvals(factor).real.tolist()) == pytest.approx([0.5, 1])
    assert step.records["eigenvalue"].item() == 0.5
    assert step.records["operator_norm"].item() == pytest.approx(1.0066, abs=5e-5)


def test_eda_erases_at_one_address_and_writes_at_another() -> None:
    tokens = Tokens(
        q=one(1, 1), k=one(0, 1), v=one(7), g=one(0, 0), beta=torch.ones(1, 1, 1), gamma=torch.ones(1, 1, 1), address=one(1, 0)
    )
    tokens = replace(tokens, beta=one(1)[..., 0], gamma=one(1)[..., 0])
    step = seen("eda", tokens, state(3, 5))
    wrote = memory("eda", tokens, state(3, 5)).residual
    erased = state(3, 5) + one(1, 0).mT * wrote[..., 0, :]
    assert erased.flatten().tolist() == [0, 5]
    assert step.final_state.flatten().tolist() == [0, 7]
    assert step.records["address_read_norm"].item() == 3
    assert step.records["pre_erase_output_norm"].item() == 8
    assert step.records["edit_eigenvalue"].flatten().tolist() == [0, 0]


def test_no_overlap_changes_the_state_and_not_the_output() -> None:
    tokens = replace(STEP, q=one(0, 1))
    with_d, without = seen("qed", tokens, state(2, 3)), seen("gdn2", tokens, state(2, 3))
    assert with_d.records["rho"].item() == 0
    assert torch.equal(with_d.y, without.y)
    assert not torch.equal(with_d.final_state, without.final_state)


def test_a_query_equal_to_the_key_can_leave_a_direction() -> None:
    half = 0.5**0.5
    step = seen("qed", replace(STEP, q=one(half, half), k=one(half, half), b=one(1, 0)), state(2, 3))
    assert step.records["direction_norm"].item() == pytest.approx(half / 2 * 2**0.5)


def test_the_direction_is_no_multiple_of_the_query_across_the_key() -> None:
    tokens = Tokens(
        q=one(0.48, 0.6, 0.64), k=one(1, 0, 0), v=one(1), g=one(0, 0, 0), b=one(0.5, 0.2, 0.9), w=one(1),
        lam=torch.tensor([0.2], dtype=torch.float64),
    )  # fmt: skip
    d, across = direction("qed", tokens), torch.tensor([0, 0.6, 0.64], dtype=torch.float64)
    assert d.tolist() == pytest.approx([0, 0.12, 0.576])
    assert torch.linalg.cross(d, across).norm() > 0.1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(2, 9), V=st.integers(1, 5))
def test_one_step_of_qed_and_gdn2_differ_by_the_correction(seed: int, K: int, V: int) -> None:
    tokens = make_tokens("qed", T=1, K=K, V=V, seed=seed, dtype=torch.float64)
    before = torch.randn(1, 2, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    qed, gdn2 = seen("qed", tokens, before), seen("gdn2", tokens, before)
    assert tokens.lam is not None
    k = tokens.k
    rho = (tokens.q * k).sum(-1, keepdim=True)
    by_d = memory("qed", tokens, before).probes[..., 0, :]
    torch.testing.assert_close(qed.y - gdn2.y, -tokens.lam[:, None] * rho * by_d)
    change = (qed.final_state - gdn2.final_state)[0]
    torch.testing.assert_close(change, -tokens.lam[:, None, None] * k[0, 0, :, :, None] * by_d[0, 0, :, None, :])
    # Whatever is orthogonal to the key reads the same after both.
    probe = tokens.v.new_ones(K) - k * k.sum(-1, keepdim=True)
    response = torch.einsum("hk,hkv->hv", probe[0, 0], change)
    torch.testing.assert_close(response, torch.zeros_like(response), atol=1e-12, rtol=0)


def test_the_overlap_can_be_negative() -> None:
    assert (run(MIXERS["qed"], make_tokens("qed"), record=True).records["rho"] < 0).any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_unit_key_and_gates_of_one_store_the_value_exactly(seed: int) -> None:
    tokens = make_tokens("deltanet", T=5, seed=seed, gate=1.0, dtype=torch.float64)
    torch.testing.assert_close(run(MIXERS["deltanet"], replace(tokens, q=tokens.k)).y, tokens.v)


@pytest.mark.parametrize("mixer", ["deltanet", "gdn2", "eda", "qed"])
def test_closed_gates_leave_the_state(mixer: str) -> None:
    tokens = make_tokens(mixer, T=70, gate=0.0, decay=0.0)
    if tokens.lam is not None:
        tokens = replace(tokens, lam=torch.zeros_like(tokens.lam))
    before = torch.randn(1, 2, 8, 6, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(MIXERS[mixer], tokens, initial_state=before).final_state, before)


def test_eda_without_an_erase_is_kda_and_at_the_key_shrinks_twice() -> None:
    tokens = make_tokens("eda", T=70, dtype=torch.float64)
    assert tokens.gamma is not None
    off = replace(tokens, gamma=torch.zeros_like(tokens.gamma))
    torch.testing.assert_close(run(MIXERS["eda"], off).y, run(MIXERS["kda"], tokens).y)
    same = make_tokens("eda-same", T=1, dtype=torch.float64, decay=0.0)
    same = replace(same, v=torch.zeros_like(same.v), q=same.k)
    before = torch.randn(1, 2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert same.beta is not None
    assert same.gamma is not None
    shrink = ((1 - same.beta) * (1 - same.gamma))[0, 0, :, None]
    expected = shrink * torch.einsum("hk,hkv->hv", same.k[0, 0], before[0])
    torch.testing.assert_close(run(MIXERS["eda-same"], same, initial_state=before).y[0, 0], expected)
