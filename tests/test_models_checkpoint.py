"""A checkpoint comes back as it was, and says in one line what is wrong with it."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qed_probe.errors import CheckpointError, InputError
from qed_probe.evaluation import read_answers
from qed_probe.models.checkpoint import BUNDLED, digest, load, read_config, read_provenance, save
from qed_probe.models.config import NATIVE, ModelConfig
from qed_probe.models.language import LanguageModel
from qed_probe.tasks import niah_prompts


def small(mixer: str = "qed") -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden": 24, "layers": 2, "heads": 2, "key_dim": 8, "value_dim": 6, "ffn": 32, "vocab_size": 64}
    return LanguageModel(ModelConfig.from_dict({"mixer": mixer, "tokenizer": "none", **sizes}))


def test_loading_does_not_wait_for_torchs_compiler() -> None:
    code = "import sys; from qed_probe.models.checkpoint import load; load(); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("mixer", NATIVE)
def test_a_model_comes_back_to_the_bit(mixer: str, tmp_path: Path) -> None:
    model = small(mixer)
    tokens = torch.randint(64, (2, 20))
    save(model, tmp_path / "new" / "run", {"seed": 3, "command": "train λ"})
    back = load(tmp_path / "new" / "run")
    assert back.config == model.config == read_config(tmp_path / "new" / "run")
    assert torch.equal(back(tokens), model(tokens))
    assert not back.training
    assert all(p.requires_grad for p in back.parameters())
    assert read_provenance(tmp_path / "new" / "run") == {"seed": 3, "command": "train λ"}
    assert sorted(path.name for path in (tmp_path / "new" / "run").iterdir()) == ["config.json", "model.safetensors"]


def test_float32_masters_are_saved_in_bfloat16(tmp_path: Path) -> None:
    model = small("qed-rand")
    save(model, tmp_path, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    exact = {name for name in stored if name.endswith(("theta", "A_log", "dt_bias", "random_direction"))}
    assert len(exact) == 8
    for name, x in model.state_dict().items():
        assert torch.equal(stored[name], x if name in exact else x.bfloat16()), name
    assert model.embed.weight.dtype == torch.float32
    assert load(tmp_path).embed.weight.dtype == torch.float32
    half = load(tmp_path, dtype=torch.bfloat16)
    assert {name for name, x in half.state_dict().items() if x.dtype == torch.float32} == exact
    save(half, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_config_json_is_as_agreed(tmp_path: Path) -> None:
    model = small()
    save(model, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content == {"format": "qed_probe", "format_version": 1, "model": model.config.to_dict(), "provenance": {}}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_files_follow_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save(small(), tmp_path)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [mode, mode]


def test_digest_is_of_both_files(tmp_path: Path) -> None:
    save(small(), tmp_path)
    both = (tmp_path / "config.json").read_bytes() + (tmp_path / "model.safetensors").read_bytes()
    assert digest(tmp_path) == hashlib.sha256(both).hexdigest()
    with pytest.raises(CheckpointError, match=r"found no readable config\.json"):
        digest(tmp_path / "none")


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    save(small(), tmp_path)
    before = digest(tmp_path)
    with pytest.raises(TypeError):
        save(small("gdn"), tmp_path, {"not": {"json"}})
    assert digest(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(content | changes))

    return edit


def edit_model(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = json.loads((path / "config.json").read_text())
        content["model"] |= changes
        (path / "config.json").write_text(json.dumps(content))

    return edit


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        state = load_file(path / "model.safetensors")
        change(state)
        save_file(state, path / "model.safetensors")

    return edit


def truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def garble(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 100)


def poison(state: dict[str, torch.Tensor]) -> None:
    state["norm.weight"][3] = float("nan")
    state["layers.1.mixer.theta"][0] = float("inf")


THETA = "layers.0.mixer.theta"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda p: (p / "config.json").unlink(),
        r"expected config\.json and model\.safetensors, found no readable config",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"expected config\.json and .*, found no model\.safetensors"),
    "bad JSON": (lambda p: (p / "config.json").write_text("{"), r"config\.json: expected JSON, found something else"),
    "not UTF-8": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json: expected JSON, found something else"),
    "JSON list": (lambda p: (p / "config.json").write_text("[]"), r"config\.json: expected a JSON object, found list"),
    "other format": (edit_config(format="hf"), "expected format qed_probe version 1, found hf version 1"),
    "other version": (edit_config(format_version=2), "expected format qed_probe version 1, found qed_probe version 2"),
    "no model": (edit_config(model=None), "expected an object under 'model', found NoneType"),
    "unknown mixer": (edit_model(mixer="mamba"), r"config\.json: mixer: expected one of linear, .*, found 'mamba'"),
    "unknown key": (edit_model(wings=2), r"config\.json: model config: unknown 'wings'"),
    "missing": (edit_weights(lambda s: s.pop(THETA)), rf"model\.safetensors: expected \d+ tensors, missing {THETA}$"),
    "many missing": (edit_weights(lambda s: [s.pop(n) for n in sorted(s)[:7]]), r"missing embed\.weight, (\S+, ){4}\+2 more$"),
    "extra": (edit_weights(lambda s: s.update(head=torch.ones(1))), "found besides them head$"),
    "shape": (edit_weights(lambda s: s.update({THETA: torch.ones(3)})), rf"{THETA}: expected shape \[2\], found \[3\]"),
    "dtype": (
        edit_weights(lambda s: s.update({THETA: torch.ones(2).int()})),
        rf"{THETA}: expected a floating-point dtype, .*int32",
    ),
    "truncated": (truncate, r"model\.safetensors: expected a whole safetensors file, found one that cannot be read"),
    "garbled": (garble, r"model\.safetensors: expected a whole safetensors file, found one that cannot be read"),
    "not finite": (
        edit_weights(poison),
        r"expected finite weights, found NaN or infinity in layers\.1\.mixer\.theta, norm\.weight$",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_checkpoint_says_so_in_one_line(fault: str, tmp_path: Path) -> None:
    save(small(), tmp_path)
    breaking, message = BROKEN[fault]
    breaking(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_path_that_is_no_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a directory with .*, found nothing"):
        load(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"expected a directory with .*, found a file"):
        read_config(tmp_path / "file")


def test_weights_that_a_narrow_dtype_cannot_hold_are_named(tmp_path: Path) -> None:
    model = small()
    with torch.no_grad():
        model.norm.weight[0] = 1e6
    save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"found NaN or infinity in norm\.weight"):
        load(tmp_path, dtype=torch.float16)


def test_saving_and_loading_draw_no_random_numbers(tmp_path: Path) -> None:
    model = small("qed-rand")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    save(model, tmp_path)
    load(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_a_config_of_an_impossible_size_is_one_line(tmp_path: Path) -> None:
    save(small(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["model"]["vocab_size"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="a model of this size: expected enough memory"):
        load(tmp_path)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = niah_prompts(400, 3, 1)
    tokens = torch.from_numpy(np.stack([prompt.tokens for prompt in prompts]))
    written, _ = read_answers(load(name), tokens, 7)
    assert torch.equal(written, tokens[:, -7:])
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"expected .*config\.json"):
        load(name)
