"""How tokens become the bytes that tree keys are made of and page hashes run over.

A position is a little-endian int64 (8 bytes), or, for EAGLE's bigram keys, a pair of neighbouring tokens (16 bytes), so
that comparing prefixes is comparing bytes and nothing is encoded twice.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK_TOKENS = 4096

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TokenCodec:
    """Encodes token ids for one page size and key kind."""

    page_size: int
    is_eagle: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes of one position."""
        return 16 if self.is_eagle else 8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of positions."""
        return self.page_size * self.token_bytes

    def key_len(self, num_tokens: int) -> int:
        """Positions in the key of `num_tokens` tokens: a bigram needs two."""
        return max(num_tokens - 1, 0) if self.is_eagle else num_tokens

    def aligned_len(self, num_tokens: int) -> int:
        """Positions in whole pages of the key of `num_tokens` tokens."""
        return self.key_len(num_tokens) // self.page_size * self.page_size

    def encode(self, token_ids: TokenIds) -> bytes:
        """The whole pages of the key as bytes; what is left over is cut off before it costs anything."""
        aligned = self.aligned_len(len(token_ids))
        if not aligned:
            return b""
        if not self.is_eagle:
            return _int64_bytes(token_ids, aligned)
        flat = np.frombuffer(_int64_bytes(token_ids, aligned + 1), "<i8")
        return np.stack([flat[:-1], flat[1:]], axis=1).tobytes()


def _int64_bytes(token_ids: TokenIds, num_tokens: int) -> bytes:
    if isinstance(token_ids, list):
        return _list_bytes(token_ids, num_tokens)
    return np.ascontiguousarray(token_ids[:num_tokens], dtype="<i8").tobytes()


def _list_bytes(token_ids: list[int], num_tokens: int) -> bytes:
    """Raises struct.error for what is no int64.

    Filling an array of unsigned words is the fastest way out of a list, twice as fast as signed ones or `struct.pack`
    and five times as fast as numpy; only `struct` knows negative numbers. In blocks, because for copies of the whole
    list the C library would fetch and return memory every time, which takes longer than the rest.
    """
    encoded = BytesIO()
    try:
        for start in range(0, num_tokens, _BLOCK_TOKENS):
            words = array("Q")
            words.fromlist(token_ids[start : min(start + _BLOCK_TOKENS, num_tokens)])
            if sys.byteorder != "little":
                words.byteswap()
            encoded.write(words)
    except (OverflowError, TypeError):
        return _packed(token_ids[:num_tokens])
    tokens = encoded.getvalue()
    # 2**64 - 1 must not become -1.
    return tokens if np.frombuffer(tokens, "<i8").min() >= 0 else _packed(token_ids[:num_tokens])


def _packed(token_ids: list[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}q", *token_ids)
