"""Immediate and lasting: known answers in fractions, two memories run side by side token by token, and tables."""

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.patches import Rectangle
from torch import Tensor

from qed_probe.errors import CheckFailed, InputError
from qed_probe.figures import draw_effects
from qed_probe.kernels import MIXERS, Tokens, edits, factor
from qed_probe.memory import effects as part
from qed_probe.memory.effects import Effects
from qed_probe.memory.split import PARTS, split, without
from qed_probe.memory.subject import Subject, subject_of
from qed_probe.replays import LayerInputs
from tests.drawn import check_words, texts
from tests.memories import labelled
from tests.recurrences import make_tokens
from tests.replayed import ENDS, layer_of, make_layer

ADDING = ["qed", "qed-noproj", "qed-rand", "eda-qed"]


def step(S: np.ndarray, e: Any, at: tuple[int, int], a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """The memory after a token's edits, ``a`` being what the main edit reads, and what d reads before it."""
    for m in range(e.k.shape[-2]):
        k, u = e.k[0, *at, m].numpy(), e.u[0, *at, m].numpy()
        if m == e.main:
            found, S = S.T @ e.d[0, *at].numpy(), S + np.outer(k, u - S.T @ a)
        else:
            S = S + np.outer(k, u - S.T @ e.a[0, *at, m].numpy())
    return S, found


def slow(layer: LayerInputs, begin: int, end: int, h: int) -> dict[str, np.ndarray]:
    """y⁰, y, each cell of the 2×2 and what every single step does to every later output, by adding steps one at a time."""
    assert layer.lam is not None
    e, T = layer.edits, end - begin
    V = e.u.shape[-1]
    lam, zero = float(layer.lam[h]), np.zeros((e.q.shape[-1], V))
    start = zero if layer.initial_state is None else layer.initial_state[layer.ends.index(begin), h].numpy()
    found = {name: np.zeros((T, V)) for name in ("none", "full", "immediate", "lasting")}

    assert e.d is not None
    direction = e.d[0].numpy()

    def trajectory(with_step: Any) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
        """Outputs where the steps of these tokens are made with the direction; the memories before each token."""
        S, before, y = start, np.zeros((T, *start.shape)), np.zeros((T, V))
        for t in range(T):
            at = begin + t, h
            before[t] = S
            a = e.base[0, *at].numpy() + lam * with_step(t) * direction[at]
            S, _ = step(np.exp(e.g[0, *at].numpy())[:, None] * S, e, at, a)
            y[t] = S.T @ e.q[0, *at].numpy()
        return y, before

    (found["full"], full), (found["none"], none) = trajectory(lambda _: True), trajectory(lambda _: False)
    for t in range(T):
        at = begin + t, h
        base, d, decay = e.base[0, *at].numpy(), direction[at], np.exp(e.g[0, *at].numpy())[:, None]
        for name, S, a in (("immediate", none[t], base + lam * d), ("lasting", full[t], base)):
            found[name][t] = step(decay * S, e, at, a)[0].T @ e.q[0, *at].numpy()
    # Steps 0 … j−1 with the direction, and one more: their differences are what step j does under own reads …
    stages = np.stack([trajectory(lambda t, j=j: t < j)[0] for j in range(T + 1)])
    found["own"] = np.diff(stages, axis=0)
    # … and with the last ones first, what it does under base reads.
    stages = np.stack([trajectory(lambda t, j=j: t >= j)[0] for j in range(T + 1)])
    found["base"] = -np.diff(stages, axis=0)
    return found


def doubles(mixer: str, **how: Any) -> LayerInputs:  # noqa: ANN401
    return make_layer(mixer, dtype=torch.float64, **how)


@pytest.mark.parametrize("mixer", ADDING)
@pytest.mark.parametrize("seed", [0, 1])
def test_steps_added_one_at_a_time_do_what_the_split_says(mixer: str, seed: int) -> None:
    """A step added on top of earlier ones reads the own memory and acts through the base's transitions; or the reverse."""
    layer = doubles(mixer, seed=seed)
    if seed:
        state = torch.randn(3, 2, 8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        layer = replace(layer, initial_state=state)
    for prompt, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        tokens = torch.arange(end - begin)
        found = split(layer, prompt, tokens)
        for h in range(2):
            expected = slow(layer, begin, end, h)
            y, base = expected["full"], expected["none"]
            cells = [expected["immediate"] - base, expected["lasting"] - base]
            cells.append(y - base - cells[0] - cells[1])
            np.testing.assert_allclose(found.parts[:, :, h], cells, atol=1e-13)
            np.testing.assert_allclose(found.base[:, h], base, atol=1e-13)
            for way, name in enumerate(("own", "base")):
                steps = expected[name]
                np.testing.assert_allclose(found.change[way, :, h], y - base, atol=1e-13)
                sizes = np.linalg.norm(steps, axis=-1).sum(0)
                np.testing.assert_allclose(found.sizes[way, :, h], sizes, atol=1e-13)
                for t in range(end - begin):
                    products = steps[: t + 1, t] @ (y - base)[t]
                    lags = np.array([0 if lag == 0 else 1 + int(np.log2(lag)) for lag in range(t, -1, -1)])
                    shares = np.bincount(lags, products, found.shares.shape[-1])
                    np.testing.assert_allclose(found.shares[way, t, h], shares, atol=1e-13)
    assert np.abs(cells).max((1, 2)).min() > 1e-4  # there is something of each to be found


def two_tokens() -> Tokens:
    """K = 2, V = 1: the first token writes 1 at k = e₁; the second, at (e₁ + e₂)/2 of norm 1/√2, has q = e₁ and half gates."""
    keys, q = torch.tensor([[1.0, 0], [0.5, 0.5]]), torch.tensor([[0.0, 1], [1, 0]])
    ones = torch.ones(1, 2, 1, 2, dtype=torch.float64)
    return Tokens(
        q=q.double().view(1, 2, 1, 2), k=keys.double().view(1, 2, 1, 2), v=ones[..., :1], g=0 * ones, b=ones * 0.5,
        w=ones[..., :1], lam=torch.tensor([0.25], dtype=torch.float64),
    )  # fmt: skip


def test_a_case_in_fractions() -> None:
    """S₁ = e₁ whatever λ is, as the memory was empty; then all of the change is immediate: −λρc with d of the second token."""
    F = Fraction
    k, bq = (F(1, 2), F(1, 2)), (F(1, 2), F(0))
    along = k[0] * bq[0] + k[1] * bq[1]
    d = tuple(x - along * y for x, y in zip(bq, k, strict=True))
    immediate = -F(1, 4) * k[0] * d[0]  # λ = ¼, ρ = k₁ as q = e₁, and S̄ᵀd = d₁
    found = split(layer_of("qed", two_tokens()), 0, torch.arange(2))
    assert found.parts[:, 1, 0, 0].tolist() == [float(immediate), 0, 0]
    assert found.parts[:, 0].abs().max() == 0
    assert found.base[1, 0, 0] == float(1 + k[0] * (1 - F(1, 4)))  # u − S̄ᵀ(b⊙k) = 1 − ¼


def test_what_a_step_does_later_is_lasting() -> None:
    """A third token without a direction of its own has the second's effect alone."""
    first = two_tokens()
    more: dict[str, Any] = {name: torch.cat([getattr(first, name), getattr(first, name)[:, 1:]], 1) for name in "qkvgbw"}
    layer = layer_of("qed", replace(first, **more))
    assert layer.edits.d is not None
    d = layer.edits.d.clone()
    d[0, 2] = 0
    a = layer.edits.a.clone()
    a[0, 2, :, 0] = layer.edits.base[0, 2]
    layer = replace(layer, edits=replace(layer.edits, a=a, d=d))
    found = split(layer, 0, torch.tensor([2]))
    written = -Fraction(1, 4) * Fraction(3, 8)  # by the second token, along k = (½, ½): −λS̄ᵀd
    kept = written * (1 - Fraction(1, 4))  # after the third's erase, (b⊙k)ᵀk = ¼
    assert found.parts[:, 0, 0, 0].tolist() == [0, float(kept / 2), 0]


def test_without_lambda_nothing_changes() -> None:
    layer = layer_of("qed", replace(make_tokens("qed", T=30), lam=torch.zeros(2)), ENDS)
    found = split(layer, 1, torch.arange(14))
    assert found.change.abs().max() == found.parts.abs().max() == found.sizes.max() == 0
    ds = table(layer)
    assert ds["effect_share"].isnull().all()
    assert ds["effect_lag_share"].isnull().all()
    assert (ds["effect_size"] == 0).all()
    assert (ds["effect_median"] == 0).all()
    assert (ds["effect_still"] == ds["effect_n"]).all()


@pytest.mark.parametrize("mixer", ["gdn2", "kda", "eda", "deltaproduct"])
def test_where_no_direction_is_added_there_is_no_table(mixer: str) -> None:
    layer = make_layer(mixer)
    assert not table(layer, mixer).variables
    with pytest.raises(InputError, match=f"mixer {mixer}: expected one that adds a direction, found none"):
        split(layer, 0, torch.tensor([0]))


def test_weights_that_are_not_of_these_edits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("qed")
    monkeypatch.setattr("qed_probe.memory.split.factor", lambda g, k, a: factor(g, k, 1.1 * a))
    with pytest.raises(
        CheckFailed, match=r"effects, (own|base) reads: expected .* found \d.\de-0\d at layer 0, head \d, prompt 3, token"
    ):
        split(layer, 2, torch.arange(11))


def test_float32_keeps_to_it_over_long_prompts_of_uneven_length() -> None:
    layer = make_layer("eda-qed", (0, 1, 1100), H=3, K=60, V=7)
    exact = make_layer("eda-qed", (0, 1, 1100), H=3, K=60, V=7, dtype=torch.float64)
    tokens = torch.arange(0, 1099, 61)
    one, other = split(layer, 1, tokens), split(exact, 1, tokens)
    # Rounding of float32 inputs, over a thousand steps of a memory that forgets within some tens of them.
    assert float((one.change - other.change).abs().max()) < 1e-5 * float(other.base.abs().max())
    assert float((one.parts - other.parts).abs().max()) < 1e-5 * float(other.base.abs().max())


ROLES = [np.array(["noise"] * 3 + ["answer"] * 2), None, np.array(["needle"] * 4 + ["noise"] * 7)]


def about(mixer: str = "qed", heads: int = 2, ends: tuple[int, ...] = ENDS, roles: list[Any] | None = None) -> Subject:
    lengths = np.diff(ends).tolist()
    return subject_of(MIXERS[mixer], (0,), heads, zip(lengths, roles or [None] * len(lengths), strict=True))


def table(layer: LayerInputs, mixer: str = "qed", **how: Any) -> xr.Dataset:  # noqa: ANN401
    made = Effects(about(mixer, ends=layer.ends, **how))
    made.add(layer)
    return made.table()


def test_the_table_pools_over_tokens_and_counts_them() -> None:
    layer = doubles("qed")
    ds = table(layer, roles=ROLES).isel(layer=0)
    assert ds["effect_role"].values.tolist() == ["all", "chosen", "noise", "answer", "text", "needle"]
    assert ds["effect_n"].values.tolist() == [30, 3, 10, 2, 14, 4]
    assert ds["effect_lag_n"].values.tolist() == [30, 27, 24, 18, 9]  # the prompts have 5, 14 and 11 tokens
    every = [split(layer, i, torch.arange(n)) for i, n in enumerate((5, 14, 11))]
    roles = np.concatenate([*ROLES[:1], ["text"] * 14, ROLES[2]])
    chosen = np.zeros(30, bool)
    chosen[[2, 18, 29]] = True  # the one before the answer, and where there is none the last
    parts, base = torch.cat([x.parts for x in every], 1), torch.cat([x.base for x in every])
    change = parts.sum(0)
    for role in ds["effect_role"].values:
        mask = chosen if role == "chosen" else (roles == role) | (role == "all")
        for h in range(2):
            cell = ds.sel(effect_role=role).isel(head=h)
            x, d, y = parts[:, mask, h], change[mask, h], base[mask, h]
            squares = (d**2).sum()
            np.testing.assert_allclose(cell["effect_share"][:3], [(p * d).sum() / squares for p in x], rtol=1e-12)
            assert float(cell["effect_energy"]) == pytest.approx(float(squares))
            sizes = torch.stack([*x, d]).norm(dim=-1)
            np.testing.assert_allclose(cell["effect_size"], sizes.sum(1) / y.norm(dim=-1).sum(), rtol=1e-12)
            ratios = (sizes / y.norm(dim=-1)).numpy()
            np.testing.assert_allclose(cell["effect_median"], np.median(ratios, 1), rtol=1e-6)
            assert int(cell["effect_silent"]) == 0
            first = {"all": 3, "noise": 1, "text": 1, "needle": 1}
            assert int(cell["effect_still"]) == first.get(role, 0)


@pytest.mark.parametrize("mixer", ADDING)
def test_shares_add_up_and_lag_0_is_the_step(mixer: str) -> None:
    ds = table(doubles(mixer), mixer).isel(layer=0)
    np.testing.assert_allclose(ds["effect_lag_share"].sum("effect_lag"), 1, atol=1e-12)
    parts = ds["effect_share"].sel(effect_role="all")
    np.testing.assert_allclose(parts.sel(effect_part=[*PARTS]).sum("effect_part"), 1, atol=1e-12)
    immediate, _, interaction, total = (parts.sel(effect_part=name).values for name in ds["effect_part"].values)
    now = ds["effect_lag_share"].sel(effect_lag=0)
    np.testing.assert_allclose(now.sel(effect_convention="own reads"), immediate + interaction, atol=1e-12)
    np.testing.assert_allclose(now.sel(effect_convention="base reads"), immediate, atol=1e-12)
    np.testing.assert_allclose(total, 1)
    assert (ds["effect_cancelling"] >= 1 - 1e-12).all()


def test_of_a_long_prompt_some_tokens_are_taken_the_chosen_one_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "SAMPLED", 8)
    monkeypatch.setattr(part, "LEAST", 2)
    subject = about(ends=(0, 5, 405))
    made = Effects(subject)
    assert made._tokens(0).tolist() == [0, 1, 2, 3, 4]
    tokens = made._tokens(1)
    assert 399 in tokens
    assert {*(tokens[:8] // 50)} == {*range(8)}
    assert made._tokens(1).tolist() == tokens.tolist()
    monkeypatch.setattr(part, "TOGETHER", 8)
    assert len(made._tokens(1)) in (4, 5)
    layer = make_layer("qed", (0, 5, 405))
    made.add(layer)
    n = made.table()["effect_n"].sel(effect_role="all")
    assert int(n[0]) == len(made._tokens(0)) + len(made._tokens(1))


def test_a_prompt_of_one_token_and_a_layer_without_any_are_said() -> None:
    ds = table(make_layer("qed", (0, 1))).isel(layer=0)
    assert ds["effect_lag"].values.tolist() == [0]
    assert ds["effect_n"].sel(effect_role="all") == ds["effect_still"].sel(effect_role="all").isel(head=0) == 1
    assert ds["effect_share"].isnull().all()
    empty = Effects(about()).table()
    assert (empty["effect_n"] == 0).all()
    assert empty["effect_median"].isnull().all()
    said = texts(draw_effects(labelled(empty)))
    assert said.splitlines().count("no tokens") == 4 + len(empty["effect_role"])  # of lags, bars and sizes, and of roles
    assert "no effect\n" not in said


def test_without_is_the_layer_of_the_base() -> None:
    """The edits of GDN-2, to the bit, of the same tokens."""
    tokens = make_tokens("qed", T=30)
    found, expected = without(layer_of("qed", tokens, ENDS)).edits, edits(MIXERS["gdn2"], tokens)
    for name in ("q", "g", "k", "a", "u"):
        x, y = getattr(found, name), getattr(expected, name)
        assert isinstance(x, Tensor)
        assert torch.equal(x, y)


def test_the_figure_shows_the_numbers() -> None:
    ds = labelled(table(doubles("qed"), roles=ROLES))
    figure = draw_effects(ds)
    check_words(figure)
    shares, weight = ds["effect_share"].isel(layer=0), ds["effect_energy"].isel(layer=0)
    lag = (ds["effect_lag_share"].isel(layer=0) * weight.sel(effect_role="all")).sum("head") / weight.sel(effect_role="all").sum()
    pooled = (shares * weight).sum("head") / weight.sum("head")
    own, base, roles, bars, sizes = figure.axes
    for panel, name in ((own, "own reads"), (base, "base reads")):
        np.testing.assert_allclose(np.asarray(panel.lines[0].get_ydata()), 100 * lag.sel(effect_convention=name))
    heights = [abs(bar.get_height()) for bar in bars.patches if isinstance(bar, Rectangle)]
    np.testing.assert_allclose(heights, np.abs(100 * pooled.sel(effect_role="all", effect_part=[*PARTS])))
    marks = [np.asarray(line.get_xdata()) for line in roles.lines if line.get_marker() != "None"]
    np.testing.assert_allclose(marks, 100 * pooled.sel(effect_part=[*PARTS]).transpose("effect_part", "effect_role"))
    drawn = [np.sort(line.get_ydata()) for line in sizes.lines]
    np.testing.assert_allclose(drawn, np.sort(ds["effect_median"].isel(layer=0).sel(effect_role="all").T))
    assert "3 prompts, 30 tokens a layer" in texts(figure)
    assert "3 tokens of a head have no effect" in texts(figure)


@pytest.mark.parametrize("ends", [(0, 1), (0, 30)])
def test_the_figure_says_that_there_is_no_effect(ends: tuple[int, ...]) -> None:
    layer = layer_of("qed", replace(make_tokens("qed", T=ends[-1]), lam=torch.zeros(2)), ends)
    figure = draw_effects(labelled(table(layer)))
    check_words(figure)
    assert [x.get_text() for panel in figure.axes for x in panel.texts].count(
        "no effect"
    ) == 7  # of lags, bars and sizes, and of three roles


def test_each_layer_has_a_row_of_its_own_in_a_role() -> None:
    """The first on top, all three parts in one row."""
    made = Effects(replace(about(roles=ROLES), layers=(0, 1)))
    for index in (0, 1):
        made.add(layer_of("qed", make_tokens("qed", T=30, seed=index), ENDS, index))
    ds = labelled(made.table())
    roles = draw_effects(ds).axes[2]
    drawn = [line for line in roles.lines if line.get_marker() != "None"]
    rows = np.arange(ds.sizes["effect_role"])
    share = 100 * (ds["effect_share"] * ds["effect_energy"]).sum("head") / ds["effect_energy"].sum("head")
    for layer, line in enumerate(drawn[:2]):
        np.testing.assert_allclose(np.asarray(line.get_ydata()), rows + (-0.15, 0.15)[layer])
        np.testing.assert_allclose(np.asarray(line.get_xdata()), share.isel(layer=layer).sel(effect_part="immediate"))
