"""docs/tools.md says what the tools do: its worked example, its reader and its table of fields are run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from tool_kit import SPACE, Tools, chain, path_of, store_chain

from sgl_jax.srt.mem_cache.hicache.storage.page_file import VERSION_1, VERSION_2, RecordVersion
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


def test_plain_numpy_reads_a_page_as_shown(root: Path, capsys: object) -> None:
    keys = store_chain(root, 3)
    names = {"path": path_of(root, keys[2])}
    exec(block_after("plain numpy reads", "python"), names)
    pages = chain(3)[1]
    np.testing.assert_array_equal(names["payload"], pages[2])
    out = capsys.readouterr().out  # type: ignore[attr-defined]
    assert "page 2 of its prompt" in out
    assert f"follows {keys[1].hex()}" in out
    assert SPACE.kv_dtype in out


def fields_of(version: RecordVersion) -> list[tuple[str, int]]:
    record = np.dtype([*version.fields])
    return [(name, record[name].itemsize) for name in record.names or ()]


def test_the_table_of_fields_is_the_format() -> None:
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| ([\d +]+) \|", DOCUMENT, re.MULTILINE)
    listed = [
        (name, int(size))
        for names, sizes in rows
        for name, size in zip(names.split(", "), sizes.split(" + "), strict=True)
    ]
    assert listed == fields_of(VERSION_2)
    new = {"parent_key", "page_index", "layout_id"}
    assert [field for field in listed if field[0] not in new] == fields_of(VERSION_1)


def test_every_tool_is_in_the_table() -> None:
    assert re.findall(r"^\| `(\w+)[^|]*` \|", DOCUMENT, re.MULTILINE)[: len(TOOLS)] == list(TOOLS)
