"""Capacity of memories: states whose singular values are known, a plain loop over tokens in numpy for the rest."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import qed_probe as qp
from qed_probe.figures import draw_capacity
from qed_probe.memory import inspect_memory, inspect_memory_store
from qed_probe.memory.capacity import Capacity, measure, slot
from qed_probe.memory.singular import singular_values
from qed_probe.replays import LayerInputs
from qed_probe.store.memory import open_memory, save_memory
from tests.drawn import check_words, texts
from tests.memories import DELTA, by_hand, labelled, states, subject_for, with_state
from tests.replayed import make_layer
from tests.test_tracing import make_checkpoint

K = 4
E = np.eye(K)


def held(*layers: LayerInputs) -> xr.Dataset:
    part = Capacity(subject_for(*layers))
    for layer in layers:
        part.add(layer)
    return part.table()


def stored(keys: list[int], sizes: list[float], a: float = 1) -> LayerInputs:
    """A token for each association: e_i at e_i, of this size."""
    T = len(keys)
    k = E[keys][:, None]
    u = np.array(sizes)[:, None, None] * k
    return by_hand("kda", (0, T), q=E[keys], g=np.zeros((T, K)), k=k, a=a * k, u=u)


def test_one_association_has_rank_one() -> None:
    cell = held(stored([0], [3])).isel(layer=0, head=0, capacity_position=0)
    assert [float(cell[name]) for name in ("effective_rank", "stable_rank", "capacity_norm")] == pytest.approx([1, 1, 3])
    assert cell["singular_values"].values.tolist() == [1, 0, 0, 0]
    assert (int(cell["capacity_n"]), float(cell["capacity_tokens"]), int(cell["capacity_position"])) == (1, 1, 64)


def test_equal_associations_at_orthogonal_keys_count() -> None:
    cell = held(stored([2, 0, 1], [5, 5, 5])).isel(layer=0, head=0, capacity_position=0)
    assert [float(cell[name]) for name in ("effective_rank", "stable_rank")] == pytest.approx([3, 3])
    assert float(cell["capacity_norm"]) == pytest.approx(5 * 3**0.5)


def test_unequal_ones_in_fractions() -> None:
    # σ = 4, 2: p = 2/3, 1/3, exp of the entropy = 3/2^(2/3); ‖S‖² = 20, so the stable rank is 20/16.
    cell = held(stored([1, 3], [2, 4])).isel(layer=0, head=0, capacity_position=0)
    assert float(cell["effective_rank"]) == pytest.approx(3 / 2 ** (2 / 3))
    assert float(cell["stable_rank"]) == pytest.approx(5 / 4)
    assert cell["singular_values"].values == pytest.approx([1, 0.5, 0, 0])


def test_a_key_that_is_written_again_holds_one_association() -> None:
    cell = held(stored([0, 0], [3, 2])).isel(layer=0, head=0, capacity_position=0)  # γ = 1 on the stored key
    assert float(cell["effective_rank"]) == pytest.approx(1)
    assert float(cell["capacity_norm"]) == pytest.approx(2)


def test_an_empty_memory_has_a_norm_and_no_rank() -> None:
    ds = held(stored([0], [0]))
    assert ds["capacity_norm"].item() == 0
    assert np.isnan(ds["effective_rank"].item())
    assert (ds["capacity_n"].item(), ds["capacity_undefined"].item()) == (1, 1)


def test_what_is_not_finite_is_counted() -> None:
    x = torch.full((1, 1, 2, 2), torch.inf)
    assert measure(x).isnan().all()
    assert measure(torch.eye(2)[None, None]).ravel().tolist() == pytest.approx([2, 2, 2**0.5, 1, 1])


def test_threads_that_begin_later_have_all_cores() -> None:
    """Singular values are taken by threads of one core each, which is not for others to inherit: a trace keeps the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure(torch.eye(2)[None, None])
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mixer", DELTA)
def test_states_are_measured_at_marks_and_at_the_last_token(mixer: str) -> None:
    layer = with_state(make_layer(mixer, (0, 1, 65, 164, 464, 593)))
    ds = held(layer)
    assert ds["capacity_position"].values.tolist() == [64, 128, 256, 512]
    lengths = np.diff(layer.ends)
    for h in range(2):
        found: dict[int, list[np.ndarray]] = {}
        for p, t, seen in states(layer, h):
            if t + 1 in (64, 128, 256, lengths[p]):
                place = next(i for i, end in enumerate((64, 128, 256, 512)) if t + 1 <= end)
                found.setdefault(place, []).append(np.array([t + 1.0, *numbers(seen[-1])]))
        for place, rows in found.items():
            cell, x = ds.isel(layer=0, head=h, capacity_position=place), np.array(rows)
            assert int(cell["capacity_n"]) == len(rows)
            assert int(cell["capacity_undefined"]) == 0
            assert float(cell["capacity_tokens"]) == pytest.approx(x[:, 0].mean())
            for i, name in enumerate(("effective_rank", "stable_rank", "capacity_norm")):
                assert float(cell[name]) == pytest.approx(x[:, 1 + i].mean(), rel=1e-9)
                if len(rows) > 1:
                    assert float(cell[f"{name}_variance"]) == pytest.approx(x[:, 1 + i].var(ddof=1), rel=1e-6, abs=1e-14)
            np.testing.assert_allclose(cell["singular_values"], x[:, 4:].mean(0), atol=1e-9)
    assert ds["capacity_n"][0, 0].values.tolist() == [5, 3, 2, 1]


