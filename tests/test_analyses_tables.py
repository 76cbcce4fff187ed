"""Half-lives, the token strip and the summary: hand-made numbers with known answers."""

import numpy as np
import pytest

from qed_probe import analyses
from qed_probe.errors import InputError, StoreError
from tests.synthetic_store import TEXT, synthetic_store


def test_half_lives_by_hand() -> None:
    g = np.zeros((1, 4, 4), np.float32)
    g[0, :, 0] = np.log(0.5)
    g[0, :, 1] = [-0.1, -0.3, -0.2, -0.2]
    g[0, :, 3] = [-1, -np.inf, -1, -1]
    slow = np.full((1, 4, 4), -0.01, np.float32)
    slow[0, 2, 0] = np.nan
    found = analyses.half_life(synthetic_store(1, 4, 1, "abcd", records={"log_decay": g, "log_decay_max": slow}))
    np.testing.assert_allclose(found["half_life"].sel(channel="mean")[0], [1, np.log(2) / 0.2, np.inf, 0], rtol=1e-6)
    np.testing.assert_allclose(found["half_life"].sel(channel="slowest")[0], np.log(2) / 0.01, rtol=1e-6)
    assert found["wiped"].sel(channel="mean").values.tolist() == [[0, 0, 0, 1]]
    assert found["n"].sel(channel="slowest").values.tolist() == [[3, 4, 4, 4]]
    assert found["first_nonfinite"].sel(source="log_decay").values.tolist() == [0, 1, 3]
    assert found["first_nonfinite"].sel(source="log_decay_max").values.tolist() == [0, 2, 0]
    assert found["half_life"].attrs["units"] == "token"


def test_strip_shows_one_prompt_at_one_place() -> None:
    ds = synthetic_store(2, 3, 2)
    length = len(TEXT)
    found = analyses.token_strip(ds, "residual_norm", prompt=1)
    assert "".join(found["text"].values) == TEXT
    assert found["token"].values.tolist() == list(range(length, 2 * length))
    np.testing.assert_allclose(found["value"], ds["residual_norm"].values[1, length:].mean(-1), rtol=1e-6)
    assert str(found["role"].values[TEXT.index("8253719")]) == "needle"
    one = analyses.token_strip(ds, "rho", layer=0, head=2)
    np.testing.assert_array_equal(one["value"], ds["rho"].values[0, :length, 2])
    assert one.attrs["where"] == "layer 0, head 2"
    assert one["value"].attrs["long_name"] == "ρ = qᵀk, overlap of query and key"


def test_strip_keeps_the_end_of_a_long_prompt_and_counts_what_is_no_number() -> None:
    ds = synthetic_store(1, 2, 1, "x" * 3500)
    ds["rho"][0, 3400, 1] = np.nan
    found = analyses.token_strip(ds, "rho")
    assert (found.sizes["token"], found.attrs["prompt_tokens"], int(found["token"][-1])) == (3000, 3500, 3499)
    assert found["skipped"].values.tolist() == [500] + [0] * 2999
    assert found.attrs["nonfinite"] == 1
    ds["token_text"][-1] = "y" * 4000
    assert analyses.token_strip(ds, "rho").sizes["token"] == 1


def test_strip_of_a_long_prompt_leaves_out_noise_far_from_any_role() -> None:
    ds = synthetic_store(1, 1, 1, "x" * 9000)
    ds["role"][50:60], ds["role"][4000:4010], ds["role"][8990:] = "question", "needle", "answer"
    found = analyses.token_strip(ds, "rho")
    assert found["token"].values.tolist() == [*range(180), *range(3880, 4130), *range(8870, 9000)]
    assert {int(x) for x in found["skipped"].values} == {0, 3700, 4740}
    ds["role"][:] = "needle"
    assert int(analyses.token_strip(ds, "rho")["token"][0]) == 6000


def test_strip_gives_the_quantile_that_its_colours_end_at() -> None:
    ds = synthetic_store(1, 1, 1)
    ds["rho"][0, 3, 0] = np.inf
    finite = np.abs(np.delete(ds["rho"].values[0, :, 0], 3))
    assert float(analyses.token_strip(ds, "rho")["top"]) == pytest.approx(np.quantile(finite, 0.99))


def test_strip_works_without_roles_and_only_with_complete_tokens() -> None:
    complete = np.arange(len(TEXT)) < 10
    found = analyses.token_strip(synthetic_store(1, 1, 1, complete=complete).drop_vars("role"), "rho")
    assert "".join(found["text"].values) == TEXT[:10]
    assert set(found["role"].values) == {""}
    with pytest.raises(StoreError, match="none complete in prompt 0"):
        analyses.token_strip(synthetic_store(1, 1, 2, complete=np.arange(2 * len(TEXT)) >= len(TEXT)), "rho")


@pytest.mark.parametrize("wrong", [{"prompt": 2}, {"prompt": -1}, {"layer": 5}, {"head": 3}])
def test_strip_names_a_place_that_is_not_there(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=f"found .*{next(iter(wrong.values()))}"):
        analyses.token_strip(synthetic_store(2, 3, 2), "rho", **wrong)


def test_strip_names_a_record_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="expected gamma"):
        analyses.token_strip(synthetic_store(), "gamma")


def test_summary_is_the_plain_mean_of_each_layer() -> None:
    ds = synthetic_store(2, 3, 3)
    found = analyses.summary(ds)
    x = {name: ds[name].values.astype(np.float64) for name in ds.data_vars if "token" in ds[name].dims}
    share = x["correction_norm"] / x["output_norm"]
    expected = {
        "rho": x["rho"],
        "rho_size": np.abs(x["rho"]),
        "eigenvalue": x["eigenvalue"],
        "correction_share": share,
        "correction_across": share * np.sqrt(1 - x["correction_cosine"] ** 2),
        "budget_decay": x["budget_decay"],
        "budget_delta": x["budget_delta"],
        "budget_erase": x["budget_erase"],
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.mean((1, 2)), rtol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found["eigenvalue_min"], x["eigenvalue"].min((1, 2)))
    np.testing.assert_array_equal(found["eigenvalue_max"], x["eigenvalue"].max((1, 2)))
    np.testing.assert_allclose(found["half_life"], np.log(0.5) / x["log_decay"].mean((1, 2)), rtol=1e-5)
    assert found["accuracy"].item() == pytest.approx(2 / 3)
    assert found["scored"].item() == 3


def test_summary_of_a_store_with_little_says_little() -> None:
    ds = synthetic_store(strength=0).drop_vars(["read_norm", "log_decay", "correct"])
    found = analyses.summary(ds)
    assert not {"correction_share", "half_life", "accuracy"} & set(found.data_vars)
    assert {"rho", "eigenvalue", "budget_decay"} <= set(found.data_vars)


def test_summary_counts_bad_values_and_scores_only_what_was_scored() -> None:
    ds = synthetic_store(2, 3, 2)
    ds["eigenvalue"][1, 8, 2] = np.nan
    ds["correct"][1] = np.nan
    found = analyses.summary(ds)
    assert np.isfinite(found["eigenvalue"]).all()
    assert found["nonfinite"].sel(source="eigenvalue").values.tolist() == [0, 1]
    assert (found["accuracy"].item(), found["scored"].item()) == (1, 1)
