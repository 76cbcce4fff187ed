"""One record of several traces: hand-made differences come out as they were put in, intervals as a slow loop has them."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import QuadMesh
from numpy.typing import NDArray
from scipy import stats

import qed_probe as qp
from qed_probe.analyses import blocks, bootstrap_interval, quantiles, record_contrast, record_quantiles
from qed_probe.errors import InputError, StoreError
from qed_probe.figures import draw_record_contrast, draw_record_quantiles
from tests.drawn import check_words, texts
from tests.synthetic_store import TEXT, synthetic_store

LENGTH = len(TEXT)


def store(prompts: int = 4, layers: int = 2, heads: int = 3, digest: str = "aa", **attrs: Any) -> xr.Dataset:  # noqa: ANN401
    ds = synthetic_store(layers, heads, prompts)
    tokens = np.arange(ds.sizes["token"], dtype=np.int32) % 256
    attrs = {"checkpoint_digest": digest, "checkpoint": f"runs/{digest}", "dtype": "float32"} | attrs
    return ds.assign_coords(token_id=("token", tokens)).copy(deep=True).assign_attrs(attrs)


def shifted(ds: xr.Dataset, by: float | NDArray[np.float64], **attrs: Any) -> xr.Dataset:  # noqa: ANN401
    """The same trace with ρ in steps of 1/64, and ρ moved ``by``: sums of both are exact."""
    ds["rho"][:] = np.round(ds["rho"].values * 64) / 64
    other = ds.copy(deep=True).assign_attrs(attrs)
    other["rho"][:] = ds["rho"].values + by
    return other


def test_a_constant_shift_is_found_exactly_with_an_interval_of_no_width() -> None:
    first = store()
    second = shifted(first, 0.25, strength=0.5)
    found = record_contrast(first, second, "rho")
    for name in ("difference", "low", "high"):
        assert found[name].dims == ("layer", "head")
        assert (found[name] == 0.25).all()
    np.testing.assert_allclose(found["first_mean"], first["rho"].mean("token"), rtol=1e-5)
    np.testing.assert_allclose(found["second_mean"] - found["first_mean"], 0.25)
    assert (found["n"] == 4 * LENGTH).all()
    assert found.attrs["prompts"] == 4
    assert found.attrs["tokens"] == 4 * LENGTH
    assert found.attrs["subject"] == "Mixer qed: strength 0.5 minus strength 1"
    assert record_contrast(second, first, "rho")["difference"].values == pytest.approx(-0.25)
    alone = shifted(second, 0, at="0:1")
    assert record_contrast(second, alone, "rho").attrs["subject"] == "Mixer qed: at 0:1 minus at all"


def test_heads_that_change_places_are_told_apart() -> None:
    first = store()
    second = shifted(first, 0, backend="triton")
    second["rho"][:] = second["rho"].values[..., [2, 0, 1]]
    found = record_contrast(first, second, "rho")
    means = first["rho"].astype(float).mean("token").values
    np.testing.assert_allclose(found["difference"], means[:, [2, 0, 1]] - means, atol=1e-12)
    quantile = record_quantiles([first, second], "rho")
    assert (quantile["difference"] == 0).all()


@pytest.mark.parametrize("prompts", [2, 5])
def test_the_interval_is_what_a_slow_loop_over_tokens_finds(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    first = store(prompts)
    second = shifted(first, rng.normal(0.1, 0.3, first["rho"].shape))
    second["rho"][1, 5:60, 2] = np.nan  # the prompts' counts differ
    for size in (4096, 100):  # a prompt may lie across blocks
        monkeypatch.setattr(blocks, "BLOCK", size)
        found = record_contrast(first, second, "rho")
        off = second["rho"].values.astype(float) - first["rho"].values
        for layer, head in np.ndindex(2, 3):
            by_prompt = [[x for x in part if np.isfinite(x)] for part in np.split(off[layer, :, head], prompts)]
            expected = slow_interval(by_prompt)
            assert [float(found[name][layer, head]) for name in ("low", "high")] == pytest.approx(expected)
            assert float(found["difference"][layer, head]) == pytest.approx(np.mean(list(itertools.chain(*by_prompt))))


def slow_interval(by_prompt: Sequence[Sequence[float]]) -> list[float]:
    """Percentiles of means over all tokens of prompts that are drawn one draw after another."""
    rng, units = np.random.default_rng(0), len(by_prompt)
    means = []
    for _ in range(2000):
        times = rng.multinomial(units, [1 / units] * units)
        drawn = [x for prompt, count in zip(by_prompt, times, strict=True) for _ in range(count) for x in prompt]
        means.append(sum(drawn) / len(drawn))
    return [float(np.percentile(means, share)) for share in (2.5, 97.5)]


def test_the_bootstrap_agrees_with_scipys() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 30, 40)
    sums = rng.normal(1, 2, 40) * counts

    def ratio(total: NDArray[np.float64], n: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return np.asarray(total.sum(axis) / n.sum(axis))

    theirs = stats.bootstrap((sums, counts), ratio, paired=True, method="percentile", n_resamples=20_000, rng=1)
    low, high = bootstrap_interval(sums, counts, draws=20_000)
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert float(low) == pytest.approx(theirs.confidence_interval.low, abs=0.03 * width)
    assert float(high) == pytest.approx(theirs.confidence_interval.high, abs=0.03 * width)


def test_the_bootstrap_is_the_same_in_batches_and_leaves_empty_cells_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    counts = np.stack([np.full(7, 3), np.zeros(7), np.eye(7)[2], [1, 0, 0, 1, 0, 0, 0]], 1)
    sums = rng.normal(size=(7, 4)) * counts
    whole = bootstrap_interval(sums, counts)
    monkeypatch.setattr("qed_probe.analyses.statistics.BATCH", 64)
    np.testing.assert_array_equal(bootstrap_interval(sums, counts), whole)
    assert np.isfinite(whole).tolist() == [[True, False, False, True]] * 2
    with pytest.raises(InputError, match="level: expected a share between 0 and 1, found 1"):
        bootstrap_interval(sums, counts, level=1)


def test_one_prompt_has_no_interval_and_says_so() -> None:
    first = store(1)
    found = record_contrast(first, shifted(first, 0.5), "rho")
    assert (found["difference"] == 0.5).all()
    assert found[["low", "high"]].isnull().all().to_array().all()
    assert found.attrs["interval"] == "none: fewer than two prompts"
    assert "No intervals: fewer than two prompts." in texts(draw_record_contrast(found)).replace("\n", " ")


def test_what_is_not_finite_or_not_complete_is_left_out_and_counted() -> None:
    first = store(3)
    second = shifted(first, 0.25)
    first["rho"][0, 7, 1] = np.inf
    second["rho"][0, 7, 1] = np.inf
    second["rho"][1, LENGTH + 2, 0] = np.nan
    complete = np.arange(3 * LENGTH) < 2 * LENGTH
    second["rho"][:, 2 * LENGTH :] = np.nan
    found = record_contrast(first, second.assign_coords(complete=("token", complete)), "rho")
    assert (found["difference"] == 0.25).all()
    assert (found["n"] == 2 * LENGTH - np.array([[0, 1, 0], [1, 0, 0]])).all()
    assert found["nonfinite"].values.tolist() == [[1, 0], [1, 1]]
    assert found["first_nonfinite"].values.tolist() == [[0, 7, 1]] * 2
    assert (found.attrs["prompts"], found.attrs["tokens"], found.attrs["tokens_incomplete"]) == (2, 2 * LENGTH, LENGTH)


def test_only_layers_that_both_have_are_compared() -> None:
    first = store(2, layers=3)
    second = shifted(first, np.arange(3)[:, None, None] / 4.0).isel(layer=[2, 1])
    found = record_contrast(first, second, "rho")
    assert found["layer"].values.tolist() == [1, 2]
    np.testing.assert_array_equal(found["difference"], [[0.25] * 3, [0.5] * 3])


def test_a_role_can_be_contrasted_alone() -> None:
    first = store(3)
    needle = (first["role"] == "needle").values
    second = shifted(first, 0.5 * needle[:, None])
    assert (record_contrast(first.isel(token=needle), second.isel(token=needle), "rho")["difference"] == 0.5).all()


def test_traces_that_cannot_be_contrasted_are_refused() -> None:
    first, second = store(), store()
    with pytest.raises(StoreError, match="one checkpoint, found checkpoint_digest aa and bb; between checkpoints only quantiles"):
        record_contrast(first, store(digest="bb"), "rho")
    with pytest.raises(StoreError, match="found checkpoint_digest none and none"):
        record_contrast(first.drop_attrs(), second.drop_attrs(), "rho")
    with pytest.raises(StoreError, match="the second trace: expected the record rho, found a store without it"):
        record_contrast(first, second.drop_vars("rho"), "rho")
    vector = first.assign(read=first["rho"].expand_dims(value=4))
    with pytest.raises(InputError, match="read: expected a scalar record with dims layer, token, head, found value, layer"):
        record_contrast(vector, vector, "read")
    with pytest.raises(StoreError, match="a layer in common"):
        record_contrast(first, second.assign_coords(layer=[8, 9]), "rho")
    none = np.zeros(first.sizes["token"], bool)
    with pytest.raises(StoreError, match="complete in both traces, found none of"):
        record_contrast(first, second.assign_coords(complete=("token", none)), "rho")
    with pytest.raises(StoreError, match="same tokens, found token_id of"):
        record_contrast(first, store(3), "rho")
    second["token_id"][9] = 999
    with pytest.raises(StoreError, match="token_id to differ first at 9"):
        record_contrast(first, second, "rho")


@pytest.mark.parametrize("tokens", [1, 2, 63, 1000])
def test_quantiles_are_numpys_to_the_bit_of_the_values(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 64)
    rng = np.random.default_rng(tokens)
    x = (rng.normal(size=(4, tokens, 3)) * 10.0 ** rng.integers(-40, 38, (4, tokens, 3))).astype(np.float32)
    x[1] = np.round(rng.normal(size=x[1].shape))  # ties, zeros of both signs
    x[2, : tokens // 2] = [np.nan, np.inf, -np.inf]
    x[3] = np.nan
    levels = (0.0, 0.01, 0.3, 0.5, 0.99, 1.0)
    found, folded = quantiles.layer_quantiles(xr.Dataset({"rho": (("layer", "token", "head"), x)}), "rho", levels)
    assert found[3] == pytest.approx(np.nan, nan_ok=True)
    for row, values, n in zip(found[:3], x.astype(float), folded["n"], strict=False):
        finite = values[np.isfinite(values)]
        assert n == finite.size
        np.testing.assert_allclose(row, np.quantile(finite, levels), rtol=1e-14)


def test_keys_are_ordered_as_values_and_lead_back() -> None:
    x = np.array([-np.float32(3e38), -1, -1e-45, -0.0, 0, 1e-45, 1, 3e38], np.float32)
    keys = quantiles.to_keys(x)
    assert (np.diff(keys) > 0).all()
    assert keys.min() >= 0
    assert keys.max() < 1 << 32
    np.testing.assert_array_equal(quantiles.from_keys(keys).view(np.int32), x.view(np.int32))


def test_quantiles_differ_from_the_first_stores_where_layers_and_tokens_are_the_same() -> None:
    first, other, short = store(), store(3, digest="cc"), store(digest="dd").isel(layer=[1])
    second = shifted(first, 0.5, checkpoint_digest="bb", checkpoint="runs/bb", mixer="gdn2")
    second["rho"][0, 4, 1] = np.nan
    found = record_quantiles([first, second, other, short], "rho")
    assert found["quantile"].dims == ("store", "layer", "level")
    assert found["store"].values.tolist() == ["aa", "bb", "cc", "dd"]
    assert found["mixer"].values.tolist() == ["qed", "gdn2", "qed", "qed"]
    assert found["same_tokens"].values.tolist() == [True, True, False, True]
    np.testing.assert_allclose(found["difference"][1, 1], 0.5)
    assert (found["difference"][0] == 0).all()
    assert found["difference"][2].isnull().all()
    assert found["difference"][3].isnull().all("level").values.tolist() == [True, False]
    assert found["n"].values.tolist() == [[12 * LENGTH] * 2, [12 * LENGTH - 1, 12 * LENGTH], [9 * LENGTH] * 2, [0, 12 * LENGTH]]
    assert found["nonfinite"].values[..., 0, :].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert found["first_nonfinite"].values[1, 0].tolist() == [0, 4, 1]
    assert found["prompts"].values.tolist() == [4, 4, 3, 4]
    np.testing.assert_allclose(found["quantile"][0, 0], np.quantile(first["rho"][0].astype(float), found["level"]))


def test_traces_of_one_checkpoint_are_named_by_what_differs() -> None:
    first = store()
    others = [store(strength=0.0), store(dtype="bfloat16"), store(digest="bb")]
    names = record_quantiles([first, *others], "rho")["store"].values.tolist()
    assert names == ["aa, strength 1, dtype float32", "aa, strength 0, dtype float32", "aa, strength 1, dtype bfloat16", "bb"]
    alike = [store(checkpoint="a/final"), store(digest="bb", checkpoint="b/final")]
    assert record_quantiles(alike, "rho")["store"].values.tolist() == ["final (1)", "final (2)"]


def test_stores_whose_quantiles_say_nothing_are_refused() -> None:
    first = store()
    for twice in (first, store()):
        with pytest.raises(StoreError, match=r"found aa \(1\) and aa \(2\) to be the same run twice"):
            record_quantiles([first, twice], "rho")
    with pytest.raises(InputError, match="one trace or more, found none"):
        record_quantiles([], "rho")
    with pytest.raises(StoreError, match="bb: expected the record rho, found a store without it"):
        record_quantiles([first, store(digest="bb").drop_vars("rho")], "rho")
    for levels in ((), (0.5, 0.5), (0.2, 1.1), (np.nan,)):
        with pytest.raises(InputError, match="levels: expected shares that increase from 0 to 1"):
            record_quantiles([first], "rho", levels)


def test_the_map_shows_differences_and_marks_what_excludes_zero() -> None:
    first = store(12)
    by = np.zeros((2, 1, 3))
    by[0, 0, 1], by[1, 0, 2] = 0.25, -0.5
    second = shifted(first, by, strength=0.0)
    second["rho"][1, :, 0] = np.nan
    found = record_contrast(first, second, "rho")
    figure = draw_record_contrast(found)
    panel = figure.axes[0]
    (mesh,) = panel.findobj(QuadMesh)
    np.testing.assert_array_equal(np.ma.filled(np.ma.asarray(mesh.get_array()), np.nan).reshape(2, 3), found["difference"])
    assert mesh.get_clim() == (-0.5, 0.5)
    dots = sorted((round(line.get_ydata()[0]), int(line.get_xdata()[0])) for line in panel.lines)  # type: ignore[index, arg-type]
    assert dots == [(0, 1), (1, 2)]
    words = texts(figure).replace("\n", " ")
    assert "excludes 0, 2 of 5 cells" in words
    assert "mean over tokens of 12 prompts" in words
    assert {"NaN", "+0.25", "−0.5"} <= set(words.split())
    assert "too narrow" not in words
    check_words(figure)


def test_the_quantiles_are_drawn_as_they_are() -> None:
    first, second = store(), store(digest="bb").isel(layer=[1])
    found = record_quantiles([first, second], "log_decay")
    figure = draw_record_quantiles(found)
    (panel,) = figure.axes
    bars = np.array([[x.get_y(), x.get_y() + x.get_height()] for x in panel.patches])  # type: ignore[attr-defined]
    q = found["quantile"].values
    expected = [q[0][:, [0, 4]], q[0][:, [1, 3]], q[1][1:, [0, 4]], q[1][1:, [1, 3]]]
    np.testing.assert_allclose(bars, np.concatenate(expected))
    medians = [np.asarray(line.get_ydata()) for line in panel.lines]
    np.testing.assert_array_equal(medians, q[..., 2])
    assert "bars: 5–95 %, 25–75 %; line: median" in texts(figure).replace("\n", " ")
    check_words(figure)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 8), (24, 16)])
def test_figures_of_any_size_can_be_read(layers: int, heads: int) -> None:
    first = store(2, layers, heads)
    second = shifted(first, 1e-5 * np.arange(heads, dtype=float), strength=0.5)
    for record in ("rho", "log_decay"):
        check_words(draw_record_contrast(record_contrast(first, second, record)))
        check_words(draw_record_quantiles(record_quantiles([first, second], record)))
    check_words(draw_record_quantiles(record_quantiles([first], "rho", levels=(0.1, 0.9))))


def test_real_traces_at_two_strengths(tmp_path: Path) -> None:
    prompts = [
        qp.Prompt(np.frombuffer(text * 4, np.uint8).astype(np.int64)) for text in (b"the grass is green ", b"the sky is blue ")
    ]
    full, none = (qp.trace(None, prompts, tmp_path / f"{s:g}.zarr", strength=s) for s in (1.0, 0.0))
    found = record_contrast(full, none, "correction_norm")
    np.testing.assert_allclose(found["difference"], -full["correction_norm"].mean("token"), rtol=1e-5)
    assert (found["high"] < 0).all()
    assert (record_contrast(full, none, "rho")["difference"][0] == 0).all()  # the first layer's q and k do not depend on λ
