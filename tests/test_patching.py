"""Runs that exchange a head's part: nothing with themselves, the other run where all is exchanged, and known by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats
from torch import Tensor

import qed_probe as qp
from qed_probe import analyses, figures
from qed_probe.cli import main
from qed_probe.errors import InputError, StoreError
from qed_probe.evaluation.patching import make_batch, score
from qed_probe.kernels import Tokens, edits
from qed_probe.models.config import NATIVE
from qed_probe.models.language import Cache
from qed_probe.models.patching import exchange_states, exchangeable, exchanging
from qed_probe.store.patching import make_patches
from qed_probe.tasks.pairs import Pair, needle_pairs
from tests.drawn import check_words, texts
from tests.foreign_models import tiny
from tests.test_tracing import make_checkpoint

PARTS = {
    "linear": ("state",),
    "deltaproduct": ("state",),
    "gdn2": ("state",),
    "qed": ("direction", "state"),
    "qed-rand": ("direction", "state"),
    "eda": ("address", "gamma", "state"),
    "eda-same": ("address", "gamma", "state"),
    "eda-rand": ("gamma", "state"),
    "eda-reversed": ("address", "gamma", "state"),
    "eda-qed": ("direction", "address", "gamma", "state"),
}
TOKENS = torch.randint(256, (4, 40), generator=torch.Generator().manual_seed(0))
"""Two runs and their partners."""


def model(mixer: str, layers: int = 2, conv: int = 4) -> qp.LanguageModel:
    """Random weights with lively directions, gates and addresses."""
    torch.manual_seed(3)
    sizes = {"hidden": 24, "layers": layers, "heads": 3, "key_dim": 8, "value_dim": 8, "ffn": 24, "vocab_size": 256}
    made = qp.LanguageModel(qp.ModelConfig(mixer=mixer, tokenizer="bytes", conv=conv, **sizes)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(2.0, 1.0) if name.endswith("theta") else p.mul_(8.0) if p.ndim > 1 else None
    for mixing in made.mixers.values():
        mixing.backend = "torch"
    return made


@torch.inference_mode()
def run(one: qp.LanguageModel, tokens: Tensor) -> Tensor:
    found: Tensor = one(tokens, cache=one.new_cache(len(tokens)))
    return found


@torch.inference_mode()
def patched(one: qp.LanguageModel, tokens: Tensor, what: str, layer: int, heads: list[int]) -> Tensor:
    with exchanging(one, what, layer, heads):
        return run(one, tokens)


def test_each_mixer_has_its_parts() -> None:
    assert {name: exchangeable(qp.MIXERS[name]) for name in PARTS} == PARTS
    assert all(exchangeable(qp.MIXERS[name])[-1] == "state" for name in NATIVE)


@pytest.mark.parametrize(("mixer", "what"), [(m, part) for m, parts in PARTS.items() for part in parts[:-1]])
def test_a_run_exchanged_with_itself_is_the_same_to_the_bit(mixer: str, what: str) -> None:
    one, twice = model(mixer), torch.cat([TOKENS[:2], TOKENS[:2]])
    usual = run(one, twice)
    for layer in range(2):
        assert torch.equal(patched(one, twice, what, layer, [0, 1, 2]), usual)
        assert torch.equal(patched(one, TOKENS, what, layer, []), run(one, TOKENS))
    for layer in range(2):
        assert not torch.equal(patched(one, TOKENS, what, layer, [1]), run(one, TOKENS))
    assert torch.equal(run(one, twice), usual)  # and nothing is left behind


@torch.inference_mode()
def test_states_exchanged_with_their_own_are_the_same_to_the_bit() -> None:
    one, twice = model("qed"), torch.cat([TOKENS[:2], TOKENS[:2]])
    before = one.new_cache(4)
    one(twice[:, :30], cache=before)
    kept = [memory.state.clone() for memory in before.layers]
    found = [one(twice[:, 30:], cache=exchange_states(one, before, 1, heads)) for heads in ((), [0, 1, 2])]
    assert torch.equal(*found)
    assert all(torch.equal(memory.state, state) for memory, state in zip(before.layers, kept, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("mixer", ["qed", "eda", "deltaproduct", "linear"])
def test_with_all_states_a_run_goes_on_as_the_other(mixer: str) -> None:
    one = model(mixer, conv=1)  # wider convolutions would carry the last tokens of the run itself
    tokens = TOKENS.clone()
    tokens[2:, 30:] = tokens[:2, 30:]  # both are asked the same
    before = one.new_cache(4)
    one(tokens[:, :30], cache=before)
    own = one(tokens[:, 30:], cache=exchange_states(one, before, 0, ()))
    cache = exchange_states(one, exchange_states(one, before, 0, [0, 1, 2]), 1, [0, 1, 2])
    found = one(tokens[:, 30:], cache=cache)
    torch.testing.assert_close(found, own.roll(2, 0), rtol=1e-5, atol=1e-6)  # a row's place in a batch may change its bits
    part = one(tokens[:, 30:], cache=exchange_states(one, before, 0, [0, 1, 2]))
    assert (part - own.roll(2, 0)).abs().max() > 1e-2


@torch.inference_mode()
@pytest.mark.parametrize(
    ("mixer", "what"),
    [("qed", "direction"), ("eda-qed", "direction"), ("eda", "address"), ("eda", "gamma"), ("eda-reversed", "address")],
)
def test_a_layer_does_with_another_part_what_the_oracle_does(mixer: str, what: str) -> None:
    one, head = model(mixer, layers=1), 1
    with qp.capture(one) as records:
        run(one, TOKENS)
    tokens = records[0].observation.tokens
    # The oracle runs token by token and head by head in float64, from vectors that are put together here.
    expected = torch.stack([_oracle(tokens, i, what, head, last=mixer == "eda-reversed") for i in range(4)])
    seen: list[Tensor] = []
    one.mixers[0].o_norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    patched(one, TOKENS, what, 0, [head])
    torch.testing.assert_close(seen[0].double(), one.mixers[0].scale * expected, rtol=1e-5, atol=1e-6)
    usual = one.mixers[0].scale * records[0].observation.y
    assert torch.equal(seen[0][:, :, [0, 2]], usual[:, :, [0, 2]])
    assert (seen[0][:, :, head] - usual[:, :, head]).abs().max() > 1e-3


def _oracle(tokens: Tokens, row: int, what: str, head: int, *, last: bool) -> Tensor:
    """Y ``[T, H, V]`` of a row by S ← diag(exp g)S, S ← S + k(u − Sᵀa)ᵀ, with its partner's part at one head."""
    mine, theirs = _fields(tokens, row), _fields(tokens, (row + 2) % 4)
    T, H, V = mine["v"].shape
    found = torch.zeros(T, H, V, dtype=torch.float64)
    for h in range(H):
        state = torch.zeros(mine["q"].shape[-1], V, dtype=torch.float64)
        for t in range(T):
            x, y = ({name: v[h] if name == "lam" else v[t, h] for name, v in run.items()} for run in (mine, theirs))
            if h == head and what in x:
                x[what] = y[what]
            state = x["g"].exp()[:, None] * state
            if "gamma" in x and not last:
                state = state - torch.outer(x["gamma"] * x["address"], state.T @ x["address"])
            a, u = (x["b"] * x["k"], x["w"] * x["v"]) if "b" in x else (x["beta"] * x["k"], x["beta"] * x["v"])
            if "lam" in x:
                at = y if h == head and what == "direction" else x
                wanted = at["b"] * at["q"]
                a = a + x["lam"] * (wanted - at["k"] * (at["k"] @ wanted))
            state = state + torch.outer(x["k"], u - state.T @ a)
            if last:
                state = state - torch.outer(x["gamma"] * x["address"], state.T @ x["address"])
            found[t, h] = state.T @ x["q"]
    return found


