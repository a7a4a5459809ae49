"""Frees device slots of each component, the least recently used first."""

from __future__ import annotations

from .components.base import Int32Array, TreeComponent
from .metrics import HiCacheMetrics
from .tiered_tree import TieredTree
from .tree_node import TreeNode
from .types import Tier


class DeviceEviction:
    """Eviction from the device of one tree. Scheduler thread only; starts backups, waits for nothing.

    What has a host copy, complete or on the way, just loses its slots; what has none and is worth one is copied first,
    if there is room.
    """

    def __init__(self, tree: TieredTree, metrics: HiCacheMetrics) -> None:
        self._tree = tree
        self._metrics = metrics

    def evict_full(self, num_tokens: int, dp_rank: int) -> int:
        """Free at least `num_tokens` Full tokens if that many are evictable; return how many were freed."""
        freed = 0
        if num_tokens <= 0:
            return freed
        with self._tree.backing_up():
            while freed < num_tokens:
                node = self._tree.full.device.oldest(dp_rank)
                if node is None:
                    break
                freed += self._evict_node(node, num_tokens - freed)
        return freed

    def evict_swa(self, num_tokens: int, dp_rank: int) -> int:
        """Free at least `num_tokens` SWA tokens if that many are evictable; their Full slots stay."""
        tree, freed = self._tree, 0
        if tree.swa is None or num_tokens <= 0:
            return freed
        with tree.backing_up():
            while freed < num_tokens:
                node = tree.swa.device.oldest(dp_rank)
                if node is None:
                    break
                tree.back_up_part(tree.swa, node)
                freed += len(self._detach(tree.swa, node))
                full_slots = tree.full.data(node).device_slots
                if full_slots is not None:
                    tree.device.free_swa(full_slots, dp_rank)
        return freed

    def evict_states(self, num_states: int, dp_rank: int) -> int:
        """Free that many recurrent states if they are evictable; return how many were freed."""
        tree, freed = self._tree, 0
        if tree.recurrent is None or num_states <= 0:
            return freed
        with tree.backing_up():
            while freed < num_states:
                node = tree.recurrent.device.oldest(dp_rank)
                if node is None:
                    break
                tree.back_up_part(tree.recurrent, node)
                self._free_state(node)
                freed += 1
        return freed

    def _evict_node(self, node: TreeNode, num_tokens: int) -> int:
        """Take `node`, or as many of its last pages as hold `num_tokens`, off the device, with all that is on it.

        A node that ends up on no tier leaves the tree, with what hangs below it.
        """
        tree, page_size = self._tree, self._tree.codec.page_size
        keep = (node.num_tokens - num_tokens) // page_size * page_size
        upper = tree.split(node, keep) if keep > 0 else None
        for component in tree.components:
            tree.back_up_part(component, node)
        if tree.swa is not None and tree.swa.data(node).device_slots is not None:
            self._detach(tree.swa, node)  # freed with the Full slots that they are mapped to
        if tree.state_slot(node) is not None:
            self._free_state(node)
        slots = self._detach(tree.full, node)
        if upper is not None:
            tree.full.device.age(upper)
        tree.device.free_full(slots, node.namespace.dp_rank)
        if tree.full.data(node).host_pages is None:
            tree.remove_subtree(node)
        return len(slots)

    def _is_lost(self, component: TreeComponent, node: TreeNode) -> bool:
        """True if what the node had was worth keeping, and no tier below has it."""
        data = component.data(node)
        below = data.host_pages is not None or data.in_storage
        return self._tree.has_tiers and not below and component.wants_host_copy(node)

    def _free_state(self, node: TreeNode) -> None:
        tree = self._tree
        if tree.recurrent is not None:
            slots = self._detach(tree.recurrent, node)
            tree.device.free_state(int(slots[0]), node.namespace.dp_rank)

    def _detach(self, component: TreeComponent, node: TreeNode) -> Int32Array:
        """The node's slots of a component, which are its no longer."""
        slots = self._tree.detach(component, node)
        num_pages = len(component.device_pages_of(slots))
        self._metrics.evicted(Tier.DEVICE, component.kind, num_pages)
        if self._is_lost(component, node):
            self._metrics.dropped(Tier.DEVICE, component.kind, num_pages)
        return slots
