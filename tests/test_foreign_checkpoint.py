"""A directory of transformers is described without its weights, and whatever is wrong with it is said in one line."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qed_probe.models.foreign.checkpoint import RoundedDecayWarning
from qed_probe.models.foreign.description import Description
from qed_probe.models.opening import open_model
from tests.foreign_models import MODELS, SIZES, is_since, tiny
from tests.test_foreign_tracing import call, save, write_prompts

transformers = pytest.importorskip("transformers", minversion="4.57")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in shards."""
    where: Path = tmp_path_factory.mktemp("saved") / "model"
    return save(tiny("qwen3_5_text"), where, max_shard_size="20KB")


@pytest.fixture
def model(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its copy ``model``, to be spoilt, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, tmp_path / "model")
    write_prompts(tmp_path, 5)
    return Path("model")


def configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shard_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / str(index["weight_map"][name])


def rewrite(directory: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the shard that holds a tensor."""
    path = shard_of(directory, name)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


A_LOG = "model.layers.2.linear_attn.A_log"


def only_old_weights(model: Path) -> None:
    for path in model.glob("model*"):
        path.unlink()
    (model / "pytorch_model.bin").touch()


def cut_short(model: Path) -> None:
    path = shard_of(model, A_LOG)
    path.write_bytes(path.read_bytes()[:-20])


def another_shard(model: Path) -> Path:
    rename_shard(model, "more.safetensors", keep=True)
    return model / "more.safetensors"


def rename_shard(model: Path, name: str, *, keep: bool = False) -> None:
    """Give the first shard of the index this name there, or list it besides."""
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"]["more" if keep else first] = name
    path.write_text(json.dumps(index))


def with_biases(model: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A model with experts, whose biases are buffers and have another name on disk, those of layer 0 changed."""
    save(tiny("kimi_linear", mlp_layer_types=["sparse"] * 3), model)
    tensors = load_file(model / "model.safetensors")
    (name,) = (name for name in tensors if name.startswith("model.layers.0.") and name.endswith("e_score_correction_bias"))
    tensors[name] = change(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def weights_elsewhere(model: Path) -> None:
    shutil.copy(shard_of(model, A_LOG), model / "other.safetensors")
    configure(model, transformers_weights="other.safetensors")


def no_text_output(model: Path) -> None:
    if not is_since(5, 24):
        pytest.skip("no glm5_next_text")
    config = transformers.AutoConfig.for_model("glm5_next_text", **SIZES | MODELS["glm5_next"])
    config.save_pretrained(model)


def unlike_any(model: Path) -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    transformers.LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(model)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (
        lambda model: shard_of(model, A_LOG).unlink(),
        "weight files, as model.safetensors.index.json lists them",
    ),
    "a missing index": (lambda model: (model / "model.safetensors.index.json").unlink(), "found neither"),
    "a damaged index": (lambda model: (model / "model.safetensors.index.json").write_text("{}"), "'weight_map'"),
    "a damaged shard": (cut_short, "expected a whole safetensors file"),
    "no safetensors": (only_old_weights, "found pytorch_model.bin"),
    "a missing weight": (lambda model: rewrite(model, A_LOG, lambda x: x.pop(A_LOG)), f"found no {A_LOG}"),
    "a weight too many": (
        lambda model: rewrite(model, A_LOG, lambda x: x.update(extra=torch.zeros(2))),
        "found besides them extra",
    ),
    "a weight of another shape": (
        lambda model: rewrite(model, A_LOG, lambda x: x.update({A_LOG: torch.zeros(3)})),
        f"found of another shape {A_LOG}",
    ),
    "eight bits": (
        lambda model: rewrite(model, A_LOG, lambda x: x.update({A_LOG: x[A_LOG].to(torch.float8_e4m3fn)})),
        f"F8_E4M3 in {A_LOG}",
    ),
    "an adapter": (lambda model: (model / "adapter_config.json").write_text("{}"), "found an adapter beside it"),
    "a weight twice": (
        lambda model: save_file({A_LOG: torch.zeros(2)}, another_shard(model), metadata={"format": "pt"}),
        f"found {A_LOG} in another file too",
    ),
    "a shard elsewhere": (lambda model: rename_shard(model, "../model.safetensors"), "found '../model.safetensors'"),
    "an index of nothing": (
        lambda model: (model / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}'),
        "found 'none'",
    ),
    "a weight that is not finite": (
        lambda model: rewrite(model, A_LOG, lambda x: x[A_LOG].fill_(torch.nan)),
        f"NaN or infinity in {A_LOG}",
    ),
    "a weight that is whole": (
        lambda model: rewrite(model, A_LOG, lambda x: x.update({A_LOG: x[A_LOG].int()})),
        f"I32 in {A_LOG}",
    ),
    "a buffer that is not finite": (
        lambda model: with_biases(model, lambda x: x * torch.nan),
        "NaN or infinity in model.layers.0.",
    ),
    "a buffer that is whole": (lambda model: with_biases(model, lambda x: x.long()), "I64 in model.layers.0."),
    "weights of another name": (weights_elsewhere, "'other.safetensors', as transformers_weights in config.json names them"),
    "an index without an end": (
        lambda model: (model / "model.safetensors.index.json").write_text("[" * 100_000),
        "'weight_map'",
    ),
    "heads that do not share keys": (
        lambda model: save(tiny("qwen3_next", linear_num_value_heads=3), model),
        "expected a model that runs, found RuntimeError",
    ),
    "a far larger configuration": (lambda model: configure(model, vocab_size=10_000_000), "numbers, found"),
    "no vocabulary": (lambda model: configure(model, vocab_size=0), "expected"),
    "no heads": (lambda model: configure(model, num_attention_heads=0), "expected"),
    "a quantised model": (
        lambda model: configure(model, quantization_config={"quant_method": "fp8"}),
        "quantization_config in config.json",
    ),
    "another output than the embedding it is tied to": (
        lambda model: configure(model, tie_word_embeddings=True),
        "lm_head.weight to equal model.embed_tokens.weight, as tie_word_embeddings says",
    ),
    "no memory": (unlike_any, "found none in LlamaForCausalLM"),
    "no text output": (no_text_output, "found glm5_next_text"),
    "an unknown type": (lambda model: configure(model, model_type="qwen9"), "'qwen9', which transformers"),
    "its own code": (
        lambda model: configure(model, model_type="qwen9", auto_map={"AutoConfig": "own.Config"}),
        "which --trust-remote-code runs",
    ),
    "impossible sizes": (lambda model: configure(model, num_hidden_layers=4), "a configuration that transformers can read"),
    "half a configuration": (lambda model: (model / "config.json").write_text('{"model_type"'), "expected JSON"),
    "no configuration": (lambda model: (model / "config.json").unlink(), "found no readable config.json"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_cannot_be_traced_is_one_line(
    what: str, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, named = SPOILT[what]
    spoil(model)
    capfd.readouterr()
    assert call(monkeypatch, "trace", model, "--prompts", "prompts.jsonl") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("qed-probe: error: model")
    assert err.count("\n") == 1
    assert named in err
    assert not Path("run.zarr").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--text hi", "the model has no tokenizer"),
        ("", "--task niah: expected a model over bytes"),
        ("--prompts prompts.jsonl --strength 2", "strength: expected 1"),
        ("--prompts prompts.jsonl --backend torch", "backend: expected auto"),
        ("--prompts prompts.jsonl --layers 1", "expected some of [0, 2], found [1]"),
        ("--tokens high.npy", "found 64 in prompt 1"),
        ("--tokens long.npy", "expected at most 50 tokens, what the model is made for, found 51"),
    ],
)
def test_what_a_model_cannot_do_is_one_line(
    options: str, named: str, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(model, max_position_embeddings=50)
    np.save("high.npy", np.array([64]))
    np.save("long.npy", np.zeros(51, np.int64))
    assert call(monkeypatch, "trace", model, *options.split()) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert named in err


def test_without_transformers_it_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert call(monkeypatch, "info", model) == 2
    assert capfd.readouterr().err.endswith(
        "found none (import of transformers halted; None in sys.modules): pip install 'qed-probe[hf]'\n"
    )


def test_info_needs_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def facts() -> dict[str, str]:
        assert call(monkeypatch, "info", model) == 0
        lines = capfd.readouterr().out.splitlines()[1:]
        return {name: " ".join(value) for name, *value in map(str.split, lines)}

    found = facts()
    assert "--dry-run" in found.pop("what")
    expected = {
        "family": "qwen3_5 (Qwen3_5ForCausalLM of transformers)",
        "mixer": "gdn",
        "layers": "2 of 3: 0, 2",
        "heads": "4, of keys 2",
        "key_dim": "8",
        "value_dim": "6",
        "dtype": "float32",
        "A_log": "float32",
        "traceable": "yes, if loading finds every weight",
    }
    assert found | expected == found
    for path in model.glob("*.safetensors"):
        path.unlink()
    found = facts()
    assert found["traceable"].startswith("no: model: expected")
    assert "what" not in found


def test_info_of_a_native_checkpoint_needs_no_transformers() -> None:
    code = "import sys; from qed_probe.models.opening import describe; describe(); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rounded_decay_is_reported(tmp_path: Path) -> None:
    exact = save(tiny("qwen3_5_text"), tmp_path / "exact")
    with pytest.warns(RoundedDecayWarning, match="A_log, .* is bfloat16 in the model and float32 on disk"):
        model = open_model(exact, device=CPU, dtype=torch.bfloat16)
    assert isinstance(model.config, Description)
    open_model(save(tiny("qwen3_5_text").bfloat16(), tmp_path / "rounded"), device=CPU, dtype=torch.float32)
    open_model(save(tiny("bailing_hybrid"), tmp_path / "kept"), device=CPU, dtype=torch.bfloat16)


OWN_CODE = {
    "configuration_own.py": """
from transformers import Qwen3_5TextConfig
class OwnConfig(Qwen3_5TextConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from pathlib import Path
from transformers import Qwen3_5ForCausalLM
from .configuration_own import OwnConfig
Path("it-ran").touch()
class OwnForCausalLM(Qwen3_5ForCausalLM):
    config_class = OwnConfig
""",
}


def test_code_of_its_own_runs_only_if_trusted(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(Path("cache").absolute()))
    for name, code in OWN_CODE.items():
        (model / name).write_text(code)
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    # Where transformers knows the type, its own model is taken.
    configure(model, auto_map=names)
    assert call(monkeypatch, "trace", model, "--prompts", "prompts.jsonl", "--trust-remote-code") == 0
    configure(model, model_type="own", architectures=["OwnForCausalLM"])
    assert call(monkeypatch, "info", model) == 2
    assert not Path("it-ran").exists()
    capfd.readouterr()
    assert call(monkeypatch, "info", model, "--trust-remote-code") == 0
    assert "qwen3_5 (OwnForCausalLM of transformers)" in capfd.readouterr().out
    assert call(monkeypatch, "trace", model, "--prompts", "prompts.jsonl", "--trust-remote-code", "--overwrite") == 0
    assert Path("it-ran").exists()


def test_code_of_another_repository_is_never_fetched(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(model, model_type="qwen9", auto_map={"AutoConfig": "some/repo--own.Config"})
    assert call(monkeypatch, "trace", model, "--prompts", "prompts.jsonl", "--trust-remote-code") == 2
    assert "found that of another repository, some/repo--own.Config" in capfd.readouterr().err
