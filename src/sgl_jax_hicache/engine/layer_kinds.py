"""What each decoder layer remembers about the past, read from a Hugging Face style config.json.

`layer_types` names one kind per layer: `full_attention`, `sliding_attention` (with `sliding_window`),
`linear_attention` (gated delta rule, one decay per head, as in Qwen3-Next) and `kda_attention` (the same rule with one
decay per key channel, as in Kimi Linear). The `linear_*` sizes hold for both of the latter.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ModelError(ValueError):
    """A model, checkpoint or tokenizer that this engine cannot serve; found at start."""


class LayerKind(enum.Enum):
    """What a layer remembers about the past; one compiled step serves all layers of a kind."""

    FULL = "full"
    SLIDING = "sliding"
    RECURRENT = "recurrent"


_CHANNEL_DECAY = "kda_attention"
_LAYER_TYPE_NAMES = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.RECURRENT,
    _CHANNEL_DECAY: LayerKind.RECURRENT,
}


@dataclass(frozen=True)
class RecurrentDims:
    """Sizes of all gated-delta-rule layers. A key head serves `num_value_heads / num_key_heads` value heads.

    `conv_kernel`: tokens that the short causal convolution spans, the current one included.
    `channel_decay_layers`: layers that decay each key channel by itself; the others have one decay per head.
    """

    num_value_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    channel_decay_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.num_value_heads, self.num_key_heads, self.key_dim, self.value_dim)
        if min(sizes) < 1 or self.conv_kernel < 2:
            raise ModelError("recurrent layers need positive sizes and a convolution of 2 or more")
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"{self.num_value_heads} value heads do not divide into {self.num_key_heads} key heads"
            )

    @property
    def keys_width(self) -> int:
        """Numbers in all keys (or queries) of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Numbers in all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys_width + self.values_width

    def written_width(self, layer: int) -> int:
        """Numbers that one head of one token writes to a layer's state: key, value, strength, and the decays."""
        decays = self.key_dim if layer in self.channel_decay_layers else 1
        return self.key_dim + self.value_dim + 1 + decays

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Recurrent state of one layer and request: [value heads, key_dim, value_dim]."""
        return (self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Inputs that the convolution still needs of the past: [channels, conv_kernel - 1]."""
        return (self.conv_channels, self.conv_kernel - 1)


def layer_kinds(fields: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """The kind of each layer. Raises ModelError for unknown names or a wrong number of them."""
    num_layers = int(fields["num_hidden_layers"])
    names = fields.get("layer_types")
    if names is None:
        first = int(fields.get("max_window_layers", 0)) if _slides(fields) else num_layers
        return tuple(
            LayerKind.SLIDING if index >= first else LayerKind.FULL for index in range(num_layers)
        )
    if len(names) != num_layers:
        raise ModelError(f"layer_types has {len(names)} entries for {num_layers} layers")
    unknown = sorted(set(names) - set(_LAYER_TYPE_NAMES))
    if unknown:
        raise ModelError(f"layer types {unknown} are unknown; known: {sorted(_LAYER_TYPE_NAMES)}")
    return tuple(_LAYER_TYPE_NAMES[name] for name in names)


def sliding_window(fields: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> int | None:
    """Tokens that a sliding layer sees, the current one included; None without sliding layers."""
    if LayerKind.SLIDING not in kinds:
        return None
    return int(fields["sliding_window"])


def recurrent_dims(fields: Mapping[str, Any], kinds: tuple[LayerKind, ...]) -> RecurrentDims | None:
    """Sizes of the recurrent layers, None if there are none. Raises KeyError for a missing field."""
    if LayerKind.RECURRENT not in kinds:
        return None
    names = fields["layer_types"]
    return RecurrentDims(
        num_value_heads=int(fields["linear_num_value_heads"]),
        num_key_heads=int(fields["linear_num_key_heads"]),
        key_dim=int(fields["linear_key_head_dim"]),
        value_dim=int(fields["linear_value_head_dim"]),
        conv_kernel=int(fields["linear_conv_kernel_dim"]),
        channel_decay_layers=tuple(i for i, name in enumerate(names) if name == _CHANNEL_DECAY),
    )


def _slides(fields: Mapping[str, Any]) -> bool:
    if fields.get("sliding_window") is None:
        return False
    return bool(fields.get("use_sliding_window", True))
