"""The protocol between host memory (L2) and a storage (L3).

A storage maps a `PageKey` to the bytes of one page of one component. It knows nothing of trees,
devices or jax, and an instance serves exactly one namespace (model, weights, page size, dtype,
byte layout), so that a page of another namespace can only ever be a miss. All data crosses as
plain contiguous bytes; the caller moves them to a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import StorageUnavailableError
from ..page_key import StorageNamespace as StorageNamespace
from ..types import PageKey, PageLink
from .stats import StorageStats

Payload = Sequence[npt.NDArray[Any]]
"""One page as C-contiguous arrays, whose bytes one after the other are the page (no copy to join
them).
"""

PageBytes = npt.NDArray[np.uint8]
"""One page read back: uint8[page_bytes], the caller's own. Nobody else writes to its memory while
it, or what was made of it, is there.
"""


class HiCacheStorage(ABC):
    """A key-value store of pages.

    Rules for an implementation:

    1. Every method may be called from several worker threads at once, and other processes may use
       the same storage.
    2. A page is visible only when it is complete; a reader gets the whole page or None.
    3. What is read is verified against the key and the namespace. Short, damaged, foreign or
       unreadable is a miss (None), is counted, and does not stay in the way of the next `set`.
    4. A failure of one page never fails its neighbours in the batch, and never raises: it is a
       False or a None. Only a wrong call (key of the wrong length, payload of the wrong size,
       closed) raises ValueError, before anything is changed; `payload.py` has the checks.
    5. `set` of a key that is already there is success; the content of equal keys is equal by
       construction.
    """

    namespace: StorageNamespace

    @abstractmethod
    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """Read pages; one entry per key, None for a miss."""

    @abstractmethod
    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """Write pages; True for each page that is now stored (written, or there already)."""

    def set_linked(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Payload],
        links: Sequence[PageLink | None],
    ) -> list[bool]:
        """As `set`, for a storage that also keeps which page each one follows (None: not known). Others ignore it.

        The link is for people and for choosing what to remove; it is no part of a page's identity.
        """
        return self.set(keys, pages)

    @abstractmethod
    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Probe pages without reading them. A True is a hint: a later `get` may still miss."""

    @abstractmethod
    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """Remove pages; True for each page that was there and is gone. Removing what is not there
        is no error.
        """

    def iter_keys(self) -> Iterator[PageKey]:
        """The page of this namespace that each next step finds; reads what it must for that, page by page.

        Any thread. Raises OSError on the way, and a storage that cannot list its pages StorageUnavailableError.
        """
        raise StorageUnavailableError(f"{type(self).__name__} cannot list its pages")

    def scan(self) -> Iterator[PageKey | None]:
        """As `iter_keys`, but each step looks at one page only, and gives None for one of another namespace: whoever
        rests or stops between steps can do so there too. For a storage whose pages lie among others'.
        """
        return self.iter_keys()

    def clear(self) -> int:
        """Remove every page of this namespace; how many were removed. Raises StorageUnavailableError if its pages
        cannot be listed.
        """
        try:
            keys = list(self.iter_keys())
        except OSError as error:
            raise StorageUnavailableError(f"the pages cannot be listed: {error}") from error
        return sum(self.delete(keys))

    def stats(self) -> StorageStats:
        """What this instance did so far, for the metrics. A storage that does not count reports zeros."""
        return StorageStats()

    @abstractmethod
    def close(self) -> None:
        """Release handles. Idempotent; later calls of other methods raise ValueError."""
