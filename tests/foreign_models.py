"""Tiny random models of other libraries, with lively gates."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 1}
SHARED = {**EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 8}
INDEXED = {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
PICTURES = {"hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "depth": 1, "out_hidden_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 8, **LINEAR},
    "qwen3_5_moe_text": {"head_dim": 8, **LINEAR, **SHARED},
    "qwen3_next": {"head_dim": 8, **LINEAR, **SHARED},
    "qwen4_exp_text": {
        "head_dim": 8,
        "hc_count": 2,
        "hc_lowrank": 4,
        "indexer_n_heads": 1,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [3],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "split_ngram_parts": 2,
        **LINEAR,
        **SHARED,
        **INDEXED,
    },
    "lara_mini": {"head_dim": 8, **LINEAR, **SHARED},
    "olmo_hybrid": LINEAR,
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "qk_rope_head_dim": 4,
        "mlp_layer_types": ["dense"] * 3,
        "num_local_experts": 2,
        **LATENT,
        **EXPERTS,
    },
    "glm5_next": {
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 0,
        "n_routed_experts": 2,
        "mlp_layer_types": ["dense"] * 3,
        "indexer_types": ["full"] * 3,
        "index_topk": 32,
        "index_kpool": 4,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "hc_mult": 2,
        **LATENT,
        **EXPERTS,
        **INDEXED,
    },
    "bailing_hybrid": {
        "head_dim": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_rope_head_dim": 4,
        "moe_intermediate_size": 16,
        "num_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 1,
        "mlp_layer_types": ["dense"] * 3,
        **LATENT,
    },
}
"""Layers 0 and 2 of each own a memory, layer 1 is attention."""
WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen4_exp": "qwen4_exp_text", "glm5_next": "glm5_next"}
"""Models of text and pictures, and the tables of their text models."""


def is_since(*version: int) -> bool:
    """Whether transformers is there in this version or a later one."""
    found = importlib.metadata.version("transformers") if importlib.util.find_spec("transformers") else "0.0"
    return tuple(int(part) for part in found.split(".")[:2]) >= version


@contextmanager
def own_kernels() -> Iterator[None]:
    """Hide flash-linear-attention, whose kernels transformers would take for its own as a model's code is first imported."""
    hidden = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        if hidden is not None:
            sys.modules["fla"] = hidden


@own_kernels()
def tiny(model_type: str, **changes: Any) -> Any:  # noqa: ANN401 - a class of transformers
    """A model of this type in float32, with lively gates; it runs on a CPU."""
    import transformers

    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    torch.manual_seed(0)
    sizes = SIZES | MODELS[WRAPPERS.get(model_type, model_type)] | changes
    if model_type in WRAPPERS:
        config = transformers.AutoConfig.for_model(model_type, text_config=sizes, vision_config=PICTURES)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    else:
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, p in model.named_parameters():
        if "A_log" in name:
            nn.init.uniform_(p, -3, 1)
        elif "dt_bias" in name:
            nn.init.normal_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model.requires_grad_(False)
