"""The file storage: one verified `.npy` per page on a local (or shared POSIX) file system.

    <root>/<safe model id>/<page size>/<first two hex digits>/<page key>.npy

What is where: `page_file` the bytes of a file, `folders` the way to it, `temp_file` and `sweep` what an interrupted
write leaves, `file_ops` the system calls. This module orders them:

* A write goes to a temporary file in the page's own folder and becomes visible by one rename. A process may be killed
  at any instant: what is visible is whole, and what is not is removed by the next start. After a power loss a visible
  file may still be empty or torn (unless `fsync` is on); reading verifies, so it is a miss.
* A read verifies everything. What is short, damaged, foreign, no regular file or unreadable is counted and moved out of
  the way.
* An error never leaves a call, except ValueError for a wrong one. A storage that cannot be written to says so once,
  keeps trying with every page, and says so again when it works.

Any thread; any number of processes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import numpy as np

from ..errors import InvariantError, StorageCorruptionError
from ..page_key import StorageNamespace, namespace_digest
from ..types import PageKey
from .base import HiCacheStorage, PageBytes, Payload
from .file_ops import FileOps, read_full, write_all
from .folders import QUARANTINE, move_away, open_folder, safe_name
from .page_file import PageFileFormat
from .page_info import PageFileInfo, describe
from .payload import check_keys, payload_views
from .stats import StatsCounter, StorageStats
from .sweep import iter_pages, page_name, shard_name, sweep_stale_temps
from .temp_file import TempNames

logger = logging.getLogger(__name__)

_BAD_ENTRY = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EIO})
"""Errors of opening or reading that lie in the entry itself; all others (too many files, a stale mount) may pass."""


class LocalFileStorage(HiCacheStorage):
    """Pages of one namespace in files below `root`. Check `root` with `prepare_root` first."""

    def __init__(
        self,
        root: Path,
        namespace: StorageNamespace,
        *,
        fsync: bool = False,
        page_format: PageFileFormat | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Opens the storage and removes what dead writers left in its folder.

        `fsync` forces file and folder to the disk before a page counts as stored. Raises ValueError for a namespace whose
        pages no file can hold, never OSError.
        """
        self.namespace = namespace
        self.root = root.absolute()
        self._names = (safe_name(namespace.model_id), str(namespace.page_size))
        self._format = PageFileFormat(namespace) if page_format is None else page_format
        self._ops = FileOps() if ops is None else ops
        self._fsync = fsync
        self._temp_names = TempNames()
        self._rejects = itertools.count()
        self._reject_token = secrets.token_hex(4)
        self._counter = StatsCounter()
        self._closed = False
        self._sweep()

    # -- HiCacheStorage ---------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """See `HiCacheStorage.get`. Raises ValueError for a wrong key or a closed storage."""
        self._check_open()
        check_keys(keys)
        return [self._get_page(key) for key in keys]

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """See `HiCacheStorage.set`. Raises ValueError for a wrong key, a wrong payload or a closed storage."""
        self._check_open()
        views = payload_views(keys, pages, self.namespace.page_bytes)
        return [self._set_page(key, page) for key, page in zip(keys, views, strict=True)]

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.exists`: looks at kind and size of the file. One probe per key, nothing is listed."""
        self._check_open()
        check_keys(keys)
        return [self._exists_page(key) for key in keys]

    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.delete`."""
        self._check_open()
        check_keys(keys)
        return [self._delete_page(key) for key in keys]

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        self._closed = True

    # -- looking inside ---------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the pages of this model and page size are; other namespaces of the model share it."""
        return self.root.joinpath(*self._names)

    def path_of(self, key: PageKey) -> Path:
        """The file that holds, or would hold, a page."""
        return self.folder / shard_name(key) / page_name(key)

    def stats(self) -> StorageStats:
        """What this instance has done so far."""
        return self._counter.snapshot()

    def iter_keys(self) -> Iterator[PageKey]:
        """Keys of the visible pages of this namespace, in order, as far as their headers tell. Reads every header."""
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                with closing(iter_pages(folder_fd)) as pages:
                    for shard_fd, name, key in pages:
                        if self._is_own(shard_fd, name):
                            yield key
        except FileNotFoundError:
            return

    def check_invariants(self) -> None:
        """Every visible file in the folder, of this namespace or another, is whole and is the page its name says.

        Reads everything. Raises InvariantError with all offenders.
        """
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                keys = [key for _, _, key in iter_pages(folder_fd)]
        except FileNotFoundError:
            return
        problems = [problem for key in keys if (problem := self._problem_of(key)) is not None]
        if problems:
            raise InvariantError(f"{len(problems)} of {len(keys)} files: " + "; ".join(problems))

    # -- reading ----------------------------------------------------------------------------------------------------

    def _get_page(self, key: PageKey) -> PageBytes | None:
        self._counter.add(gets=1)
        try:
            with self._shard(key, create=False) as shard_fd:
                page = self._read_page(shard_fd, key)
        except FileNotFoundError:
            self._counter.add(misses=1)
            return None
        except StorageCorruptionError:
            self._counter.add(corrupt_gets=1)
            return None
        except OSError as error:
            logger.debug("page %s cannot be read: %s", key.hex(), error)
            self._counter.add(read_errors=1)
            return None
        self._counter.add(hits=1, hit_bytes=page.nbytes)
        return page

    def _read_page(self, shard_fd: int, key: PageKey) -> PageBytes:
        """Raises OSError, and StorageCorruptionError after moving the entry out of the way."""
        name = page_name(key)
        try:
            fd = self._ops.open_for_read(name, shard_fd)
        except OSError as error:
            if error.errno in _BAD_ENTRY:
                self._reject(key, shard_fd, f"cannot be opened: {error.strerror}", None)
            raise
        try:
            return self._read_open_page(fd, key)
        except StorageCorruptionError as error:
            self._reject(key, shard_fd, str(error), os.fstat(fd))
            raise
        finally:
            os.close(fd)

    def _read_open_page(self, fd: int, key: PageKey) -> PageBytes:
        """Raises StorageCorruptionError if the open file is not this page, OSError for what may pass."""
        status = os.fstat(fd)
        if not self._is_whole(status):
            raise StorageCorruptionError(
                f"expected a regular file of {self._format.file_bytes} bytes,"
                f" found mode {status.st_mode:#o} and {status.st_size} bytes"
            )
        header = bytearray(self._format.header_bytes)
        page: PageBytes = np.empty(self.namespace.page_bytes, dtype=np.uint8)
        try:
            count = read_full(self._ops, fd, [memoryview(header), memoryview(page)])
        except OSError as error:
            if error.errno in _BAD_ENTRY:
                raise StorageCorruptionError(f"cannot be read: {error.strerror}") from error
            raise
        if count != self._format.file_bytes:
            raise StorageCorruptionError(f"expected {self._format.file_bytes} bytes, read {count}")
        self._format.verify(key, bytes(header), page)
        return page

    def _exists_page(self, key: PageKey) -> bool:
        try:
            with self._shard(key, create=False) as shard_fd:
                return self._is_whole(os.lstat(page_name(key), dir_fd=shard_fd))
        except OSError:
            return False

    # -- writing ----------------------------------------------------------------------------------------------------

    def _set_page(self, key: PageKey, payload: Sequence[memoryview]) -> bool:
        try:
            written = self._write_into_shard(key, payload)
        except OSError as error:
            if self._counter.write_failed(str(error)):
                logger.warning("storage %s cannot be written to: %s", self.folder, error)
            return False
        if not written:
            self._counter.add(already_stored=1)
            return True
        self._counter.add(sets=1, set_bytes=self.namespace.page_bytes)
        if self._counter.write_worked():
            logger.warning("storage %s can be written to again", self.folder)
        return True

    def _write_into_shard(self, key: PageKey, payload: Sequence[memoryview]) -> bool:
        """False if the page was there already. Raises OSError. Removed folders are made again, once."""
        for is_last in (False, True):
            try:
                with self._shard(key, create=True) as shard_fd:
                    if self._is_stored(shard_fd, key):
                        return False
                    self._write_page(shard_fd, key, payload)
                    return True
            except FileNotFoundError:
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def _is_stored(self, shard_fd: int, key: PageKey) -> bool:
        """Whether the entry looks like the page. A folder in its place, which no rename could replace, is moved."""
        try:
            status = os.lstat(page_name(key), dir_fd=shard_fd)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            self._reject(key, shard_fd, "is a folder", status)
        return self._is_whole(status)

    def _write_page(self, shard_fd: int, key: PageKey, payload: Sequence[memoryview]) -> None:
        temp_name = self._temp_names.new(key.hex())
        buffers = self._format.encode(key, payload)
        fd = self._ops.create(temp_name, shard_fd)
        try:
            try:
                write_all(self._ops, fd, buffers)
                if self._fsync:
                    self._ops.fsync(fd)
            finally:
                os.close(fd)
            self._ops.replace(temp_name, page_name(key), shard_fd)
        except BaseException:
            with suppress(OSError):  # the first error counts; what stays is swept at the next start
                os.unlink(temp_name, dir_fd=shard_fd)
            raise
        if self._fsync:
            self._ops.fsync(shard_fd)

    def _delete_page(self, key: PageKey) -> bool:
        try:
            with self._shard(key, create=False) as shard_fd:
                os.unlink(page_name(key), dir_fd=shard_fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.debug("page %s cannot be removed: %s", key.hex(), error)
            self._counter.add(delete_errors=1)
            return False
        self._counter.add(deletes=1)
        return True

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _shard(self, key: PageKey, *, create: bool) -> AbstractContextManager[int]:
        return open_folder(self.root, (*self._names, shard_name(key)), create=create)

    def _is_whole(self, status: os.stat_result) -> bool:
        return stat.S_ISREG(status.st_mode) and status.st_size == self._format.file_bytes

    def _is_own(self, shard_fd: int, name: str) -> bool:
        try:
            fd = self._ops.open_for_read(name, shard_fd)
        except OSError:
            return False
        try:
            if not self._is_whole(os.fstat(fd)):
                return False
            return self._format.is_own(os.pread(fd, self._format.header_bytes, 0))
        finally:
            os.close(fd)

    def _problem_of(self, key: PageKey) -> str | None:
        path = self.path_of(key)
        try:
            info: PageFileInfo = describe(path)
        except FileNotFoundError:
            return None  # deleted since it was listed
        except (OSError, StorageCorruptionError) as error:
            return str(error)
        if info.page_key != key:
            return f"{path}: holds the page {info.page_key.hex()}"
        own = info.namespace_digest == namespace_digest(self.namespace)
        if own and info.file_bytes != self._format.file_bytes:
            return f"{path}: {info.file_bytes} bytes, expected {self._format.file_bytes}"
        return None

    def _reject(
        self, key: PageKey, shard_fd: int, reason: str, seen: os.stat_result | None
    ) -> None:
        """Moves a bad entry out of the way, unless another writer has put a new one there since it was `seen`."""
        self._counter.add(corrupt=1)
        name, target = page_name(key), f"{key.hex()}.{self._reject_token}.{next(self._rejects)}"
        logger.warning("page file %s is rejected: %s", self.path_of(key), reason)
        try:
            now = os.lstat(name, dir_fd=shard_fd)
            if seen is not None and (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino):
                return
            with open_folder(self.root, (*self._names, QUARANTINE), create=True) as quarantine_fd:
                move_away(name, shard_fd, quarantine_fd, target, self._format.file_bytes)
        except FileNotFoundError:
            return  # somebody else was faster
        except OSError as error:
            logger.warning("page file %s cannot be moved away: %s", self.path_of(key), error)

    def _sweep(self) -> None:
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                self._counter.add(stale_temps_removed=sweep_stale_temps(folder_fd))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("storage %s cannot be swept: %s", self.folder, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the storage {self.folder} is closed")
