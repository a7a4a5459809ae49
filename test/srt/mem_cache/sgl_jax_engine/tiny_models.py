"""Configs of tiny models, one for every kind of cache, as folders that the engine takes with `--load-format dummy`.

`cpu_engine` makes the weights. Four layers each; vocabulary 512, windows of 64 tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
}

MIMO_CONFIG_CLASS = """
from transformers import PretrainedConfig


class MiMoV2FlashConfig(PretrainedConfig):
    model_type = "mimo_v2_flash"

    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)
        super().__init__(**fields)
"""


@dataclass(frozen=True)
class TinyModel:
    """A model's config, settings that the engine needs for it on CPU, and files beside the config."""

    config: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The model in `folder`, which is made."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(COMMON | self.config))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return folder


GQA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MLA = {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
STATES = {"max_recurrent_state_size": 48, "hicache_checkpoint_interval": 64}
WINDOWS = {"hicache_checkpoint_interval": 64}

MODELS: dict[str, TinyModel] = {
    "qwen3": TinyModel({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **GQA}),
    "deepseek_v3": TinyModel(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            **MLA,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 4,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_scaling": None,
            "num_nextn_predict_layers": 0,
        },
        {"attention_backend": "fa"},
    ),
    "gemma2": TinyModel(
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            **GQA,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 128,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        WINDOWS,
    ),
    "mimo_v2": TinyModel(
        {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "auto_map": {"AutoConfig": "configuration_mimo.MiMoV2FlashConfig"},
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "sliding_window": 64,
            "sliding_window_size": 64,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 0, 0, 0],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": 0.707,
            "partial_rotary_factor": 0.334,
            "rope_theta": 5000000,
            "swa_rope_theta": 10000,
            "layernorm_epsilon": 1e-5,
        },
        {"trust_remote_code": True, **WINDOWS},
        {"configuration_mimo.py": MIMO_CONFIG_CLASS},
    ),
    "kimi_linear": TinyModel(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "q_lora_rank": None,
            **MLA,
            "mla_use_nope": True,
            "num_experts": None,
            "num_experts_per_token": None,
            "num_shared_experts": 0,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 2,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        },
        {"attention_backend": "fa", **STATES},
    ),
    "qwen3_5": TinyModel(
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": {
                **COMMON,
                "model_type": "qwen3_5_text",
                **GQA,
                "hidden_size": 256,
                "attn_output_gate": True,
                "full_attention_interval": 4,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
        },
        {"gdn_prefill_impl": "chunked_jax", **STATES},
    ),
}