def _fields(tokens: Tokens, row: int) -> dict[str, Tensor]:
    found = {name: x for name, x in vars(tokens).items() if isinstance(x, Tensor)}
    return {name: (x if name == "lam" else x[row]).double() for name, x in found.items()}


@torch.inference_mode()
def test_another_runs_d_leaves_the_keys_orthogonal_complement() -> None:
    one = model("qed")
    with exchanging(one, "direction", 1, [2]) as seen:
        run(one, TOKENS)
    own, other = seen[0]
    assert own.shape == (4, 40, 3)
    assert torch.equal(own[..., :2], other[..., :2])
    assert (own[..., 2] - other[..., 2]).abs().max() > 1e-3
    with qp.capture(one, layers=[1]) as records:
        run(one, TOKENS)
    torch.testing.assert_close(own, records[0].observation.records["eigenvalue"], rtol=0, atol=1e-6)
    e = edits(qp.MIXERS["qed"], records[0].observation.tokens)
    assert e.d is not None
    lam = one.mixers[1].lam()[2]
    shift = lam * torch.linalg.vecdot(e.d.roll(2, 0), e.k[..., 0, :])[..., 2]  # e − e' = λ d'ᵀk, as the own dᵀk is 0
    torch.testing.assert_close(own[..., 2] - other[..., 2], shift, rtol=0, atol=1e-6)


