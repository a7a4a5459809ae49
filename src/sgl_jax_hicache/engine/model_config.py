"""What a decoder looks like, read from a Hugging Face style config.json, and how large its KV rows are.

Everything here is known before any weight is read, so that pools can be sized first. A model that the decoder cannot
compute exactly (experts, scaled rope) is refused by name, never approximated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .layer_kinds import (
    LayerKind,
    ModelError,
    RecurrentDims,
    layer_kinds,
    recurrent_dims,
    sliding_window,
)

__all__ = [
    "LayerKind",
    "MLADims",
    "ModelConfig",
    "ModelError",
    "config_from_dict",
    "config_from_file",
    "kv_dtype",
]

_MHA_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_MLA_MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3"})


@dataclass(frozen=True)
class MLADims:
    """Sizes of multi-head latent attention; a token's KV is `kv_lora_rank + qk_rope_head_dim` numbers."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def latent_dim(self) -> int:
        """Numbers kept per token and layer: the normed latent, then the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query and key size of one head before absorption; sets the softmax scale."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. `layer_kinds` has one entry per layer; `mla` is None for MHA/GQA.

    `sliding_window`: tokens that a sliding layer sees, None without such layers; `recurrent` likewise.

    `rope_interleaved`: the checkpoint rotates neighbouring pairs; the loader reorders rows so that the decoder always
    rotates halves.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    layer_kinds: tuple[LayerKind, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    rope_interleaved: bool = False
    mla: MLADims | None = None
    sliding_window: int | None = None
    recurrent: RecurrentDims | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layer_kinds:
            raise ModelError("a model needs at least one layer")
        if not self.attention_layers:
            raise ModelError("a model of recurrent layers alone is not supported; one must attend")
        slides = LayerKind.SLIDING in self.layer_kinds
        if slides and (self.sliding_window is None or self.sliding_window < 1):
            raise ModelError(
                f"sliding layers need a window of 1 or more, not {self.sliding_window}"
            )
        if slides and self.mla is not None:
            raise ModelError("sliding layers with latent attention are not supported")
        if self.recurrent is None and LayerKind.RECURRENT in self.layer_kinds:
            raise ModelError("recurrent layers need their sizes")
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_attention_heads} attention heads do not divide into "
                f"{self.num_kv_heads} KV heads"
            )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_kinds)

    def layers_of(self, *kinds: LayerKind) -> tuple[int, ...]:
        """The layers of these kinds; the buffers of their pool come in this order."""
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind in kinds)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with KV."""
        return self.layers_of(LayerKind.FULL, LayerKind.SLIDING)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state."""
        return self.layers_of(LayerKind.RECURRENT)

    @property
    def is_full_attention(self) -> bool:
        """True if every layer attends to the whole past."""
        return set(self.layer_kinds) == {LayerKind.FULL}

    def kv_values_per_token(self) -> int:
        """Numbers that one token keeps in one layer's KV buffer."""
        if self.mla is not None:
            return self.mla.latent_dim
        return 2 * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(
        self,
        dtype: str = "float32",
        kinds: tuple[LayerKind, ...] = (LayerKind.FULL, LayerKind.SLIDING),
    ) -> int:
        """Bytes that one token keeps over all layers of these kinds, at KV dtype `dtype`."""
        return len(self.layers_of(*kinds)) * self.kv_values_per_token() * kv_dtype(dtype).itemsize

    def state_bytes_per_request(self) -> int:
        """Bytes of recurrent and convolution state (float32) that a request keeps, whatever its length."""
        if self.recurrent is None:
            return 0
        values = math.prod(self.recurrent.state_shape) + math.prod(self.recurrent.conv_shape)
        return len(self.recurrent_layers) * values * 4

    def unfinished_bytes_per_request(self, chunk: int) -> int:
        """Bytes that a running request keeps of the tokens of one chunk of the delta rule; see `gated_delta.py`."""
        dims = self.recurrent
        if dims is None:
            return 0
        widths = sum(dims.written_width(layer) for layer in self.recurrent_layers)
        return widths * dims.num_value_heads * chunk * 4

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that names this config completely (used to fingerprint random weights)."""
        fields = asdict(self)
        fields["layer_kinds"] = [kind.value for kind in self.layer_kinds]
        # Left out where they say nothing: a config that has neither keeps the name it always had.
        for name in ("sliding_window", "recurrent"):
            if fields[name] is None:
                del fields[name]
        return fields


def kv_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a KV pool. Raises ModelError for anything but float32 and bfloat16."""
    if name == "float32":
        return np.dtype(np.float32)
    if name == "bfloat16":
        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    raise ModelError(f"KV dtype {name!r} is not supported; choose float32 or bfloat16")


