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
    # Longest time, in seconds, that a request about to be admitted waits for L3; what has arrived by then is used. > 0.
    prefetch_deadline_s: float = 5.0
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
        _require_positive("--hicache-prefetch-deadline-s", self.prefetch_deadline_s)
        _require_bytes("--hicache-storage-max-bytes", self.storage_max_bytes)
        if self.checkpoint_interval is not None:
            _require_count("--hicache-checkpoint-interval", self.checkpoint_interval)
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
        return cls(**given)


@dataclass(frozen=True)
class _Flag:
    """One command line flag: the field it sets and how its text becomes a value."""

    field: str
    metavar: str
    help: str
    kind: (
        type[enum.Enum] | type[float] | type[int] | type[Path]
    )  # int: a size in bytes, or a plain count
    of_storage: bool = False  # means nothing without files
    is_count: bool = False

    @property
    def option(self) -> str:
        return "--hicache-" + self.field.replace("_", "-")

    @property
    def dest(self) -> str:
        return "hicache_" + self.field

    def parse(self, option: str, text: Any) -> Any:
        if issubclass(self.kind, enum.Enum):
            return _parse_choice(option, text, self.kind)
        if self.kind is float:
            return _parse_number(option, text)
        if self.is_count:
            return _parse_count(option, text)
        if self.kind is int:
            return _parse_size(option, text)
        if not str(text):
            raise _wrong(option, "''", "the path of a folder")
        return Path(text)


def _expand(path: Path) -> Path:
    try:
        return Path(os.path.abspath(path.expanduser()))  # resolve() would follow links
    except RuntimeError as error:
        raise _wrong("--hicache-storage-path", path, "a path whose ~ names a known user") from error


def _allowed(choices: type[enum.Enum]) -> str:
    return "{" + ",".join(str(choice.value) for choice in choices) + "}"


def _wrong(option: str, asked: object, allowed: str) -> HiCacheConfigError:
    return HiCacheConfigError(f"{option} {asked}: not allowed; give {allowed}")


def _parse_choice(option: str, text: Any, choices: type[_Choice]) -> _Choice:
    for choice in choices:
        if text in (choice, choice.value):
            return choice
    raise _wrong(option, text, f"one of {_allowed(choices)}")


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


def _parse_count(option: str, text: Any) -> int:
    try:
        return int(str(text))
    except ValueError as error:
        raise _wrong(option, text, "a whole number greater than 0") from error


def _require_count(option: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _wrong(option, value, "a whole number greater than 0")


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
        StorageKind,
    ),
    _Flag(
        "ratio",
        "FLOAT",
        f"host pool size as a multiple of the device KV pool (default {HiCacheConfig.ratio})",
        float,
    ),
    _Flag(
        "storage_path",
        "PATH",
        f"root folder of the files (default {DEFAULT_STORAGE_PATH})",
        Path,
        of_storage=True,
    ),
    _Flag(
        "storage_max_bytes",
        "BYTES",
        "largest size of this model's folder, as 100GiB or 500MB; pages unused for longest go first "
        f"(default {HiCacheConfig.storage_max_bytes}: no bound)",
        int,
        of_storage=True,
    ),
    _Flag(
        "write_policy",
        _allowed(WritePolicy),
        "when a page goes to the files: write_through = as soon as its host copy is complete, "
        "write_through_and_back = when it leaves host memory, on flush and at an orderly shutdown "
        f"(default {HiCacheConfig.write_policy.value})",
        WritePolicy,
        of_storage=True,
    ),
    _Flag(
        "async_impl",
        _allowed(AsyncImpl),
        "who waits for device <-> host copies: threadpool = worker threads, future = polled once per step "
        f"(default {HiCacheConfig.async_impl.value})",
        AsyncImpl,
    ),
    _Flag(
        "host_scheme",
        _allowed(HostScheme),
        "host memory layout: per_block = arrays per page, slab = one preallocated block "
        f"(default {HiCacheConfig.host_scheme.value})",
        HostScheme,
    ),
    _Flag(
        "prefetch_deadline_s",
        "SECONDS",
        "longest wait for the files before a request is admitted; what has arrived by then is used "
        f"(default {HiCacheConfig.prefetch_deadline_s})",
        float,
        of_storage=True,
    ),
    _Flag(
        "checkpoint_interval",
        "TOKENS",
        "for models with sliding-window or recurrent layers: tokens between the borders inside a cached prompt "
        "at which another prompt can leave it, a multiple of the page size (default: chosen from the model)",
        int,
        is_count=True,
    ),
)
