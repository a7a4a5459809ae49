"""The settings of HiCache: one definition of every flag, its meaning, its unit and its allowed values.

Flags are kept as text by argparse and judged here, so that a wrong value reads the same whether it comes from a command
line or from code: one line with what was asked, what is allowed and what to change. A launcher prints that line and
exits with status 2, before it loads a model.
"""

from __future__ import annotations

import argparse
import enum
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .byte_size import ALLOWED as ALLOWED_BYTES
from .byte_size import parse_bytes
from .errors import HiCacheConfigError


class StorageKind(enum.Enum):
    """What stands below the host tier. HiCache being off is `HiCacheConfig.storage is None`, not a kind."""

    NONE = "none"
    FILE = "file"


class WritePolicy(enum.Enum):
    """When a page is written to storage: with its host copy, or when it leaves the host (flush and shutdown too)."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_AND_BACK = "write_through_and_back"


class PrefetchPolicy(enum.Enum):
    """How long a request that could be admitted waits for its pages from storage."""

    WAIT_COMPLETE = (
        "wait_complete"  # until they are there, as long as storage delivers anything to anyone
    )
    BEST_EFFORT = "best_effort"  # not at all
    TIMEOUT = "timeout"  # for a fixed time


@dataclass(frozen=True)
class PrefetchRules:
    """When storage is asked for a prompt, and how long its request waits for the answer.

    `deadline_s`: seconds without any page from storage (WAIT_COMPLETE), or in all (TIMEOUT), after which a request goes
    on with what has arrived. `threshold`: tokens that device and host must lack of a prompt for storage to be asked.
    """

    policy: PrefetchPolicy
    deadline_s: float
    threshold: int


class AsyncImpl(enum.Enum):
    """Who waits for a copy between device and host: a worker thread, or `is_ready()` polled once per step."""

    THREADPOOL = "threadpool"
    FUTURE = "future"


class HostScheme(enum.Enum):
    """How host pages are held: one set of arrays per page, or one preallocated slab with indexed writes."""

    PER_BLOCK = "per_block"
    SLAB = "slab"


DEFAULT_STORAGE_PATH = Path("~/.cache/sgl-jax/hicache")

_Choice = TypeVar("_Choice", bound=enum.Enum)


@dataclass(frozen=True)
class HiCacheConfig:
    """Everything a person can set. A value that is constructed is valid; a wrong one raises HiCacheConfigError."""

    # None: HiCache is off and the cache is an ordinary prefix cache. NONE: L1 + L2. FILE: L1 + L2 + L3.
    storage: StorageKind | None = None
    # Host pool size as a multiple of the device pool, in pages; > 0. Below 1 the host holds less than the device.
    ratio: float = 2.0
    # Root folder of L3, made absolute; `~` is expanded. Several servers may share it. `storage.root` checks it.
    storage_path: Path = DEFAULT_STORAGE_PATH
    # Largest size of this model's folder in L3, in bytes; pages unused for longest go first. 0: no bound.
    storage_max_bytes: int = 0
    # When pages go to L3.
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    # How device <-> host copies are waited for.
    async_impl: AsyncImpl = AsyncImpl.THREADPOOL
    # How host memory is laid out.
    host_scheme: HostScheme = HostScheme.PER_BLOCK
    # Whether a request that could be admitted waits for its pages from L3; what has arrived when it goes on is used.
    storage_prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    # Seconds, > 0. WAIT_COMPLETE: without any page from L3, for anyone. TIMEOUT: in all. BEST_EFFORT does not wait.
    prefetch_deadline_s: float = 5.0
    # Tokens of a prompt that L1 and L2 must lack before L3 is asked; 0: always ask.
    prefetch_threshold: int = 0
    # Tokens between the page borders at which windows and recurrent states are kept; a multiple of the page size. Only
    # for models with such layers. None: chosen from the model (see `host_split`).
    checkpoint_interval: int | None = None

    def __post_init__(self) -> None:
        if self.storage is not None:
            _require_member("--hicache-storage", self.storage, StorageKind)
        _require_positive("--hicache-ratio", self.ratio)
        _require_member("--hicache-write-policy", self.write_policy, WritePolicy)
        _require_member("--hicache-async-impl", self.async_impl, AsyncImpl)
        _require_member("--hicache-host-scheme", self.host_scheme, HostScheme)
        _require_member(
            "--hicache-storage-prefetch-policy", self.storage_prefetch_policy, PrefetchPolicy
        )
        _require_positive("--hicache-prefetch-deadline-s", self.prefetch_deadline_s)
        _require_count("--hicache-prefetch-threshold", self.prefetch_threshold, smallest=0)
        _require_bytes("--hicache-storage-max-bytes", self.storage_max_bytes)
        if self.checkpoint_interval is not None:
            _require_count("--hicache-checkpoint-interval", self.checkpoint_interval, smallest=1)
        if not isinstance(self.storage_path, Path):
            raise _wrong("--hicache-storage-path", self.storage_path, "a pathlib.Path")
        object.__setattr__(self, "storage_path", _expand(self.storage_path))

    @property
    def enabled(self) -> bool:
        """True if there is a host tier."""
        return self.storage is not None

    @property
    def has_storage(self) -> bool:
        """True if there is a storage tier below the host."""
        return self.storage not in (None, StorageKind.NONE)

    @property
    def prefetch_rules(self) -> PrefetchRules:
        """The three settings about prefetches together."""
        return PrefetchRules(
            self.storage_prefetch_policy, self.prefetch_deadline_s, self.prefetch_threshold
        )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the `--hicache-*` flags to a launcher's parser. Read them back with `from_args` only."""
        group = parser.add_argument_group(
            "HiCache",
            "A KV cache in three levels: device (L1), pinned host memory (L2), files (L3).",
        )
        for flag in _FLAGS:
            group.add_argument(
                flag.option,
                # Absent flags leave no trace, so that `from_args` knows which were given.
                default=argparse.SUPPRESS,
                metavar=flag.metavar,
                help=flag.help,
            )

    @classmethod
    def from_args(cls, namespace: argparse.Namespace) -> HiCacheConfig:
        """Build from what `add_cli_args` parsed. Raises HiCacheConfigError with one line a person can act on."""
        given: dict[str, Any] = {
            flag.field: flag.parse(flag.option, getattr(namespace, flag.dest))
            for flag in _FLAGS
            if hasattr(namespace, flag.dest)
        }
        if given and "storage" not in given:
            first = next(flag.option for flag in _FLAGS if flag.field in given)
            raise HiCacheConfigError(
                f"{first} has no effect, because HiCache is off without --hicache-storage; "
                f"add --hicache-storage {_allowed(StorageKind)}, or remove {first}"
            )
        if given.get("storage") is StorageKind.NONE:
            useless = [flag.option for flag in _FLAGS if flag.field in given and flag.of_storage]
            if useless:
                raise HiCacheConfigError(
                    f"{useless[0]} has no effect with --hicache-storage none, which has no files; "
                    f"use --hicache-storage file, or remove {useless[0]}"
                )
        never_waits = given.get("storage_prefetch_policy") is PrefetchPolicy.BEST_EFFORT
        if never_waits and "prefetch_deadline_s" in given:
            raise HiCacheConfigError(
                "--hicache-prefetch-deadline-s has no effect with --hicache-storage-prefetch-policy best_effort, "
                "which never waits; remove one of them"
            )
        return cls(**given)


