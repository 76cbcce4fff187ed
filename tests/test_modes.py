"""A direction that acts at once alone, later alone or not at all: against a slow layer, in a running model, and in outcomes."""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import qed_probe as qp
from qed_probe import analyses, figures
from qed_probe.cli import main
from qed_probe.errors import StoreError
from qed_probe.evaluation import read_answers
from qed_probe.kernels import MIXERS, edits
from qed_probe.models.intervention import MODES, Intervention, intervene
from qed_probe.models.language import LanguageModel
from tests.drawn import check_words, texts
from tests.hand_made import join, run
from tests.test_intervention import TOKENS, hidden, model

ADDING = [name for name, mixer in MIXERS.items() if mixer.direction is not None]


def slow(tokens: Any, mixer: str, mode: str) -> tuple[np.ndarray, np.ndarray]:  # noqa: ANN401
    """What flows on of each token ``[B, T, H, V]``, and what the memory gives without regard to it: one token after another."""
    ready = edits(MIXERS[mixer], tokens)
    assert ready.d is not None
    q, g, k, a, u, d = (x.double().numpy() for x in (ready.q, ready.g, ready.k, ready.a, ready.u, ready.d))
    lam = tokens.lam.double().numpy()
    flows, gives = np.zeros(u[..., 0, :].shape), np.zeros(u[..., 0, :].shape)
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        kept = lam[h] if mode in ("full", "lasting") else 0.0
        given = lam[h] if mode in ("full", "immediate") else 0.0
        S = np.zeros((q.shape[-1], u.shape[-1]))
        for t in range(q.shape[1]):
            at = b, t, h
            S = np.exp(g[at])[:, None] * S
            for m in range(k.shape[-2]):
                if m != ready.main:
                    S = S + np.outer(k[at][m], u[at][m] - S.T @ a[at][m])
                    continue
                own = a[at][m] - lam[h] * d[at]
                # The step as it is kept, and as the output of this token sees it.
                shown = S + np.outer(k[at][m], u[at][m] - S.T @ (own + given * d[at]))
                S = S + np.outer(k[at][m], u[at][m] - S.T @ (own + kept * d[at]))
            flows[at], gives[at] = shown.T @ q[at], S.T @ q[at]
    return flows, gives


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mixer", ["qed", "qed-noproj", "qed-rand", "eda-qed"])
def test_a_layer_gives_what_its_mode_says(mixer: str, mode: str) -> None:
    one = model(mixer).mixers[0]
    x = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(1))
    taken: list[tuple[Any, Tensor]] = []
    flowed: list[Tensor] = []
    one.observers.append((lambda seen, o, *_: taken.append((seen.tokens, o)), None))
    handle = one.o_norm.register_forward_pre_hook(lambda _, args: flowed.append(args[0]))
    whole = model(mixer)
    with torch.inference_mode():
        one(x)
        full = taken[-1][0]
        intervene(whole, Intervention(mode=mode))
        one.strength, one.step = (getattr(whole.mixers[0], name) for name in ("strength", "step"))
        one(x)
    handle.remove()
    flows, gives = slow(full, mixer, mode)
    # One layer in float32: a rounding of each of some forty products.
    np.testing.assert_allclose(flowed[-1].numpy() / one.scale, flows, atol=2e-6 * np.abs(flows).max())
    np.testing.assert_allclose(taken[-1][1].numpy() / one.scale, gives, atol=2e-6 * np.abs(gives).max())
    others = [slow(full, mixer, other)[0] for other in MODES if other != mode]
    assert all(np.abs(flows - other).max() > 1e-3 * np.abs(flows).max() for other in others)


def test_full_is_untouched_and_none_is_strength_0_to_the_bit() -> None:
    one = model("qed")
    before = hidden(one)
    intervene(one, Intervention(strength=0.0))
    without = hidden(one)
    intervene(one, Intervention(mode="none"))
    assert torch.equal(hidden(one), without)
    intervene(one, Intervention(mode="lasting"))
    assert not torch.allclose(hidden(one), before, atol=1e-4)
    intervene(one, Intervention(mode="full"))
    assert torch.equal(hidden(one), before)


