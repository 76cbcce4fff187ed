"""Strict recall: known answers by hand, and a loop over tokens in float64 for the rest."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import ArrayLike
from torch import Tensor

import qed_probe as qp
from qed_probe.figures import draw_recall
from qed_probe.kernels import Tokens
from qed_probe.kernels.packing import segments
from qed_probe.memory import inspect_memory, inspect_memory_store
from qed_probe.memory.recall import Recall, half_life
from qed_probe.memory.rereading import decayed_write, own_write, rewritten_after, tokens_left
from qed_probe.memory.subject import subject_of
from qed_probe.replays import LayerInputs
from qed_probe.store.memory import make_memory, open_memory, save_memory
from tests.drawn import check_words, texts
from tests.recurrences import make_tokens
from tests.replayed import layer_of
from tests.test_tracing import make_checkpoint

ENDS = (0, 1, 8, 8 + 70)
WRITES = {"eda-reversed": 0, "rwkv7": 1}
EVERY = ("linear", "deltanet", "gdn", "kda", "gdn2", "qed", "qed-rand", "eda", "eda-reversed", "eda-qed", "deltaproduct", "rwkv7")


def table(layer: LayerInputs) -> xr.Dataset:
    """What the part says of one layer's prompts."""
    lengths = [b - a for a, b in itertools.pairwise(layer.ends)]
    part = Recall(subject_of(layer.mixer, (layer.index,), layer.edits.q.shape[2], ((n, None) for n in lengths)))
    part.add(layer)
    return part.table()


def cell(layer: LayerInputs, keys: str = "all") -> xr.Dataset:
    """Of the only head of a layer, by lag."""
    return table(layer).isel(layer=0, head=0).sel(recall_keys=keys)


def by_hand(mixer: str, k: ArrayLike, v: ArrayLike, ends: tuple[int, ...] | None = None, **gates: ArrayLike) -> LayerInputs:
    """One head, float64; ``k`` ``[T, K]``, ``v`` ``[T, V]``; the query is of no matter."""
    k, v = np.asarray(k, np.float64), np.asarray(v, np.float64)
    shapes = {"g": k.shape, "b": k.shape, "w": v.shape, "beta": k.shape[:1], "gamma": k.shape[:1], "address": k.shape}
    full = {name: np.broadcast_to(np.asarray(x, np.float64), shapes[name]) for name, x in gates.items()}
    ready: dict[str, Any] = {name: torch.tensor(x)[None, :, None] for name, x in {"q": k, "k": k, "v": v, **full}.items()}
    return layer_of(mixer, Tokens(**ready), ends)


def slow(layer: LayerInputs, tokens: Tokens, lag: int, state: Tensor | None) -> list[dict[str, Any]]:
    """Every token that has one ``lag`` later, head by head: a loop over tokens that keeps S and the own write alone."""
    e, name = layer.edits, layer.mixer.name
    g, k, a, u = (x[0].double().numpy() for x in (e.g, e.k, e.a, e.u))
    H, M, K = k.shape[1:]
    at, found = WRITES.get(name, M - 1 if name != "eda-reversed" else 0), []
    v = tokens.v.double().numpy()[0]
    v = v[:, :, -1] if v.ndim == 4 else v
    if tokens.w is not None:
        v = v * tokens.w.double().numpy()[0]
    for (p, (begin, end)), h in itertools.product(enumerate(itertools.pairwise(layer.ends)), range(H)):
        S = np.zeros((K, v.shape[-1])) if state is None else state[p, h].double().numpy()
        states = []
        for t in range(begin, end):
            S = np.exp(g[t, h])[:, None] * S
            for m in range(M):
                S = S + np.outer(k[t, h, m], u[t, h, m] - S.T @ a[t, h, m])
            states.append(S)
        for t in range(begin, end - lag):
            key, again, decayed = k[t, h, at], False, k[t, h, at] ** 2
            x = key.copy()
            for s in range(t, t + lag + 1):
                if s > t:
                    x, decayed = np.exp(g[s, h]) * x, np.exp(g[s, h]) * decayed
                for m in range(M):
                    if s == t and m <= at:
                        continue
                    x = x - k[s, h, m] * (a[s, h, m] @ x)
                    other = k[s, h, m]
                    if (a[s, h, m].any() or u[s, h, m].any()) and other.any():
                        again |= abs(key @ other) > 0.9 * np.linalg.norm(key) * np.linalg.norm(other)
            r = states[t + lag - begin].T @ key
            found.append({
                "head": h, "t": t, "prompt": p, "rewritten": again, "v": v[t, h], "r": r, "r0": states[t - begin].T @ key,
                "own": (key @ x) * (u[t, h, at] @ v[t, h]), "left": key @ x / (key @ key), "decayed": decayed.sum() / (key @ key),
                "raw": key @ x,
            })  # fmt: skip
    return found


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("started", [False, True])
def test_a_loop_over_tokens_finds_the_same(mixer: str, started: bool) -> None:
    tokens = make_tokens(mixer, T=ENDS[-1], K=3, V=2, dtype=torch.float64, gate=0.6 if mixer == "deltanet" else None)
    layer = layer_of(mixer, tokens, ENDS)
    state = torch.randn(3, 2, layer.edits.q.shape[-1], 2, dtype=torch.float64) if started else None
    layer = LayerInputs(**{**vars(layer), "initial_state": state})
    ds = table(layer).isel(layer=0)
    assert ds["recall_lag"].values.tolist() == [0, 1, 2, 4, 8, 16, 32, 64]
    for lag, h in itertools.product((0, 1, 4, 64), range(2)):
        rows = [row for row in slow(layer, tokens, lag, state) if row["head"] == h]
        for keys in ("all", "kept", "rewritten"):
            mine = [row for row in rows if keys == "all" or row["rewritten"] == (keys == "rewritten")]
            x = ds.sel(recall_lag=lag, recall_keys=keys).isel(head=h)
            assert int(x["recall_n"]) == len(mine)
            if mine:
                check(x, mine, lag)
        left = [np.median([row["decayed"] for row in rows if row["prompt"] == p]) for p in {row["prompt"] for row in rows}]
        assert float(ds["decay_left"].sel(recall_lag=lag)[h]) == pytest.approx(np.mean(left), rel=1e-9)


