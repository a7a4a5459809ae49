"""A writer in a process of its own, for the crash tests: `writer_process.py ROOT WHAT`.

200          sets one key 200 times, then churns all keys; prints its failures
forever      sets and deletes until it is killed; prints a line per round
stop:N       stops after N bytes of a page file, prints "stopped", and finishes after a line on stdin
limited      writes with a file size limit below a page's; prints the result and the errors
"""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.types import PageKey

NUM_KEYS = 32


class StoppingOps(FileOps):
    """Writes the first bytes, tells the parent, and goes on when the parent says so."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        whole = memoryview(b"".join(buffers))
        count = super().writev(fd, [whole[: self.num_bytes]])
        if self.num_bytes < 10**9:
            self.num_bytes = 10**9
            print("stopped", flush=True)
            sys.stdin.readline()
        return count


def churn_forever(storage: LocalFileStorage, keys: list[PageKey]) -> None:
    for number in itertools.count():
        storage.set(keys, [[make_page(i)] for i in range(NUM_KEYS)])
        print(f"round {number}", flush=True)
        storage.delete(keys[number % 2 :: 2])


def set_repeatedly(storage: LocalFileStorage, keys: list[PageKey], num_sets: int) -> int:
    """One key over and over, then set and delete of all keys: writers really meet. Returns the failures."""
    results = [storage.set(keys[:1], [[make_page(0)]])[0] for _ in range(num_sets)]
    for number, key in enumerate(keys[1:], start=1):
        results += storage.set([key], [[make_page(number)]])
        storage.delete([key])
    return results.count(False)


def main(root: Path, what: str) -> None:
    keys = make_keys(NUM_KEYS)
    if what.startswith("stop:"):
        storage = LocalFileStorage(root, SPACE, ops=StoppingOps(int(what.removeprefix("stop:"))))
        print(storage.set(keys[:1], [[make_page(0)]]), flush=True)
        return
    storage = LocalFileStorage(root, SPACE)
    if what == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
        print(storage.set(keys[:1], [[make_page(0)]]), storage.stats().write_errors)
    elif what == "forever":
        churn_forever(storage, keys)
    else:
        print(set_repeatedly(storage, keys, int(what)), storage.stats().write_errors)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
