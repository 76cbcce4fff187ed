"""What figures draw, as numbers; that nothing runs off the page; and the gallery's files."""

import itertools
import logging
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.image
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from numpy.typing import NDArray

import qed_probe as qp
from qed_probe import analyses, figures, gallery
from qed_probe.errors import InputError, StoreError
from qed_probe.figures import axes, style
from qed_probe.figures.strip import wrap
from tests.drawn import check_words, drawn, texts
from tests.synthetic_inputs import synthetic_inputs
from tests.synthetic_store import TEXT, synthetic_store

ROWS = {row.name: row for row in gallery.DIAGNOSTICS}


def _figure(name: str, ds: xr.Dataset) -> Figure:
    row = ROWS[name]
    return row.figure(row.analysis(ds, synthetic_inputs(ds)) if row.inputs else row.analysis(ds))


def _meshes(figure: Figure) -> list[NDArray[np.float64]]:
    found = (axes.findobj(QuadMesh) for axes in figure.axes if axes.get_label() != "<colorbar>")
    return [np.ma.filled(np.ma.asarray(mesh.get_array(), float), np.nan) for mesh in itertools.chain(*found)]


def test_eigenvalues_draw_the_counts_between_the_ends_of_theory() -> None:
    ds = analyses.eigenvalues(synthetic_store(2, 3, mixer="qed-nogate-noproj"))
    figure = figures.draw_eigenvalues(ds)
    used = ds.sel(record="eigenvalue")
    (steps,) = [x for x in figure.axes[0].patches if isinstance(x, StepPatch)]
    counts, edges, _ = steps.get_data()
    np.testing.assert_array_equal(counts, used["counts"].sum("layer"))
    np.testing.assert_array_equal(edges, ds["edges"])
    dashed = [np.asarray(line.get_xdata())[0] for line in figure.axes[0].get_lines()]
    np.testing.assert_allclose(dashed, [ds["low"].min(), ds["high"].max()])
    n, outside = int(used["n"].sum()), int(used["outside_theory"].sum())
    assert f"{n:,} values of e, " in texts(figure)
    assert f"{outside:,} outside the bounds, " in texts(figure)


@pytest.mark.parametrize("name", ["eigenvalues", "rho"])
def test_each_layer_has_a_histogram_as_high_as_its_row(name: str) -> None:
    ds = ROWS[name].analysis(synthetic_store(3, 2))
    counts = ds.sel(record="eigenvalue")["counts"] if "record" in ds.dims else ds["counts"]
    steps = [x.get_data() for x in ROWS[name].figure(ds).axes[1].patches if isinstance(x, StepPatch)]
    for row, (tops, _, bottom) in enumerate(steps):
        expected = counts[row].values / counts[row].values.max()
        np.testing.assert_allclose((bottom - tops) / 0.85, expected, atol=1e-9)
    assert len(steps) == 3


@pytest.mark.parametrize(
    ("mixer", "main", "name"), [("eda", 1, "address edit"), ("eda-reversed", 0, "address edit"), ("deltaproduct", 1, "edit 1")]
)
def test_eigenvalues_of_other_edits_are_lines_beside_the_main_one(mixer: str, main: int, name: str) -> None:
    ds = synthetic_store(2, 3, mixer=mixer)
    edits = np.full((*ds["rho"].shape, 2), 0.31, np.float32)
    edits[..., main] = ds["eigenvalue"]
    ds["edit_eigenvalue"] = (("layer", "token", "head", "edit"), edits)
    found = analyses.eigenvalues(ds)
    figure = figures.draw_eigenvalues(found)
    _, line = [x.get_data()[0] for x in figure.axes[0].patches if isinstance(x, StepPatch)]
    assert line.max() == line.sum() == ds["rho"].size
    assert [x.get_text() for x in figure.legends[0].get_texts()] == ["main edit", name]
    assert "values of e of the main edit" in texts(figure)


def test_the_one_eigenvalue_of_linear_is_drawn_around_1() -> None:
    ds = analyses.eigenvalues(synthetic_store(mixer="linear", strength=0, records={"eigenvalue": 1}))
    figure = figures.draw_eigenvalues(ds)
    (steps,) = [x.get_data() for x in figure.axes[0].patches if isinstance(x, StepPatch)]
    counts, edges, _ = steps
    (full,) = np.flatnonzero(counts)
    np.testing.assert_allclose(edges[full : full + 2], np.array([0.99, 1.01]))
    assert "theory, e = 1" in texts(figure)
    assert "values of e, all 1:" in texts(figure)