def check(x: xr.Dataset, rows: list[dict[str, Any]], lag: int) -> None:
    """One cell is what these tokens come to; float64 leaves 1e-9, the chunks' arithmetic being another."""
    size = sum(row["v"] @ row["v"] for row in rows)
    across = [[row[r] - row["v"] * (row[r] @ row["v"]) / (row["v"] @ row["v"]) for row in rows] for r in ("r", "r0")]
    rest = [np.sqrt(sum(y @ y for y in ys)) for ys in across]
    along = [sum(row[r] @ row["v"] for row in rows) for r in ("r", "r0")]
    expected = {
        "recall_gain": along[0] / size, "recall_relative": along[0] / along[1], "recall_residual": rest[0] / np.sqrt(size),
        "recall_own": sum(row["own"] for row in rows) / size,
        "own_left": np.mean([np.median([r["left"] for r in rows if r["prompt"] == p]) for p in {r["prompt"] for r in rows}]),
    }  # fmt: skip
    if rest[1] > 1e-9:
        expected["recall_residual_relative"] = rest[0] / rest[1]
    for name, value in expected.items():
        assert float(x[name]) == pytest.approx(value, rel=1e-9, abs=1e-11), (name, lag)


def test_one_association_stays_whole_among_orthogonal_keys() -> None:
    eye = np.eye(4)
    every: list[tuple[str, dict[str, Any]]] = [("deltanet", {"beta": 1}), ("linear", {}), ("gdn2", {"b": 1, "w": 1, "g": 0})]
    for mixer, gates in every:
        x = cell(by_hand(mixer, eye, [[3, 4], [0, 0], [0, 0], [0, 0]], **gates))
        assert x["recall_gain"].values.tolist() == [1, 1, 1]  # Δ = 0, 1, 2
        assert x["recall_own"].values.tolist() == [1, 1, 1]
        assert x["recall_residual"].values.tolist() == [0, 0, 0]
        assert x["recall_n"].values.tolist() == [4, 3, 2]
        assert int(x["zero_targets"]) == 3
        x = cell(by_hand(mixer, eye, eye, **gates), "kept")
        assert x["recall_gain"].values.tolist() == [1, 1, 1]
        assert x["write_half_life"].values.tolist() == [2, 2, 2]
        assert x["half_life_censored"].all()