@pytest.mark.parametrize(("mode", "phase"), [("full", "all"), *product(sorted({*MODES} - {"full"}), ("all", "prompt", "answer"))])
def test_answers_are_read_in_the_mode_of_their_phase(mode: str, phase: str) -> None:
    """Token by token, from one cache: a prompt in one go, and an answer, go on with the memory that they found."""
    one, change = model("qed"), Intervention(mode=mode, phase=phase)
    cache, states = one.new_cache(2), []
    with torch.inference_mode():
        for t in range(TOKENS.shape[1] - 1):
            intervene(one, change.during("prompt" if t < TOKENS.shape[1] - 5 else "answer"))
            states.append(one(TOKENS[:, t : t + 1], cache=cache))
        logits = one.logits(torch.cat(states, 1))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none")
    intervene(one, change.during("prompt"))
    _, found = read_answers(one, TOKENS, 5, partial(intervene, one, change.during("answer")))
    assert torch.allclose(found.flatten(), expected, atol=1e-5)


def test_a_head_has_a_mode_alone_and_a_strength_with_it() -> None:
    usual, everywhere, alone = model("qed"), model("qed"), model("qed")
    intervene(everywhere, Intervention(strength=-0.5, mode="immediate"))
    intervene(alone, Intervention(strength=-0.5, mode="immediate", at=((0, 1),)))
    flowed: dict[str, Tensor] = {}
    for name, one in {"usual": usual, "everywhere": everywhere, "alone": alone}.items():
        one.mixers[0].o_norm.register_forward_pre_hook(lambda _, args, name=name: flowed.update({name: args[0]}))
        hidden(one)
    assert torch.equal(flowed["alone"][:, :, [0, 2]], flowed["usual"][:, :, [0, 2]])
    assert torch.equal(flowed["alone"][:, :, 1], flowed["everywhere"][:, :, 1])
    assert not torch.allclose(flowed["alone"][:, :, 1], flowed["usual"][:, :, 1], atol=1e-3)


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in ADDING and name not in ("comba", "rwkv7")])
def test_where_no_direction_is_added_there_are_no_modes(mixer: str) -> None:
    with pytest.raises(qp.InputError, match=f"mode: expected full for {mixer}|found one of {mixer}"):
        intervene(model(mixer), Intervention(mode="lasting"))
    with pytest.raises(qp.InputError, match="mode: expected one of full, immediate, lasting, none, found 'later'"):
        intervene(model("qed"), Intervention(mode="later"))


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_of_a_mode_checks_itself_and_says_so(mode: str, tmp_path: Path) -> None:
    one: LanguageModel = model("qed")
    qp.save_model(one, tmp_path / "qed", {})
    ds = qp.trace(tmp_path / "qed", qp.niah_prompts(400, 2, seed=0), tmp_path / "run.zarr", mode=mode, save_inputs=True)
    assert ds.attrs.get("mode", "full") == mode
    assert ds.attrs["strength"] == 1
    assert bool((ds["lambda"] == 0).all()) == (mode in ("immediate", "none"))
    inputs = qp.open_inputs(tmp_path / "run.zarr")
    ids = torch.from_numpy(ds["token_id"].values.astype(np.int64))[None]
    intervene(one, Intervention(mode=mode))
    with torch.inference_mode():
        logits = one.logits(one(ids, cu_seqlens=torch.from_numpy(ds["cu_seqlens"].values)))
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").numpy()
    found = ds["nll"].values[1:]
    there = np.isfinite(found)
    np.testing.assert_allclose(found[there], expected[there], atol=1e-4)
    assert "o" in inputs


RIGHT = {"full": [1, 1, 1, 1, 1, 0], "immediate": [1, 1, 0, 0, 0, 1], "lasting": [1, 1, 1, 1, 1, 0], "none": [0, 0, 0, 0, 0, 0]}
LOSS = {
    "full": [0.1] * 6,
    "immediate": [0.2] * 6,
    "lasting": [0.1, 0.2, 0.0, 0.1, 0.1, 0.1],
    "none": [0.6, 0.5, 0.4, 0.6, 0.5, 0.4],
}


