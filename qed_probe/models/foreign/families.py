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
    as ``functions``: globals of that module. Before transformers 5.15 it called them as ``attributes`` of its own. ``sizes`` are
    the layer's attributes that hold the number of key heads, of value heads, K and V.
    """

    name: str
    layer: str
    mixer: Mixer
    functions: tuple[str, ...]
    attributes: tuple[str, ...]
    sizes: tuple[str, str, str, str]


_GDN: dict[str, Any] = {
    "mixer": MIXERS["gdn"],
    "functions": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "attributes": ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
    "sizes": ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
}
_KDA: dict[str, Any] = {
    "mixer": MIXERS["kda"],
    "functions": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "attributes": (),
    "sizes": ("num_heads", "num_heads", "head_dim", "head_dim"),
}


def _transformers(name: str, layer: str, rule: dict[str, Any]) -> Family:
    return Family(name, f"transformers.models.{name}.modeling_{name}.{layer}", **rule)


FAMILIES = (
    _transformers("qwen3_5", "Qwen3_5GatedDeltaNet", _GDN),
    _transformers("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _GDN),
    _transformers("qwen3_next", "Qwen3NextGatedDeltaNet", _GDN),
    _transformers("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", _GDN),
    _transformers("lara_mini", "LaraMiniGatedDeltaNet", _GDN),
    _transformers("olmo_hybrid", "OlmoHybridGatedDeltaNet", _GDN),
    _transformers("kimi_linear", "KimiLinearDeltaAttention", _KDA),
    _transformers("glm5_next", "Glm5NextTextLinearAttention", _KDA),
    _transformers("bailing_hybrid", "BailingHybridDeltaAttention", _KDA),
)
_BY_LAYER = {family.layer: family for family in FAMILIES}


@dataclass(frozen=True)
class Layer:
    """One layer of a model that owns a memory: its number in the model, the module, and where its kernels are looked up."""

    index: int
    module: nn.Module
    family: Family
    kernels: tuple[tuple[dict[str, Any], str], ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, K and V."""
        key_heads, heads, key, value = (int(getattr(self.module, name)) for name in self.family.sizes)
        return key_heads, heads, key, value

    @property
    def gate_max(self) -> float:
        """The upper end of β's range: 2 in a layer that allows negative eigenvalues."""
        return 2.0 if getattr(self.module, "allow_neg_eigval", False) else 1.0


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
