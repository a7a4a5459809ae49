"""Opens a storage by name. A new kind is one entry in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import HiCacheConfigError
from ..page_key import StorageNamespace
from .base import HiCacheStorage
from .local_file import LocalFileStorage
from .root import prepare_root

StorageFactory = Callable[[str | Path, StorageNamespace], HiCacheStorage]
"""(where, for whom) to an open storage; raises HiCacheConfigError if the place cannot be used."""


@dataclass(frozen=True)
class FileStorageFactory:
    """Opens a `LocalFileStorage` with the given bound on the model's folder; 0 is no bound."""

    max_bytes: int = 0

    def __call__(self, root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
        """An open storage; see `StorageFactory`."""
        return LocalFileStorage(prepare_root(root), namespace, max_bytes=self.max_bytes)

    def bounded(self, max_bytes: int) -> StorageFactory:
        """The same with a bound. A factory without this method has storages that keep none."""
        return replace(self, max_bytes=max_bytes)


STORAGE_FACTORIES: Mapping[str, StorageFactory] = MappingProxyType({"file": FileStorageFactory()})
"""The kinds that ship with the package. To add one, pass `{**STORAGE_FACTORIES, "name":
factory}`.
"""


def open_storage(
    kind: str,
    root: str | Path,
    namespace: StorageNamespace,
    factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
    *,
    max_bytes: int = 0,
) -> HiCacheStorage:
    """An open storage of the named kind; `max_bytes` bounds what it keeps, 0 is no bound.

    Raises HiCacheConfigError for an unknown kind, a bound on a kind that keeps none, or a place that cannot be used.
    """
    factory = factories.get(kind)
    if factory is None:
        raise HiCacheConfigError(f"storage kind {kind!r} is not one of {sorted(factories)}")
    if max_bytes:
        bounded = getattr(factory, "bounded", None)
        if bounded is None:
            raise HiCacheConfigError(
                f"--hicache-storage-max-bytes {max_bytes}: the storage kind {kind!r} keeps no bound; remove the flag"
            )
        factory = bounded(max_bytes)
    return factory(root, namespace)
