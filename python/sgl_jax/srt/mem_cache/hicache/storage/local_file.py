"""The file storage: one verified `.npy` per page on a local (or shared POSIX) file system.

    <root>/<safe model id>/<page size>/<first two hex digits>/<page key>.npy

What is where: `page_file` and `page_io` one file, `folders` the way to it, `temp_file` and `sweep`
what an interrupted write leaves, `bound` and what stands below it how large the folder may grow,
`file_ops` the system calls. This module orders them:

* A write goes to a temporary file in the page's own folder and becomes visible by one rename. A
  process may be killed at any instant: what is visible is whole, and what is not is removed by the
  next start. After a power loss a visible file may still be empty or torn (unless `fsync` is on);
  reading verifies, so it is a miss.
* A read verifies everything. What is short, damaged, foreign, no regular file or unreadable is
  counted and moved out of the way.
* A use is noted in the file's modification time: that is a page's age. A bound (`bound`) lets those go first that were
  unused for longest.
* An error never leaves a call, except ValueError for a wrong one, and StorageUnavailableError where all pages are to
  be removed and cannot be listed. A storage that cannot be written to says so once, keeps trying with every page, and
  says so again when it works.

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
from contextlib import AbstractContextManager, closing
from pathlib import Path

from ..errors import (
    HiCacheConfigError,
    InvariantError,
    StorageCorruptionError,
)
from ..page_key import StorageNamespace, namespace_digest
from ..types import PageKey, PageLink
from .base import HiCacheStorage, PageBytes, Payload
from .bound import BoundReachedError, FolderBound, KeptBound, Unbounded
from .file_ops import FileOps
from .folders import QUARANTINE, move_away, open_child, open_folder, safe_name
from .page_file import PageFileFormat
from .page_info import describe
from .page_io import BadPageFile, PageFileIO
from .payload import check_keys, payload_views
from .stats import StatsCounter, StorageStats
from .sweep import iter_pages, page_name, shard_name, sweep_stale_temps
from .temp_file import TempNames

logger = logging.getLogger(__name__)

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

MAX_LOGGED_REJECTS = 16
"""Bad files that one storage reports one by one; the counts go on."""


class LocalFileStorage(HiCacheStorage):
    """Pages of one namespace in files below `root`. Check `root` with `prepare_root` first."""

    def __init__(
        self,
        root: Path,
        namespace: StorageNamespace,
        *,
        fsync: bool = False,
        max_bytes: int = 0,
        page_format: PageFileFormat | None = None,
        ops: FileOps | None = None,
    ) -> None:
        """Opens the storage and removes what dead writers left in its folder.

        `fsync` forces file and folder to the disk before a page counts as stored. `max_bytes`
        bounds the model's folder, with all its page sizes and whoever else keeps a bound there; 0 is
        no bound. Raises ValueError for a namespace whose pages no file can hold, a bound below one
        page, or a `page_format` of another namespace; never OSError.
        """
        if page_format is not None and page_format.namespace != namespace:
            raise ValueError(f"the page format is that of {page_format.namespace}, not {namespace}")
        self.namespace = namespace
        self.root = root.absolute()
        self._names = (safe_name(namespace.model_id), str(namespace.page_size))
        self._io = PageFileIO(
            PageFileFormat(namespace) if page_format is None else page_format,
            FileOps() if ops is None else ops,
            fsync=fsync,
        )
        self._temp_names = TempNames()
        self._rejects = itertools.count()
        self._reject_token = secrets.token_hex(4)
        self._counter = StatsCounter()
        self._closed = False
        self._gave_way_in_vain = False
        self._sweep()
        self._bound = self._make_bound(max_bytes)

    # -- HiCacheStorage ---------------------------------------------------------------------------

    def get(self, keys: Sequence[PageKey]) -> list[PageBytes | None]:
        """See `HiCacheStorage.get`. Raises ValueError for a wrong key or a closed storage."""
        self._check_open()
        check_keys(keys)
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                return [self._get_page(folder_fd, key) for key in keys]
        except OSError as error:
            for _ in keys:
                self._count_failed_get(error)
            return [None] * len(keys)

    def set(self, keys: Sequence[PageKey], pages: Sequence[Payload]) -> list[bool]:
        """See `HiCacheStorage.set`. Raises ValueError for a wrong key, a wrong payload or a closed
        storage.
        """
        return self.set_linked(keys, pages, [None] * len(keys))

    def set_linked(
        self,
        keys: Sequence[PageKey],
        pages: Sequence[Payload],
        links: Sequence[PageLink | None],
    ) -> list[bool]:
        """See `HiCacheStorage.set_linked`: the links go into the files. Raises ValueError as `set`, and
        for links that do not pair up.
        """
        self._check_open()
        views = payload_views(keys, pages, self.namespace.page_bytes)
        if len(links) != len(keys):
            raise ValueError(f"{len(keys)} keys for {len(links)} links")
        self._mark_parents(keys, links)
        return [
            self._set_page(key, page, link)
            for key, page, link in zip(keys, views, links, strict=True)
        ]

    def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.exists`: looks at kind and size of the file. One probe per key,
        nothing is listed.
        """
        self._check_open()
        check_keys(keys)
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                return [self._exists_page(folder_fd, key) for key in keys]
        except OSError:
            return [False] * len(keys)

    def delete(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `HiCacheStorage.delete`."""
        self._check_open()
        check_keys(keys)
        return [self._delete_page(key) for key in keys]

    def iter_keys(self) -> Iterator[PageKey]:
        """See `HiCacheStorage.iter_keys`: in order, as far as the headers tell."""
        return (key for key in self.scan() if key is not None)

    def scan(self) -> Iterator[PageKey | None]:
        """See `HiCacheStorage.scan`. Opens every file of the folder, which may be other namespaces' for the most
        part: those of other components, and of weights that were there before.
        """
        self._check_open()
        try:
            with (
                open_folder(self.root, self._names, create=False) as folder_fd,
                closing(iter_pages(folder_fd)) as pages,
            ):
                for shard_fd, name, key in pages:
                    yield key if self._is_own(shard_fd, name) else None
        except FileNotFoundError:
            return

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        if not self._closed:
            self._closed = True
            self._bound.close()

    # -- looking inside ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the pages of this model and page size are; other namespaces of the model share
        it.
        """
        return self.root.joinpath(*self._names)

    def path_of(self, key: PageKey) -> Path:
        """The file that holds, or would hold, a page."""
        return self.folder / shard_name(key) / page_name(key)

    def stats(self) -> StorageStats:
        """What this instance has done so far."""
        return self._counter.snapshot()

    def check_invariants(self) -> None:
        """Every visible file in the folder, of this namespace or another, is whole and is the page
        its name says.

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

    # -- one page ---------------------------------------------------------------------------------

    def _get_page(self, folder_fd: int, key: PageKey) -> PageBytes | None:
        try:
            with open_child(shard_name(key), folder_fd) as shard_fd:
                page = self._read_page(shard_fd, key)
        except (OSError, MemoryError) as error:
            self._count_failed_get(error)
            return None
        if page is None:
            self._counter.add(gets=1, corrupt_gets=1)
        else:
            self._counter.add(gets=1, hits=1, hit_bytes=page.nbytes)
        return page

    def _count_failed_get(self, error: OSError | MemoryError) -> None:
        """A get that found no entry, or could not look."""
        if isinstance(error, FileNotFoundError):
            self._counter.add(gets=1, misses=1)
        else:
            logger.debug("a page of %s cannot be read: %s", self.folder, error)
            self._counter.add(gets=1, read_errors=1)

    def _read_page(self, shard_fd: int, key: PageKey) -> PageBytes | None:
        """None if the entry is bad; it is out of the way then. Raises OSError."""
        try:
            return self._io.read(page_name(key), shard_fd, key)
        except BadPageFile as error:
            self._reject(key, shard_fd, str(error), error.status)
            return None

    def _set_page(self, key: PageKey, payload: Sequence[memoryview], link: PageLink | None) -> bool:
        try:
            written = self._write_page_somehow(key, payload, link)
        except OSError as error:
            if self._counter.write_failed(str(error)):
                logger.warning("storage %s cannot be written to: %s", self.folder, error)
            return False
        if not written:
            self._counter.add(already_stored=1)
            return True
        self._gave_way_in_vain = False
        self._counter.add(sets=1, set_bytes=self.namespace.page_bytes)
        if self._counter.write_worked():
            logger.warning("storage %s can be written to again", self.folder)
        return True

    def _write_page_somehow(
        self, key: PageKey, payload: Sequence[memoryview], link: PageLink | None
    ) -> bool:
        """As `_write_page`, once more if what stood in the way is gone: folders that were removed or replaced by
        something else are made again, and on a full disk other pages give way, if the storage has a bound. Where that
        freed nothing (snapshots or hard links keep the bytes, or somebody else took them), no more of them do until a
        write works.
        """
        try:
            return self._write_page(key, payload, link)
        except (FileNotFoundError, NotADirectoryError):
            self._clear_shard(key)
        except BoundReachedError:
            raise
        except OSError as error:
            if (
                error.errno not in _DISK_FULL
                or self._gave_way_in_vain
                or not self._bound.give_way()
            ):
                raise
        try:
            return self._write_page(key, payload, link)
        except OSError as error:
            self._gave_way_in_vain = error.errno in _DISK_FULL
            raise

    def _write_page(
        self, key: PageKey, payload: Sequence[memoryview], link: PageLink | None
    ) -> bool:
        """True if written, False if the page was there already. Raises OSError."""
        name = page_name(key)
        with self._shard(key, create=True) as shard_fd:
            if self._is_stored(shard_fd, key):
                return False
            with self._bound.room(self._io.file_bytes):
                temp_name = self._temp_names.new(key.hex())
                self._io.write(temp_name, name, shard_fd, key, payload, link)
            return True

    def _mark_parents(self, keys: Sequence[PageKey], links: Sequence[PageLink | None]) -> None:
        """A page that gets a new one behind it is in use: nobody who makes room may take it away from below that."""
        written = set(keys)
        for link in links:
            if link is None or link.parent is None or link.parent in written:
                continue
            try:
                with self._shard(link.parent, create=False) as shard_fd:
                    name = page_name(link.parent)
                    self._io.mark_used(name, shard_fd, os.lstat(name, dir_fd=shard_fd))
            except OSError as error:
                logger.debug("the page before %s is not there: %s", keys[0].hex(), error)

    def _is_stored(self, shard_fd: int, key: PageKey) -> bool:
        """Whether the entry looks like the page. A folder in its place, which no rename could
        replace, is moved.
        """
        try:
            status = os.lstat(page_name(key), dir_fd=shard_fd)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(status.st_mode):
            self._reject(key, shard_fd, "is a folder", status)
        is_stored = self._io.is_whole(status)
        if is_stored:
            self._io.mark_used(page_name(key), shard_fd, status)
        return is_stored

    def _exists_page(self, folder_fd: int, key: PageKey) -> bool:
        shard = shard_name(key)
        try:
            if not stat.S_ISDIR(os.lstat(shard, dir_fd=folder_fd).st_mode):
                return False
            status = os.lstat(f"{shard}/{page_name(key)}", dir_fd=folder_fd)
            if not self._io.is_whole(status):
                with self._shard(key, create=False) as shard_fd:
                    found = f"{status.st_size} bytes, mode {stat.filemode(status.st_mode)}"
                    self._reject(key, shard_fd, f"not a whole page: {found}", status)
                return False
        except OSError:
            return False
        return True

    def _delete_page(self, key: PageKey) -> bool:
        try:
            with self._shard(key, create=False) as shard_fd:
                num_bytes = os.lstat(page_name(key), dir_fd=shard_fd).st_size
                os.unlink(page_name(key), dir_fd=shard_fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.debug("page %s cannot be removed: %s", key.hex(), error)
            self._counter.add(delete_errors=1)
            return False
        self._bound.removed(num_bytes)
        self._counter.add(deletes=1)
        return True

    # -- helpers ----------------------------------------------------------------------------------

    def _shard(self, key: PageKey, *, create: bool) -> AbstractContextManager[int]:
        return open_folder(self.root, (*self._names, shard_name(key)), create=create)

    def _is_own(self, shard_fd: int, name: str) -> bool:
        try:
            return self._io.is_own(name, shard_fd)
        except (OSError, BadPageFile):
            return False

    def _problem_of(self, key: PageKey) -> str | None:
        path = self.path_of(key)
        try:
            info = describe(path)
        except FileNotFoundError:
            return None  # deleted since it was listed
        except (OSError, StorageCorruptionError) as error:
            return str(error)
        if info.page_key != key:
            return f"{path}: holds the page {info.page_key.hex()}"
        own = info.namespace_digest == namespace_digest(self.namespace)
        if own and info.payload_bytes != self.namespace.page_bytes:
            return f"{path}: {info.payload_bytes} bytes, expected {self.namespace.page_bytes}"
        return None

    def _reject(
        self, key: PageKey, shard_fd: int, reason: str, seen: os.stat_result | None
    ) -> None:
        """Moves a bad entry out of the way, unless another writer has put a new one there since it
        was `seen`.
        """
        self._counter.add(corrupt=1)
        number = next(self._rejects)
        level = logging.WARNING if number < MAX_LOGGED_REJECTS else logging.DEBUG
        logger.log(level, "page file %s is rejected: %s", self.path_of(key), reason)
        name = page_name(key)
        try:
            now = os.lstat(name, dir_fd=shard_fd)
            if seen is None or (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino):
                self._move_away(name, shard_fd, number)
        except FileNotFoundError:
            return  # somebody else was faster
        except OSError as error:
            logger.log(level, "page file %s cannot be moved away: %s", self.path_of(key), error)

    def _clear_shard(self, key: PageKey) -> None:
        """Moves away what stands in the place of a shard folder and is none. Raises OSError."""
        name = shard_name(key)
        with open_folder(self.root, self._names, create=True) as folder_fd:
            try:
                status = os.lstat(name, dir_fd=folder_fd)
                if not stat.S_ISDIR(status.st_mode):
                    self._counter.add(corrupt=1)
                    self._move_away(name, folder_fd, next(self._rejects))
            except FileNotFoundError:
                return

    def _move_away(self, name: str, folder_fd: int, number: int) -> None:
        target = f"{name}.{self._reject_token}.{number}"
        with open_folder(self.root, (*self._names, QUARANTINE), create=True) as quarantine_fd:
            move_away(name, folder_fd, quarantine_fd, target, self._io.file_bytes)

    def _make_bound(self, max_bytes: int) -> FolderBound:
        if not max_bytes:
            return Unbounded()
        if max_bytes < self._io.file_bytes:
            raise HiCacheConfigError(
                f"--hicache-storage-max-bytes {max_bytes}: one page file has {self._io.file_bytes} bytes; "
                "give many times that, or 0 for no bound"
            )
        return KeptBound(self.root, self._names[0], max_bytes, self._counter)

    def _sweep(self) -> None:
        try:
            with open_folder(self.root, self._names, create=False) as folder_fd:
                swept = sweep_stale_temps(folder_fd)
                self._counter.add(stale_temps_removed=swept.removed, pages_found=swept.pages)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("storage %s cannot be swept: %s", self.folder, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the storage {self.folder} is closed")
