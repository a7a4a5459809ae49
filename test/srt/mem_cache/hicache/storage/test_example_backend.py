"""The storage backend of the guide passes the contract suite and serves an engine, as it stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from storage_contract import StorageContract

from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage

GUIDE = Path(__file__).parents[5] / "docs" / "hicache.md"


def blocks() -> list[str]:
    """The guide's code about `DictStorage`: the class, and an engine that uses it."""
    text = GUIDE.read_text(encoding="utf-8")
    return [
        code
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "DictStorage" in code
    ]


def example() -> Any:
    """The class."""
    names: dict[str, Any] = {}
    exec(blocks()[0], names)
    return names["DictStorage"]


class TestTheGuidesBackend(StorageContract):
    """`DictStorage` of docs/hicache.md."""

    def open(self, place: Path, namespace: StorageNamespace) -> HiCacheStorage:
        storage: HiCacheStorage = example()(namespace)
        return storage


def test_an_engine_serves_from_it_as_the_guide_says(capsys: pytest.CaptureFixture[str]) -> None:
    _, use = blocks()
    exec(use, {"DictStorage": example()})
    (printed,) = capsys.readouterr().out.splitlines()
    assert ast.literal_eval(printed) == {"device": 0, "host": 0, "storage": 192, "computed": 5}
