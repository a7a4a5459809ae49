"""What a tool found: the same facts for a program (JSON) and for a person (tables and lines)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 1000
"""Columns where the output is no terminal: nothing is folded there."""

DAMAGE = 1
"""Exit status if something is damaged, or was not done."""


@dataclass
class Report:
    """`data` is the JSON; `parts` are tables and lines in the order in which a person reads them."""

    data: dict[str, Any]
    parts: list[Table | Text] = field(default_factory=list)
    status: int = 0

    def line(self, text: str = "") -> None:
        """Add a line of plain text."""
        self.parts.append(Text(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Add a table. A column whose name begins with `>` is aligned to the right."""
        table = Table(
            box=SIMPLE_HEAD,
            title=title or None,
            title_justify="left",
            pad_edge=False,
            title_style="",
        )
        for name in columns:
            table.add_column(
                Text(name.lstrip(">")),
                justify="right" if name.startswith(">") else "left",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*map(Text, row))
        self.parts.append(table)

    def show(self, file: IO[str], *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            file.write(json.dumps(self.data, indent=2) + "\n")
            return
        console = Console(file=file, width=None if file.isatty() else WIDTH, highlight=False)
        with console.capture() as capture:
            for part in self.parts:
                console.print(part, soft_wrap=isinstance(part, Text))
        file.write(capture.get())
