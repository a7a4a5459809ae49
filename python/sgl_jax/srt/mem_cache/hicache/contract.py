"""What an engine must offer to the cache: Protocols with the names and meanings of sgl-jax's main branch.

The embedded engine and the sgl-jax engine both meet them, so one `UnifiedRadixCache` serves both. Everything is called
on one thread, the scheduler's. Index arrays are rank-local int32 token slots; page 0 (slots below `page_size`) is a
sentinel that no allocator hands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class DeviceKVPool(Protocol):
    """Paged KV buffers of one attention kind: MHA/GQA or MLA.

    `kv_buffer[layer]` has the page axis first; the list is changed in place every step (the engine donates the
    arrays), so an element is read afresh each time and a reference to it never kept.
    """

    page_size: int
    kv_buffer: list[jax.Array]


class TokenToKVPoolAllocator(Protocol):
    """Hands out device token slots in whole pages. Sizes are in tokens."""

    page_size: int

    def alloc(self, need_size: int, dp_rank: int = 0) -> Int32Array | None:
        """`need_size` (a multiple of page_size) slots in contiguous pages, or None with nothing changed."""

    def free(self, free_index: Int32Array, dp_rank: int = 0) -> None:
        """Give back the pages that these slots lie in."""

    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of this rank."""

    def get_kvcache(self) -> Any:
        """The device pool whose slots these are."""


class ReqToTokenPool(Protocol):
    """The table of every running request's token slots: `req_to_token` int32[max_requests, max_context_len]."""

    req_to_token: Int32Array

    def write(self, indices: Any, values: Int32Array) -> None:
        """`req_to_token[indices] = values`."""


class CacheableRequest(Protocol):
    """What the cache reads of a request and writes to it.

    `fill_ids`: tokens whose KV exists after the current chunk. `prefix_indices`: slots of the reused prefix, possibly
    with an unaligned tail that the request owns; `cache_protected_len`: how many leading tokens are the tree's.

    With a sliding-window pool also `swa_evicted_seqlen`: leading tokens whose SWA slots are freed. With recurrent
    states also `recurrent_cow_src_index`: the tree's state slot to start from, copied before anything is computed;
    `recurrent_ping_pong_track_buffer`: the slots into which the engine takes snapshots in turn,
    `recurrent_next_track_idx` the next of them and `recurrent_last_track_seqlen` how many tokens the last snapshot has
    consumed (0: there is none).
    """

    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    fill_ids: Sequence[int]
    extra_key: str | None
    dp_rank: int
    req_pool_idx: int
    last_node: Any
    prefix_indices: Int32Array
    cache_protected_len: int
    last_matched_prefix_len: int

    def pop_committed_kv_cache(self) -> int:
        """Number of tokens whose KV is committed; 0 at the second call."""


class DonationBarrier(Protocol):
    """Returns once no step is in flight that could delete a buffer under a gather or scatter."""

    def __call__(self) -> None: ...
