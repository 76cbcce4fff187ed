"""Tables of outcomes: what is written is read back bit for bit, whole or not at all; what is no such table is refused."""

import asyncio
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import outcomes, place, reader, writer
from qed_probe.store.outcomes import check_outcomes, export_outcomes, make_outcomes, open_outcomes, save_outcomes
from tests import store_run
from tests.test_store_kill import contents

TEXTS = ["4711", "", "naïve 日本 🜁", "ends in NUL\0", 'a "quoted"\nline\u2028', " 4711"]


def table(count: int = 6, **columns: object) -> xr.Dataset:
    """A table whose values are the hard ones: infinite, denormal, NaN, −0, text of any kind."""
    losses = np.resize([0.5, math.nan, math.inf, 5e-324, -0.0, 1 / 3], count)
    given: dict[str, object] = {
        "model": "checkpoints/qed-é", "arm": "qed", "seed": 3, "lambda_max": 0.25, "task": "niah",
        "length": np.resize([512, 16384], count), "index": np.arange(count),
        "fingerprint": np.resize([-(2**63), 2**63 - 1, 0], count), "depth": np.resize([0, 1, math.nan, 0.3], count),
        "answer": np.resize(np.array(TEXTS, object), count), "prediction": np.resize(np.array(TEXTS[::-1], object), count),
        "correct": np.arange(count) % 3 == 0, "loss": losses, "answer_loss": losses[::-1], "trained_length": 512,
    }  # fmt: skip
    return make_outcomes(given | columns, {"created_by": "qed-probe evaluate", "versions": "zarr 3, torch 2"})


def without(ds: xr.Dataset, *names: str) -> xr.Dataset:
    return ds.drop_vars([*names])


def tokens(**columns: object) -> xr.Dataset:
    """Validation loss alone: a task without an answer."""
    return make_outcomes(
        {"model": "m", "arm": "qed", "task": "tokens", "length": 512, "index": [0, 1], "fingerprint": 1} | columns
    )


@pytest.mark.parametrize("made", [table, lambda: table(1), tokens], ids=["all", "one sample", "no answers"])
def test_a_table_comes_back_as_it_was(tmp_path: Path, made: Callable[[], xr.Dataset]) -> None:
    ds = made()
    save_outcomes(ds, tmp_path / "a.zarr")
    again = open_outcomes(tmp_path / "a.zarr")
    xr.testing.assert_identical(again, ds)
    for name in ds.data_vars:
        assert again[name].dtype == ds[name].dtype
        if ds[name].dtype == float:
            assert again[name].values.tobytes() == ds[name].values.tobytes()
    assert [*again.data_vars] == [name for name in outcomes.VARIABLES if name in ds]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.zarr"]


def test_what_is_unknown_says_so() -> None:
    ds = tokens()
    assert "correct" not in ds
    assert np.isnan(ds["loss"].values).all()
    assert (ds["seed"].values.tolist(), ds["strength"].values.tolist(), ds["trained_length"].values.tolist()) == (
        [-1, -1],
        [1, 1],
        [0, 0],
    )


def test_numbers_of_another_kind_are_not_cut_to_fit() -> None:
    assert tokens(index=np.array([0, 1], np.uint8), loss=np.array([0.5, 1], np.float32))["index"].dtype == np.int64
    with pytest.raises(StoreError, match="expected length as int64, found float64"):
        tokens(length=512.5)
    with pytest.raises(StoreError, match="expected correct as bool, found int64"):
        table(correct=[0, 1, 2, 0, 0, 0])
    with pytest.raises(StoreError, match="found also steps"):
        table(steps=3)


