"""What the figures of the eigenvalue claim draw, as numbers."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch
from numpy.typing import ArrayLike, NDArray

from qed_probe import figures
from qed_probe.figures import style
from qed_probe.figures.eigen_parts import coarse
from qed_probe.gallery.eigen import plot_eigen
from tests.drawn import check_words, texts
from tests.synthetic_eigen import eigen_run, join, synthetic_eigen

ALL = ("eigen-histogram", "eigen-maps", "eigen-strength", "eigen-ridge", "eigen-steps", "eigen-growth")


def _steps(axes: Axes) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Heights and edges of each histogram, in the order of drawing."""
    return [x.get_data()[:2] for x in axes.patches if isinstance(x, StepPatch)]


def _dashed(axes: Axes) -> list[float]:
    return [float(np.asarray(line.get_xdata())[0]) for line in axes.get_lines() if line.get_linestyle() == "--"]


def _colour(lines: LineCollection) -> str:
    return to_hex(np.asarray(lines.get_color())[0])


def _table(axes: Axes) -> dict[str, list[str]]:
    """The numbers of each row, by its words."""
    rows: dict[float, list[str]] = {}
    for text in axes.texts:
        rows.setdefault(round(text.get_position()[1], 6), []).append(text.get_text())
    return {name: numbers for name, *numbers in rows.values()}


def _e(*values: float) -> NDArray[np.float64]:
    """One layer and one head of these values."""
    return np.array(values).reshape(1, -1, 1)


def _words(figure: Figure) -> str:
    """All words on one line, however they were wrapped."""
    return " ".join(texts(figure).split())


def _runs() -> xr.Dataset:
    return join(*(synthetic_eigen(2, 3, steps=steps, seed=1, name=f"step-{steps}") for steps in (100, 200)))


def test_bars_of_e_are_the_counts_of_their_64th() -> None:
    e = np.random.default_rng(0).uniform(-0.4, 1.3, (2, 500, 3))
    figure = figures.draw_eigen_histogram(eigen_run("a", {"eigenvalue": e}, 0.2, "qed-nogate-noproj"))
    ((heights, edges),) = _steps(figure.axes[0])
    np.testing.assert_array_equal(heights, np.histogram(e, edges)[0])
    np.testing.assert_allclose(np.diff(edges), 1 / 64)
    assert heights.sum() == e.size
    assert {0.0, 1.0} <= set(edges)
    np.testing.assert_allclose(_dashed(figure.axes[0]), [-0.2, 1.2])
    assert figure.axes[0].get_yscale() == "log"


def test_counts_stand_beside_the_histogram_as_used_and_renormalised() -> None:
    used = _e(-0.3, -0.01, 0.5, 1.0, 1.2, 1.3, np.nan, np.inf, -1.5)
    unit = _e(-0.3, 0.0, 0.5, 1.0, 1.0, 1.3, np.nan, 0.5, -1.5)
    ds = eigen_run("a", {"eigenvalue": used, "eigenvalue_unit": unit}, 0.25, "qed-nogate-noproj")
    panel, beside = figures.draw_eigen_histogram(ds).axes
    assert _table(beside) == {
        "": ["as used", "unit keys"],
        "finite values": ["7", "8"],
        "inside the bounds": ["4", "5"],
        "outside the bounds": ["3", "3"],
        "below 0": ["3", "2"],
        "above 1": ["2", "1"],
        "beyond ±1": ["3", "2"],
        "NaN or infinite": ["2", "1"],
    }
    assert panel.get_title(loc="left") == "a: e from −1.5 to 1.3"
    assert [heights.sum() for heights, _ in _steps(panel)] == [7, 8]


def test_without_renormalised_keys_there_is_one_column_and_no_line() -> None:
    figure = figures.draw_eigen_histogram(eigen_run("a", {"eigenvalue": _e(0.5)}))
    assert len(_steps(figure.axes[0])) == 1
    assert _table(figure.axes[1])["finite values"] == ["1"]
    assert "renormalised keys" not in [x.get_text() for x in figure.legends[0].get_texts()]


