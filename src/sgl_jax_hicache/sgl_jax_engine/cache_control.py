"""Control of a scheduler's cache while it serves: what may be asked of it, and its answer.

A command goes from the launching process to the scheduler inside a message that the engine has for changing a
scheduler's state. Being a class of its own, it cannot be forged by a client of the route that carries JSON there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_jax.srt.mem_cache.hicache.errors import (
    HiCacheConfigError,
    StorageAttachError,
    StorageError,
)
from sgl_jax.srt.mem_cache.hicache.storage_mount import DetachedStorage, StorageMount
from sgl_jax.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

STATE_KEY = "hicache"
"""Under what name a command lies in the engine's message."""


class CacheAction(enum.Enum):
    """What may be asked."""

    STATISTICS = "statistics"
    ATTACH = "attach"
    DETACH = "detach"
    IS_DRAINED = "is_drained"
    CLEAR = "clear"


@dataclass(frozen=True)
class CacheCommand:
    """`path` and `max_bytes` are ATTACH's."""

    action: CacheAction
    path: str = ""
    max_bytes: int = 0


@dataclass(frozen=True)
class CacheAnswer:
    """`status` as HTTP has it; `message` says what was wrong, if it is not 200."""

    status: int
    body: dict[str, Any] = field(default_factory=dict)
    message: str = ""


class CacheControl:
    """Carries commands out between two steps. Scheduler thread.

    `tree` may be another cache than ours, which cannot be controlled. `num_processes` of the engine run the same
    scheduler. `flush` empties device and host if the scheduler is idle, and says why not, or None.
    """

    def __init__(self, tree: Any, num_processes: int, flush: Callable[[], str | None]) -> None:
        self._tree = tree
        self._num_processes = num_processes
        self._flush = flush
        self._detached: DetachedStorage | None = None

    def answer(self, command: CacheCommand) -> CacheAnswer:
        """Do it; never raises for what the command asks."""
        try:
            return CacheAnswer(200, self._do(command))
        except HiCacheConfigError as error:
            return CacheAnswer(400, message=str(error))
        except StorageError as error:
            return CacheAnswer(409, message=str(error))

    def _do(self, command: CacheCommand) -> dict[str, Any]:
        if not isinstance(self._tree, UnifiedRadixCache):
            raise StorageAttachError("HiCache is off: start with --hicache-storage none or file")
        if command.action is CacheAction.STATISTICS:
            return self._tree.statistics().as_dict()
        if command.action is CacheAction.IS_DRAINED:
            return {"drained": self._is_drained()}
        if self._num_processes > 1:
            # A folder may be usable in one process and not in another; their trees would part.
            raise StorageAttachError("with --nnodes above 1 storage cannot come and go")
        if command.action is CacheAction.ATTACH:
            return self._attach(self._tree, command)
        if command.action is CacheAction.DETACH:
            return self._detach(self._tree)
        return self._clear(self._tree)

    def _attach(self, tree: UnifiedRadixCache, command: CacheCommand) -> dict[str, Any]:
        mount = tree.open_storage(Path(command.path), command.max_bytes)
        self._give(tree, mount)
        return {"attached": True, "path": command.path, "max_bytes": command.max_bytes}

    def _detach(self, tree: UnifiedRadixCache) -> dict[str, Any]:
        detached = self._detached = tree.detach_storage()
        detached.drained.add_done_callback(lambda _: detached.mount.close())
        return {"detached": True, "drained": self._is_drained()}

    def _is_drained(self) -> bool:
        return self._detached is None or self._detached.drained.done()

    def _clear(self, tree: UnifiedRadixCache) -> dict[str, Any]:
        if tree.statistics().storage_path is None:
            raise StorageAttachError("no storage is attached")
        refused = "transfers are unfinished" if tree.has_pending_work() else self._flush()
        if refused is not None:
            raise StorageAttachError(f"not flushed: {refused}")
        mount = tree.detach_storage().mount  # nothing is written there while it is cleared
        try:
            return {"flushed": True, "storage_pages_removed": mount.clear()}
        finally:
            self._give(tree, mount)

    def _give(self, tree: UnifiedRadixCache, mount: StorageMount) -> None:
        try:
            tree.attach_storage(mount)
        except BaseException:
            mount.close()
            raise
