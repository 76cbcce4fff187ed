"""What the writer refuses, what it leaves alone, and how much it holds."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from qed_probe.errors import StoreError
from qed_probe.store import layout as layouts
from qed_probe.store import place, reader, schema, writer
from qed_probe.store.layout import Layout
from tests import store_run
from tests.test_store_kill import ROOT, contents


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_BLOCK", store_run.BLOCK)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    path = tmp_path / "run.zarr"
    with writer.create(path, store_run.make_layout()) as out:
        store_run.trace(out)
        out.finish()
    return path


def siblings(path: Path) -> list[str]:
    return sorted(file.name for file in path.parent.iterdir())


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        # 16 scalars a head: (24, 4096, 6) is 2.4 MB, the vectors' (1, 4096, 6, 128) float16 6.3 MB.
        ({"layer": 24, "head": 6, "key": 128, "value": 128, "edit": 1, "token": 10**6}, {"rho": 4096, "read": 4096}),
        # float32 (1, 1024, 6, 2, 128) is 6.3 MB; 2048 would be 12.6.
        ({"layer": 24, "head": 6, "key": 128, "value": 128, "edit": 2, "token": 10**6}, {"inputs/k": 1024}),
        ({"layer": 64, "head": 64, "key": 128, "value": 128, "edit": 1, "token": 10**6}, {"rho": 256}),
        ({"layer": 2, "head": 2, "key": 4, "value": 4, "edit": 1, "token": 70}, {"rho": 128}),
        ({"layer": 2, "head": 2, "key": 4, "value": 4, "edit": 1, "token": 1}, {"rho": 1}),
    ],
)
def test_block_size(sizes: dict[str, int], block: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_BLOCK", 4096)
    rows = tuple(schema.VARIABLES[key] for key in block)
    assert schema.block_tokens(rows, sizes) == min(block.values())
    for row in rows:
        assert np.prod(schema.chunks(row, sizes, min(block.values()))) * row.itemsize <= 8e6


def test_block_of_everything_fits_a_gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_BLOCK", 4096)
    sizes = {"layer": 96, "head": 16, "key": 128, "value": 128, "edit": 2, "token": 10**6}
    rows = tuple(schema.VARIABLES[f"inputs/{name}"] for name in ("q", "g", "d", "k", "a", "u", "o"))
    token = 96 * 16 * 128 * 4 * (4 + 3 * 2)  # bytes: q, g, d, o once and k, a, u for each edit
    assert schema.block_tokens(rows, sizes) == 128
    assert 128 * token <= 2**30 < 256 * token


def test_marks_by_hand() -> None:
    np.testing.assert_array_equal(schema.mark_tokens(np.array([1, 64, 65, 130])), [0, 64, 128, 129, 193, 257, 259])


def test_marks_are_counted_as_they_are_listed() -> None:
    layout = store_run.make_layout((1, 64, 65, 130))
    before = [layout.marks_before(token) for token in range(261)]
    assert before == np.searchsorted(schema.mark_tokens(layout.lengths), np.arange(261)).tolist()


@pytest.mark.parametrize("group", [1, 100, 200])
def test_prompts_are_laid_out_a_few_at_a_time(group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = store_run.make_layout()
    layout.lay_out(tmp_path / "whole")
    monkeypatch.setattr(layouts, "GROUP", group)
    layout.lay_out(tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len([*layout._groups()]) > 3


def test_chunk_files(finished: Path) -> None:
    layout = store_run.make_layout()
    assert layout.block == 64
    files = {str(file.relative_to(finished)): file.stat().st_size for file in finished.rglob("c.*")}
    blocks = -(-775 // 64)
    assert len([name for name in files if name.startswith("rho/")]) == blocks
    assert len([name for name in files if name.startswith("read/")]) == 2 * blocks
    assert len([name for name in files if name.startswith("done/")]) == blocks
    # No codec: a file is its chunk's bytes. Chunks that are all zero or NaN are there too.
    assert files["rho/c.0.0.0"] == 2 * 64 * 2 * 4
    assert files["read/c.1.12.0.0"] == 64 * 2 * 3 * 2
    assert {name.rsplit(".", 1)[-1] for name in files} != {"partial"}


def test_fill_chunks_are_written(tmp_path: Path) -> None:
    layout = store_run.make_layout(names=("rho",))
    with writer.create(tmp_path / "a.zarr", layout) as out:
        for layer in layout.layers:
            out.write("rho", np.full((775, 2), np.nan, np.float32), layer=layer, start=0)
        out.commit(775)
        out.finish()
    assert len(list((tmp_path / "a.zarr" / "rho").glob("c.*"))) == 13


def test_buffers_are_bounded(tmp_path: Path) -> None:
    layout = store_run.make_layout()
    with writer.create(tmp_path / "a.zarr", layout) as out:
        store_run.trace(out, packs_at_most=1)
        # One pack of 79 tokens: block 0 is written, what is held belongs to block 1 alone, one buffer a chunk.
        assert {block for _, _, block in out._buffers} == {1}
        held = sum(buffer.nbytes for buffer, _ in out._buffers.values())
        assert held <= sum(2 * 64 * 2 * 3 * 2 * 4 * 4 for _ in layout.names)
    with writer.create(tmp_path / "b.zarr", layout) as out:
        store_run.trace(out)
        assert out._buffers == {}
        assert out.first_token == 775
        out.finish()


def test_unwritten_variable_is_not_done(tmp_path: Path) -> None:
    layout = store_run.make_layout(names=("rho", "nll"))
    with writer.create(tmp_path / "a.zarr", layout) as out:
        out.write_tokens("nll", np.zeros(775), start=0)
        out.write("rho", np.zeros((775, 2)), layer=0, start=0)
        with pytest.raises(StoreError, match=r"block 0 cannot be done, expected all of rho to be written"):
            out.commit(775)
        with pytest.raises(StoreError, match=r"expected 775 tokens to be complete, found 0"):
            out.finish()


def test_float16_overflow_says_where(tmp_path: Path) -> None:
    values = np.zeros((79, 2, 3), np.float32)
    values[12, 1, 2] = 70000
    values[3, 0, 0] = np.inf
    with writer.create(tmp_path / "a.zarr", store_run.make_layout()) as out:
        with pytest.raises(StoreError, match=r"read: .*65504.*found 7e\+04 at layer 3, token 82, head 1"):
            out.write("read", values, layer=3, start=70)
        with pytest.raises(StoreError, match=r"read, layer 3, token 70: expected shape \(79, 2, 3\), found \(79, 2, 4\)"):
            out.write("read", np.zeros((79, 2, 4)), layer=3, start=70)


def test_one_writer_at_a_time(finished: Path) -> None:
    layout = store_run.make_layout()
    code = (
        "import pathlib, sys; import qed_probe.store.place as p; p.lock(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(finished)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        for attempt in (writer.resume, writer.create):
            with pytest.raises(StoreError, match="another process that is writing it"):
                attempt(finished, layout)
        other.kill()
    # The lock of a killed process is free, though its file is there.
    assert siblings(finished) == [".run.zarr.lock", "run.zarr"]
    with writer.resume(finished, layout), pytest.raises(StoreError, match="another process"):
        writer.resume(finished, layout)
    assert siblings(finished) == ["run.zarr"]


def test_refused_targets_are_untouched(finished: Path, tmp_path: Path) -> None:
    layout = store_run.make_layout()
    before = contents(finished)
    with pytest.raises(StoreError, match="found something; resume finishes a store, overwrite replaces it"):
        writer.create(finished, layout)
    other = store_run.make_layout(strength=0.5)
    with pytest.raises(StoreError, match=r"differ in strength \(expected 0.5, found 1.0\); what made the store: store_run$"):
        writer.resume(finished, other)
    with pytest.raises(StoreError, match=r"differ in prompts_digest"):
        writer.resume(finished, store_run.make_layout(lengths=(*store_run.LENGTHS[1:], 70)))
    assert contents(finished) == before
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "precious").write_text("x")
    file.write_text("y")
    zarr.create_group(tmp_path / "foreign.zarr")
    for target in (folder, file, tmp_path / "foreign.zarr"):
        with pytest.raises(StoreError, match="expected a qed-probe store"):
            writer.create(target, layout, overwrite=True)
        with pytest.raises(StoreError, match="expected a qed-probe store"):
            writer.resume(target, layout)
    assert (folder / "precious").read_text() == "x"
    assert file.read_text() == "y"
    with pytest.raises(StoreError, match="No such file or directory; nothing was created"):
        writer.create(tmp_path / "no" / "run.zarr", layout)
    with pytest.raises(StoreError, match="found nothing there"):
        writer.resume(tmp_path / "none.zarr", layout)
    assert siblings(finished) == ["file", "folder", "foreign.zarr", "run.zarr"]


def test_overwrite_replaces_only_when_complete(finished: Path) -> None:
    before = contents(finished)
    fresh = store_run.make_layout(lengths=(5, 70))
    with writer.create(finished, fresh, overwrite=True) as out:
        store_run.trace(out, packs_at_most=1)
        assert contents(finished) == before
    assert contents(finished) == before
    assert siblings(finished) == ["run.zarr"]
    with writer.create(finished, fresh, overwrite=True) as out:
        store_run.trace(out)
        assert contents(finished) == before
        out.finish()
    assert siblings(finished) == ["run.zarr"]
    assert reader.open(finished).sizes["token"] == 75


def test_stopped_between_the_renames(finished: Path) -> None:
    before = contents(finished)
    finished.rename(place.sibling(finished, "old"))
    place.sibling(finished, "new").mkdir()
    assert reader.open(finished).sizes["token"] == 775
    with writer.resume(finished, store_run.make_layout()) as out:
        assert out.first_token == 775
    assert contents(finished) == before
    with writer.create(finished, store_run.make_layout(), overwrite=True):
        finished.rename(place.sibling(finished, "old"))
    assert siblings(finished) == ["run.zarr"]
    assert contents(finished) == before


def test_resume_drops_what_is_done(tmp_path: Path) -> None:
    layout = store_run.make_layout()
    path = tmp_path / "a.zarr"
    with writer.create(path, layout) as out:
        store_run.trace(out, packs_at_most=2)
        assert out.first_token == 192  # packs end at 79 and 210
    done = {name: data for name, data in contents(path).items() if name in ("rho/c.0.0.0", "read/c.1.2.0.0")}
    with writer.resume(path, layout) as out:
        assert out.first_token == 192
        for layer in layout.layers:
            out.write("rho", np.full((775, 2), 5, np.float32), layer=layer, start=0)
    rho = xr.open_zarr(path)["rho"].values
    assert not (rho[:, :192] == 5).any()
    assert (rho[:, 192:] == 5).all()
    assert {name: data for name, data in contents(path).items() if name in done} == done


def test_optional_shapes(tmp_path: Path) -> None:
    """Vectors in float32, an edit axis on v and beta, and the state before each prompt."""
    names = ("read", "inputs/v", "inputs/beta", "inputs/initial_state")
    layout = replace(store_run.make_layout((70, 9), names), vectors="float32", edit_inputs=True)
    states = np.arange(2 * 2 * 4 * 3, dtype=np.float32).reshape(2, 2, 4, 3)
    with writer.create(tmp_path / "a.zarr", layout) as out:
        for layer in layout.layers:
            out.write("read", np.full((79, 2, 3), 70000.0), layer=layer, start=0)
            out.write("inputs/v", np.full((79, 2, 2, 3), layer), layer=layer, start=0)
            out.write("inputs/beta", np.full((79, 2, 2), layer), layer=layer, start=0)
            out.write_prompts("inputs/initial_state", states + layer, layer=layer, start=0)
        out.commit(79)
        out.finish()
    assert (reader.open(tmp_path / "a.zarr")["read"] == 70000).all()
    ds = reader.open_inputs(tmp_path / "a.zarr")
    assert ds["v"].dims == ("layer", "token", "head", "edit", "value")
    assert ds["beta"].sel(layer=3).values.tolist() == np.full((79, 2, 2), 3).tolist()
    np.testing.assert_array_equal(ds["initial_state"], np.stack([states, states + 3]))


@pytest.mark.parametrize("overwrite", [False, True])
def test_full_disk_is_one_line(finished: Path, overwrite: bool) -> None:
    """A limit on the size of a file, in a process of its own, fails a write as a full disk does."""
    path = finished if overwrite else finished.with_name("other.zarr")
    before = contents(finished)
    code = f"""
