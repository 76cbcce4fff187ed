"""Replays of whole runs: from a model, from its trace, on disk, as a table and as a figure."""

import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.patches import Rectangle

import qed_probe as qp
from qed_probe import cli
from qed_probe.errors import InputError, StoreError
from qed_probe.figures import draw_replay
from qed_probe.replays import against_actual, captured_inputs, counterfactuals, over_layers, replay_layer, summarise
from qed_probe.store import place
from qed_probe.store.replays import left_out
from tests.drawn import check_words, texts
from tests.test_tracing import make_checkpoint

LENGTHS = (70, 9, 40)


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[qp.Prompt]:
    rng = np.random.default_rng(0)
    return [qp.Prompt(rng.integers(0, 256, n)) for n in lengths]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, xr.Dataset]]:
    """Of each mixer a checkpoint, a trace with its inputs, and the replays of the model."""
    found = {}
    for mixer in ("qed", "eda"):
        folder = tmp_path_factory.mktemp(mixer)
        where = make_checkpoint(folder / "model", mixer)
        qp.trace(where, make_prompts(), folder / "run.zarr", save_inputs=True)
        found[mixer] = where, folder / "run.zarr", qp.replay(where, make_prompts(), draws=2, seed=3)
    return found


@pytest.mark.parametrize("mixer", ["qed", "eda"])
def test_offline_is_what_the_model_gives(mixer: str, runs: dict[str, tuple[Path, Path, xr.Dataset]]) -> None:
    _, trace, expected = runs[mixer]
    said: list[tuple[int, int]] = []
    found = qp.replay_store(trace, draws=2, seed=3, progress=lambda *x: said.append(x))
    for name in expected.data_vars:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=str(name))
    assert said[-1] == (2 * sum(LENGTHS), 2 * sum(LENGTHS))
    assert {k: v for k, v in found.attrs.items() if k not in ("source", "off")} == {
        k: v for k, v in expected.attrs.items() if k not in ("source", "off")
    }
    assert (found.attrs["source"], expected.attrs["source"]) == ("store", "model")
    part = qp.replay_store(trace, draws=2, seed=3, layers=[1])
    xr.testing.assert_allclose(part["mean"], found["mean"].sel(layer=[1]))


def test_replays_say_what_was_changed_in_the_model(runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path) -> None:
    where, path = runs["qed"][0], tmp_path / "run.zarr"
    assert qp.replay(where, make_prompts(), strength=2.0).attrs["subject"] == "Mixer qed, strength 2"
    for change, said in (
        ({"strength": 0.5, "at": [(0, 1)]}, "Mixer qed, strength 0.5 at 0:1"),
        ({"direction": "noproj"}, "Mixer qed-noproj (not the model's own)"),
        ({"mode": "lasting", "at": [(0, 1)]}, "Mixer qed, mode lasting at 0:1"),
    ):
        ds = qp.trace(where, make_prompts(), path, save_inputs=True, overwrite=True, **change)
        found = qp.replay_store(path)
        assert found.attrs["subject"] == qp.analyses.rho(ds).attrs["subject"] == said
        assert f"{said}, 119 tokens" in texts(draw_replay(found)).replace("\n", " ")


