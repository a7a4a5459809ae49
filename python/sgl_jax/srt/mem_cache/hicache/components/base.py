"""What a kind of attention tells the tree: which of a node's pages move, and which prefixes it can use.

A component receives nodes and returns frozen plans; the tree submits them. The three hooks are called by the tree and
by nobody else. A component never sees a transfer, a file or the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..tree_node import TreeNode
from ..types import ComponentKind, PageKey
from .residency import DeviceResidency, HostResidency

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class BackupPlan:
    """Copy these device pages of `node` to the host. device_pages: int32[num_pages], rank-local."""

    component: ComponentKind
    node: TreeNode
    device_pages: Int32Array


@dataclass(frozen=True)
class StorePlan:
    """Write these host pages to storage, in this order (ancestors first)."""

    component: ComponentKind
    host_pages: Int32Array
    page_keys: tuple[PageKey, ...]


@dataclass(frozen=True)
class PrefetchRequest:
    """A prefix of `num_tokens` tokens is about to be used. `path`: the nodes the tree has of it, from the root down."""

    path: Sequence[TreeNode]
    num_tokens: int


@dataclass(frozen=True)
class PrefetchPlan:
    """What must move up for that: `load_nodes` from host to device (with the pages to read), and the page numbers of
    the prefix, [first, end), that only storage can have."""

    component: ComponentKind
    load_nodes: tuple[TreeNode, ...]
    host_pages: Int32Array
    storage_pages: range


class TreeComponent(ABC):
    """One attention kind on the tree. `index` is its place in `TreeNode.data`; scheduler thread only."""

    kind: ComponentKind
    index: int
    device: DeviceResidency
    host: HostResidency

    # -- hooks -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def write_through(self, node: TreeNode) -> BackupPlan | None:
        """A node is on the device: what of it the host lacks, or None."""

    @abstractmethod
    def write_back(self, node: TreeNode) -> StorePlan | None:
        """A node is to be safe below the host: what storage lacks of it and of what lies above it, or None."""

    @abstractmethod
    def prefetch(self, request: PrefetchRequest) -> PrefetchPlan:
        """A prefix is about to be used: what must be loaded, and what only storage can have."""

    # -- the usable prefix -------------------------------------------------------------------------------------------

    @abstractmethod
    def largest_legal_border(self, path: Sequence[TreeNode], limit: int, *, with_host: bool) -> int:
        """The greatest number of tokens <= `limit` at which this component could resume, a page border.

        `with_host`: pages that are complete on the host count too, not only those on the device.
        """

    # -- changes of the tree -----------------------------------------------------------------------------------------

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` was cut and `upper` holds its first tokens now: divide what this component keeps on it."""

    @abstractmethod
    def lock(self, node: TreeNode) -> int:
        """Keep what a reader of the prefix that ends at `node` needs; return tokens that stopped being evictable."""

    @abstractmethod
    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock` of the same node; return tokens that became evictable."""

    @abstractmethod
    def touch(self, node: TreeNode) -> None:
        """The prefix that ends at `node` was used."""

    @abstractmethod
    def check_invariants(self, nodes: Iterable[TreeNode]) -> None:
        """Verify this component's facts on every node; raises InvariantError."""


def usable_prefix(
    components: Sequence[TreeComponent],
    path: Sequence[TreeNode],
    limit: int,
    *,
    with_host: bool,
) -> int:
    """The greatest page border <= `limit` (tokens) that is legal for every component at once; 0 if there is none.

    The only place that answers this, for match, prefetch and load alike. Each component lowers the border to its own
    greatest legal one until all agree, which finds the greatest element of the intersection, never just the minimum of
    the components' maxima.
    """
    border = limit
    while True:
        start = border
        for component in components:
            border = component.largest_legal_border(path, border, with_host=with_host)
        if border == start:
            return border
