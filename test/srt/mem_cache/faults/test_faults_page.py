"""docs/faults.md names tests that exist, and for every fault a test or the reason why it cannot occur."""

from __future__ import annotations

import ast
import re
from pathlib import Path

MEM_CACHE = Path(__file__).parents[1]
PAGE = MEM_CACHE.parents[2] / "docs" / "faults.md"


def names_of_tests() -> set[str]:
    """Every test function of the suite."""
    return {
        node.name
        for path in MEM_CACHE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
    }


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [row for row in cells if row[0][:1].isdigit()]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) > 100
    assert named - names_of_tests() == set()


def test_every_fault_has_a_test_or_a_reason() -> None:
    table = rows()
    assert any(row[0] == "1" for row in table)
    for row in table:
        has_test = "`test_" in row[-1]
        assert has_test or "cannot occur" in row[-2], row
    numbers = [n for row in table for n in row[0].split(", ")]
    assert len(numbers) == len(set(numbers)) > 80
