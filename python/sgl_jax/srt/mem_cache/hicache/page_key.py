"""Names of pages in storage: the namespace and the chained page hash.

A page's key and value vectors depend on every token before it, so its name is a hash chain over
the pages from the start of the prompt. It also depends on whose weights computed it and on how its
bytes are laid out, so the namespace enters every link. One function computes the names for writing
and for looking up.

    page_key = sha256(parent_key, model_id, model_version, page_size, kv_dtype,
                      sha256(layout_id), extra_key, token_bytes, tokens)

Every field is preceded by its length (64 bits, little-endian), so that no byte can move from one
field to its neighbour. `layout_id` enters as its sha256: it grows with the number of layers and
would otherwise dominate the cost of a page. `token_bytes` is the width of one position. The chain
is a file format: changing a byte of it orphans every page in every storage.

Thread rule: everything here is stateless between calls and may be used from any thread.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from .types import PageKey

KEY_BYTES = 32
"""Length of a `PageKey`."""

CHAIN_START = hashlib.sha256(b"hicache page key chain, version 1").digest()
"""What stands for the parent of the first page; the same in every process and release."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class StorageNamespace:
    """Who wrote a page: everything that must be equal for its bytes to mean the same.

    `layout_id` is `PageLayout.layout_id`; `page_bytes` the exact payload length of every page.
    """

    model_id: str
    model_version: str
    page_size: int
    kv_dtype: str
    layout_id: str
    page_bytes: int


def frame(field: bytes) -> bytes:
    """The field preceded by its length: concatenations of frames are injective."""
    return _LENGTH.pack(len(field)) + field


def frame_text(text: str) -> bytes:
    """A framed text. Lone surrogates, which JSON can carry, keep their identity."""
    return frame(text.encode("utf-8", "surrogatepass"))


def frame_int(number: int) -> bytes:
    """A framed non-negative integer below 2**64."""
    return frame(_LENGTH.pack(number))


def namespace_digest(namespace: StorageNamespace) -> bytes:
    """sha256 over every field of the namespace, framed: 32 bytes that a page file carries as its
    owner.
    """
    fields = (
        frame_text(namespace.model_id),
        frame_text(namespace.model_version),
        frame_int(namespace.page_size),
        frame_text(namespace.kv_dtype),
        frame_text(namespace.layout_id),
        frame_int(namespace.page_bytes),
    )
    return hashlib.sha256(b"".join(fields)).digest()


def layout_digest(layout_id: str) -> bytes:
    """The 32 bytes that stand for a `PageLayout.layout_id`."""
    return hashlib.sha256(layout_id.encode("utf-8", "surrogatepass")).digest()


class PageHasher:
    """Computes page keys for one namespace and one `extra_key` (tenant salt, adapter; None is not
    the same as "").

    `token_bytes` is the width of one position (`TokenCodec.token_bytes`): 8 for plain tokens, one
    little-endian int64, and 16 for EAGLE's pairs. It is part of the key, so the two never meet.
    """

    def __init__(
        self,
        namespace: StorageNamespace,
        extra_key: str | None,
        token_bytes: int = 8,
    ) -> None:
        """Raises ValueError for a page size or a token width below 1."""
        if namespace.page_size < 1 or token_bytes < 1:
            raise ValueError(
                f"page_size {namespace.page_size} and token_bytes {token_bytes} must be at least 1"
            )
        self.namespace = namespace
        self.extra_key = extra_key
        self.page_token_bytes = namespace.page_size * token_bytes
        self._middle = self._constant_middle(token_bytes)

    def chain(
        self, parent: PageKey | None, tokens: bytes | memoryview, num_pages: int | None = None
    ) -> list[PageKey]:
        """Keys of the pages that follow `parent` (None: the start of a prompt), one per page, in
        order.

        `tokens` are the token bytes of whole pages, `page_token_bytes` each. `num_pages` hashes
        only that many of them. Raises ValueError if the bytes are not whole pages, or fewer than
        `num_pages`.
        """
        view = memoryview(tokens).cast("B")
        step = self.page_token_bytes
        if num_pages is None:
            num_pages, rest = divmod(len(view), step)
            if rest:
                raise ValueError(f"{len(view)} token bytes are not whole pages of {step} bytes")
        elif not 0 <= num_pages * step <= len(view):
            raise ValueError(f"{num_pages} pages asked of {len(view)} token bytes, {step} a page")
        link = CHAIN_START if parent is None else bytes(parent)
        if len(link) != KEY_BYTES:
            raise ValueError(f"a page key has {KEY_BYTES} bytes, the parent has {len(link)}")
        return self._links(link, view, num_pages)

    def _links(self, link: bytes, view: memoryview, num_pages: int) -> list[PageKey]:
        sha256, join = hashlib.sha256, b"".join
        before, middle, step = _LENGTH.pack(KEY_BYTES), self._middle, self.page_token_bytes
        keys: list[PageKey] = []
        for start in range(0, num_pages * step, step):
            link = sha256(join((before, link, middle, view[start : start + step]))).digest()
            keys.append(PageKey(link))
        return keys

    def _constant_middle(self, token_bytes: int) -> bytes:
        """All that stands between the parent and the tokens, ending with the frame of the
        tokens.
        """
        space = self.namespace
        present = b"\x00" if self.extra_key is None else b"\x01"
        extra = "" if self.extra_key is None else self.extra_key
        fields = (
            frame_text(space.model_id),
            frame_text(space.model_version),
            frame_int(space.page_size),
            frame_text(space.kv_dtype),
            frame(layout_digest(space.layout_id)),
            frame(present + extra.encode("utf-8", "surrogatepass")),
            frame_int(token_bytes),
        )
        return b"".join(fields) + _LENGTH.pack(self.page_token_bytes)


def companion_key(namespace: StorageNamespace) -> Callable[[PageKey], PageKey]:
    """How a component that is kept beside the Full pages (a sliding window, a recurrent state) names a page.

    companion_key = sha256(full_key, model_id, model_version, page_size, kv_dtype, sha256(layout_id)), framed like a
    page key: it hangs off the Full page of the same tokens, whose key says who may share it. One hash, not a chain.
    """
    middle = b"".join(
        (
            frame_text(namespace.model_id),
            frame_text(namespace.model_version),
            frame_int(namespace.page_size),
            frame_text(namespace.kv_dtype),
            frame(layout_digest(namespace.layout_id)),
        )
    )
    before = _LENGTH.pack(KEY_BYTES)

    def derive(full_key: PageKey) -> PageKey:
        return PageKey(hashlib.sha256(b"".join((before, full_key, middle))).digest())

    return derive
