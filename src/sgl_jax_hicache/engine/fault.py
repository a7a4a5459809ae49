"""What must never happen: an invariant of the engine is broken, and going on would compute from the wrong memory."""

from __future__ import annotations


class SchedulerFault(Exception):
    """Slots leaked, a window or a state is not there, or a flush came in the middle of work."""
