"""What a kind of attention tells the tree: which of a node's pages move, and which prefixes it can use.

A component receives nodes and returns frozen plans; the tree submits them. The three hooks are called by the tree and
by nobody else. A component never sees a transfer, a file or the engine.

A node has a component's data for all of its pages or for none, on each tier; the tree cuts nodes so that this holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..coverage import Coverage, Part
from ..errors import InvariantError
from ..host_pool.base import HostKVPool
from ..path_keys import PathKeys
from ..tree_node import ComponentData, TreeNode
from ..types import ComponentKind, PageKey, PageLink
from .residency import DeviceResidency, HostResidency

Int32Array = npt.NDArray[np.int32]

NO_PAGES: Int32Array = np.empty(0, np.int32)

DeriveKey = Callable[[PageKey], PageKey]
"""A component's key of a page, from the key of the Full page."""


@dataclass(frozen=True)
class BackupPlan:
    """Copy these device pages of `node` to the host. device_pages: int32[num_pages], rank-local."""

    component: ComponentKind
    node: TreeNode
    device_pages: Int32Array


@dataclass(frozen=True)
class StorePlan:
    """Write these host pages to storage, in this order (ancestors first). `links`: what each page follows."""

    component: ComponentKind
    host_pages: Int32Array
    page_keys: tuple[PageKey, ...]
    links: tuple[PageLink, ...]


@dataclass(frozen=True)
class PrefetchRequest:
    """The first `num_pages` pages of a prefix are about to be used. `path`: the nodes the tree has of them, from the
    root down, none longer than that."""

    path: Sequence[TreeNode]
    num_pages: int


@dataclass(frozen=True)
class PrefetchPlan:
    """What must move up for that: `load_nodes` from host to device (with the pages to read), and `storage_pages`, the
    page numbers of the prefix that only storage can have."""

    component: ComponentKind
    load_nodes: tuple[TreeNode, ...]
    host_pages: Int32Array
    storage_pages: tuple[int, ...]