def test_plain_xarray_reads_it_without_a_warning(tmp_path: Path) -> None:
    save_outcomes(table(), tmp_path / "a.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ds = xr.open_zarr(tmp_path / "a.zarr")
        assert ds["answer"].values.tolist() == TEXTS
    assert ds.attrs["schema"] == "qed-probe outcomes"
    assert ds.attrs["schema_version"] == 1
    assert ds["loss"].attrs["units"] == "nat"


def test_174_000_samples_are_a_few_megabytes(tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), 174_000
    answers = rng.integers(10**6, 10**7, (2, n)).astype(str).astype(object)
    ds = table(
        n, answer=answers[0], prediction=answers[1], loss=rng.random(n).astype(np.float32), fingerprint=rng.integers(0, 2**62, n)
    )
    save_outcomes(ds, tmp_path / "a.zarr")
    assert sum(map(len, contents(tmp_path / "a.zarr").values())) < 6e6


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ds: without(ds, "length", "loss"), "the variables of outcomes, found no length, loss$"),
        (lambda ds: without(ds, "answer"), r"found no answer \(answer, prediction, correct are there together or not at all\)"),
        (lambda ds: without(ds, "answer", "prediction"), "found no answer, prediction"),
        (lambda ds: ds.assign(extra=ds["loss"]), "found also extra"),
        (lambda ds: ds.assign(index=ds["index"].astype("int32")), "expected index as int64, found int32"),
        (lambda ds: ds.assign(correct=ds["correct"].astype(float)), "expected correct as bool, found float64"),
        (lambda ds: ds.assign(loss=ds["loss"].astype("float32")), "expected loss as float64, found float32"),
        (
            lambda ds: ds.assign(answer=("sample", np.array([*"abc", 4, *"ef"], object))),
            "sample 3: expected answer to be Unicode text, found 4",
        ),
        (
            lambda ds: ds.assign(model=("sample", np.array(["\ud800"] * 6))),
            r"sample 0: expected model to be Unicode text, found '\\ud800'",
        ),
        (lambda ds: ds.assign(length=ds["length"] - 513), "sample 0: expected length ≥ 0, found -1"),
        (lambda ds: ds.assign(seed=ds["seed"] * 0 - 2), "sample 0: expected seed ≥ -1, found -2"),
        (lambda ds: ds.assign(depth=ds["depth"] * 3), r"sample 1: expected depth within 0 and 1, or NaN, found 3\.0"),
        (lambda ds: ds.assign(strength=ds["strength"] * math.inf), "sample 0: expected strength finite, found inf"),
        (lambda ds: ds.assign(loss=ds["loss"].mean()), r"expected loss along sample alone, found \(\)"),
        (lambda ds: ds.isel(sample=slice(0)), "expected at least one sample, found none"),
        (lambda ds: ds.isel(sample=[0, 1, 5, 1]), "samples 1 and 3: .* once, found model .*qed-é, .* index 1 twice"),
        (
            lambda ds: ds.isel(sample=[0, 2, 0]).assign(lambda_max=("sample", [math.nan] * 3)),
            r"samples 0 and 2: .*lambda_max nan, task niah, length 512, strength 1\.0, .*index 0 twice",
        ),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(tmp_path: Path, spoil: Callable[[xr.Dataset], xr.Dataset], message: str) -> None:
    ds = spoil(table())
    for act in (
        check_outcomes,
        lambda x: save_outcomes(x, tmp_path / "a.zarr"),
        lambda x: export_outcomes(x, tmp_path / "a.jsonl"),
    ):
        with pytest.raises(StoreError, match=message):
            act(ds)
    assert [*tmp_path.iterdir()] == []


def test_the_same_sample_under_another_strength_is_another() -> None:
    check_outcomes(table(2, length=512, index=7, strength=[0.0, 1.0]))
    check_outcomes(table(2, length=512, index=7, lambda_max=[0.25, math.nan]))


def test_several_stores_are_one_table(tmp_path: Path) -> None:
    for seed in range(3):
        ds = table(seed=seed, model=f"run{'0' * seed}").assign_attrs(command=f"evaluate --seed {seed}")
        save_outcomes(ds, tmp_path / f"{seed}.zarr")
    paths = [tmp_path / f"{seed}.zarr" for seed in range(3)]
    ds = open_outcomes(paths)
    assert ds["seed"].values.tolist() == np.repeat(range(3), 6).tolist()
    assert ds["prediction"].values.tolist() == TEXTS[::-1] * 3
    assert ds["model"].values[-1] == "run00"
    assert ds["correct"].dtype == bool
    assert ds["index"].dtype == np.int64
    assert set(ds.attrs) == {"schema", "schema_version", "created_by", "versions"}
    check_outcomes(ds)
    save_outcomes(ds, tmp_path / "all.zarr")
    xr.testing.assert_identical(open_outcomes(tmp_path / "all.zarr"), ds)