def test_other_edits_are_lines_and_counted_below() -> None:
    both = {"eigenvalue": _e(0.5, 0.6), "eigenvalue_unit": _e(0.5, 0.6), "address edit": _e(-1.25, 0.75)}
    figure = figures.draw_eigen_histogram(join(eigen_run("a", both), eigen_run("b", {"eigenvalue": _e(0.1)})))
    *_, (heights, edges) = _steps(figure.axes[0])
    np.testing.assert_array_equal(edges[:-1][heights > 0], [-1.25 - 1 / 64, 0.75 - 1 / 64])
    assert [len(_steps(axes)) for axes in figure.axes[::2]] == [3, 1]
    assert "address edit" in [x.get_text() for x in figure.legends[0].get_texts()]
    assert "Address edit, as used: 2 values from −1.25 to 0.75, 1 beyond ±1, 0 not finite." in _words(figure)


def test_each_run_has_a_row_on_one_axis() -> None:
    ds = join(
        eigen_run("a", {"eigenvalue": _e(0.5, 0.6)}), eigen_run("b", {"eigenvalue": _e(0.1, -0.9)}, mixer="gdn", gate_max=2.0)
    )
    figure = figures.draw_eigen_histogram(ds)
    assert [axes.get_title(loc="left") for axes in figure.axes[::2]] == ["a: e from 0.5 to 0.6", "b: e from −0.9 to 0.1"]
    assert [_dashed(axes) for axes in figure.axes[::2]] == [[0.0, 1.0], [-1.0, 1.0]]
    low, high = figure.axes[0].get_xlim()
    assert low < -1 < 1 < high


def test_an_infinite_bound_is_not_drawn_and_what_is_beyond_the_bins_is_counted() -> None:
    figure = figures.draw_eigen_histogram(eigen_run("a", {"eigenvalue": _e(0.5, -300, -4.5)}, mixer="comba"))
    assert _dashed(figure.axes[0]) == [1.0]
    ((heights, _),) = _steps(figure.axes[0])
    assert heights.sum() == 1
    assert "2 values as used lie beyond the bins and are not drawn." in _words(figure)
    assert _table(figure.axes[1])["inside the bounds"] == ["3"]


def test_a_run_without_a_finite_value_says_so() -> None:
    ds = eigen_run("a", {"eigenvalue": _e(np.nan, np.nan)})
    figure = figures.draw_eigen_histogram(ds)
    assert _steps(figure.axes[0]) == []
    assert "a: no finite value" in texts(figure)
    assert _table(figure.axes[1])["NaN or infinite"] == ["2"]
    assert list(figures.eigen_figures(ds)) == ["eigen-histogram"]


def test_maps_show_the_extremes_and_frame_what_passes_a_limit() -> None:
    e = np.full((2, 4, 3), 0.5)
    e[0, 1, 2], e[1, 2, 0], e[1, 3, 1] = -0.1, 1.1, -1.2
    unit = e.copy()
    unit[1, 2, 0] = 1.0
    figure = figures.draw_eigen_maps(eigen_run("a", {"eigenvalue": e, "eigenvalue_unit": unit}, mixer="qed"))
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    shown = [np.asarray(axes.findobj(QuadMesh)[0].get_array()) for axes in panels]
    np.testing.assert_array_equal(shown[0], e.min(1))
    np.testing.assert_array_equal(shown[1], np.abs(e).max(1))
    frames = [
        {(round(x.get_y() + 0.45), round(x.get_x() + 0.45)): x.get_linestyle() for x in axes.patches if isinstance(x, Rectangle)}
        for axes in panels
    ]
    assert frames == [{(0, 2): "-", (1, 1): "-"}, {(1, 0): ":", (1, 1): "-"}]
    assert "Framed heads: 2 below theory's lower bound (0 dotted), 2 with |e| > 1 (1 dotted)" in _words(figure)


def test_a_head_without_a_value_is_grey_in_the_map() -> None:
    e = np.full((1, 2, 2), 0.5)
    e[:, :, 1] = np.nan
    figure = figures.draw_eigen_maps(eigen_run("a", {"eigenvalue": e}))
    assert [x.get_text() for x in figure.axes[0].texts] == ["0.500", "NaN"]


