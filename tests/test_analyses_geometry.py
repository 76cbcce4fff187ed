"""Angles with known answers, the nulls against simulation, and gates at their ends; walked in blocks."""

from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from numpy.typing import ArrayLike

from qed_probe import analyses, figures
from qed_probe.analyses import inputs as walk
from qed_probe.analyses.geometry import LEVELS, _partners
from qed_probe.errors import StoreError
from tests.drawn import check_words, texts
from tests.synthetic_inputs import synthetic_inputs
from tests.synthetic_store import synthetic_store

X, Y, Z = np.eye(3)


def _measure(found: xr.Dataset, name: str) -> xr.Dataset:
    return found.sel(measure=name)


def test_an_orthogonal_address_has_no_cosine_and_one_along_the_key_has_all() -> None:
    ds = synthetic_store(2, 1, 2, "abcd", "eda")
    keys = np.stack([np.stack([X, Y]), np.stack([Z, -Z])])[:, None, None]  # layer 0: orthogonal; layer 1: opposite
    found = analyses.address_geometry(ds, synthetic_inputs(ds, 3, {"k": keys, "q": X, "gamma": 0.5, "beta": 0.25}))
    for name in ("mean", "maximum"):
        assert _measure(found, "address_key")[name].values.tolist() == [0, 1]
        assert _measure(found, "cross_term")[name].values.tolist() == [0, 0.125]
    assert found["n"].sel(measure="address_key").values.tolist() == [8, 8]
    np.testing.assert_allclose(_measure(found, "address_key")["quantile"][1], 1, rtol=4e-3)
    assert _measure(found, "query_key")["mean"].values.tolist() == [0, 0]


def test_an_address_that_is_erased_last_is_told_from_the_key() -> None:
    ds = synthetic_store(1, 1, 2, "abcd", "eda-reversed")
    keys = np.stack([X, Y])  # the key, then ε
    found = analyses.address_geometry(ds, synthetic_inputs(ds, 3, {"k": keys, "q": X}))
    assert _measure(found, "query_key")["mean"].item() == 1
    assert _measure(found, "address_key")["mean"].item() == 0


def test_a_closed_address_gate_leaves_no_cross_term_and_channel_gates_make_beta() -> None:
    ds = synthetic_store(1, 1, 2, "abcd", "eda-gdn2")
    keys = np.stack([X, (X + Y) / np.sqrt(2)])
    given: dict[str, ArrayLike] = {"k": keys, "b": np.array([0.5, 0.25, 1]), "gamma": 1.0}
    found = analyses.address_geometry(ds, synthetic_inputs(ds, 3, given))
    assert _measure(found, "cross_term")["mean"].item() == pytest.approx((0.25 + 0.125) / np.sqrt(2))
    closed = analyses.address_geometry(ds, synthetic_inputs(ds, 3, given | {"gamma": 0.0}))
    assert _measure(closed, "cross_term")["maximum"].item() == 0


def test_a_gate_that_is_the_same_for_all_channels_does_not_turn_the_direction() -> None:
    ds = synthetic_store(2, 3, 2, "abcdefgh", "gdn2")
    even = analyses.address_geometry(ds, synthetic_inputs(ds, inputs={"b": 0.3}))
    assert even["measure"].values.tolist() == ["query_key", "direction_query"]
    inputs = synthetic_inputs(ds)
    d = inputs["b"] * inputs["q"]
    inputs["d"] = (inputs["d"].dims, d.transpose(*inputs["d"].dims).values)
    key = inputs["k"].isel(edit=0)
    across = inputs["q"] - key * (key * inputs["q"]).sum("key")
    cosine = abs((inputs["d"] * across).sum("key")) / np.sqrt((inputs["d"] ** 2).sum("key") * (across**2).sum("key"))
    found = _measure(analyses.address_geometry(ds, inputs), "direction_query")
    np.testing.assert_allclose(found["mean"], cosine.mean(("token", "head")), rtol=1e-5)
    np.testing.assert_allclose(found["maximum"], cosine.max(("token", "head")), rtol=1e-6)


def test_quantiles_are_those_of_the_values() -> None:
    ds = synthetic_store(2, 3, 2, mixer="eda")
    inputs = synthetic_inputs(ds, 16)
    values = abs((inputs["k"].isel(edit=0) * inputs["k"].isel(edit=1)).sum("key"))
    found = _measure(analyses.address_geometry(ds, inputs), "address_key")
    expected = values.quantile(list(LEVELS), ("token", "head"), method="inverted_cdf").transpose("layer", "quantile")
    np.testing.assert_allclose(found["quantile"], expected, rtol=5e-3)


