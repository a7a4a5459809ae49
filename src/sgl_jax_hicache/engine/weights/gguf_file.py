"""GGUF checkpoints: config, tensors under Hugging Face names, and the tokenizer's metadata.

The `gguf` package dequantises. Converters store the q and k rows of llama models for interleaved rope (pairs
next to each other); they are put back into halves here.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..model_config import ModelConfig, ModelError, config_from_dict
from .fingerprint import TensorBytes, model_version
from .gguf_header import read_gguf
from .tensor_reader import Tensor

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_PERMUTED_ARCHITECTURES = frozenset({"llama"})
_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFFile:
    """One .gguf file, memory mapped. Raises ModelError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        header = read_gguf(path)
        self._fields, self._tensors = header.fields, header.tensors

    def field(self, name: str, default: Any = None) -> Any:
        """The metadata value `name`, or `default` where the file has none."""
        return self._fields.get(name, default)

    @cached_property
    def config(self) -> ModelConfig:
        """The model's config, from the metadata and the tensor names."""
        architecture = str(self.field("general.architecture"))
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"GGUF architecture {architecture!r} is not supported; known: "
                f"{sorted(_ARCHITECTURES)}"
            )
        return config_from_dict(self._config_fields(architecture))

    def _config_fields(self, architecture: str) -> dict[str, Any]:
        def get(name: str, default: Any = None) -> Any:
            return self.field(f"{architecture}.{name}", default)

        heads = get("attention.head_count")
        return {
            "model_type": _ARCHITECTURES[architecture],
            "vocab_size": int(self._tensors["token_embd.weight"].shape[0]),
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_scaling": {"type": get("rope.scaling.type", "default")},
            "max_position_embeddings": get("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors and architecture == "llama",
            "sliding_window": get("attention.sliding_window"),
            "n_routed_experts": get("expert_count"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
        }

    def tensor(self, name: str) -> Tensor:
        """The tensor with Hugging Face name `name`, dequantised. Raises KeyError if the file lacks it."""
        stored = self._tensors[gguf_name(name)]
        values = gguf.dequantize(stored.data, stored.kind)
        if str(self.field("general.architecture")) in _PERMUTED_ARCHITECTURES:
            heads = self._rotated_heads(name)
            if heads:
                values = unpermute_rope_rows(values, heads)
        return values

    def _rotated_heads(self, name: str) -> int:
        """Heads of a q or k projection, 0 for any other tensor."""
        if ".self_attn.q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_kv_heads if ".self_attn.k_proj." in name else 0

    def version(self) -> str:
        """The model version: a digest over the stored (quantised) tensors."""
        return model_version(
            TensorBytes(
                name=name,
                shape=stored.shape,
                dtype=stored.kind.name,
                data=stored.data.reshape(-1).view(np.uint8),
            )
            for name, stored in self._tensors.items()
        )


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name. Raises KeyError if GGUF has no such tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{int(index)}.{_LAYER_NAMES[part]}.{suffix}"


def unpermute_rope_rows(weight: Tensor, heads: int) -> Tensor:
    """Turns rows (or a bias) stored as pairs x0 y0 x1 y1 .. within each head into halves x.. y.."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
