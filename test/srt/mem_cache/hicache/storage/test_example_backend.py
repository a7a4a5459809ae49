"""The storage backend of the guide passes the contract suite, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from storage_contract import StorageContract

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage

GUIDE = Path(__file__).parents[5] / "docs" / "hicache.md"


def example() -> Any:
    """The class in the guide's code block."""
    (code,) = (
        block
        for block in re.findall(
            r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL
        )
        if "class DictStorage" in block
    )
    names: dict[str, Any] = {}
    exec(code, names)
    return names["DictStorage"]


class TestTheGuidesBackend(StorageContract):
    """`DictStorage` of docs/hicache.md."""

    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        storage: HiCacheStorage = example()(namespace)
        return storage
