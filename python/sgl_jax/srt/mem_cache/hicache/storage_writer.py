"""Decides when pages go to storage: early with their host copy, or late; again if it refused; all at a flush."""

from __future__ import annotations

from itertools import islice

from .components.base import TreeComponent
from .components.residency import STORE_RETRIES
from .lower_tiers import Settlement
from .tiered_tree import TieredTree
from .tree_node import TreeNode

STORE_RETRY_S = 1.0
STORE_RETRY_NODES = 64
"""What storage did not take is written again: of each component so many nodes at a time, not more often than that."""

FEW_NODES = 1024
"""Not worth looking which of so many have left the tree."""


class StorageWriter:
    """Writing of one tree's pages, by the tree's policy. Scheduler thread only; only `flush` waits.

    What a working storage refuses again and again is left alone; a flush or a longer prompt tries once more.
    """

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree
        self._unstored: dict[TreeComponent, dict[TreeNode, None]] = {c: {} for c in tree.components}
        self._num_live = 0
        self._retry_at_s = 0.0
        tree.subscribe(self._on_settled)
        tree.subscribe_to_splits(self._on_split)

    def _on_settled(self, settlement: Settlement) -> None:
        tree = self._tree
        if settlement.unstored:
            now_s = tree.tiers.controller.now_s()
            if now_s >= self._retry_at_s:  # not put off again by what is refused meanwhile
                self._retry_at_s = now_s + STORE_RETRY_S
        if not tree.stores_early:
            return
        for node, component in settlement.unstored:
            self._unstored[component][node] = None
        complete: list[tuple[TreeComponent, TreeNode]] = []
        for node, component in settlement.backed_up:
            if not tree.tiers.storage_writable(component):
                self._unstored[component][node] = None
            elif node.parent is not None:
                complete.append((component, node))
        tree.store_parts(complete)

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Both parts of a node that is to be written again are."""
        for unstored in self._unstored.values():
            if lower in unstored:
                unstored[upper] = None

    def keep_reserve(self) -> None:
        """With the lazy policy: write the oldest pages to storage ahead of need, so that eviction need not wait. Looks
        only if something changed since it last found nothing to do, or was refused less than `STORE_RETRY_S` ago; what
        was is left alone until then."""
        tree = self._tree
        if tree.stores_early or not tree.host_only_changed or not tree.has_storage:
            return
        is_due = tree.tiers.controller.now_s() >= self._retry_at_s
        begun = tree.store_parts(
            (component, node)
            for component in tree.components
            for node in tree.tiers.oldest_unstored(component, again=is_due)
        )
        tree.host_only_changed = bool(begun) or not is_due

    def retry_stores(self) -> None:
        """With the early policy: write again what storage did not take, a few nodes at a time."""
        tree = self._tree
        if not any(self._unstored.values()):
            return
        now_s = tree.tiers.controller.now_s()
        if now_s < self._retry_at_s:
            return
        self._retry_at_s = now_s + STORE_RETRY_S
        self._forget_removed()
        again: list[tuple[TreeComponent, TreeNode]] = []
        for component, unstored in self._unstored.items():
            if tree.tiers.storage_writable(component):
                for node in list(islice(unstored, STORE_RETRY_NODES)):
                    del unstored[node]
                    if not self._is_given_up(component, node):
                        again.append((component, node))
        for component, node in tree.store_parts(again):
            self._unstored[component][node] = None

    def flush(self, deadline_s: float) -> bool:
        """Bring everything into storage, waiting for it; True if all of it is there in time.

        Works in waves, parents first: what the host has is written, what the host lacks is backed up as far as there
        is room, and what was written, or is given up as refused too often, makes room for the next wave. Tries also a
        storage that failed a moment ago. Ends early when waves get nowhere: two if storage takes nothing (the second
        writes by itself what the first could not), else as many as a page has chances. Nothing that ended is left
        unsettled.
        """
        tree = self._tree
        if not tree.has_storage:
            return True
        deadline = tree.tiers.controller.now_s() + deadline_s
        num_missing, num_backups, num_futile, gave_up = -1, 0, 0, False
        while self._wait_until_down(deadline):
            missing = [
                (component, node)
                for node in tree.tree.nodes()
                for component in tree.components
                if not self._is_stored(component, node)
            ]
            if not missing:
                return not gave_up
            is_futile = len(missing) == num_missing and not num_backups
            num_futile = num_futile + 1 if is_futile else 0
            works = any(tree.tiers.storage_writable(component) for component in tree.components)
            if num_futile == (STORE_RETRIES + 2 if works else 2):
                return False
            # Written first: pages on their way to storage are not dropped to make room for the others.
            is_first, num_missing = num_missing < 0, len(missing)
            tried = [part for part in missing if is_first or not self._is_given_up(*part)]
            gave_up |= len(tried) < num_missing
            tree.store_parts(tried)
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
                        self._unstored[component][node] = None

    def reset(self) -> None:
        """Forget what is to be written."""
        for unstored in self._unstored.values():
            unstored.clear()

    def _forget_removed(self) -> None:
        """Nodes that left the tree are not kept alive here, however long storage takes nothing."""
        if sum(map(len, self._unstored.values())) <= max(2 * self._num_live, FEW_NODES):
            return
        for component, unstored in self._unstored.items():
            live = {node: None for node in unstored if node.parent is not None}
            self._unstored[component] = live
        self._num_live = sum(map(len, self._unstored.values()))

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

    @staticmethod
    def _is_given_up(component: TreeComponent, node: TreeNode) -> bool:
        """True if trying again to store the node's pages on the host is of no use."""
        pages = component.data(node).host_pages
        return pages is not None and component.host.is_settled(pages)