def test_heads_are_ranges_at_their_strength_between_theorys_bounds() -> None:
    lam = np.array([[0.2, 0.05, 0.1]])
    e = np.array([[[0.1, 0.2, -0.3], [0.9, 1.06, 0.8]]])
    unit = np.array([[[0.1, 0.2, -0.3], [0.9, 1.0, 0.8]]])
    ds = eigen_run("a", {"eigenvalue": e, "eigenvalue_unit": unit}, lam, "qed-nogate-noproj")
    figure = figures.draw_eigen_strength(ds)
    found = {}
    for lines in figure.axes[0].findobj(LineCollection):
        for segment in lines.get_segments():
            found[round(segment[0, 0], 6)] = (*segment[:, 1].round(6), _colour(lines))
    assert found == {
        0.2: (0.1, 0.9, style.BLUE.lower()),
        0.05: (0.2, 1.06, style.ORANGE.lower()),
        0.1: (-0.3, 0.8, style.VERMILION.lower()),
    }
    low, high = (np.asarray(x.get_xydata()) for x in figure.axes[0].get_lines() if x.get_linestyle() == "--")
    np.testing.assert_allclose(low, [[0.05, -0.05], [0.1, -0.1], [0.2, -0.2]])
    np.testing.assert_allclose(high, [[0.05, 1.05], [0.1, 1.1], [0.2, 1.2]])
    labels = {x.get_text() for x in figure.legends[0].get_texts()}
    assert labels == {"inside the bounds: 1", "outside by rounding: 1", "outside: 1", "theory's bounds"}


def test_runs_without_an_added_direction_have_no_panel_of_strengths() -> None:
    ds = join(synthetic_eigen(1, 2, name="qed"), eigen_run("gdn", {"eigenvalue": np.full((1, 5, 2), 0.3)}, mixer="gdn"))
    figure = figures.draw_eigen_strength(ds)
    assert [axes.get_title() for axes in figure.axes] == ["qed"]
    assert "Not drawn: 1 run without an added direction." in texts(figure)
    assert "eigen-strength" not in figures.eigen_figures(ds.isel(run=[1]))


@pytest.mark.parametrize("strengths", [0.1, [[0.1, 0.1000001]]])
def test_the_bounds_of_heads_that_are_alike_are_seen(strengths: ArrayLike) -> None:
    e = np.full((1, 3, np.size(strengths)), 0.5)
    ds = eigen_run("a", {"eigenvalue": e}, strengths, "qed-nogate-noproj")
    dashed = [x for x in figures.draw_eigen_strength(ds).axes[0].get_lines() if x.get_linestyle() == "--"]
    assert [x.get_marker() for x in dashed] == ["_", "_"]


