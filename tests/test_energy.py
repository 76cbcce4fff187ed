"""The energy ledger: known answers by hand, a plain loop over tokens for the rest, and a sum that must close."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from numpy.typing import ArrayLike

import qed_probe as qp
from qed_probe.analyses import energy, energy_ledger
from qed_probe.analyses.blocks import Array
from qed_probe.errors import CheckFailed, StoreError
from qed_probe.figures import draw_energy
from tests.drawn import check_words, texts
from tests.test_tracing import make_checkpoint

K, V = 4, 3
E = np.eye(K)
Edit = tuple[ArrayLike, ArrayLike, ArrayLike]


def stored(
    g: ArrayLike,
    k: ArrayLike,
    a: ArrayLike,
    u: ArrayLike,
    lengths: tuple[int, ...] = (),
    state: ArrayLike | None = None,
    roles: list[str] | None = None,
    **attrs: Any,  # noqa: ANN401
) -> xr.Dataset:
    """A store's inputs of these: ``g`` ``[layer, token, head, K]``, ``k``, ``a``, ``u`` with an edit axis before the last."""
    g, k, a, u = (np.asarray(x, np.float32) for x in (g, k, a, u))
    T = g.shape[1]
    ends = np.cumsum([0, *(lengths or (T,))])
    edit = ("layer", "token", "head", "edit")
    variables: dict[str, Any] = {"g": ((*edit[:3], "key"), g), "k": ((*edit, "key"), k), "a": ((*edit, "key"), a)}
    variables["u"] = (*edit, "value"), u
    if state is not None:
        variables["initial_state"] = ("layer", "prompt", "head", "key", "value"), np.asarray(state, np.float32)
    coords: dict[str, Any] = {"layer": np.arange(len(g)), "token_id": ("token", np.arange(T)), "cu_seqlens": ("boundary", ends)}
    if roles is not None:
        coords["role"] = "token", np.array(roles)
    return xr.Dataset(variables, coords, {"mixer": "qed"} | attrs)


def one(memory: Array, edits: list[Edit], g: float = 0, mixer: str = "qed") -> xr.Dataset:
    """The ledger of one token of one head over this memory, with these edits (k, a, u)."""
    k, a, u = (np.array(x)[None, None, None] for x in zip(*edits, strict=True))
    inputs = stored(np.full((1, 1, 1, K), g), k, a, u, state=memory[None, None, None], mixer=mixer)
    return energy_ledger(inputs, inputs).isel(layer=0, head=0).sel(role="all")


def random(lengths: tuple[int, ...], layers: int = 2, heads: int = 3, edits: int = 2, **more: Any) -> xr.Dataset:  # noqa: ANN401
    """Lively inputs: keys of any length, some with g = −∞, some edits that read or write nothing."""
    rng = np.random.default_rng(len(lengths) + edits)
    shape = layers, sum(lengths), heads
    g = -rng.gamma(0.5, 0.2, (*shape, K))
    g[rng.random(g.shape) < 0.02] = -np.inf
    k, a, u = (rng.normal(size=(*shape, edits, size)) for size in (K, K, V))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    a = 0.5 * k * rng.random(a.shape) + 0.1 * a
    a[rng.random(a.shape[:-1]) < 0.1] = 0
    u[rng.random(u.shape[:-1]) < 0.1] = 0
    state = rng.normal(size=(layers, len(lengths), heads, K, V))
    return stored(g, k * rng.uniform(0.5, 1.1, (*shape, edits, 1)), a, u, lengths, state, **more)


