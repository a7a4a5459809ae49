"""What ends a start with one line."""

from __future__ import annotations

TESTED_COMMIT = "cddbf6f1"
TESTED_DATE = "2026-08-21"


class EngineMismatchError(RuntimeError):
    """The installed engine is not built as this package expects; the message says where, and what was tested."""