def test_stores_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / f"{name}.zarr" for name in "abcd")
    save_outcomes(table(), a)
    save_outcomes(table(seed=4), b)
    save_outcomes(table(1, index=3, length=16384), c)
    save_outcomes(tokens(), d)
    with pytest.raises(StoreError, match=rf"^{a} and {c} do not belong together: both have the sample model .* index 3$"):
        open_outcomes([a, b, c])
    with pytest.raises(StoreError, match=rf"^{b} and {d} do not belong together: the first has answers, the second has none$"):
        open_outcomes([d, b])
    with pytest.raises(StoreError, match=f"expected stores that differ, found {a} twice"):
        open_outcomes([a, b, a])
    with pytest.raises(StoreError, match="at least one store of outcomes"):
        open_outcomes([])
    save_outcomes(tokens(seed=1), tmp_path / "e.zarr")
    assert "correct" not in open_outcomes([d, tmp_path / "e.zarr"])


def make_trace(path: Path) -> None:
    with writer.create(path, store_run.make_layout()) as out:
        store_run.trace(out)
        out.finish()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (make_trace, "a trace store"),
        (lambda path: path.write_text("{}"), "a file"),
        (lambda path: path.mkdir(), "a directory that is no store"),
        (lambda path: zarr.create_group(path, attributes={"schema": "another"}), "another zarr group"),
    ],
)  # fmt: skip
def test_anything_else_at_the_path_is_refused(tmp_path: Path, make: Callable[[Path], Any], found: str) -> None:
    path = tmp_path / "a.zarr"
    make(path)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=rf"^{path}: expected a store of outcomes, found {found}$"):
        open_outcomes(path)
    with pytest.raises(
        StoreError, match=rf"^{path}: expected nothing there, found {found}; overwrite replaces a store of outcomes$"
    ):
        save_outcomes(table(), path)
    with pytest.raises(StoreError, match=rf"^{path}: expected a store of outcomes, found {found}$"):
        save_outcomes(table(), path, overwrite=True)
    assert contents(tmp_path) == before


def test_nothing_there_and_no_place_to_write(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected a store of outcomes, found nothing there"):
        open_outcomes(tmp_path / "none.zarr")
    with pytest.raises(StoreError, match="writing failed: No such file or directory"):
        save_outcomes(table(), tmp_path / "none" / "a.zarr")
    with pytest.raises(StoreError, match="writing failed: No such file or directory"):
        export_outcomes(table(), tmp_path / "none" / "a.jsonl")
    with pytest.raises(StoreError, match="found a directory"):
        export_outcomes(table(), tmp_path)


def test_no_trace_reader_takes_it(tmp_path: Path) -> None:
    save_outcomes(table(), tmp_path / "a.zarr")
    with pytest.raises(StoreError, match=r"expected a qed-probe store .* found something else: a store of outcomes"):
        reader.open(tmp_path / "a.zarr")


def test_a_damaged_store_is_refused(tmp_path: Path) -> None:
    path, chunk = tmp_path / "a.zarr", tmp_path / "a.zarr" / "answer" / "c" / "0"
    save_outcomes(table(), path)
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=rf"^{path}: expected a whole store of outcomes, found one that cannot be read"):
        open_outcomes(path)
    chunk.unlink()
    with pytest.raises(StoreError, match=r"expected the values of every variable, found none of answer$"):
        open_outcomes(path)
    chunk.write_bytes(whole)
    xr.testing.assert_identical(open_outcomes(path), table())


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    save_outcomes(table(), tmp_path / "a.zarr")
    zarr.open_group(tmp_path / "a.zarr").update_attributes({"schema_version": 2})
    with pytest.raises(StoreError, match="expected version 1 of outcomes, found 2; a newer qed-probe reads it"):
        open_outcomes(tmp_path / "a.zarr")


def test_an_existing_store_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_outcomes(table(), path)
    with pytest.raises(StoreError, match="expected nothing there, found a store of outcomes; overwrite"):
        save_outcomes(table(3), path)
    xr.testing.assert_identical(open_outcomes(path), table())
    save_outcomes(table(3), path, overwrite=True)
    xr.testing.assert_identical(open_outcomes(path), table(3))
    assert [file.name for file in tmp_path.iterdir()] == ["a.zarr"]