@pytest.mark.parametrize("dims", [1, 2, 3, 24, 128])
def test_the_isotropic_mean_is_that_of_random_directions(dims: int) -> None:
    x = np.random.default_rng(dims).normal(size=(40000, dims))
    expected = np.abs(x[:, 0]) / np.linalg.norm(x, axis=1)
    assert analyses.isotropic_cosine(dims) == pytest.approx(expected.mean(), abs=5 * expected.std() / 200 + 1e-12)
    assert analyses.isotropic_cosine(128) == pytest.approx(0.0707, abs=5e-5)


def test_for_isotropic_vectors_both_nulls_and_the_measure_agree() -> None:
    ds = synthetic_store(1, 4, 4, mixer="qed-nogate")
    inputs = synthetic_inputs(ds, 16, seed=3)
    found = analyses.address_geometry(ds, inputs)
    query = _measure(found, "query_key")
    assert query["mean"].item() == pytest.approx(query["isotropic"].item(), rel=0.05)
    assert query["null_mean"].item() == pytest.approx(query["isotropic"].item(), rel=0.05)
    null = _measure(found, "direction_query")
    assert null["null_mean"].item() == pytest.approx(analyses.isotropic_cosine(15), rel=0.06)


def test_the_empirical_null_keeps_what_all_prompts_share() -> None:
    ds = synthetic_store(1, 1, 3, "abcdefgh", "eda")
    keys = np.stack([X, X])
    found = _measure(analyses.address_geometry(ds, synthetic_inputs(ds, 3, {"k": keys})), "address_key")
    assert (found["mean"].item(), found["null_mean"].item(), found["null_n"].item()) == (1, 1, 24)
    assert found["isotropic"].item() == pytest.approx(0.5)


def test_a_partner_is_of_another_prompt_and_each_is_as_likely() -> None:
    owners = np.repeat([0, 2, 5], [4, 2, 4])
    tokens = np.arange(6000)
    for prompt in (0, 1, 2, 5):
        partners = _partners(tokens, np.full(6000, prompt), owners)
        assert (owners[partners] != prompt).all()
        counts = np.bincount(partners, minlength=10)[owners != prompt]
        assert counts.min() > 0.97 * 6000 / len(counts)
    assert (_partners(tokens, np.zeros(6000, int), np.zeros(4, int)) == -1).all()


@pytest.mark.parametrize("text", ["a", "abcdef"])
def test_one_prompt_has_no_empirical_null_and_says_so(text: str) -> None:
    ds = synthetic_store(2, 2, 1, text, "eda")
    found = analyses.address_geometry(ds, synthetic_inputs(ds))
    assert found["null_mean"].isnull().all()
    assert int(found["null_n"].sum()) == 0
    assert int(_measure(found, "address_key")["n"].sum()) == 4 * len(text)
    figure = figures.draw_address_geometry(found)
    assert "there is only one prompt" in texts(figure)
    check_words(figure)


def test_vectors_of_nothing_and_bad_values_are_counted_apart() -> None:
    ds = synthetic_store(2, 2, 2, "abcd", "eda")
    inputs = synthetic_inputs(ds)
    inputs["k"][0, 1, 1, 0] = 0
    inputs["k"][1, 6, 0, 1, 3] = np.nan
    inputs["d"][1, 5, 0, 3] = inputs["gamma"][1, 4, 1] = np.nan
    found = analyses.address_geometry(ds, inputs)
    assert _measure(found, "address_key")["n"].values.tolist() == [15, 15]
    assert _measure(found, "address_key")["undefined"].values.tolist() == [1, 0]
    assert found["undefined"].sel(measure=["direction_query", "cross_term"]).values.tolist() == [[0, 0], [0, 0]]
    assert found["nonfinite"].sel(source="k").values.tolist() == [0, 1]
    assert found["first_nonfinite"].sel(source="k").values.tolist() == [1, 6, 0]
    words = texts(figures.draw_address_geometry(found)).replace("\n", " ")
    assert "1 more with a vector that is 0" in words
    assert "k: 1 not finite, first at layer 1, token 6, head 0." in words


