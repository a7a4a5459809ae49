"""Keeps a model's folder below a number of bytes, whoever writes to it.

Before a page is written, room for it is taken. A storage takes room from the ledger in slabs, so that most pages cost
no call. When the ledger has no room, the folder is counted and pages go as `retention` says, until a sixteenth of the
bound is free: so the work is done once for many pages. It happens in the worker that writes, under the ledger's lock;
other writers to the folder wait, readers do not.

Bytes are file sizes. Pages, and damaged files that were set aside, count; a file that is being written counts as
promised. What is counted may be a little more than there is (a page that a count sees in the moment before its writer
reports it), never less.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..byte_size import show_bytes
from .chains import LinkReader
from .inventory import take_inventory
from .retention import Removal, carry_out, plan_removal
from .stats import StatsCounter
from .usage_ledger import Usage, UsageLedger, promise

logger = logging.getLogger(__name__)

FREED_SHARE = 16
"""One part in so many of the bound is freed at once."""

SLAB_SHARE = 512
"""One part in so many of the bound is promised to a writer at once."""

COUNTED_SHARE = 8
"""After one part in so many of the bound was written, the folder is counted even if there seems to be room: others may
write to it without a bound, or a person may have removed pages."""

START_WAIT_S = 10.0
CLOSE_WAIT_S = 1.0
"""A neighbour that hangs while it has the ledger must keep a server neither from starting nor from ending. What is not
counted then, is counted before the first write; what is not given back, is taken back when this process is dead."""


class BoundReachedError(OSError):
    """There is no room below the bound, and nothing that can go."""


class FolderBound(ABC):
    """The bound on a folder, as the storage that writes to it uses it. Any thread."""

    @abstractmethod
    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Room for a file of that size, which is written inside the `with`; given back if that raises.

        Raises OSError, BoundReachedError above all, if there is none.
        """
        yield

    @abstractmethod
    def removed(self, num_bytes: int) -> None:
        """A file of that size was removed."""

    @abstractmethod
    def give_way(self) -> bool:
        """The disk is full below the bound: removes a part of the pages. False if nothing was removed."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what was promised and not used."""


class Unbounded(FolderBound):
    """No bound: nothing is counted, nothing is removed."""

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Always."""
        yield

    def removed(self, num_bytes: int) -> None:
        """Nothing is counted."""

    def give_way(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to do."""


