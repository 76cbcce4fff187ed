"""``qed-probe memory``: its store, its tables and figures, exact weights of a trace, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import qed_probe as qp
from qed_probe import cli, figures
from qed_probe.analyses.source_strip import farthest_head, source_strip
from qed_probe.errors import InputError, StoreError
from tests.drawn import texts
from tests.test_tracing import make_checkpoint

Capture = pytest.CaptureFixture[str]


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, words)])
    return cli.main()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory") / "run.zarr"
    qp.trace(None, qp.niah_prompts(400, 2, seed=0), path, save_inputs=True, vectors="none")
    return path


@pytest.fixture(scope="module")
def table(run: Path) -> xr.Dataset:
    return qp.inspect_memory_store(run, only=["sources"])


def test_the_command_says_it_and_plot_draws_it(
    run: Path, table: xr.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "memory", run, "--only", "sources") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].split() == ["read", "by", "layer:head", "question", "noise", "needle", "answer", "last", "16", "tokens"]
    cell = table["share_role"].sel(probe="query", layer=0, head=0, role="needle")
    assert said[2].split()[:5][1:] == ["0:0", *said[2].split()[2:5]]
    assert said[2].split()[4] == f"{100 * float(cell):.1f}"
    assert qp.open_memory("memory.zarr").attrs["created_by"].startswith("qed-probe memory")
    assert call(monkeypatch, "info", "memory.zarr") == 0
    facts = {tuple(line.split(maxsplit=1)) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {("heads", "2 layers of 3"), ("mixer", "qed"), ("parts", "sources"), ("prompts", "2")} <= facts
    names = {path.stem for path in qp.plot("memory.zarr", "figures", formats=["png"])}
    assert names == {"sources", "sources-map", "sources-query", "sources-direction"}
    assert call(monkeypatch, "plot", "memory.zarr", "memory.zarr") == 2
    assert call(monkeypatch, "memory", run, "--only", "sources") == 2
    assert "memory.zarr: expected nothing there" in capsys.readouterr().err
    assert call(monkeypatch, "memory", run, "--only", "none", "--overwrite") == 2
    assert "only: expected some of sources" in capsys.readouterr().err
    assert call(monkeypatch, "memory", run, "--text", "x", "--overwrite") == 2
    assert "--text: expected with a checkpoint, found with the store" in capsys.readouterr().err


def test_texts_without_roles_and_of_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "memory", "--text", "a", "--text", "one and another", "--only", "sources") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:8]]
    assert [row[:3] for row in rows] == [["query", f"{layer}:{head}", "100.0"] for layer in (0, 1) for head in (0, 1, 2)]
    assert call(monkeypatch, "plot", "memory.zarr", "-o", "figures") == 0


def test_what_there_is_none_of_is_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A first token reads nothing by its direction, changes nothing and has no other token beside it."""
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "memory", "--text", "a", "--only", "sources, effects,recall") == 0
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "-0.0 " not in said
    assert ["direction", "0:0", "–", "–"] in [line.split() for line in said.splitlines()]
    assert call(monkeypatch, "plot", "memory.zarr", "-o", "figures") == 0
    strip = source_strip(qp.open_memory("memory.zarr"), "direction")
    assert strip.attrs["where"] == "layer 0, head 0, at the last token, which reads nothing"


def test_a_store_comes_back_and_is_never_overwritten_by_accident(table: xr.Dataset, tmp_path: Path) -> None:
    qp.save_memory(table, tmp_path / "m.zarr")
    xr.testing.assert_identical(qp.open_memory(tmp_path / "m.zarr"), table)
    with pytest.raises(StoreError, match="expected nothing there, found a store of memories; overwrite replaces"):
        qp.save_memory(table, tmp_path / "m.zarr")
    with pytest.raises(StoreError, match="expected a table of memories"):
        qp.save_memory(table.drop_vars("nonfinite"), tmp_path / "n.zarr")
    with pytest.raises(StoreError, match="expected a store of memories"):
        qp.open_memory(tmp_path)


def test_weights_of_a_trace_are_those_of_its_own_reads(run: Path) -> None:
    found = qp.read_weights(run, 1, 1, tokens=[0, 399])
    inputs, bounds = qp.open_inputs(run).sel(layer=1), [400, 800]
    u = inputs["u"].isel(token=slice(*bounds)).transpose("token", "head", "edit", "value").values
    y = inputs["o"].isel(token=[400, 799]).transpose("token", "head", "value").values / inputs.attrs["scale"]
    total = np.einsum("phjm,jhmv->phv", found["weight"].values, u)
    np.testing.assert_allclose(total, y, rtol=0, atol=1e-5 * np.abs(y).max())
    np.testing.assert_allclose(found["share"].sum("source"), 1, rtol=1e-4)
    assert found["weight"].dims == ("token", "head", "source", "edit")
    assert found.sizes["source"] == 400
    every = qp.read_weights(run, 1, 1)
    np.testing.assert_allclose(every["weight"].sel(token=399), found["weight"].sel(token=399), rtol=1e-4, atol=1e-6)


def test_a_direction_reads_nothing_of_an_empty_memory(run: Path) -> None:
    found = qp.read_weights(run, 0, probe="direction", tokens=[0, 1])
    assert (found["weight"].sel(token=0) == 0).all()
    assert np.isnan(found["share"].sel(token=0)).all()
    assert (found["weight"].sel(token=1).isel(source=0) != 0).all()


