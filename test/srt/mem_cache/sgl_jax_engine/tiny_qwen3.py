"""A Qwen3 model of four small layers with random weights, as a folder that the engine loads like any other.

Not `--load-format dummy`: those weights are zeros, every answer is token 0, and every comparison holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

VOCAB_SIZE = 512
NUM_LAYERS = 4
HIDDEN, INTERMEDIATE = 128, 256
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 128

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_model(folder: Path, seed: int) -> Path:
    """Config and weights from `seed`, in `folder`, which is made."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(seed)
    save_file(
        {name: _values(name, shape, rng) for name, shape in _shapes().items()},
        folder / "model.safetensors",
    )
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB_SIZE, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if len(shape) == 1:
        return (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    scale = 0.5 if "embed" in name else 1 / np.sqrt(shape[1])
    return (scale * rng.standard_normal(shape)).astype(np.float32)
