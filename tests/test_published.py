"""The papers' numbers, typed here a second time; what they leave open stays open, and what disagrees stays apart."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from qed_probe.analyses import PUBLISHED, check_unmixed, published, published_accuracy
from qed_probe.analyses.statistics import binomial_interval
from qed_probe.errors import InputError, StoreError

K = 1024
QED_TABLE_3 = """
gdn2 0 100.0 99.0  93.4 64.4 21.8  9.4
qed  0 100.0 100.0 99.6 91.6 39.8 15.8
gdn2 1 100.0 95.6  79.2 50.6 21.2  6.0
qed  1 100.0 99.6  96.0 84.2 59.8 30.2
"""
QED_RECALL = """
gdn2 0 4.45 19.08 29.39
qed  0 7.80 21.51 29.29
gdn2 1 4.26 19.62 32.37
qed  1 7.99 19.62 32.21
"""
QED_TABLE_2 = """
gdn2              2.3714 2.3746
qed               2.3719 2.3735
qed-rand          2.3712 2.3735
qed-nogate        2.3718 2.3733
qed-nogate-noproj 2.3724 2.3741
"""
QED_TABLE_4 = """
-1   39.8 44.8
0    41.4 55.0
0.5  42.0 61.0
1    41.8 65.6
1.5  41.6 69.8
2    43.6 73.0
"""
EDA_DENSE = """
transformer 50.11 18.11 20.26 12.16 35.01 30.82 27.75
gdn         49.99 15.76 20.83 12.85 34.99 31.08 27.58
gdn2        49.90 15.84 21.40 13.56 35.18 32.95 28.14
kda         50.03 16.37 21.30 13.09 35.31 30.73 27.81
eda         49.27 16.04 23.90 13.54 35.42 32.50 28.44
"""
EDA_MOE = """
gdn 64.75 31.46 58.89 31.87 51.88 50.09 48.16
kda 63.84 33.14 58.61 30.78 51.87 51.60 48.31
eda 65.31 33.61 57.71 33.57 52.72 53.37 49.38
"""
EDA_TABLE_2 = """
gdn 67.43 40.55 75.93 45.94 64.25 50.09 57.37
kda 67.32 40.60 76.21 46.87 65.04 53.82 58.31
eda 68.12 41.71 75.99 49.28 65.81 51.78 58.45
"""
EDA_TABLE_3 = """
gdn 92.40 90.09 87.28 82.15 67.62 45.16 77.45
kda 93.33 89.29 85.13 79.66 72.00 42.70 77.02
eda 93.84 90.88 87.55 81.52 71.90 44.22 78.32
"""
NUMBERS = {
    "qed-table-2": 10, "qed-table-3": 24 + 5 + 12, "qed-table-4": 12, "qed-contrasts-8k": 8, "qed-lambda": 2, "qed-eigenvalue": 2,
    "eda-table-1": 56, "eda-table-2": 21, "eda-table-3": 21, "eda-figure-2a": 4, "eda-figure-2b": 8, "eda-figure-2c": 1,
}  # fmt: skip


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def test_qeds_tables() -> None:
    table = published("qed-table-3")
    for arm, seed, *cells in rows(QED_TABLE_3):
        found = table["accuracy"].sel(arm=arm, seed=int(seed), length=[K * 2**i for i in range(6)])
        assert found.values.tolist() == [float(x) for x in cells]
    for arm, seed, *cells in rows(QED_RECALL):
        found = table["recall"].sel(arm=arm, seed=int(seed), task=["fda", "swde", "squad_completion"])
        assert found.values.tolist() == [float(x) for x in cells]
    for arm, *cells in rows(QED_TABLE_2):
        assert published("qed-table-2")["loss"].sel(arm=arm, seed=[0, 1]).values.tolist() == [float(x) for x in cells]
    for s, *cells in rows(QED_TABLE_4):
        found = published("qed-table-4")["accuracy"].sel(strength=float(s), length=16 * K, seed=[0, 1])
        assert found.values.tolist() == [float(x) for x in cells]
    assert published("qed-lambda")["mean_lambda"].values.tolist() == [0.101, 0.120]
    assert published("qed-eigenvalue")["eigenvalue"].values.tolist() == [-0.011, 0.985]


def test_cells_of_other_arms_are_those_that_are_known() -> None:
    accuracy = published("qed-table-3")["accuracy"]
    without = accuracy.sel(arm="qed-nogate-noproj", seed=1)
    assert without.sel(length=[4 * K, 8 * K, 16 * K, 32 * K]).values.tolist() == [42.2, 17.2, 44.2, 29.8]
    assert float(accuracy.sel(arm="qed-rand", seed=1, length=16 * K)) == 47.0
    others = accuracy.sel(arm=["qed-rand", "qed-nogate", "qed-nogate-noproj"])
    assert int(np.isfinite(others).sum()) == 5
    assert np.isnan(published("qed-table-3")["recall"].sel(arm="qed-nogate")).all()
    assert np.isnan(published("qed-table-4")["accuracy"].sel(length=[4 * K, 8 * K, 32 * K])).all()


def test_contrasts_at_8k() -> None:
    found = published("qed-contrasts-8k")["difference"].sel(length=8 * K).transpose("panel", "seed")
    expected = [[27.2, 33.6], [25.6, 2.2], [40.4, -3.4], [-39.8, 70.4], [np.nan, np.nan]]
    np.testing.assert_array_equal(found.values, expected)
    pairs = list(zip(found["first"].values, found["second"].values, strict=True))
    assert pairs[0] == ("qed", "gdn2")
    assert pairs[3] == ("qed-nogate", "qed-nogate-noproj")
    assert found["panel"].values.tolist() == [f"{first} − {second}" for first, second in pairs]
    at = published("qed-table-3")["accuracy"].sel(length=8 * K)
    np.testing.assert_allclose(at.sel(arm="qed") - at.sel(arm="gdn2"), expected[0])


@pytest.mark.parametrize(
    ("name", "where", "text"),
    [
        ("eda-table-1", {"size": "dense-2.5B"}, EDA_DENSE),
        ("eda-table-1", {"size": "moe-25B-A2.8B"}, EDA_MOE),
        ("eda-table-2", {}, EDA_TABLE_2),
        ("eda-table-3", {}, EDA_TABLE_3),
    ],
)
def test_edas_tables(name: str, where: dict[str, str], text: str) -> None:
    table = published(name).sel(where)
    for arm, *cells in rows(text):
        assert [*table["score"].sel(arm=arm).values, float(table["average"].sel(arm=arm))] == [float(x) for x in cells]


def test_printed_averages_follow_from_the_cells_but_for_one() -> None:
    off = {}
    for name, dim in (("eda-table-1", "benchmark"), ("eda-table-2", "benchmark"), ("eda-table-3", "length")):
        table = published(name)
        apart = table["score"].mean(dim) - table["average"]
        off[name] = [round(float(x), 2) for x in apart.values.flat if abs(x) > 0.0101]
    assert off == {"eda-table-1": [], "eda-table-2": [0.33], "eda-table-3": []}
    assert "58.78" in published("eda-table-2").attrs["remark"]


def test_edas_figure() -> None:
    share = published("eda-figure-2a")["share"]
    assert share.sel(retention="all", operator=["decay", "delta", "erase"]).values.tolist() == [35.4, 31.8, 32.8]
    assert float(share.sel(retention="ᾱ ≥ 0.9", operator="erase")) == 69.1
    assert int(np.isnan(share).sum()) == 2
    b = published("eda-figure-2b").sel(direction=["actual", "random", "shuffled heads", "same address"])
    assert b["ratio"].values.tolist() == [0.064, 0.143, 0.115, 0.223]
    assert b["bar"].values.tolist() == [1.0, 2.4, 1.9, 3.4]
    assert float(published("eda-figure-2c")["address_cosine"]) == 0.105


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_table_says_where_it_stands_and_what_is_open(name: str, tmp_path: Path) -> None:
    table = published(name)
    assert table.attrs["published"] == 1
    assert ("2608.13668v1" if name.startswith("qed") else "2606.26560v1") in table.attrs["source"]
    assert all(table.attrs[key] for key in ("place", "page", "unit"))
    assert all(x.attrs["units"] == table.attrs["unit"] for x in table.data_vars.values())
    finite = [np.isfinite(x.values) for x in table.data_vars.values()]
    assert sum(int(x.sum()) for x in finite) == NUMBERS[name]
    assert (table.attrs["gaps"] == "none") == all(x.all() for x in finite)
    table.to_netcdf(tmp_path / "table.nc")


def test_every_file_has_a_name() -> None:
    found = {path.name.removesuffix(".json") for path in (files("qed_probe.data") / "published").iterdir()}
    assert found == set(PUBLISHED)
    for name in PUBLISHED:
        text = (files("qed_probe.data") / "published" / f"{name}.json").read_text("utf-8")
        assert json.loads(text)["published"] is True
    with pytest.raises(InputError, match=r"a published dataset among qed-table-2, .*; found 'qed-table-5'"):
        published("qed-table-5")


def test_accuracy_is_counts_of_500() -> None:
    table = published_accuracy()
    assert table["accuracy"].dims == ("run", "length")
    run = table.isel(run=((table["arm"] == "qed") & (table["seed"] == 1)).values).squeeze("run")
    assert run["correct"].values.tolist() == [500, 498, 480, 421, 299, 151]
    np.testing.assert_allclose(run["accuracy"], run["correct"] / 500)
    low, high = binomial_interval(run["correct"].values.astype(int), 500)
    np.testing.assert_array_equal(run["low"], low)
    np.testing.assert_array_equal(run["high"], high)
    gap = np.isnan(table["accuracy"].values)
    assert int((~gap).sum()) == 29
    assert (table["samples"].values == np.where(gap, 0, 500)).all()
    assert all((np.isnan(table[name].values) == gap).all() for name in ("correct", "low", "high"))
    assert table.attrs["trained_length"] == 2048
    assert np.isnan(table["lambda_max"].values).tolist() == (table["arm"] == "gdn2").values.tolist()


def test_tables_that_disagree_are_not_joined() -> None:
    with pytest.raises(StoreError, match=r"tables that agree, found qed-table-3 and qed-table-4\. At s = 1 .*65\.6 .*59\.8 %"):
        published("qed-table-3", "qed-table-4")
    with pytest.raises(StoreError, match="found average, score in eda-table-1 and eda-table-2"):
        published("eda-table-1", "eda-table-2")
    with pytest.raises(StoreError, match="tables that agree"):
        check_unmixed(published("qed-table-4"), published_accuracy())
    joined = published("qed-table-2", "qed-table-3")
    assert set(joined.data_vars) == {"loss", "accuracy", "recall"}
    assert joined.attrs["place"] == "Table 2; Table 3"
    with pytest.raises(StoreError, match="tables that agree"):
        check_unmixed(joined, published("qed-table-4"))


def test_published_and_measured_are_not_mixed() -> None:
    measured = xr.Dataset({"accuracy": ("length", [1.0])})
    with pytest.raises(StoreError, match=r"alone, found qed-table-3 \(published\) beside measured ones"):
        check_unmixed(measured, published_accuracy())
    check_unmixed(measured, measured)
    check_unmixed(published("qed-contrasts-8k"), published_accuracy())
    check_unmixed()
