"""How a batch of pages is cut into programs of few sizes."""

from __future__ import annotations

_MAX_CHUNK_BYTES = 32 << 20
_MAX_CHUNK_PAGES = 64
_MAX_CHUNK_MOVES = 128


def max_chunk_pages(page_bytes: int, num_buffers: int) -> int:
    """The most pages that one program moves: a power of two.

    Chunks above some 32 MB are bound by page faults of fresh memory; the number of row moves in one program
    (pages x buffers) bounds its compile time to a few seconds.
    """
    limit = min(
        _MAX_CHUNK_PAGES,
        _MAX_CHUNK_BYTES // max(page_bytes, 1),
        _MAX_CHUNK_MOVES // max(num_buffers, 1),
    )
    return 1 << (max(limit, 1).bit_length() - 1)


def split_by_powers_of_two(num_pages: int, largest: int) -> list[slice]:
    """Cut [0, num_pages) into runs of `largest`, then of ever smaller powers of two: no run needs padding.

    `largest` is a power of two; the number of different lengths, and so of compilations, is log2(largest) + 1.
    """
    runs = []
    start, size = 0, largest
    while start < num_pages:
        while size > num_pages - start:
            size //= 2
        runs.append(slice(start, start + size))
        start += size
    return runs


def bucket_sizes(largest: int) -> list[int]:
    """Every length that `split_by_powers_of_two` can produce."""
    return [1 << power for power in range(largest.bit_length())]
