"""How much of a past a model keeps, by kind of layer, read from its config.json.

Wider than what the embedded engine computes: any config whose attention layers are named in one of the ways below. What
is not understood is refused, never guessed.

    which layers slide or recur   layer_types; hybrid_layer_pattern (MiMo); linear_attn_config (Kimi);
                                  full_attention_interval (Qwen3-Next, Qwen3.5); layer_group_size (Bailing);
                                  sliding_window_pattern (Gemma); sliding_window, use_sliding_window, max_window_layers
    sizes of a layer              kv_lora_rank, qk_rope_head_dim (MLA), or num_key_value_heads, head_dim, and swa_* or
                                  global ones of these
    sizes of a state              linear_*; num_heads, head_dim, short_conv_kernel_size of linear_attn_config
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_jax_hicache.engine.model_config import LayerKind, ModelConfig

from .errors import ToolError

_KIND_OF_NAME = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT,
    "kda_attention": LayerKind.RECURRENT,
}


@dataclass(frozen=True)
class HeadsKV:
    """MHA or GQA: a token keeps a key and a value of `head_dim` numbers for each of `num_kv_heads`, in each layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentKV:
    """MLA: a token keeps one latent and one rotated key in each layer, whatever the number of heads."""

    num_layers: int
    latent_dim: int
    rope_dim: int


@dataclass(frozen=True)
class StateShape:
    """Recurrent layers: numbers in the recurrent and in the convolution state of one layer."""

    num_layers: int
    state_values: int
    conv_values: int


@dataclass(frozen=True)
class KVShape:
    """What a model keeps: `full` and `sliding` of every token (`window`: the tokens a sliding layer reads), `state`
    once for a past of any length. `max_tokens`: the longest context, 0 where the config does not say.
    """

    full: HeadsKV | LatentKV | None
    sliding: HeadsKV | None = None
    window: int | None = None
    state: StateShape | None = None
    max_tokens: int = 0


