"""Moves one page between memory and a file in an open folder, in the format of `page_file`."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress

from ..errors import StorageCorruptionError
from ..types import PageKey, PageLink
from .base import PageBytes
from .file_ops import FileOps, read_full, write_all
from .page_buffers import PageBuffers
from .page_file import PageFileFormat

logger = logging.getLogger(__name__)

USE_NOTED_FOR_S = 60.0
"""A page that is used again within this time is not marked again: pages in steady use cost no write of metadata."""

_BAD_ENTRY = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EIO})
"""Errors of opening or reading that lie in the entry itself; all others (too many files, a stale
mount) may pass.
"""


class BadPageFile(StorageCorruptionError):
    """What stands in a page's place is not the page. `status` is the file that was read, None if
    none was opened.
    """

    def __init__(self, reason: str, status: os.stat_result | None = None) -> None:
        super().__init__(reason)
        self.status = status


class PageFileIO:
    """Reads and writes the page files of one namespace. Any thread."""

    def __init__(self, page_format: PageFileFormat, ops: FileOps, *, fsync: bool) -> None:
        """`fsync` forces file and folder to the disk before a write returns."""
        self.file_bytes = page_format.file_bytes  # of what is written; other versions may differ
        self._format = page_format
        self._buffers = PageBuffers(page_format.namespace.page_bytes)
        self._ops = ops
        self._fsync = fsync

    def is_whole(self, status: os.stat_result) -> bool:
        """Whether an entry has the kind and the size of a page file."""
        return stat.S_ISREG(status.st_mode) and self._header_bytes(status) is not None

    def read(self, name: str, folder_fd: int, key: PageKey) -> PageBytes:
        """The verified page, marked as used now.

        Raises FileNotFoundError, BadPageFile if the entry is not the page, and OSError for what
        may pass.
        """
        fd = self._open(name, folder_fd)
        try:
            status = os.fstat(fd)
            try:
                page = self._read_open(fd, status, key)
            except StorageCorruptionError as error:
                raise BadPageFile(str(error), status) from error
        finally:
            os.close(fd)
        self.mark_used(name, folder_fd, status)
        return page

    def mark_used(self, name: str, folder_fd: int, status: os.stat_result) -> None:
        """Notes a use of the page in its modification time, unless one was noted a moment ago. A file system that
        refuses costs the page its youth, nothing else.
        """
        if abs(time.time() - status.st_mtime) <= USE_NOTED_FOR_S:
            return
        try:
            self._ops.touch(name, folder_fd)
        except OSError as error:
            logger.debug("the use of page file %s cannot be noted: %s", name, error)

    def write(
        self,
        temp_name: str,
        name: str,
        folder_fd: int,
        key: PageKey,
        payload: Sequence[memoryview],
        link: PageLink | None,
    ) -> None:
        """Writes under the temporary name and renames: the page becomes visible whole, or not at
        all.

        Raises OSError after removing the temporary file.
        """
        buffers = self._format.encode(key, payload, link)
        fd = self._ops.create(temp_name, folder_fd)
        try:
            try:
                write_all(self._ops, fd, buffers)
                if self._fsync:
                    self._ops.fsync(fd)
            finally:
                os.close(fd)
            self._ops.replace(temp_name, name, folder_fd)
        except BaseException:
            with suppress(OSError):  # the first error counts; what stays is swept at the next start
                os.unlink(temp_name, dir_fd=folder_fd)
            raise
        if self._fsync:
            self._ops.fsync(folder_fd)

    def is_own(self, name: str, folder_fd: int) -> bool:
        """Whether an entry's size and header are those of this namespace. Raises OSError,
        BadPageFile.
        """
        fd = self._open(name, folder_fd)
        try:
            header_bytes = self._header_bytes(os.fstat(fd))
            return header_bytes is not None and self._format.is_own(os.pread(fd, header_bytes, 0))
        finally:
            os.close(fd)

    def _open(self, name: str, folder_fd: int) -> int:
        try:
            return self._ops.open_for_read(name, folder_fd)
        except OSError as error:
            if error.errno in _BAD_ENTRY:
                raise BadPageFile(f"cannot be opened: {error.strerror}") from error
            raise

    def _header_bytes(self, status: os.stat_result) -> int | None:
        return self._format.header_bytes_of(status.st_size)

    def _read_open(self, fd: int, status: os.stat_result, key: PageKey) -> PageBytes:
        header_bytes = self._header_bytes(status)
        if header_bytes is None or not stat.S_ISREG(status.st_mode):
            raise StorageCorruptionError(
                f"expected a regular file of {self.file_bytes} bytes,"
                f" found mode {status.st_mode:#o} and {status.st_size} bytes"
            )
        header = bytearray(header_bytes)
        page = self._buffers.take()
        try:
            count = read_full(self._ops, fd, [memoryview(header), page.data])
        except OSError as error:
            if error.errno in _BAD_ENTRY:
                raise StorageCorruptionError(f"cannot be read: {error.strerror}") from error
            raise
        if count != status.st_size:
            raise StorageCorruptionError(f"expected {status.st_size} bytes, read {count}")
        self._format.verify(key, bytes(header), page)
        return page