def test_what_is_not_there_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers: expected some of \[0, 1\], found \[7\]"):
        qp.read_weights(run, 7)
    with pytest.raises(InputError, match="prompt: expected a complete one of 2, counted from 0, found 2"):
        qp.read_weights(run, 0, 2)
    for tokens, found in (([3, 400], 400), ([], "none")):
        with pytest.raises(InputError, match=f"tokens: expected some from 0 to 399, found {found}"):
            qp.read_weights(run, 0, tokens=tokens)
    qp.trace(None, qp.text_prompts(["abc"], qp.ByteTokenizer()), tmp_path / "text.zarr", save_inputs=True)
    with pytest.raises(InputError, match="prompt: expected a complete one of 1, counted from 0, found 1"):
        qp.read_weights(tmp_path / "text.zarr", 0, 1)
    qp.trace(None, qp.text_prompts(["abc"], qp.ByteTokenizer()), tmp_path / "bare.zarr")
    with pytest.raises(StoreError, match="expected group inputs, found none"):
        qp.inspect_memory_store(tmp_path / "bare.zarr")


def test_the_figure_shows_the_tables_shares(table: xr.Dataset) -> None:
    bars = [bar for bar in figures.draw_sources(table).axes[0].patches if isinstance(bar, Rectangle)]
    drawn = sum(bar.get_width() for bar in bars if bar.get_y() < 0)  # the first row, with signs
    assert drawn == pytest.approx(1, abs=1e-5)
    needle = table["share_role"].sel(probe="query", layer=0, head=0, role="needle")
    assert any(bar.get_width() == pytest.approx(float(needle)) for bar in bars)


def test_the_strip_is_of_the_head_that_reads_farthest(table: xr.Dataset) -> None:
    assert farthest_head(table) == (0, 0)
    strip = source_strip(table, "query")
    assert "".join(strip["text"].values[-8:].tolist()) == "text is "
    np.testing.assert_array_equal(strip["value"], table["share_token"].sel(probe="query", layer=0, head=0))
    with pytest.raises(StoreError, match="found one without source_text"):
        source_strip(table.drop_vars("source_text"))
    with pytest.raises(StoreError, match="found one without share_lag"):
        farthest_head(table.drop_vars("share_lag"))


def drawn_only(figure: Figure, stem: Path, _: object) -> list[Path]:
    """In the place of ``gallery.files.save``: without a layout and without files, which take a second a figure."""
    figure.set_layout_engine("none")
    figure.draw_without_rendering()
    return [stem]


@pytest.mark.parametrize("mixer", ["qed", "kda", "linear", "deltaproduct"])
def test_every_part_has_its_table_and_its_figure(
    mixer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qed_probe.gallery.memory.save", drawn_only)
    make_checkpoint(tmp_path / "model", mixer)
    assert call(monkeypatch, "memory", "model", "--text", "one and another", "--text", "a third", "--text", "b") == 0
    said = capsys.readouterr().out
    heads = ["what the reads that predict", "how memories grow", "strict recall", "how full memories are"]
    assert [head in said for head in heads] == [True] * 4
    assert ("what the added direction does" in said) == (mixer == "qed")
    assert (f"No effects: {mixer} adds no direction." in said) == (mixer != "qed")
    assert "nan" not in said.lower().replace("nothing", "")
    names = {path.name for path in qp.plot("memory.zarr", "figures")}
    assert {"sources", "sources-map", "growth", "recall", "capacity"} <= names
    assert ("effects" in names) == (mixer == "qed")


def test_every_figure_says_what_was_changed_in_the_model() -> None:
    ds = qp.inspect_memory(None, qp.text_prompts(["one and another"], qp.ByteTokenizer()), strength=0.5)
    for draw in (figures.draw_sources, figures.draw_effects, figures.draw_growth, figures.draw_recall, figures.draw_capacity):
        assert "Mixer qed, strength 0.5" in texts(draw(ds))


def test_a_table_of_nothing_that_can_be_drawn_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "kda")
    ds = qp.inspect_memory(tmp_path / "model", qp.text_prompts(["abc"], qp.ByteTokenizer()), only=["effects"])
    with pytest.raises(StoreError, match="expected a table with a part that can be drawn, found effects of Mixer kda"):
        qp.plot(ds, tmp_path / "figures")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model", [None, "eda-tiny"])
def test_a_gpu_says_what_a_cpu_says(model: str | None) -> None:
    """Within what float32 in other kernels does to two layers of a trained model: 1e-3 of a variable's largest number."""
    prompts = qp.niah_prompts(512, 4, seed=0)
    one, other = (qp.inspect_memory(model, prompts, device=device) for device in ("cpu", "cuda"))
    for name, x in one.data_vars.items():
        if x.dtype.kind == "f":
            size = np.abs(x.values[np.isfinite(x.values)]).max(initial=0)
            np.testing.assert_allclose(other[name], x, rtol=0, atol=1e-3 * size, err_msg=str(name))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_patches_on_a_gpu_are_those_of_a_cpu() -> None:
    one, other = (qp.patch(None, samples=4, device=device) for device in ("cpu", "cuda"))
    for name, x in one.data_vars.items():
        if x.dtype.kind == "f":
            size = np.abs(x.values[np.isfinite(x.values)]).max(initial=0)
            np.testing.assert_allclose(other[name], x, rtol=0, atol=1e-3 * size, err_msg=str(name))
