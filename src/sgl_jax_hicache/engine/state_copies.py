"""Copies of whole recurrent states between slots of the pool, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from .memory_pool import RecurrentStatePool


def copy_states(pool: RecurrentStatePool, pairs: Sequence[tuple[int, int]], width: int) -> None:
    """Enqueue slot -> slot copies, in every layer; `width`: the number of pairs that the program is compiled for.

    All sources are read before any target is written. Padding copies the dummy to itself. The pool's lists are rebound
    before it returns, like those of a step.
    """
    source, target = np.zeros((2, width), np.int32)
    for i, (src, dst) in enumerate(pairs):
        source[i], target[i] = src, dst
    conv = [layer[0] for layer in pool.conv_buffers]
    device = jax.devices()[0]
    states, conv = _copy_slots(
        (list(pool.recurrent_buffers), conv),
        jax.device_put(source, device),
        jax.device_put(target, device),
    )
    pool.recurrent_buffers[:] = states
    for layer, buffer in zip(pool.conv_buffers, conv, strict=True):
        layer[0] = buffer


@partial(jax.jit, donate_argnums=0)
def _copy_slots(
    buffers: tuple[list[jax.Array], list[jax.Array]], source: jax.Array, target: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    states, conv = buffers

    def copied(buffer: jax.Array) -> jax.Array:
        return buffer.at[target].set(buffer[source])

    return [copied(buffer) for buffer in states], [copied(buffer) for buffer in conv]
