"""Checkpoints of transformers, saved by it and traced from disk: every stored number follows from the stored inputs."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.numpy import load_file

import qed_probe as qp
from qed_probe import cli
from qed_probe.kernels import reference
from qed_probe.models.foreign import checkpoint
from qed_probe.models.foreign.tokenizer import ForeignTokenizer
from tests.foreign_models import MODELS, WRAPPERS, tiny
from tests.recurrences import error
from tests.test_tracing import of_prompt

transformers = pytest.importorskip("transformers", minversion="4.57")
pytestmark = pytest.mark.filterwarnings("ignore:.*A_log:qed_probe.models.foreign.checkpoint.RoundedDecayWarning")
STORED = 1e-5


def call(monkeypatch: pytest.MonkeyPatch, *command: object) -> int:
    monkeypatch.setattr(sys, "argv", ["qed-probe", *map(str, command)])
    return cli.main()


def save(model: Any, directory: Path, **how: object) -> Path:  # noqa: ANN401 - a class of transformers
    model.save_pretrained(directory, **how)
    return directory


def write_prompts(directory: Path, *lengths: int) -> Path:
    """Prompts of these lengths, as token ids."""
    rng, path = np.random.default_rng(0), directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"tokens": rng.integers(3, 64, n).tolist()}) + "\n" for n in lengths))
    return path


def trace(monkeypatch: pytest.MonkeyPatch, directory: Path, prompts: Path, *options: str) -> xr.Dataset:
    """Trace with the command, everything kept that recomputes the records."""
    run = directory.with_suffix(".zarr")
    keep = ("--save-inputs", "--vectors", "float32")
    assert call(monkeypatch, "trace", directory, "--prompts", prompts, "-o", run, *keep, *options) == 0
    return qp.open(run)


def check(ds: xr.Dataset, run: Path, rounding: float = STORED) -> None:
    """Every record against the float64 oracle on the stored inputs, and the kernel's own output within ``rounding`` of it."""
    inputs = qp.open_inputs(run).load()
    inputs["lambda"] = ds["lambda"].load()
    marks = 0
    for begin, end in itertools.pairwise(ds["cu_seqlens"].values):
        for layer in range(ds.sizes["layer"]):
            part, tokens = (
                ds.isel(layer=layer, token=slice(begin, end)),
                of_prompt(inputs, ds.attrs["mixer"], layer, begin, end, None),
            )
            expected = reference(ds.attrs["mixer"], tokens)
            own = torch.from_numpy(inputs["o"].isel(layer=layer, token=slice(begin, end)).values)
            assert error(own, ds.attrs["scale"] * expected.y[0]) <= rounding
            assert not ds["lambda"].any()
            wanted = {name: x if name == "state_norm" else x[0] for name, x in expected.records.items()}
            assert set(wanted) <= set(ds.data_vars)
            for name, x in wanted.items():
                at = slice(marks, marks + len(x))
                found = ds[name].isel(layer=layer, mark=at) if name == "state_norm" else part[name]
                # A cosine with an output that is small beside the largest has fewer digits.
                assert error(torch.from_numpy(found.values), x) <= STORED * (10 if name == "correction_cosine" else 1), name
        marks += -(-(end - begin) // 64)


def likelihoods(model: Any, ds: xr.Dataset) -> np.ndarray:  # noqa: ANN401 - a class of transformers
    """−ln p of every token by the logits of the model's own forward, NaN at first tokens."""
    ids, nll = torch.from_numpy(ds["token_id"].values).long(), []
    for begin, end in itertools.pairwise(ds["cu_seqlens"].values):
        with torch.inference_mode():
            logits = model(ids[None, begin:end], use_cache=False).logits[0].float()
        nll += [torch.tensor([torch.nan]), torch.nn.functional.cross_entropy(logits[:-1], ids[begin + 1 : end], reduction="none")]
    return torch.cat(nll).numpy()


@pytest.mark.parametrize("model_type", dict.fromkeys([*MODELS, *WRAPPERS]))
def test_every_number_follows_from_the_inputs(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(model_type)
    ds = trace(monkeypatch, save(model, tmp_path / "model"), write_prompts(tmp_path, 1, 2, 14))
    assert ds["layer"].values.tolist() == [0, 2]
    assert ds.attrs["family"] == model_type.removesuffix("_text")
    assert (ds.attrs["dtype_stored"], ds.attrs["dtype"], ds.attrs["A_log_dtype"]) == ("float32",) * 3
    check(ds, tmp_path / "model.zarr")
    np.testing.assert_allclose(ds["nll"].values, likelihoods(model, ds), atol=1e-4)


@pytest.mark.parametrize("model_type", dict.fromkeys([*MODELS, *WRAPPERS]))
@pytest.mark.parametrize("lengths", [(5, 70, 1, 2, 14), (9, 9, 9)])
def test_a_padded_batch_is_its_prompts(
    lengths: tuple[int, ...], model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(tiny(model_type), tmp_path / "model")
    prompts = write_prompts(tmp_path, *lengths)
    batched = trace(monkeypatch, model, prompts, "--batch", "3").load()
    check(batched, tmp_path / "model.zarr")
    single = trace(monkeypatch, model, prompts, "--overwrite").load()
    assert batched.attrs["batch"] == 3
    for name, x in single.data_vars.items():
        if x.dtype.kind == "f":
            np.testing.assert_allclose(batched[name].values, x.values, rtol=0, atol=1e-4 * float(abs(x).max()), err_msg=str(name))
        else:
            assert batched[name].equals(x)


@pytest.mark.parametrize(("batch", "options"), [("0", ()), ("2", ("--generate", "1"))])
def test_batches_that_cannot_be(
    batch: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompts = save(tiny("qwen3_5_text"), tmp_path / "model"), write_prompts(tmp_path, 5)
    assert call(monkeypatch, "trace", model, "--prompts", prompts, "--batch", batch, *options) == 2
    assert "error: batch: expected " in capsys.readouterr().err


def test_weights_that_come_when_they_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, prompts = save(tiny("qwen3_5_text"), tmp_path / "model"), write_prompts(tmp_path, 5, 2)
    usual = trace(monkeypatch, model, prompts).load()
    load = checkpoint.load

    def elsewhere(directory: Path, **how: Any) -> checkpoint.ForeignModel:  # noqa: ANN401 - as load's
        loaded = load(directory, **how)
        accelerate.cpu_offload(loaded.inner, execution_device=torch.device("cpu"))
        assert next(loaded.parameters()).is_meta
        return loaded

    monkeypatch.setattr(checkpoint, "load", elsewhere)
    for options in ((), ("--batch", "2")):
        spread = trace(monkeypatch, model, prompts, "--device", "auto", "--overwrite", *options).load()
        xr.testing.assert_allclose(spread.drop_attrs(), usual.drop_attrs(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("model_type", "lengths"), [("qwen3_5_text", (63, 65, 300)), ("kimi_linear", (65,))])
def test_long_prompts(model_type: str, lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = trace(monkeypatch, save(tiny(model_type), tmp_path / "model"), write_prompts(tmp_path, *lengths), "--layers", "2")
    assert ds["layer"].values.tolist() == [2]
    check(ds, tmp_path / "model.zarr")


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_grouped_heads(ratio: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * ratio}
    model = tiny("olmo_hybrid", **heads, linear_key_head_dim=24, linear_value_head_dim=10)
    ds = trace(monkeypatch, save(model, tmp_path / "model"), write_prompts(tmp_path, 12))
    assert (ds.sizes["head"], ds.attrs["key"], ds.attrs["value"]) == (2 * ratio, 24, 10)
    assert ds.attrs["gate_max"] == 2
    assert ds["eigenvalue"].min() < -0.1
    check(ds, tmp_path / "model.zarr")


GATES: dict[str, tuple[str, dict[str, object]]] = {
    "glm5_next, bounded": ("glm5_next", {"linear_lower_bound": -2.0}),
    "glm5_next, softplus": ("glm5_next", {"linear_lower_bound": None}),
    "bailing_hybrid, bounded": ("bailing_hybrid", {"kda_safe_gate": True, "kda_lower_bound": -2.0}),
    "bailing_hybrid, softplus": ("bailing_hybrid", {"kda_safe_gate": False}),
}


@pytest.mark.parametrize("gate", GATES)
def test_lower_bound_gates(gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, how = GATES[gate]
    ds = trace(monkeypatch, save(tiny(model_type, **how), tmp_path / "model"), write_prompts(tmp_path, 12))
    assert (float(ds["log_decay_min"].min()) >= -2) is gate.endswith("bounded")
    check(ds, tmp_path / "model.zarr")


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, prompts = save(tiny(model_type).to(torch.bfloat16), tmp_path / "model"), write_prompts(tmp_path, 12)
    ds = trace(monkeypatch, where, prompts, "--dtype", "bfloat16")
    assert ds.attrs["dtype"] == "bfloat16"
    assert ds.attrs["A_log_stored"] == "bfloat16"
    check(ds, tmp_path / "model.zarr", rounding=2.0**-6)


def test_shards_and_tied_heads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_prompts(tmp_path, 12, 5)
    model, tied = tiny("qwen3_5_text"), tiny("qwen3_5_text", tie_word_embeddings=True)
    whole, shards = save(model, tmp_path / "whole"), save(model, tmp_path / "shards", max_shard_size="20KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    one, other = (trace(monkeypatch, where, prompts) for where in (whole, shards))
    assert one.attrs["checkpoint_digest"] != other.attrs["checkpoint_digest"]
    xr.testing.assert_identical(one.drop_attrs(), other.drop_attrs())
    ds = trace(monkeypatch, save(tied, tmp_path / "tied"), prompts)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    np.testing.assert_allclose(ds["nll"].values, likelihoods(tied, ds), atol=1e-4)


def test_states_and_a_resumed_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    where, prompts = save(tiny("kimi_linear"), tmp_path / "model"), write_prompts(tmp_path, 70, 9)
    ds = trace(monkeypatch, where, prompts, "--state-at", "3,63", "--layers", "0")
    states = qp.open_states(tmp_path / "model.zarr").load()["state"]
    norms = np.linalg.norm(states.values, axis=(-2, -1))
    np.testing.assert_allclose(norms[0, 1], ds["state_norm"].values[0, 0], rtol=1e-5)
    assert states.sizes["snapshot"] == 3
    again = (where, "--prompts", prompts, "-o", tmp_path / "model.zarr", "--resume")
    assert call(monkeypatch, "trace", *again) == 2
    assert "differ in" in capsys.readouterr().err
    keep = ("--save-inputs", "--vectors", "float32", "--state-at", "3,63", "--layers", "0")
    assert call(monkeypatch, "trace", *again, *keep) == 0


def test_a_cost_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    where, prompts = save(tiny("qwen3_next"), tmp_path / "model"), write_prompts(tmp_path, 70, 9)
    assert call(monkeypatch, "trace", where, "--prompts", prompts, "--dry-run") == 0
    assert capsys.readouterr().out.startswith("79 tokens, ")
    assert not list(tmp_path.glob("*.zarr"))


def test_a_prompt_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("qed_probe.tracing.plan._free_memory", lambda: 10_000_000)
    prompts = write_prompts(tmp_path, 1000)
    # KDA's own kernel holds much more than a Gated DeltaNet's.
    for model_type, status in (("qwen3_5_text", 0), ("kimi_linear", 2)):
        where = save(tiny(model_type), tmp_path / model_type)
        assert call(monkeypatch, "trace", where, "--prompts", prompts, "--dry-run") == status
    assert "found 1,000" in capsys.readouterr().err


def test_text_is_read_with_the_checkpoints_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    where = save(tiny("qwen3_5_text", vocab_size=256), tmp_path / "model")
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(where)
    run = tmp_path / "run.zarr"
    assert call(monkeypatch, "trace", where, "--text", "a é\n", "--text", "b", "-o", run) == 0
    ds = qp.open(run)
    assert ds["token_text"].values.tolist() == ["a", " ", "\ufffd", "\ufffd", "\\n", "b"]
    assert inner.decode(ds["token_id"].values.tolist()[:5]) == "a é\n"
    assert call(monkeypatch, "trace", where, "--text", "\ud800", "-o", tmp_path / "other.zarr") == 2
    assert "lone surrogate" in capsys.readouterr().err
    (where / "tokenizer.json").write_text("{}")
    lines = tmp_path / "lines.jsonl"
    for line, status in (('{"text": "a"}', 2), ('{"tokens": [3]}', 0)):  # which needs none
        lines.write_text(line)
        assert call(monkeypatch, "trace", where, "--prompts", lines, "-o", tmp_path / "other.zarr") == status
        assert ("expected a tokenizer that transformers can read" in capsys.readouterr().err) is (status == 2)
    assert call(monkeypatch, "trace", where, "--text", "a", "-o", tmp_path / "third.zarr") == 2
    assert "expected a tokenizer that transformers can read" in capsys.readouterr().err


class Narrow:
    """A tokenizer that has fewer tokens than its model."""

    def decode(self, ids: list[int]) -> str:
        return "abc"[ids[0]]


def test_ids_beyond_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    assert ForeignTokenizer(Narrow(), tmp_path).pieces([1, 60, 2]) == ["b", "", "c"]


def test_scores_that_overflow_are_no_likelihoods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("qwen3_5_text")
    model.lm_head.weight.mul_(1e38)
    prompts = write_prompts(tmp_path, 1, 5)
    assert call(monkeypatch, "trace", save(model, tmp_path / "model"), "--prompts", prompts, "-o", tmp_path / "run.zarr") == 1
    assert "expected a likelihood of every token, found NaN first at token 2" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_holds_one_layer_whatever_the_depth(tmp_path: Path) -> None:
    extra = []
    for depth in (2, 8):
        model = tiny("qwen3_5_text", num_hidden_layers=depth, layer_types=["linear_attention"] * depth)
        directory = save(model, tmp_path / str(depth))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        for run in ("warm", "counted"):  # what PyTorch's libraries keep is taken once
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            qp.trace(directory, [qp.Prompt(np.arange(4096) % 64)], tmp_path / f"{run}{depth}.zarr", device="cuda")
        extra.append(torch.cuda.max_memory_allocated() - before - weights)
    shallow, deep = extra
    assert deep <= 1.02 * shallow


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear"])
def test_a_model_over_two_gpus(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    prompts, model = write_prompts(tmp_path, 5, 70), save(tiny(model_type), tmp_path / "model")
    loaded = checkpoint.load(model, device=None, dtype=torch.float32)
    assert {str(p.device) for p in loaded.parameters()} == {"cuda:0", "cuda:1"}
    one = trace(monkeypatch, model, prompts, "--device", "cuda").load()
    spread = trace(monkeypatch, model, prompts, "--device", "auto", "--overwrite").load()
    for name, x in one.data_vars.items():
        np.testing.assert_array_equal(spread[name], x, err_msg=str(name))