def slow(inputs: xr.Dataset, layer: int, head: int, prompts: list[int]) -> dict[str, Any]:
    """‖S‖² measured before and after everything that is done to it, a token after another: no formula at all."""
    x = inputs.isel(layer=layer, head=head).astype(np.float64)
    ends, edits = inputs["cu_seqlens"].values, inputs.sizes["edit"]
    role = inputs["role"].values if "role" in inputs else np.full(ends[-1], "")
    found: dict[str, Any] = {}
    for p in prompts:
        S = x["initial_state"].values[p] if "initial_state" in x else np.zeros((inputs.sizes["key"], inputs.sizes["value"]))
        for t in range(ends[p], ends[p + 1]):
            energies = [np.sum(S**2)]
            S = np.exp(x["g"].values[t])[:, None] * S
            energies.append(np.sum(S**2))
            for m in range(edits):
                k, a, u = (x[name].values[t, m] for name in "kau")
                S = S - np.outer(k, S.T @ a)
                energies.append(np.sum(S**2))
                S = S + np.outer(k, u)
                energies.append(np.sum(S**2))
            for name in {"all", role[t]}:
                before = found.setdefault(name, {"changes": np.zeros(1 + 2 * edits), "held": 0.0, "n": 0})
                before["changes"] += np.diff(energies)
                before["held"] += energies[0]
                before["n"] += 1
    return found


def check(ds: xr.Dataset, inputs: xr.Dataset, prompts: list[int]) -> None:
    """The ledger of these prompts is what the slow loop finds."""
    for layer, head in itertools.product(range(ds.sizes["layer"]), range(ds.sizes["head"])):
        expected = slow(inputs, layer, head, prompts)
        for name in ds["role"].values:
            cell, x = ds.isel(layer=layer, head=head).sel(role=name), expected[name]
            scale = np.abs(x["changes"]).max()
            np.testing.assert_allclose(cell["erase"], x["changes"][[0, *range(1, len(x["changes"]), 2)]], atol=1e-12 * scale)
            np.testing.assert_allclose(cell["write"], [0, *x["changes"][2::2]], atol=1e-12 * scale)
            np.testing.assert_allclose(cell["change"], cell["erase"] + cell["write"], atol=1e-12 * scale)
            assert float(cell["held"]) == pytest.approx(x["held"])
            assert int(cell["n"]) == x["n"]
            np.testing.assert_allclose(cell["mean_change"], cell["change"] / x["n"])
    parts = ds["change"].sel(role="all").sum("part")
    np.testing.assert_allclose(ds["end"] - ds["start"], parts, atol=1e-10 * float(ds["end"].max()))
    assert float(ds["closing_error"].max()) < 1e-13


def test_decay_takes_one_minus_the_square_of_its_factor() -> None:
    memory = np.arange(12.0).reshape(K, V)
    found = one(memory, [(E[0], 0 * E[0], np.zeros(V))], g=float(np.float32(np.log(0.5))))
    assert found["change"].values == pytest.approx([-0.75 * np.sum(memory**2), 0], rel=1e-6)
    found = one(memory, [(E[0], 0 * E[0], [1, 2, 2])], g=-np.inf)
    assert found["change"].values.tolist() == [-np.sum(memory**2), 9]
    assert (float(found["start"]), float(found["end"]), float(found["closing_error"])) == (np.sum(memory**2), 9, 0)


@pytest.mark.parametrize("gamma", [0.0, 0.25, 1.0, 2.0])
def test_an_address_takes_two_minus_gamma_times_gamma_of_what_lies_there(gamma: float) -> None:
    memory = np.arange(12.0).reshape(K, V)
    address = np.array([0.5, -0.5, 0.5, 0.5])
    there = np.sum((memory.T @ address) ** 2)
    found = one(memory, [(address, gamma * address, np.zeros(V)), (E[0], 0 * E[0], np.zeros(V))], mixer="eda")
    assert found["part"].values.tolist() == ["decay", "address", "edit"]
    assert found["change"].values == pytest.approx([0, -gamma * (2 - gamma) * there, 0])
    assert (found["write"] == 0).all()
    reversed_ = one(memory, [(E[0], 0 * E[0], np.zeros(V)), (address, gamma * address, np.zeros(V))], mixer="eda-reversed")
    assert reversed_["part"].values.tolist() == ["decay", "edit", "address"]
    assert float(reversed_["change"].sel(part="address")) == pytest.approx(-gamma * (2 - gamma) * there)


