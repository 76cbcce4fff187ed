"""The layers of other libraries that own a delta-rule memory: a table of names, which imports none of these libraries."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from qed_probe.errors import InputError
from qed_probe.kernels import MIXERS, Mixer


@dataclass(frozen=True)
class Family:
    """One model type of another library.

    ``layer`` is its layer's class, with its module. The layer calls its kernels, one for many tokens and one for a single token,
    as ``functions``: globals of that module. Before transformers 5.15 it called them as ``attributes`` of its own.
    """

    name: str
    layer: str
    mixer: Mixer
    functions: tuple[str, ...]
    attributes: tuple[str, ...]


_GDN = (
    MIXERS["gdn"],
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
)
_KDA = (MIXERS["kda"], ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), ())

FAMILIES = (
    Family("qwen3_5", "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet", *_GDN),
    Family("qwen3_next", "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet", *_GDN),
    Family("olmo_hybrid", "transformers.models.olmo_hybrid.modeling_olmo_hybrid.OlmoHybridGatedDeltaNet", *_GDN),
    Family("kimi_linear", "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention", *_KDA),
)
_BY_LAYER = {family.layer: family for family in FAMILIES}


@dataclass(frozen=True)
class Layer:
    """One layer of a model that owns a memory: its number in the model, the module, and where its kernels are looked up."""

    index: int
    module: nn.Module
    family: Family
    kernels: tuple[tuple[dict[str, Any], str], ...]


def find_layers(model: nn.Module) -> dict[int, Layer]:
    """The layers of a model that own a memory, by number.

    Raises InputError if there are none, if two have one number, or if a layer's kernels are not where its family has them.
    """
    found: dict[int, Layer] = {}
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            family = _BY_LAYER.get(f"{cls.__module__}.{cls.__qualname__}")
            if family is not None:
                layer = Layer(int(module.layer_idx), module, family, tuple(_kernels(module, family, path)))
                if layer.index in found:
                    raise InputError(f"expected one layer of each number, found a second layer {layer.index}: {path}")
                found[layer.index] = layer
    if not found:
        names = ", ".join(family.name for family in FAMILIES)
        raise InputError(f"expected a model with delta-rule layers of {names}, found none in {type(model).__name__}")
    return found


def _kernels(module: nn.Module, family: Family, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The namespaces and names under which a layer looks its kernels up when it runs."""
    own, shared = vars(module), vars(sys.modules[family.layer.rpartition(".")[0]])
    for names, namespace in ((family.attributes, own), (family.functions, shared)):
        if names and all(name in namespace for name in names):
            yield from ((namespace, name) for name in names)
            return
    raise InputError(f"{path}: expected {family.name} to call {' and '.join(family.functions)}, found no such functions")