def outcomes(**columns: object) -> xr.Dataset:
    lengths = {512: 0.0, 1024: 1.0}
    parts = []
    for mode in RIGHT:
        for length, more in lengths.items():
            loss = np.array(LOSS[mode]) + more
            parts.append(run("qed", 0, {length: RIGHT[mode]}, mode=mode, answer_loss=loss, **columns))
    return join(*parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_on_a_gpu_is_that_of_a_cpu(mode: str, tmp_path: Path) -> None:
    prompts = qp.niah_prompts(512, 2, seed=0)
    one, other = (
        qp.trace(None, prompts, tmp_path / device, mode=mode, device=device)["nll"].values for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-3)  # float32 in other kernels, two layers deep


def test_modes_are_paired_with_full() -> None:
    ds = analyses.modes(outcomes())
    assert ds["accuracy"].dims == ("run", "length", "mode")
    assert ds["mode"].values.tolist() == [*RIGHT]
    assert ds["correct"].values.tolist() == [[[5, 3, 5, 0]] * 2]
    assert ds["gained"].values.tolist() == [[[0, 1, 0, 0]] * 2]
    assert ds["lost"].values.tolist() == [[[0, 3, 0, 5]] * 2]
    # The answer is four bytes long; McNemar's p of none is 2·(½)⁵, of six tests the smallest.
    np.testing.assert_allclose(ds["difference"].values[0], [[np.nan, -0.4, 0, -1.6]] * 2, atol=1e-12)
    np.testing.assert_allclose(ds["p"].values[0, 0], [np.nan, 0.625, 1, 0.0625])
    np.testing.assert_allclose(ds["p_holm"].values[0, :, 3], 6 * 0.0625)
    assert (ds.attrs["at"], ds.attrs["phase"]) == ("all", "all")
    assert analyses.accuracy(outcomes())["correct"].values.tolist() == [[5, 5]]
    with pytest.raises(StoreError, match="at strength 1 and others, found 1 alone"):
        analyses.strengths(outcomes())
    with pytest.raises(StoreError, match="in other modes than full, found none"):
        analyses.modes(outcomes().isel(sample=outcomes()["mode"].values == "full"))
    with pytest.raises(
        StoreError, match="one place and phase in which modes differ, found at all, phase all and at all, phase pr"
    ):
        analyses.modes(join(outcomes(), run("qed", 0, {512: RIGHT["none"]}, mode="none", phase="prompt", answer_loss=0.1)))
    with pytest.raises(StoreError, match="qed seed 0 with strength 1, mode immediate"):
        analyses.modes(outcomes().isel(sample=outcomes()["mode"].values != "full"))


def test_the_figure_of_modes_shows_the_numbers() -> None:
    ds = analyses.modes(outcomes())
    figure = figures.draw_modes(ds)
    check_words(figure)
    share, change = figure.axes
    curves = [np.asarray(line.get_ydata()) for line in share.lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(curves, 100 * ds["accuracy"].values[0].T)
    curves = [np.asarray(line.get_ydata()) for line in change.lines if line.get_marker() != "None"]
    np.testing.assert_allclose(curves, ds["difference"].values[0].T)
    assert "6 samples a length and mode" in texts(figure)
    assert "does not add up" in texts(figure)


def test_stores_without_modes_open_as_full(tmp_path: Path) -> None:
    old = qp.open_outcomes("docs/outcomes/niah.zarr").isel(sample=slice(0, None, 1000))
    assert {*old["mode"].values} == {"full"}
    qp.save_outcomes(old, tmp_path / "new.zarr")
    xr.testing.assert_identical(qp.open_outcomes(tmp_path / "new.zarr"), old)


def test_the_command_asks_in_each_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    qp.save_model(model("qed"), tmp_path / "qed", {"seed": 3})
    words = ["evaluate", tmp_path / "qed", "--lengths", "400,500", "--samples", "2", "-o", tmp_path / "out.zarr"]

    def call(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, words), *more])
        return main()

    assert call("--mode", "full", "--mode", "none", "--mode", "lasting") == 0
    out = capsys.readouterr().out
    assert "accuracy by mode in %" in out
    assert "does not add up" in out
    counts = qp.open_outcomes(tmp_path / "out.zarr").to_dataframe().groupby(["mode", "length"]).size()
    assert counts.to_dict() == {(mode, n): 2 for mode in ("full", "none", "lasting") for n in (400, 500)}
    written = qp.plot(tmp_path / "out.zarr", tmp_path / "figures")
    assert {"modes.png", "accuracy.png"} <= {path.name for path in written}
    assert "strengths.png" not in {path.name for path in written}
    for more in (("--mode", "later"), ("--mode", "none", "--strength", "0"), ("--mode", "full", "--at", "0:1")):
        assert call(*more, "--overwrite") == 2
