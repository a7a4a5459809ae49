"""The guide's chapter on components: its example keeps enough at every border, its table is complete."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.srt.mem_cache.hicache.components.base import TreeComponent
from sgl_jax.srt.mem_cache.hicache.coverage import Coverage, Part, usable_prefix

GUIDE = (Path(__file__).parents[4] / "docs" / "hicache.md").read_text(encoding="utf-8")


def chunked_component(chunk_tokens: int, page_size: int) -> Any:
    """The class in the guide's code block, for one chunk size."""
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
        if "class ChunkedComponent" in block
    )
    names: dict[str, Any] = {}
    exec(code, names)
    return names["ChunkedComponent"](
        chunk_tokens=chunk_tokens, index=1, page_size=page_size, interval=page_size
    )


@pytest.mark.parametrize("chunk_tokens", [4, 8, 12, 30])
def test_what_the_example_wants_holds_all_that_a_chunked_layer_reads(chunk_tokens: int) -> None:
    page_size, num_pages = 4, 20
    component = chunked_component(chunk_tokens, page_size)
    for border in range(1, num_pages + 1):
        # The next token is at position `tokens`; it reads its chunk from the beginning.
        tokens = border * page_size
        read = range(tokens // chunk_tokens * chunk_tokens, tokens)
        pages = {token // page_size for token in read}
        assert len(pages) <= component.reach
        without = [Coverage.of_pages(set(range(num_pages)) - {page}) for page in pages]
        assert all(usable_prefix([Part(c, component.reach)], border) < border for c in without)


def test_the_table_of_questions_is_what_a_component_must_answer() -> None:
    table = GUIDE[GUIDE.index("| `TreeComponent` asks") : GUIDE.index("The hooks `write_through`")]
    asked = set(re.findall(r"^\| `(\w+)`:", table, re.MULTILINE))
    abstract = {
        name
        for name, member in inspect.getmembers(TreeComponent)
        if getattr(member, "__isabstractmethod__", False)
    }
    assert asked == abstract | {"reach"}
