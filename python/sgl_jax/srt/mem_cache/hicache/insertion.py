"""Puts a computed prefix into the tree: what the tree lacks is taken over, what it has is given back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tiered_tree import TieredTree
from .tree_node import KeyNamespace, TreeNode

Int32Array = npt.NDArray[np.int32]

States = Sequence[tuple[int, int]]
"""Recurrent states that come with a prefix: (tokens they have consumed, state slot)."""


class Insertion:
    """Insertion into one tree. Scheduler thread only; starts backups, waits for nothing."""

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree

    def insert(
        self,
        namespace: KeyNamespace,
        key: bytes,
        value: Int32Array,
        *,
        protected_len: int = 0,
        states: States = (),
        keep_tail: bool = True,
    ) -> tuple[int, TreeNode]:
        """Insert the whole pages of `key`, whose Full slots are `value` (int32[tokens of key]).

        Returns how many tokens were on the device already, and the node that ends the key. All slots and states become
        the tree's or are freed, except that the first `protected_len` slots are the tree's own already. `keep_tail`:
        the key's end is one that a later prompt may continue from. SWA slots come mapped to the Full slots.
        """
        tree = self._tree
        num_tokens = len(key) // tree.codec.token_bytes
        value = value[:num_tokens]
        path = tree.path_of(namespace, key)
        swa_slots = tree.device.swa_of(value, namespace.dp_rank) if tree.swa is not None else value
        borders = self._borders(num_tokens, swa_slots, states, keep_tail)
        path = tree.cut_at(path, borders)
        start = prefix_len = 0
        for node in path:
            end = start + node.num_tokens
            if tree.on_device(node):
                self._give_back(node, value[start:end], protected_len - start)
                prefix_len = end
            else:
                self._take(node, value[start:end])
            start = end
        path += self._grow(path, namespace, key, value, start, borders)
        last_node = path[-1] if path else tree.tree.root
        self._mark_kept(path, num_tokens, keep_tail)
        self._take_states(path, states, namespace.dp_rank)
        tree.touch(last_node)
        tree.back_up(path)
        return prefix_len, last_node

    def _borders(
        self, num_tokens: int, swa_slots: Int32Array, states: States, keep_tail: bool
    ) -> list[int]:
        """Where nodes have to end so that each component has all of a node or nothing; ascending."""
        tree = self._tree
        borders: set[int] = set()
        if tree.recurrent is not None:
            borders.update(border for border, _ in states)
        if tree.swa is not None:
            borders.update(tree.swa.keep_borders(num_tokens, keep_tail))
            mapped = swa_slots[:: tree.codec.page_size] != 0
            flips = np.flatnonzero(mapped[1:] != mapped[:-1]) + 1
            borders.update((flips * tree.codec.page_size).tolist())
        return sorted(border for border in borders if 0 < border < num_tokens)

    def _grow(
        self,
        path: Sequence[TreeNode],
        namespace: KeyNamespace,
        key: bytes,
        value: Int32Array,
        start: int,
        borders: Sequence[int],
    ) -> list[TreeNode]:
        """New nodes for what lies behind token `start`. No node is longer than the host pool: it is backed
        up whole."""
        tree, added = self._tree, []
        parent = path[-1] if path else tree.tree.root
        width, longest = tree.codec.token_bytes, tree.longest_node or len(value)
        for border in [*(b for b in borders if b > start), len(value)]:
            while start < border:
                end = min(border, start + longest)
                parent = tree.tree.add_child(parent, namespace, key[start * width : end * width])
                self._take(parent, value[start:end])
                added.append(parent)
                start = end
        return added

    def _take(self, node: TreeNode, full_slots: Int32Array) -> None:
        """The node was not on the device; now it has these slots and the SWA slots mapped to them."""
        tree = self._tree
        tree.attach(tree.full, node, full_slots)
        if tree.swa is not None:
            swa_slots = tree.device.swa_of(full_slots, node.namespace.dp_rank)
            if swa_slots.all():
                tree.attach(tree.swa, node, swa_slots)

    def _give_back(self, node: TreeNode, full_slots: Int32Array, num_protected: int) -> None:
        """The node is on the device already: free the caller's slots, after the node has taken the SWA slots that it
        lacks and the caller has."""
        tree, dp_rank = self._tree, node.namespace.dp_rank
        own = tree.full.data(node).device_slots
        spare = full_slots[max(num_protected, 0) :]
        if own is None or not len(spare):
            return
        if tree.swa is not None and tree.swa.data(node).device_slots is None and num_protected <= 0:
            swa_slots = tree.device.swa_of(spare, dp_rank)
            if swa_slots.all():
                tree.device.move_swa(spare, own, dp_rank)
                tree.attach(tree.swa, node, swa_slots)
        tree.device.free_full(spare, dp_rank)

    def _mark_kept(self, path: Sequence[TreeNode], num_tokens: int, keep_tail: bool) -> None:
        swa, start = self._tree.swa, 0
        if swa is None:
            return
        for node in path:
            swa.keep(node, start, num_tokens, keep_tail)
            start += node.num_tokens

    def _take_states(self, path: Sequence[TreeNode], states: States, dp_rank: int) -> None:
        tree = self._tree
        if tree.recurrent is None or not states:
            return
        ends: dict[int, TreeNode] = {}
        start = 0
        for node in path:
            start += node.num_tokens
            ends[start] = node
        for border, slot in states:
            end_node = ends.get(border)
            if end_node is None or tree.recurrent.data(end_node).device_slots is not None:
                tree.device.free_state(slot, dp_rank)
            else:
                tree.attach(tree.recurrent, end_node, np.array([slot], np.int32))