def test_an_edit_at_the_address_finds_what_the_address_left() -> None:
    memory = np.ones((K, V))
    found = one(memory, [(E[1], E[1], np.zeros(V)), (E[1], E[1], [3, 0, 0])], mixer="eda-same")  # ε = k, γ = β = 1
    assert found["erase"].values.tolist() == [0, -V, 0]
    assert found["write"].values.tolist() == [0, 0, 9]


def test_what_lies_across_the_key_is_not_taken() -> None:
    memory = np.outer(E[2], [1.0, 2, 2])
    found = one(memory, [(E[0], E[0], [2, 0, 0])])
    assert found["part"].values.tolist() == ["decay", "edit"]
    assert found["erase"].values.tolist() == [0, 0]
    assert found["write"].values.tolist() == [0, 4]
    assert found["erase_share"].values.tolist() == [0, 0]
    assert found["write_share"].values == pytest.approx([0, 4 / 9])


def test_a_read_across_the_key_adds_energy_and_without_it_takes_some() -> None:
    memory = np.outer(E[0], [1.0, 2, 2]) + np.outer(E[1], [0.0, 3, 0])
    lam = 0.25  # a = k + λd with d = E[1], orthogonal to the key
    found = one(memory, [(E[0], E[0] + lam * E[1], np.zeros(V))])
    assert found["erase"].values == pytest.approx([0, -9 + lam**2 * 9])  # the old row is gone, and λ of another is there
    none = one(memory, [(E[0], E[0], np.zeros(V))])  # λ = 0
    assert none["erase"].values.tolist() == [0, -9]


def test_one_token_into_an_empty_memory() -> None:
    inputs = stored(np.zeros((1, 1, 1, K)), E[None, None, None, :1], E[None, None, None, :1], np.full((1, 1, 1, 1, V), 2.0))
    found = energy_ledger(inputs, inputs)
    assert found["change"].values.ravel().tolist() == [0, 4 * V]
    assert found["held"].values.item() == 0
    assert found["write_share"].isnull().all()
    figure = draw_energy(found)
    assert "held nothing" in texts(figure)
    check_words(figure)


@pytest.mark.parametrize("edits", [1, 2, 4])
def test_a_slow_loop_measures_the_same(edits: int) -> None:
    inputs = random((7, 1, 0, 12), edits=edits, roles=["noise", "needle"] * 5 + [""] * 3 + ["answer"] * 7)
    found = energy_ledger(inputs, inputs)
    assert found["role"].values.tolist() == ["all", "noise", "needle", "answer"]
    assert (
        found["part"].values.tolist()
        == {
            1: ["decay", "edit"],
            2: ["decay", "edit 1", "edit 2"],
            4: ["decay", "edit 1", "edit 2", "edit 3", "edit 4"],
        }[edits]
    )
    assert found["n"][0, 0].values.tolist() == [20, 5, 5, 7]
    check(found, inputs, [0, 1, 3])
    held = found["held"].sum("head")
    np.testing.assert_allclose(found["erase_share"], found["erase"].sum("head") / held)
    np.testing.assert_allclose(found["write_share"], found["write"].sum("head") / held)


