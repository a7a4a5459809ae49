"""Puts another value in the place of a module's name for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """`module.name` is `value` within the block. AttributeError if there is no such name."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
