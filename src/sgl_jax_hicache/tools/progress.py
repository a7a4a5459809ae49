"""Progress bars on stderr, where stderr is a terminal; stdout has the result and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Tick = Callable[[int], None]
"""Told of every so many more that are done."""


@contextmanager
def progress(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Tick]:
    """A bar towards `total` (None: not known) that the yielded function moves."""
    columns: tuple[ProgressColumn, ...] = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if in_bytes
        else (MofNCompleteColumn(),)
    )
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)
