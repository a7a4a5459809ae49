"""Asks storage for the prompts of waiting requests and puts what it has into the tree.

When a request arrives: what does the tree lack of its prompt? A worker hashes those pages and looks them up. With what
the tree has and what storage has, the rule of the usable prefix says how far the request could get; the prefetch hooks
say which pages must come from storage for that; host pages are made room for and filled, chunk by chunk, Full pages
first. A chunk that arrives belongs to the tree at once. If a page could not be read after all, the rule is asked again
without it, so that the hit ends at the next legal border. The request then hits what came like any other host page.
Scheduler thread only; nothing here blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .components.base import PrefetchPlan, TreeComponent
from .config import PrefetchRules
from .coverage import Coverage, Part, usable_prefix
from .host_arrivals import HostArrivals
from .lower_tiers import Settlement
from .metrics import HiCacheMetrics
from .prefetch_table import FetchChunk, Prefetch, PrefetchState, PrefetchTable
from .storage_query import CompanionQuery, StorageQuery
from .tiered_tree import TieredTree
from .tree_node import KeyNamespace, TreeNode
from .types import ComponentKind, LookupResult, TierTokens, TransferId, TransferResult

HELD_SHARE = 0.5
"""Share of the Full host pool that pages fetched for waiting requests may take; one request alone may take more."""

FETCH_CHUNK_PAGES = 16
"""Pages per read: small enough that a deadline finds something done, large enough to keep the readers busy."""

MAX_ROUNDS = 4
"""How often reads are planned for one request, the first time included."""


@dataclass(frozen=True)
class _Target:
    """A prefix of `num_pages` pages to be made usable: the nodes the tree has of it, and what each component lacks."""

    num_pages: int
    path: list[TreeNode]
    plans: list[PrefetchPlan]


class StoragePrefetch:
    """The prefetches of one tree's waiting requests."""

    def __init__(
        self,
        tree: TieredTree,
        metrics: HiCacheMetrics,
        *,
        rules: PrefetchRules,
        clock: Callable[[], float],
    ) -> None:
        self._tree = tree
        self._codec = tree.codec
        self._arrivals = HostArrivals(tree)
        self._metrics = metrics
        self._table = PrefetchTable(rules, clock)
        self._threshold = rules.threshold
        self.served = TierTokens()  # of all prompts so far
        # Looked up, but not read yet: what others fetched and still wait with fills the share of the host for that.
        self._parked: deque[Prefetch] = deque()
        self._held_pages: dict[Prefetch, int] = {}
        self._lookups: list[LookupResult] = []
        self._fetches: list[TransferResult] = []
        tree.subscribe(self._on_settled)

    def start(self, rid: str, namespace: KeyNamespace, key: bytes) -> None:
        """Ask for what the tree lacks of `key` (whole pages of the prompt). Once per request."""
        lookup = self._ask(namespace, key)
        if lookup is not None:
            self._table.start(Prefetch(rid, namespace, key), lookup)

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
        prefetch brought its Full pages, else from the host.
        """
        prefetch = self._table.get(rid)
        first, end = prefetch.loaded or (0, 0) if prefetch is not None else (0, 0)
        storage = max(min(end, prefix_len) - max(first, device_len), 0)
        if prefetch is not None:
            prefetch.admitted = True
            self._metrics.prefetch_wait(prefetch.waited_s, prefetch.timed_out)
        tiers = TierTokens(
            device=device_len,
            host=prefix_len - device_len - storage,
            storage=storage,
            computed=prompt_len - prefix_len,
        )
        self._metrics.prompt(tiers)
        self.served += tiers
        self._let_go(rid)
        return tiers

    def use_arrivals(self) -> None:
        """Go on with every prefetch of which something arrived."""
        lookups, self._lookups = self._lookups, []
        fetches, self._fetches = self._fetches, []
        for lookup in lookups:
            self._on_lookup(lookup)
        for fetch in fetches:
            self._on_fetch(fetch)

    @property
    def num_waiting(self) -> int:
        """Requests whose pages are still looked for or read."""
        return self._table.num_waiting

    def storage_detached(self) -> None:
        """No request waits any longer; each goes on with what has arrived. Pages still to come are given back then."""
        self._end(self._table.end_all())

    def reset(self) -> None:
        """Forget all requests; pages still to come are given back when they arrive."""
        self._end(self._table.clear())

    def _end(self, unused: list[TransferResult]) -> None:
        for result in unused:
            self._give_up(result)
        self._parked.clear()
        self._held_pages.clear()

    def _on_settled(self, settlement: Settlement) -> None:
        self._lookups += settlement.lookups
        self._fetches += settlement.fetches

    # -- what to ask -------------------------------------------------------------------------------------------------

    def _ask(self, namespace: KeyNamespace, key: bytes) -> TransferId | None:
        """Start looking up what the tree lacks of `key`; None if that is nothing, or less than the threshold."""
        tree, page_size = self._tree, self._codec.page_size
        path = tree.path_of(namespace, key)
        num_pages = len(key) // self._codec.page_bytes
        usable = tree.usable(path, num_pages * page_size, with_host=True) // page_size
        lacking = (num_pages - usable) * page_size
        if not lacking or lacking < self._threshold:
            return None
        first = sum(node.num_tokens for node in path) // page_size
        companions = {
            component.kind: CompanionQuery(
                self._candidates(component, path, usable, num_pages), component.key_of_page
            )
            for component in tree.components
            if component is not tree.full
        }
        keys_by_node = [tree.keys.of_node(node) for node in path] if path else []
        return tree.tiers.controller.lookup(
            StorageQuery(
                hasher=tree.keys.hasher(namespace.extra_key),
                first_page=first,
                parent=keys_by_node[-1][-1] if keys_by_node else None,
                tokens=key[first * self._codec.page_bytes :],
                known_keys=[k for keys in keys_by_node for k in keys] if companions else (),
                companions=companions,
            )
        )

    def _candidates(
        self, component: TreeComponent, path: list[TreeNode], usable: int, num_pages: int
    ) -> list[int]:
        """The pages of a companion, needed by some border behind `usable`, that only storage can have."""
        first = max(usable + 1 - (component.reach or 0), 0)
        missing = component.coverage(path, with_host=True).missing(first, num_pages)
        may_have = component.storage_candidates(first, num_pages)
        return [page for page in missing if page in may_have]

    def _on_lookup(self, result: LookupResult) -> None:
        prefetch = self._table.of_lookup(result.transfer_id)
        if prefetch is None:
            return
        prefetch.found = {kind: dict(pages) for kind, pages in result.found.items()}
        self._metrics.lookup(result.num_asked, len(prefetch.found.get(ComponentKind.FULL, ())))
        self._parked.append(prefetch)
        self._fetch_parked()

    # -- what to read ------------------------------------------------------------------------------------------------

    def _fetch_parked(self) -> None:
        """Start reading for those who wait, in their order, as long as there is room beside what others wait with: the
        pages of one waiting request must not push out those of another before either is admitted."""
        while self._parked:
            prefetch = self._parked[0]
            held = sum(self._held_pages.values())
            wanted = self._table.wanted(prefetch)
            num_found = len(prefetch.found.get(ComponentKind.FULL, ()))
            if wanted and held and held + num_found > self._arrivals.host_share(HELD_SHARE):
                return
            self._parked.popleft()
            self._fetch_or_end(prefetch)
            if prefetch.chunks:
                self._held_pages[prefetch] = num_found

    def _fetch_or_end(self, prefetch: Prefetch) -> None:
        """Read what the request can use and nobody has; nothing of that: its prefetch has ended."""
        if not self._table.wanted(prefetch) or not self._fetch(prefetch):
            prefetch.state = PrefetchState.ENDED

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Start a round of reads for the longest prefix that there is room for; False if there is nothing to read."""
        page_bytes = self._codec.page_bytes
        limit = len(prefetch.key) // page_bytes
        prefetch.num_rounds += 1
        while prefetch.num_rounds <= MAX_ROUNDS:
            target = self._target(prefetch, limit)
            if target is None:
                return False
            needed = {plan.component: len(plan.storage_pages) for plan in target.plans}
            lacking = self._arrivals.reserve(target.path, needed)
            if not any(lacking.values()):
                self._read(prefetch, target.plans)
                return True
            # Making room may have changed the tree: plan again, for less.
            limit = target.num_pages - max(lacking[ComponentKind.FULL], 1)
        return False

    def _target(self, prefetch: Prefetch, limit: int) -> _Target | None:
        """The longest prefix within `limit` pages that the tree and storage can serve together, and what that needs;
        None if storage adds nothing."""
        tree, page_size = self._tree, self._codec.page_size
        path = tree.path_of(prefetch.namespace, prefetch.key)
        parts = [
            Part(
                component.coverage(path, with_host=True).union(
                    Coverage.of_pages(prefetch.found.get(component.kind, ()))
                ),
                component.reach,
            )
            for component in tree.components
        ]
        border = usable_prefix(parts, limit)
        if border * page_size <= tree.usable(path, limit * page_size, with_host=True):
            return None
        path = tree.cut(path, border * page_size)
        return _Target(border, path, tree.prefetch_plans(path, border))

    def _read(self, prefetch: Prefetch, plans: list[PrefetchPlan]) -> None:
        controller = self._tree.tiers.controller
        for plan in plans:
            pages = plan.storage_pages
            host_pages = self._tree.tiers.host_pool(plan.component).alloc(len(pages))
            assert host_pages is not None  # reserved just now
            keys = prefetch.found.get(plan.component, {})
            for first in range(0, len(pages), FETCH_CHUNK_PAGES):
                part = slice(first, first + FETCH_CHUNK_PAGES)
                chunk = FetchChunk(plan.component, pages[part])
                future = controller.fetch(
                    plan.component, [keys[page] for page in chunk.pages], host_pages[part]
                )
                self._table.fetching(prefetch, future.transfer_id, chunk)

    def _let_go(self, rid: str) -> None:
        """The request is admitted, or gone: its pages are like any others now."""
        prefetch = self._table.get(rid)
        if prefetch is not None and self._held_pages.pop(prefetch, 0):
            self._fetch_parked()

    # -- what came ---------------------------------------------------------------------------------------------------

    def _on_fetch(self, result: TransferResult) -> None:
        prefetch = self._table.of_fetch(result)
        if prefetch is None:
            self._give_up(result)
            return
        for chunk, ended in self._table.usable(prefetch):
            self._use(prefetch, chunk, ended)
        if not prefetch.chunks:
            self._fetch_or_end(prefetch)

    def _give_up(self, result: TransferResult) -> None:
        self._tree.tiers.give_up(result.component, np.array(result.host_pages, np.int32))

    def _use(self, prefetch: Prefetch, chunk: FetchChunk, result: TransferResult) -> None:
        """Put the pages of a chunk that verified into the tree, and remember the others as not there."""
        tree = self._tree
        found = prefetch.found[chunk.component]
        host_pages = np.array(result.host_pages, np.int32)
        num_ok = sum(result.ok_pages)  # a leading run, see `HiCacheController.fetch`
        tree.tiers.give_up(chunk.component, host_pages[num_ok:])
        for page in chunk.pages[num_ok:]:
            found.pop(page, None)
        component = tree.component(chunk.component)
        if not num_ok or not self._arrivals.attach(
            prefetch.namespace,
            prefetch.key,
            component,
            chunk.pages[:num_ok],
            host_pages[:num_ok],
            found,
        ):
            return
        if component is tree.full:
            size = self._codec.page_size
            start, end = prefetch.loaded or (chunk.pages[0] * size, 0)
            prefetch.loaded = (start, max(end, (chunk.pages[num_ok - 1] + 1) * size))