@dataclass(frozen=True)
class _Flag:
    """One command line flag: the field it sets and how its text becomes a value."""

    field: str
    metavar: str
    help: str
    parse: Callable[[str, Any], Any]  # (option, text) -> value
    of_storage: bool = False  # means nothing without files

    @property
    def option(self) -> str:
        return "--hicache-" + self.field.replace("_", "-")

    @property
    def dest(self) -> str:
        return "hicache_" + self.field


def _expand(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path.expanduser()))  # resolve() would follow links
    except RuntimeError as error:
        raise _wrong("--hicache-storage-path", path, "a path whose ~ names a known user") from error


def _allowed(choices: type[enum.Enum]) -> str:
    return "{" + ",".join(str(choice.value) for choice in choices) + "}"


def _wrong(option: str, asked: object, allowed: str) -> HiCacheConfigError:
    return HiCacheConfigError(f"{option} {asked}: not allowed; give {allowed}")


def _choice_of(choices: type[_Choice]) -> Callable[[str, Any], _Choice]:
    def parse(option: str, text: Any) -> _Choice:
        for choice in choices:
            if text in (choice, choice.value):
                return choice
        raise _wrong(option, text, f"one of {_allowed(choices)}")

    return parse


def _parse_path(option: str, text: Any) -> Path:
    if not str(text):
        raise _wrong(option, "''", "the path of a folder")
    return Path(text)