import resource
from tests import store_run
from qed_probe.store import schema, writer
schema.MAX_BLOCK = 64
with writer.create({str(path)!r}, store_run.make_layout(), overwrite={overwrite}) as out:
    store_run.trace(out, packs_at_most=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        store_run.trace(out)
    except Exception as error:
        print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert said.startswith(f"StoreError {path}: writing failed: File too large; ")
    assert said.count("\n") == 1
    if overwrite:
        assert said.endswith("the store that was to be replaced is as it was\n")
        assert siblings(path) == ["run.zarr"]
    else:
        assert said.endswith("64 of 775 tokens are complete, and resume goes on from there\n")
        with writer.resume(path, store_run.make_layout()) as out:
            store_run.trace(out)
            out.finish()
        assert contents(path) == before
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"names": ("rho", "rhoo", "layer")}, "found rhoo, layer"),
        ({"details": {"rho": np.zeros(9)}}, "expected details with names of their own, found rho"),
        ({"lengths": np.array([70])}, "found 9 prompts and 1 lengths from 70"),
        ({"lengths": np.zeros(9, int)}, "found 9 prompts and 9 lengths from 0"),
        ({"prompts": [], "lengths": np.empty(0, int)}, "found 0 prompts and 0 lengths"),
    ],
)
def test_layout_is_checked(change: dict[str, object], match: str) -> None:
    good = store_run.make_layout()
    with pytest.raises(StoreError, match=match):
        Layout(**{**{name: getattr(good, name) for name in good.__dataclass_fields__}, **change})
