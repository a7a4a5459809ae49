"""Checks at start that a storage path can be used and is ours alone.

A page of the cache reveals the prompt it was computed from, and a planted page would change
answers: the folder must belong to the user who runs the engine, and nobody else may write to it.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ..errors import HiCacheConfigError
from .folders import FOLDER_MODE

_PROBE = bytes(range(256)) * 16


def prepare_root(root: str | Path) -> Path:
    """Creates the storage root if need be (0700), checks it, and tries a write, a read and a
    removal in it.

    Returns the absolute path. `~` is expanded. Raises HiCacheConfigError, in one line that says
    what was asked, what was found and what to change.
    """
    path = _absolute(root)
    try:
        _make_folders(path)
        status = os.lstat(path)
    except (OSError, ValueError) as error:
        raise _refusal(
            path, f"cannot be created ({_reason(error)})", "give a path in a writable folder"
        ) from error
    _check_owner(path, status)
    try:
        _probe(path)
    except OSError as error:
        raise _refusal(
            path,
            f"cannot be used ({_reason(error)})",
            "free space, mount it writable, or give another path",
        ) from error
    return path


def _absolute(root: str | Path) -> Path:
    if not str(root):
        raise HiCacheConfigError("the storage path is empty: give a folder")
    try:
        return Path(root).expanduser().absolute()
    except RuntimeError as error:
        raise _refusal(
            Path(root), "has no home directory to stand for ~", "give an absolute path"
        ) from error


def _make_folders(path: Path) -> None:
    """The folder and its missing parents, private to this user."""
    missing: list[Path] = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            folder.mkdir(FOLDER_MODE)
        except FileExistsError:
            continue  # another process starts at the same time
        folder.chmod(FOLDER_MODE)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _refusal(path, "is a symbolic link", f"give its target, {os.path.realpath(path)}")
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(path, "is not a folder", "give a folder or a path that does not exist yet")
    if status.st_uid != os.geteuid():
        raise _refusal(
            path,
            f"belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this",
            "change its owner or give another path",
        )
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise _refusal(
            path, f"can be written to by others (mode {mode:04o})", "run chmod go-w on it"
        )


def _probe(path: Path) -> None:
    probe = path / f".probe.{os.getpid()}.{secrets.token_hex(8)}"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(fd, _PROBE)
        found = os.pread(fd, len(_PROBE), 0)
    finally:
        os.close(fd)
        probe.unlink()
    if written != len(_PROBE) or found != _PROBE:
        raise OSError(f"wrote {len(_PROBE)} bytes and read back other ones")


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _refusal(path: Path, found: str, remedy: str) -> HiCacheConfigError:
    return HiCacheConfigError(f"the storage path {str(path)!r} {found}: {remedy}")
