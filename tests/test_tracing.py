"""A trace against its own inputs: every stored number is recomputed in float64 from the store alone."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import qed_probe as qp
from qed_probe.kernels import Choice, Tokens, reference, replay
from qed_probe.models import selfcheck
from qed_probe.models.capture import Captured, capture
from qed_probe.models.intervention import Intervention, intervene
from qed_probe.tracing import plan, run
from qed_probe.tracing.plan import packs
from tests.recurrences import error

MIXERS = ("qed", "qed-noproj", "qed-rand", "gdn", "linear", "eda", "eda-reversed", "eda-qed", "deltaproduct")
STORED = 1e-4
"""What a number in the store may differ from its recomputation (the read kept in float16: half a step, 2⁻¹¹ of its size)."""


def make_checkpoint(directory: Path, mixer: str, seed: int = 0) -> Path:
    """A tiny random model whose gates and strengths are lively."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden": 24, "layers": 2, "heads": 2, "key_dim": 12, "value_dim": 8, "ffn": 32}
    model = qp.LanguageModel(qp.ModelConfig(mixer=mixer, vocab_size=256, tokenizer="bytes", **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                parameter.mul_(8)
    qp.save_model(model, directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[qp.Prompt]:
    rng = np.random.default_rng(0)
    return [qp.Prompt(rng.integers(0, 256, n)) for n in (1, 70, 130, 64)]


def of_prompt(ds: xr.Dataset, mixer: str, layer: int, begin: int, end: int, direction: Tensor | None) -> Tokens:
    """One layer's stored inputs of one prompt."""
    part = ds.isel(layer=layer, token=slice(begin, end))

    def get(name: str) -> Tensor | None:
        return torch.from_numpy(part[name].values)[None] if name in ds else None

    k, several = get("k"), mixer == "deltaproduct"
    assert k is not None
    address = {"eda": 0, "eda-qed": 0, "eda-reversed": 1}.get(mixer)
    main = k.shape[-2] - 1 if mixer != "eda-reversed" else 0
    q, v = get("q"), get("v")
    assert q is not None
    assert v is not None
    if mixer == "rwkv7":
        a, g = get("a"), get("g")
        assert a is not None
        assert g is not None
        kappa = a[..., 0, :] * g.exp()
        rate = k[..., 0, :] / kappa
        return Tokens(q=q, k=k[..., 1, :], v=v, g=g, removal_key=kappa, in_context_rate=rate, unit_key=False)
    return Tokens(
        q=q,
        k=k if several else k[..., main, :],
        v=v,
        g=get("g"),
        beta=get("beta"),
        b=get("b"),
        w=get("w"),
        lam=torch.from_numpy(ds["lambda"].values[layer]),
        direction=direction,
        gamma=get("gamma"),
        address=None if address is None else k[..., address, :],
    )


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_number_follows_from_the_inputs(mixer: str, prompts: list[qp.Prompt], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "model", mixer)
    ds = qp.trace(where, prompts, tmp_path / "run.zarr", save_inputs=True, vectors="float32", state_at=[0, 63, 100])
    inputs = qp.open_inputs(tmp_path / "run.zarr").load()
    inputs["lambda"] = ds["lambda"].load()
    model = qp.load_model(where)
    directions = [getattr(mixing, "random_direction", None) for mixing in model.mixers.values()]
    ends, scale = ds["cu_seqlens"].values, ds.attrs["scale"]
    states = qp.open_states(tmp_path / "run.zarr").load()
    kept = states["snapshot_token"].values
    for layer in range(2):
        marks = 0
        for begin, end in itertools.pairwise(ends):
            part = inputs.isel(layer=layer, token=slice(begin, end))
            q, g, k, a, u = (torch.from_numpy(part[name].values) for name in "qgkau")
            main = 0 if mixer == "eda-reversed" else -1
            d = torch.from_numpy(part["d"].values) if "d" in part else None
            y, read = replay(q, g, k, a, u, main=main, d=d)
            assert error(torch.from_numpy(part["o"].values), scale * y) < STORED
            if d is not None:
                assert error(torch.from_numpy(ds["read"].isel(layer=layer, token=slice(begin, end)).values), read) < STORED
            expected = reference(mixer, of_prompt(inputs, mixer, layer, begin, end, directions[layer]))
            for name, wanted in expected.records.items():
                if name == "state_norm":
                    found = ds[name].isel(layer=layer, mark=slice(marks, marks + len(wanted)))
                    marks += len(wanted)
                else:
                    found, wanted = ds[name].isel(layer=layer, token=slice(begin, end)), wanted[0]
                assert error(torch.from_numpy(found.values), wanted) < STORED, name
            for token in kept[(kept >= begin) & (kept < end)]:
                snapshot = states["state"].isel(layer=layer).sel(snapshot=kept == token).values[0]
                assert error(torch.from_numpy(snapshot), expected.states[0, token - begin]) < STORED


def test_float16_reads_are_within_half_a_step(prompts: list[qp.Prompt], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "model", "qed")
    exact = qp.trace(where, prompts, tmp_path / "a.zarr", vectors="float32")["read"].values
    kept = qp.trace(where, prompts, tmp_path / "b.zarr")["read"].values
    assert kept.dtype == np.float16
    assert np.all(np.abs(kept - exact) <= np.maximum(2.0**-11 * np.abs(exact), 2.0**-25))


def test_likelihoods_are_the_models_own(prompts: list[qp.Prompt], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "model", "eda")
    ds = qp.trace(where, prompts, tmp_path / "run.zarr")
    model = qp.load_model(where)
    for index, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt.tokens)[None]
        with torch.inference_mode():
            scores = torch.log_softmax(model.logits(model(ids)), -1)[0]
        mine = ds["nll"].values[ds["prompt_index"].values == index]
        assert np.isnan(mine[0])
        expected = -scores[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        # Packed and single rows are multiplied in different shapes.
        np.testing.assert_allclose(mine[1:], expected, atol=1e-4)


def test_the_bundled_model_answers_and_a_strength_scales_lambda(tmp_path: Path) -> None:
    samples = qp.niah_prompts(512, 4, seed=7)
    ds = qp.trace(None, samples, tmp_path / "run.zarr")
    assert ds["correct"].values.tolist() == [1, 1, 1, 1]
    assert set(ds["role"].values.tolist()) == {"noise", "needle", "question", "answer"}
    half = qp.trace(None, samples, tmp_path / "half.zarr", strength=0.5, layers=[1])
    assert half["layer"].values.tolist() == [1]
    np.testing.assert_allclose(half["lambda"].values, 0.5 * ds["lambda"].sel(layer=[1]).values)
    none = qp.trace(None, samples, tmp_path / "none.zarr", strength=0)
    assert float(np.abs(none["correction_norm"]).max()) == 0
    assert float(none["read_norm"].max()) > 0


def test_layers_of_a_part_agree_with_the_whole(prompts: list[qp.Prompt], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "model", "qed")
    whole = qp.trace(where, prompts, tmp_path / "a.zarr")
    part = qp.trace(where, prompts, tmp_path / "b.zarr", layers=[1], vectors="none")
    assert "read" not in part
    assert (whole.attrs["vectors"], part.attrs["vectors"]) == ("float16", "none")
    xr.testing.assert_equal(part["eigenvalue"].drop_vars("layer"), whole["eigenvalue"].sel(layer=[1]).drop_vars("layer"))


def test_bfloat16_passes_the_self_check(prompts: list[qp.Prompt], tmp_path: Path) -> None:
    ds = qp.trace(make_checkpoint(tmp_path / "model", "eda-qed"), prompts, tmp_path / "run.zarr", dtype="bfloat16")
    assert ds.attrs["dtype"] == "bfloat16"
    assert 0 < float(np.abs(ds["key_norm"] - 1).max()) < 5e-3


def test_triton_passes_the_self_check_in_sixteen_bits(tmp_path: Path) -> None:
    where, prompts = make_checkpoint(tmp_path / "model", "qed"), [qp.Prompt(np.arange(90))]
    ds = qp.trace(where, prompts, tmp_path / "run.zarr", dtype="bfloat16", backend="triton", vectors="float32")
    exact = qp.trace(where, prompts, tmp_path / "exact.zarr", dtype="bfloat16", backend="torch", vectors="float32")
    # The first layer sees the same inputs either way, and its second chunk a state that was kept in bfloat16.
    off = np.abs(ds["read"][0] - exact["read"][0]).max() / np.abs(exact["read"][0]).max()
    assert 1e-5 < float(off) < 5e-3


def test_every_backend_gives_the_same_records(tmp_path: Path) -> None:
    where, prompts = make_checkpoint(tmp_path / "model", "eda-qed"), [qp.Prompt(np.arange(21))]
    choices: list[Choice] = ["torch", "reference", "triton"]
    stores = {choice: qp.trace(where, prompts, tmp_path / f"{choice}.zarr", backend=choice) for choice in choices}
    assert {choice: ds.attrs["backend"] for choice, ds in stores.items()} == {choice: choice for choice in choices}
    for name in ("rho", "read_norm", "operator_norm", "state_norm", "nll"):
        for ds in stores.values():
            np.testing.assert_allclose(ds[name], stores["reference"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["output", "read"])
def test_a_mismatch_stops_the_trace_and_is_located(what: str, tmp_path: Path) -> None:
    model = qp.load_model(make_checkpoint(tmp_path / "model", "qed"))
    ids = torch.arange(100)[None]
    with torch.no_grad(), capture(model) as seen:
        model(ids)
    captured: Captured = seen[1]
    selfcheck.check_heads(captured, seed=0)
    selfcheck.check_layer(captured)
    x = captured.output if what == "output" else captured.observation.records["read"]
    x[0, 37, :] += 0.1 * x.abs().max()
    with pytest.raises(qp.CheckFailed, match=r"layer 1, head \d, token 37"):
        selfcheck.check_heads(captured, seed=0)


def test_packs_hold_whole_prompts_within_the_budget() -> None:
    assert [*packs([8192, 1, 1], 8192)] == [slice(0, 1), slice(1, 3)]
    assert [*packs([100_000], 8192)] == [slice(0, 1)]
    assert [*packs([1] * 129, 8192)] == [slice(0, 128), slice(128, 129)]


def test_estimate_knows_tokens_and_bytes(prompts: list[qp.Prompt], tmp_path: Path) -> None:
    where = make_checkpoint(tmp_path / "model", "qed")
    cost = qp.estimate(where, prompts, save_inputs=True)
    qp.trace(where, prompts, tmp_path / "run.zarr", save_inputs=True)
    on_disk = sum(f.stat().st_size for f in (tmp_path / "run.zarr").rglob("*") if f.is_file() and f.name != "zarr.json")
    assert cost.tokens == 265
    assert cost.seconds > 0
    # Strings are counted at 16 bytes, and the last block is padded to its full size on disk.
    assert 0.4 * on_disk < cost.bytes < 1.3 * on_disk


def test_every_token_of_the_sampled_layer_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    monkeypatch.setattr(plan, "PACK", 128)
    monkeypatch.setattr(run, "check_layer", lambda captured, start, _: spans.append((start, start + captured.output.shape[1])))
    qp.trace(make_checkpoint(tmp_path / "model", "qed"), [qp.Prompt(np.full(64, 7))] * 5, tmp_path / "run.zarr")
    assert spans == [(0, 128), (128, 256), (256, 320)]


def test_heads_are_replayed_until_enough_tokens_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []
    monkeypatch.setattr(plan, "PACK", 128)
    monkeypatch.setattr(run, "check_heads", lambda captured, seed, start, _: starts.append(start))
    qp.trace(make_checkpoint(tmp_path / "model", "qed"), [qp.Prompt(np.full(64, 7))] * 8, tmp_path / "run.zarr", layers=[0])
    assert starts == [0, 128]


def test_an_estimate_is_not_taken_from_a_single_short_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, passes = make_checkpoint(tmp_path / "model", "qed"), []
    forward = qp.LanguageModel.forward

    def counted(model: qp.LanguageModel, ids: Tensor) -> Tensor:
        passes.append(ids.shape[1])
        return forward(model, ids)

    monkeypatch.setattr(qp.LanguageModel, "forward", counted)
    qp.estimate(where, [qp.Prompt(np.full(3, 7))] * 400)
    assert passes == [1, 1024, 1024]


def test_progress_goes_on_with_every_layer(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    where = make_checkpoint(tmp_path / "model", "qed")
    qp.trace(
        where, [qp.Prompt(np.full(64, 7))], tmp_path / "run.zarr", progress=lambda done, total: reports.append((done, total))
    )
    assert reports == [(32, 64), (64, 64)]


def test_a_trace_runs_another_direction_and_says_so(tmp_path: Path) -> None:
    prompts, model = qp.niah_prompts(400, 1, 0), qp.load_model()
    ds = qp.trace(None, prompts, tmp_path / "run.zarr", direction="nogate")
    assert ds.attrs["direction"] == "nogate"
    intervene(model, Intervention(direction="nogate"))
    with torch.inference_mode(), qp.capture(model) as seen:
        model(torch.from_numpy(prompts[0].tokens)[None])
    for layer in seen:
        for name in ("eigenvalue", "read_norm", "correction_norm"):
            np.testing.assert_allclose(ds[name].sel(layer=layer.layer), layer.observation.records[name][0], rtol=1e-5, atol=1e-6)


def test_a_trace_changes_the_strength_of_some_heads_alone(tmp_path: Path) -> None:
    prompts = qp.niah_prompts(400, 1, 0)
    own, changed = (
        qp.trace(None, prompts, tmp_path / f"{len(at)}.zarr", strength=s, at=at) for s, at in ((1, ()), (0, ((1, 0),)))
    )
    ratio = changed["lambda"] / own["lambda"]
    assert ratio.values.tolist() == [[1, 1, 1], [0, 1, 1]]
    assert not changed["correction_norm"][1, :, 0].any()
    assert changed["correction_norm"][1, :, 1].any()
    assert changed.attrs["at"] == "1:0"
    with pytest.raises(qp.InputError, match="at, phase: expected a strength, a direction or a mode to go with them, found none"):
        qp.trace(None, prompts, tmp_path / "none.zarr", at=[(1, 0)])
