"""What the tool tests share: a storage with two models, and a way to run a tool."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher, StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import PageFileFormat
from sgl_jax.srt.mem_cache.hicache.types import PageKey, PageLink
from sgl_jax_hicache.tools.__main__ import main

PAGE_BYTES = 1000
SPACE = StorageNamespace(
    "org/model",
    "v1",
    4,
    "bfloat16",
    "hicache-page-v1|full|page=4|shard=0/1|k:bfloat16[4,125]",
    1000,
)
OTHER = replace(SPACE, model_id="another", page_size=8)
FILE_BYTES = PageFileFormat(SPACE).file_bytes


@dataclass(frozen=True)
class Ran:
    """How a tool ended."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Its JSON."""
        return json.loads(self.out)


class Tools:
    """Runs tools in this process on one root."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capsys = capsys

    def run(self, what: str, *argv: str, as_json: bool = True) -> Ran:
        """One tool; usage errors too are a status."""
        self._capsys.readouterr()
        place = () if what == "size" else ("--path", str(self.root))
        try:
            status = main([what, *place, *argv, *(("--json",) if as_json else ())])
        except SystemExit as end:
            status = int(end.code or 0)
        captured = self._capsys.readouterr()
        return Ran(status, captured.out, captured.err)


def chain(
    num_pages: int, first_token: int = 0, space: StorageNamespace = SPACE
) -> tuple[list[PageKey], list[npt.NDArray[np.uint8]], list[PageLink]]:
    """Keys, content and links of the pages of one prompt; the same for the same prompt."""
    tokens = np.arange(first_token, first_token + num_pages * space.page_size, dtype="<i8")
    keys = PageHasher(space, None).chain(None, tokens.tobytes())
    rng = np.random.default_rng(first_token)
    pages = [rng.integers(0, 256, space.page_bytes, dtype=np.uint8) for _ in keys]
    return keys, pages, [PageLink(keys[i - 1] if i else None, i) for i in range(num_pages)]


def store_chain(
    root: Path,
    num_pages: int,
    first_token: int = 0,
    age_s: float = 0.0,
    space: StorageNamespace = SPACE,
) -> list[PageKey]:
    """The pages of one prompt, last used that long ago."""
    keys, pages, links = chain(num_pages, first_token, space)
    storage = LocalFileStorage(root, space)
    assert storage.set_linked(keys, [[page] for page in pages], links) == [True] * num_pages
    set_age(root, keys, age_s, space)
    return keys


def path_of(root: Path, key: PageKey, space: StorageNamespace = SPACE) -> Path:
    """The file of a page."""
    return LocalFileStorage(root, space).path_of(key)


def set_age(
    root: Path, keys: Sequence[PageKey], age_s: float, space: StorageNamespace = SPACE
) -> None:
    """Make pages look as if they were last used that long ago."""
    for key in keys:
        then_s = time.time() - age_s
        os.utime(path_of(root, key, space), (then_s, then_s))
