"""Checkpoints of flash-linear-attention, saved by it and traced from disk, on a GPU or, of a few tokens, in the interpreter."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import qed_probe as qp
from tests import foreign_models
from tests.fla_models import MODELS, SIZES, tiny
from tests.test_energy import check as check_energy
from tests.test_foreign_tracing import call, check, save, write_prompts
from tests.test_foreign_tracing import trace as trace_on
from tests.test_tracing_generate import check_equal, whole_prompts

transformers = pytest.importorskip("transformers", minversion="4.57")
pytestmark = pytest.mark.filterwarnings("ignore")  # of its models, that they may be built or used otherwise
ON_DISK = [name for name in MODELS if name not in ("gdn2", "delta_net, summed keys")]
"""Of GDN-2 there is no model, and a store does not say that a layer's keys are no unit vectors."""


def trace(monkeypatch: pytest.MonkeyPatch, where: Path, prompts: Path, device: str, *options: str) -> xr.Dataset:
    return trace_on(monkeypatch, where, prompts, "--device", device, *options)


def lengths(device: str) -> tuple[int, ...]:
    return (1, 2, 7) if device == "cpu" else (1, 2, 63, 65, 300)


def likelihoods(model: Any, ds: xr.Dataset) -> np.ndarray:  # noqa: ANN401 - a class of transformers
    """−ln p of every token by the logits of the model's own forward, NaN at first tokens."""
    ids, nll = torch.from_numpy(ds["token_id"].values).long().to(model.device), []
    for begin, end in itertools.pairwise(ds["cu_seqlens"].values):
        with torch.inference_mode():
            scores = model(ids[None, begin:end]).logits[0].float().log_softmax(-1)
        nll += [torch.full((1,), torch.nan), -scores[:-1].gather(1, ids[begin + 1 : end, None])[:, 0].cpu()]
    return torch.cat(nll).numpy()


@pytest.mark.parametrize("name", ON_DISK)
def test_every_number_follows_from_the_inputs(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of long prompts in float32, all but RWKV-7 can be run by kernels that are as exact: the chunked ones are not.
    prompts = write_prompts(tmp_path, *(n for n in lengths(device) if name != "rwkv7" or n < 64))
    model = tiny(name, device, attn_mode="fused_recurrent")
    ds = trace(monkeypatch, save(model, tmp_path / "model"), prompts, device)
    assert ds.attrs["family"] == MODELS[name][0]
    assert ds.attrs["flash_linear_attention"].startswith("0.")
    assert ds.attrs["A_log_dtype"] == ("none" if name.startswith(("delta_net", "rwkv7")) or "no decay" in name else "float32")
    check(ds, tmp_path / "model.zarr")
    np.testing.assert_allclose(ds["nll"].values, likelihoods(model, ds), atol=1e-4)
    inputs = qp.open_inputs(tmp_path / "model.zarr").load()
    check_energy(qp.analyses.energy_ledger(ds, inputs), inputs, [*range(len(prompts.read_text().splitlines()))])


# How a checkpoint's dtype is read is the same for all; every family runs in sixteen bits in test_fla_capture.
@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "rwkv7"])
def test_sixteen_bits(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (name, device) == ("rwkv7", "cpu"):
        pytest.skip("the interpreter makes NaN of its shifted tokens in bfloat16")
    where = save(tiny(name, device).bfloat16(), tmp_path / "model")
    ds = trace(monkeypatch, where, write_prompts(tmp_path, *lengths(device)), device, "--dtype", "bfloat16")
    assert ds.attrs["dtype"] == ds.attrs["dtype_stored"] == "bfloat16"
    if device == "cpu":  # on a GPU our own records are made of sixteen bits too; the trace has replayed the model's outputs
        check(ds, tmp_path / "model.zarr", rounding=2.0**-6)


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "delta_net", "gated_deltaproduct", "rwkv7"])
def test_prefill_and_decoding_are_one_full_pass(name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(tiny(name, device), tmp_path / "model")
    ds = trace(monkeypatch, where, write_prompts(tmp_path, 1, 4), device, "--generate", "2")
    check(ds, tmp_path / "model.zarr")
    how: Any = {"save_inputs": True, "vectors": "float32", "device": device}
    check_equal(ds.load(), qp.trace(where, whole_prompts(ds), tmp_path / "full.zarr", **how).load())


def test_info_says_what_it_is(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:  # noqa: ANN401
    where = save(tiny("delta_net", device), tmp_path / "model")
    assert call(monkeypatch, "info", where) == 0
    lines = capfd.readouterr().out.splitlines()[1:-1]
    found = {name: " ".join(value) for name, *value in map(str.split, lines)}
    expected = {
        "family": "delta_net (DeltaNetForCausalLM of flash-linear-attention)",
        "mixer": "deltanet",
        "layers": "2 of 2: 0, 1",
        "heads": "2, of keys 2",
        "key_dim": "12",
        "value_dim": "16",
        "gate_max": "2",
        "A_log": "none",
        "traceable": "yes, if loading finds every weight",
    }
    assert found | expected == found


UNFIT: dict[str, dict[str, Any]] = {
    "deltaformer": {},
    "mesa_net": {"head_dim": 16},
    "mom": {"head_dim": 16},
    "path_attn": {},
    "precond_gated_deltanet": {"head_dim": 16},
    "precond_kda": {"head_dim": 16},
}


@pytest.mark.parametrize("model_type", UNFIT)
def test_memories_beyond_the_recurrence_are_refused(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    transformers.AutoConfig.for_model(model_type, **SIZES | UNFIT[model_type] | {"use_short_conv": True}).save_pretrained(
        tmp_path
    )
    for command in (("info", tmp_path), ("trace", tmp_path, "--prompts", write_prompts(tmp_path, 3))):
        assert call(monkeypatch, *command) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "model.layers.0.attn: expected a layer that the recurrence fits, found" in err


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    where, prompts = save(tiny("kda", "cpu"), tmp_path / "model"), write_prompts(tmp_path, 3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert call(monkeypatch, "trace", where, "--prompts", prompts, "-o", tmp_path / "run.zarr") == 2
    assert "expected a GPU, which the kernels of flash-linear-attention need: --device cuda" in capfd.readouterr().err
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    monkeypatch.delitem(types._extra_content, "kda")
    monkeypatch.setitem(sys.modules, "fla", None)
    assert call(monkeypatch, "info", where) == 2
    assert "nor flash-linear-attention (none: " in (err := capfd.readouterr().err)
    assert "pip install 'qed-probe[fla]'" in err


WITH_IT = """
import inspect, sys, warnings
warnings.simplefilter("ignore")
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as kernel
assert inspect.getclosurevars(kernel).nonlocals["implementation"].__module__.startswith("fla.")
from qed_probe.cli import main
sys.exit(main())
"""


def test_models_of_transformers_run_on_a_cpu_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, prompts = save(foreign_models.tiny("qwen3_5_text"), tmp_path / "model"), write_prompts(tmp_path, 5, 70)
    ds = trace(monkeypatch, where, prompts, "cpu", "--generate", "2")
    command = ["trace", where, "--prompts", prompts, "-o", tmp_path / "other.zarr", "--generate", "2", "--vectors", "float32"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", WITH_IT, *map(str, command)], check=True, env=environment)
    xr.testing.assert_identical(ds.load().drop_attrs(), qp.open(tmp_path / "other.zarr").load().drop_attrs())
