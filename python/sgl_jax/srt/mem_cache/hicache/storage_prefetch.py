"""Asks storage for the prompts of waiting requests and puts what it has into the tree.

When a request arrives: what does the tree lack of its prompt (the prefetch hook says which pages)? A worker hashes
those pages and looks them up; for those that exist host pages are made room for and filled, chunk by chunk; each
chunk that arrives becomes a host-resident node at once. The request then hits them like any other host page.
Scheduler thread only; nothing here blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from .metrics import HiCacheMetrics
from .prefetch_table import Prefetch, PrefetchTable
from .tiered_tree import TieredTree
from .token_key import TokenCodec
from .tree_node import KeyNamespace
from .types import LookupResult, TierTokens, TransferResult

HELD_SHARE = 0.5
"""Share of the host pool that pages fetched for waiting requests may take; one request alone may take more."""

FETCH_CHUNK_PAGES = 16
"""Pages per read: small enough that a deadline finds something done, large enough to keep the readers busy."""


class StoragePrefetch:
    """The prefetches of one tree's waiting requests."""

    def __init__(
        self,
        tree: TieredTree,
        codec: TokenCodec,
        metrics: HiCacheMetrics,
        *,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tree = tree
        self._codec = codec
        self._metrics = metrics
        self._table = PrefetchTable(deadline_s, clock)
        # Looked up, but not read yet: what others fetched and still wait with fills the share of the host for that.
        self._parked: deque[tuple[Prefetch, LookupResult]] = deque()
        self._held_pages: dict[Prefetch, int] = {}

    def start(self, rid: str, namespace: KeyNamespace, key: bytes) -> None:
        """Ask for what the tree lacks of `key` (whole pages of the prompt). Once per request."""
        asked = self._tree.ask_storage(namespace, key)
        if asked is not None:
            first_page, lookup = asked
            self._table.start(Prefetch(rid, namespace, key, first_page), lookup)

    def ready(self, rid: str) -> bool:
        """False while the request should go on waiting for its pages."""
        return self._table.ready(rid)

    def release(self, rid: str) -> None:
        """The request needs its prefetch no longer, however it ended. Idempotent."""
        self._let_go(rid)
        self._table.release(rid)

    def admitted(self, rid: str, prompt_len: int, device_len: int, prefix_len: int) -> TierTokens:
        """Which tier served the request's prompt, counted once, when it is admitted.

        [0, device_len) was on the device, [device_len, prefix_len) was loaded: from storage where this request's own
        prefetch brought it, else from the host.
        """
        prefetch = self._table.get(rid)
        first, end = prefetch.loaded if prefetch is not None else (0, 0)
        storage = max(min(end, prefix_len) - max(first, device_len), 0)
        if prefetch is not None:
            self._metrics.prefetch_wait(prefetch.waited_s, prefetch.timed_out)
        tiers = TierTokens(
            device=device_len,
            host=prefix_len - device_len - storage,
            storage=storage,
            computed=prompt_len - prefix_len,
        )
        self._metrics.prompt(tiers)
        self._let_go(rid)
        return tiers

    def use_arrivals(self) -> None:
        """Go on with every prefetch of which something arrived."""
        lookups, fetches = self._tree.take_arrivals()
        for lookup in lookups:
            self._on_lookup(lookup)
        for fetch in fetches:
            self._on_fetch(fetch)

    def reset(self) -> None:
        """Forget all requests; pages still to come are given back when they arrive."""
        self._table.clear()
        self._parked.clear()
        self._held_pages.clear()

    def _on_lookup(self, result: LookupResult) -> None:
        prefetch = self._table.of_lookup(result.transfer_id)
        if prefetch is None:
            return
        num_asked = len(prefetch.key) // self._codec.page_bytes - prefetch.first_page
        self._metrics.lookup(num_asked, len(result.page_keys))
        self._parked.append((prefetch, result))
        self._fetch_parked()

    def _fetch_parked(self) -> None:
        """Start reading for those who wait, in their order, as long as there is room beside what others wait with: the
        pages of one waiting request must not push out those of another before either is admitted."""
        while self._parked:
            prefetch, result = self._parked[0]
            held = sum(self._held_pages.values())
            wanted = self._table.wanted(prefetch)
            if wanted and held and held + len(result.page_keys) > self._tree.host_share(HELD_SHARE):
                return
            self._parked.popleft()
            if wanted and result.page_keys:
                self._held_pages[prefetch] = len(result.page_keys)
                self._fetch(prefetch, result)
            self._table.end_if_idle(prefetch)

    def _fetch(self, prefetch: Prefetch, result: LookupResult) -> None:
        host_pages = self._tree.alloc_host_below(
            prefetch.namespace,
            prefetch.key[: prefetch.first_page * self._codec.page_bytes],
            len(result.page_keys),
        )
        prefetch.page_keys = result.page_keys[: len(host_pages)]
        for first in range(0, len(host_pages), FETCH_CHUNK_PAGES):
            chunk = slice(first, first + FETCH_CHUNK_PAGES)
            future = self._tree.tiers.controller.fetch(
                result.component, prefetch.page_keys[chunk], host_pages[chunk]
            )
            self._table.fetching(prefetch, future.transfer_id)

    def _let_go(self, rid: str) -> None:
        """The request is admitted, or gone: its pages are like any others now."""
        prefetch = self._table.get(rid)
        if prefetch is not None and self._held_pages.pop(prefetch, 0):
            self._fetch_parked()

    def _on_fetch(self, result: TransferResult) -> None:
        prefetch, chunks = self._table.arrived(result)
        for chunk in chunks:
            self._use(prefetch, chunk)
        if prefetch is not None:
            self._table.end_if_idle(prefetch)

    def _use(self, prefetch: Prefetch | None, chunk: TransferResult) -> None:
        """Put the pages of a chunk that verified into the tree, if everything before them got there."""
        tree = self._tree
        host_pages = np.array(chunk.host_pages, np.int32)
        num_ok = 0 if prefetch is None or prefetch.broken else sum(chunk.ok_pages)
        tree.tiers.give_up(tree.full, host_pages[num_ok:])
        if prefetch is None or not num_ok:
            return
        first, end = prefetch.next_page, prefetch.next_page + num_ok
        known = first - prefetch.first_page
        page_keys = prefetch.page_keys[known : known + num_ok]
        key = prefetch.key[: end * self._codec.page_bytes]
        there = tree.attach_host(prefetch.namespace, key, host_pages[:num_ok], page_keys)
        prefetch.broken = not there or num_ok < len(host_pages)
        if there:
            prefetch.next_page = end
            prefetch.loaded = (
                prefetch.first_page * self._codec.page_size,
                end * self._codec.page_size,
            )