class TreeComponent(ABC):
    """One attention kind on the tree. `index` is its place in `TreeNode.data`; scheduler thread only.

    `reach`: how many pages before a border a reader needs, None for all. `host_pool`, `keys` and `derive_key` are None
    without a host tier; nothing is hashed before it is to be stored.
    """

    kind: ClassVar[ComponentKind]

    def __init__(
        self,
        *,
        index: int,
        page_size: int,
        reach: int | None,
        num_ranks: int = 1,
        host_pool: HostKVPool | None = None,
        keys: PathKeys | None = None,
        derive_key: DeriveKey | None = None,
    ) -> None:
        self.index = index
        self.reach = reach
        self.device = DeviceResidency(index, num_ranks)
        self.host = HostResidency(index)
        self._page_size = page_size
        self._host_pool = host_pool
        self._keys = keys
        self._derive_key = derive_key

    # -- hooks -------------------------------------------------------------------------------------------------------

    def write_through(self, node: TreeNode) -> BackupPlan | None:
        """A node is on the device: what of it the host lacks (neither complete nor on the way) and should have."""
        data = self.data(node)
        if self._host_pool is None or data.device_slots is None or data.host_pages is not None:
            return None
        if not self.wants_host_copy(node):
            return None
        return BackupPlan(self.kind, node, self.device_pages_of(data.device_slots))

    def write_back(self, node: TreeNode) -> StorePlan | None:
        """A node is to be safe below the host: the complete host pages that storage lacks of it and of what its pages
        are of no use without. Marks them as on the way; `host.storing` is cleared when the store is settled."""
        pages: list[Int32Array] = []
        page_keys: list[PageKey] = []
        links: list[PageLink] = []
        for needed in self.useless_without(node):
            host_pages = self.data(needed).host_pages
            if host_pages is None or not self.host_ready(needed):
                continue
            lacking = self.host.lacking(host_pages)
            if lacking:
                keys, follows = self.page_keys(needed), self.page_links(needed)
                pages.append(host_pages[lacking])
                page_keys += [keys[i] for i in lacking]
                links += [follows[i] for i in lacking]
        if not pages:
            return None
        host_pages = np.concatenate(pages)
        self.host.storing.update(host_pages.tolist())
        return StorePlan(self.kind, host_pages, tuple(page_keys), tuple(links))

    def prefetch(self, request: PrefetchRequest) -> PrefetchPlan:
        """A prefix is about to be used: what must be loaded, and what only storage can have."""
        needed = self.needed_nodes(request.path)
        nodes = tuple(n for n in needed if self.data(n).device_slots is None)
        pages = [p for n in nodes if (p := self.data(n).host_pages) is not None]
        first = 0 if self.reach is None else max(request.num_pages - self.reach, 0)
        return PrefetchPlan(
            self.kind,
            nodes,
            np.concatenate(pages) if pages else NO_PAGES,
            self.coverage(request.path, with_host=True).missing(first, request.num_pages),
        )

    # -- what is there -----------------------------------------------------------------------------------------------

    def coverage(self, path: Sequence[TreeNode], *, with_host: bool) -> Coverage:
        """The pages of the path on the device; `with_host`: and those that are complete on the host."""
        runs: list[tuple[int, int]] = []
        start = 0
        for node in path:
            end = start + node.num_tokens // self._page_size
            if self.is_there(node, with_host=with_host):
                runs.append(self.run_of(start, end))
            start = end
        return Coverage.of_runs(runs)

    def part(self, path: Sequence[TreeNode], *, with_host: bool) -> Part:
        """This component's say about the usable part of the path."""
        return Part(self.coverage(path, with_host=with_host), self.reach)

    def is_there(self, node: TreeNode, *, with_host: bool) -> bool:
        """True if the node's data is on the device, or, `with_host`, complete on the host."""
        data = self.data(node)
        return data.device_slots is not None or (with_host and self.host_ready(node))

    def host_ready(self, node: TreeNode) -> bool:
        """True if every page of the node is complete on the host."""
        pages = self.data(node).host_pages
        return (
            pages is not None and self._host_pool is not None and self._host_pool.all_ready(pages)
        )

    def storage_candidates(self, first: int, end: int) -> range:
        """The pages of [first, end) that storage may have of this component."""
        return range(first, end)

    # -- keys --------------------------------------------------------------------------------------------------------

    def page_keys(self, node: TreeNode) -> list[PageKey]:
        """Storage keys of the node's host pages."""
        if self._keys is None:
            raise InvariantError("page keys are asked for without a storage")
        keys = self._keys.of_node(node)[self.first_page_in(node) :]
        return keys if self._derive_key is None else [self._derive_key(key) for key in keys]

    def page_links(self, node: TreeNode) -> list[PageLink]:
        """What the node's host pages follow: a Full page the one before it, another the Full page of its tokens."""
        if self._keys is None:
            raise InvariantError("page links are asked for without a storage")
        links = self._keys.links_of(node)
        if self._derive_key is not None:
            keys = self._keys.of_node(node)
            links = [PageLink(key, link.index + 1) for key, link in zip(keys, links, strict=True)]
        return links[self.first_page_in(node) :]

    def key_of_page(self, full_key: PageKey) -> PageKey:
        """This component's key of the page with that Full key. Any thread."""
        return full_key if self._derive_key is None else self._derive_key(full_key)

    # -- what differs between kinds ----------------------------------------------------------------------------------

    @abstractmethod
    def device_pages_of(self, device_slots: Int32Array) -> Int32Array:
        """The rows of the device buffers that hold these slots: int32[num_pages]."""

    @abstractmethod
    def num_slots(self, node: TreeNode) -> int:
        """Device slots that the node takes when it is on the device."""

    def num_device_pages(self) -> int:
        """Pages that nodes have on the device, over all ranks."""
        return self.device.total()

    @abstractmethod
    def wants_host_copy(self, node: TreeNode) -> bool:
        """True if a node on the device should be copied to the host."""

    @abstractmethod
    def useless_without(self, node: TreeNode) -> Sequence[TreeNode]:
        """The node, and those above it without which storage need not have it, from the root down."""

    @abstractmethod
    def needed_nodes(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """The nodes whose data a reader at the end of the path needs, from the root down."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` was cut and `upper` holds its first tokens now: divide what this component keeps on it."""

    def run_of(self, start: int, end: int) -> tuple[int, int]:
        """The pages that a node of the pages [start, end) says something about."""
        return start, end

    def first_page_in(self, node: TreeNode) -> int:
        """The first page of the node that this component keeps."""
        return 0

    # -- locks and use -----------------------------------------------------------------------------------------------

    def readers_nodes(self, node: TreeNode) -> Sequence[TreeNode]:
        """What a reader of the prefix that ends at `node` needs, deepest first. The tree has cut the node across the
        first page of the reach (see `TieredTree.lock`)."""
        if self.reach is None:
            return list(node.ancestors())
        nodes: list[TreeNode] = []
        tokens, needed = 0, self.reach * self._page_size
        for above in node.ancestors():
            if tokens >= needed:
                break
            nodes.append(above)
            tokens += above.num_tokens
        return nodes

    def lock(self, node: TreeNode) -> int:
        """Keep what a reader of the prefix that ends at `node` needs; return slots that stopped being evictable."""
        return sum(self.device.lock(needed) for needed in self.readers_nodes(node))

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock` of the same node; return slots that became evictable."""
        return sum(self.device.unlock(needed) for needed in self.readers_nodes(node))

    def touch(self, node: TreeNode) -> None:
        """The prefix that ends at `node` was used: what its reader needs is the youngest, the deepest first."""
        for needed in self.readers_nodes(node):
            self.device.touch(needed)
            self.host.touch(needed)

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self, nodes: Iterable[TreeNode]) -> None:
        """Verify this component's facts on every node; raises InvariantError."""
        nodes = list(nodes)
        self.device.check_invariants(nodes)
        self.host.check_invariants(nodes)
        for node in nodes:
            data = self.data(node)
            if data.device_slots is not None and len(data.device_slots) != self.num_slots(node):
                raise InvariantError(
                    f"{self.kind.value}: {node!r} has {len(data.device_slots)} device slots"
                )
            num_pages = node.num_tokens // self._page_size - self.first_page_in(node)
            if data.host_pages is not None and len(data.host_pages) != num_pages:
                raise InvariantError(
                    f"{self.kind.value}: {node!r} has {len(data.host_pages)} host pages"
                )
            self.check_node(node)

    @abstractmethod
    def check_node(self, node: TreeNode) -> None:
        """What else must be true of a node; raises InvariantError."""

    def data(self, node: TreeNode) -> ComponentData:
        """What this component keeps on the node."""
        return node.data[self.index]


class PagedComponent(TreeComponent):
    """A component that keeps something for every token: a node's slots are token slots in whole pages."""

    def device_pages_of(self, device_slots: Int32Array) -> Int32Array:
        """The pages of whole-page runs of token slots: int32[len(device_slots) / page_size]."""
        return device_slots[:: self._page_size] // np.int32(self._page_size)

    def num_slots(self, node: TreeNode) -> int:
        """One for each token."""
        return node.num_tokens

    def num_device_pages(self) -> int:
        """Pages that nodes have on the device, over all ranks."""
        return self.device.total() // self._page_size

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """Slots, pages and lock of the first tokens go to `upper`."""
        self.data(upper).kept = self.data(lower).kept
        self.device.split(upper, lower)
        self.host.split(upper, lower, upper.num_tokens // self._page_size)
