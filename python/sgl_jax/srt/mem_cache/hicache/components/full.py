"""Full attention (MHA, GQA, MLA): every token of a prefix is needed, so every page of it must be there.

F1: the nodes on the device form a prefix of every path (a device node's parent is on the device). F2: a node has host
pages for all of its tokens or for none. F3: device locks are taken along the whole path, so a parent's lock is at
least each child's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import InvariantError
from ..host_pool.base import HostKVPool
from ..page_key import PageHasher
from ..tree_node import ComponentData, TreeNode
from ..types import ComponentKind, PageKey
from .base import BackupPlan, PrefetchPlan, PrefetchRequest, StorePlan, TreeComponent
from .residency import DeviceResidency, HostResidency

Int32Array = npt.NDArray[np.int32]


class FullComponent(TreeComponent):
    """The Full part of every node.

    `host_pool` is None without a host tier; `hasher_for` gives the page hasher of an extra_key, and is None without a
    storage (then nothing is ever hashed).
    """

    kind = ComponentKind.FULL

    def __init__(
        self,
        *,
        page_size: int,
        num_ranks: int = 1,
        host_pool: HostKVPool | None = None,
        hasher_for: Callable[[str | None], PageHasher] | None = None,
        index: int = 0,
    ) -> None:
        self.index = index
        self.device = DeviceResidency(index, num_ranks)
        self.host = HostResidency(index, host_pool.num_pages if host_pool is not None else 0)
        self._page_size = page_size
        self._host_pool = host_pool
        self._hasher_for = hasher_for
        self._hashers: dict[str | None, PageHasher] = {}

    # -- hooks -------------------------------------------------------------------------------------------------------

    def write_through(self, node: TreeNode) -> BackupPlan | None:
        """The whole node, if it is on the device and has no host pages yet (complete or on the way)."""
        data = self._data(node)
        if self._host_pool is None or data.device_slots is None or data.host_pages is not None:
            return None
        return BackupPlan(self.kind, node, device_pages_of(data.device_slots, self._page_size))

    def write_back(self, node: TreeNode) -> StorePlan | None:
        """The complete host pages of the path down to `node` that storage lacks: a page is of use only with those above
        it. Marks them as on the way; `host.storing` is cleared when the store is settled."""
        if self._hasher_for is None:
            return None
        pages: list[Int32Array] = []
        page_keys: list[PageKey] = []
        for above in node.path():
            host_pages = self._data(above).host_pages
            if host_pages is None or not self.host_ready(above):
                continue
            lacking = ~(self.host.stored[host_pages] | self.host.storing[host_pages])
            if lacking.any():
                keys = self.page_keys(above)
                pages.append(host_pages[lacking])
                page_keys.extend(keys[i] for i in np.flatnonzero(lacking))
        if not pages:
            return None
        host_pages = np.concatenate(pages)
        self.host.storing[host_pages] = True
        return StorePlan(self.kind, host_pages, tuple(page_keys))

    def prefetch(self, request: PrefetchRequest) -> PrefetchPlan:
        """Load every node of the path that is not on the device; ask storage for all pages behind the path."""
        nodes = tuple(n for n in request.path if self._data(n).device_slots is None)
        pages = [p for n in nodes if (p := self._data(n).host_pages) is not None]
        covered = sum(node.num_tokens for node in request.path) // self._page_size
        return PrefetchPlan(
            self.kind,
            nodes,
            np.concatenate(pages) if pages else np.empty(0, np.int32),
            range(covered, request.num_tokens // self._page_size),
        )

    # -- the usable prefix -------------------------------------------------------------------------------------------

    def largest_legal_border(self, path: Sequence[TreeNode], limit: int, *, with_host: bool) -> int:
        """The end of the leading nodes that are all there. Any page border inside them is legal too."""
        border = 0
        for node in path:
            on_device = self._data(node).device_slots is not None
            if border >= limit or not (on_device or (with_host and self.host_ready(node))):
                break
            border += node.num_tokens
        return min(border, limit // self._page_size * self._page_size)

    def host_ready(self, node: TreeNode) -> bool:
        """True if every page of the node is complete on the host."""
        pages = self._data(node).host_pages
        return (
            pages is not None
            and self._host_pool is not None
            and bool(self._host_pool.is_ready(pages).all())
        )

    # -- keys --------------------------------------------------------------------------------------------------------

    def page_keys(self, node: TreeNode) -> list[PageKey]:
        """Storage keys of the node's pages. Hashed once per node, ancestors first."""
        if self._hasher_for is None:
            raise InvariantError("page keys are asked for without a storage")
        missing = []
        for above in node.ancestors():
            if self._data(above).page_keys is not None:
                break
            missing.append(above)
        for above in reversed(missing):
            self._data(above).page_keys = self.hasher(above.namespace.extra_key).chain(
                self.parent_key(above), above.key
            )
        keys = self._data(node).page_keys
        assert keys is not None
        return keys

    def parent_key(self, node: TreeNode) -> PageKey | None:
        """The key of the page before the node's first, or None at the start of a prompt."""
        parent = node.parent
        if parent is None or parent.parent is None:
            return None
        return self.page_keys(parent)[-1]

    def hasher(self, extra_key: str | None) -> PageHasher:
        """The page hasher of an extra_key."""
        if self._hasher_for is None:
            raise InvariantError("a page hasher is asked for without a storage")
        if extra_key not in self._hashers:
            self._hashers[extra_key] = self._hasher_for(extra_key)
        return self._hashers[extra_key]

    # -- changes of the tree -----------------------------------------------------------------------------------------

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Slots, pages, keys and lock of the first tokens go to `upper`."""
        num_pages = upper.num_tokens // self._page_size
        data, above = self._data(lower), self._data(upper)
        if data.page_keys is not None:
            above.page_keys = data.page_keys[:num_pages]
            data.page_keys = data.page_keys[num_pages:]
        self.device.split(upper, lower)
        self.host.split(upper, lower, num_pages)

    def lock(self, node: TreeNode) -> int:
        """Lock the whole path."""
        return sum(self.device.lock(above) for above in node.ancestors())

    def unlock(self, node: TreeNode) -> int:
        """Unlock the whole path, deepest first."""
        return sum(self.device.unlock(above) for above in node.ancestors())

    def touch(self, node: TreeNode) -> None:
        """Every node of the path is used, the deepest first."""
        for above in node.ancestors():
            self.device.touch(above)
            self.host.touch(above)

    def check_invariants(self, nodes: Iterable[TreeNode]) -> None:
        """F1 to F3, and the residencies' own."""
        nodes = list(nodes)
        self.device.check_invariants(nodes)
        self.host.check_invariants(nodes)
        for node in nodes:
            data = self._data(node)
            if data.device_slots is None and data.host_pages is None:
                raise InvariantError(f"{node!r} is on no tier")
            if data.host_pages is not None and (
                len(data.host_pages) * self._page_size != node.num_tokens
            ):
                raise InvariantError(f"F2: {node!r} has {len(data.host_pages)} host pages")
            parent = node.parent
            if parent is None or parent.parent is None:
                continue
            above = self._data(parent)
            if data.device_slots is not None and above.device_slots is None:
                raise InvariantError(f"F1: {node!r} is on the device, its parent {parent!r} is not")
            if data.device_lock > above.device_lock:
                raise InvariantError(f"F3: {node!r} is locked more often than its parent")

    def _data(self, node: TreeNode) -> ComponentData:
        return node.data[self.index]


def device_pages_of(device_slots: Int32Array, page_size: int) -> Int32Array:
    """The pages of whole-page runs of token slots: int32[len(device_slots) / page_size]."""
    return device_slots[::page_size] // np.int32(page_size)
