"""Reads the headers of many pages, folder by folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import numpy as np

from ..errors import StorageCorruptionError
from ..types import PageKey
from .folders import open_folder
from .inventory import Int64Array, Inventory
from .page_info import PageFileInfo, read_header
from .sweep import page_name, shard_name

logger = logging.getLogger(__name__)


def read_headers(found: Inventory, rows: Int64Array) -> Iterator[tuple[int, PageFileInfo | None]]:
    """(row, what its header says) of these pages, in the order of their folders; None where it cannot be read."""
    order = np.lexsort((found.key_ids[rows], found.folder_of[rows]))
    place: tuple[str, ...] = ()
    shard_fd: int | None = None
    try:
        for row in rows[order].tolist():
            key = found.key(row)
            its_place = (*found.folder(row).names, shard_name(key))
            if its_place != place:
                if shard_fd is not None:
                    os.close(shard_fd)
                place, shard_fd = its_place, _open(found, its_place)
            yield row, None if shard_fd is None else _read(key, shard_fd)
    finally:
        if shard_fd is not None:
            os.close(shard_fd)


def _open(found: Inventory, place: tuple[str, ...]) -> int | None:
    try:
        with open_folder(found.root, place, create=False) as fd:
            return os.dup(fd)
    except OSError as error:
        logger.debug("the folder %s cannot be opened: %s", "/".join(place), error)
        return None


def _read(key: PageKey, shard_fd: int) -> PageFileInfo | None:
    try:
        return read_header(page_name(key), shard_fd)
    except (OSError, StorageCorruptionError) as error:
        logger.debug("the header of page %s cannot be read: %s", key.hex(), error)
        return None