def test_passes_change_nothing(runs: dict[str, tuple[Path, Path, xr.Dataset]], monkeypatch: pytest.MonkeyPatch) -> None:
    where, trace, expected = runs["qed"]
    monkeypatch.setattr("qed_probe.tracing.plan.PACK", 64)
    monkeypatch.setattr("qed_probe.replays.stored.PACK", 64)
    for found in (qp.replay(where, make_prompts(), draws=2, seed=3), qp.replay_store(trace, draws=2, seed=3)):
        for name in ("mean", "median", "drift_median", "n"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_an_incomplete_prompt_is_left_out(
    runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qed_probe.store.schema.MAX_BLOCK", 64)
    part, prompts = tmp_path / "part.zarr", make_prompts((9, 40, 70))
    qp.trace(runs["eda"][0], prompts, part, save_inputs=True)
    xr.Dataset({"done": ("block", np.array([1, 0], np.uint8))}).to_zarr(part, mode="r+")
    with pytest.warns(qp.IncompleteStoreWarning):
        found = qp.replay_store(part, draws=1)
    whole = qp.replay(runs["eda"][0], prompts[:2], draws=1)
    np.testing.assert_allclose(found["mean"], whole["mean"], rtol=1e-4, atol=1e-6)
    assert left_out(found)[-1] == "70 tokens of prompts that are not complete"
    copy = tmp_path / "run.zarr"
    shutil.copytree(runs["eda"][1], copy)
    xr.Dataset({"done": ("block", np.array([0], np.uint8))}).to_zarr(copy, mode="r+")
    none = pytest.raises(StoreError, match="expected a complete prompt to replay, found none of 3")
    with pytest.warns(qp.IncompleteStoreWarning), none:
        qp.replay_store(copy)


def test_what_replays_are_without_is_said_in_words(runs: dict[str, tuple[Path, Path, xr.Dataset]]) -> None:
    ds = runs["qed"][2].copy(deep=True).assign_attrs(prompts_of_one_token=1, tokens_incomplete=1200)
    ds["ratio"].loc[{"regime": "trajectory", "layer": 1}] = np.nan
    ds["nonfinite"].loc[{"match": "norm", "direction": "random"}] = 3
    said = [
        "same-address: empty, as P⊥ₖk = 0",
        "ratios of layer 1, where the actual direction changes nothing",
        "12 values of random that are not finite",
        "1 prompt of one token",
        "1,200 tokens of prompts that are not complete",
    ]
    assert left_out(ds) == said
    assert f"Left out: {'; '.join(said)}." in texts(draw_replay(ds)).replace("\n", " ")
    still = qp.replay(runs["qed"][0], make_prompts(), strength=0.0)
    assert left_out(still)[1] == "ratios of layer 0, 1, where the actual direction changes nothing"


def test_numbers_of_a_run_follow_from_its_tokens(runs: dict[str, tuple[Path, Path, xr.Dataset]]) -> None:
    for mixer, ways in (("qed", ["none", "norm"]), ("eda", ["none"])):
        where, _, ds = runs[mixer]
        assert ds["match"].values.tolist() == ways
        assert ds["regime"].values.tolist() == ["one-step", "trajectory"]
        model = qp.load_model(where)
        ends = torch.tensor([0, *itertools.accumulate(LENGTHS)])
        with torch.no_grad(), qp.capture(model) as seen:
            model(torch.from_numpy(np.concatenate([p.tokens for p in make_prompts()]))[None], cu_seqlens=ends)
        for captured in seen:
            layer = captured_inputs(captured)
            measures = replay_layer(layer, counterfactuals(layer, draws=2, seed=3)).measures
            for (way, regime, name), x in measures.items():
                cell = ds.sel(match=way, regime=regime, direction=name, layer=captured.layer)
                gate, overlap, read, before, shift, output = (y.numpy().astype(float).ravel() for y in x.unbind(1))
                kept = before > 0
                perturbation = gate[kept] * overlap[kept] * read[kept] / before[kept]
                assert int(cell["n"]) == kept.sum()
                assert int(cell["undefined"]) == (~kept).sum()
                assert int(cell["nonfinite"]) == 0
                expected = {
                    "mean": perturbation.mean(),
                    "median": np.median(perturbation),
                    "sum_ratio": (gate * overlap * read)[kept].sum() / before[kept].sum(),
                    "read": read[kept].mean(),
                    "drift_mean": (shift / output).mean(),
                    "drift_median": np.median(shift / output),
                }
                for column, value in expected.items():
                    np.testing.assert_allclose(float(cell[column]), value, rtol=1e-4, atol=1e-7, err_msg=f"{column} of {name}")
    assert ds["undefined"].sel(direction="actual").values.tolist() == [[[6, 6]] * 2]


def test_ratios_are_the_papers_and_those_that_they_are_not() -> None:
    mean = np.array([[1.0, 4.0], [2.0, 2.0], [0.0, 0.0]])
    columns = {"mean": mean, "n": np.array([[10, 30], [10, 10], [10, 30]])}
    columns |= dict.fromkeys(("median", "sum_ratio", "drift_mean"), mean)
    names = ["actual", "other", "none"]
    assert against_actual(mean, names).tolist() == [[1, 1], [2, 0.5], [0, 0]]
    found = over_layers(columns, names)
    assert found["mean_of_ratios"].tolist() == [1, 1.25, 0]
    assert found["ratio_of_means"].tolist() == [1, 2 / 3.25, 0]
    assert found["layers_mean"].tolist() == [2.5, 2, 0]
    assert np.isnan(against_actual(0 * mean, names)).all()


def test_what_has_no_number_is_counted() -> None:
    quantities = np.ones((6, 5))
    quantities[3, 1] = quantities[5, 2] = 0  # no output before, none after
    quantities[4, 3] = np.inf
    found = summarise(quantities)
    assert (found["n"], found["undefined"], found["nonfinite"], found["drift_n"]) == (3, 1, 1, 3)
    assert found["mean"] == found["drift_median"] == 1
    assert np.isnan(summarise(np.zeros((6, 2)))["mean"])


def test_prompts_of_one_token_are_left_out_where_there_are_longer_ones(
    runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path
) -> None:
    where, _, expected = runs["eda"]
    prompts = make_prompts()
    mixed = [qp.Prompt(np.array([5])), *prompts[:2], qp.Prompt(np.array([7])), prompts[2]]
    qp.trace(where, mixed, tmp_path / "run.zarr", save_inputs=True)
    for found in (qp.replay(where, mixed, draws=2, seed=3), qp.replay_store(tmp_path / "run.zarr", draws=2, seed=3)):
        np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-4)
        assert (found.attrs["prompts"], found.attrs["prompts_of_one_token"]) == (3, 2)
    alone = qp.replay(where, [qp.Prompt(np.array([5]))])
    assert "shuffled-token" not in alone["direction"].values
    assert alone.attrs["absent"] == "shuffled-token: a prompt of one token, so that there is no other"


def test_what_cannot_be_replayed_is_refused_in_one_line(runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "gdn2", "gdn2")
    qp.trace(where, make_prompts(), tmp_path / "gdn2.zarr")
    qp.trace(runs["qed"][0], make_prompts(), tmp_path / "bare.zarr")
    refused = "mixer gdn2: expected one that adds an erase direction"
    with pytest.raises(InputError, match=refused):
        qp.replay(where, make_prompts())
    with pytest.raises(InputError, match=refused):
        qp.replay_store(tmp_path / "gdn2.zarr")
    with pytest.raises(StoreError, match="expected group inputs, found none; a trace with save_inputs keeps it"):
        qp.replay_store(tmp_path / "bare.zarr")
    with pytest.raises(InputError, match=r"layers: expected some of \[0, 1\], found \[7\]"):
        qp.replay_store(runs["qed"][1], layers=[7])
    with pytest.raises(InputError, match="match: expected one of norm, read, correction, none, found 'size'"):
        qp.replay(runs["qed"][0], make_prompts(), match="size")  # type: ignore[arg-type]


def test_a_replay_that_disagrees_with_its_trace_stops(runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path) -> None:
    qp.trace(runs["qed"][0], make_prompts(), tmp_path / "run.zarr", save_inputs=True)
    stored = xr.open_zarr(tmp_path / "run.zarr", group="inputs")[["o"]].load()
    stored["o"][1, 20] += 1
    stored[["o"]].drop_vars(stored.coords).to_zarr(tmp_path / "run.zarr", group="inputs", mode="r+")
    with pytest.raises(qp.CheckFailed, match="layer 1: expected the actual direction's replay within"):
        qp.replay_store(tmp_path / "run.zarr")


def test_a_store_of_replays_comes_back_and_is_never_overwritten_by_accident(
    runs: dict[str, tuple[Path, Path, xr.Dataset]], tmp_path: Path
) -> None:
    ds, path = runs["qed"][2], tmp_path / "replay.zarr"
    qp.save_replays(ds, path)
    xr.testing.assert_identical(qp.open_replays(path), ds)
    assert place.kind(path) == "a store of replays"
    with pytest.raises(StoreError, match="expected nothing there, found a store of replays"):
        qp.save_replays(ds, path)
    qp.save_replays(runs["eda"][2], path, overwrite=True)
    assert qp.open_replays(path).attrs["replaced"] == "address"
    with pytest.raises(StoreError, match="expected a store of replays, found a trace store"):
        qp.save_replays(ds, runs["qed"][1], overwrite=True)
    with pytest.raises(StoreError, match="expected a store of outcomes, found a store of replays"):
        qp.open_outcomes(path)
    with pytest.raises(StoreError, match=r"expected the variables of replays along .*, found no mean"):
        qp.save_replays(ds.drop_vars("mean"), tmp_path / "other.zarr")
    (path / "median" / "c").rename(tmp_path / "lost")
    with pytest.raises(StoreError, match="found none of median"):
        qp.open_replays(path)


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, words)])
    return cli.main()


