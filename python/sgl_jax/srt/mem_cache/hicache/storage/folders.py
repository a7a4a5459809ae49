"""The folders of a local storage, opened step by step so that no symlink is ever followed.

    <root>/<safe model id>/<page size>/<first two hex digits>/
    <root>/<safe model id>/<page size>/.quarantine/

Everything below the root is reached through file descriptors of folders that were opened with
O_NOFOLLOW, and created with 0700 whatever the umask. A folder that was removed under a running
storage is created again on the next write.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_MODE = 0o700
QUARANTINE = ".quarantine"
QUARANTINE_MAX_FILES = 16
"""Rejected files that are kept for inspection; what comes after is removed, so that damage cannot
fill the disk.
"""

_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
_MAX_NAME = 160
_KEPT_OF_LONG_NAME = 80


def safe_name(model_id: str) -> str:
    """A model id as one path component: injective, readable where it can be, never hidden, empty,
    "." or "..".

    Bytes outside [A-Za-z0-9._-], and a leading dot, become %XX; "" becomes "%empty"; a name that
    would be too long keeps its beginning and gets its sha256. Case is kept: on a file system that
    ignores it two models may share a folder, where the page keys and the identity inside each file
    still keep them apart.
    """
    raw = model_id.encode("utf-8", "surrogatepass")
    name = "".join(chr(b) if chr(b) in _PLAIN else f"%{b:02X}" for b in raw)
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        return f"{name[:_KEPT_OF_LONG_NAME]}%sha256-{hashlib.sha256(raw).hexdigest()}"
    return name or "%empty"


@contextmanager
def open_folder(path: Path, names: tuple[str, ...], *, create: bool) -> Iterator[int]:
    """A descriptor of `path/names[0]/names[1]/...`; with `create`, missing folders (`path` too)
    are made.

    Raises OSError: FileNotFoundError if one is missing, ELOOP or NotADirectoryError if one is not
    a folder, PermissionError if `path` is not this user's alone to write to: checked at start, but
    whoever may write to its parent can have put another folder there since.
    """
    fd = _open_child(str(path), None, create)
    try:
        _check_private(fd, path)
        for name in names:
            child = _open_child(name, fd, create)
            os.close(fd)
            fd = child
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_child(name: str, parent_fd: int) -> Iterator[int]:
    """A descriptor of one existing folder in an open one. Raises OSError as `open_folder`."""
    fd = os.open(name, _OPEN_FLAGS, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_private(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM, "belongs to another user or can be written to by others", str(path)
        )


def _open_child(name: str, parent_fd: int | None, create: bool) -> int:
    try:
        return os.open(name, _OPEN_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        if not create:
            raise
    made = _make_folder(name, parent_fd)
    fd = os.open(name, _OPEN_FLAGS, dir_fd=parent_fd)
    if made:
        os.fchmod(fd, FOLDER_MODE)
    return fd


def _make_folder(name: str, parent_fd: int | None) -> bool:
    """True if this call made the folder, False if another writer was faster."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return False
    return True


def move_away(name: str, folder_fd: int, quarantine_fd: int, new_name: str, max_bytes: int) -> None:
    """Takes an entry out of the way of the next write, without following it.

    Folders and, while the quarantine has room, regular files of at most `max_bytes` are moved
    there; everything else is removed. Raises OSError.
    """
    status = os.lstat(name, dir_fd=folder_fd)
    is_file = stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes
    keep = is_file and len(os.listdir(quarantine_fd)) < QUARANTINE_MAX_FILES
    if keep or stat.S_ISDIR(status.st_mode):
        os.rename(name, new_name, src_dir_fd=folder_fd, dst_dir_fd=quarantine_fd)
    else:
        os.unlink(name, dir_fd=folder_fd)
