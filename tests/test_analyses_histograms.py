"""Bounds against optimisation, histograms against plain NumPy, and the walk over blocks against itself."""

import numpy as np
import pytest
import xarray as xr
from numpy.typing import NDArray
from scipy.optimize import minimize

from qed_probe import analyses
from qed_probe.analyses import blocks
from qed_probe.errors import InputError, StoreError
from tests.synthetic_store import synthetic_store

ALL = (
    analyses.eigenvalues,
    analyses.rho,
    analyses.rho_read,
    analyses.correction_share,
    analyses.half_life,
    analyses.gate_budgets,
    analyses.summary,
)


@pytest.mark.parametrize(
    ("mixer", "gate_max", "lam", "low", "high"),
    [
        ("qed", 1, 0.25, 0, 1),
        ("qed", 2, 0.25, -1, 1),
        ("qed-rand", 1, 0.25, 0, 1),
        ("qed-nogate", 1, 0.25, 0, 1),
        ("gdn2", 2, 0, -1, 1),
        ("eda-qed", 1, 0.25, 0, 1),
        ("qed-nogate-noproj", 1, 0.25, -0.25, 1.25),
        ("qed-nogate-noproj", 2, 0.25, -1.25, 1.25),
        ("qed-noproj", 1, 0.25, -0.25, 1 + 0.25**2 / 4),
        ("qed-noproj", 2, -0.5, -2, 1.125),
        ("qed-noproj", 1, 3, -3, 3),
        ("linear", 1, 0, 1, 1),
        ("comba", 1, 0, -np.inf, 1),
    ],
)
def test_bounds_are_those_of_the_papers(mixer: str, gate_max: float, lam: float, low: float, high: float) -> None:
    assert analyses.eigenvalue_bounds(mixer, gate_max, lam) == pytest.approx((low, high))


@pytest.mark.parametrize("mixer", ["gdn2", "qed", "qed-nogate", "qed-nogate-noproj", "qed-noproj"])
@pytest.mark.parametrize(("gate_max", "lam"), [(1.0, 0.25), (2.0, 0.4), (1.0, 2.6)])
def test_no_input_passes_the_bounds_and_the_best_input_reaches_them(mixer: str, gate_max: float, lam: float) -> None:
    def eigenvalue(x: NDArray[np.float64], sign: float) -> float:
        q, k, b = x[:3] / np.linalg.norm(x[:3]), x[3:6] / np.linalg.norm(x[3:6]), gate_max * (0.5 + 0.5 * np.sin(x[6:]))
        d = q if "nogate" in mixer else b * q
        d = d if "noproj" in mixer else d - k * (k @ d)
        return sign * float(1 - (b * k + (0 if mixer == "gdn2" else lam) * d) @ k)

    low, high = analyses.eigenvalue_bounds(mixer, gate_max, lam)
    starts = np.random.default_rng(1).normal(size=(12, 9))
    found = [sign * float(minimize(eigenvalue, start, args=(sign,)).fun) for start in starts for sign in (1.0, -1.0)]
    assert min(found) >= low - 1e-6
    assert max(found) <= high + 1e-6
    assert (min(found), max(found)) == pytest.approx((low, high), abs=1e-4)


def test_an_unknown_mixer_is_named() -> None:
    with pytest.raises(InputError, match="found 'mamba'"):
        analyses.eigenvalue_bounds("mamba", 1, 0)


def test_eigenvalues_are_counted_by_hand() -> None:
    e = np.full((2, 10, 1), 0.5, np.float32)
    e[0, :9, 0] = [0, 1, -0.01, -1.5, 1.05, 7, np.nan, np.inf, 0.999]
    found = analyses.eigenvalues(synthetic_store(2, 1, 1, "0123456789", records={"eigenvalue": e}))
    layer = found.sel(record="eigenvalue", layer=0)
    counts = {name: int(layer[name]) for name in ("n", "below_zero", "above_one", "beyond_one", "outside_theory", "outside_bins")}
    assert counts == {"n": 8, "below_zero": 2, "above_one": 2, "beyond_one": 3, "outside_theory": 4, "outside_bins": 2}
    assert (float(layer["minimum"]), float(layer["maximum"])) == (-1.5, 7)
    edges, bins = found["edges"].values, layer["counts"].values
    assert bins[np.searchsorted(edges, 0.01) - 1] == 1
    assert bins[np.searchsorted(edges, 0.99) - 1] == 2
    assert bins.sum() == 6
    assert found["nonfinite"].sel(source="eigenvalue").values.tolist() == [2, 0]
    assert found["first_nonfinite"].sel(source="eigenvalue").values.tolist() == [0, 6, 0]
    assert found["first_nonfinite"].sel(source="eigenvalue_unit").values.tolist() == [-1, -1, -1]
    assert found["counts"].attrs["units"] == "count"


