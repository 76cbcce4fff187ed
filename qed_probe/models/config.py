"""The sizes and constants of a model, and the presets."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from math import isfinite
from typing import Any

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS

NATIVE = tuple(name for name in MIXERS if name not in ("comba", "rwkv7"))
"""The mixers that a LanguageModel can be built with; the others are only ever captured."""

TOKENIZERS = ("bytes", "none")
OUTPUT_GATES = ("sigmoid", "silu")


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a LanguageModel but its weights.

    ``key_dim`` and ``value_dim`` are sizes of one head, ``address_rank`` is EDA's rank a head, ``conv`` the width of the short
    convolutions, ``edits`` the delta edits a token (deltaproduct only), ``gate_max`` the upper end of the erase gates' range,
    ``lower_bound`` the safe gate's ℓ, and ``unit_eps`` what is added to a key's square before it is normalised. The scores of the
    next token come through the embedding if ``tied``. Raises InputError if a value cannot be used.
    """

    mixer: str
    hidden: int
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    ffn: int
    vocab_size: int
    tokenizer: str
    conv: int = 4
    lambda_max: float = 0.25
    address_rank: int = 16
    lower_bound: float = -5.0
    edits: int = 2
    gate_max: float = 1.0
    norm_eps: float = 1e-6
    unit_eps: float = 1e-12
    output_gate: str = "sigmoid"
    tied: bool = True

    def __post_init__(self) -> None:
        if self.mixer not in NATIVE:
            raise InputError(f"mixer: expected one of {', '.join(NATIVE)}, found {self.mixer!r}")
        if self.tokenizer not in TOKENIZERS:
            raise InputError(f"tokenizer: expected one of {', '.join(TOKENIZERS)}, found {self.tokenizer!r}")
        if self.output_gate not in OUTPUT_GATES:
            raise InputError(f"output_gate: expected one of {', '.join(OUTPUT_GATES)}, found {self.output_gate!r}")
        if type(self.tied) is not bool:
            raise InputError(f"tied: expected true or false, found {self.tied!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and not (type(value) is int and value >= 1):
                raise InputError(f"{field.name}: expected a whole number of at least 1, found {value!r}")
            if field.type is float and not (type(value) in (int, float) and isfinite(value)):
                raise InputError(f"{field.name}: expected a finite number, found {value!r}")
        ranges = (
            ("lambda_max", self.lambda_max >= 0, "0 or more"),
            ("lower_bound", self.lower_bound < 0, "less than 0"),
            ("gate_max", 0 < self.gate_max <= 2, "in (0, 2]"),
            ("norm_eps", self.norm_eps > 0, "more than 0"),
            ("unit_eps", self.unit_eps > 0, "more than 0"),
            ("vocab_size", self.tokenizer != "bytes" or self.vocab_size == 256, "256, as the tokenizer is bytes"),
        )
        for name, holds, expected in ranges:
            if not holds:
                raise InputError(f"{name}: expected {expected}, found {getattr(self, name)!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """Build from what ``to_dict`` gave; raises InputError naming keys that are unknown or missing."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise InputError(f"model config: unknown {', '.join(map(repr, unknown))}; expected {', '.join(known)}")
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in values]
        if missing:
            raise InputError(f"model config: missing {', '.join(missing)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def used(self) -> dict[str, Any]:
        """The fields that mean something for this mixer."""
        kind = MIXERS[self.mixer]
        optional = {
            "lambda_max": kind.direction is not None,
            "address_rank": kind.address == "learned",
            "lower_bound": kind.decay == "safe",
            "edits": self.mixer == "deltaproduct",
            "gate_max": kind.gate != "none",
        }
        return {name: value for name, value in self.to_dict().items() if optional.get(name, True)}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden": 192, "layers": 2, "heads": 3, "key_dim": 64, "value_dim": 64, "ffn": 512, "vocab_size": 256,
        "tokenizer": "bytes",
    },
    "340m": {
        "hidden": 1024, "layers": 24, "heads": 6, "key_dim": 128, "value_dim": 128, "ffn": 2496, "vocab_size": 32000,
        "tokenizer": "none",
    },
}  # fmt: skip
"""Sizes by name: ``tiny`` has 1.19 M parameters and ``340m`` 341 M with the qed mixer (its ffn is chosen for that)."""


def preset(name: str, mixer: str) -> ModelConfig:
    """A preset's sizes with this mixer; raises InputError if either is unknown."""
    if name not in PRESETS:
        raise InputError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    return ModelConfig(mixer=mixer, **PRESETS[name])
