"""What lies below a storage root: pages, files set aside, files being written; sizes and ages, no content.

One entry per regular file with a name of ours, kept in columns (a page costs 52 bytes here, a million of them 52 MB).
Everything is reached through descriptors of folders opened without following a symlink. What vanishes while it is
looked at is passed over: servers write and remove at the same time.
"""

from __future__ import annotations

import enum
import logging
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..page_key import KEY_BYTES
from ..types import PageKey
from .folders import QUARANTINE, open_child, open_folder
from .sweep import is_shard_name, page_key_of, page_name, shard_name
from .temp_file import is_stale, parse_writer, this_writer

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PageFolder:
    """`<root>/<model>/<page size>`: the two folder names as they are on disk."""

    model: str
    page_size: str

    @property
    def names(self) -> tuple[str, str]:
        """The way from the root."""
        return (self.model, self.page_size)


@dataclass(frozen=True)
class OtherFile:
    """A file of ours that is no page: set aside as damaged, or temporary. `shard`: the folder it is in."""

    folder: PageFolder
    shard: str
    name: str
    num_bytes: int
    used_ns: int


class Inventory:
    """The files below one root at one time. `folders[folder_of[i]]` is where page i lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: list[PageFolder] = []
        self.quarantined: list[OtherFile] = []
        self.writing: list[OtherFile] = []
        self.stale: list[OtherFile] = []
        self._keys = bytearray()
        self._folder_of = array("i")
        self._num_bytes = array("q")
        self._used_ns = array("q")

    def __len__(self) -> int:
        return len(self._num_bytes)

    def add_page(self, folder_index: int, key: PageKey, num_bytes: int, used_ns: int) -> None:
        """One more page, of `folders[folder_index]`."""
        self._keys += key
        self._folder_of.append(folder_index)
        self._num_bytes.append(num_bytes)
        self._used_ns.append(used_ns)

    def key(self, row: int) -> PageKey:
        """The key of a page."""
        return PageKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def folder(self, row: int) -> PageFolder:
        """Where a page lies."""
        return self.folders[self._folder_of[row]]

    def used_ns_of(self, row: int) -> int:
        """When a page was last used, as `used_ns`."""
        return self._used_ns[row]

    @property
    def key_ids(self) -> npt.NDArray[np.uint64]:
        """uint64[pages]: the first eight bytes of each key, enough to tell pages of one disk apart."""
        words = np.frombuffer(bytes(self._keys), ">u8").reshape(-1, KEY_BYTES // 8)
        return words[:, 0].astype(np.uint64)

    @property
    def folder_of(self) -> npt.NDArray[np.int32]:
        """int32[pages]: index into `folders`."""
        return np.frombuffer(bytes(self._folder_of), np.int32)

    @property
    def num_bytes(self) -> Int64Array:
        """int64[pages]: sizes of the files."""
        return np.frombuffer(bytes(self._num_bytes), np.int64)

    @property
    def used_ns(self) -> Int64Array:
        """int64[pages]: when each was last used, in nanoseconds of the wall clock; never later than the scan."""
        return np.frombuffer(bytes(self._used_ns), np.int64)

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(self._num_bytes)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of all files set aside."""
        return sum(file.num_bytes for file in self.quarantined)


def take_inventory(
    root: Path,
    models: Sequence[str] | None = None,
    tick: Callable[[int], None] = lambda num_files: None,
) -> Inventory:
    """Looks at every file below `root`, or below the named model folders of it.

    `tick` is told of every so many files looked at. Raises OSError if the root cannot be opened.
    """
    found = Inventory(root)
    for folder, folder_fd in _page_folders(root, models):
        _look_into(found, folder, folder_fd, tick)
    return found


def page_folders(root: Path, models: Sequence[str] | None = None) -> list[PageFolder]:
    """The folders that hold pages below `root`, or below the named model folders of it. Raises OSError as
    `take_inventory`.
    """
    return [folder for folder, _ in _page_folders(root, models)]


def _page_folders(root: Path, models: Sequence[str] | None) -> Iterator[tuple[PageFolder, int]]:
    with open_folder(root, (), create=False) as root_fd:
        names = _folder_names(root_fd) if models is None else models
        for model, model_fd in _folders(names, root_fd):
            page_sizes = filter(str.isdecimal, _folder_names(model_fd))
            for page_size, folder_fd in _folders(page_sizes, model_fd):
                yield PageFolder(model, page_size), folder_fd


def _folder_names(fd: int) -> list[str]:
    return sorted(name for name in os.listdir(fd) if not name.startswith("."))


def _folders(names: Iterable[str], parent_fd: int) -> Iterator[tuple[str, int]]:
    """Name and descriptor of each that is a folder and can be opened; valid until the next step."""
    for name in names:
        try:
            with open_child(name, parent_fd) as fd:
                yield name, fd
        except OSError as error:
            logger.debug("%s is passed over: %s", name, error)


def _look_into(
    found: Inventory, folder: PageFolder, folder_fd: int, tick: Callable[[int], None]
) -> None:
    found.folders.append(folder)
    index, now_ns, here = len(found.folders) - 1, time.time_ns(), this_writer()
    for shard, shard_fd in _folders(filter(is_shard_name, _folder_names(folder_fd)), folder_fd):
        num_files = 0
        for name, status in _regular_files(shard_fd):
            num_files += 1
            used_ns = min(status.st_mtime_ns, now_ns)
            key, writer = page_key_of(name), parse_writer(name)
            if key is not None:
                found.add_page(index, key, status.st_size, used_ns)
            elif writer is not None:
                file = OtherFile(folder, shard, name, status.st_size, used_ns)
                is_left = is_stale(writer, status.st_mtime, here)
                (found.stale if is_left else found.writing).append(file)
        tick(num_files)
    for shard, quarantine_fd in _folders((QUARANTINE,), folder_fd):
        for name, status in _regular_files(quarantine_fd):
            used_ns = min(status.st_mtime_ns, now_ns)
            found.quarantined.append(OtherFile(folder, shard, name, status.st_size, used_ns))


def _regular_files(folder_fd: int) -> Iterator[tuple[str, os.stat_result]]:
    try:
        entries = list(os.scandir(folder_fd))
    except OSError as error:
        logger.debug("a folder is passed over: %s", error)
        return
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            logger.debug("%s is passed over: %s", entry.name, error)
            continue
        if stat.S_ISREG(status.st_mode):
            yield entry.name, status


class Outcome(enum.Enum):
    """What became of a page that was to be removed."""

    REMOVED = "removed"
    GONE = "gone"  # somebody else was faster
    USED = "used"  # since it was looked at; it stays


def remove_page(found: Inventory, row: int) -> Outcome:
    """Removes one page of the inventory, unless it was used since it was looked at. Raises OSError if that fails."""
    key, folder = found.key(row), found.folder(row)
    try:
        with open_folder(found.root, (*folder.names, shard_name(key)), create=False) as shard_fd:
            name = page_name(key)
            modified_ns = os.lstat(name, dir_fd=shard_fd).st_mtime_ns
            # A time in the future says nothing: some clock was wrong.
            if found.used_ns_of(row) < modified_ns <= time.time_ns():
                return Outcome.USED
            os.unlink(name, dir_fd=shard_fd)
    except FileNotFoundError:
        return Outcome.GONE
    return Outcome.REMOVED


def remove_other(root: Path, file: OtherFile) -> bool:
    """Removes a file that is no page; False if it is gone already. Raises OSError if it cannot be removed."""
    try:
        with open_folder(root, (*file.folder.names, file.shard), create=False) as folder_fd:
            os.unlink(file.name, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    return True
