"""Opens a storage by name. A new kind is one entry in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from ..errors import HiCacheConfigError
from ..page_key import StorageNamespace
from .base import HiCacheStorage
from .local_file import LocalFileStorage
from .root import prepare_root

StorageFactory = Callable[[str | Path, StorageNamespace], HiCacheStorage]
"""(where, for whom) to an open storage; raises HiCacheConfigError if the place cannot be used."""


def _open_file_storage(root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
    return LocalFileStorage(prepare_root(root), namespace)


STORAGE_FACTORIES: Mapping[str, StorageFactory] = MappingProxyType({"file": _open_file_storage})
"""The kinds that ship with the package. To add one, pass `{**STORAGE_FACTORIES, "name":
factory}`.
"""


def open_storage(
    kind: str,
    root: str | Path,
    namespace: StorageNamespace,
    factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
) -> HiCacheStorage:
    """An open storage of the named kind.

    Raises HiCacheConfigError for an unknown kind or a place that cannot be used.
    """
    factory = factories.get(kind)
    if factory is None:
        raise HiCacheConfigError(f"storage kind {kind!r} is not one of {sorted(factories)}")
    return factory(root, namespace)
