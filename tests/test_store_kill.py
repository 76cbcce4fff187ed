"""kill -9 at any moment: the store opens, what it marks is right, and a resumed run ends bit for bit as an undisturbed one."""

import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from qed_probe.store import reader, schema, writer
from tests import store_run

ROOT = Path(__file__).parents[1]


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def written(path: Path) -> int:
    """How many files the store has by now."""
    return sum(len(files) for _, _, files in os.walk(path))


def check_complete_part(ds: xr.Dataset, group: str = "") -> None:
    """Every value is the formula's where its token (all tokens of its prompt) is complete, and NaN elsewhere."""
    layout = store_run.make_layout()
    complete, marks = ds["complete"].values, schema.mark_tokens(layout.lengths)
    whole = np.array([complete[a:b].all() for a, b in zip(layout.cu_seqlens, layout.cu_seqlens[1:], strict=False)])
    for name, array in ds.data_vars.items():
        key = f"{group}/{name}" if group else str(name)
        dims = schema.VARIABLES[key].dims
        if key == "lambda":
            continue
        if dims[0] == "layer":
            places, keep = {
                "token": (np.arange(len(complete)), complete),
                "mark": (marks, complete[marks]),
                "snapshot": (layout.snapshots, complete[layout.snapshots]),
            }[dims[1]]
            for i, layer in enumerate(layout.layers):
                expected = store_run.value(key, layer, places, store_run.shape_of(layout, key))
                expected[~keep] = np.nan
                np.testing.assert_array_equal(array.values[i], expected, err_msg=key)
        else:
            keep = whole if dims == ("prompt",) else complete
            expected = store_run.value(key, 0, np.arange(len(keep)), ())
            np.testing.assert_array_equal(array.values, np.where(keep, expected, np.nan), err_msg=key)
    if not group:
        assert ds["token_text"].values.tolist() == [f"é{t}" if c else "" for t, c in enumerate(complete)]


def test_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_BLOCK", store_run.BLOCK)
    rng = random.Random(0)
    undisturbed = tmp_path / "undisturbed.zarr"
    with writer.create(undisturbed, store_run.make_layout()) as out:
        store_run.trace(out)
        out.finish()
    expected = contents(undisturbed)
    path = tmp_path / "run.zarr"
    kills, seen = 0, set()
    while kills < 12:
        process = subprocess.Popen([sys.executable, "-m", "tests.store_run", str(path)], stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        # By its progress, not by the clock: a busy machine writes slowly.
        last = rng.randint(written(path), len(expected))
        while process.poll() is None and written(path) < last:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        kills += process.wait() == -9
        process.stdout.close()
        if not path.exists():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", reader.IncompleteStoreWarning)
            ds = reader.open(path)
            check_complete_part(ds)
            check_complete_part(reader.open_inputs(path), "inputs")
            check_complete_part(reader.open_states(path), "states")
        seen.add(int(ds["complete"].sum()))
        if ds.attrs["complete"]:
            assert contents(path) == expected
            shutil.rmtree(path)
    assert len(seen) > 2, "the kills came at too few different moments to mean anything"
    store_run.main(path)
    assert contents(path) == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.zarr", "undisturbed.zarr"]
