"""How many slots of the SWA pool one request can keep from others at a time, however long it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SWABounds:
    """`window`: tokens that a sliding layer sees; `chunk_tokens`: most tokens of one prefill step. All in tokens."""

    page_size: int
    window: int
    chunk_tokens: int

    def _page_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    @property
    def locked(self) -> int:
        """The window before a page border, which a lock keeps."""
        return self._page_up(self.window - 1)

    @property
    def kept(self) -> int:
        """What a request that decodes keeps of its own: the window, the page it is cut in, and one page more."""
        return self.locked + 2 * self.page_size

    @property
    def prefilling(self) -> int:
        """Most that a request with an unfinished prompt keeps: a locked window and the next chunk or window."""
        return self.kept + max(self._page_up(self.chunk_tokens), self.kept)

    @property
    def decoding(self) -> int:
        """Most that a request with a finished prompt keeps: the prompt's locked window and its own."""
        return 2 * self.kept

    def growth(
        self, *, seq_len: int, new_len: int, tree_len: int, freed_len: int, prefills: bool
    ) -> int:
        """Slots that a sequence will ask for beyond those it keeps, on its way from `seq_len` to `new_len`.

        `tree_len` of its tokens are the cache's and locked; what it has of its own before `freed_len` is free already.
        """
        own = max(0, self._page_up(seq_len) - max(tree_len, freed_len))
        keeps = own + min(tree_len, self.locked)
        most = self.prefilling if prefills else self.decoding
        return max(0, min(self._page_up(new_len) - self._page_up(seq_len), most - keeps))
