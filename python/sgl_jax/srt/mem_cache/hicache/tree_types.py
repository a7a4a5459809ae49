"""The typed parameters and results of the prefix cache, named as the sgl-jax engine names them.

All index arrays are int32, rank-local (per data-parallel shard) and count token slots, unless a name says pages. The
engine may pass its own classes of the same names: only attributes are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .token_key import TokenIds

if TYPE_CHECKING:
    from .tree_node import TreeNode

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RadixKey:
    """What is looked up: token ids, and who may share them.

    `extra_key` isolates tenants and adapters, `dp_rank` data-parallel shards: keys that differ in either never share.
    """

    token_ids: TokenIds
    extra_key: str | None = None
    dp_rank: int | None = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __getitem__(self, index: slice) -> RadixKey:
        return RadixKey(self.token_ids[index], self.extra_key, self.dp_rank)


@dataclass(frozen=True)
class MatchPrefixParams:
    """`req` is the request that asks, if one does. `cow_recurrent`: prepare the copy of a matched recurrent state.

    `full_only`: report what the Full component alone has, whatever the others lack.
    """

    key: RadixKey
    cow_recurrent: bool = False
    req: Any = None
    full_only: bool = False


class MatchResult(NamedTuple):
    """The longest usable prefix.

    device_indices: int32[n] token slots on the device, n a multiple of page_size; last_device_node: the node that ends
    there (lock it to keep it); last_host_node: the node that ends the host part; host_hit_length: tokens beyond
    `device_indices` that a load-back can bring.
    """

    device_indices: Int32Array
    last_device_node: TreeNode
    last_host_node: TreeNode
    best_match_node: TreeNode
    host_hit_length: int = 0
    recurrent_branching_seqlen: int | None = None


@dataclass(frozen=True)
class InsertParams:
    """`value`: int32[len(key)] token slots that hold the key's KV.

    The first `protected_len` of them are the tree's own already (a matched prefix); of the rest the tree keeps what it
    lacks and frees what it has. `states`: recurrent states that the tree takes over or frees, as (tokens consumed,
    state slot). `keep_tail`: a later prompt may continue where the key ends, so its last window is worth keeping.
    """

    key: RadixKey
    value: Int32Array
    protected_len: int = 0
    states: Sequence[tuple[int, int]] = ()
    keep_tail: bool = True


class InsertResult(NamedTuple):
    """`prefix_len`: tokens that were on the device already; `last_node`: the node that ends the inserted key."""

    prefix_len: int
    last_node: TreeNode


@dataclass(frozen=True)
class EvictParams:
    """How much to free of each kind on one rank: Full tokens, SWA tokens, recurrent states."""

    num_tokens: int
    swa_num_tokens: int = 0
    dp_rank: int = 0
    recurrent_num: int = 0


@dataclass(frozen=True)
class EvictResult:
    """How many Full tokens, SWA tokens and recurrent states were really freed."""

    num_tokens: int
    swa_num_tokens: int = 0
    recurrent_num: int = 0


@dataclass(frozen=True)
class DecLockRefParams:
    """What a lock took beyond the path to the root, so that the unlock releases exactly that."""

    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class IncLockRefResult:
    """`delta`: change of the evictable size in tokens (negative when a lock protects more)."""

    delta: int
    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: frozenset[int] = field(default_factory=frozenset)

    def to_dec_params(self) -> DecLockRefParams:
        """The parameters that undo this lock."""
        return DecLockRefParams(self.swa_uuid_for_lock, self.skip_lock_node_ids)