class KeptBound(FolderBound):
    """At most `max_bytes` in `<root>/<model_folder>`, kept together with all other processes that bound it."""

    def __init__(
        self, root: Path, model_folder: str, max_bytes: int, counter: StatsCounter
    ) -> None:
        """Counts the folder, and brings it below the bound, before it returns; what fails is logged and tried again
        with the first write.
        """
        self._root = root
        self._model_folder = model_folder
        self._max_bytes = max_bytes
        self._counter = counter
        self._ledger = UsageLedger(root, model_folder)
        self._links = LinkReader()
        self._lock = threading.Lock()
        # Of what the ledger promised: written since, being written, and not used yet.
        self._written = self._in_writing = self._left = 0
        self._uncounted: int | None = (
            None  # written since the folder was counted; None: never counted
        )
        self._held_bytes = 0
        self._is_short = False
        counter.folder_holds(0, max_bytes)
        self._count_at_start()

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """See `FolderBound.room`."""
        with self._lock:
            if self._left < num_bytes:
                self._take(num_bytes)
            self._left -= num_bytes
            self._in_writing += num_bytes
        try:
            yield
        except BaseException:
            with self._lock:
                self._in_writing -= num_bytes
                self._left += num_bytes
            raise
        with self._lock:
            self._in_writing -= num_bytes
            self._written += num_bytes
            self._show()
            if self._left < num_bytes and not self._in_writing:
                self._give_back()  # else a count would find the page, and the promise for it too

    def removed(self, num_bytes: int) -> None:
        """See `FolderBound.removed`. The ledger learns of it with the next room that is taken."""
        with self._lock:
            self._written -= num_bytes
            self._show()

    def give_way(self) -> bool:
        """See `FolderBound.give_way`. Never raises."""
        try:
            with self._lock, self._ledger.locked() as usage:
                removal = self._count(
                    usage, free_bytes=self._max_bytes // FREED_SHARE, of_held=True
                )
        except OSError as error:
            logger.debug("the full disk of %s stays full: %s", self._root, error)
            return False
        return removal.pages + removal.other_files > 0

    def close(self) -> None:
        """See `FolderBound.close`. Never raises."""
        with self._lock:
            self._give_back(wait_s=CLOSE_WAIT_S)

    # -- with the lock held -----------------------------------------------------------------------

    def _take(self, num_bytes: int) -> None:
        """Have room for `num_bytes` in what is left of the promise. Raises OSError."""
        slab = max(num_bytes, self._max_bytes // SLAB_SHARE)
        with self._ledger.locked() as usage:
            self._settle(usage)
            if self._uncounted is None or self._uncounted > self._max_bytes // COUNTED_SHARE:
                usage.held_bytes = None
            if self._room(usage) < slab:
                self._count(usage, free_bytes=slab)
            room = min(self._room(usage), slab)
            if room >= num_bytes:
                self._left = room
            usage.promised[self._ledger.me] = promise(self._in_writing + self._left)
            self._show()
        if room < num_bytes:
            self._say_short(usage)
            raise BoundReachedError(
                errno.EDQUOT,
                f"no room for {show_bytes(num_bytes)} below the bound of {show_bytes(self._max_bytes)}",
            )
        self._is_short = False

    def _give_back(self, wait_s: float | None = None) -> None:
        """Settle, and keep no promise; a ledger that cannot be written, or be had in time, learns of it later."""
        try:
            with self._ledger.locked(create=False, wait_s=wait_s) as usage:
                self._settle(usage)
                usage.promised.pop(self._ledger.me, None)
                self._left = 0
                self._show()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.debug("the ledger of %s cannot be written: %s", self._root, error)

    def _settle(self, usage: Usage) -> None:
        """What was written of the promise is held now."""
        if usage.held_bytes is not None:
            usage.held_bytes = max(usage.held_bytes + self._written, 0)
        if self._uncounted is not None:
            self._uncounted += max(self._written, 0)
        self._held_bytes = usage.held_bytes or 0
        self._written = 0

    def _room(self, usage: Usage) -> int:
        """Bytes that may be promised to this writer, besides what it is writing; negative if the folder is not counted
        or too full.
        """
        if usage.held_bytes is None:
            return -1
        taken = usage.promised_to_others(self._ledger.me) + self._in_writing
        return self._max_bytes - usage.held_bytes - taken

    def _count(self, usage: Usage, free_bytes: int, of_held: bool = False) -> Removal:
        """Count the folder. If `free_bytes` do not fit in, remove pages until they do, and a good deal more; with
        `of_held` remove that much in any case.
        """
        found = take_inventory(self._root, (self._model_folder,))
        usage.forget_dead()
        held_bytes = found.page_bytes + found.quarantined_bytes
        usage.held_bytes = held_bytes
        removal = Removal()
        if of_held or self._room(usage) < free_bytes:
            taken = self._max_bytes - held_bytes - self._room(usage)
            target = self._max_bytes - taken - free_bytes - self._max_bytes // FREED_SHARE
            if of_held:
                target = held_bytes - free_bytes
            elif taken + max(free_bytes, 1) > self._max_bytes:
                # Promised away: an empty folder would not have the room either, so no page goes for it.
                target = self._max_bytes
            plan = plan_removal(found, self._links, max_bytes=max(target, 0))
            removal = carry_out(plan)
            usage.held_bytes = held_bytes - removal.num_bytes
            self._counter.add(
                evicted=removal.pages,
                evicted_bytes=removal.num_bytes,
                delete_errors=removal.failed,
            )
            logger.info(
                "%s held %s of at most %s: %d pages that were unused for longest went, %s in all",
                self._root / self._model_folder,
                show_bytes(held_bytes),
                show_bytes(self._max_bytes),
                removal.pages,
                show_bytes(removal.num_bytes),
            )
        self._uncounted = 0
        self._held_bytes = usage.held_bytes
        self._show()
        return removal

    def _show(self) -> None:
        self._counter.folder_holds(max(self._held_bytes + self._written, 0), self._max_bytes)

    def _say_short(self, usage: Usage) -> None:
        if not self._is_short:
            self._is_short = True
            logger.warning(
                "%s holds %s, promised %s more, of at most %s, and nothing of it can go: pages are not stored",
                self._root / self._model_folder,
                show_bytes(usage.held_bytes or 0),
                show_bytes(sum(num_bytes for num_bytes, _ in usage.promised.values())),
                show_bytes(self._max_bytes),
            )

    def _count_at_start(self) -> None:
        folder = self._root / self._model_folder
        if not os.path.lexists(folder):
            return
        try:
            with self._lock, self._ledger.locked(wait_s=START_WAIT_S) as usage:
                self._count(usage, free_bytes=0)
        except OSError as error:
            logger.warning("%s cannot be counted: %s", folder, error)