def shape_of_file(path: Path) -> KVShape:
    """Reads a config.json. Raises ToolError if it cannot be read or is not understood."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ToolError(f"--model-path: cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ToolError(f"--model-path: {path} is not a JSON object")
    try:
        return shape_of_fields({**fields, **(fields.get("text_config") or {})})
    except KeyError as error:
        raise ToolError(f"--model-path: {path} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ToolError(f"--model-path: {path} is not understood: {error}") from error


def shape_of_fields(fields: Mapping[str, Any]) -> KVShape:
    """The shape that the fields of a config.json say. Raises KeyError for a missing one, ValueError for an unknown
    kind of layer.
    """
    kinds = _layer_kinds(fields)
    num_full, num_sliding, num_recurrent = (
        kinds.count(kind) for kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.RECURRENT)
    )
    return KVShape(
        full=_full(fields, num_full) if num_full else None,
        sliding=_heads(fields, num_sliding, "swa_", "") if num_sliding else None,
        window=int(fields.get("sliding_window") or fields["sliding_window_size"])
        if num_sliding
        else None,
        state=_state(fields, num_recurrent) if num_recurrent else None,
        max_tokens=int(fields.get("max_position_embeddings") or 0),
    )


def shape_of_model(config: ModelConfig) -> KVShape:
    """The shape of a model that the embedded engine serves."""
    num_full, num_sliding = (len(config.layers_of(k)) for k in (LayerKind.FULL, LayerKind.SLIDING))
    full: HeadsKV | LatentKV = HeadsKV(num_full, config.num_kv_heads, config.head_dim)
    if config.mla is not None:
        full = LatentKV(num_full, config.mla.kv_lora_rank, config.mla.qk_rope_head_dim)
    dims = config.recurrent
    return KVShape(
        full=full if num_full else None,
        sliding=HeadsKV(num_sliding, config.num_kv_heads, config.head_dim) if num_sliding else None,
        window=config.sliding_window,
        state=None
        if dims is None
        else StateShape(
            len(config.recurrent_layers), _product(dims.state_shape), _product(dims.conv_shape)
        ),
        max_tokens=config.max_position_embeddings,
    )


def _layer_kinds(fields: Mapping[str, Any]) -> list[LayerKind]:
    num_layers = int(fields["num_hidden_layers"])
    if fields.get("layer_types") is not None:
        names = list(fields["layer_types"])
        unknown = sorted(set(names) - set(_KIND_OF_NAME))
        if unknown:
            raise ValueError(f"layer_types {unknown}")
        kinds = [_KIND_OF_NAME[name] for name in names]
    elif fields.get("hybrid_layer_pattern") is not None:
        kinds = [
            LayerKind.SLIDING if mark else LayerKind.FULL for mark in fields["hybrid_layer_pattern"]
        ]
    elif fields.get("linear_attn_config"):
        attending = set(fields["linear_attn_config"]["full_attn_layers"])  # counted from 1
        kinds = _every(num_layers, LayerKind.RECURRENT, lambda index: index + 1 in attending)
    elif fields.get("full_attention_interval") or fields.get("layer_group_size"):
        step = int(fields.get("full_attention_interval") or fields["layer_group_size"])
        kinds = _every(num_layers, LayerKind.RECURRENT, lambda index: (index + 1) % step == 0)
    elif fields.get("sliding_window_pattern"):
        step = int(fields["sliding_window_pattern"])
        kinds = _every(num_layers, LayerKind.SLIDING, lambda index: (index + 1) % step == 0)
    elif fields.get("sliding_window") and fields.get("use_sliding_window", True):
        first = int(fields.get("max_window_layers") or 0)
        kinds = _every(num_layers, LayerKind.SLIDING, lambda index: index < first)
    else:
        kinds = [LayerKind.FULL] * num_layers
    if len(kinds) != num_layers:
        raise ValueError(f"{len(kinds)} kinds of layers for {num_layers} layers")
    return kinds


def _every(num_layers: int, other: LayerKind, is_full: Any) -> list[LayerKind]:
    return [LayerKind.FULL if is_full(index) else other for index in range(num_layers)]


def _full(fields: Mapping[str, Any], num_layers: int) -> HeadsKV | LatentKV:
    if fields.get("kv_lora_rank"):
        return LatentKV(num_layers, int(fields["kv_lora_rank"]), int(fields["qk_rope_head_dim"]))
    shared = fields.get("num_global_key_value_heads") is not None
    return _heads(fields, num_layers, "", "global_" if shared else "")


def _heads(fields: Mapping[str, Any], num_layers: int, prefix: str, infix: str) -> HeadsKV:
    """`prefix` stands before a name (swa_head_dim), `infix` inside it (num_global_key_value_heads, global_head_dim);
    a layer without its own sizes has the model's.
    """
    heads = int(fields["num_attention_heads"])
    own = fields.get(f"{prefix}num_{infix}key_value_heads")
    kv_heads = int(own or fields.get("num_key_value_heads") or heads)
    head_dim = fields.get(f"{prefix}{infix}head_dim") or fields.get("head_dim")
    return HeadsKV(num_layers, kv_heads, int(head_dim or int(fields["hidden_size"]) // heads))


def _state(fields: Mapping[str, Any], num_layers: int) -> StateShape:
    if "linear_num_value_heads" in fields:
        value_heads, key_heads = (
            int(fields["linear_num_value_heads"]),
            int(fields["linear_num_key_heads"]),
        )
        key_dim, value_dim = (
            int(fields["linear_key_head_dim"]),
            int(fields["linear_value_head_dim"]),
        )
        kernel = int(fields["linear_conv_kernel_dim"])
    elif fields.get("linear_attn_config"):
        own = fields["linear_attn_config"]
        value_heads = key_heads = int(own["num_heads"])
        key_dim = value_dim = int(own["head_dim"])
        kernel = int(own["short_conv_kernel_size"])
    else:  # lightning attention: a decaying sum of outer products, no convolution
        value_heads = key_heads = int(fields["num_attention_heads"])
        key_dim = value_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // key_heads)
        kernel = 1
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateShape(num_layers, value_heads * key_dim * value_dim, channels * (kernel - 1))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
