"""Tiny random models of flash-linear-attention, with lively gates; its programs are compiled on a GPU, else interpreted."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that there is no GPU
    fla = pytest.importorskip("fla", minversion="0.6")

if not torch.cuda.is_available():
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def untuned(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Triton's
        """The interpreter times nothing: a program runs as its last configuration says, often that of the largest blocks."""
        self.configs = self.configs[-1:]
        return tuned(self, *args, **kwargs)

    Autotuner.run = untuned
    torch._dynamo.config.disable = True

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "use_short_conv": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": (
        "gated_deltanet",
        {"head_dim": 32, "expand_v": 0.5, "num_heads": 1, "num_v_heads": 3, "use_short_conv": True},
    ),
    "gated_deltanet, β up to 2": ("gated_deltanet", {"head_dim": 24, "expand_v": 0.5, "allow_neg_eigval": True}),
    "kda": ("kda", {"head_dim": 24, "expand_v": 0.5, "num_heads": 1, "num_v_heads": 2}),
    "kda, bounded": ("kda", {"head_dim": 16, "safe_gate": True, "lower_bound": -2.0, "allow_neg_eigval": True}),
    "delta_net": ("delta_net", {"expand_k": 0.75, "allow_neg_eigval": True}),
    "delta_net, summed keys": ("delta_net", {"qk_norm": "sum", "qk_activation": "elu"}),
    "gdn2": ("gdn2", {"head_dim": 32, "expand_v": 0.5, "num_heads": 1, "num_v_heads": 2, "allow_neg_eigval": True}),
    "gated_deltaproduct": ("gated_deltaproduct", {"head_dim": 16, "expand_v": 0.5, "use_forget_gate": True}),
    "gated_deltaproduct, no decay": ("gated_deltaproduct", {"head_dim": 16, "expand_v": 1, "num_heads": 1, "num_householder": 3}),
    "comba": ("comba", {"head_dim": 16, "expand_v": 0.5, "num_heads": 1, "num_v_heads": 2}),
    "rwkv7": ("rwkv7", {"head_dim": 16}),
}
"""Two layers with a memory each, most without convolutions, which are slow to interpret; of ``gdn2`` there is only a layer."""
FAMILIES = tuple(name for name in MODELS if "," not in name)
"""One of each, where it is the calls that matter and not the arithmetic."""


class LayerAlone(nn.Module):
    """GDN-2's layer twice, between an embedding and its transpose."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(
            fla.layers.GatedDeltaNet2(hidden_size=32, use_short_conv=False, layer_idx=i, **sizes) for i in range(2)
        )

    def forward(self, tokens: Tensor, *, past_key_values: Any = None, use_cache: bool = False, **how: Any) -> Any:  # noqa: ANN401
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x, past_key_values=past_key_values, use_cache=use_cache, **how)[0]
        return SimpleNamespace(logits=x @ self.embeddings.weight.mT)


def tiny(name: str, device: str, **changes: Any) -> Any:  # noqa: ANN401 - a class of the library
    """A model in float32, with lively gates."""
    import transformers

    torch.manual_seed(0)
    model_type, sizes = MODELS[name]
    if model_type == "gdn2":
        model: Any = LayerAlone(sizes | changes)
    else:
        config = transformers.AutoConfig.for_model(model_type, **SIZES | sizes | changes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for where, p in model.named_parameters():
        if "A_log" in where:
            nn.init.uniform_(p, -3, 1)
        elif "dt_bias" in where:
            nn.init.normal_(p)
        elif p.ndim > 1 and (model_type != "rwkv7" or "proj" in where):
            nn.init.normal_(p, std=0.3)
    return model.to(device).eval().requires_grad_(False)
