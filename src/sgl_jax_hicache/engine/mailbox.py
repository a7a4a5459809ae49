"""The one way from other threads to the scheduler thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue that a reader can wait on without taking anything. Any thread posts, one thread reads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._items: deque[T] = deque()
        self._closed = False

    def post(self, item: T) -> bool:
        """Append and wake the reader. False, and nothing appended, once the box is closed."""
        with self._condition:
            if self._closed:
                return False
            self._items.append(item)
            self._condition.notify_all()
            return True

    def take_all(self) -> list[T]:
        """Everything posted so far, oldest first; never blocks."""
        if not self._items:  # a stale answer only delays an item by one round
            return []
        with self._condition:
            items = list(self._items)
            self._items.clear()
            return items

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something is there or the time is over; True if something is there."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._items), timeout_s)

    def close(self) -> list[T]:
        """Refuse all further posts; returns what nobody has taken."""
        with self._condition:
            self._closed = True
            items = list(self._items)
            self._items.clear()
            return items
