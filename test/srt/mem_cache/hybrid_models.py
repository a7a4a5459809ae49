"""Tiny models of every mix of layers, as a config.json made on the spot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FULL, SLIDING, GATED_DELTA, KDA = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "kda_attention",
)

_SIZES = {
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 257,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}


@dataclass(frozen=True)
class HybridModel:
    """The layers in their order, and the tokens that sliding ones see."""

    name: str
    layers: tuple[str, ...]
    window: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def slides(self) -> bool:
        """True if some layers have a window."""
        return SLIDING in self.layers

    @property
    def has_states(self) -> bool:
        """True if some layers are recurrent."""
        return GATED_DELTA in self.layers or KDA in self.layers

    def spec(self, folder: Path) -> str:
        """Write the config below `folder`; the model's spec, with random weights."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        config = {
            **_SIZES,
            "num_hidden_layers": len(self.layers),
            "layer_types": self.layers,
            "sliding_window": self.window or None,
        }
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return f"random:{path}:7"


SWA_ONLY = HybridModel("swa-only", (SLIDING, SLIDING), 40)
FULL_SWA = HybridModel("full-swa", (SLIDING, FULL), 40)
FULL_RECURRENT = HybridModel("full-recurrent", (GATED_DELTA, KDA, FULL))
FULL_SWA_RECURRENT = HybridModel("full-swa-recurrent", (GATED_DELTA, SLIDING, KDA, FULL), 40)
KINDS = (SWA_ONLY, FULL_SWA, FULL_RECURRENT, FULL_SWA_RECURRENT)
"""One of each mix. The window is no multiple of a page of 16 tokens."""


def with_window(model: HybridModel, window: int) -> HybridModel:
    """The same layers with another window."""
    return HybridModel(f"{model.name}-window{window}", model.layers, window)
