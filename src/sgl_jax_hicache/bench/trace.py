"""Request traces in Mooncake's format, and the plain block LRU that a prefix cache is compared with."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TRACE = Path(__file__).parent / "data" / "mooncake_synthetic_300.jsonl"
"""A cut that comes with the package; see the README beside it."""

BLOCK_TOKENS = 512
"""Tokens of one block of a trace."""


class TraceError(ValueError):
    """A trace that cannot be read or used; the message names file and line."""


@dataclass(frozen=True)
class TraceRequest:
    """One prompt as its blocks. Equal ids are the same block behind the same prefix."""

    arrival_ms: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a JSON-lines file, in order of arrival. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    requests = [_parse(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise TraceError(f"{path}: no requests")
    return sorted(requests, key=lambda request: request.arrival_ms)


def _parse(line: str, where: str) -> TraceRequest:
    try:
        data = json.loads(line)
        request = TraceRequest(int(data["timestamp"]), tuple(map(int, data["hash_ids"])))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: not a request with timestamp and hash_ids: {error}") from error
    if not request.hash_ids or min(request.hash_ids) < 0:
        raise TraceError(f"{where}: hash_ids must be one or more numbers from 0 on")
    return request


class BlockLru:
    """Blocks in the order of their last use, with no notion of a prefix."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._order: OrderedDict[int, None] = OrderedDict()

    def serve(self, hash_ids: Sequence[int]) -> int:
        """Use the blocks one after the other; return how many were there."""
        num_hits = 0
        for hash_id in hash_ids:
            if hash_id in self._order:
                num_hits += 1
                self._order.move_to_end(hash_id)
                continue
            self._order[hash_id] = None
            if len(self._order) > self._num_blocks:
                self._order.popitem(last=False)
        return num_hits
