"""The contract suite over the storages that ship with the package."""

from __future__ import annotations

from pathlib import Path

from storage_contract import StorageContract

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.memory import MemoryStorage
from sgl_jax_hicache.bench.hybrid_storage import MemoryFolder, MemoryFolderStorage


class TestMemoryStorage(StorageContract):
    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        return MemoryStorage(namespace)


class TestLocalFileStorage(StorageContract):
    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        return LocalFileStorage(place, namespace)


class TestLocalFileStorageWithFsync(StorageContract):
    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        return LocalFileStorage(place, namespace, fsync=True)


class TestMemoryFolderStorage(StorageContract):
    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        return MemoryFolderStorage(MemoryFolder(), namespace)