def test_an_address_on_the_stored_key_leaves_nothing() -> None:
    e = np.eye(3)
    address = e[[1, 0, 2]]  # the second token erases at the first one's key
    gates: dict[str, Any] = {"beta": 1, "gamma": [0, 1, 0], "address": address, "g": 0}
    layer = by_hand("eda", e, e, **gates)
    ds = table(layer).isel(layer=0, head=0)
    assert ds["recall_n"].sel(recall_keys="rewritten").values.tolist() == [0, 1, 1]
    gone = ds.sel(recall_keys="rewritten")
    assert gone["recall_gain"].values[1:].tolist() == [0, 0]
    assert gone["recall_own"].values[1:].tolist() == [0, 0]
    assert ds.sel(recall_keys="kept")["recall_gain"].values[:2].tolist() == [1, 1]
    assert np.isnan(ds["recall_gain"].sel(recall_keys="kept", recall_lag=2))  # n is 0: that one is rewritten
    # With γ = 0 everywhere the address is no edit, though it is the same vector.
    ds = table(by_hand("eda", e, e, **{**gates, "gamma": 0})).isel(layer=0, head=0)
    assert ds["recall_n"].sel(recall_keys="rewritten").values.tolist() == [0, 0, 0]
    # Of eda-reversed the token's own address comes after its write: γ = 1 on its key erases it at once.
    ds = table(by_hand("eda-reversed", e, e, **{**gates, "gamma": 1, "address": e})).isel(layer=0, head=0)
    assert ds["recall_n"].sel(recall_keys="rewritten").values.tolist() == [3, 2, 1]
    assert (ds["recall_gain"].sel(recall_keys="all") == 0).all()
    assert ds["write_half_life"].values[0] == 0


@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_a_weak_write_is_not_exact_at_lag_zero(beta: float) -> None:
    x = cell(by_hand("deltanet", np.eye(2), [[1, 2], [2, 1]], beta=beta))
    assert x["recall_gain"].values.tolist() == [beta, beta]
    assert x["recall_own"].values.tolist() == [beta, beta]
    if beta:
        assert x["recall_relative"].values.tolist() == [1, 1]
    else:
        assert x["recall_relative"].isnull().all()  # nothing was ever there


def test_two_tokens_in_fractions() -> None:
    """k₀ = (1, 0), k₁ = (3/5, 4/5), β = ½, decay ½ a token, v₀ = (1, 0), v₁ = (0, 2): S₁ᵀk₀ by hand."""
    half, c, s = Fraction(1, 2), Fraction(3, 5), Fraction(4, 5)
    layer = by_hand("gdn", [[1.0, 0.0], [0.6, 0.8]], [[1, 0], [0, 2]], beta=0.5, g=np.log(0.5))
    # S₀ = ½ k₀v₀ᵀ; S̄₁ = ¼ k₀v₀ᵀ; S₁ = S̄₁ + k₁ ½(v₁ − S̄₁ᵀk₁)ᵀ with S̄₁ᵀk₁ = c/4 v₀.
    along, across = half / 2 - c * half * c / 4, c * half * 2
    x = cell(layer)
    assert x["recall_gain"].values == pytest.approx([float(_lag_0(half, c)), float(along)], rel=1e-14)
    assert x["recall_residual"].values[1] == pytest.approx(float(across), rel=1e-14)
    assert x["recall_relative"].values[1] == pytest.approx(float(along / half), rel=1e-14)
    own = half * half * (1 - half * c * c)  # β k₀ᵀ(I − ½k₁k₁ᵀ)½k₀
    assert x["recall_own"].values == pytest.approx([0.5, float(own)], rel=1e-14)
    assert x["own_left"].values[1] == pytest.approx(float(own / half), rel=1e-14)
    assert x["decay_left"].values.tolist() == pytest.approx([1, 0.5], rel=1e-14)
    # The null of both tokens is the other's value: at lag 0 only token 1 holds some of it, ⟨S₁ᵀk₁, v₀⟩ = c/4·(1 − ½).
    assert x["recall_null"].values == pytest.approx([float(c / 4 * half / 5), float(across * 2 / 4)], rel=1e-14)
    assert s * s + c * c == 1


def _lag_0(half: Fraction, c: Fraction) -> Fraction:
    """Σ⟨S_tᵀk_t, v_t⟩/Σ‖v_t‖² = (½·1 + ½·4)/5: what token 1 finds of v₀ is across its own value."""
    return (half * 1 + half * 4) / 5


def test_no_direction_is_gdn_2() -> None:
    tokens = make_tokens("qed", T=30, dtype=torch.float64)
    none = {name: x for name, x in vars(tokens).items() if name != "lam"}
    ends = (0, 12, 30)
    qed, gdn2 = layer_of("qed", Tokens(**none, lam=torch.zeros(2).double()), ends), layer_of("gdn2", Tokens(**none), ends)
    xr.testing.assert_allclose(table(qed), table(gdn2), rtol=1e-12)
    full = table(layer_of("qed", tokens, ends))
    assert float(abs(full["recall_gain"] - table(gdn2)["recall_gain"]).max()) > 1e-3