def numbers(S: np.ndarray) -> list[float]:
    """Ranks and norm through the eigenvalues of SᵀS, and the singular values."""
    sigma = np.sqrt(np.maximum(np.linalg.eigvalsh(S.T @ S)[::-1], 0))
    p = sigma[sigma > 0] / sigma.sum()
    return [np.exp(-(p * np.log(p)).sum()), (S**2).sum() / sigma[0] ** 2, np.sqrt((S**2).sum()), *sigma / sigma[0]]


@pytest.mark.parametrize("shape", [(3, 5, 7, 4), (1, 4, 7), (0, 4, 7), (2, 0, 3, 3)])
def test_singular_values_are_numpys(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(singular_values(x), np.linalg.svd(x.numpy(), compute_uv=False), rtol=0, atol=1e-13)


def test_threads_that_begin_later_have_the_cores_that_they_had() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        singular_values(torch.zeros(1, 2, 2))
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_packs_apart_are_the_same_as_together() -> None:
    first, second = with_state(make_layer("eda", (0, 70, 75))), with_state(make_layer("eda", (0, 200), seed=4), 5)
    ds = held(first, second)
    alone = [held(layer) for layer in (first, second)]
    assert ds["capacity_n"][0, 0].values.tolist() == [3, 2, 1]
    for place in range(2):
        n = [int(x["capacity_n"][0, 0, place]) for x in alone]
        mean = sum(count * x["effective_rank"][..., place] for count, x in zip(n, alone, strict=True)) / sum(n)
        np.testing.assert_allclose(ds["effective_rank"][..., place], mean, rtol=1e-12)


def test_no_prompt_at_all_is_no_table() -> None:
    assert not Capacity(subject_for(make_layer("kda"))).table()


def test_slots_end_at_powers_of_two() -> None:
    assert [slot(n) for n in (1, 63, 64, 65, 128, 129, 256, 257, 512, 513)] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert all(64 << slot(n) >= n > (64 << slot(n)) // 2 or n <= 64 for n in itertools.chain(range(1, 700), [4096, 4097]))


def test_the_figure_shows_the_numbers() -> None:
    ds = labelled(held(make_layer("eda", (0, 64, 164, 364))), trained_length=100)
    figure = draw_capacity(ds)
    names = ("effective_rank", "stable_rank", "capacity_norm", "capacity_norm_variance")
    for panel, name in zip(figure.axes, names, strict=False):
        x = ds[name][0].values ** (0.5 if name.endswith("variance") else 1)
        lines = [np.asarray(line.get_ydata(), float) for line in panel.lines]
        np.testing.assert_allclose(lines[:3], [*x, x.mean(0)])
        assert np.asarray(panel.lines[0].get_xdata(), float).tolist() == [64, (100 + 128) / 2, 200]
        assert lines[3].tolist() == [0, 1]
        assert np.asarray(panel.lines[3].get_xdata()).tolist() == [100, 100]
    spectrum = [np.asarray(line.get_ydata()) for line in figure.axes[4].lines]
    np.testing.assert_allclose(spectrum[:2], ds["singular_values"][0, :, -1])
    assert "trained at 100" in texts(figure)
    check_words(figure)


@pytest.mark.parametrize(
    ("layers", "heads", "ends"), [(1, 1, (0, 1)), (2, 3, (0, 64)), (24, 2, (0, 1, 300)), (1, 2, (0, 90, 190))]
)
def test_figures_of_any_size_can_be_read(layers: int, heads: int, ends: tuple[int, ...]) -> None:
    ds = held(make_layer("kda", ends, H=heads)).isel(layer=[0] * layers).assign_coords(layer=np.arange(layers))
    figure = draw_capacity(labelled(ds, prompts=len(ends) - 1))
    assert "At which length the model was trained is not known here." in texts(figure).replace("\n", " ")
    assert ("one prompt" in texts(figure)) == (len(ends) == 2)
    check_words(figure)


def test_a_figure_of_empty_memories_says_so() -> None:
    figure = draw_capacity(labelled(held(stored([0], [0]))))
    assert [[text.get_text() for text in panel.texts] for panel in figure.axes[:4]] == [
        ["no ranks"],
        ["no ranks"],
        [],
        ["one prompt"],
    ]
    assert "1 states are 0 or not finite and have no ranks." in texts(figure).replace("\n", " ")


def test_a_run_says_at_which_length_its_model_was_trained(tmp_path: Path) -> None:
    ds = inspect_memory(None, qp.text_prompts(["abc"], qp.ByteTokenizer()), only=["capacity"])
    assert ds.attrs["trained_length"] == 512
    untold = inspect_memory(make_checkpoint(tmp_path / "model", "kda"), [qp.Prompt(np.arange(9))], only=["capacity"])
    assert "trained_length" not in untold.attrs


def test_a_trace_says_what_its_model_says(tmp_path: Path) -> None:
    where, prompts, parts = make_checkpoint(tmp_path / "model", "qed"), [qp.Prompt(np.arange(70))] * 2, ["growth", "capacity"]
    ds = inspect_memory(where, prompts, only=parts)
    qp.trace(where, prompts, tmp_path / "run.zarr", save_inputs=True)
    kept = inspect_memory_store(tmp_path / "run.zarr", only=parts)
    assert set(kept.variables) == set(ds.variables)
    xr.testing.assert_allclose(kept.drop_attrs(), ds.drop_attrs(), rtol=1e-5)
    save_memory(ds, tmp_path / "memory.zarr")
    xr.testing.assert_identical(open_memory(tmp_path / "memory.zarr"), ds)
