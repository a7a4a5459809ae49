"""Checks of a storage call's arguments, shared by every implementation.

A wrong call is a fault of the caller and raises ValueError before anything is touched; everything
that goes wrong below that is a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..page_key import KEY_BYTES
from ..types import PageKey
from .base import Payload


def check_keys(keys: Sequence[PageKey]) -> None:
    """Raises ValueError if a key is not `KEY_BYTES` bytes."""
    for key in keys:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"a page key is {KEY_BYTES} bytes, found {key!r:.80}")


def payload_views(
    keys: Sequence[PageKey], pages: Sequence[Payload], page_bytes: int
) -> list[list[memoryview]]:
    """Byte views of the pages' arrays, nothing copied.

    Raises ValueError if keys and pages do not pair up, an array is not C-contiguous, or a page has
    not exactly `page_bytes` bytes.
    """
    check_keys(keys)
    if len(keys) != len(pages):
        raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
    return [_byte_views(page, page_bytes) for page in pages]


def _byte_views(page: Payload, page_bytes: int) -> list[memoryview]:
    views: list[memoryview] = []
    for array in page:
        if not array.flags.c_contiguous:
            raise ValueError(f"a payload array of shape {array.shape} is not C-contiguous")
        if array.nbytes:
            views.append(array.reshape(-1).view(np.uint8).data)
    found = sum(len(view) for view in views)
    if found != page_bytes:
        raise ValueError(f"a page of this storage has {page_bytes} bytes, found {found}")
    return views