@pytest.mark.parametrize("task", ["niah", "niah-2", "niah-3"])
def test_pairs_differ_in_the_value_alone(task: str) -> None:
    answer = qp.TASKS[task].answer
    for pair, prompt in zip(needle_pairs(task, 600, 3, 5), qp.task_prompts(task, 600, 3, 5), strict=True):
        assert pair.clean.fingerprint == prompt.fingerprint
        text, other = (bytes(x.tokens.tolist()).decode() for x in (pair.clean, pair.corrupted))
        value, wrong = text[-answer:], other[-answer:]
        assert value != wrong
        assert len(text) == len(other) == 600
        assert text.count(value) == 2
        assert text.replace(value, wrong) == other
        assert text[pair.question :].startswith("\nWhat is the special magic ")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, xr.Dataset]:
    """A random model of every part, and its patches."""
    where = make_checkpoint(tmp_path_factory.mktemp("models") / "eda-qed", "eda-qed")
    return where, qp.patch(where, length=380, samples=3, seed=2)


def test_scores_are_those_of_runs_one_by_one(found: tuple[Path, xr.Dataset]) -> None:
    where, ds = found
    assert ds["patched"].dims == ("what", "way", "layer", "head", "pair")
    assert ds["what"].values.tolist() == ["direction", "address", "gamma", "state"]
    one = qp.load_model(where)
    for i, pair in enumerate(needle_pairs("niah", 380, 3, 2)):
        for name, prompt in (("clean", pair.clean), ("corrupted", pair.corrupted)):
            expected = _ln_p(one, prompt, pair.clean) - _ln_p(one, prompt, pair.corrupted)
            assert ds[name].values[i] == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def _ln_p(one: qp.LanguageModel, prompt: qp.Prompt, answered: qp.Prompt) -> float:
    tokens = torch.from_numpy(np.concatenate([prompt.tokens[:-7], answered.tokens[-7:]]))
    logs = torch.log_softmax(one.logits(one(tokens[None])[0]).double(), -1)
    return float(logs[-8:-1].gather(1, tokens[-7:, None]).sum())