def test_a_bound_at_infinity_is_not_drawn() -> None:
    ds = analyses.eigenvalues(synthetic_store(mixer="comba", strength=0, records={"eigenvalue": -300}))
    figure = figures.draw_eigenvalues(ds)
    assert figure.axes[0].get_title(loc="right") == "dashed: theory's upper bound, 1"
    assert len([line for line in figure.axes[0].lines if line.get_linestyle() == "--"]) == 1
    used = ds.sel(record="eigenvalue")
    assert int(used["outside_bins"].sum()) == int(used["n"].sum()) > 0
    assert "lie beyond the axis and are not drawn." in texts(figure)


def test_reads_of_zero_are_told_to_be_first_tokens() -> None:
    ds = synthetic_store(2, 3, 2)
    assert "12 with ‖S̄ᵀd‖ = 0, all at first tokens of prompts" in texts(figures.draw_rho_read(analyses.rho_read(ds))).replace(
        "\n", " "
    )
    ds["read_norm"][0, 5, 0] = 0
    assert "13 with ‖S̄ᵀd‖ = 0, 12 of them at first tokens" in texts(figures.draw_rho_read(analyses.rho_read(ds))).replace(
        "\n", " "
    )


def test_the_first_bad_value_is_told_in_the_figure() -> None:
    ds = synthetic_store(2, 3)
    ds["rho"][1, 20, 2] = np.inf
    assert "rho: 1 not finite, first at layer 1, token 20, head 2" in texts(figures.draw_rho(analyses.rho(ds)))


def test_one_of_a_kind_is_not_many() -> None:
    assert [style.counted(n, "token") for n in (0, 1, 1024)] == ["0 tokens", "1 token", "1,024 tokens"]


def test_bins_are_named_by_what_they_hold() -> None:
    assert axes.span_labels(np.array([0, 1, 2, 4, 8])) == ["0", "1", "2–3", "4–7", "8+"]


def test_rho_read_has_a_panel_a_layer() -> None:
    ds = analyses.rho_read(synthetic_store(5, 2))
    meshes = _meshes(figures.draw_rho_read(ds))
    assert len(meshes) == 5
    for i, mesh in enumerate(meshes):
        np.testing.assert_array_equal(np.nan_to_num(mesh), ds["counts"][i].T)


def test_shares_are_drawn_with_layer_0_on_top_and_say_their_unit() -> None:
    ds = analyses.correction_share(synthetic_store(4, 3))
    figure = figures.draw_correction_share(ds)
    names = ("share_mean", "share_median", "across_mean", "across_median")
    for mesh, name in zip(_meshes(figure), names, strict=True):
        np.testing.assert_array_equal(mesh, ds[name])
    assert all(axes.get_ylim() == (3.5, -0.5) for axes in figure.axes[:4])
    assert len({mesh.get_clim() for axes in figure.axes[:4] for mesh in axes.findobj(QuadMesh)}) == 1
    assert [axes.get_label() for axes in figure.axes].count("<colorbar>") == 1
    assert "per unit λ" not in texts(figure)
    assert "per unit λ" in texts(figures.draw_correction_share(analyses.correction_share(synthetic_store(strength=0))))


def test_half_lives_without_end_are_counted_and_not_drawn() -> None:
    decay = np.full((2, 1, 2), -0.1)
    decay[0, 0] = [0, -np.inf]
    figure = figures.draw_half_life(analyses.half_life(synthetic_store(2, 2, records={"log_decay": decay})))
    assert np.isnan(_meshes(figure)[0]).tolist() == [[True, True], [False, False]]
    words = texts(figure).replace("\n", " ")
    assert "Mean over channels: 1 of 4 heads never decay (∞), 1 forget all (0) at 444 tokens with g = −∞." in words
    assert "Slowest channel: 0 of 4 heads never decay (∞), 0 forget all (0)." in words


def test_tiles_bear_their_numbers_where_they_are_few() -> None:
    few = analyses.half_life(synthetic_store(2, 2, records={"log_decay": -0.1, "log_decay_max": np.log(0.5) / 29000}))
    assert [x.get_text() for axes in figures.draw_half_life(few).axes[:2] for x in axes.texts] == ["6.9"] * 4 + [
        "$2.9 \\cdot 10^{4}$"
    ] * 4
    many = figures.draw_half_life(analyses.half_life(synthetic_store(13, 2)))
    assert not many.axes[0].texts


def test_one_panel_where_all_channels_decay_alike_and_no_bar_where_none_does() -> None:
    alike = figures.draw_half_life(analyses.half_life(synthetic_store(records={"log_decay": -0.1, "log_decay_max": -0.1})))
    assert [axes.get_label() for axes in alike.axes] == ["", "<colorbar>"]
    never = figures.draw_half_life(analyses.half_life(synthetic_store(2, 3, records={"log_decay": 0, "log_decay_max": 0})))
    (axes,) = never.axes
    assert [x.get_text() for x in axes.texts] == ["∞"] * 6


