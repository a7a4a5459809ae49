"""Paged KV pools and the pool of recurrent states, with sgl-jax's names, units and row layouts.

A KV pool owns one buffer per attention layer in the Python list `kv_buffer`. The list is changed in place: every step
donates the buffers and puts the new ones at the same index, so read `kv_buffer[i]` afresh and keep no reference (nor a
numpy view: on CPU a live view turns the donation of its buffer into a copy). Token slot s lives in page
`s // page_size` at offset `s % page_size`; page 0 is the sentinel that padding writes to.

On CPU prefer float32: XLA reads a bfloat16 buffer there by converting all of it, in every layer of every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layer_kinds import RecurrentDims
from .model_config import ModelConfig, kv_dtype


def _packing(dtype: np.dtype[Any]) -> int:
    """Values of `dtype` in one 32-bit word."""
    return 4 // dtype.itemsize


class _PagedKVPool:
    """What both pools share: sizes in tokens, and a buffer of `row_shape` per page and layer (or no layer at all)."""

    def __init__(
        self, size: int, page_size: int, dtype: str, layer_num: int, row_shape: tuple[int, ...]
    ) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(
                f"pool size {size} is not a positive multiple of the page size {page_size}"
            )
        self.size = size
        self.page_size = page_size
        self.dtype = kv_dtype(dtype)
        self.layer_num = layer_num
        self.row_shape = row_shape
        self.mesh = None
        self.kv_buffer: list[jax.Array] = []
        self.clear()

    @property
    def num_pages(self) -> int:
        """Rows of each buffer, the sentinel included."""
        return (self.size + self.page_size) // self.page_size

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of each layer's buffer: the page axis, then the row of one page."""
        return (self.num_pages, *self.row_shape)

    def buffer_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.layer_num * int(np.prod(self.buffer_shape)) * self.dtype.itemsize

    def clear(self) -> None:
        """Replaces every buffer by zeros. Engine thread only, with no step in flight."""
        # On a named device, as steps and transfers leave them: else the first step after it compiles everything anew.
        device = jax.devices()[0]
        self.kv_buffer[:] = [
            jnp.zeros(self.buffer_shape, self.dtype, device=device) for _ in range(self.layer_num)
        ]


class MHATokenToKVPool(_PagedKVPool):
    """KV of MHA/GQA: a page is [page_size, head_num * 2 // packing, packing, head_dim].

    The flattened head axis interleaves keys and values: K of head h is 2h, V is 2h + 1.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: str,
        head_num: int,
        head_dim: int,
        layer_num: int,
    ) -> None:
        packing = _packing(kv_dtype(dtype))
        super().__init__(
            size,
            page_size,
            dtype,
            layer_num,
            (page_size, head_num * 2 // packing, packing, head_dim),
        )
        self.head_num = head_num
        self.head_dim = head_dim


class MLATokenToKVPool(_PagedKVPool):
    """KV of MLA: a page is [align(page_size, packing) // packing, packing, kv_lora_rank + qk_rope_head_dim].

    Token t of a page is at [t // packing, t % packing]: the normed latent first, then the rotated shared key.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: str,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
    ) -> None:
        packing = _packing(kv_dtype(dtype))
        words = -(-page_size // packing)
        super().__init__(
            size, page_size, dtype, layer_num, (words, packing, kv_lora_rank + qk_rope_head_dim)
        )
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim


KVPool = MHATokenToKVPool | MLATokenToKVPool


def build_attention_pool(
    config: ModelConfig, layer_num: int, *, size: int, page_size: int, dtype: str = "float32"
) -> KVPool:
    """A pool of `size` tokens (a multiple of `page_size`) for `layer_num` layers of `config`'s kind, zero-filled."""
    if config.mla is not None:
        return MLATokenToKVPool(
            size,
            page_size,
            dtype,
            config.mla.kv_lora_rank,
            config.mla.qk_rope_head_dim,
            layer_num,
        )
    return MHATokenToKVPool(size, page_size, dtype, config.num_kv_heads, config.head_dim, layer_num)


class RecurrentStatePool:
    """States of recurrent layers: one slot holds all that one request's past has left in every such layer.

    recurrent_buffers: per layer float32[size + 1, value heads, key_dim, value_dim]; conv_buffers: per layer a list of
    one float32[size + 1, channels, conv_kernel - 1], the newest input last. Both lists are changed in place like
    `kv_buffer`. Slots are 1 .. size; slot 0 is the dummy that padding reads and writes. A slot's old content is never
    read by a request that starts at position 0.
    """

    def __init__(self, size: int, dims: RecurrentDims, layer_num: int) -> None:
        if size < 1 or layer_num < 1:
            raise ValueError(f"a state pool needs slots and layers, got {size} and {layer_num}")
        self.size = size
        self.layer_num = layer_num
        self.mesh = None
        self.recurrent_shape = (size + 1, *dims.state_shape)
        self.conv_shape = (size + 1, *dims.conv_shape)
        self.recurrent_buffers: list[jax.Array] = []
        self.conv_buffers: list[list[jax.Array]] = []
        self.clear()

    def buffer_bytes(self) -> int:
        """Bytes of all buffers together."""
        return self.layer_num * 4 * int(np.prod(self.recurrent_shape) + np.prod(self.conv_shape))

    def clear(self) -> None:
        """Replaces every buffer by zeros. Engine thread only, with no step in flight."""
        device = jax.devices()[0]  # by name, as in the KV pools

        def zeros(shape: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(shape, jnp.float32, device=device)

        self.recurrent_buffers[:] = [zeros(self.recurrent_shape) for _ in range(self.layer_num)]
        self.conv_buffers[:] = [[zeros(self.conv_shape)] for _ in range(self.layer_num)]


def build_recurrent_pool(config: ModelConfig, size: int) -> RecurrentStatePool | None:
    """The state pool of `config` with `size` slots besides the dummy; None if no layer is recurrent."""
    if config.recurrent is None:
        return None
    return RecurrentStatePool(size, config.recurrent, len(config.recurrent_layers))