def test_ridges_are_shares_scaled_to_the_highest_of_their_layer() -> None:
    sharp, wide = np.full((2, 8, 1), 0.5), np.tile([0.25, 0.75], (2, 2))[:, :, None]
    figure = figures.draw_eigen_ridge(join(eigen_run("a", {"eigenvalue": sharp}), eigen_run("b", {"eigenvalue": wide})))
    steps = _steps(figure.axes[0])
    assert len(steps) == 4
    for i, (tops, edges) in enumerate(steps):
        heights = (i // 2 + 0.45 - tops) / 0.85
        np.testing.assert_allclose(heights[heights > 1e-9], [1.0] if i % 2 == 0 else [0.5, 0.5])
        assert edges[0] == (0.5 if i % 2 == 0 else 0.25) - 1 / 64


def test_a_layer_that_a_run_lacks_has_no_ridge() -> None:
    ds = join(eigen_run("a", {"eigenvalue": np.full((1, 4, 1), 0.5)}), eigen_run("b", {"eigenvalue": np.full((3, 4, 2), 0.5)}))
    assert len(_steps(figures.draw_eigen_ridge(ds).axes[0])) == 4
    for draw in figures.eigen_figures(ds).values():
        check_words(draw(ds))


def test_steps_show_the_ends_of_each_layer_in_order_of_training() -> None:
    first, last = np.array([[[0.2], [0.4]], [[0.3], [0.5]]]), np.array([[[-0.1], [0.9]], [[0.0], [1.05]]])
    found = (("late", last, 200), ("early", first, 100))
    models = [eigen_run(name, {"eigenvalue": e}, 0.1, "qed-nogate-noproj", steps=at, seed=3) for name, e, at in found]
    ds = join(*models, eigen_run("other", {"eigenvalue": first}, steps=100, mixer="gdn2"))
    (panel,) = figures.draw_eigen_steps(ds).axes
    lines = [np.asarray(x.get_xydata()) for x in panel.get_lines() if x.get_marker() == "."]
    np.testing.assert_allclose([x[:, 0] for x in lines], [[100, 200]] * 4)
    np.testing.assert_allclose([x[:, 1] for x in lines], [[0.2, -0.1], [0.4, 0.9], [0.3, 0.0], [0.5, 1.05]])
    dashed = [np.asarray(x.get_ydata()) for x in panel.get_lines() if x.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed, [[-0.1, -0.1], [1.1, 1.1]])
    assert panel.get_title() == "qed-nogate-noproj, seed 3: −0.1 to 1.05"


def test_growth_draws_norms_with_and_without_the_direction_and_the_sample() -> None:
    ds = synthetic_eigen(2, 3)
    panel, sample, beside = figures.draw_eigen_growth(ds).axes
    for (heights, edges), name in zip(_steps(panel), ("norm_excess", "norm_excess_base"), strict=True):
        assert heights.sum() == int(ds["n"].sel(quantity=name).sum())
        np.testing.assert_allclose(np.diff(np.log2(edges)), 0.25)
        assert edges[0] <= float(ds["minimum"].sel(quantity=name).min())
        assert edges[-1] >= float(ds["maximum"].sel(quantity=name).max())
    curves = [x for x in sample.get_lines() if len(np.asarray(x.get_xdata())) > 2]
    for line, (name, shift) in zip(
        curves, (("step_norm", 0), ("step_norm_base", 0), ("step_radius", 1), ("step_radius_base", 1)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(line.get_xdata()), np.sort(ds[name].values[0]) - shift)
        assert np.asarray(line.get_ydata())[-1] == 1
    table = _table(beside)
    for i, text in enumerate(("‖Mₜ‖₂ > 1.001", "‖Mₜ‖₂ > 1.01", "‖Mₜ‖₂ > 1.1")):
        above = ds["above"].isel(margin=i).sum(("run", "layer", "head"))
        assert table[text] == [f"{int(above.sel(quantity=name)):,}" for name in ("norm_excess", "norm_excess_base")]
    assert table["sample: radius > 1.001"][0] == str(int((ds["step_radius"] > 1.001).sum()))


def test_norms_of_1_are_counted_and_not_drawn() -> None:
    zero = np.zeros((1, 7, 1))
    ds = eigen_run("a", {"eigenvalue": zero + 0.5, "norm_excess": zero, "norm_excess_base": zero}, mixer="gdn")
    figure = figures.draw_eigen_growth(ds)
    assert _steps(figure.axes[0]) == []
    assert "no excess" in texts(figure)
    assert "7 with the direction are at 10⁻⁷ or less and not drawn" in _words(figure)
    assert "a (adds no direction)" in texts(figure)
    assert "sample of 0" in texts(figure)


def test_coarse_bars_keep_every_count_that_has_a_place() -> None:
    edges = np.array([-np.inf, 0, 0.5, 1, 1.5, 2, np.nan])
    bars, places, lost = coarse(np.array([3.0, 0, 1, 2, 4, 5]), edges, np.asarray)
    np.testing.assert_array_equal(bars, [1, 6])
    np.testing.assert_array_equal(places, [0, 1, 2])
    assert lost == 8


@pytest.mark.parametrize(("layers", "heads", "runs"), [(1, 1, 1), (2, 3, 2), (24, 6, 1), (2, 4, 3)])
def test_all_figures_are_readable(layers: int, heads: int, runs: int) -> None:
    ds = join(*(synthetic_eigen(layers, heads, 50, name=f"checkpoints/qed-nogate-noproj-{i}", steps=i) for i in range(runs)))
    carried = figures.eigen_figures(ds)
    assert list(carried) == [name for name in ALL if runs > 1 or name not in ("eigen-ridge", "eigen-steps")]
    for draw in carried.values():
        check_words(draw(ds))


def test_every_figure_is_written(tmp_path: Path) -> None:
    written = plot_eigen(_runs(), tmp_path, ("png",))
    assert [path.stem for path in written] == list(ALL)
    assert all(path.stat().st_size for path in written)
