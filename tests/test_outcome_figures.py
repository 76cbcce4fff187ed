"""What the figures of outcomes draw, as numbers; gaps, ends and single runs; and that all of it can be read."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from qed_probe import figures
from qed_probe.figures import axes, runs, style
from tests import synthetic_outcomes as synthetic
from tests.drawn import check_words, drawn, texts


def _lines(panel: Axes, **look: object) -> list[Line2D]:
    """The lines of a panel whose getters say so: ``marker="o"``."""
    return [line for line in panel.lines if all(getattr(line, f"get_{name}")() == value for name, value in look.items())]


def _x(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_xdata(), float)


def _y(line: Line2D) -> NDArray[np.float64]:
    return np.asarray(line.get_ydata(), float)


def _marked(panel: Axes) -> list[Line2D]:
    return [line for line in panel.lines if line.get_marker() in runs.MARKERS]


def _bars(panel: Axes) -> NDArray[np.float64]:
    """Both ends of each vertical or horizontal bar, ``[bar, end, (x, y)]``."""
    segments = [np.asarray(x) for bars in panel.collections if isinstance(bars, LineCollection) for x in bars.get_segments()]
    return np.array([x for x in segments if len(x) == 2]).reshape(-1, 2, 2)


def _words(figure: Figure) -> str:
    return texts(figure).replace("\n", " ")


def _labels(figure: Figure) -> list[str]:
    return [x.get_text() for legend in figure.legends for x in legend.get_texts() if x.get_text().strip()]


def test_accuracy_is_drawn_as_it_is_with_its_intervals() -> None:
    ds = synthetic.accuracy()
    figure = figures.draw_accuracy(ds)
    (panel,) = figure.axes
    lines = _marked(panel)
    np.testing.assert_allclose([_y(line) for line in lines], 100 * ds["accuracy"])
    ends = _bars(panel)[..., 1].reshape(4, 6, 2)
    np.testing.assert_allclose(ends, 100 * np.stack([ds["low"], ds["high"]], -1))
    for line in lines:
        np.testing.assert_allclose(_x(line) / ds["length"].values, 1, atol=0.11)
    assert [x.get_text() for x in panel.get_xticklabels()] == ["512", "1K", "2K", "4K", "8K", "16K"]
    assert panel.get_xscale() == "log"
    (trained,) = _lines(panel, linestyle="--")
    assert set(_x(trained)) == {512}
    assert _labels(figure) == ["gdn2", "qed", "seed 0", "seed 1", "trained at 512"]
    assert "500 samples a length and run" in _words(figure)
    assert "95 % binomial intervals" in _words(figure)


def test_an_arm_has_one_colour_and_a_seed_one_mark() -> None:
    ds = synthetic.accuracy(synthetic.ARMS[:3])
    lines = _marked(figures.draw_accuracy(ds).axes[0])
    for line, arm, seed in zip(lines, ds["arm"].values, ds["seed"].values, strict=True):
        assert same_color(line.get_color(), runs.COLOURS[arm])
        assert same_color(line.get_markerfacecolor(), "white") == (seed == 1)


def test_colours_differ_as_long_as_there_are_any() -> None:
    eda = ("kda", "kda-safegate", "eda", "eda-same", "eda-rand", "eda-reversed", "eda-gdn2")
    assert runs.colours(eda) == {name: runs.COLOURS[name] for name in eda}
    assert len(set(runs.colours([*synthetic.ARMS, "new"]).values())) == 7
    assert runs.colours([*eda, *synthetic.ARMS])["eda"] == style.BLUE
    assert list(runs.colours(["new", "qed", "gdn2"])) == ["gdn2", "qed", "new"]
    assert set(runs.colours(map(str, range(30))).values()) == set(runs.FREE)


def test_more_arms_have_a_panel_each_over_the_others_in_grey() -> None:
    ds = synthetic.accuracy(synthetic.ARMS, 6)
    figure = figures.draw_accuracy(ds)
    assert [panel.get_title() for panel in figure.axes] == list(synthetic.ARMS)
    for panel, arm in zip(figure.axes, synthetic.ARMS, strict=True):
        own = ds["arm"].values == arm
        np.testing.assert_allclose([_y(line) for line in _marked(panel)], 100 * ds["accuracy"][own])
        grey = [_y(line) for line in panel.lines if line.get_color() == "0.82"]
        np.testing.assert_allclose(grey, 100 * ds["accuracy"][~own])
    assert "Grey: the other arms." in _words(figure)


def test_each_task_has_its_panels_and_a_length_of_0_none() -> None:
    two = xr.concat([synthetic.accuracy(), synthetic.accuracy().assign_coords(task=("run", ["reassignment"] * 4))], "run")
    assert [panel.get_title() for panel in figures.draw_accuracy(two).axes] == ["niah", "reassignment"]
    ds = synthetic.accuracy(lengths=(0, 512, 1024))
    assert [len(_y(line)) for line in _marked(figures.draw_accuracy(ds).axes[0])] == [2] * 4


def test_bounds_of_lambda_and_unknown_seeds_tell_runs_apart() -> None:
    ds = synthetic.accuracy(("qed",), 4)
    ds["lambda_max"] = ("run", [0.1, 0.1, 0.5, 0.5])
    assert {"qed (λ ≤ 0.1)", "qed (λ ≤ 0.5)", "seed 0", "seed 3"} <= set(_labels(figures.draw_accuracy(ds)))
    ds["seed"] = ("run", [-1] * 4)
    ds["model"] = ("run", ["a", "b", "somewhere/with/a/long/name-340M", "d"])
    assert {"a", "b", "…e/with/a/long/name-340M", "d"} <= set(_labels(figures.draw_accuracy(ds)))


def test_published_values_say_so_and_name_their_gaps() -> None:
    ds = synthetic.accuracy(synthetic.ARMS[:5])
    ds["accuracy"][4:6] = np.nan
    ds.attrs |= {"published": 1, "source": "A paper", "place": "Table 3", "page": "7", "gaps": "Some are elsewhere."}
    figure = figures.draw_accuracy(ds)
    assert "Published values, not measured here: A paper, Table 3, p. 7." in _words(figure)
    assert "Not given: Some are elsewhere." in _words(figure)
    assert [[x.get_text() for x in panel.texts] for panel in figure.axes[:5]] == [[], [], ["not given"], [], []]


def test_strengths_fill_what_differs_from_as_trained() -> None:
    ds = synthetic.strengths(2)
    figure = figures.draw_strengths(ds)
    for i, panel in enumerate(figure.axes):
        curves = [line for line in _lines(panel, marker="None") if len(_x(line)) == 6]
        np.testing.assert_allclose([_y(line) for line in curves], 100 * ds["accuracy"][i])
        shown = {False: 0, True: 0}
        for line in _lines(panel, marker="o"):
            shown[not same_color(line.get_markerfacecolor(), "white")] += len(_x(line))
            assert 1 not in _x(line)
        filled = int((ds["p_holm"][i] < 0.05).sum())
        assert shown == {True: filled, False: 30 - filled}
    assert filled > 0
    assert [x.get_text() for x in figure.axes[0].get_xticklabels()] == ["−1", "0", "0.5", "1", "1.5", "2"]


def test_strengths_say_what_they_do_not_show() -> None:
    figure = figures.draw_strengths(synthetic.strengths(2))
    words = _words(figure)
    assert "s = 0 of a QED model is not a trained GDN-2" in words
    assert "That accuracy changes with s does not show that λ_max binds" in words
    legends = [panel.get_legend() for panel in figure.axes]
    found = [[x.get_text() for x in legend.get_texts()] for legend in legends if legend]
    assert found[0][0] == "16K, 0.31"
    assert found[1][-1] == "512, < 0.0001"
    assert [panel.get_title() for panel in figure.axes] == ["qed, seed 0", "qed, seed 1"]


def test_a_contrast_draws_each_seed_and_the_mean_where_there_is_one() -> None:
    ds = synthetic.contrast()
    figure = figures.draw_contrast(ds)
    for i, panel in enumerate(figure.axes):
        there = ds["difference"][i].notnull().any("length").values
        np.testing.assert_allclose([_y(line) for line in _marked(panel)], ds["difference"][i][there])
        (mean,) = _lines(panel, marker="_")
        np.testing.assert_allclose(_y(mean), ds["mean"][i])
        np.testing.assert_allclose(_bars(panel)[..., 1], np.stack([ds["low"][i], ds["high"][i]], -1))
        assert [line for line in panel.lines if list(_y(line)) == [0, 0]]
        assert panel.get_title().endswith("6 seeds" if i == 0 else "4 seeds")
        assert panel.get_title().replace("\n", " ").startswith(str(ds["panel"].values[i]))
    assert len({panel.get_ylim() for panel in figure.axes}) == 1
    assert _labels(figure)[-2:] == ["mean, 95 % t interval", "trained at 512"]


def test_marks_of_seeds_are_told_apart_in_their_order() -> None:
    (panel,) = figures.draw_contrast(synthetic.contrast(1, 12)).axes
    looks = [(line.get_marker(), str(line.get_markerfacecolor())) for line in _marked(panel)]
    assert len(set(looks)) == 12
    assert runs.by_seed(["seed 10", "b", "seed 2", "a", "seed 2"]) == ["seed 2", "seed 10", "a", "b"]


def test_below_four_seeds_there_are_marks_alone() -> None:
    figure = figures.draw_contrast(synthetic.contrast(2, 3))
    assert [panel.get_title() for panel in figure.axes] == ["qed − gdn2\n3 seeds", "qed − qed-rand\n3 seeds"]
    assert not _bars(figure.axes[0]).size
    assert _labels(figure) == ["seed 0", "seed 1", "seed 2", "trained at 512"]
    assert "interval" not in _words(figure)


def test_a_published_contrast_labels_what_was_not_reported() -> None:
    figure = figures.draw_contrast(synthetic.published())
    found = [[x.get_text() for x in panel.texts] for panel in figure.axes]
    missing = "not reported"
    assert found == [[], [missing] * 3 + [f"seed 0: {missing}", missing], [missing] * 5, [missing] * 5, [missing]]
    assert "Published values, not measured here: QED, arXiv 2608.13668v1, Table 3, p. 7." in _words(figure)
    assert figure.axes[-1].get_title() == "qed − qed-noproj\nno seeds"


def test_dots_stand_in_the_row_of_their_arm() -> None:
    ds = synthetic.recall()
    figure = figures.draw_dots(ds)
    assert [panel.get_title() for panel in figure.axes] == ["fda", "squad_completion"]
    for panel in figure.axes:
        own = ds.isel(run=ds["task"].values == panel.get_title(), length=0)
        np.testing.assert_allclose([_x(line)[0] for line in _marked(panel)], 100 * own["accuracy"])
        np.testing.assert_allclose(_bars(panel)[..., 0], 100 * np.stack([own["low"], own["high"]], -1))
        rows = [round(float(_y(line)[0])) for line in _marked(panel)]
        assert [synthetic.ARMS[row] for row in rows] == own["arm"].values.tolist()
    assert [x.get_text() for x in figure.axes[0].get_yticklabels()] == list(synthetic.ARMS[:5])
    assert "1,102 samples a run" in _words(figure)


def test_a_depth_grid_is_linear_from_0_to_100_and_grey_without_samples() -> None:
    ds = synthetic.by_depth()
    figure = figures.draw_depth(ds)
    meshes = [mesh for panel in figure.axes[:4] for mesh in panel.collections if isinstance(mesh, QuadMesh)]
    for i, mesh in enumerate(meshes):
        cells: NDArray[np.float64] = np.ma.filled(np.ma.asarray(mesh.get_array(), float), np.nan)
        np.testing.assert_allclose(cells, 100 * ds["accuracy"][i].T)
        assert mesh.get_clim() == (0, 100)
    assert len(meshes) == 4
    assert all(panel.get_ylim() == (1, 0) for panel in figure.axes[:4])
    assert "35 to 64 samples a cell; grey: none (12 of 240 cells)" in _words(figure)
    assert "beyond the training length, 512" in _words(figure)
    assert set(_x(_lines(figure.axes[0], linestyle="--")[0])) == {0.5}


def test_lambda_is_a_share_of_its_bound_and_of_its_start() -> None:
    ds = synthetic.training(3, 2)
    figure = figures.draw_lambda(ds)
    (panel,) = figure.axes
    lines = [line for line in panel.lines if len(_x(line)) == 50]
    np.testing.assert_allclose([_y(line) for line in lines], ds["lambda"].values.reshape(50, -1).T / 0.25)
    assert len({line.get_color() for line in lines}) == 3
    drawn(figure)
    (right,) = panel.child_axes
    np.testing.assert_allclose(np.array(right.get_ylim()), np.array(panel.get_ylim()) * 0.25 / ds.attrs["lambda_init"])
    assert _labels(figure) == ["layer 0", "layer 1", "layer 2", "start"]
    assert "3 layers of 2 heads, a line each, 50 steps recorded; λ_init = 0.0298, λ_max = 0.25." in _words(figure)


def _edge(ds: xr.Dataset, value: float) -> xr.Dataset:
    """All answers right or wrong, or no samples at all."""
    count = np.full(ds["samples"].shape, 500 if np.isfinite(value) else 0)
    values = synthetic.counts(np.nan_to_num(value * count).astype(int), count)
    return ds.assign({name: (ds["accuracy"].dims, x) for name, x in values.items() if name in ds})


CASES: dict[str, tuple[Callable[..., xr.Dataset], Callable[[xr.Dataset], Figure]]] = {
    "accuracy": (synthetic.accuracy, figures.draw_accuracy),
    "strengths": (synthetic.strengths, figures.draw_strengths),
    "depth": (synthetic.by_depth, figures.draw_depth),
    "dots": (synthetic.recall, figures.draw_dots),
}


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan])
@pytest.mark.parametrize("name", CASES)
def test_ends_of_the_scale_and_nothing_at_all_are_drawn_within_the_page(name: str, value: float) -> None:
    make, draw = CASES[name]
    figure = draw(_edge(make(), value))
    check_words(figure)
    if np.isnan(value):
        assert "no samples" in _words(figure)
        return
    for panel in (x for x in figure.axes if x.get_label() != "<colorbar>"):
        low, high = panel.get_xlim() if name == "dots" else panel.get_ylim()
        assert name == "depth" or low <= 100 * value <= high


@pytest.mark.parametrize("lengths", [(512,), (512, 600, 1500), tuple(512 << i for i in range(12))])
def test_any_lengths_are_labelled(lengths: tuple[int, ...]) -> None:
    for make, draw in ((synthetic.accuracy, figures.draw_accuracy), (synthetic.by_depth, figures.draw_depth)):
        check_words(draw(make(lengths=lengths)))
    check_words(figures.draw_strengths(synthetic.strengths(lengths=lengths)))
    check_words(figures.draw_contrast(synthetic.contrast(lengths=lengths)))
    assert [axes.length_label(x) for x in (512, 1000, 1024, 1500, 3072, 1 << 20)] == ["512", "1,000", "1K", "1,500", "3K", "1M"]


def test_differences_of_zero_and_of_nothing_have_an_axis() -> None:
    ds = synthetic.contrast(2, 2)
    flat = figures.draw_contrast(ds.assign(difference=0 * ds["difference"]))
    assert flat.axes[0].get_ylim() == pytest.approx((-5.5, 5.5))
    nothing = figures.draw_contrast(ds.assign(difference=np.nan * ds["difference"]))
    assert [x.get_text() for panel in nothing.axes for x in panel.texts] == ["no data"] * 2
    check_words(nothing)


def test_a_gap_in_a_curve_is_left_open() -> None:
    ds = synthetic.accuracy()
    for name in ("accuracy", "low", "high"):
        ds[name][0, 2] = np.nan
    ds["samples"][0, 2] = 0
    (line, *_) = _marked(figures.draw_accuracy(ds).axes[0])
    assert np.isnan(_y(line)).tolist() == [False, False, True, False, False, False]


def _drawings() -> dict[str, partial[Figure]]:
    """Each figure from one run to many."""
    found: dict[str, partial[Figure]] = {}
    for arms, seeds in ((1, 1), (4, 2), (6, 6)):
        for name in ("accuracy", "depth", "dots"):
            make, draw = CASES[name]
            found[f"{name}-{arms}x{seeds}"] = partial(_draw, draw, make, synthetic.ARMS[:arms], seeds)
    for panels, seeds in ((1, 1), (2, 4), (3, 2), (5, 6), (5, 10)):
        found[f"contrast-{panels}x{seeds}"] = partial(_draw, figures.draw_contrast, synthetic.contrast, panels, seeds)
    for seeds in (1, 2, 6):
        found[f"strengths-{seeds}"] = partial(_draw, figures.draw_strengths, synthetic.strengths, seeds)
    for layers, steps in ((1, 1), (2, 50), (7, 50), (24, 50)):
        found[f"lambda-{layers}x{steps}"] = partial(_draw, figures.draw_lambda, synthetic.training, layers, 6, steps)
    return found | {"published": partial(_draw, figures.draw_contrast, synthetic.published)}


def _draw(draw: Callable[[xr.Dataset], Figure], make: Callable[..., xr.Dataset], *args: object) -> Figure:
    return draw(make(*args))


DRAWINGS = _drawings()


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_words_leave_the_page_or_lie_on_each_other(name: str) -> None:
    figure = DRAWINGS[name]()
    check_words(figure)
    assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
