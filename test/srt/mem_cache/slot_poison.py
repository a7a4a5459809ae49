"""Makes every byte that a slot's new owner does not write itself show: free slots hold NaN when they are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax_hicache.engine.engine import Engine


class SlotPoison:
    """Fills the free slots of every device pool with NaN, each time just before slots of that pool are taken.

    So a load, a chunk or a decode step only ever gets slots that hold nothing but NaN, as does the sentinel that SWA
    pages outside the window point at: what is not written and yet read shows in every later token. To be put into an
    engine without requests; from then on it works on the engine's scheduler thread. `num_poisoned`: slots (states)
    of each kind that were free at some taking.
    """

    def __init__(self, engine: Engine) -> None:
        scheduler = engine._parts.scheduler
        self.num_poisoned: dict[str, int] = {}
        allocator, rows = scheduler._allocator, scheduler._rows
        kvcache, states = allocator.get_kvcache(), scheduler._runner.recurrent_pool
        if hasattr(kvcache, "swa_kv_pool"):
            pools = {
                "full": (allocator.full_attn_allocator, kvcache.full_kv_pool),
                "swa": (allocator.swa_attn_allocator, kvcache.swa_kv_pool),
            }
        else:
            pools = {"full": (allocator, kvcache)}
        for kind, (pages, pool) in pools.items():
            poison = partial(self._poison, kind, pages.free_pages, [pool.kv_buffer])
            for name in ("alloc", "alloc_extend", "alloc_decode"):
                _run_before(pages, name, poison)
        if states is not None:
            lists = [states.recurrent_buffers, *states.conv_buffers]
            poison = partial(self._poison, "state", lambda: rows.recurrent_free_slots[0], lists)
            _run_before(rows, "alloc_recurrent_slot", poison)

    def _poison(
        self,
        kind: str,
        free: Callable[[], Sequence[int]],
        lists: Sequence[list[jax.Array]],
    ) -> None:
        rows = np.asarray(free(), np.int32)
        self.num_poisoned[kind] = self.num_poisoned.get(kind, 0) + len(rows)
        for buffers in lists:
            if buffers:
                mask = np.zeros(buffers[0].shape[0], bool)
                mask[[0, *rows]] = True
                buffers[:] = _fill(list(buffers), jax.device_put(mask, jax.devices()[0]))


def _run_before(owner: Any, name: str, action: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action()
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


@partial(jax.jit, donate_argnums=0)
def _fill(buffers: list[jax.Array], mask: jax.Array) -> list[jax.Array]:
    """Every row that `mask` bool[rows] names becomes NaN."""
    nan = [jnp.asarray(jnp.nan, buffer.dtype) for buffer in buffers]
    return [
        jnp.where(jnp.expand_dims(mask, tuple(range(1, buffer.ndim))), value, buffer)
        for buffer, value in zip(buffers, nan, strict=True)
    ]
