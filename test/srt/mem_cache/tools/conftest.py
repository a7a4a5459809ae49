"""Fixtures of the tool tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tool_kit import Tools


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty storage root."""
    path = tmp_path / "root"
    path.mkdir(0o700)
    return path


@pytest.fixture
def tools(root: Path, capsys: pytest.CaptureFixture[str]) -> Tools:
    """Tools on that root."""
    return Tools(root, capsys)
