"""The few operating system calls through which pages reach a file system.

Behind one small class so that a test can make a disk full, slow or broken by passing another one,
without patching.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_MAX_BUFFERS = max(os.sysconf("SC_IOV_MAX"), 16)
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class FileOps:
    """The real calls. All of them raise OSError; all paths are names inside an open folder."""

    def open_for_read(self, name: str, folder_fd: int) -> int:
        """Opens without following a symlink and without waiting for the other end of a FIFO."""
        return os.open(name, _READ_FLAGS, dir_fd=folder_fd)

    def create(self, name: str, folder_fd: int) -> int:
        """A new file, 0600 whatever the umask; FileExistsError if the name is taken."""
        fd = os.open(name, _CREATE_FLAGS, 0o600, dir_fd=folder_fd)
        os.fchmod(fd, 0o600)
        return fd

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Bytes written, which may be fewer than asked."""
        return os.writev(fd, buffers)

    def readv(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Bytes read, which may be fewer than asked; 0 at the end of the file."""
        return os.readv(fd, buffers)

    def replace(self, source: str, target: str, folder_fd: int) -> None:
        """Atomic rename inside one folder."""
        os.replace(source, target, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)

    def touch(self, name: str, folder_fd: int) -> None:
        """Marks a file as used now, by its modification time; a symlink itself, never its target."""
        os.utime(name, dir_fd=folder_fd, follow_symlinks=False)

    def fsync(self, fd: int) -> None:
        """Forces a file or a folder to the disk."""
        os.fsync(fd)


def write_all(ops: FileOps, fd: int, buffers: Sequence[memoryview]) -> None:
    """Writes every byte, however short the single writes are. Raises OSError."""
    rest = list(buffers)
    while rest:
        rest = _advance(rest, ops.writev(fd, rest[:_MAX_BUFFERS]))


def read_full(ops: FileOps, fd: int, buffers: Sequence[memoryview]) -> int:
    """Fills the buffers as far as the file goes; returns the bytes read. Raises OSError."""
    rest, total = list(buffers), 0
    while rest:
        count = ops.readv(fd, rest[:_MAX_BUFFERS])
        if count == 0:
            break
        total += count
        rest = _advance(rest, count)
    return total


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
