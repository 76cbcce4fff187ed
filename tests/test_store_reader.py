"""Stores as plain xarray: without a warning, lazily, several as one, masked where incomplete."""

import json
import warnings
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest
import xarray as xr
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import reader, schema, writer
from tests import store_run
from tests.test_store_kill import check_complete_part


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_BLOCK", store_run.BLOCK)


def write(
    path: Path,
    lengths: tuple[int, ...] = store_run.LENGTHS,
    packs_at_most: int | None = None,
    **attrs: Any,  # noqa: ANN401
) -> Path:
    with writer.create(path, store_run.make_layout(lengths, **attrs)) as out:
        store_run.trace(out, packs_at_most=packs_at_most)
        if packs_at_most is None:
            out.finish()
    return path


def test_plain_xarray_without_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds = xr.open_zarr(path)
        tree = xr.open_datatree(path, engine="zarr")
        assert (ds.role == "needle").values.tolist() == [t % 3 == 0 for t in range(775)]
        assert ds["token_text"].values[:2].tolist() == ["é0", "é1"]
    assert set(ds.coords) == {
        "layer", "token_id", "token_text", "position", "prompt_index", "role", "cu_seqlens", "mark_token", "length",
    }  # fmt: skip
    assert ds.sel(layer=3)["lambda"].values.tolist() == [1.0, 2.0]
    assert set(tree.children) == {"inputs", "states"}
    assert {"token_id", "role", "cu_seqlens"} <= set(tree["inputs"].coords)
    assert ds["prompt_index"].values[[0, 69, 70, 774]].tolist() == [0, 0, 1, 8]
    assert ds["position"].values[[0, 69, 70, 774]].tolist() == [0, 69, 0, 89]


