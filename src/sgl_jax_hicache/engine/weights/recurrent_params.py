"""The tensors of a gated-delta-rule layer: their names and shapes in checkpoints, and how they are fused.

Layers with one decay per head are named as in Qwen3.5 (`linear_attn.*`), layers with one per key channel as in Kimi
Linear (`self_attn.*`).
"""

from __future__ import annotations

import numpy as np

from ..layer_kinds import RecurrentDims
from ..model_config import ModelConfig, ModelError
from .tensor_reader import Tensor, TensorReader

Shapes = dict[str, tuple[int, ...]]


def recurrent_shapes(config: ModelConfig, index: int) -> Shapes:
    """Names, after `model.layers.<index>.`, and shapes of the tensors of a recurrent layer, in checkpoint order."""
    dims = _dims(config)
    if index in dims.channel_decay_layers:
        return _channel_shapes(dims, config.hidden_size)
    return _head_shapes(dims, config.hidden_size)


def recurrent_params(config: ModelConfig, reader: TensorReader, index: int) -> dict[str, Tensor]:
    """The fused arrays of a recurrent layer, without its norms and feed-forward."""
    tensors = {
        name.partition(".")[2]: reader.take(f"model.layers.{index}.{name}", *shape)
        for name, shape in recurrent_shapes(config, index).items()
    }
    if index in _dims(config).channel_decay_layers:
        return _fuse_channel(tensors)
    return _fuse_head(tensors)


def _dims(config: ModelConfig) -> RecurrentDims:
    if config.recurrent is None:
        raise ModelError("recurrent layers need their sizes")
    return config.recurrent


def _head_shapes(dims: RecurrentDims, hidden: int) -> Shapes:
    heads = dims.num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (dims.conv_channels, hidden),
        "linear_attn.in_proj_z.weight": (dims.values_width, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (dims.conv_channels, 1, dims.conv_kernel),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (dims.value_dim,),
        "linear_attn.out_proj.weight": (hidden, dims.values_width),
    }


def _channel_shapes(dims: RecurrentDims, hidden: int) -> Shapes:
    heads, channels = dims.num_value_heads, dims.num_value_heads * dims.key_dim
    shapes: Shapes = {}
    for name, width in (("q", dims.keys_width), ("k", dims.keys_width), ("v", dims.values_width)):
        shapes[f"self_attn.{name}_proj.weight"] = (width, hidden)
        shapes[f"self_attn.{name}_conv1d.weight"] = (width, 1, dims.conv_kernel)
    return {
        **shapes,
        "self_attn.A_log": (1, 1, heads, 1),
        "self_attn.dt_bias": (channels,),
        "self_attn.f_a_proj.weight": (dims.key_dim, hidden),
        "self_attn.f_b_proj.weight": (channels, dims.key_dim),
        "self_attn.b_proj.weight": (heads, hidden),
        "self_attn.g_a_proj.weight": (dims.value_dim, hidden),
        "self_attn.g_b_proj.weight": (dims.values_width, dims.value_dim),
        "self_attn.o_norm.weight": (dims.value_dim,),
        "self_attn.o_proj.weight": (hidden, dims.values_width),
    }


def _fuse_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "qkv": tensors["in_proj_qkv.weight"],
        "conv": tensors["conv1d.weight"][:, 0],
        "beta": tensors["in_proj_b.weight"],
        "decay": tensors["in_proj_a.weight"],
        "decay_bias": tensors["dt_bias"],
        "decay_rate_log": tensors["A_log"],
        "gate": tensors["in_proj_z.weight"],
        "out_norm": tensors["norm.weight"],
        "o": tensors["out_proj.weight"],
    }


def _fuse_channel(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "qkv": np.concatenate([tensors[f"{name}_proj.weight"] for name in "qkv"]),
        "conv": np.concatenate([tensors[f"{name}_conv1d.weight"][:, 0] for name in "qkv"]),
        "beta": tensors["b_proj.weight"],
        "decay_down": tensors["f_a_proj.weight"],
        "decay": tensors["f_b_proj.weight"],
        "decay_bias": tensors["dt_bias"],
        "decay_rate_log": tensors["A_log"].reshape(-1),
        "gate_down": tensors["g_a_proj.weight"],
        "gate": tensors["g_b_proj.weight"],
        "out_norm": tensors["o_norm.weight"],
        "o": tensors["o_proj.weight"],
    }
