"""The two KV pools of a model with sliding layers: all tokens of the full layers, the windows of the sliding ones.

A token has one slot, of the full pool. Where its sliding layers keep it is looked up: `full_to_swa_index_mapping`
int32[full size + page_size] gives the slot of the SWA pool, 0 if there is none (never computed, or freed since). The
array is one object for pool, allocator and cache; the allocator changes it in place and nobody rebinds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from .memory_pool import KVPool, MHATokenToKVPool, build_attention_pool
from .model_config import LayerKind, ModelConfig

Int32Array = npt.NDArray[np.int32]


class SWAKVPool:
    """`layers_mapping[layer of the model] = (index in its pool's kv_buffer, True for the SWA pool)`.

    A model whose attention layers all slide has a full pool without layers: its slots are names only.
    """

    def __init__(
        self,
        full_kv_pool: KVPool,
        swa_kv_pool: MHATokenToKVPool,
        full_attention_layer_ids: Iterable[int] = (),
        swa_attention_layer_ids: Iterable[int] = (),
    ) -> None:
        if full_kv_pool.page_size != swa_kv_pool.page_size:
            raise ValueError(
                f"page sizes differ: {full_kv_pool.page_size} and {swa_kv_pool.page_size}"
            )
        self.full_kv_pool = full_kv_pool
        self.swa_kv_pool = swa_kv_pool
        self.size = full_kv_pool.size
        self.size_swa = swa_kv_pool.size
        self.page_size = full_kv_pool.page_size
        self.layers_mapping: dict[int, tuple[int, bool]] = {
            layer: (index, is_swa)
            for is_swa, layers in (
                (False, full_attention_layer_ids),
                (True, swa_attention_layer_ids),
            )
            for index, layer in enumerate(layers)
        }
        self.full_to_swa_index_mapping: Int32Array = np.zeros(
            self.size + self.page_size, dtype=np.int32
        )

    def buffer_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.full_kv_pool.buffer_bytes() + self.swa_kv_pool.buffer_bytes()

    def clear(self) -> None:
        """Replaces every buffer by zeros and forgets the mapping. Engine thread only, with no step in flight."""
        self.full_kv_pool.clear()
        self.swa_kv_pool.clear()
        self.full_to_swa_index_mapping[:] = 0


TokenKVPool = KVPool | SWAKVPool


class LayerBuffer(NamedTuple):
    """Where a layer's KV is: `buffers[place]`, to be read afresh each time; `is_swa`: addressed by SWA slots."""

    buffers: list[jax.Array]
    place: int
    is_swa: bool


def layer_buffers(pool: TokenKVPool, config: ModelConfig) -> dict[int, LayerBuffer]:
    """The KV of each attention layer, in their order. A pool without an SWA half keeps all tokens of every layer."""
    if not isinstance(pool, SWAKVPool):
        layers = enumerate(config.attention_layers)
        return {layer: LayerBuffer(pool.kv_buffer, index, False) for index, layer in layers}
    halves = {False: pool.full_kv_pool.kv_buffer, True: pool.swa_kv_pool.kv_buffer}
    return {
        layer: LayerBuffer(halves[is_swa], index, is_swa)
        for layer, (index, is_swa) in sorted(pool.layers_mapping.items())
    }


def build_kv_pool(
    config: ModelConfig, *, size: int, page_size: int, dtype: str = "float32", swa_size: int = 0
) -> TokenKVPool:
    """The pools of `config`'s attention layers, zero-filled: `size` tokens, `swa_size` for sliding layers.

    Sizes are multiples of `page_size`; `swa_size` is ignored by models without sliding layers.
    """
    full = build_attention_pool(
        config, len(config.layers_of(LayerKind.FULL)), size=size, page_size=page_size, dtype=dtype
    )
    sliding = config.layers_of(LayerKind.SLIDING)
    if not sliding:
        return full
    swa = MHATokenToKVPool(
        swa_size, page_size, dtype, config.num_kv_heads, config.head_dim, len(sliding)
    )
    return SWAKVPool(full, swa, config.layers_of(LayerKind.FULL), sliding)