def test_what_was_written_is_what_the_schema_says(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    layout = store_run.make_layout()
    for group in ("", "inputs", "states"):
        ds = xr.open_zarr(path, group=group, chunks=None)
        for name, array in ds.data_vars.items():
            row = schema.VARIABLES[f"{group}/{name}" if group else str(name)]
            assert array.dims == row.dims
            assert array.dtype == row.dtype
            assert (array.attrs["long_name"], array.attrs["units"]) == (row.long_name, row.units)
            assert array.shape == tuple(layout.sizes[dim] for dim in row.dims)


def test_open_is_lazy_and_right(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    ds = reader.open(path)
    assert ds.attrs["complete"] == 1
    assert bool(ds["complete"].all())
    assert "done" not in ds
    for name in ("rho", "read", "state_norm", "nll"):
        assert isinstance(ds[name].data, dask.array.Array)
    assert ds["rho"].data.chunks[1][0] == 64
    check_complete_part(ds)
    check_complete_part(reader.open_inputs(path), "inputs")
    check_complete_part(reader.open_states(path), "states")


def test_incomplete_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", packs_at_most=3)  # packs end at 79, 210, 275: blocks of 64 are done up to 256
    with pytest.warns(reader.IncompleteStoreWarning, match=r"a\.zarr: 256 of 775 tokens are complete") as caught:
        ds = reader.open(path)
    assert [warning.filename for warning in caught] == [__file__]
    assert ds.attrs["complete"] == 0
    assert ds["complete"].values.tolist() == [True] * 256 + [False] * 519
    check_complete_part(ds)
    # The fifth prompt (210 to 274) reaches into a block that is not done, though its outcome was written.
    raw = xr.open_zarr(path)["correct"].values
    assert np.isfinite(raw[4])
    assert np.isnan(ds["correct"].values[4])
    assert ds["read"].dtype == np.float16
    assert ds["rho"].attrs["units"] == "1"
    with pytest.warns(reader.IncompleteStoreWarning):
        check_complete_part(reader.open_inputs(path), "inputs")


def test_several_stores_are_one(tmp_path: Path) -> None:
    first, second = (5, 70), (130, 1, 64)
    one = write(tmp_path / "one.zarr", first)
    two = write(tmp_path / "two.zarr", second)
    ds = reader.open(one, two)
    a, b = reader.open(one), reader.open(two)
    assert ds["cu_seqlens"].values.tolist() == [0, 5, 75, 205, 206, 270]
    assert ds["prompt_index"].values.tolist() == np.repeat(range(5), [*first, *second]).tolist()
    np.testing.assert_array_equal(ds["mark_token"], schema.mark_tokens(np.array([*first, *second])))
    assert ds["length"].values.tolist() == [*first, *second]
    for name, dim in (("rho", "token"), ("read", "token"), ("state_norm", "mark"), ("correct", "prompt"), ("nll", "token")):
        parts = [x[name].values for x in (a, b)]
        np.testing.assert_array_equal(ds[name].values, np.concatenate(parts, ds[name].dims.index(dim)))
        assert isinstance(ds[name].data, dask.array.Array)
    np.testing.assert_array_equal(ds["lambda"], a["lambda"])
    assert ds.attrs["complete"] == 1
    assert "prompts_digest" not in ds.attrs
    assert ds.attrs["mixer"] == "eda-qed"
    part = write(tmp_path / "part.zarr", packs_at_most=1)
    with pytest.warns(reader.IncompleteStoreWarning):
        joined = reader.open(one, part)
    assert joined.attrs["complete"] == 0
    assert joined["complete"].values.sum() == 75 + 64


def test_inputs_and_states_of_several_stores_are_one(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.zarr", (5, 70)), write(tmp_path / "two.zarr", (130, 1, 64))
    inputs = reader.open_inputs(one, two)
    parts = [reader.open_inputs(path)["k"].values for path in (one, two)]
    np.testing.assert_array_equal(inputs["k"], np.concatenate(parts, 1))
    assert inputs["prompt_index"].values[[74, 75]].tolist() == [1, 2]
    assert inputs.attrs["mixer"] == "eda-qed"
    states = reader.open_states(one, two)
    assert states["snapshot_token"].values.tolist() == [5, 74, 75 + 5, 75 + 194]
    parts = [reader.open_states(path)["state"].values for path in (one, two)]
    np.testing.assert_array_equal(states["state"], np.concatenate(parts, 1))
    half = write(tmp_path / "half.zarr", (5, 9), strength=0.5)
    with pytest.raises(StoreError, match="do not belong together: strength"):
        reader.open_states(one, half)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    one = write(tmp_path / "one.zarr", (5,))
    half = write(tmp_path / "half.zarr", (5,), strength=0.5)
    with pytest.raises(StoreError, match=r"one\.zarr and .*half\.zarr do not belong together: strength is 1.0 and 0.5"):
        reader.open(one, half)
    head = write(tmp_path / "head.zarr", (5,), strength=0.5, at="0:1")
    with pytest.raises(StoreError, match=r"half\.zarr and .*head\.zarr do not belong together: at is all and 0:1"):
        reader.open(half, head)
    writer.create(tmp_path / "few.zarr", store_run.make_layout(names=("rho",))).close()
    with pytest.raises(StoreError, match=r"together: only the first has correct, .*, token_text$"), pytest.warns():
        reader.open(one, tmp_path / "few.zarr")
    with pytest.raises(StoreError, match=r"none\.zarr: expected a qed-probe store, found nothing there"):
        reader.open(tmp_path / "none.zarr")
    zarr.create_group(tmp_path / "foreign.zarr")
    (tmp_path / "file").write_text("{}")
    for name in ("foreign.zarr", "file", "."):
        with pytest.raises(StoreError, match="found something else"):
            reader.open(tmp_path / name)
    with pytest.raises(StoreError, match="at least one"):
        reader.open()
    metadata = json.loads((one / "zarr.json").read_text())
    metadata["attributes"]["qed_probe_schema"] = 2
    (one / "zarr.json").write_text(json.dumps(metadata))
    with pytest.raises(StoreError, match="expected schema version 1, found 2; a newer qed-probe reads it"):
        reader.open(one)


def test_lost_bounds_of_prompts_are_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    next(file for file in (path / "cu_seqlens").iterdir() if file.name != "zarr.json").unlink()
    with pytest.raises(StoreError, match=rf"^{path}: expected prompts from token 0 to \d+, found -1 to -1"):
        reader.open(path)


def test_no_metadata_of_all_groups_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    described = json.loads((path / "zarr.json").read_text("utf-8"))
    del described["consolidated_metadata"]
    (path / "zarr.json").write_text(json.dumps(described), "utf-8")
    with pytest.raises(StoreError, match=rf"^{path}: expected a whole trace store, found one that cannot be read: "):
        reader.open(path)


def test_the_same_store_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "again").symlink_to(write(tmp_path / "a.zarr"))
    with pytest.raises(StoreError, match=r"expected stores that differ, found .*again twice"):
        reader.open(tmp_path / "a.zarr", tmp_path / "again")


def test_groups_that_were_not_asked_for(tmp_path: Path) -> None:
    layout = store_run.make_layout(names=("rho",))
    writer.create(tmp_path / "a.zarr", layout).close()
    with pytest.raises(StoreError, match="expected group inputs, found none; a trace with save_inputs keeps it"):
        reader.open_inputs(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match="expected group states, found none; a trace with state_at keeps it"):
        reader.open_states(tmp_path / "a.zarr")


@pytest.fixture(params=["one", "several", "golden", "incomplete"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> xr.Dataset:
    match request.param:
        case "golden":
            return reader.open(Path(__file__).parent / "golden" / "v1.zarr")
        case "incomplete":
            with pytest.warns(reader.IncompleteStoreWarning):
                return reader.open(write(tmp_path / "part.zarr", packs_at_most=3))
    paths = [write(tmp_path / f"{i}.zarr") for i in range(1 if request.param == "one" else 2)]
    return reader.open(*paths)


def test_records_are_lazy_and_coordinates_are_not(opened: xr.Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert {name for name, x in opened.variables.items() if x.chunks is None} == {*opened.coords}
    assert opened["role"].values.astype(str).dtype.kind == "U"
    monkeypatch.setattr(reader, "IN_MEMORY", 774)
    assert reader.open(write(tmp_path / "beyond.zarr"))["role"].chunks is not None


def test_records_are_grouped_by_role(opened: xr.Dataset) -> None:
    found = opened["rho"].groupby("role").mean().compute().transpose("role", "layer", "head")
    role, rho = opened["role"].values, opened["rho"].values
    for name in found["role"].values:
        np.testing.assert_allclose(found.sel(role=name), np.nanmean(rho[:, role == name], 1), rtol=1e-5, atol=1e-6)
    assert set(found["role"].values.tolist()) == set(role.tolist())


def test_tokens_of_a_role_are_kept(opened: xr.Dataset) -> None:
    for name in ("needle", "noise"):
        kept = opened[["rho", "nll"]].where(opened["role"] == name, drop=True)
        np.testing.assert_array_equal(kept["rho"], opened["rho"].values[:, opened["role"].values == name])


def test_records_go_to_netcdf(opened: xr.Dataset, tmp_path: Path) -> None:
    opened[["rho"]].to_netcdf(tmp_path / "rho.nc")
    with xr.open_dataset(tmp_path / "rho.nc") as back:
        xr.testing.assert_equal(back["rho"], opened["rho"].compute())
        assert back.attrs["mixer"] == opened.attrs["mixer"]


def test_attributes_of_older_stores_are_as_the_new_ones(tmp_path: Path) -> None:
    """Early stores of schema 1 have a table of versions and a list of variables."""
    old, new = write(tmp_path / "old.zarr"), write(tmp_path / "new.zarr")
    metadata = json.loads((old / "zarr.json").read_text())
    metadata["attributes"] |= {
        "variables": metadata["attributes"]["variables"].split(", "),
        "versions": {"torch": "2.11", "zarr": "3"},
    }
    (old / "zarr.json").write_text(json.dumps(metadata))
    assert reader.open(old).attrs["versions"] == "torch 2.11, zarr 3"
    assert reader.open(old, new).sizes["token"] == 2 * 775
    with writer.resume(old, store_run.make_layout(versions={"torch": "2.11", "zarr": "3"})) as out:
        assert out.first_token == 775
