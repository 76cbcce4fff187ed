"""Gate budgets: shares by hand, and what belongs to no share."""

import numpy as np
import pytest
import xarray as xr
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike

from qed_probe import analyses, figures
from qed_probe.errors import InputError, StoreError
from tests.drawn import check_words, texts
from tests.synthetic_store import synthetic_store


def _store(retention: ArrayLike, beta: ArrayLike, gamma: ArrayLike, mixer: str = "eda", text: str = "abcdef") -> xr.Dataset:
    """One layer and head, a token each."""
    kept, beta, gamma = (np.broadcast_to(np.asarray(x, np.float64), (len(text),)) for x in (retention, beta, gamma))
    found = {"retention": kept, "budget_decay": 1 - kept, "budget_delta": kept * beta, "budget_erase": kept * gamma}
    return synthetic_store(1, 1, 1, text, mixer, records={name: x[None, :, None] for name, x in found.items()})


def test_both_kinds_of_share_by_hand() -> None:
    found = analyses.gate_budgets(_store([0.5, 0.5, 0.9, 0.9, 1, 0], [1, 0.2, 0.5, 0, 0.5, 1], [0, 0.8, 0.5, 1, 0.5, 1]))
    budgets = np.array(
        [[0.5, 0.5, 0], [0.5, 0.1, 0.4], [0.1, 0.45, 0.45], [0.1, 0, 0.9], [0, 0.5, 0.5], [1, 0, 0]]
    )  # and each sums to 1
    assert found["n"].values.tolist() == [[1, 0, 0, 0, 0, 2, 0, 0, 0, 3]]
    for kind in ("of sums", "of tokens"):
        share = found["share"].sel(kind=kind, layer=0).values
        np.testing.assert_allclose(share[[0, 5, 9]], [budgets[5], budgets[:2].mean(0), budgets[2:5].mean(0)], atol=1e-7)
        np.testing.assert_allclose(found["total_share"].sel(kind=kind), budgets.mean(0), atol=1e-7)
        np.testing.assert_array_equal(np.isnan(share[:, 0]), found["n"][0] == 0)
    np.testing.assert_allclose(found["bin_share"], found["share"][:, 0])
    np.testing.assert_allclose(found["layer_share"][:, 0], found["total_share"])


def test_a_token_with_little_budget_counts_less_among_sums_and_as_much_among_tokens() -> None:
    found = analyses.gate_budgets(_store([0.5, 1.0], [1, 0.01], [1, 0], text="ab"), bins=1)
    np.testing.assert_allclose(found["total_share"].sel(kind="of sums"), np.array([0.5, 0.51, 0.5]) / 1.51, rtol=1e-6)
    np.testing.assert_allclose(found["total_share"].sel(kind="of tokens"), [1 / 6, 1 / 6 + 1 / 2, 1 / 6], rtol=1e-6)


@pytest.mark.parametrize("retention", [0.1, 0.3, 0.6, 0.7, 0.9])
def test_a_bin_has_its_lower_edge(retention: float) -> None:
    found = analyses.gate_budgets(_store(retention, 0.5, 0))
    assert found["n"].values[0].nonzero()[0].tolist() == [round(10 * retention)]


