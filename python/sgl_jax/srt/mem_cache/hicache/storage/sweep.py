"""Removes what dead writers left behind, and lists what is stored. Only ever looks into one
namespace's folder.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from ..types import PageKey
from .temp_file import is_stale, parse_writer, this_writer

logger = logging.getLogger(__name__)

MAX_SWEPT_ENTRIES = 1_000_000
"""Directory entries that one sweep looks at, so that opening a huge storage stays a matter of
seconds.
"""

_SHARD = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"(?P<hex>[0-9a-f]{64})\.npy")
_SHARD_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def page_name(key: PageKey) -> str:
    """The file name of a page."""
    return f"{key.hex()}.npy"


def shard_name(key: PageKey) -> str:
    """The folder that holds a page, so that no folder grows beyond a 256th of all pages."""
    return f"{key[0]:02x}"


def is_shard_name(name: str) -> bool:
    """Whether a folder of that name holds pages."""
    return _SHARD.fullmatch(name) is not None


def page_key_of(name: str) -> PageKey | None:
    """The page that a file of that name holds, or None if the name is no page's."""
    match = _PAGE.fullmatch(name)
    return None if match is None else PageKey(bytes.fromhex(match["hex"]))


def _names(folder_fd: int) -> list[str]:
    return sorted(os.listdir(folder_fd))


def iter_entries(folder_fd: int) -> Generator[tuple[int, str], None, None]:
    """(descriptor of the shard folder, entry name) for every entry of every shard, in order; the
    descriptor is valid until the next step. Folders that vanish or are not ours are passed
    over."""
    for shard in filter(is_shard_name, _names(folder_fd)):
        try:
            shard_fd = os.open(shard, _SHARD_FLAGS, dir_fd=folder_fd)
        except OSError as error:
            logger.debug("shard %s is passed over: %s", shard, error)
            continue
        try:
            for name in _names(shard_fd):
                yield shard_fd, name
        finally:
            os.close(shard_fd)


def iter_pages(folder_fd: int) -> Generator[tuple[int, str, PageKey], None, None]:
    """(descriptor of the shard folder, file name, page key) for every visible page of any
    namespace in the folder.
    """
    with closing(iter_entries(folder_fd)) as entries:
        for shard_fd, name in entries:
            key = page_key_of(name)
            if key is not None:
                yield shard_fd, name, key


@dataclass(frozen=True)
class SweepResult:
    """What one sweep removed, and how many pages, of any namespace, it passed."""

    removed: int
    pages: int


def sweep_stale_temps(folder_fd: int, max_entries: int = MAX_SWEPT_ENTRIES) -> SweepResult:
    """Removes the temporary files of dead writers; those of living ones stay."""
    here, removed, pages = this_writer(), 0, 0
    with closing(iter_entries(folder_fd)) as entries:
        for _, (shard_fd, name) in zip(range(max_entries), entries, strict=False):
            writer = parse_writer(name)
            if writer is None:
                pages += page_key_of(name) is not None
                continue
            try:
                modified_s = os.lstat(name, dir_fd=shard_fd).st_mtime
                if is_stale(writer, modified_s, here):
                    os.unlink(name, dir_fd=shard_fd)
                    removed += 1
            except FileNotFoundError:
                continue  # its writer, or another sweep, was faster
            except OSError as error:
                logger.warning("temporary file %s stays: %s", name, error)
    return SweepResult(removed, pages)
