"""Names that every layer shares: tiers, component kinds, page layouts and the records of a transfer.

No jax here and no behaviour beyond self-checks, so that every other module may import this one. Units are in the
names: `slots` are token positions, `pages` are runs of `page_size` tokens, `states` are recurrent states; `_bytes` are
bytes and `_s` seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

TransferId = NewType("TransferId", int)
"""Unique per controller and never reused, so that a late completion can never be taken for another attempt."""

PageKey = NewType("PageKey", bytes)
"""The 32-byte chained digest that names one page of one component in storage (see `page_key`)."""


@dataclass(frozen=True)
class PageLink:
    """Where a page stands in its chain: `index` pages of the prompt come before it, the last of which is `parent`
    (None: the page is the first).
    """

    parent: PageKey | None
    index: int


class _Name(enum.Enum):
    """Members are compared, and so hashed, by identity: Enum's own hash is a Python call on every look-up."""

    __hash__ = object.__hash__


class Tier(_Name):
    """Where the tokens of a prompt came from; COMPUTED closes the sum to the prompt's length."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    COMPUTED = "computed"


class ComponentKind(_Name):
    """The attention types whose per-token data a tree node can own."""

    FULL = "full"
    SWA = "swa"
    RECURRENT = "recurrent"


class TransferKind(_Name):
    """The four moves between tiers, named by direction."""

    BACKUP = "backup"  # device -> host (D2H)
    LOAD = "load"  # host -> device (H2D)
    STORE = "store"  # host -> storage
    FETCH = "fetch"  # storage -> host


@dataclass(frozen=True)
class BufferLayout:
    """One device buffer that a page owns a row of.

    `row_shape` is the shape of one page in this buffer (the buffer's shape without its leading page axis), as held by
    one shard; `dtype` is numpy's or ml_dtypes' name ("float32", "bfloat16", "float8_e4m3fn").
    """

    name: str
    row_shape: tuple[int, ...]
    dtype: str
    row_bytes: int


@dataclass(frozen=True)
class PageLayout:
    """All the bytes that one page of a component owns, in the order in which they are stored.

    Derived from the device buffers themselves (never from model dimensions), so that a host row can not be narrower
    than a device row. `shard_index`/`shard_count` say which part of a tensor-parallel page this process holds.
    """

    component: ComponentKind
    page_size: int
    buffers: tuple[BufferLayout, ...]
    shard_index: int = 0
    shard_count: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all buffers of this shard."""
        return sum(buffer.row_bytes for buffer in self.buffers)

    @property
    def layout_id(self) -> str:
        """A readable, canonical name of the byte layout; equal names mean interchangeable bytes."""
        rows = ";".join(
            f"{b.name}:{b.dtype}[{','.join(map(str, b.row_shape))}]" for b in self.buffers
        )
        return (
            f"hicache-page-v1|{self.component.value}|page={self.page_size}"
            f"|shard={self.shard_index}/{self.shard_count}|{rows}"
        )


@dataclass(frozen=True)
class TransferResult:
    """How one transfer ended; handed out once, by the poll that settled it.

    `ok_pages[i]` tells whether `host_pages[i]` arrived (STORE: is in storage). `error` is the first failure's text, or
    None. `again` (STORE): storage refused some of these pages before. `detached`: the storage that it was about was
    detached meanwhile.
    """

    transfer_id: TransferId
    kind: TransferKind
    component: ComponentKind
    host_pages: tuple[int, ...]
    ok_pages: tuple[bool, ...]
    error: str | None
    num_bytes: int
    seconds: float
    again: bool = False
    detached: bool = False

    @property
    def ok(self) -> bool:
        """True if every page arrived."""
        return all(self.ok_pages)

    @property
    def failed_pages(self) -> list[int]:
        """The host pages that did not arrive."""
        return [page for page, ok in zip(self.host_pages, self.ok_pages, strict=True) if not ok]


@dataclass(frozen=True)
class LookupResult:
    """What storage has of a prompt (a hint, see `exists`): of each component, page number -> key.

    Of the Full pages those in an unbroken run from the first that was asked for; `num_asked` Full pages were. Nothing,
    if the storage has been detached meanwhile.
    """

    transfer_id: TransferId
    found: Mapping[ComponentKind, Mapping[int, PageKey]]
    num_asked: int
    error: str | None
    seconds: float
    detached: bool = False


@dataclass(frozen=True)
class TierTokens:
    """How many tokens of one prompt each tier served; the four add up to the prompt's length."""

    device: int = 0
    host: int = 0
    storage: int = 0
    computed: int = 0

    @property
    def cached(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.host + self.storage

    def __add__(self, other: TierTokens) -> TierTokens:
        """The tokens of both."""
        return TierTokens(
            self.device + other.device,
            self.host + other.host,
            self.storage + other.storage,
            self.computed + other.computed,
        )
