"""Where a component's pages are, in what order they may leave, and how much that is: one class per tier.

Both keep their order in dictionaries that are changed as nodes are used, so that finding the next victim costs the same
in a tree of ten nodes and of a million. The tree uses a path from its end upwards, so on the device a parent is always
younger than its children and the oldest node has no resident child. On the host splits may leave a parent older for a
while; whoever looks for victims moves it on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice

import numpy as np
import numpy.typing as npt

from ..errors import InvariantError
from ..tree_node import ComponentData, TreeNode

Int32Array = npt.NDArray[np.int32]


STORE_RETRIES = 3
"""So often is written again what a storage refuses that takes other pages."""


class DeviceResidency:
    """The nodes that hold device slots of one component. Sizes are in its slots: tokens, or states.

    D1: a node is in its rank's order exactly if it has slots and no lock. D2: per rank, `evictable` is the slots of
    the nodes in the order and `protected` the slots of the locked ones.
    """

    def __init__(self, index: int, num_ranks: int) -> None:
        self._index = index
        self._order: list[OrderedDict[TreeNode, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._evictable = [0] * num_ranks
        self._protected = [0] * num_ranks

    def attach(self, node: TreeNode, device_slots: Int32Array) -> None:
        """`node` gains slots (its own copy, int32[n]) and becomes the youngest."""
        data = self._data(node)
        data.device_slots = device_slots
        if data.device_lock:
            self._protected[self._rank(node)] += len(device_slots)
        else:
            self._enter(node, len(device_slots))

    def detach(self, node: TreeNode) -> Int32Array:
        """`node` (not locked) loses its slots; the caller frees them."""
        data = self._data(node)
        slots = data.device_slots
        if slots is None or data.device_lock:
            raise InvariantError(f"{node!r} cannot leave the device: lock {data.device_lock}")
        data.device_slots = None
        del self._order[self._rank(node)][node]
        self._evictable[self._rank(node)] -= len(slots)
        return slots

    def lock(self, node: TreeNode) -> int:
        """Keep `node` on the device; return the slots that stopped being evictable. A node without slots is locked all
        the same, so that what it gains later is kept too and every unlock has its lock."""
        data = self._data(node)
        data.device_lock += 1
        if data.device_lock > 1 or data.device_slots is None:
            return 0
        rank, num_slots = self._rank(node), len(data.device_slots)
        del self._order[rank][node]
        self._evictable[rank] -= num_slots
        self._protected[rank] += num_slots
        return num_slots

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock`; return the slots that became evictable. The node is then the youngest."""
        data = self._data(node)
        if data.device_lock < 1:
            raise InvariantError(f"{node!r} is unlocked more often than locked")
        data.device_lock -= 1
        if data.device_lock or data.device_slots is None:
            return 0
        num_slots = len(data.device_slots)
        self._protected[self._rank(node)] -= num_slots
        self._enter(node, num_slots)
        return num_slots

    def touch(self, node: TreeNode) -> None:
        """`node` was used: it is the youngest, if it is in the order at all."""
        order = self._order[self._rank(node)]
        if node in order:
            order.move_to_end(node)

    def age(self, node: TreeNode) -> None:
        """`node` is the next to leave."""
        self._order[self._rank(node)].move_to_end(node, last=False)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` was cut: its first slots, and its lock, go to `upper` (which becomes the youngest)."""
        data, above = self._data(lower), self._data(upper)
        above.device_lock = data.device_lock
        if data.device_slots is None:
            return
        above.device_slots = data.device_slots[: upper.num_tokens].copy()
        data.device_slots = data.device_slots[upper.num_tokens :].copy()
        if not data.device_lock:
            self._order[self._rank(upper)][upper] = None

    def oldest(self, dp_rank: int) -> TreeNode | None:
        """The next node to leave, or None if all that is resident is locked."""
        return next(iter(self._order[dp_rank]), None)

    def evictable(self, dp_rank: int) -> int:
        """Slots that may leave."""
        return self._evictable[dp_rank]

    def protected(self, dp_rank: int) -> int:
        """Slots that are locked."""
        return self._protected[dp_rank]

    def total_evictable(self) -> int:
        """Slots that may leave, over all ranks."""
        return sum(self._evictable)

    def total(self) -> int:
        """Slots on the device, over all ranks."""
        return sum(self._evictable) + sum(self._protected)

    def clear(self) -> None:
        """Forget every node."""
        for order in self._order:
            order.clear()
        self._evictable = [0] * len(self._order)
        self._protected = [0] * len(self._order)

    def check_invariants(self, nodes: Iterable[TreeNode]) -> None:
        """D1 and D2 against the nodes of the tree; no slot belongs to two nodes."""
        evictable, protected = [0] * len(self._order), [0] * len(self._order)
        seen: list[set[int]] = [set() for _ in self._order]
        num_ordered = 0
        for node in nodes:
            data, rank = self._data(node), self._rank(node)
            ordered = node in self._order[rank]
            num_ordered += ordered
            if ordered != (data.device_slots is not None and not data.device_lock):
                raise InvariantError(f"D1: {node!r} in order: {ordered}, lock {data.device_lock}")
            if data.device_slots is None:
                continue
            num_slots = len(data.device_slots)
            (evictable if ordered else protected)[rank] += num_slots
            slots = set(data.device_slots.tolist())
            if len(slots) != num_slots or slots & seen[rank]:
                raise InvariantError(f"{node!r} shares slots: {sorted(slots & seen[rank])[:8]}")
            seen[rank] |= slots
        if num_ordered != sum(map(len, self._order)):
            raise InvariantError("D1: a node that is not in the tree is in the order")
        if evictable != self._evictable or protected != self._protected:
            raise InvariantError(
                f"D2: evictable {evictable} counted {self._evictable}, "
                f"protected {protected} counted {self._protected}"
            )

    def _enter(self, node: TreeNode, num_slots: int) -> None:
        rank = self._rank(node)
        self._order[rank][node] = None
        self._evictable[rank] += num_slots

    def _data(self, node: TreeNode) -> ComponentData:
        return node.data[self._index]

    @staticmethod
    def _rank(node: TreeNode) -> int:
        return node.namespace.dp_rank


class HostResidency:
    """The nodes that hold host pages of one component.

    H1: every page of a node names that node as its owner, and no other page names it. H2: a node with host pages is in
    exactly one order: `mirrors` if it has device slots too, `sole` otherwise. `storing`: host pages whose content is on
    its way to storage; what is there already is told by `all_stored`, what is there or given up by `is_settled`.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._owners: dict[int, TreeNode] = {}
        self._mirrors: OrderedDict[TreeNode, None] = OrderedDict()
        self._sole: OrderedDict[TreeNode, None] = OrderedDict()
        self._stored: set[int] = set()  # says nothing of pages that nobody owns, nor does the next
        self._refusals: dict[int, int] = {}  # page -> refused how often while storage took others
        self.storing: set[int] = set()

    def attach(self, node: TreeNode, host_pages: Int32Array, *, stored: bool) -> None:
        """`node` gains host pages (its own copy, int32[num_pages]) and becomes the youngest."""
        self._data(node).host_pages = host_pages
        pages = host_pages.tolist()
        self._owners.update(dict.fromkeys(pages, node))
        if stored:
            self._stored.update(pages)
        else:
            self._stored.difference_update(pages)
        self._forget_refusals(pages)
        self.storing.difference_update(pages)
        self._order_of(node)[node] = None

    def detach(self, node: TreeNode) -> Int32Array:
        """`node` loses its host pages; the caller gives them up."""
        data = self._data(node)
        pages = data.host_pages
        if pages is None:
            raise InvariantError(f"{node!r} has no host pages")
        for page in pages.tolist():
            del self._owners[page]
        del self._order_of(node)[node]
        data.host_pages = None
        return pages

    def device_changed(self, node: TreeNode) -> None:
        """`node` gained or lost its device slots: it changes to the other order, as the youngest."""
        if self._data(node).host_pages is not None:
            self._mirrors.pop(node, None)
            self._sole.pop(node, None)
            self._order_of(node)[node] = None

    def touch(self, node: TreeNode) -> None:
        """`node` was used: it is the youngest of its order."""
        if self._data(node).host_pages is not None:
            self._order_of(node).move_to_end(node)

    def split(self, upper: TreeNode, lower: TreeNode, num_upper_pages: int) -> None:
        """`lower` was cut: its first pages go to `upper` (which becomes the youngest)."""
        data, above = self._data(lower), self._data(upper)
        above.in_storage = data.in_storage
        above.mirror_dropped = data.mirror_dropped
        if data.host_pages is None:
            return
        above.host_pages = data.host_pages[:num_upper_pages].copy()
        data.host_pages = data.host_pages[num_upper_pages:].copy()
        self._owners.update(dict.fromkeys(above.host_pages.tolist(), upper))
        self._order_of(upper)[upper] = None

    def age(self, node: TreeNode) -> None:
        """`node` is the next of its order to leave."""
        if self._data(node).host_pages is not None:
            self._order_of(node).move_to_end(node, last=False)

    def owners(self, host_pages: Iterable[int]) -> dict[TreeNode, None]:
        """The nodes that own these pages, each once, in order; pages that nobody owns are left out."""
        found = (self._owners.get(page) for page in host_pages)
        return {node: None for node in found if node is not None}

    def oldest_mirrors(self, limit: int) -> Iterator[TreeNode]:
        """Up to `limit` nodes that are on the device too, oldest first; as long as none is moved."""
        return islice(self._mirrors, limit)

    def oldest_sole(self, limit: int) -> list[TreeNode]:
        """Up to `limit` nodes that are on the host only, oldest first."""
        return list(islice(self._sole, limit))

    @property
    def num_pages(self) -> int:
        """Host pages that nodes own."""
        return len(self._owners)

    def store_ended(
        self, host_pages: Sequence[int], stored: Sequence[bool], *, storage_works: bool
    ) -> None:
        """Pages are not on their way to storage any more; which of them it has. `storage_works`: what it refused is
        the page's trouble, not its own."""
        self.storing.difference_update(host_pages)
        taken = list(compress(host_pages, stored))
        self._stored.update(taken)
        self._forget_refusals(taken)
        if len(taken) < len(host_pages):
            for page, is_stored in zip(host_pages, stored, strict=True):
                if not is_stored:
                    self._refusals[page] = self._refusals.get(page, 0) + storage_works

    def any_refused(self, host_pages: Int32Array) -> bool:
        """True if storage was given one of these pages and has not taken it yet."""
        return bool(self._refusals) and not self._refusals.keys().isdisjoint(host_pages.tolist())

    def is_settled(self, host_pages: Int32Array) -> bool:
        """True if storage has the content of each of these pages, or will never take it: it had its chances."""
        return self.all_stored(host_pages) or all(
            page in self._stored or self._refusals.get(page, 0) > STORE_RETRIES
            for page in host_pages.tolist()
        )

    def all_stored(self, host_pages: Int32Array) -> bool:
        """True if storage has the content of all these pages."""
        return self._stored.issuperset(host_pages.tolist())

    def lacking(self, host_pages: Int32Array) -> list[int]:
        """Which of these pages storage neither has nor is getting, as positions in `host_pages`."""
        stored, storing = self._stored, self.storing
        return [
            i
            for i, page in enumerate(host_pages.tolist())
            if page not in stored and page not in storing
        ]

    def num_stored(self, host_pages: Iterable[int] | None = None) -> int:
        """How many of these pages (None: of all that nodes own) storage has."""
        return sum(
            page in self._stored for page in (self._owners if host_pages is None else host_pages)
        )

    def forget_storage(self) -> None:
        """No page's content is in storage, or on its way there."""
        self._stored.clear()
        self._refusals.clear()
        self.storing.clear()

    def clear(self) -> list[int]:
        """Forget every node; return the pages they had."""
        pages = list(self._owners)
        self._owners.clear()
        self._mirrors.clear()
        self._sole.clear()
        self.forget_storage()
        return pages

    def check_invariants(self, nodes: Iterable[TreeNode]) -> None:
        """H1 and H2 against the nodes of the tree."""
        num_owned = num_ordered = 0
        for node in nodes:
            data = self._data(node)
            if data.host_pages is None:
                if node in self._mirrors or node in self._sole:
                    raise InvariantError(f"H2: {node!r} has no host pages but is in an order")
                continue
            num_ordered += 1
            num_owned += len(data.host_pages)
            if any(self._owners.get(page) is not node for page in data.host_pages.tolist()):
                raise InvariantError(f"H1: {node!r} does not own its pages {data.host_pages}")
            on_device = data.device_slots is not None
            if (node in self._mirrors, node in self._sole) != (on_device, not on_device):
                raise InvariantError(f"H2: {node!r} is in the wrong order (device: {on_device})")
        if num_owned != len(self._owners):
            raise InvariantError(f"H1: nodes have {num_owned} pages, {len(self._owners)} are owned")
        if num_ordered != len(self._mirrors) + len(self._sole):
            raise InvariantError("H2: a node that is not in the tree is in an order")

    def _forget_refusals(self, host_pages: Iterable[int]) -> None:
        if self._refusals:
            for page in host_pages:
                self._refusals.pop(page, None)

    def _order_of(self, node: TreeNode) -> OrderedDict[TreeNode, None]:
        return self._sole if self._data(node).device_slots is None else self._mirrors

    def _data(self, node: TreeNode) -> ComponentData:
        return node.data[self._index]
