"""Stop strings: noticing them while tokens arrive, and keeping them out of the text."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import IncrementalDetokenizer, Tokenizer


class StopStringMatcher:
    """Tells when the text of a growing id sequence contains one of the stop strings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = tuple(stops)
        self._keep_len = max(len(stop) for stop in stops) - 1
        self._tail = ""

    def add(self, token_id: int) -> str | None:
        """The stop string that this token completed, the earliest in the text; or None."""
        self._tail += self._detokenizer.push(token_id)
        found = earliest_stop(self._tail, self._stops)
        self._tail = self._tail[-self._keep_len :] if self._keep_len else ""
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
