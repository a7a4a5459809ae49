"""Real device pools of every kind of attention, and the oracle of what each of their slots must hold.

A prefix is summed up in one number (`chain`), from which follow the KV of its last token in each kind of pool and the
recurrent state after it. So a slot under a wrong prefix, a stale one and a half-copied one all show, and so does one
that belongs to another kind. Free slots are filled with negative numbers, which nothing that is computed contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.layer_kinds import RecurrentDims
from sgl_jax_hicache.engine.memory_pool import MHATokenToKVPool, RecurrentStatePool
from sgl_jax_hicache.engine.state_copies import copy_states
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool

FULL, SWA, STATE = ComponentKind.FULL, ComponentKind.SWA, ComponentKind.RECURRENT

_MODULUS = 8388593  # below 2**23: float32 holds every number exactly
_ROWS_PER_WRITE = 64
_STATE_DIMS = RecurrentDims(
    num_value_heads=1, num_key_heads=1, key_dim=2, value_dim=2, conv_kernel=2
)


@dataclass(frozen=True)
class Mix:
    """The kinds of layers of a model. `window`: tokens that a sliding layer sees, None without such layers. Without
    `full`, the Full slots are names only."""

    full: bool = True
    window: int | None = None
    states: bool = False

    @property
    def slides(self) -> bool:
        """True if some layers have a window."""
        return self.window is not None

    @property
    def has_states(self) -> bool:
        """True if some layers are recurrent."""
        return self.states

    @property
    def kinds(self) -> tuple[ComponentKind, ...]:
        """The components that its tree has."""
        has = {FULL: True, SWA: self.window is not None, STATE: self.states}
        return tuple(kind for kind, there in has.items() if there)


WINDOW = 10  # no multiple of a page of 4 tokens
MIXES = {
    "full": Mix(),
    "full-swa": Mix(window=WINDOW),
    "full-recurrent": Mix(states=True),
    "full-swa-recurrent": Mix(window=WINDOW, states=True),
    "swa-only": Mix(full=False, window=WINDOW),
}
HYBRIDS = {name: mix for name, mix in MIXES.items() if len(mix.kinds) > 1}


def chain_start(extra_key: str | None) -> int:
    """What stands for the empty prefix of an extra_key."""
    return 0 if extra_key is None else 17 + sum(map(ord, extra_key))


@lru_cache(maxsize=1 << 14)
def chain(start: int, key: bytes) -> np.ndarray:
    """int64[n]: the numbers of the prefixes that end with each of the tokens in `key` (int64, little-endian)."""
    numbers, number = [], start
    for token in np.frombuffer(key, "<i8").tolist():
        number = (number * 48271 + token + 1) % _MODULUS
        numbers.append(number)
    return np.array(numbers, np.int64)


def encoded(token_ids: list[int]) -> bytes:
    """Tokens as a tree key has them."""
    return np.array(token_ids, "<i8").tobytes()


class DevicePools:
    """The engine's pools for one mix, their slots all poisoned. Sizes without the sentinels: tokens, tokens, states."""

    def __init__(
        self, mix: Mix, page_size: int, full_tokens: int, swa_tokens: int, num_states: int
    ) -> None:
        self.mix = mix
        self.page_size = page_size
        full = MHATokenToKVPool(full_tokens, page_size, "float32", 1, 2, 2 if mix.full else 0)
        self.kvcache: Any = full
        if mix.window is not None:
            swa = MHATokenToKVPool(swa_tokens, page_size, "float32", 1, 2, 1)
            self.kvcache = SWAKVPool(full, swa)
        self.states = RecurrentStatePool(num_states, _STATE_DIMS, 2) if mix.states else None
        self._num_rows = {FULL: full_tokens + page_size}
        if SWA in mix.kinds:
            self._num_rows[SWA] = swa_tokens + page_size
        if STATE in mix.kinds:
            self._num_rows[STATE] = num_states + 1
        self._num_poisoned = 0
        self.poison({kind: np.arange(rows) for kind, rows in self._num_rows.items()})

    # -- what is there -----------------------------------------------------------------------------------------------

    def image(self) -> dict[ComponentKind, np.ndarray]:
        """float32[rows, numbers of a row] of each kind, rows as token slots and state slots; a copy."""
        found: dict[ComponentKind, np.ndarray] = {}
        flat = np.asarray(_flat([b for kind in self._num_rows for b in self._buffers(kind)]))
        start = 0
        for kind, num_rows in self._num_rows.items():
            layers = [np.empty((num_rows, 0), np.float32)]
            for buffer in self._buffers(kind):
                layers.append(flat[start : start + buffer.size].reshape(num_rows, -1))
                start += buffer.size
            found[kind] = np.concatenate(layers, axis=1)
        return found

    def expected(self, kind: ComponentKind, numbers: np.ndarray) -> np.ndarray:
        """float32[n, numbers of a row]: what slots hold whose prefixes are `numbers` int64[n]."""
        first = {FULL: 1, SWA: 100, STATE: 200}[kind]
        width = sum(buffer.size for buffer in self._buffers(kind)) // self._num_rows[kind]
        factors = np.arange(first, first + width, dtype=np.int64)
        return ((numbers[:, None] * factors[None] + factors[None]) % _MODULUS).astype(np.float32)

    def expected_page(self, kind: ComponentKind, numbers: np.ndarray) -> bytes:
        """The bytes of one page on lower tiers; `numbers` int64[page_size] are those of its tokens."""
        rows = self.expected(kind, numbers if kind is not STATE else numbers[-1:])
        start, parts = 0, [b"\0" if kind is FULL and not self.mix.full else b""]
        for buffer in self._buffers(kind):
            width = buffer.size // self._num_rows[kind]
            parts.append(np.ascontiguousarray(rows[:, start : start + width]).tobytes())
            start += width
        return b"".join(parts)

    # -- what changes ------------------------------------------------------------------------------------------------

    def write(self, kind: ComponentKind, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Compute: the slots `rows` get the content of the prefixes `numbers`. The buffers are donated."""
        if not self._buffers(kind):
            return
        values = self.expected(kind, numbers)
        for first in range(0, len(rows), _ROWS_PER_WRITE):
            part = slice(first, first + _ROWS_PER_WRITE)
            index = np.zeros(
                _ROWS_PER_WRITE, np.int32
            )  # one shape; what is left goes to the sentinel
            index[: len(rows[part])] = rows[part]
            padded = np.zeros((_ROWS_PER_WRITE, values.shape[1]), np.float32)
            padded[: len(rows[part])] = values[part]
            self._rebind(kind, _stored(self._buffers(kind), jnp.array(index), jnp.array(padded)))

    def copy_state(self, source: int, target: int) -> None:
        """Copy a state slot, as the engine's step does."""
        assert self.states is not None
        copy_states(self.states, [(source, target)], 1)

    def poison(self, rows: Mapping[ComponentKind, np.ndarray]) -> None:
        """Fill slots with a negative number, another one each time; the sentinels too."""
        self._num_poisoned += 1
        for kind, which in rows.items():
            buffers = self._buffers(kind)
            if buffers:
                mask = np.zeros(self._num_rows[kind], bool)
                mask[which] = mask[0 : 1 if kind is STATE else self.page_size] = True
                poison = jnp.array(-float(self._num_poisoned), jnp.float32)
                self._rebind(kind, _filled(buffers, jnp.array(mask), poison))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _lists(self, kind: ComponentKind) -> list[list[jax.Array]]:
        if kind is STATE:
            assert self.states is not None
            return [self.states.recurrent_buffers, *self.states.conv_buffers]
        if self.mix.window is None:
            return [self.kvcache.kv_buffer]
        pool = self.kvcache.full_kv_pool if kind is FULL else self.kvcache.swa_kv_pool
        return [pool.kv_buffer]

    def _buffers(self, kind: ComponentKind) -> list[jax.Array]:
        return [buffer for holder in self._lists(kind) for buffer in holder]

    def _rebind(self, kind: ComponentKind, buffers: list[jax.Array]) -> None:
        start = 0
        for holder in self._lists(kind):
            holder[:] = buffers[start : start + len(holder)]
            start += len(holder)


@jax.jit
def _flat(buffers: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([buffer.reshape(-1) for buffer in buffers])


@partial(jax.jit, donate_argnums=0)
def _stored(buffers: list[jax.Array], rows: jax.Array, values: jax.Array) -> list[jax.Array]:
    """values: float32[n, numbers of a row], buffer after buffer."""
    num_rows = sum(buffer.size for buffer in buffers) // values.shape[1]
    stored, start = [], 0
    for buffer in buffers:
        flat = buffer.reshape(num_rows, -1)
        end = start + flat.shape[1]
        stored.append(flat.at[rows].set(values[:, start:end]).reshape(buffer.shape))
        start = end
    return stored


@partial(jax.jit, donate_argnums=0)
def _filled(buffers: list[jax.Array], mask: jax.Array, value: jax.Array) -> list[jax.Array]:
    """mask: bool[rows]."""
    return [
        jnp.where(mask[:, None], value, buffer.reshape(len(mask), -1)).reshape(buffer.shape)
        for buffer in buffers
    ]