@pytest.mark.parametrize("limits", [{"STATES": 1}, {"INPUTS": 1}, {"INPUTS": 4000}, {"STATES": 1, "INPUTS": 1}])
def test_batches_and_pieces_change_nothing(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random((9, 3, 14, 2, 5, 1))
    whole = energy_ledger(inputs, inputs)
    for name, value in limits.items():
        monkeypatch.setattr(energy, name, value)
    xr.testing.assert_allclose(energy_ledger(inputs, inputs), whole, rtol=1e-12)


def test_prompts_together_are_the_sum_of_prompts_alone() -> None:
    inputs = random((9, 3, 14, 2))
    whole = energy_ledger(inputs, inputs)
    ends = inputs["cu_seqlens"].values
    alone = []
    for p, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = inputs.drop_vars("cu_seqlens").isel(token=slice(begin, end), prompt=[p])
        part = part.assign_coords(cu_seqlens=("boundary", [0, end - begin]))
        alone.append(energy_ledger(part, part))
    for name in ("change", "erase", "write", "held", "n", "start", "end"):
        np.testing.assert_allclose(whole[name], sum(x[name].values for x in alone), rtol=1e-12, err_msg=name)


def test_prompts_that_are_not_complete_are_left_out_whole() -> None:
    inputs = random((6, 5, 4), roles=["a"] * 8 + ["b"] * 7)
    complete = np.arange(15) != 8
    masked = inputs.where(xr.DataArray(complete, dims="token")).assign_coords(complete=("token", complete))
    masked["initial_state"] = inputs["initial_state"]
    found = energy_ledger(masked, masked)
    check(found, inputs, [0, 2])
    assert found["n"].sel(role="all").values.ravel().tolist() == [10] * 6
    assert (found.attrs["prompts"], found.attrs["prompts_incomplete"]) == (2, 1)
    assert (found.attrs["tokens"], found.attrs["tokens_incomplete"]) == (10, 5)
    assert found["nonfinite"].sum() == 0
    assert "10 tokens; 5 incomplete ones are left out" in texts(draw_energy(found)).replace("\n", " ")
    with pytest.raises(StoreError, match="expected a complete prompt, found none of 3"):
        energy_ledger(inputs, inputs.assign_coords(complete=("token", np.arange(15) % 2 > 0)))


@pytest.mark.parametrize(("name", "value"), [("g", np.inf), ("g", np.nan), ("u", np.inf), ("k", np.nan), ("a", -np.inf)])
def test_what_is_not_finite_leaves_its_head_out_and_is_told(name: str, value: float) -> None:
    inputs = random((6, 5))
    inputs[name][1, 8, 2, ..., 0] = value
    found = energy_ledger(inputs, inputs)
    expected = slow(inputs, 1, 2, [0])["all"]
    cell = found.isel(layer=1, head=2).sel(role="all")
    assert int(cell["n"]) == 6
    assert float(cell["change"].sum()) == pytest.approx(expected["changes"].sum())
    check(found.isel(layer=[0]), inputs.isel(layer=[0]), [0, 1])
    row = ["g", "k", "a", "u"].index(name)
    assert found["nonfinite"].values.tolist() == [[0, int(i == row)] for i in range(4)]
    assert found["first_nonfinite"].values[row].tolist() == [1, 8, 2]
    assert found.attrs["left_out"] == 1
    words = texts(draw_energy(found)).replace("\n", " ")
    assert "Heads over prompts that are left out, for inputs that are not finite: 1." in words
    assert f"inputs/{name}: 1 not finite, first at layer 1, token 8, head 2." in words


def test_a_layer_that_is_not_finite_at_all_is_a_gap() -> None:
    inputs = random((6, 5))
    inputs["u"][1] = np.nan
    found = energy_ledger(inputs, inputs)
    assert found["n"].sel(role="all").values.tolist() == [[11] * 3, [0] * 3]
    assert found["closing_error"].isnull().values.tolist() == [[False] * 3, [True] * 3]
    figure = draw_energy(found)
    assert texts(figure).count("no tokens") == 1
    check_words(figure)


def test_a_ledger_that_does_not_close_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random((6, 5)).assign_coords(layer=[3, 7])
    right = energy.step

    def wrong(state: Array, *x: Array) -> tuple[Array, Array]:
        values, held = right(state, *x)
        if len(state) == 2:
            values[1, 1, 0] *= 1 + 1e-6
        return values, held

    monkeypatch.setattr(energy, "step", wrong)
    with pytest.raises(CheckFailed, match=r"closes to 1e-10, found an error of \S+ at layer 3, head 1, prompt 1"):
        energy_ledger(inputs, inputs)


def test_a_memory_that_outgrows_float64_is_said() -> None:
    T = 400
    k = np.broadcast_to(E[0], (1, T, 1, 1, K))
    inputs = stored(np.zeros((1, T, 1, K)), k, -100 * k, np.ones((1, T, 1, 1, V)))
    with pytest.raises(CheckFailed, match="found an error of nan at layer 0, head 0, prompt 0"):
        energy_ledger(inputs, inputs)


def test_stores_without_what_it_takes_are_refused(tmp_path: Path) -> None:
    inputs = random((6, 5))
    with pytest.raises(StoreError, match="expected the inputs g, k, a, u, found a store without k, u"):
        energy_ledger(inputs, inputs.drop_vars(["k", "u"]))
    with pytest.raises(StoreError, match="expected runs over the same tokens"):
        energy_ledger(random((6, 6)), inputs)
    with pytest.raises(StoreError, match="one trace, found 2 and 1 layers"):
        energy_ledger(inputs, inputs.isel(layer=[0]))
    with pytest.raises(StoreError, match="expected whole prompts, of 11 tokens, found 4"):
        energy_ledger(inputs.isel(token=slice(4)), inputs.isel(token=slice(4)))
    qp.trace(make_checkpoint(tmp_path / "model", "qed"), [qp.Prompt(np.arange(3))], tmp_path / "run.zarr")
    with pytest.raises(StoreError, match="expected group inputs, found none; a trace with save_inputs keeps it"):
        qp.open_inputs(tmp_path / "run.zarr")


@pytest.mark.parametrize("mixer", ["qed", "linear", "gdn", "eda", "eda-reversed", "deltaproduct"])
def test_real_stores_end_at_their_recorded_norms(mixer: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [qp.Prompt(rng.integers(0, 256, n)) for n in (1, 70, 130, 64)]
    ds = qp.trace(make_checkpoint(tmp_path / "model", mixer), prompts, tmp_path / "run.zarr", save_inputs=True)
    found = energy_ledger(ds, qp.open_inputs(tmp_path / "run.zarr"))
    last = np.isin(ds["mark_token"].values, ds["cu_seqlens"].values - 1)
    norms = ds["state_norm"].values[:, last].astype(np.float64)
    np.testing.assert_allclose(found["end"], (norms**2).sum(1), rtol=1e-4)
    assert float(found["closing_error"].max()) < 1e-12
    assert found["role"].values.tolist() == ["all"]
    assert ("address" in found["part"].values) == mixer.startswith("eda")
    check_words(draw_energy(found))


def test_the_figure_shows_the_numbers() -> None:
    inputs = random((9, 3, 14), roles=["noise"] * 9 + ["needle"] * 17, mixer="eda")
    found = energy_ledger(inputs, inputs)
    figure = draw_energy(found)
    for panel, role in zip(figure.axes, found["role"].values, strict=True):
        heights = np.array([bar.get_height() for bar in panel.patches]).reshape(4, 2)  # type: ignore[attr-defined]
        cell = found.sel(role=role)
        expected = [cell[f"{kind}_share"].sel(part=part) for kind, part in (("erase", "decay"), ("erase", "address"))]
        expected += [cell[f"{kind}_share"].sel(part="edit") for kind in ("erase", "write")]
        np.testing.assert_allclose(heights, 100 * np.stack(expected))
        (net,) = panel.collections
        ends = [float(np.asarray(path.vertices)[0, 1]) for path in net.get_paths()]
        np.testing.assert_allclose(ends, heights.sum(0))
    words = texts(figure).replace("\n", " ")
    assert "noise (9 tokens)" in words
    assert "over 3 prompts; the ledger closes to" in words
    check_words(figure)


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (24, 2)])
def test_figures_of_any_size_can_be_read(layers: int, heads: int) -> None:
    roles = (["noise"] * 5 + ["needle", "question", "answer", "stale"]) * 2
    for given in (None, roles, ["noise"] * 18):
        inputs = random((9, 9), layers, heads, roles=given, mixer="eda")
        check_words(draw_energy(energy_ledger(inputs, inputs)))