def test_a_key_counts_as_rewritten_beyond_the_cosine() -> None:
    far, near = 0.85, -0.95  # cosines with the first key
    keys = [[1.0, 0.0], [far, float(np.sqrt(1 - far**2))], [near, float(np.sqrt(1 - near**2))], [0.0, 0.0]]
    layer = by_hand("deltanet", keys, np.ones((4, 1)), beta=1)
    assert rewritten_after(layer)[:, 0].tolist() == [2, 4, 4, 4]
    silent = by_hand("deltanet", [[1, 0], [1, 0], [1, 0]], np.ones((3, 1)), beta=[1, 0, 1])
    assert rewritten_after(silent)[:, 0].tolist() == [2, 1, 3]
    ends = by_hand("deltanet", [[1, 0], [1, 0], [1, 0]], np.ones((3, 1)), (0, 1, 3), beta=1)
    assert rewritten_after(ends)[:, 0].tolist() == [3, 1, 3]


def test_blocks_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("eda-reversed", make_tokens("eda-reversed", T=78, K=3), ENDS)
    whole = rewritten_after(layer)
    assert 0 < int((whole < 78).sum()) < whole.numel()
    monkeypatch.setattr("qed_probe.memory.rereading.BLOCK", 7)
    assert torch.equal(rewritten_after(layer), whole)


def test_half_lives_lie_between_lags() -> None:
    lags = np.array([0, 1, 2, 4])
    curves = np.array([
        [1, 0.5, 0.2, 0.1], [1, 0.9, 0.6, 0.4], [1, 0.9, 0.8, 0.7], [1, 0.9, np.nan, np.nan], [np.nan] * 4, [0.8, 0.2, 0.1, 0],
    ])  # fmt: skip
    found, censored = half_life(curves, lags)
    between = np.sqrt(3 * 5) - 1  # halfway from Δ = 2 to 4 along ln(1 + Δ)
    assert found == pytest.approx([1, between, 4, 1, np.nan, 2 ** (2 / 3) - 1], nan_ok=True)
    assert censored.tolist() == [False, False, True, True, False, False]


def test_decay_alone_is_a_power_of_two_apart() -> None:
    layer = by_hand("gdn", np.eye(8), np.eye(8), beta=0.25, g=np.log(0.5))
    assert decayed_write(layer, [0, 1, 2, 4])[:, 0, 0].tolist() == pytest.approx([1, 0.5, 0.25, 1 / 16], rel=1e-14)
    # Orthogonal keys: no edit touches another's write.
    assert own_write(layer, [0, 1, 2, 4])[:, 0, 0].tolist() == pytest.approx([1, 0.5, 0.25, 1 / 16], rel=1e-14)
    forgets = by_hand("gdn", np.eye(4), np.eye(4), beta=0.25, g=-np.inf)
    assert cell(forgets)["recall_gain"].values.tolist() == [0.25, 0, 0]


def test_prompts_of_one_token_have_no_later_token_and_no_other_value() -> None:
    x = cell(by_hand("deltanet", [[1, 0], [0, 1]], [[1.0], [2.0]], (0, 1, 2), beta=1))
    assert x["recall_lag"].values.tolist() == [0]
    assert (int(x["recall_n"][0]), int(x["recall_null_n"][0])) == (2, 0)
    assert np.isnan(x["recall_null"].values[0])
    assert float(x["recall_gain"][0]) == 1


def test_the_null_takes_another_token_of_the_prompt() -> None:
    """Equal values everywhere: the null is the gain; one value of its own for each token: it is 0 among orthogonal keys."""
    same, own = (by_hand("deltanet", np.eye(5), v, beta=1) for v in (np.ones((5, 2)), np.eye(5)))
    assert cell(same)["recall_null"].values.tolist() == [1, 1, 1, 1]
    assert cell(own)["recall_null"].values.tolist() == [0, 0, 0, 0]
    xr.testing.assert_identical(table(own), table(own))


