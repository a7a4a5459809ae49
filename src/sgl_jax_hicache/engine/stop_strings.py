"""Token ids to text, piece by piece, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a whole id sequence; incomplete UTF-8 becomes U+FFFD."""


class IncrementalDetokenizer:
    """Text of a growing id sequence: the pieces that `add` and `flush` return join to the text of the whole.

    A piece is held back while it ends in an incomplete character. Only the last few ids are decoded again, so the cost
    of a token does not grow with the length of the output.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._prefix_start = 0  # decoding starts here, for context
        self._read_end = 0  # text of ids before this was handed out

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token_id)
        return self._emit(final=False)

    def flush(self) -> str:
        """What is still held back, incomplete characters included."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        known = self._decoder.decode(self._ids[self._prefix_start : self._read_end])
        text = self._decoder.decode(self._ids[self._prefix_start :])
        if text.endswith(_REPLACEMENT) and not final:
            return ""
        piece = text[len(known) :]
        if piece:
            self._prefix_start, self._read_end = self._read_end, len(self._ids)
        return piece


class StopStringMatcher:
    """Tells when the text of a growing id sequence contains one of the stop strings."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(decoder)
        self._stops = tuple(stops)
        self._keep_len = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def add(self, token_id: int) -> str | None:
        """The stop string that this token completed, the earliest in the text; or None."""
        self._tail += self._detokenizer.add(token_id)
        found = earliest_stop(self._tail, self._stops)
        self._tail = self._tail[len(self._tail) - self._keep_len :] if self._keep_len else ""
        return found[1] if found else None


class StopTrimmer:
    """Lets text through up to the first stop string, and holds back what could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    def feed(self, piece: str, final: bool) -> str:
        """The text that may be shown after `piece`; with `final` nothing is held back any longer."""
        if self._stopped:
            return ""
        text = self._held + piece
        found = earliest_stop(text, self._stops)
        if found is not None:
            self._stopped = True
            return text[: found[0]]
        keep_len = 0 if final else self._partial_len(text)
        self._held = text[len(text) - keep_len :]
        return text[: len(text) - keep_len]

    def _partial_len(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def earliest_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(position, stop string) of the first one in the text; the longer of two that begin together."""
    hits = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return None
    position, _, stop = min(hits)
    return position, stop
