"""How much of a prompt each tier should serve, worked out from what is kept of windows and states by definition."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid_models import HybridModel


@dataclass
class KeptBorders:
    """One cached sequence, its prompts and answers, page by page. `interval` and `page_size` in tokens.

    A border (tokens from the start, in whole pages) can be resumed at if every kind of layer can be: sliding layers
    if all pages of the window before it are kept, recurrent ones at multiples of the interval.
    """

    model: HybridModel
    page_size: int
    interval: int
    ends: list[int] = field(default_factory=list)

    def add_answer(self, prompt_len: int, answer_len: int) -> None:
        """A prompt of so many tokens was answered with so many, of which the last was never computed."""
        for end in (prompt_len, prompt_len + answer_len - 1):
            self.ends.append(end // self.page_size * self.page_size)

    def on_device(self, shared: int) -> int:
        """Tokens that a prompt which shares its first `shared` ones finds, while nothing has been evicted."""
        return max(
            border for border in self._borders(shared) if self._has_state(border) or border == 0
        )

    def below(self, shared: int) -> int:
        """The same for the host and for files."""
        kept = self._kept_pages()
        return max(
            border
            for border in self._borders(shared)
            if border == 0 or (self._has_state(border) and self._window(border) <= kept)
        )

    def _borders(self, shared: int) -> range:
        return range(0, min(shared, max(self.ends)) + 1, self.page_size)

    def _has_state(self, border: int) -> bool:
        return not self.model.has_states or border % self.interval == 0

    def _window(self, border: int) -> set[int]:
        """Pages that a token at `border` sees of what lies before it."""
        if not self.model.slides:
            return set()
        first_seen = max(border - (self.model.window - 1), 0)
        return set(range(first_seen // self.page_size, border // self.page_size))

    def _kept_pages(self) -> set[int]:
        """The windows before every multiple of the interval, and before each end and the border one page ahead of
        it."""
        kept: set[int] = set()
        for end in self.ends:
            kept |= self._window(end) | self._window(max(end - self.page_size, 0))
        for checkpoint in range(self.interval, max(self.ends) + 1, self.interval):
            kept |= self._window(checkpoint)
        return kept