def test_the_command_says_it_and_plot_draws_it(
    runs: dict[str, tuple[Path, Path, xr.Dataset]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where, trace, _ = runs["eda"]
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "replay", where, "--text", "one and another", "--text", "a third") == 0
    said = capsys.readouterr().out
    rows = [line.split()[:2] for line in said.splitlines() if line.split()[1:2] in (["one-step"], ["trajectory"])]
    names = ["actual", "none", "reversed", "random", "shuffled-head", "shuffled-token", "same-address"]
    assert rows == [[name, regime] for name in names for regime in ("one-step", "trajectory")]
    assert "the mean of per-layer ratios" in said
    assert "A smaller\nperturbation is not better by itself" in said
    assert "n = 40 tokens and heads a layer, 2 layers" in said
    assert "4 tokens and heads a layer with ‖o⁻‖ = 0" in said
    assert qp.open_replays("replay.zarr").attrs["created_by"].startswith("qed-probe replay")
    with monkeypatch.context() as without:  # what is there is seen before anything is replayed
        without.setattr(qp, "replay_store", None)
        capsys.readouterr()
        assert call(without, "replay", trace) == 2
        assert "replay.zarr: expected nothing there" in capsys.readouterr().err
    assert call(monkeypatch, "replay", trace, "-o", "again.zarr", "--match", "none") == 0
    assert call(monkeypatch, "plot", "replay.zarr", "-o", "figures") == 0
    assert {path.name for path in Path("figures").iterdir()} == {"replay.png", "replay.svg"}
    assert call(monkeypatch, "plot", "replay.zarr", "again.zarr") == 2
    make_checkpoint(tmp_path / "kda", "kda")
    capsys.readouterr()
    assert call(monkeypatch, "replay", "kda", "-o", "none.zarr") == 2
    assert capsys.readouterr().err.startswith("qed-probe: error: mixer kda: expected one that adds an erase direction")
    assert call(monkeypatch, "replay", trace, "--text", "x", "-o", "none.zarr") == 2
    assert "--text: expected with a checkpoint, found with the store" in capsys.readouterr().err


@pytest.mark.parametrize("mixer", ["qed", "eda"])
def test_the_figure_shows_the_datasets_numbers(mixer: str, runs: dict[str, tuple[Path, Path, xr.Dataset]]) -> None:
    ds = runs[mixer][2]
    figure = draw_replay(ds)
    check_words(figure)
    ways, names = ds.sizes["match"], ds["direction"].values.tolist()
    assert len(figure.axes) == 3 * ways
    for i, panel in enumerate(figure.axes):
        cell = ds.isel(match=i // 3)
        bars = [bar.get_width() for bar in panel.patches if isinstance(bar, Rectangle)]
        dots = np.array([line.get_xdata() for line in panel.lines if line.get_marker() == "o"])
        if i % 3 == 2:
            np.testing.assert_allclose(bars, 100 * cell["layers_drift_mean"].sel(regime="trajectory"))
            np.testing.assert_allclose(dots, 100 * cell["drift_mean"].sel(regime="trajectory"))
        else:
            np.testing.assert_allclose(bars, cell["mean_of_ratios"].isel(regime=i % 3))
            np.testing.assert_allclose(dots, cell["ratio"].isel(regime=i % 3))
        if i % 3 == 0:
            assert [label.get_text() for label in panel.get_yticklabels()] == names
    words = texts(figure).replace("\n", " ")
    assert "A smaller perturbation is not better by itself" in words
    assert ("empty, as P⊥ₖk = 0" in words) == (mixer == "qed")


def test_a_figure_of_a_mixer_that_does_nothing_has_no_silent_holes(tmp_path: Path) -> None:
    still = qp.replay(make_checkpoint(tmp_path / "model", "qed"), make_prompts((20, 30)), strength=0, draws=1)
    assert (still["mean"] == 0).all()
    assert still["ratio"].isnull().all()
    figure = draw_replay(still)
    check_words(figure)
    assert texts(figure).count("no data") == 2 * 2 * still.sizes["direction"]