def _parse_number(option: str, text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError) as error:
        raise _wrong(option, text, "a number greater than 0, such as 2.5") from error


def _parse_size(option: str, text: Any) -> int:
    try:
        return parse_bytes(str(text))
    except ValueError as error:
        raise _wrong(option, text, f"0 for no bound, or {ALLOWED_BYTES}") from error


def _count_from(smallest: int) -> Callable[[str, Any], int]:
    def parse(option: str, text: Any) -> int:
        try:
            return int(str(text))
        except ValueError as error:
            raise _wrong(option, text, f"a whole number of at least {smallest}") from error

    return parse


def _require_count(option: str, value: object, *, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise _wrong(option, value, f"a whole number of at least {smallest}")


def _require_member(option: str, value: object, choices: type[enum.Enum]) -> None:
    if not isinstance(value, choices):
        raise _wrong(option, value, f"one of {_allowed(choices)} ({choices.__name__})")


def _require_positive(option: str, value: object) -> None:
    # bool is an int to Python; a ratio of True is a mistake.
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        raise _wrong(option, value, "a finite number greater than 0, such as 2.5")


def _require_bytes(option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(option, value, "0 for no bound, or a whole number of bytes")


_FLAGS = (
    _Flag(
        "storage",
        _allowed(StorageKind),
        "switches HiCache on: none = device and host memory only (L1 + L2), file = files below them (L1 + L2 + L3); "
        "without this flag HiCache is off",
        _choice_of(StorageKind),
    ),
    _Flag(
        "ratio",
        "FLOAT",
        f"host pool size as a multiple of the device KV pool (default {HiCacheConfig.ratio})",
        _parse_number,
    ),
    _Flag(
        "storage_path",
        "PATH",
        f"root folder of the files (default {DEFAULT_STORAGE_PATH})",
        _parse_path,
        of_storage=True,
    ),
    _Flag(
        "storage_max_bytes",
        "BYTES",
        "largest size of this model's folder, as 100GiB or 500MB; pages unused for longest go first "
        f"(default {HiCacheConfig.storage_max_bytes}: no bound)",
        _parse_size,
        of_storage=True,
    ),
    _Flag(
        "write_policy",
        _allowed(WritePolicy),
        "when a page goes to the files: write_through = as soon as its host copy is complete, "
        "write_through_and_back = when it leaves host memory, on flush and at an orderly shutdown "
        f"(default {HiCacheConfig.write_policy.value})",
        _choice_of(WritePolicy),
        of_storage=True,
    ),
    _Flag(
        "async_impl",
        _allowed(AsyncImpl),
        "who waits for device <-> host copies: threadpool = worker threads, future = polled once per step "
        f"(default {HiCacheConfig.async_impl.value})",
        _choice_of(AsyncImpl),
    ),
    _Flag(
        "host_scheme",
        _allowed(HostScheme),
        "host memory layout: per_block = arrays per page, slab = one preallocated block "
        f"(default {HiCacheConfig.host_scheme.value})",
        _choice_of(HostScheme),
    ),
    _Flag(
        "storage_prefetch_policy",
        _allowed(PrefetchPolicy),
        "whether a request that could be admitted waits for its pages from the files: wait_complete = until they are "
        "there, best_effort = no, timeout = for the time of --hicache-prefetch-deadline-s; it goes on with what has "
        f"arrived (default {HiCacheConfig.storage_prefetch_policy.value})",
        _choice_of(PrefetchPolicy),
        of_storage=True,
    ),
    _Flag(
        "prefetch_deadline_s",
        "SECONDS",
        "the end of a wait for the files: with timeout after so long, with wait_complete when the files have delivered "
        f"nothing to anyone for so long (default {HiCacheConfig.prefetch_deadline_s})",
        _parse_number,
        of_storage=True,
    ),
    _Flag(
        "prefetch_threshold",
        "TOKENS",
        "tokens of a prompt that device and host must lack before the files are asked for them "
        f"(default {HiCacheConfig.prefetch_threshold}: always ask)",
        _count_from(0),
        of_storage=True,
    ),
    _Flag(
        "checkpoint_interval",
        "TOKENS",
        "for models with sliding-window or recurrent layers: tokens between the borders inside a cached prompt "
        "at which another prompt can leave it, a multiple of the page size (default: chosen from the model)",
        _count_from(1),
    ),
)
