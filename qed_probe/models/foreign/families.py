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

    ``layer`` is its layer's class, with its module. The layer calls its kernels, one for many tokens and one for few, as
    ``functions``: globals of that module. Before transformers 5.15 it called them as ``attributes`` of its own. ``sizes`` are the
    layer's attributes that hold the number of key heads, of value heads, K and V.
    """

    name: str
    layer: str
    mixer: Mixer
    functions: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    sizes: tuple[str, str, str, str] = ("num_heads", "num_v_heads", "head_k_dim", "head_v_dim")

    @property
    def library(self) -> str:
        """Whose layer it is."""
        return FLA if self.layer.startswith("fla.") else "transformers"


FLA = "flash-linear-attention"
_GDN: dict[str, Any] = {
    "mixer": MIXERS["gdn"],
    "functions": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    "attributes": ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"),
    "sizes": ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
}
_KDA: dict[str, Any] = {
    "mixer": MIXERS["kda"],
    "functions": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "sizes": ("num_heads", "num_heads", "head_dim", "head_dim"),
}


def _transformers(name: str, layer: str, rule: dict[str, Any]) -> Family:
    return Family(name, f"transformers.models.{name}.modeling_{name}.{layer}", **rule)


def _fla(name: str, layer: str, mixer: str, *functions: str, **sizes: tuple[str, str, str, str]) -> Family:
    return Family(name, f"fla.layers.{name}.{layer}", MIXERS[mixer], functions, **sizes)


_ALIKE = ("num_heads", "num_heads", "head_k_dim", "head_v_dim")
_RWKV = ("num_heads", "num_heads", "head_dim", "head_v_dim")

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
    _fla("gated_deltanet", "GatedDeltaNet", "gdn", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    _fla("kda", "KimiDeltaAttention", "kda", "chunk_kda", "fused_recurrent_kda"),
    _fla("delta_net", "DeltaNet", "deltanet", "chunk_delta_rule", "fused_recurrent_delta_rule", sizes=_ALIKE),
    _fla("gdn2", "GatedDeltaNet2", "gdn2", "chunk_gdn2", "fused_recurrent_gdn2"),
    _fla(
        "gated_deltaproduct", "GatedDeltaProduct", "deltaproduct", "chunk_gated_delta_product", "fused_recurrent_gated_delta_rule"
    ),
    _fla("comba", "Comba", "comba", "chunk_comba", "fused_recurrent_comba"),
    _fla("rwkv7", "RWKV7Attention", "rwkv7", "chunk_rwkv7", "fused_mul_recurrent_rwkv7", sizes=_RWKV),
)
_BY_LAYER = {family.layer: family for family in FAMILIES}
_UNFIT = {
    "fla.layers.deltaformer.DeltaFormerAttention": "its memory is all earlier tokens, read through a softmax",
    "fla.layers.mesa_net.MesaNet": "it reads by solving a system with a second memory, of keys",
    "fla.layers.mom.MomAttention": "it sends each token to some of several memories",
    "fla.layers.momentum_deltanet.MomentumDeltaNet": "its edits pass through a second memory, of momentum",
    "fla.layers.path_attn.PaTHAttention": "its edits turn the keys of a softmax attention, without a memory",
    "fla.layers.precond_gated_deltanet.PrecondGatedDeltaNet": "its edits are preconditioned by a second memory",
    "fla.layers.precond_kda.PrecondKDA": "its edits are preconditioned by a second memory",
}
"""Layers of flash-linear-attention that are near the delta rule and no case of the recurrence, and why."""


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

    @property
    def edits(self) -> int:
        """The delta edits of a token."""
        return int(getattr(self.module, "num_householder", 1))


def find_layers(model: nn.Module) -> dict[int, Layer]:
    """The layers of a model that own a memory, by number.

    Raises InputError if there are none, if one has no number or two have the same, if a layer's kernels are not where its family
    has them, or if a layer's memory does not fit the recurrence.
    """
    found: dict[int, Layer] = {}
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            family, misfit = _BY_LAYER.get(name), _UNFIT.get(name)
            if misfit is not None:
                raise InputError(f"{path or 'model'}: expected a layer that the recurrence fits, found {cls.__name__}: {misfit}")
            if family is not None:
                if module.layer_idx is None:
                    raise InputError(f"{path or 'model'}: expected a layer with its number, found layer_idx None")
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
