"""Growth of memories: two tokens in fractions, a plain loop over tokens in numpy for the rest."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes

from qed_probe.figures import draw_growth
from qed_probe.memory import growth
from qed_probe.memory.growth import Growth, quantiles
from qed_probe.memory.passes import Running, written
from qed_probe.memory.transitions import LONGEST, spread, transitions, windows
from qed_probe.replays import LayerInputs
from qed_probe.replays.layer import cut
from tests.drawn import check_words, texts
from tests.memories import DELTA, Array, arrays, by_hand, labelled, states, subject_for, transition, with_state
from tests.replayed import make_layer

EXACT = 1e-10
"""Both sides are float64: products of a hundred factors lose a hundred of its 1e-16, or a bit more where they cancel."""


def grown(*layers: LayerInputs) -> xr.Dataset:
    part = Growth(subject_for(*layers))
    for layer in layers:
        part.add(layer)
    return part.table()


def close(found: Array, expected: Array) -> None:
    """Logarithms, of which −∞ has to be −∞."""
    np.testing.assert_allclose(np.exp(found), np.exp(expected), rtol=1e-6, atol=0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)


def slow(layer: LayerInputs, token: int, h: int, edit: int, size: int, *, base: bool) -> list[float]:
    """ln of the four measures, by their definition."""
    x = arrays(layer, base=base)
    phi, factors = np.eye(x["q"].shape[-1]), []
    for t in range(token + 1, token + 1 + size):
        phi = transition(x, t, h) @ phi
        factors += [1 - x["a"][t, h, m] @ x["k"][t, h, m] for m in range(x["k"].shape[2])]
    key = x["k"][token, h, edit]
    for m in range(edit + 1, x["k"].shape[2]):
        key = key - x["k"][token, h, m] * (x["a"][token, h, m] @ key)
    decay = x["g"][token + 1 : token + 1 + size, h].mean(-1).sum()
    realised = np.linalg.norm(phi @ key) / np.linalg.norm(x["k"][token, h, edit])
    with np.errstate(divide="ignore"):
        return [*np.log(np.array([np.linalg.norm(phi, 2), realised, abs(math.prod(factors))])), decay]


@pytest.mark.parametrize("mixer", DELTA)
def test_transitions_are_what_a_loop_over_tokens_finds(mixer: str) -> None:
    layer = make_layer(mixer, (0, 3, 92), seed=3)
    edit = {"rwkv7": 1, "eda-reversed": 0, "linear": 0}.get(mixer, layer.edits.main)
    assert written(layer) == edit
    tokens, ahead = [0, 3, 50, 90], [2, 88, 41, 1]
    for token, n, found in zip(tokens, ahead, transitions(layer.edits, tokens, ahead, edit), strict=True):
        expected = [[slow(layer, token, h, edit, size, base=False) for size in windows(n)] for h in range(2)]
        close(found.numpy(), np.array(expected).swapaxes(1, 2))


def test_two_tokens_in_fractions() -> None:
    # d = e₂ at a key of e₁: M = [[1 − b, −λ], [0, 1]]. With b = 1 the key is forgotten, and M makes 5/4 of (0, 1) if λ = 3/4.
    e1, e2 = np.eye(2)
    lam, b, alpha = Fraction(3, 4), 1, Fraction(1, 2)
    a = b * e1 + float(lam) * e2
    rows: dict[str, Any] = {"q": [e1] * 2, "g": [[math.log(alpha)] * 2] * 2, "k": [[e1]] * 2, "a": [[a]] * 2, "u": [[[1.0]]] * 2}
    ds = grown(by_hand("qed", (0, 2), float(lam), **rows, base=[b * e1] * 2, d=[e2] * 2))
    assert ds["growth_starts"].item() == 1
    assert ds["window"].values.tolist() == [1]
    cell = ds["growth"].isel(layer=0, head=0, window=0).sel(growth_level=0.5)
    factors: dict[str, tuple[Any, Any]] = {
        "norm": (alpha * Fraction(5, 4), alpha),
        "realised": (0, 0),
        "volume": (0, 0),
        "decay": (alpha, alpha),
    }
    for name, pair in factors.items():
        assert np.exp(cell.sel(growth_of=name).values) == pytest.approx([float(x) for x in pair], abs=1e-15), name
    zero = ds["growth_zero"].isel(layer=0, head=0, window=0)
    assert zero.sel(gates="own").values.tolist() == [0, 1, 1, 0]
    assert ds["growth_above"].sum() == 0
    # Token 1 writes 1 at e₁; token 2 first halves it, and its edit takes all of that.
    assert ds["norm_mean"].values.ravel() == pytest.approx([1, 1])
    # ‖M‖ is 5/4, without λd it is 1; d reads nothing at either token: e₂ holds nothing.
    assert ds["edit_growth"].item() == pytest.approx(2 * math.log(1.25))
    assert ds["edit_growth_max"].item() == pytest.approx(math.log(1.25))
    assert ds["joint_left_out"].values.ravel().tolist() == [2, 0]
    assert ds["joint_n"].sum() == 0


def test_the_key_that_is_read_by_the_direction_moves_to_the_next_key() -> None:
    # Token 1 writes e₂; token 2 has the key e₁, reads λ of e₂ and takes it from e₁: Φe₂ = e₂ − λe₁, longer than e₂. 5/4 again.
    e1, e2 = np.eye(2)
    k, lam = [[e2], [e1]], 0.75
    rows: dict[str, Any] = {"q": [e1] * 2, "g": np.zeros((2, 2)), "k": k, "a": [[e2], [e1 + lam * e2]], "u": [[[2.0]], [[0.0]]]}
    ds = grown(by_hand("qed", (0, 2), lam, **rows, base=[e2, e1], d=[e1, e2]))
    cell = ds["growth"].isel(layer=0, head=0, window=0).sel(growth_level=1)
    assert np.exp(cell.sel(growth_of="realised").values) == pytest.approx([1.25, 1])
    assert ds["growth_above"].isel(layer=0, head=0, window=0).sel(growth_of=["norm", "realised"]).values.tolist() == [[1, 0]] * 2
    # S = 2e₂, then 2(e₂ − λe₁): the norm goes from 2 to 5/2 with the direction alone. It reads 2 at ρ = 1.
    assert ds["norm_mean"].values.ravel() == pytest.approx([2.5, 2])
    place = np.argwhere(ds["joint_n"].values[0, 0])
    assert place.tolist() == [[39, int(np.searchsorted(growth.READ, 2.0)) - 1]]
    assert ds["joint_growth"].values[0, 0][tuple(place[0])] == pytest.approx(math.log(1.25))


@pytest.mark.parametrize("mixer", ["qed", "qed-noproj", "eda", "eda-reversed", "eda-qed", "deltaproduct", "rwkv7", "linear"])
def test_the_table_is_what_a_loop_over_tokens_finds(mixer: str) -> None:
    layer = with_state(make_layer(mixer, (0, 1, 21, 90), seed=1))
    ds, lengths = grown(layer), (1, 20, 69)
    starts = spread(lengths)
    assert ds["gates"].values.tolist() == ["own", "base"][: 1 + ("qed" in mixer)]
    assert ds["growth_starts"].values.tolist() == [[32, 32]]
    assert ds["window"].values.tolist() == [1, 2, 4, 8, 16, 32, 64][: ds.sizes["window"]]
    for (g, gates), (w, size) in itertools.product(enumerate(ds["gates"].values), enumerate(ds["window"].values.tolist())):
        there = [layer.ends[p] + t for p, t in starts if t + size < lengths[p]]
        assert (ds["growth_n"][0, :, :, g, w] == len(there)).all()
        rows = [[slow(layer, t, h, written(layer), size, base=gates == "base") for t in there] for h in range(2)]
        x = np.array(rows)
        for values, found in ((x[0], ds["growth"][0, 0]), (x[1], ds["growth"][0, 1]), (np.concatenate(x), ds["growth_layer"][0])):
            close(found[:, g, w].values, np.quantile(values, [0.5, 0.9, 1], axis=0, method="inverted_cdf").T)
        assert ds["growth_above"][0, :, :, g, w].values.tolist() == (x > growth.ROUNDING).sum(1).tolist()
        assert (ds["growth_zero"][0, :, :, g, w] == 0).all()


@pytest.mark.parametrize("mixer", ["qed", "eda-reversed", "deltaproduct"])
def test_norms_of_states_by_position(mixer: str) -> None:
    layer = with_state(make_layer(mixer, (0, 1, 71, 200), seed=2))
    ds = grown(layer)
    assert ds["norm_position"].values.tolist() == [64, 128, 192]
    for (g, gates), h in itertools.product(enumerate(ds["gates"].values), range(2)):
        by_position: dict[int, list[float]] = {}
        for p, t, seen in states(layer, h, base=gates == "base"):
            if t % 64 == 63 or t + 1 == layer.ends[p + 1] - layer.ends[p]:
                by_position.setdefault(t // 64, []).append(float(np.linalg.norm(seen[-1])))
        assert [len(by_position[i]) for i in range(3)] == ds["norm_n"][0, h, g].values.tolist() == [3, 2, 1]
        means = [np.mean(by_position[i]) for i in range(3)]
        np.testing.assert_allclose(ds["norm_mean"][0, h, g], means, rtol=EXACT)
        np.testing.assert_allclose(ds["norm_variance"][0, h, g, :2], [np.var(by_position[i], ddof=1) for i in (0, 1)], rtol=1e-9)
        assert np.isnan(ds["norm_variance"][0, h, g, 2])


@pytest.mark.parametrize("mixer", ["qed", "qed-rand", "qed-noproj", "qed-nogate-noproj", "eda-qed"])
def test_every_token_is_in_the_joint_or_counted(mixer: str) -> None:
    layer = make_layer(mixer, (0, 1, 40, 100), seed=5)
    ds, x, base = grown(layer), arrays(layer), arrays(layer, base=True)
    main = layer.edits.main
    counts, sums = (np.zeros(ds["joint_n"].shape[1:]) for _ in range(2))
    total, most = np.zeros(2), np.zeros(2)
    for h in range(2):
        for p, t, seen in states(layer, h):
            at = layer.ends[p] + t
            k = x["k"][at, h, main]
            norms = [np.linalg.norm(np.eye(len(k)) - np.outer(k, y["a"][at, h, main]), 2) for y in (x, base)]
            log, rho, read = np.log(norms[0] / norms[1]), x["q"][at, h] @ k, np.linalg.norm(seen[main].T @ x["d"][at, h])
            total[h], most[h] = total[h] + log, max(most[h], log)
            if read:
                row = np.flatnonzero(rho >= growth.RHO)[-1]
                column = np.flatnonzero(read >= growth.READ)[-1]
                counts[h, row, column] += 1
                sums[h, row, column] += log
    assert (ds["joint_n"][0].values == counts).all()
    assert ds["joint_left_out"].values.tolist() == [[[3, 0]] * 2]  # a prompt's first token reads an empty memory
    assert (ds["joint_n"].sum(("rho_bin", "read_bin")) + ds["joint_left_out"].sum("left_out") == 100).all()
    assert (ds["edit_growth_n"] == 100).all()
    np.testing.assert_allclose(ds["joint_growth"][0], sums, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ds["edit_growth"][0], total, rtol=1e-9)
    np.testing.assert_allclose(ds["edit_growth_max"][0], most, rtol=1e-9)
    assert (total > 0).all() or not layer.mixer.direction.projected  # type: ignore[union-attr]


def test_no_strength_is_no_growth_by_the_direction() -> None:
    layer = make_layer("qed", (0, 30, 60))
    a = layer.edits.a.clone()
    a[..., 0, :] = layer.edits.base
    ds = grown(replace(layer, edits=replace(layer.edits, a=a)))
    for name in ("growth", "growth_layer", "norm_mean", "growth_above"):
        assert (ds[name].sel(gates="own") == ds[name].sel(gates="base")).all(), name
    assert float(ds["edit_growth"].sum()) == float(ds["joint_growth"].sum()) == 0
    assert int(ds["joint_n"].sum()) == 2 * 58


def test_packs_and_layers_apart_are_the_same_as_together() -> None:
    whole = with_state(make_layer("qed", (0, 20, 50, 130)))
    state = whole.initial_state
    assert state is not None

    def part(a: int, b: int, ends: tuple[int, ...], prompts: tuple[int, ...]) -> LayerInputs:
        return replace(whole, edits=cut(whole.edits, slice(a, b)), ends=ends, prompts=prompts, initial_state=state[list(prompts)])

    first, second = part(0, 50, (0, 20, 50), (0, 1)), part(50, 130, (0, 80), (2,))
    other = replace(with_state(make_layer("qed", (0, 20, 50, 130), seed=9), 7), index=4)
    ds = grown(whole, other)
    xr.testing.assert_allclose(ds, grown(first, second, replace(other)), rtol=1e-9)
    assert ds["growth"].sizes["layer"] == 2
    xr.testing.assert_allclose(ds.isel(layer=[1]), grown(other), rtol=1e-12)


def test_a_prompt_that_is_left_out_takes_its_starts_along() -> None:
    whole = make_layer("kda", (0, 40, 80))
    part = Growth(subject_for(whole))
    part.add(replace(whole, edits=cut(whole.edits, slice(40, None)), ends=(0, 40), prompts=(1,)))
    ds = part.table()
    assert ds["growth_starts"].values.tolist() == [[16, 16]]
    assert ds["norm_n"].values.ravel().tolist() == [1, 1]


def test_prompts_of_one_token_have_no_transitions() -> None:
    ds = grown(make_layer("qed", (0, 1, 2)))
    assert ds["growth_starts"].values.tolist() == [[0, 0]]
    assert {"growth", "growth_layer", "growth_n"}.isdisjoint(ds)
    assert ds["norm_n"].values.tolist() == [[[[2], [2]]] * 2]
    assert ds["joint_left_out"].values.tolist() == [[[2, 0]] * 2]


def test_what_has_no_logarithm_is_counted() -> None:
    # In one dimension, and with b = 1 on the stored key, an edit takes everything: ‖M‖ = 0, with and without the direction.
    rows: dict[str, Any] = {
        "q": [[1.0]] * 3,
        "g": [[0.0]] * 3,
        "k": [[[1.0]], [[1.0]], [[0.0]]],
        "a": [[[1.0]]] * 3,
        "u": [[[1.0]]] * 3,
    }
    ds = grown(by_hand("qed", (0, 3), 0.5, **rows, base=[[1.0]] * 3, d=[[0.0]] * 3))
    assert ds["joint_left_out"].values.ravel().tolist() == [1, 2]  # the third key is 0 and changes nothing
    assert ds["edit_growth_n"].item() == 1
    assert ds["growth_zero"].sel(gates="own", growth_of="norm").values.ravel().tolist() == [1, 1]  # Φ over tokens 2 and 2 to 3


def test_a_key_of_no_length_has_no_growth() -> None:
    rows: dict[str, Any] = {
        "q": [[1.0, 0]] * 2,
        "g": [[0.0, 0]] * 2,
        "k": [[[0.0, 0]], [[1.0, 0]]],
        "a": [[[0.0, 0]]] * 2,
        "u": [[[1.0]]] * 2,
    }
    ds = grown(by_hand("kda", (0, 2), **rows))
    assert ds["growth_n"].isel(layer=0, head=0, window=0, gates=0).values.tolist() == [1, 0, 1, 1]
    assert np.isnan(ds["growth"].sel(growth_of="realised")).all()


def test_memories_that_outgrow_float64_are_infinite() -> None:
    n = 400
    rows: dict[str, Any] = {
        "q": [[1.0, 0]] * n,
        "g": np.zeros((n, 2)),
        "k": [[[1.0, 0]]] * n,
        "a": [[[-99.0, 0]]] * n,
        "u": [[[1.0]]] * n,
    }
    ds = grown(by_hand("qed", (0, n), 0.25, **rows, base=[[-99.0, 0]] * n, d=[[0.0, 1]] * n))
    assert np.isposinf(ds["growth"].sel(growth_of="norm", window=256)).all()
    assert ds["norm_n"].values[0, 0].tolist() == [[1, 0, 0, 0, 0, 0, 0]] * 2
    left = ds["joint_left_out"].values[0, 0]
    assert left[0] + left[1] + int(ds["joint_n"].sum()) == n
    assert ds["growth"].sel(growth_of="norm", window=4, gates="own", growth_level=1).item() == pytest.approx(4 * np.log(100))


@pytest.mark.parametrize("lengths", [(1,), (2,), (5, 1, 1, 9), (600,), (1, 2000, 30)])
def test_starts_are_spread_over_all_tokens_that_have_another_behind_them(lengths: tuple[int, ...]) -> None:
    starts, there = spread(lengths), sum(length - 1 for length in lengths)
    assert len(starts) == len(set(starts)) == min(32, there)
    assert all(0 <= t < lengths[p] - 1 for p, t in starts)
    before = np.cumsum([0, *lengths]) - np.arange(len(lengths) + 1)
    flat = np.array([before[p] + t for p, t in starts])
    edges = np.linspace(0, there, len(starts) + 1).astype(int)
    assert (edges[:-1] <= flat).all()
    assert (flat < edges[1:]).all()
    assert starts == spread(lengths)


def test_windows_end_where_the_prompt_or_the_limit_is() -> None:
    assert [windows(n) for n in (0, 1, 2, 3, 4, 511)] == [[], [1], [1, 2], [1, 2], [1, 2, 4], [1 << i for i in range(9)]]
    assert windows(10_000)[-1] == LONGEST == 512


def test_quantiles_are_values_that_there_are() -> None:
    x = np.array([[3.0, np.nan, -np.inf, 1.0], [2.0, 5.0, 4.0, 1.0], [np.nan] * 4, [7.0, np.nan, np.nan, np.nan]])
    assert quantiles(x)[:2].tolist() == [[1, 3, 3], [2, 5, 5]]
    assert np.isnan(quantiles(x)[2]).all()
    assert quantiles(x)[3].tolist() == [7, 7, 7]


def test_running_moments_keep_a_small_variance_beside_a_large_mean() -> None:
    x = 1e9 + np.arange(5.0)
    running = Running((2, 2))
    for value in x:
        running.add((1,), np.array([value, np.nan if value % 2 else np.inf]))
    assert running.n.tolist() == [[0, 0], [5, 0]]
    assert running.mean[1, 0] == 1e9 + 2
    assert running.variance[1, 0] == pytest.approx(2.5, rel=1e-6)
    assert np.isnan(running.mean[0]).all()
    assert np.isnan(running.variance[[0, 1], 1]).all()


def cells_of(panel: Axes) -> Any:  # noqa: ANN401 - a masked array
    return panel.collections[0].get_array()


def test_the_figure_shows_the_numbers() -> None:
    layer = make_layer("qed", (0, 1, 40, 100), K=16)
    ds = labelled(grown(layer))
    figure = draw_growth(ds)
    lines = [np.asarray(line.get_ydata(), float) for line in figure.axes[0].lines[1:]]
    cells = ds["growth_layer"].isel(layer=0).transpose("growth_of", "gates", "growth_level", "window")
    drawn = [("norm", g, level) for g in range(2) for level in (0.5, 1)]
    drawn += [(name, g, 0.5) for name in ("realised", "decay", "volume") for g in range(2)]
    for line, (name, g, level) in zip(lines, drawn, strict=True):
        np.testing.assert_allclose(line, np.exp(cells.sel(growth_of=name, growth_level=level)[g].values))
    norms = [np.asarray(line.get_ydata(), float) for line in figure.axes[1].lines]
    np.testing.assert_allclose(norms, ds["norm_mean"][0].mean("head").values)
    counted, grown_by = (cells_of(figure.axes[i]) for i in (2, 3))
    assert counted.sum() == ds["joint_n"].sum()
    n = ds["joint_n"].sum(("layer", "head")).transpose("read_bin", "rho_bin").values
    assert grown_by.count() == (n >= 10).sum()
    words = texts(figure).replace("\n", " ")
    mean = float(ds["edit_growth"].sum() / ds["edit_growth_n"].sum())
    assert f"the mean of its ln ratio is {mean:.2g} over 200 tokens and heads" in words
    assert "Not in the maps: 6 with ‖S̄ᵀd‖ = 0" in words
    check_words(figure)


@pytest.mark.parametrize(("mixer", "layers", "heads"), [("qed", 1, 1), ("eda", 2, 3), ("qed", 24, 2)])
def test_figures_of_any_size_can_be_read(mixer: str, layers: int, heads: int) -> None:
    ds = grown(make_layer(mixer, (0, 1, 90), H=heads))
    many = ds.isel(layer=[0] * layers).assign_coords(layer=np.arange(layers))
    check_words(draw_growth(labelled(many, mixer=mixer, prompts=1, tokens_incomplete=5)))


def test_the_figure_says_what_is_not_there() -> None:
    one = draw_growth(labelled(grown(make_layer("qed", (0, 1)))))
    assert "no token has another behind it" in texts(one)
    assert texts(one).count("nothing is read") == 2
    check_words(one)
    still = make_layer("qed", (0, 30))
    e = still.edits
    silent = labelled(grown(replace(still, edits=replace(e, a=e.base[..., None, :]))))
    assert "λ = 0: with and without λd is the same." in texts(draw_growth(silent)).replace("\n", " ")
    lost = draw_growth(labelled(grown(still)).assign(nonfinite=("layer", [2])))
    assert "left out: up to 2 prompts a layer whose inputs are not finite" in texts(lost).replace("\n", " ")


def test_a_layer_without_a_finite_prompt_is_said_and_no_lambda_of_0() -> None:
    layer = make_layer("qed", (0, 30))
    part = Growth(subject_for(layer, replace(layer, index=1)))
    part.add(layer)
    half = labelled(part.table(), prompts=1).assign(nonfinite=("layer", [0, 1]))
    said = texts(draw_growth(half))
    assert said.splitlines().count("no tokens") == 1
    assert "up to 1 prompts a layer whose inputs are not finite, so all of layer 1" in said.replace("\n", " ")
    none = labelled(Growth(subject_for(layer)).table(), prompts=1).assign(nonfinite=("layer", [1]))
    said = texts(draw_growth(none)).replace("\n", " ")
    assert "M: the main edit of one token; there is none." in said
    assert "nan" not in said
    assert "λ = 0" not in said
    assert "no states" in said