def test_sums_over_layers_and_bins_are_of_all_token_heads() -> None:
    ds = synthetic_store(3, 2)
    found = analyses.gate_budgets(ds)
    x = np.stack([ds[f"budget_{name}"].values.astype(np.float64) for name in ("decay", "delta", "erase")], -1)
    np.testing.assert_allclose(found["total_share"][0], x.sum((0, 1, 2)) / x.sum(), rtol=1e-6)
    np.testing.assert_allclose(found["total_share"][1], (x / x.sum(-1, keepdims=True)).mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(found["layer_share"][0], x.sum((1, 2)) / x.sum((1, 2, 3))[:, None], rtol=1e-6)
    assert int(found["n"].sum()) == x[..., 0].size


def test_without_an_address_nothing_is_erased_whether_or_not_that_is_recorded() -> None:
    ds = _store([0.5, 0.6, 0.7, 0.8, 0.9, 1], 0.5, 0, mixer="gdn2")
    with_record, without = analyses.gate_budgets(ds), analyses.gate_budgets(ds.drop_vars("budget_erase"))
    xr.testing.assert_allclose(with_record["share"], without["share"])
    assert (without["share"].sel(budget="erase").fillna(0) == 0).all()
    words = texts(figures.draw_gate_budgets(without)).replace("\n", " ")
    assert "No address edit: γ = 0." in words
    assert "ᾱγ" not in words


def test_no_budget_a_reflection_and_bad_values_are_counted_apart() -> None:
    ds = _store([1, 1, 0.5, 0.5, 0.5, 0.5], [0, 0.5, 1.5, 1.005, 0.5, 0.5], 0, mixer="gdn")
    ds["budget_decay"][0, 4, 0] = np.nan
    ds["retention"][0, 5, 0] = np.inf
    found = analyses.gate_budgets(ds)
    assert tuple(int(found[name].sum()) for name in ("zero", "reflected", "n")) == (1, 1, 3)
    assert found["nonfinite"].values[:, 0].tolist() == [1, 1, 0, 0]
    assert np.isfinite(found["total_share"]).all()
    figure = figures.draw_gate_budgets(found)
    words = texts(figure).replace("\n", " ")
    assert "3 token-heads; 1 more without any budget are left out." in words
    assert "1 have β > 1 (by over 1 %): an edit that reflects what it reads." in words
    assert "budget_decay: 1 not finite, first at layer 0, token 4, head 0." in words
    check_words(figure)


def test_nothing_but_bad_values_leaves_every_bin_empty() -> None:
    found = analyses.gate_budgets(_store(np.nan, 1, 0))
    assert int(found["n"].sum()) == 0
    assert found["share"].isnull().all()
    figure = figures.draw_gate_budgets(found)
    assert texts(figure).split("\n").count("empty") == 10
    assert texts(figure).split("\n").count("none") == 3
    check_words(figure)
    total = next(axes for axes in figure.axes if [x.get_text() for x in axes.get_xticklabels()] == ["all ᾱ"])
    assert total.get_xlim() == (0, 1)


def test_the_figure_draws_the_shares_and_says_what_they_are_not() -> None:
    found = analyses.gate_budgets(_store([0.5, 0.5, 0.9, 0.9, 1, 0], 0.5, 0.25))
    figure = figures.draw_gate_budgets(found)
    by_bin = next(axes for axes in figure.axes if axes.get_xlabel() == "retention ᾱ")
    heights = [bar.get_height() for bar in by_bin.patches if isinstance(bar, Rectangle)]
    expected = [found["bin_share"].sel(kind=kind).values.T.ravel() for kind in found["kind"].values]
    np.testing.assert_allclose(heights, np.concatenate(expected))
    words = texts(figure).replace("\n", " ")
    assert "Gates, not energy" in words
    assert "QED's λd has no part in them (dᵀk = 0)" in words


def test_several_delta_edits_are_said() -> None:
    ds = synthetic_store(mixer="deltaproduct").assign(
        edit_eigenvalue=(("layer", "token", "head", "edit"), np.zeros((2, 2 * len("x" * 222), 3, 2), np.float32))
    )
    assert "the last of several delta edits" in texts(figures.draw_gate_budgets(analyses.gate_budgets(ds))).replace("\n", " ")
    eda = ds.assign_attrs(mixer="eda")
    assert "several" not in texts(figures.draw_gate_budgets(analyses.gate_budgets(eda)))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(StoreError, match="without budget_delta"):
        analyses.gate_budgets(synthetic_store().drop_vars("budget_delta"))
    with pytest.raises(InputError, match="expected 1 or more, found 0"):
        analyses.gate_budgets(synthetic_store(), bins=0)
