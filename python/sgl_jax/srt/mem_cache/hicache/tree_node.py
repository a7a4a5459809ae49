"""One node of the prefix tree and what a component keeps on it. Data only; the rules are the tree's and components'."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .types import PageKey

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class KeyNamespace:
    """Who may share a path below the root."""

    extra_key: str | None
    dp_rank: int


@dataclass(slots=True)
class ComponentData:
    """One component's part of a node.

    device_slots: int32[n] or None (a token slot for each token, or the one state slot); host_pages: int32[num_pages] or
    None (their bytes may still be on the way: the host pool knows); device_lock: how many users keep the device part;
    in_storage: storage had every page when the host copy was dropped (a hint, for a flush); kept: worth a host copy;
    mirror_dropped: the host copy made room for others while the slots stay: not copied again before they go.
    """

    device_slots: Int32Array | None = None
    host_pages: Int32Array | None = None
    device_lock: int = 0
    in_storage: bool = False
    kept: bool = False
    mirror_dropped: bool = False


class TreeNode:
    """A run of whole pages below `parent`. `key` is the encoded tokens of the run (see `token_key`); `page_keys` are
    the storage keys of its pages, computed when they are first needed."""

    __slots__ = ("children", "data", "id", "key", "namespace", "num_tokens", "page_keys", "parent")

    def __init__(
        self,
        node_id: int,
        parent: TreeNode | None,
        namespace: KeyNamespace,
        key: bytes,
        num_tokens: int,
        num_components: int,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.namespace = namespace
        self.key = key
        self.num_tokens = num_tokens
        self.page_keys: list[PageKey] | None = None
        self.children: dict[Hashable, TreeNode] = {}
        self.data = [ComponentData() for _ in range(num_components)]

    def __repr__(self) -> str:
        return (
            f"TreeNode(id={self.id}, num_tokens={self.num_tokens}, children={len(self.children)})"
        )

    def ancestors(self) -> Iterator[TreeNode]:
        """This node and every node above it, without the root, deepest first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path(self) -> list[TreeNode]:
        """From below the root down to this node."""
        return list(self.ancestors())[::-1]
