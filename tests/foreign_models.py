"""Tiny random models of other libraries, with lively gates."""

from typing import Any

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
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 8, **LINEAR},
    "qwen3_next": {"head_dim": 8, **LINEAR, **EXPERTS, "num_experts": 2, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": LINEAR,
    "kimi_linear": {
        "linear_head_dim": 8,
        "linear_num_heads": 3,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "mlp_layer_types": ["dense"] * 3,
        "num_local_experts": 2,
        **EXPERTS,
    },
}


def tiny(model_type: str, **changes: int) -> Any:  # noqa: ANN401 - a class of transformers
    """A model of this type; layers 0 and 2 own a memory, layer 1 is attention."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES | MODELS[model_type] | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, p in model.named_parameters():
        if "A_log" in name:
            nn.init.uniform_(p, -3, 1)
        elif "dt_bias" in name:
            nn.init.normal_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model.requires_grad_(False)