def test_both_ways_are_patched_with_the_other(found: tuple[Path, xr.Dataset]) -> None:
    """One pair alone, its noising by hand: the cache of the clean run with one head of the corrupted one's."""
    where, ds = found
    one, pair = qp.load_model(where), list(needle_pairs("niah", 380, 3, 2))[1]
    with torch.inference_mode():
        caches = []
        for prompt in (pair.clean, pair.corrupted):
            caches.append(one.new_cache(1))
            one(torch.from_numpy(prompt.tokens[None, : pair.question]), cache=caches[-1])
        for way, (into, source) in {"noising": (0, 1), "denoising": (1, 0)}.items():
            cache, other = _copied(caches[into]), caches[source]
            cache.layers[0].state[:, 1] = other.layers[0].state[:, 1]
            logs = []
            for prompt in (pair.clean, pair.corrupted):
                tokens = torch.from_numpy(prompt.tokens[None, pair.question :])
                p = torch.log_softmax(one.logits(one(tokens, cache=_copied(cache))[0]).double(), -1)
                logs.append(float(p[-8:-1].gather(1, tokens[0, -7:, None]).sum()))
            cell = ds["patched"].sel(what="state", way=way, layer=0, head=1, pair=1)
            assert cell.item() == pytest.approx(logs[0] - logs[1], abs=1e-4)


def _copied(cache: Cache) -> Cache:
    return Cache([replace(memory, state=memory.state.clone()) for memory in cache.layers])


def test_a_pair_of_the_same_run_has_no_effect_to_the_bit() -> None:
    one, pair = model("qed"), next(needle_pairs("niah", 380, 1, 0))
    batch = make_batch([pair, pair], torch.device("cpu"))
    text = bytes(pair.clean.tokens.tolist())
    assert batch.value == text.index(text[-7:])  # where the first digits differ, as these do
    same = make_batch([Pair(pair.clean, pair.clean, pair.question)] * 2, torch.device("cpu"))
    with torch.inference_mode():
        before = one.new_cache(4)
        one(same.prompts[:, : same.question], cache=before)
        usual = score(one, same, exchange_states(one, before, 0, ()))
        assert np.array_equal(score(one, same, exchange_states(one, before, 1, [0])), usual)
    assert not usual.any()


def test_the_same_twice_is_the_same_to_the_bit_and_parts_do_not_meet(found: tuple[Path, xr.Dataset]) -> None:
    where, ds = found
    part = qp.patch(where, what=["gamma", "direction"], length=380, samples=3, seed=2)
    xr.testing.assert_identical(part, ds.sel(what=["gamma", "direction"]))
    more = qp.patch(where, what=["state"], length=380, samples=4, seed=2)  # in other batches
    np.testing.assert_allclose(more["patched"].values[..., :3], ds["patched"].sel(what=["state"]).values, atol=1e-4)
    assert "eigenvalue_min" not in more
    assert bool((ds["eigenvalue_min"] <= ds["eigenvalue_max"]).all())


def by_hand() -> xr.Dataset:
    """Two heads, three pairs: one head does all, the other nothing."""
    clean, corrupted = np.array([5.0, 7.0, 6.0]), np.array([-5.0, -6.0, -4.0])
    patched = np.stack([np.stack([clean, corrupted]), np.stack([corrupted, clean])])[None, :, None]
    coords = {"what": ["state"], "way": ["denoising", "noising"], "layer": [0], "head": [0, 1]}
    columns = {"patched": patched, "clean": clean, "corrupted": corrupted, "depth": np.zeros(3)}
    return make_patches(columns, coords, {"mixer": "gdn2", "task": "niah", "length": 512})


def test_an_effect_is_a_paired_difference() -> None:
    ds = analyses.patch_effects(by_hand()).isel(what=0, layer=0)
    x = np.array([10.0, 13.0, 10.0])
    assert ds["difference"].values == pytest.approx(np.array([[11, 0], [-11, 0]]))
    assert ds["ratio"].values == pytest.approx(np.array([[1, 0], [1, 0]]))
    low, high = stats.t.interval(0.95, 2, x.mean(), stats.sem(x))
    assert (ds["low"].values[0, 0], ds["high"].values[0, 0]) == pytest.approx((low, high))
    assert (ds["full"].item(), ds["full_low"].item(), ds["full_high"].item()) == pytest.approx((11, low, high))
    p = stats.ttest_1samp(x, 0).pvalue
    assert ds["p"].values[0] == pytest.approx([p, 1])
    assert ds["p_fdr"].values == pytest.approx(np.array([stats.false_discovery_control([p, 1])] * 2))
    assert ds["pairs"] == 3