def test_each_layer_has_the_bounds_of_its_strongest_head() -> None:
    ds = synthetic_store(2, 2, 1, mixer="qed-nogate-noproj")
    ds["lambda"] = ("layer", "head"), np.array([[0.1, 0.25], [0.0, -0.5]], np.float32)
    found = analyses.eigenvalues(ds)
    np.testing.assert_allclose(found["low"], [-0.25, -0.5])
    np.testing.assert_allclose(found["high"], [1.25, 1.5])


def test_rho_is_numpys_histogram() -> None:
    ds = synthetic_store(3, 2, 2)
    found = analyses.rho(ds)
    for i in range(3):
        x = ds["rho"].values[i].astype(float)
        np.testing.assert_array_equal(found["counts"][i], np.histogram(x, np.linspace(-1, 1, 101))[0])
        assert int(found["negative"][i]) == (x < 0).sum()
        assert float(found["mean"][i]) == pytest.approx(x.mean(), rel=1e-6)


def test_rho_of_vectors_that_are_not_unit_is_all_inside() -> None:
    found = analyses.rho(synthetic_store(1, 1, 1, "ab", records={"rho": [[[-40.0], [3.0]]]}))
    assert found["edges"].values[[0, -1]].tolist() == [-40, 40]
    assert int(found["counts"].sum()) == 2


def test_joint_counts_every_pair_once() -> None:
    read = np.array([0, 1e-9, 0.5, 1, 2, np.nan], np.float32)[None, :, None]
    rho = np.array([0.1, 0.1, -0.5, 0.5, 1, 0], np.float32)[None, :, None]
    found = analyses.rho_read(synthetic_store(1, 1, 1, "abcdef", records={"rho": rho, "read_norm": read}))
    assert [int(found[name][0]) for name in ("n", "zero", "zero_first", "below")] == [5, 1, 1, 1]
    counts = found["counts"].values[0]
    assert counts.sum() == 3
    assert counts[-1, -1] == 1  # ρ = 1 with the largest read
    assert counts[:24].sum() == 1  # the one negative ρ
    assert found["read_edges"].values[[0, -1]] == pytest.approx([2e-6, 2])


def test_a_store_whose_direction_reads_nothing_still_counts() -> None:
    found = analyses.rho_read(synthetic_store(1, 2, 1, records={"read_norm": 0}))
    assert int(found["zero"].sum()) == int(found["n"].sum()) > 0
    assert int(found["counts"].sum()) == 0


@pytest.mark.parametrize("analysis", ALL)
def test_blocks_and_dask_change_no_count(analysis: analyses.Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = synthetic_store(2, 3, 3)
    whole = analysis(ds)
    monkeypatch.setattr(blocks, "BLOCK", 50)
    split = analysis(ds.chunk({"token": 64}))
    xr.testing.assert_allclose(split, whole, rtol=1e-6)
    assert split.attrs == whole.attrs


@pytest.mark.parametrize("analysis", ALL)
def test_incomplete_tokens_are_left_out_and_counted(analysis: analyses.Analysis) -> None:
    ds = synthetic_store(2, 3, 2)
    length = ds.sizes["token"] // 2
    first = analysis(synthetic_store(2, 3, 2).isel(token=slice(0, length)))
    complete = np.arange(2 * length) < length
    masked = ds.assign_coords(complete=("token", complete))
    masked = masked.assign({name: x.where(masked["complete"]) for name, x in ds.data_vars.items() if "token" in x.dims})
    found = analysis(masked)
    xr.testing.assert_allclose(found.drop_vars("accuracy", errors="ignore"), first.drop_vars("accuracy", errors="ignore"))
    assert (found.attrs["tokens"], found.attrs["tokens_incomplete"]) == (length, length)
    assert int(found["nonfinite"].sum()) == 0


def test_places_count_from_the_packed_tokens_of_the_whole_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 16)
    ds = synthetic_store(2, 3, 1).assign_coords(layer=[4, 9])
    ds["rho"][1, 100, 2] = np.nan
    ds["rho"][0, 101, 0] = np.inf
    found = analyses.rho(ds)
    assert found["first_nonfinite"].sel(source="rho").values.tolist() == [9, 100, 2]
    assert found["nonfinite"].sel(source="rho", layer=4).item() == 1


def test_what_is_missing_is_named() -> None:
    with pytest.raises(StoreError, match="without read_norm"):
        analyses.rho_read(synthetic_store().drop_vars("read_norm"))
    with pytest.raises(StoreError, match="none complete"):
        analyses.rho(synthetic_store(complete=False))