@pytest.mark.parametrize(
    ("step", "there"), [("write", False), ("write", True), ("rename", False), ("rename", True), ("replace", True)]
)
def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, there: bool) -> None:
    path = tmp_path / "a.zarr"
    if there:
        save_outcomes(table(), path)
    before = contents(tmp_path)
    full = OSError(28, "No space left on device")

    def fail(*_: object, **__: object) -> None:
        raise full

    def half(ds: xr.Dataset, root: Path) -> None:
        written(ds, root)
        (root / "answer" / "c" / "0").unlink()
        raise full

    written, rename = outcomes._write, Path.rename

    def between(self: Path, target: Path) -> Path:
        """The second rename of a replacement fails: at the path is nothing at that moment."""
        if self.name == ".a.zarr.new":
            raise full
        return rename(self, target)

    if step == "write":
        monkeypatch.setattr(outcomes, "_write", half)
    elif step == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(Path, "rename", between)
    with pytest.raises(StoreError, match="writing failed: No space left on device; what was there is as it was"):
        save_outcomes(table(3), path, overwrite=True)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    save_outcomes(table(3), path, overwrite=True)
    xr.testing.assert_identical(open_outcomes(path), table(3))


def test_killed_at_any_moment_one_of_the_two_is_there(tmp_path: Path) -> None:
    """A process replaces a store without end, by one of two tables in turn; after each kill one of them is read, whole."""
    path = tmp_path / "a.zarr"
    save_outcomes(table(5), path)
    program = (
        "import itertools, sys; from pathlib import Path; from tests.test_outcomes import save_outcomes, table\n"
        "print('ready', flush=True)\n"
        "for n in itertools.cycle([4, 5]): save_outcomes(table(n), Path(sys.argv[1]), overwrite=True)"
    )
    rng = np.random.default_rng(0)
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.1, 0.4))
        process.kill()
        process.wait()
        process.stdout.close()
        ds = open_outcomes(path)
        xr.testing.assert_identical(ds, table(ds.sizes["sample"]))
    save_outcomes(table(3), path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a.zarr"]


def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, calls, main = zarr.storage.LocalStore.set, itertools.count(), threading.get_ident()

    async def interrupted(*given: Any) -> None:  # noqa: ANN401
        if next(calls) == 9:
            signal.pthread_kill(main, signal.SIGINT)
        await asyncio.sleep(0.02)
        await put(*given)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_outcomes(table(), tmp_path / "a.zarr")
    time.sleep(0.2)
    assert not [*tmp_path.iterdir()]


def test_a_replacement_stopped_between_its_renames_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    save_outcomes(table(), path)
    path.rename(place.sibling(path, "old"))
    xr.testing.assert_identical(open_outcomes(path), table())


def test_json_lines_hold_every_value(tmp_path: Path) -> None:
    path, ds = tmp_path / "a.jsonl", table()
    path.write_text("what was there")
    export_outcomes(ds, path)
    lines = path.read_bytes().decode().split("\n")
    assert len(lines) == 7
    assert lines[-1] == ""
    samples = [json.loads(line, parse_constant=pytest.fail) for line in lines[:-1]]
    for name in ds.data_vars:
        for sample, value in zip(samples, ds[name].values.tolist(), strict=True):
            expected = value
            if isinstance(value, float) and not math.isfinite(value):
                expected = "Infinity" if value > 0 else None
            assert sample[name] == expected
            assert type(sample[name]) is type(expected)
    assert "日本" in lines[2]
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("what was there")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        export_outcomes(table(), path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.jsonl", "what was there")]


def test_a_link_is_followed_and_its_target_replaced(tmp_path: Path) -> None:
    save_outcomes(table(), tmp_path / "real.zarr")
    os.symlink(tmp_path / "real.zarr", tmp_path / "link.zarr")
    save_outcomes(table(3), tmp_path / "link.zarr", overwrite=True)
    assert (tmp_path / "link.zarr").is_symlink()
    assert open_outcomes(tmp_path / "real.zarr").sizes["sample"] == 3
    shutil.rmtree(tmp_path / "real.zarr")
    assert not (tmp_path / "link.zarr").exists()
