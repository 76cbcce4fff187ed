"""Sizes, their validation, and the byte tokenizer."""

import json

import numpy as np
import pytest
import torch

from qed_probe.errors import InputError
from qed_probe.models.config import NATIVE, PRESETS, ModelConfig, preset
from qed_probe.models.language import LanguageModel
from qed_probe.models.tokenizer import ByteTokenizer

SMALL = {"mixer": "qed", "hidden": 24, "layers": 2, "heads": 2, "key_dim": 8, "value_dim": 6, "ffn": 32, "vocab_size": 64}
SMALL |= {"tokenizer": "none"}


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LanguageModel(config).parameters())


def test_presets_have_their_sizes() -> None:
    assert parameters(preset("340m", "qed")) == pytest.approx(340e6, rel=0.03)
    assert parameters(preset("tiny", "qed")) <= 1.2e6


def test_qed_adds_one_number_a_head_to_gdn2() -> None:
    # 24 layers of 6 heads: 144 scalars, the QED paper's own count (appendix A).
    assert parameters(preset("340m", "qed")) - parameters(preset("340m", "gdn2")) == 144


@pytest.mark.parametrize("name", PRESETS)
def test_config_survives_json(name: str) -> None:
    for mixer in NATIVE:
        config = preset(name, mixer)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_only_settings_that_the_mixer_uses_are_told() -> None:
    optional = ("lambda_max", "address_rank", "lower_bound", "edits", "gate_max")
    used = {mixer: [name for name in preset("tiny", mixer).used() if name in optional] for mixer in NATIVE}
    assert used["linear"] == []
    assert used["gdn2"] == ["gate_max"]
    assert used["qed"] == ["lambda_max", "gate_max"]
    assert used["eda"] == ["address_rank", "lower_bound", "gate_max"]
    assert used["eda-same"] == ["lower_bound", "gate_max"]
    assert used["deltaproduct"] == ["edits", "gate_max"]
    assert preset("tiny", "eda-qed").used() == {n: x for n, x in preset("tiny", "eda-qed").to_dict().items() if n != "edits"}


def test_native_mixers_are_all_but_rwkv7() -> None:
    assert len(NATIVE) == 18
    with pytest.raises(InputError, match=r"mixer: expected one of linear, deltanet, .*, deltaproduct, found 'rwkv7'"):
        preset("tiny", "rwkv7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixer": "mamba"}, "mixer: expected one of .*qed.* found 'mamba'"),
        ({"tokenizer": "bpe"}, "tokenizer: expected one of bytes, none, found 'bpe'"),
        ({"tokenizer": "bytes"}, "vocab_size: expected 256, as the tokenizer is bytes, found 64"),
        ({"hidden": 0}, "hidden: expected a whole number of at least 1, found 0"),
        ({"layers": True}, "layers: expected a whole number of at least 1, found True"),
        ({"heads": 2.0}, r"heads: expected a whole number of at least 1, found 2\.0"),
        ({"lambda_max": float("nan")}, "lambda_max: expected a finite number, found nan"),
        ({"lambda_max": "0.25"}, "lambda_max: expected a finite number, found '0.25'"),
        ({"gate_max": 2.5}, r"gate_max: expected in \(0, 2\], found 2.5"),
        ({"lower_bound": 0.0}, "lower_bound: expected less than 0, found 0.0"),
        ({"width": 3, "depth": 1}, "unknown 'width', 'depth'; expected mixer, hidden"),
    ],
)
def test_config_names_what_it_cannot_use(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig.from_dict(SMALL | change)


def test_config_names_missing_keys_and_unknown_presets() -> None:
    with pytest.raises(InputError, match="missing ffn, tokenizer"):
        ModelConfig.from_dict({k: v for k, v in SMALL.items() if k not in ("ffn", "tokenizer")})
    with pytest.raises(InputError, match="preset: expected one of tiny, 340m, found 'huge'"):
        preset("huge", "qed")


def test_bytes_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    text = "λ·S̄ᵀd\n\0 ok"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert bytes(ids.tolist()) == text.encode("utf-8")
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0xCE]) == "�"


def test_pieces_are_printable_and_one_a_token() -> None:
    pieces = ByteTokenizer().pieces(ByteTokenizer().encode("a λ\n\t\x00\x7f"))
    assert pieces == ["a", " ", "\\xce", "\\xbb", "\\n", "\\t", "\\x00", "\\x7f"]
    every = ByteTokenizer().pieces(range(256))
    assert len(set(every)) == 256
    assert all(piece.isascii() and piece.isprintable() for piece in every)