@pytest.mark.parametrize(("low", "high"), [(2e-4, 0.03), (0.002, 0.5), (0.3, 7e5), (3.0, 8.0)])
def test_a_colour_bar_keeps_to_one_notation(low: float, high: float) -> None:
    decay = np.log(0.5) / np.geomspace(low, high, 4).reshape(2, 1, 2)
    figure = figures.draw_half_life(
        analyses.half_life(synthetic_store(2, 2, records={"log_decay": decay, "log_decay_max": decay}))
    )
    labels = [x.get_text() for x in figure.axes[-1].get_yticklabels()]
    assert labels
    assert len({"$" in x for x in labels}) == 1


def test_strip_paints_each_token_and_underlines_its_role() -> None:
    ds = synthetic_store(1, 1, 1)
    ds["residual_norm"][0, 3, 0] = np.nan
    figure = figures.draw_token_strip(analyses.token_strip(ds, "residual_norm"))
    axes = figure.axes[0]
    patches = [x for x in axes.patches if isinstance(x, Rectangle)]
    assert len(patches) == len(TEXT)
    shades = np.array([sum(to_rgb(x.get_facecolor())) for x in patches])
    value = np.minimum(ds["residual_norm"].values[0, :, 0], np.nanquantile(ds["residual_norm"], 0.99))
    finite = np.isfinite(value)
    order = np.argsort(value[finite])
    assert (np.diff(shades[finite][order]) >= -0.03).all()  # cividis brightens with its value
    assert to_rgb(patches[3].get_facecolor()) == pytest.approx([0.851] * 3, abs=1e-3)
    assert "".join(t.get_text() for t in axes.texts) == TEXT.replace("\n", "↵").replace(" ", "")
    (lines,) = axes.findobj(LineCollection)
    assert len(lines.get_segments()) == int((ds["role"] != "noise").sum())
    assert {"needle", "question", "answer"} <= set(texts(figure).split("\n"))


def test_wrap_splits_only_what_is_longer_than_a_line() -> None:
    pieces = wrap([(0, "ab"), (-1, " … "), (7, ""), (8, "↵"), (9, "$x$yz")], 4)
    assert [(p.token, p.text, p.column, p.line) for p in pieces] == [
        (0, "ab", 0, 0), (-1, " … ", 0, 1), (8, "↵", 3, 1), (9, "$x$y", 0, 2), (9, "z", 0, 3),
    ]  # fmt: skip


def test_strip_shows_signs_for_newlines_escapes_whole_and_gaps_as_dots() -> None:
    ds = synthetic_store(1, 1, 1, "abcdef" + "x" * 3500, records={"read_norm": 1}).drop_vars("role")
    ds["token_text"][-3:] = ["\\n", "\\xe4", "漢"]
    axes = figures.draw_token_strip(analyses.token_strip(ds, "read_norm")).axes[0]
    letters = "".join(t.get_text() for t in axes.texts)
    assert letters == "…" + "x" * (len(letters) - 7) + "↵\\xe4�"
    assert [round(x.get_width()) for x in axes.patches if isinstance(x, Rectangle)][-3:] == [1, 4, 1]


@pytest.mark.parametrize("roles", [["answer", "needle", "question", "detail"], ["question", "detail", "answer", "needle"]])
def test_a_role_has_its_own_colour_whatever_comes_first(roles: list[str]) -> None:
    ds = synthetic_store(1, 1, 1, "abcd")
    ds["role"][:] = roles
    figure = figures.draw_token_strip(analyses.token_strip(ds, "read_norm"))
    (lines,) = figure.axes[0].findobj(LineCollection)
    drawn = dict(zip(roles, [to_hex(x).upper() for x in np.asarray(lines.get_colors())], strict=True))
    assert drawn == {"needle": style.VERMILION, "question": style.SKY, "answer": style.GREEN, "detail": style.PURPLE}
    (legend,) = figure.legends
    assert [x.get_text() for x in legend.get_texts()] == ["needle", "question", "answer", "detail"]


def test_strip_says_where_its_colours_end_and_which_prompt_it_shows() -> None:
    ds = synthetic_store(1, 1, 3, records={"read_norm": 1})
    assert "quantile" not in texts(figures.draw_token_strip(analyses.token_strip(ds, "read_norm")))
    ds["read_norm"][0, 5, 0] = 1000
    words = texts(figures.draw_token_strip(analyses.token_strip(ds, "read_norm"))).replace("\n", " ")
    assert "The colours end at the 99 % quantile, 1." in words
    assert f"prompt 0 of 3 (counted from 0), all {len(TEXT)} tokens" in words
    assert "‖S̄ᵀd‖, norm of what the erase direction d reads" in words