def test_runs_that_do_not_differ_have_no_ratio_and_are_drawn() -> None:
    same = by_hand()
    same["clean"], same["patched"] = same["corrupted"], same["patched"] * 0 + same["corrupted"]
    ds = analyses.patch_effects(same)
    assert (ds["difference"] == 0).all()
    assert ds["ratio"].isnull().all()
    assert "0 nats" in texts(figures.draw_patches(ds)).replace("\n", " ")


def test_the_figure_shows_the_numbers(found: tuple[Path, xr.Dataset]) -> None:
    for ds in (by_hand(), found[1]):
        effects = analyses.patch_effects(ds)
        figure = figures.draw_patches(effects)
        shown = [panel.collections[0].get_array() for panel in figure.axes[: 2 * ds.sizes["what"]]]
        values = effects["difference"].transpose("way", "what", "layer", "head").values
        np.testing.assert_allclose(np.stack([np.ravel(x) for x in shown]), values.reshape(len(shown), -1))  # type: ignore[arg-type]
        check_words(figure)


@pytest.mark.parametrize(
    ("mixer", "how", "words"),
    [
        ("qed", {"what": ["lambda"]}, "of qed, found 'lambda', a parameter: it is the same in both runs"),
        ("qed", {"what": ["address"]}, "expected some of direction, state in a model of qed, found 'address'"),
        ("gdn2", {"what": ["direction"]}, "expected some of state in a model of gdn2, found 'direction'"),
        ("eda-rand", {"what": ["address"]}, "found 'address', a fixed vector here: it is the same in both runs"),
        ("qed", {"what": []}, "what: expected some that differ, found none"),
        ("qed", {"what": ["state", "state"]}, "expected some that differ, found state, state"),
        ("qed", {"samples": 1}, "two pairs or more, found 1"),
        ("qed", {"task": "reassignment"}, "expected one with a needle, niah, niah-2, niah-3, found 'reassignment'"),
        ("qed", {"length": 40}, "expected a length of at least"),
        ("qed", {"device": "meta"}, "found 'meta'"),
    ],
)
def test_what_cannot_be_patched_is_refused(mixer: str, how: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        qp.patch(make_checkpoint(tmp_path / mixer, mixer), **how)  # type: ignore[arg-type]


def test_other_models_are_refused_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny("qwen3_5_text").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="expected a model of this package, in which runs can exchange parts, found"):
        qp.patch(tmp_path)
    with pytest.raises(InputError, match="which each token has, found 'state'"), exchanging(model("qed"), "state", 0, [0]):
        pass


def test_the_command_keeps_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "patch.zarr"
    words = ["--length", "400", "--samples", "2", "--what", "state", "-o", str(store)]

    def command(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["qed-probe", *args])
        return main()

    assert command("patch", "qed-tiny", *words) == 0
    out = capsys.readouterr().out
    assert "whole runs are" in out
    assert "e = 1" not in out
    assert command("patch", "qed-tiny", *words) == 2
    assert command("patch", "--what", "lambda", "-o", str(tmp_path / "none.zarr")) == 2
    assert "a parameter" in capsys.readouterr().err
    assert command("info", str(store)) == 0
    assert "2 layers of 3" in capsys.readouterr().out
    ds = qp.open_patches(store)
    expected = qp.patch("qed-tiny", what=["state"], length=400, samples=2)
    xr.testing.assert_equal(ds.drop_attrs(), expected.drop_attrs())
    effects = analyses.patch_effects(ds)
    assert float(effects["ratio"].sel(way="denoising").max()) > 0.9  # one head's memory carries the answer
    assert {path.name for path in qp.plot(store, tmp_path / "figures", formats=["png"])} == {"patching.png"}
    with pytest.raises(StoreError, match="expected a store of patches, found"):
        qp.open_patches(tmp_path)
    with pytest.raises(StoreError, match="expected one store of patches, found"):
        qp.plot([store, store], tmp_path / "figures")