def test_gates_at_their_ends_by_hand() -> None:
    ds = synthetic_store(1, 2, 1, "abcd", "eda").assign_attrs(gate_max=2.0)
    beta = np.array([[0, 2], [0.01, 1.995], [0.02, 1.98], [1, 1]])
    g = np.zeros((1, 4, 2, 4))
    g[0, :, 1] = [-5, -4.96, -4.9, -np.inf]
    found = analyses.gate_saturation(ds, synthetic_inputs(ds, 4, {"beta": beta[None], "gamma": 1, "g": g}))
    assert found["gate"].values.tolist() == ["beta", "gamma"]
    assert found["near_zero"][:, 0].values.tolist() == [[0.5, 0], [0, 0]]
    assert found["near_one"][:, 0].values.tolist() == [[0, 0.5], [1, 1]]
    np.testing.assert_allclose(found["at_floor"][0], [0, 0.75])
    assert found["kept_max"].values.tolist() == [[1, pytest.approx(np.exp(-4.9))]]
    assert found["kept_min"].values.tolist() == [[1, 0]]
    assert (found["kept_quantile"].isel(head=0) == 1).all()
    words = texts(figures.draw_gate_saturation(found))
    assert "β near 2" in words
    assert "γ near 1" in words
    assert "g at its floor" in words


def test_only_a_safe_gate_has_a_floor_and_only_gates_that_are_there_are_shown() -> None:
    ds = synthetic_store(mixer="qed")
    found = analyses.gate_saturation(ds, synthetic_inputs(ds))
    assert "at_floor" not in found
    assert found["gate"].values.tolist() == ["b", "w"]
    bare = synthetic_store(mixer="linear")
    none = analyses.gate_saturation(bare, synthetic_inputs(bare, inputs={"g": 0}))
    assert "near_zero" not in none
    figure = figures.draw_gate_saturation(none)
    check_words(figure)
    assert "shares" not in texts(figure)


def test_the_floor_is_the_one_that_the_trace_says() -> None:
    ds = synthetic_store(mixer="eda").assign_attrs(lower_bound=-2.0)
    found = analyses.gate_saturation(ds, synthetic_inputs(ds, inputs={"g": -1.99}))
    assert (found["at_floor"] == 1).all()
    assert "ℓ = -2" in texts(figures.draw_gate_saturation(found)).replace("−", "-")


def test_quantiles_of_decay_are_those_of_the_values() -> None:
    ds = synthetic_store(2, 3)
    inputs = synthetic_inputs(ds)
    found = analyses.gate_saturation(ds, inputs)
    kept = np.exp(inputs["g"].transpose("layer", "head", "token", "key").values)
    expected = np.quantile(kept, found["level"].values, axis=(2, 3))
    np.testing.assert_allclose(found["kept_quantile"], expected, atol=1e-3)


@pytest.mark.parametrize("analysis", [analyses.address_geometry, analyses.gate_saturation])
def test_blocks_and_dask_change_nothing_and_bound_the_memory(
    analysis: Callable[[xr.Dataset, xr.Dataset], xr.Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = synthetic_store(2, 3, 3, mixer="eda")
    inputs = synthetic_inputs(ds)
    whole = analysis(ds, inputs)
    monkeypatch.setattr(walk, "BLOCK", 16)
    monkeypatch.setattr(walk, "BYTES", 1 << 14)
    sizes = [len(tokens) for tokens, _ in walk._blocks(ds, inputs, ["q", "k", "g"], 0)]
    assert sum(sizes) == ds.sizes["token"]
    assert max(sizes) == 32  # of 384 bytes a token
    xr.testing.assert_allclose(analysis(ds.chunk({"token": 64}), inputs.chunk({"token": 64})), whole, rtol=1e-6)


@pytest.mark.parametrize("analysis", [analyses.address_geometry, analyses.gate_saturation])
def test_incomplete_tokens_are_left_out(analysis: Callable[[xr.Dataset, xr.Dataset], xr.Dataset]) -> None:
    ds = synthetic_store(2, 3, 3, mixer="eda")
    inputs = synthetic_inputs(ds)
    length = ds.sizes["token"] // 3
    first = {"token": slice(0, 2 * length)}
    complete = ("token", np.arange(3 * length) < 2 * length)
    masked = analysis(ds.assign_coords(complete=complete), inputs.assign_coords(complete=complete))
    xr.testing.assert_allclose(masked, analysis(ds.isel(first), inputs.isel(first)))
    assert masked.attrs["tokens_incomplete"] == length
    with pytest.raises(StoreError, match="none complete"):
        analysis(ds.assign_coords(complete=("token", np.zeros(3 * length, bool))), inputs)


@pytest.mark.parametrize("analysis", [analyses.address_geometry, analyses.gate_saturation])
def test_inputs_that_do_not_fit_are_refused(analysis: Callable[[xr.Dataset, xr.Dataset], xr.Dataset]) -> None:
    ds = synthetic_store(mixer="eda")
    inputs = synthetic_inputs(ds)
    with pytest.raises(StoreError, match="inputs of the same trace"):
        analysis(ds, inputs.isel(token=slice(1, None)))
    with pytest.raises(StoreError, match="found none of"):
        analysis(ds, inputs.drop_vars(["k", "g"]))
