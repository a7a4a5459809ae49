"""docs/tools.md says what the tools do: its worked example and its table of tools are run."""

from __future__ import annotations

import re
from pathlib import Path

from tool_kit import Tools

from sgl_jax_hicache.tools.__main__ import TOOLS

DOCUMENT = (Path(__file__).parents[4] / "docs" / "tools.md").read_text(encoding="utf-8")


def block_after(heading: str, language: str) -> str:
    """The first code block of that language after a text."""
    rest = DOCUMENT[DOCUMENT.index(heading) :]
    match = re.search(rf"```{language}\n(.*?)```", rest, re.DOTALL)
    assert match is not None
    return match[1]


def test_the_worked_example_is_what_size_prints(tools: Tools, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(block_after("A worked example", "json"))
    match = re.search(r"^    sgl-jax-hicache (size .*)$", DOCUMENT, re.MULTILINE)
    assert match is not None
    argv = match[1].replace("config.json", str(path)).split()
    printed = tools.run(*argv, as_json=False).out
    shown = DOCUMENT[match.end() : DOCUMENT.index("By hand:")]
    assert [line.split() for line in printed.splitlines() if line.strip()] == [
        line.split() for line in shown.splitlines() if line.strip()
    ]


def test_every_tool_is_in_the_table() -> None:
    assert re.findall(r"^\| `(\w+)[^|]*` \|", DOCUMENT, re.MULTILINE)[: len(TOOLS)] == list(TOOLS)
