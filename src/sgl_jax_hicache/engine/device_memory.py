"""Room on the device: what is free, what the prefix cache would give up, and taking it."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_jax.srt.mem_cache.hicache.tree_types import EvictParams, Int32Array

from .req import Req
from .req_to_token_pool import ReqToTokenPool
from .room import Room
from .swa_allocator import SWATokenToKVPoolAllocator, TokenAllocator
from .swa_bounds import SWABounds
from .tree_cache import TreeCache


class PoolCount(NamedTuple):
    """One pool's slots; without requests the last three add up to `size`."""

    kind: str
    unit: str
    size: int
    free: int
    evictable: int
    protected: int


class DeviceMemory:
    """Allocators and prefix cache seen as one store of slots, counted by kind. Scheduler thread only.

    `chunk_tokens`: most tokens of one prefill step.
    """

    def __init__(
        self,
        tree: TreeCache,
        allocator: TokenAllocator,
        rows: ReqToTokenPool,
        chunk_tokens: int,
    ) -> None:
        self.tree = tree
        self.allocator = allocator
        self.page_size = allocator.page_size
        self._rows = rows
        self._swa = allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else None
        self._has_states = rows.request_owned_slots > 0
        self._bounds: SWABounds | None = None
        self.window: int | None = None  # tokens that a sliding layer sees; None without an SWA pool
        if self._swa is not None:
            self.window = tree.sliding_window_size
            if self.window is None:
                raise ValueError("there is an SWA pool, but the cache knows of no window")
            self._bounds = SWABounds(self.page_size, self.window, chunk_tokens)

    # -- what there is ---------------------------------------------------------------------------

    def free(self) -> Room:
        """What nobody holds."""
        states = self._rows.recurrent_available_size()
        if self._swa is None:
            return Room(self.allocator.available_size(), 0, states)
        return Room(self._swa.full_available_size(), self._swa.swa_available_size(), states)

    def evictable(self) -> Room:
        """What the cache holds and nobody keeps."""
        states = self.tree.recurrent_evictable_size() if self._has_states else 0
        if self._swa is None:
            return Room(self.tree.evictable_size(), 0, states)
        return Room(self.tree.full_evictable_size(), self.tree.swa_evictable_size(), states)

    def protected(self) -> Room:
        """What the cache holds and somebody keeps."""
        states = self.tree.recurrent_protected_size() if self._has_states else 0
        if self._swa is None:
            return Room(self.tree.protected_size(), 0, states)
        return Room(self.tree.full_protected_size(), self.tree.swa_protected_size(), states)

    def room(self) -> Room:
        """What can be had: free slots and those that the cache would give up."""
        return self.free() + self.evictable()

    # -- what is asked for -----------------------------------------------------------------------

    def page_up(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole pages."""
        return -(-num_tokens // self.page_size) * self.page_size

    def growth(self, seq_len: int, new_len: int) -> Room:
        """Slots, in whole pages, that one step takes to grow a sequence from `seq_len` to `new_len`."""
        tokens = self.page_up(new_len) - self.page_up(seq_len)
        return Room(tokens, tokens if self._swa is not None else 0)

    def lasting_growth(self, req: Req, seq_len: int, new_len: int, *, prefills: bool) -> Room:
        """Most slots that a request asks for on its way from `seq_len` to `new_len`, what it gives back taken off."""
        tokens = self.page_up(new_len) - self.page_up(seq_len)
        if self._bounds is None:
            return Room(tokens)
        swa = self._bounds.growth(
            seq_len=seq_len,
            new_len=new_len,
            tree_len=max(req.cache_protected_len, req.last_matched_prefix_len),
            freed_len=req.swa_evicted_seqlen,
            prefills=prefills,
        )
        return Room(tokens, swa)

    # -- taking and giving back ------------------------------------------------------------------

    def ensure(self, need: Room) -> bool:
        """Have `need` free, evicting only what is missing. False if the cache could not give that much."""
        missing = need.lacking(self.free())
        if missing != Room():
            self.tree.evict(
                EvictParams(
                    num_tokens=missing.full,
                    swa_num_tokens=missing.swa,
                    recurrent_num=missing.states,
                )
            )
        return self.free().holds(need)

    def extend(self, prefix_len: int, seq_len: int, last_slot: int) -> Int32Array | None:
        """int32[seq_len - prefix_len] slots for the next tokens of one sequence, or None with none taken."""
        if not self.ensure(self.growth(prefix_len, seq_len)):
            return None
        return self.allocator.alloc_extend(
            [prefix_len], [seq_len], [last_slot], seq_len - prefix_len
        )

    def free_before_window(self, req: Req, pre_len: int) -> None:
        """Give back the request's own SWA pages that no token from position `pre_len` on can see."""
        if self._swa is not None:
            self.tree.evict_req_swa(req, pre_len, dp_rank=req.dp_rank)

    def take_states(self, req: Req) -> bool:
        """Give the request its state slots, evicting for them; False with none taken if there are too few."""
        if not self._has_states:
            return True
        need = Room(states=self._rows.request_owned_slots)
        return self.ensure(need) and self._rows.alloc_states(req)

    # -- the whole -------------------------------------------------------------------------------

    def counts(self) -> list[PoolCount]:
        """Every pool that the model has, the full one first."""
        size = Room(
            self.allocator.size, self._swa.size_swa if self._swa else 0, self._rows.slots_per_rank
        )
        free, evictable, protected = self.free(), self.evictable(), self.protected()
        return [
            PoolCount(
                kind, unit, *(getattr(room, kind) for room in (size, free, evictable, protected))
            )
            for kind, unit in (("full", "tokens"), ("swa", "tokens"), ("states", "states"))
            if getattr(size, kind)
        ]

    def check_conservation(self) -> str | None:
        """None if every slot is free or the cache's; else the numbers. Only true while no request runs."""
        wrong = [
            f"{pool.kind}: free {pool.free} + evictable {pool.evictable} + protected {pool.protected} "
            f"!= pool {pool.size} {pool.unit}"
            for pool in self.counts()
            if pool.free + pool.evictable + pool.protected != pool.size
        ]
        return "; ".join(wrong) or None

    def state(self) -> dict[str, Any]:
        """Numbers of this moment, JSON-able: the full pool's, and those of the others under `swa` and `states`."""
        shown: dict[str, Any] = {}
        for pool in self.counts():
            numbers = {
                f"pool_{pool.unit}": pool.size,
                f"free_{pool.unit}": pool.free,
                f"evictable_{pool.unit}": pool.evictable,
                f"protected_{pool.unit}": pool.protected,
            }
            shown |= numbers if pool.kind == "full" else {pool.kind: numbers}
        return shown