def test_strip_draws_what_is_not_text_and_what_is_all_zero() -> None:
    text = "$\\alpha_{x$ 漢\x00\x1b🙂é \\n"
    ds = synthetic_store(1, 1, 1, text, records={"read_norm": 0})
    figure = figures.draw_token_strip(analyses.token_strip(ds, "read_norm"))
    drawn(figure)
    assert f"all {ds.sizes['token']} tokens" in texts(figure).replace("\n", " ")


@pytest.mark.parametrize("name", [name for name in ROWS if name != "tokens-read"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 3), (4, 12), (24, 6)])
def test_no_words_leave_the_page_or_lie_on_each_other(name: str, layers: int, heads: int) -> None:
    ds = synthetic_store(layers, heads)
    ds["log_decay"][0, :, 0] = 0
    check_words(_figure(name, ds))


@pytest.mark.parametrize("name", ["gate-budgets", "address-geometry", "gate-saturation"])
@pytest.mark.parametrize("mixer", ["linear", "gdn", "eda", "eda-qed"])
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 12), (24, 6)])
def test_no_words_of_other_mixers_leave_the_page(name: str, mixer: str, layers: int, heads: int) -> None:
    check_words(_figure(name, synthetic_store(layers, heads, text=TEXT[-60:], mixer=mixer)))


def test_figures_leave_no_trace_in_matplotlibs_state() -> None:
    code = "import sys; from qed_probe import figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    before = mpl.rcParams["font.size"]
    figures.draw_rho(analyses.rho(synthetic_store()))
    assert mpl.rcParams["font.size"] == before


def test_plot_writes_every_figure_at_column_width_and_the_same_bytes_twice(tmp_path: Path) -> None:
    ds = synthetic_store(text=TEXT[-60:])
    inputs = synthetic_inputs(ds)
    paths = gallery.plot(ds, tmp_path / "a", inputs=inputs)
    assert [p.name for p in paths] == [f"{name}.{kind}" for name in ROWS for kind in ("png", "svg")]
    widths = {p.stem: matplotlib.image.imread(p).shape[1] for p in paths if p.suffix == ".png"}
    assert widths.pop("energy") / 300 in (3.4, 7.0)  # a page where there are many roles
    assert {name: width / 300 for name, width in widths.items()} == dict.fromkeys(widths, 3.4)
    again = gallery.plot(ds, tmp_path / "b", formats=("svg",), inputs=inputs)
    for path in again:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


def test_plot_says_what_it_skips_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ds = synthetic_store(mixer="linear").drop_vars(["read_norm", "correction_norm", "correction_cosine"])
    with caplog.at_level(logging.WARNING):
        paths = gallery.plot(ds, tmp_path, formats=["png"])
    assert {p.stem for p in paths} == {"eigenvalues", "rho", "half-life", "gate-budgets", "tokens-written"}
    absent = {"correction-share", "rho-read", "tokens-read"}
    assert set(gallery.skipped(ds)) == {*absent, "address-geometry", "gate-saturation", "energy"}
    assert "skipped rho-read: the store has no read_norm" in caplog.text
    assert "skipped gate-saturation: the store has no inputs; a trace with save_inputs keeps them" in caplog.text
    assert set(gallery.skipped(ds, synthetic_inputs(ds))) == absent
    assert gallery.skipped(ds, synthetic_inputs(ds).drop_vars("g"))["gate-saturation"] == "the store has no inputs/g"


def test_plot_draws_the_inputs_of_a_store_that_has_them(tmp_path: Path) -> None:
    qp.trace(None, qp.niah_prompts(400, 2, seed=0), tmp_path / "run.zarr", save_inputs=True)
    paths = gallery.plot(tmp_path / "run.zarr", tmp_path / "plots", formats=["png"])
    assert {path.stem for path in paths} == set(ROWS)


def test_plot_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found bmp"):
        gallery.plot(synthetic_store(), tmp_path / "x", formats=["bmp"])
    with pytest.raises(InputError, match="found none"):
        gallery.plot(synthetic_store(), tmp_path / "x", formats=[])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="found a file"):
        gallery.plot(synthetic_store(), tmp_path / "file")
    with pytest.raises(StoreError, match="records to draw"):
        gallery.plot(xr.Dataset(coords={"token": [0]}), tmp_path / "x")
    with pytest.raises(StoreError):
        gallery.plot(tmp_path / "nowhere.zarr", tmp_path / "x")
    assert not (tmp_path / "x").exists()
