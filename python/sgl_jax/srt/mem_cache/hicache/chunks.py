"""How a batch of pages is cut into programs of few sizes."""

from __future__ import annotations

_MAX_CHUNK_BYTES = 32 << 20
_MAX_CHUNK_PAGES = 64
_MAX_CHUNK_MOVES = 128
_STEP = 4


def max_chunk_pages(page_bytes: int, num_buffers: int, num_rows: int) -> int:
    """The most pages that one program moves: a power of two.

    Chunks above some 32 MB are bound by page faults of fresh memory; the number of row moves in one program
    (pages x buffers) bounds its compile time to a few seconds. Nor does a batch have more pages than a rank has rows.
    """
    limit = min(
        _MAX_CHUNK_PAGES,
        num_rows,
        _MAX_CHUNK_BYTES // max(page_bytes, 1),
        _MAX_CHUNK_MOVES // max(num_buffers, 1),
    )
    return 1 << (max(limit, 1).bit_length() - 1)


def split_into_chunks(num_pages: int, largest: int) -> list[slice]:
    """Cut [0, num_pages) into runs of `bucket_sizes(largest)`, the largest first: no run needs padding."""
    runs: list[slice] = []
    start = 0
    for size in reversed(bucket_sizes(largest)):
        while num_pages - start >= size:
            runs.append(slice(start, start + size))
            start += size
    return runs


def bucket_sizes(largest: int) -> list[int]:
    """The lengths of runs, in ascending order: `largest` (a power of two), quarters of it, and 1.

    Each length is a compilation of seconds, and each run a call of some 0.1 ms.
    """
    sizes = {1}
    while largest > 1:
        sizes.add(largest)
        largest //= _STEP
    return sorted(sizes)
