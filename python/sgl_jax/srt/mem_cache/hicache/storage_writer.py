"""Decides when pages go to storage: early with their host copy, or late; again if it refused; all at a flush."""

from __future__ import annotations

from itertools import islice

from .components.base import TreeComponent
from .lower_tiers import Settlement
from .tiered_tree import TieredTree
from .tree_node import TreeNode

STORE_RETRY_S = 1.0
STORE_RETRY_NODES = 64
STORE_RETRIES = 3
"""What storage did not take is written again: so many nodes at a time, not more often than that, and no node more often
than that; a flush, its eviction or a longer prompt try once more."""


class StorageWriter:
    """Writing of one tree's pages, by the tree's policy. Scheduler thread only; only `flush` waits."""

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree
        self._unstored: dict[tuple[TreeNode, TreeComponent], int] = {}  # -> times storage refused
        self._retry_at_s = 0.0
        tree.subscribe(self._on_settled)
        tree.subscribe_to_splits(self._on_split)

    def _on_settled(self, settlement: Settlement) -> None:
        tree = self._tree
        if not tree.stores_early:
            return
        for refused in settlement.unstored:
            self._unstored[refused] = self._unstored.get(refused, 0) + 1
            self._retry_at_s = tree.tiers.controller.now_s() + STORE_RETRY_S
        complete: list[tuple[TreeComponent, TreeNode]] = []
        for node, component in settlement.backed_up:
            if not self._tree.tiers.storage_writable(component):
                self._unstored.setdefault((node, component), 0)
            elif node.parent is not None:
                complete.append((component, node))
        tree.store_parts(complete)

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Both parts of a node that is to be written again are."""
        if self._unstored:
            for component in self._tree.components:
                num_refusals = self._unstored.get((lower, component))
                if num_refusals is not None:
                    self._unstored[upper, component] = num_refusals

    def keep_reserve(self) -> None:
        """With the lazy policy: write the oldest pages to storage ahead of need, so that eviction need not wait. Looks
        only if something changed since it last found nothing to do."""
        tree = self._tree
        if tree.stores_early or not tree.host_only_changed or not tree.has_storage:
            return
        begun = tree.store_parts(
            (component, node)
            for component in tree.components
            for node in tree.tiers.oldest_unstored(component)
        )
        tree.host_only_changed = bool(begun)

    def retry_stores(self) -> None:
        """With the early policy: write again what storage did not take, a few nodes at a time."""
        now_s = self._tree.tiers.controller.now_s() if self._unstored else 0.0
        if not self._unstored or now_s < self._retry_at_s:
            return
        self._retry_at_s = now_s + STORE_RETRY_S
        again: dict[tuple[TreeComponent, TreeNode], int] = {}
        for refused in list(islice(self._unstored, STORE_RETRY_NODES)):
            node, component = refused
            if not self._tree.tiers.storage_writable(component):
                continue
            num_refusals = self._unstored.pop(refused)
            if node.parent is not None and num_refusals <= STORE_RETRIES:
                again[component, node] = num_refusals
        for component, node in self._tree.store_parts(again):
            self._unstored[node, component] = again[component, node]

    def flush(self, deadline_s: float) -> bool:
        """Bring everything into storage, waiting for it; True if that was done in time.

        Works in waves, parents first: what the host has is written, what the host lacks is backed up as far as there
        is room, and what was written makes room for the next wave. Tries also a storage that failed a moment ago; ends
        early when two waves get nowhere: the second writes by itself what the first could not. Nothing that ended is
        left unsettled.
        """
        tree = self._tree
        if not tree.has_storage:
            return True
        deadline = tree.tiers.controller.now_s() + deadline_s
        num_missing, num_backups, num_futile = -1, 0, 0
        while self._wait_until_down(deadline):
            missing = [
                (component, node)
                for node in tree.tree.nodes()
                for component in tree.components
                if not self._is_stored(component, node)
            ]
            if not missing:
                return True
            is_futile = len(missing) == num_missing and not num_backups
            num_futile = num_futile + 1 if is_futile else 0
            if num_futile == 2:
                return False
            num_missing = len(missing)
            # Written first: pages on their way to storage are not dropped to make room for the others.
            tree.store_parts(missing)
            with tree.backing_up():
                num_backups = sum(
                    node.parent is not None and bool(tree.back_up_part(component, node))
                    for component, node in missing
                )
        return False

    def storage_attached(self) -> None:
        """With the early policy: what is complete on the host is written, a few nodes at a time. Where the storage has
        it, that costs a look."""
        tree = self._tree
        if tree.stores_early:
            for node in tree.tree.nodes():
                for component in tree.components:
                    if component.host_ready(node):
                        self._unstored[node, component] = 0

    def reset(self) -> None:
        """Forget what is to be written."""
        self._unstored.clear()

    def _wait_until_down(self, deadline: float) -> bool:
        """Wait for the backups and stores under way, but not for reads; False at the deadline."""
        controller = self._tree.tiers.controller
        while controller.num_moving_down:
            remaining_s = deadline - controller.now_s()
            if remaining_s <= 0:
                break
            controller.wait_any(remaining_s)
            self._tree.settle()
        return not controller.num_moving_down

    def _is_stored(self, component: TreeComponent, node: TreeNode) -> bool:
        """True if storage has what the node's component keeps, or there is nothing to keep."""
        data = component.data(node)
        if data.host_pages is not None:
            return component.host.all_stored(data.host_pages)
        return data.in_storage or data.device_slots is None or not component.wants_host_copy(node)
