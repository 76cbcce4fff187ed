"""Checkpoints of transformers go on with their prompts; chat templates make prompts of messages."""

from pathlib import Path

import numpy as np
import pytest

import qed_probe as qp
from tests.foreign_models import is_since, tiny
from tests.test_foreign_tracing import call, check, save, trace, write_prompts
from tests.test_tracing_generate import check_equal, whole_prompts

transformers = pytest.importorskip("transformers", minversion="4.57")
pytestmark = pytest.mark.filterwarnings("ignore:.*A_log:qed_probe.models.foreign.checkpoint.RoundedDecayWarning")


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "qwen4_exp_text", "glm5_next"])
def test_prefill_and_decoding_are_one_full_pass(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(tiny(model_type), tmp_path / "model")
    ds = trace(monkeypatch, where, write_prompts(tmp_path, 1, 20), "--generate", "5")
    check(ds, tmp_path / "model.zarr")
    assert (ds["role"] == "generated").values.tolist() == [False] + [True] * 5 + [False] * 20 + [True] * 5
    full = qp.trace(where, whole_prompts(ds), tmp_path / "full.zarr", save_inputs=True, vectors="float32")
    check_equal(ds.load(), full.load())
    check_equal(*(qp.open_inputs(tmp_path / name).load() for name in ("model.zarr", "full.zarr")))


@pytest.mark.skipif(not is_since(5, 24), reason="before, q and k are normalised in the model's own 16 bits")
def test_sixteen_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(tiny("qwen3_5_text"), tmp_path / "model")
    how = ("--dtype", "bfloat16", "--generate", "5", "--state-at", "12")
    ds = trace(monkeypatch, where, write_prompts(tmp_path, 12), *how)
    check(ds, tmp_path / "model.zarr", rounding=2.0**-6)
    assert qp.open_states(tmp_path / "model.zarr")["snapshot_token"].values.tolist() == [12]


def test_more_than_the_model_takes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, prompts = save(tiny("qwen3_5_text", max_position_embeddings=16), tmp_path / "model"), write_prompts(tmp_path, 12)
    command = ("trace", where, "--prompts", prompts, "-o", tmp_path / "run.zarr", "--generate")
    assert call(monkeypatch, *command, 5) == 2
    assert "expected at most 16 tokens, what the model is made for, found 17, 5 of them to generate" in capsys.readouterr().err
    assert not (tmp_path / "run.zarr").exists()
    assert call(monkeypatch, *command, 4) == 0


TEMPLATE = (
    "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('no!') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
)


def test_chat_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    where, run = save(tiny("qwen3_5_text", vocab_size=300), tmp_path / "model"), tmp_path / "run.zarr"

    def refused(*command: object) -> str:
        assert call(monkeypatch, "trace", where, *command, "--chat", "-o", tmp_path / "other.zarr") == 2
        assert not (tmp_path / "other.zarr").exists()
        return capsys.readouterr().err

    assert "found no tokenizer" in refused("--text", "hi")
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.save_pretrained(where)
    assert "expected a tokenizer with a chat template" in refused("--text", "hi")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(where)
    assert call(monkeypatch, "trace", where, "--text", "hi", "--chat", "--generate", "3", "-o", run) == 0
    ds = qp.open(run)
    assert "".join(ds["token_text"].values[:-3]) == "[user]hi[model]"
    assert len(ds["token_id"]) == 18
    assert "TemplateError: no!" in refused("--text", "no")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "hi"}\n{"tokens": [1, 2]}\n')
    assert 'expected a JSON object with "text", a string; found {"tokens": [1, 2]}' in refused("--prompts", lines)
    np.save(tmp_path / "ids.npy", np.arange(3))
    assert "--chat: expected text, with --text or --prompts, found --tokens" in refused("--tokens", tmp_path / "ids.npy")
