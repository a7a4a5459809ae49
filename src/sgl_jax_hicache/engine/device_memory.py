"""Room on the device: what is free, what the prefix cache would give up, and taking it."""

from __future__ import annotations

from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, Int32Array

from .allocator import PagedTokenToKVPoolAllocator
from .tree_cache import TreeCache


class DeviceMemory:
    """Allocator and prefix cache seen as one pool of token slots. Scheduler thread only."""

    def __init__(self, tree: TreeCache, allocator: PagedTokenToKVPoolAllocator) -> None:
        self.tree = tree
        self.allocator = allocator
        self.page_size = allocator.page_size

    def room(self) -> int:
        """Tokens that can be had: free ones and those the cache holds unlocked."""
        return self.allocator.available_size() + self.tree.evictable_size()

    def page_up(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size

    def ensure(self, num_tokens: int) -> bool:
        """Have `num_tokens` free, evicting only what is missing. False if the cache could not give that much."""
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        return self.allocator.available_size() >= num_tokens

    def growth(self, seq_len: int, new_len: int) -> int:
        """Tokens, in whole pages, that a sequence must be given to grow from `seq_len` to `new_len`."""
        return self.page_up(new_len) - self.page_up(seq_len)

    def extend(self, prefix_len: int, seq_len: int, last_slot: int) -> Int32Array | None:
        """int32[seq_len - prefix_len] slots for the next tokens of one sequence, or None with none taken."""
        if not self.ensure(self.growth(prefix_len, seq_len)):
            return None
        return self.allocator.alloc_extend(
            [prefix_len], [seq_len], [last_slot], seq_len - prefix_len
        )

    def check_conservation(self) -> str | None:
        """None if every token slot is free or the cache's; else the numbers. Only true while no request runs."""
        free = self.allocator.available_size()
        evictable, protected = self.tree.evictable_size(), self.tree.protected_size()
        if free + evictable + protected == self.allocator.size:
            return None
        return (
            f"free {free} + evictable {evictable} + protected {protected} "
            f"!= pool {self.allocator.size} tokens"
        )
