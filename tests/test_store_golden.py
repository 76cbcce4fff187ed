"""The golden store of schema version 1 is read for ever: names, dims, values, coordinates and attributes."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from qed_probe.store import reader

GOLDEN = Path(__file__).parent / "golden" / "v1.zarr"
TOKEN = {
    "rho": (), "eigenvalue": (), "log_decay": (), "output_norm": (), "edit_eigenvalue": (("edit", 2),), "read": (("value", 4),),
}  # fmt: skip
INPUTS = {
    "q": (("key", 3),), "g": (("key", 3),), "o": (("value", 4),),
    "k": (("edit", 2), ("key", 3)), "a": (("edit", 2), ("key", 3)), "u": (("edit", 2), ("value", 4)),
}  # fmt: skip
MARKS, SNAPSHOTS = [63, 69, 79], [9, 79]


def check(array: xr.DataArray, dim: str, places: list[int], axes: tuple[tuple[str, int], ...]) -> None:
    """(100·layer + place)/64 − i/8, i counting over head and axes, one scalar at a time."""
    axes = (("head", 2), *axes)
    assert array.dims == ("layer", dim, *(name for name, _ in axes))
    assert array.shape == (2, len(places), *(n for _, n in axes))
    flat = array.values.reshape(2, len(places), -1)
    for at, layer in enumerate((0, 3)):
        for j, place in enumerate(places):
            for i in range(math.prod(n for _, n in axes)):
                assert flat[at, j, i] == (100 * layer + place) / 64 - i / 8


@pytest.fixture(scope="module")
def golden() -> xr.Dataset:
    return reader.open(GOLDEN)


@pytest.mark.parametrize("name", TOKEN)
def test_records(golden: xr.Dataset, name: str) -> None:
    check(golden[name], "token", list(range(80)), TOKEN[name])
    assert golden[name].dtype == (np.float16 if name == "read" else np.float32)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name: str) -> None:
    check(reader.open_inputs(GOLDEN)[name], "token", list(range(80)), INPUTS[name])


def test_marks_and_states(golden: xr.Dataset) -> None:
    check(golden["state_norm"], "mark", MARKS, ())
    states = reader.open_states(GOLDEN)
    check(states["state"], "snapshot", SNAPSHOTS, (("key", 3), ("value", 4)))
    assert states["snapshot_token"].values.tolist() == SNAPSHOTS


def test_coordinates_and_small_variables(golden: xr.Dataset) -> None:
    assert golden["layer"].values.tolist() == [0, 3]
    assert golden["token_id"].values.tolist() == [t % 64 + 32 for t in range(80)]
    assert "".join(golden["token_text"].values) == "".join(chr(t % 64 + 32) for t in range(80))
    assert golden["position"].values.tolist() == [*range(70), *range(10)]
    assert golden["prompt_index"].values.tolist() == [0] * 70 + [1] * 10
    assert golden["cu_seqlens"].values.tolist() == [0, 70, 80]
    assert golden["mark_token"].values.tolist() == MARKS
    assert golden["role"].values.tolist() == ["noise"] * 40 + ["needle"] * 30 + ["question"] * 6 + ["answer"] * 4
    assert golden["length"].values.tolist() == [70, 10]
    assert golden["depth"].values.tolist() == [0.25, 1]
    assert golden["correct"].values.tolist() == [1, 0]
    assert golden["lambda"].values.tolist() == [[0.125, 0.25], [0.5, 1]]
    expected = [math.nan if t in (0, 70) else t / 16 for t in range(80)]
    np.testing.assert_array_equal(golden["nll"], expected)


def test_attributes(golden: xr.Dataset) -> None:
    expected = {
        "qed_probe_schema": 1, "block_tokens": 128, "layers": [0, 3], "heads": 2, "key": 3, "value": 4, "edits": 2,
        "vectors": "float16", "mixer": "eda-qed", "checkpoint_digest": "golden", "dtype": "float32", "strength": 1.0,
        "gate_max": 1.0, "checkpoint": "golden", "command": "make_v1.py", "complete": True,
    }  # fmt: skip
    assert {name: golden.attrs[name] for name in expected} == expected
    assert golden["rho"].attrs["units"] == "1"
    assert golden["log_decay"].attrs["units"] == "1/token"


def test_plain_xarray_reads_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds = xr.open_zarr(GOLDEN)
    check(ds["rho"], "token", list(range(80)), ())
    assert ds["done"].values.tolist() == [1]
