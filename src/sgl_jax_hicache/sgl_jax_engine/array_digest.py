"""A digest of every byte of an array, computed where the array lies.

Weights of a large model do not fit through the host at start. So every element is hashed on its device, together with
its position, and the hashes are added up modulo 2**32, in two independent sums: a pass at the speed of device memory
that does not depend on the sharding. One changed element always changes the first sum, because for one position the
hash is one-to-one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest_array(array: jax.Array) -> bytes:
    """8 bytes that depend on every element of `array` and its place. Blocks; any sharding; every process takes part."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.size == 0:
        return b""
    return np.asarray(jax.device_get(_sums(array)), "<u4").tobytes()


@jax.jit
def _sums(array: jax.Array) -> jax.Array:
    """uint32[2]."""
    words = _words(array)
    place = _mix(_positions(words))
    first = jnp.sum(_mix(words ^ place), dtype=jnp.uint32)
    second = jnp.sum(_mix(words + place * np.uint32(0x9E3779B1)), dtype=jnp.uint32)
    return jnp.stack([first, second])


def _words(array: jax.Array) -> jax.Array:
    """Every element as uint32, its bits unchanged; an element of 8 bytes gives two."""
    if array.dtype == jnp.bool_ or jnp.dtype(array.dtype).itemsize == 1:
        if array.dtype == jnp.bool_ or "int" in array.dtype.name:
            return array.astype(jnp.int32).astype(
                jnp.uint32
            )  # 4-bit integers have no bytes of their own
        return jax.lax.bitcast_convert_type(array, jnp.uint8).astype(jnp.uint32)
    itemsize = jnp.dtype(array.dtype).itemsize
    unsigned: Any = _UNSIGNED.get(itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _positions(words: jax.Array) -> jax.Array:
    """Row-major position of each element, modulo 2**32; no reshape, which a sharded array would not take."""
    positions = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        step = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        positions = positions + step * stride
    return positions


@partial(jax.jit, inline=True)
def _mix(values: jax.Array) -> jax.Array:
    """A one-to-one map of 32-bit words in which every input bit moves every output bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    return values ^ (values >> np.uint32(16))
