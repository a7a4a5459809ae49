"""Kinds of models for scheduler worlds: settings of `SchedulerWorld`, for pages of 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"window": 10, "swa_pages": 20},
    "recurrent": {"states": 6, "interval": 8},
    "both": {"window": 7, "swa_pages": 20, "states": 6, "interval": 8},
}

kinds = pytest.mark.parametrize("kind", KINDS)
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
