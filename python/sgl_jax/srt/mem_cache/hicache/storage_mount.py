"""L3 as one thing: the open storages of all components at one path, and who opens them.

A cache has one mount or none; it can be taken away and given back while the cache serves. Only files may come and go:
what their pages are called depends on the model alone, so the same prompt finds them again under any mount.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .page_key import StorageNamespace, companion_key
from .storage.base import HiCacheStorage
from .storage.registry import StorageFactory, open_storage
from .storage_census import StorageCensus
from .types import ComponentKind, PageKey, PageLayout


@dataclass(frozen=True)
class ModelIdentity:
    """Whose KV it is. `model_version` names the weights, not the served name: it changes when they do."""

    model_id: str
    model_version: str


@dataclass(frozen=True)
class StorageMount:
    """Open storages, one for each component. `max_bytes`: the bound on the model's folder, 0 for none. `census`: counts
    their pages, and is closed with them."""

    path: Path
    max_bytes: int
    storages: Mapping[ComponentKind, HiCacheStorage]
    census: StorageCensus

    def clear(self) -> int:
        """Remove every page of this model in this byte layout; how many. Blocks. Raises StorageUnavailableError if a
        storage cannot list its pages."""
        return sum(storage.clear() for storage in self.storages.values())

    def close(self) -> None:
        """Close every storage. Idempotent."""
        self.census.close()
        for storage in self.storages.values():
            storage.close()


@dataclass(frozen=True)
class DetachedStorage:
    """A mount that a cache has let go of. `drained` is done once nothing reads or writes there any more; then whoever
    detached it may close it, or give it back."""

    mount: StorageMount
    drained: Future[None]


class StorageOpener:
    """Opens the storages of one model's components, and names their pages.

    `identify` is asked when a name is needed first, because knowing a model by its weights can take seconds; `kind` is
    the kind of storage, `factories` knows how to open it. `open` may be called from any thread.
    """

    def __init__(
        self,
        layouts: Mapping[ComponentKind, PageLayout],
        identify: Callable[[], ModelIdentity],
        kind: str,
        factories: Mapping[str, StorageFactory],
    ) -> None:
        self._layouts = layouts
        self._identify = identify
        self._kind = kind
        self._factories = factories

    @cached_property
    def namespaces(self) -> dict[ComponentKind, StorageNamespace]:
        """What the pages of each component belong to."""
        identity = self._identify()
        return {
            kind: StorageNamespace(
                model_id=identity.model_id,
                model_version=identity.model_version,
                page_size=layout.page_size,
                kv_dtype=layout.buffers[0].dtype,
                layout_id=layout.layout_id,
                page_bytes=layout.page_bytes,
            )
            for kind, layout in self._layouts.items()
        }

    def derive_key(self, kind: ComponentKind) -> Callable[[PageKey], PageKey]:
        """How a component beside Full names a page, from the key of the Full page."""
        return lambda full_key: self._derivations[kind](full_key)

    @cached_property
    def _derivations(self) -> dict[ComponentKind, Callable[[PageKey], PageKey]]:
        return {kind: companion_key(namespace) for kind, namespace in self.namespaces.items()}

    def open(self, path: Path, max_bytes: int) -> StorageMount:
        """Check the path and open it for every component. Raises HiCacheConfigError, with nothing left open, if it
        cannot be used."""
        storages: dict[ComponentKind, HiCacheStorage] = {}
        try:
            for kind, namespace in self.namespaces.items():
                storages[kind] = open_storage(
                    self._kind, path, namespace, self._factories, max_bytes=max_bytes
                )
        except BaseException:
            for storage in storages.values():
                storage.close()
            raise
        return StorageMount(path, max_bytes, storages, StorageCensus(storages))