def config_from_file(path: Path) -> ModelConfig:
    """Reads a config.json. Raises ModelError if it is missing, unreadable or describes an unsupported model."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model config {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"the model config {path} is not a JSON object")
    return config_from_dict(fields)


def config_from_dict(fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a ModelConfig from the fields of an HF config.json.

    Raises ModelError for an unknown model type, a missing field or a feature the decoder does not compute.
    """
    model_type = str(fields.get("model_type", ""))
    if model_type not in _MHA_MODEL_TYPES | _MLA_MODEL_TYPES:
        known = sorted(_MHA_MODEL_TYPES | _MLA_MODEL_TYPES)
        raise ModelError(f"model type {model_type!r} is not supported; known types: {known}")
    _refuse_unsupported(fields)
    try:
        return _build(model_type, fields)
    except KeyError as error:
        raise ModelError(f"the config of model type {model_type!r} lacks {error}") from error


def _build(model_type: str, fields: Mapping[str, Any]) -> ModelConfig:
    mla = _mla_dims(fields) if model_type in _MLA_MODEL_TYPES else None
    heads = int(fields["num_attention_heads"])
    head_dim = fields.get("head_dim") or int(fields["hidden_size"]) // heads
    biased = bool(fields.get("attention_bias", False))
    kinds = layer_kinds(fields)
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_attention_heads=heads,
        num_kv_heads=heads if mla else int(fields.get("num_key_value_heads") or heads),
        head_dim=mla.qk_head_dim if mla else int(head_dim),
        layer_kinds=kinds,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(fields),
        max_position_embeddings=int(fields["max_position_embeddings"]),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3" or bool(fields.get("qk_norm", False)),
        qkv_bias=model_type == "qwen2" or biased,
        output_bias=model_type != "qwen2" and biased,
        rope_interleaved=mla is not None and bool(fields.get("rope_interleave", True)),
        mla=mla,
        sliding_window=sliding_window(fields, kinds),
        recurrent=recurrent_dims(fields, kinds),
        eos_token_ids=_token_ids(fields.get("eos_token_id")),
    )


def _mla_dims(fields: Mapping[str, Any]) -> MLADims:
    q_lora_rank = fields.get("q_lora_rank")
    return MLADims(
        kv_lora_rank=int(fields["kv_lora_rank"]),
        qk_nope_head_dim=int(fields["qk_nope_head_dim"]),
        qk_rope_head_dim=int(fields["qk_rope_head_dim"]),
        v_head_dim=int(fields["v_head_dim"]),
        q_lora_rank=None if q_lora_rank is None else int(q_lora_rank),
    )


def _rope_theta(fields: Mapping[str, Any]) -> float:
    nested = fields.get("rope_parameters") or {}
    return float(fields.get("rope_theta", nested.get("rope_theta", 10000.0)))


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ModelError(f"rope scaling {kind!r} is not supported; only unscaled rope is")
    if float(fields.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"activation {activation!r} is not supported; only silu is")
    if fields.get("mlp_bias"):
        raise ModelError("a bias in the feed-forward layers is not supported")
    if fields.get("num_experts") or fields.get("num_local_experts") or _has_experts(fields):
        raise ModelError("mixture-of-experts layers are not supported")


def _has_experts(fields: Mapping[str, Any]) -> bool:
    if not fields.get("n_routed_experts"):
        return False
    return int(fields.get("first_k_dense_replace", 0)) < int(fields.get("num_hidden_layers", 0))


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
