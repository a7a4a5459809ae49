"""A prefix cache for the engine's tests: one node per page, found by the tokens up to its end. Plain, slow, no tiers.

It reuses prefixes of models of any kind: a border is legal if every page up to it is there, the window before it is in
the SWA pool, and the node that ends at it has a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from null_tree import NullTree

from sgl_jax.srt.mem_cache.hicache.tree_types import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    Int32Array,
    MatchPrefixParams,
    MatchResult,
)
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.req import Req
from sgl_jax_hicache.engine.req_to_token_pool import HybridReqToTokenPool
from sgl_jax_hicache.engine.swa_allocator import SWATokenToKVPoolAllocator

Prefix = tuple[str | None, tuple[int, ...]]


@dataclass
class PageNode:
    """One page: its slots, who keeps which kind of it, and the state after its last token (0 for none)."""

    prefix: Prefix
    slots: Int32Array
    used: int = 0
    full_locks: int = 0
    swa_locks: int = 0
    state_locks: int = 0
    state: int = 0


class PageTree(NullTree):
    """See the module. Sizes are sums over all nodes; nothing here is meant to be fast."""

    disable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.root_node = PageNode((None, ()), np.empty(0, np.int32))
        self.nodes: dict[Prefix, PageNode] = {}
        self.num_swa_moved = 0
        self._clock = 0

    # -- looking up and inserting ----------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest legal border."""
        path = self._path(params.key.extra_key, list(params.key.token_ids))
        while path and not self._legal(path):
            path.pop()
        self._touch(path)
        node = path[-1] if path else self.root_node
        if params.cow_recurrent and params.req is not None and node.state:
            params.req.recurrent_cow_src_index = node.state
        slots = [n.slots for n in path]
        found = np.concatenate(slots) if slots else np.empty(0, np.int32)
        return MatchResult(found, node, node, node)

    def cache_unfinished_req(self, req: Req) -> None:
        """The whole pages of what is computed are the tree's, and locked."""
        slots = self.req_to_token_pool.read(req.req_pool_idx, len(req.fill_ids))
        path = self._insert(req, req.fill_ids, slots)
        node = path[-1] if path else self.root_node
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        req.last_node = node
        kept_len = len(path) * self.page_size
        if path:
            slots[:kept_len] = np.concatenate([n.slots for n in path])
            self.req_to_token_pool.write((req.req_pool_idx, slice(0, kept_len)), slots[:kept_len])
        req.prefix_indices = slots
        req.cache_protected_len = req.last_matched_prefix_len = kept_len

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """As above if `is_insert`; the rest is freed and the lock released."""
        committed_len = req.pop_committed_kv_cache()
        slots = self.req_to_token_pool.read(req.req_pool_idx, committed_len)
        kept_len = req.cache_protected_len
        if is_insert:
            kept_len = len(self._insert(req, req.all_token_ids[:committed_len], slots))
            kept_len *= self.page_size
        self.token_to_kv_pool_allocator.free(slots[kept_len:], req.dp_rank)
        self.dec_lock_ref(req.last_node)

    def _insert(self, req: Req, token_ids: list[int], slots: Int32Array) -> list[PageNode]:
        path = []
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            prefix = (req.extra_key, tuple(token_ids[:end]))
            own = slots[end - self.page_size : end]
            node = self.nodes.get(prefix)
            if node is None:
                node = self.nodes[prefix] = PageNode(prefix, own.copy())
            elif end > req.cache_protected_len:
                self._take_over_swa(node, own)
                self.token_to_kv_pool_allocator.free(own, req.dp_rank)
            path.append(node)
        self._touch(path)
        self._take_state(req, path)
        return path

    def _take_over_swa(self, node: PageNode, own: Int32Array) -> None:
        """A node without its SWA page gets the one that was computed anew: its owner may still need the window."""
        mapping = self._mapping()
        if mapping is not None and mapping[own[0]] and not mapping[node.slots[0]]:
            mapping[node.slots] = mapping[own]
            mapping[own] = 0
            self.num_swa_moved += 1

    def _take_state(self, req: Req, path: list[PageNode]) -> None:
        """Keep the tracked state where its border is a node without one; the request gets a free slot instead."""
        num_pages = req.recurrent_last_track_seqlen // self.page_size
        if not 0 < num_pages <= len(path):
            return
        node, rows = path[num_pages - 1], self.req_to_token_pool
        assert isinstance(rows, HybridReqToTokenPool)
        req.recurrent_last_track_seqlen = 0
        if node.state or (rows.recurrent_available_size() == 0 and not self._evict_states(1)):
            return
        free = rows.alloc_recurrent_slot()
        assert free is not None
        index = (req.recurrent_next_track_idx - 1) % len(req.recurrent_ping_pong_track_buffer)
        node.state = req.recurrent_ping_pong_track_buffer[index]
        req.recurrent_ping_pong_track_buffer[index] = free

    def _path(self, extra_key: str | None, token_ids: list[int]) -> list[PageNode]:
        path = []
        for end in range(self.page_size, len(token_ids) + 1, self.page_size):
            node = self.nodes.get((extra_key, tuple(token_ids[:end])))
            if node is None:
                break
            path.append(node)
        return path

    def _path_of(self, node: PageNode) -> list[PageNode]:
        return self._path(node.prefix[0], list(node.prefix[1]))

    def _legal(self, path: list[PageNode]) -> bool:
        if self.supports_recurrent() and not path[-1].state:
            return False
        return all(self._mapped(node) for node in self._window(path))

    def _window(self, path: list[PageNode]) -> list[PageNode]:
        """The last pages, of which the next token sees something."""
        if self.sliding_window_size is None:
            return []
        first = max(0, len(path) * self.page_size - self.sliding_window_size + 1)
        return path[first // self.page_size :]

    def _mapping(self) -> Int32Array | None:
        return getattr(self.token_to_kv_pool_allocator, "full_to_swa_index_mapping", None)

    def _mapped(self, node: PageNode) -> bool:
        mapping = self._mapping()
        return mapping is not None and bool(mapping[node.slots[0]])

    def _touch(self, path: list[PageNode]) -> None:
        self._clock += 1
        for node in path:
            node.used = self._clock

    # -- locks and sizes -------------------------------------------------------------------------

    def inc_lock_ref(self, node: PageNode) -> IncLockRefResult:
        """Keep the pages up to here, the window before here, and the state here."""
        self._lock(node, 1)
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: PageNode, params: DecLockRefParams | None = None) -> None:
        """Undo it."""
        self._lock(node, -1)

    def _lock(self, node: PageNode, by: int) -> None:
        path = self._path_of(node)
        for each in path:
            each.full_locks += by
        for each in self._window(path):
            each.swa_locks += by
        node.state_locks += by
        assert node.full_locks >= 0 and node.state_locks >= min(0, by)

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Tokens that nobody keeps."""
        return self.page_size * sum(not n.full_locks for n in self.nodes.values())

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Tokens that somebody keeps."""
        return self.page_size * sum(n.full_locks > 0 for n in self.nodes.values())

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Tokens in the SWA pool that nobody keeps."""
        mapped = filter(self._mapped, self.nodes.values())
        return self.page_size * sum(not n.swa_locks for n in mapped)

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Tokens in the SWA pool that somebody keeps."""
        mapped = filter(self._mapped, self.nodes.values())
        return self.page_size * sum(n.swa_locks > 0 for n in mapped)

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """States that nobody keeps."""
        return sum(n.state > 0 and not n.state_locks for n in self.nodes.values())

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """States that somebody keeps."""
        return sum(n.state > 0 and n.state_locks > 0 for n in self.nodes.values())

    evictable_size = full_evictable_size
    protected_size = full_protected_size

    # -- eviction --------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Of each kind as much as is asked for, the longest unused first."""
        self._evict_states(params.recurrent_num)
        allocator = self.token_to_kv_pool_allocator
        for _ in range(-(-params.num_tokens // self.page_size)):
            victim = self._oldest(self._leaves())
            if victim is None:
                break
            self._free_state(victim)
            allocator.free(victim.slots)
            del self.nodes[victim.prefix]
        if isinstance(allocator, SWATokenToKVPoolAllocator):
            for _ in range(-(-params.swa_num_tokens // self.page_size)):
                mapped = [n for n in self.nodes.values() if self._mapped(n) and not n.swa_locks]
                victim = self._oldest(mapped)
                if victim is None:
                    break
                allocator.free_swa(victim.slots)
        return EvictResult(params.num_tokens)

    def _evict_states(self, number: int) -> int:
        found = 0
        while found < number:
            victim = self._oldest([n for n in self.nodes.values() if n.state and not n.state_locks])
            if victim is None:
                break
            self._free_state(victim)
            found += 1
        return found

    def _free_state(self, node: PageNode) -> None:
        if node.state:
            assert isinstance(self.req_to_token_pool, HybridReqToTokenPool)
            self.req_to_token_pool.free_recurrent_slot(node.state)
            node.state = 0

    def _leaves(self) -> list[PageNode]:
        parents = {(n.prefix[0], n.prefix[1][: -self.page_size]) for n in self.nodes.values()}
        return [n for n in self.nodes.values() if n.prefix not in parents and not n.full_locks]

    @staticmethod
    def _oldest(nodes: list[PageNode]) -> PageNode | None:
        return min(nodes, key=lambda n: (n.used, -len(n.prefix[1])), default=None)

    def total_size(self) -> int:
        """Tokens of the tree."""
        return self.page_size * len(self.nodes)

    def reset(self) -> None:
        """Forget everything; the engine takes the slots back itself."""
        self.nodes.clear()

    def tier_tokens(
        self, rid: str, prompt_len: int, device_len: int, prefix_len: int
    ) -> TierTokens:
        """All hits are on the device."""
        return TierTokens(device=prefix_len, computed=prompt_len - prefix_len)
