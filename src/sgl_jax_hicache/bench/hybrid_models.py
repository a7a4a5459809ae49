"""Kinds of hybrid models by the bytes that their layers keep, and small pages in the same proportions.

What the cache decides (the interval of checkpoints, the split of host memory) depends on bytes only: of a Full page, of
a page of the sliding layers, of a recurrent state. Here these are counted in 32-bit words, a hundredth or less of the
model's, in its proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 4


@dataclass(frozen=True)
class HybridModel:
    """Layers and what they keep: `full_token_bytes` and `sliding_token_bytes` for one token in one layer of the kind,
    `state_bytes` for one state in one recurrent layer, the convolution's part included. `window` in tokens, the current
    one included; None without sliding layers. `about`: what the numbers are those of. Without full layers a Full page
    is only the name of its tokens.
    """

    name: str
    about: str
    full_layers: int = 0
    full_token_bytes: int = 0
    sliding_layers: int = 0
    sliding_token_bytes: int = 0
    window: int | None = None
    recurrent_layers: int = 0
    state_bytes: int = 0

    @property
    def num_layers(self) -> int:
        """The depth of the model."""
        return self.full_layers + self.sliding_layers + self.recurrent_layers

    @property
    def all_full_token_bytes(self) -> int:
        """Bytes of a token if all layers were full."""
        return self.num_layers * (self.full_token_bytes or self.sliding_token_bytes)

    def words(self, page_size: int) -> PageWords:
        """The model in small. A Full page has a byte for each token at least: a smaller one is taken for a name (see
        `pool_buffers`)."""
        full_bytes = self.full_layers * self.full_token_bytes * page_size
        sliding_bytes = self.sliding_layers * self.sliding_token_bytes * page_size
        scale = -(-page_size // WORD_BYTES) / (full_bytes or sliding_bytes)
        return PageWords(
            full=round(scale * full_bytes),
            sliding=round(scale * sliding_bytes),
            state=round(scale * self.recurrent_layers * self.state_bytes),
            all_full=round(scale * self.all_full_token_bytes * page_size),
        )


@dataclass(frozen=True)
class PageWords:
    """32-bit words of a Full page, of a page of all sliding layers, of a state of all recurrent layers, and of a page
    if all layers were full."""

    full: int
    sliding: int
    state: int
    all_full: int


def attention_bytes(kv_heads: int, key_dim: int, value_dim: int, value_bytes: int = 2) -> int:
    """Bytes of one token in one layer of MHA or GQA."""
    return kv_heads * (key_dim + value_dim) * value_bytes


def delta_state_bytes(
    value_heads: int, key_heads: int, key_dim: int, value_dim: int, conv_kernel: int
) -> int:
    """Bytes of one state in one layer of a gated delta rule: float32, and the convolution's inputs as bfloat16."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return value_heads * key_dim * value_dim * 4 + channels * (conv_kernel - 1) * 2


FULL = HybridModel("full", "any model whose layers are all full", 1, 1)
"""What the others are compared with: only the number of its pages counts."""

_QWEN_ATTENTION = attention_bytes(2, 256, 256)
_QWEN_STATE = delta_state_bytes(32, 16, 128, 128, 4)

HYBRIDS = (
    HybridModel(
        "swa, window 4096",
        "Mistral 7B v0.1: 32 layers, all sliding, 8 KV heads of 128",
        sliding_layers=32,
        sliding_token_bytes=attention_bytes(8, 128, 128),
        window=4096,
    ),
    HybridModel(
        "full+swa, window 1024",
        "Gemma-3 27B: 62 layers, every sixth full, 16 KV heads of 128",
        full_layers=10,
        full_token_bytes=attention_bytes(16, 128, 128),
        sliding_layers=52,
        sliding_token_bytes=attention_bytes(16, 128, 128),
        window=1024,
    ),
    HybridModel(
        "full+swa, window 128",
        "MiMo-V2-Flash: 48 layers, 9 full with 4 KV heads, 39 sliding with 8, keys of 192, values of 128",
        full_layers=9,
        full_token_bytes=attention_bytes(4, 192, 128),
        sliding_layers=39,
        sliding_token_bytes=attention_bytes(8, 192, 128),
        window=128,
    ),
    HybridModel(
        "full+recurrent, GDN",
        "Qwen3-Next 80B-A3B: 48 layers, every fourth full with 2 KV heads of 256, else gated DeltaNet with 32 heads of "
        "128 x 128",
        full_layers=12,
        full_token_bytes=_QWEN_ATTENTION,
        recurrent_layers=36,
        state_bytes=_QWEN_STATE,
    ),
    HybridModel(
        "full+recurrent, KDA",
        "Kimi-Linear 48B-A3B: 27 layers, 7 full (MLA, 512 + 64 numbers), 20 KDA with 32 heads of 128 x 128",
        full_layers=7,
        full_token_bytes=(512 + 64) * 2,
        recurrent_layers=20,
        state_bytes=delta_state_bytes(32, 32, 128, 128, 4),
    ),
    HybridModel(
        "full+swa+recurrent",
        "made up, as no published model has all three: Qwen3-Next, of whose 12 attention layers 8 slide, window 1024",
        full_layers=4,
        full_token_bytes=_QWEN_ATTENTION,
        sliding_layers=8,
        sliding_token_bytes=_QWEN_ATTENTION,
        window=1024,
        recurrent_layers=36,
        state_bytes=_QWEN_STATE,
    ),
)