@pytest.mark.parametrize("mixer", ["qed", "eda-reversed", "deltaproduct"])
def test_own_writes_pass_from_chunk_to_chunk_and_segment_to_segment(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, lags = (0, 150, 155, 290), [0, 1, 2, 4, 8, 16, 32, 64, 128]
    tokens = make_tokens(mixer, T=290, H=1, K=3, V=1, dtype=torch.float64, decay=-0.005, gate=0.05)
    layer = layer_of(mixer, tokens, ends)
    whole = own_write(layer, lags)
    for i, lag in [(1, 1), (7, 64), (8, 128)]:
        rows = slow(layer, tokens, lag, None)
        found = [float(whole[i, row["t"], row["head"]]) for row in rows]
        assert np.abs(found).max() > 1e-3
        assert found == pytest.approx([row["raw"] for row in rows], rel=1e-9, abs=1e-12)
    monkeypatch.setattr("qed_probe.kernels.packing.SEGMENT", 128)
    segments.cache_clear()
    there = tokens_left(layer)[None, :, None] >= torch.tensor(lags)[:, None, None]
    # Other batches of the same products may be added in another order.
    torch.testing.assert_close(own_write(layer, lags) * there, whole * there, rtol=1e-12, atol=1e-14)
    segments.cache_clear()


@pytest.mark.parametrize("mixer", ["qed", "eda-reversed", "deltaproduct", "linear"])
def test_a_store_says_what_the_model_does(mixer: str, tmp_path: Any) -> None:  # noqa: ANN401
    path = make_checkpoint(tmp_path / "model", mixer)
    prompts = [qp.Prompt(np.arange(n) % 7) for n in (3, 9, 20)]
    seen = inspect_memory(path, prompts, only=["recall"])
    qp.trace(path, prompts, tmp_path / "run.zarr", save_inputs=True)
    kept = inspect_memory_store(tmp_path / "run.zarr", only=["recall"])
    for name in ("recall_gain", "recall_residual", "recall_own", "recall_null", "recall_n", "write_half_life"):
        np.testing.assert_allclose(kept[name], seen[name], rtol=1e-5, atol=1e-6, err_msg=name)  # float32
    assert seen["recall_n"].sel(recall_keys="all")[0, 0].values.tolist() == [32, 29, 26, 21, 13, 4]
    save_memory(seen, tmp_path / "memory.zarr")
    xr.testing.assert_identical(open_memory(tmp_path / "memory.zarr"), seen)


def recorded(mixer: str, tmp_path: Any, lengths: tuple[int, ...]) -> xr.Dataset:  # noqa: ANN401
    rng = np.random.default_rng(0)
    prompts = [qp.Prompt(rng.integers(0, 256, n)) for n in lengths]
    return inspect_memory(make_checkpoint(tmp_path / "model", mixer), prompts, only=["recall"])


@pytest.mark.parametrize("mixer", ["qed", "linear", "eda"])
def test_the_figure_says_how_much_it_is_drawn_from(mixer: str, tmp_path: Any) -> None:  # noqa: ANN401
    ds = recorded(mixer, tmp_path, (1, 9, 40))
    figure = draw_recall(ds)
    words = texts(figure)
    kept = ds["layer_recall_n"].sel(recall_keys="kept")[0].values
    assert f"kept: n = {kept[1]:,} … {kept[-1]:,}" in words
    assert f"Mixer {mixer}, 3 prompts, 50 tokens." in words
    assert "no tokens" not in words
    drawn = figure.axes[0].get_lines()[0].get_ydata()
    np.testing.assert_array_equal(drawn, ds["layer_recall_gain"].sel(recall_keys="kept")[0])
    check_words(figure)


def test_a_figure_without_a_later_token(tmp_path: Any) -> None:  # noqa: ANN401
    ds = recorded("gdn", tmp_path, (1,))
    assert ds["recall_lag"].values.tolist() == [0]
    figure = draw_recall(ds)
    assert "kept: n = 2 … 2" in texts(figure)  # two heads
    check_words(figure)


def test_a_layer_without_finite_inputs_is_said() -> None:
    layer = layer_of("gdn", make_tokens("gdn", T=12), (0, 12))
    subject = subject_of(layer.mixer, (0, 1), 2, [(12, None)])
    part = Recall(subject)
    part.add(layer)
    attrs: dict[str, object] = {"mixer": "gdn", "subject": "Mixer gdn", "prompts": 1, "tokens": 12, "tokens_incomplete": 0}
    ds = make_memory([part.table()], (0, 1), 2, np.array([0, 1]), attrs)
    assert (ds["recall_n"].sel(layer=1) == 0).all()
    assert ds["write_half_life"].sel(layer=1).isnull().all()
    assert not ds["half_life_censored"].sel(layer=1).any()
    words = texts(draw_recall(ds)).replace("\n", " ")
    assert words.count("no tokens") == 2  # in its panel, and among the half-lives
    assert "12 tokens; left out: up to 1 prompts a layer whose inputs are not finite, so all of layer 1." in words
