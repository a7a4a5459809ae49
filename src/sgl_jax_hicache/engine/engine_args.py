"""The settings of a server: one definition of every flag, and the checks that need no model.

A wrong value raises ArgumentError or HiCacheConfigError with one line: what was asked, what is allowed, what to change.
Launchers print that line and exit with status 2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError

from . import model_spec

ENGINES = ("embedded", "sgl-jax")
DTYPES = ("float32", "bfloat16")
LOG_LEVELS = ("debug", "info", "warning", "error")
STATES_PER_REQUEST = 4


class ArgumentError(ValueError):
    """A flag that cannot be met; the message is one line for a person."""


@dataclass(frozen=True)
class EngineArgs:
    """Everything a person can set. A value that is constructed is valid in itself; the model is checked later."""

    # `smollm2`, a directory with config.json, a .gguf file, or random:<preset or directory>:<seed>.
    model_path: str = "smollm2"
    # Name in responses and in /v1/models; None: the model's own.
    served_model_name: str | None = None
    # Type of the KV pages; weights and arithmetic are float32.
    dtype: str = "float32"
    # Longest sequence in tokens; None: what the model was made for.
    context_length: int | None = None
    # Seeds the sampling of requests that bring no seed of their own.
    random_seed: int = 0

    # Tokens per KV page.
    page_size: int = 16
    # Size of the device KV pool in tokens, a multiple of page_size.
    max_total_tokens: int = 16384
    # Tokens of the sliding layers' own pool for each token of the full one, over 0 to 1.
    swa_full_tokens_ratio: float = 0.8
    # Recurrent states that the prefix cache may hold on the device; None: 4 for each running request.
    max_recurrent_states: int | None = None
    # Requests that run at once; others wait.
    max_running_requests: int = 8
    # Prompt tokens computed in one step, a multiple of page_size.
    chunked_prefill_size: int = 512
    # Part of the running requests' possible growth that is kept free, 0 to 1.
    decode_reserve_ratio: float = 0.5
    # Read a step's tokens before the next is dispatched.
    disable_overlap_schedule: bool = False
    # Reuse nothing.
    disable_radix_cache: bool = False

    # Where the server listens; port 0 takes any free one.
    host: str = "127.0.0.1"
    port: int = 30000
    # Demanded as a bearer token, if given.
    api_key: str | None = field(default=None, repr=False)
    # Requests in the engine, waiting ones included; more get a 503.
    max_queued_requests: int = 256
    # Largest body of an HTTP request in bytes; more gets a 413.
    max_request_bytes: int = 8 << 20
    # Time for requests and storage at SIGTERM or SIGINT, in seconds; a second signal ends at once.
    shutdown_deadline_s: float = 30.0
    log_level: str = "info"

    hicache: HiCacheConfig = field(default_factory=HiCacheConfig)

    def __post_init__(self) -> None:
        for option in _NUMBERS:
            option.check(getattr(self, option.field))
        _require_choice("--dtype", self.dtype, DTYPES)
        _require_choice("--log-level", self.log_level, LOG_LEVELS)
        self._require_whole_pages("--max-total-tokens", self.max_total_tokens)
        self._require_whole_pages("--chunked-prefill-size", self.chunked_prefill_size)
        if self.disable_radix_cache and self.hicache.enabled:
            raise ArgumentError(
                "--disable-radix-cache with --hicache-storage: there is nothing to store; remove one of them"
            )
        if self.api_key is not None and not self.api_key:
            raise ArgumentError("--api-key '': empty; give a key, or leave the flag out")

    def _require_whole_pages(self, option: str, tokens: int) -> None:
        if tokens % self.page_size:
            down = max(self.page_size, tokens // self.page_size * self.page_size)
            raise ArgumentError(
                f"{option} {tokens}: not a multiple of --page-size {self.page_size}; use {down}, for instance"
            )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add every flag, those of HiCache included. Read them back with `from_cli` only."""
        model = parser.add_argument_group("model")
        model.add_argument(
            "--model-path",
            help=f"what to serve (default {EngineArgs.model_path}): {model_spec.ALLOWED}",
        )
        model.add_argument("--served-model-name", help="name in responses (default: the model's)")
        model.add_argument("--dtype", metavar=_one_of(DTYPES), help="type of the KV pages")
        server = parser.add_argument_group("server")
        server.add_argument("--host", help=f"address to listen on (default {EngineArgs.host})")
        server.add_argument("--api-key", help="demanded as a bearer token; none by default")
        server.add_argument("--log-level", metavar=_one_of(LOG_LEVELS), help="how much is logged")
        engine = parser.add_argument_group("engine")
        engine.add_argument(
            "--disable-overlap-schedule",
            action="store_true",
            help="read a step's tokens before dispatching the next",
        )
        engine.add_argument("--disable-radix-cache", action="store_true", help="reuse nothing")
        for option in _NUMBERS:
            group = server if option.of_server else engine
            group.add_argument(
                option.option, metavar=option.kind.__name__.upper(), help=option.help
            )
        HiCacheConfig.add_cli_args(parser)

    @classmethod
    def from_cli(cls, namespace: argparse.Namespace) -> EngineArgs:
        """Build from what `add_cli_args` parsed. Raises ArgumentError or HiCacheConfigError."""
        given: dict[str, Any] = {}
        numbers = {option.field: option for option in _NUMBERS}
        for name in cls.__dataclass_fields__:
            value = getattr(namespace, name, None)
            if name == "hicache" or value is None or value is False:
                continue
            given[name] = numbers[name].parse(value) if name in numbers else value
        return cls(hicache=HiCacheConfig.from_args(namespace), **given)


@dataclass(frozen=True)
class _Number:
    """A flag with a number: its field, its bounds and what it means."""

    field: str
    kind: type[int] | type[float]
    low: float
    high: float
    help: str
    of_server: bool = False
    optional: bool = False

    @property
    def option(self) -> str:
        return "--" + self.field.replace("_", "-")

    def parse(self, text: Any) -> float:
        try:
            return self.kind(text)
        except ValueError:
            raise self._wrong(text) from None

    def check(self, value: float | None) -> None:
        if value is None and self.optional:
            return
        kinds = (int, float) if self.kind is float else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self._wrong(value)
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise self._wrong(value)

    def _wrong(self, value: object) -> ArgumentError:
        kind = "a whole number" if self.kind is int else "a number"
        upto = f" to {self.high:,}" if self.high < _UNBOUNDED else " or more"
        return ArgumentError(f"{self.option} {value}: not allowed; give {kind}, {self.low:,}{upto}")


_UNBOUNDED = 1 << 40

_NUMBERS = (
    _Number(
        "context_length",
        int,
        2,
        _UNBOUNDED,
        "longest sequence in tokens, prompt and answer (default: the model's); "
        "an answer that reaches it ends there, with finish_reason length",
        optional=True,
    ),
    _Number("random_seed", int, 0, 2**32 - 1, "seed of sampling (default 0)"),
    _Number("page_size", int, 1, 4096, f"tokens per KV page (default {EngineArgs.page_size})"),
    _Number(
        "max_total_tokens",
        int,
        1,
        _UNBOUNDED,
        f"size of the device KV pool in tokens (default {EngineArgs.max_total_tokens})",
    ),
    _Number(
        "swa_full_tokens_ratio",
        float,
        1 / 4096,
        1,
        "tokens of the sliding layers' pool for each of max_total_tokens "
        f"(default {EngineArgs.swa_full_tokens_ratio})",
    ),
    _Number(
        "max_recurrent_states",
        int,
        4,
        _UNBOUNDED,
        "recurrent states that the prefix cache may hold on the device "
        f"(default {STATES_PER_REQUEST} for each of max_running_requests)",
        optional=True,
    ),
    _Number(
        "max_running_requests",
        int,
        1,
        1024,
        f"requests that run at once (default {EngineArgs.max_running_requests})",
    ),
    _Number(
        "chunked_prefill_size",
        int,
        1,
        _UNBOUNDED,
        f"prompt tokens computed in one step (default {EngineArgs.chunked_prefill_size})",
    ),
    _Number(
        "decode_reserve_ratio",
        float,
        0,
        1,
        "part of the running requests' possible growth that is kept free "
        f"(default {EngineArgs.decode_reserve_ratio})",
    ),
    _Number(
        "port", int, 0, 65535, f"port to listen on, 0 for any (default {EngineArgs.port})", True
    ),
    _Number(
        "max_queued_requests",
        int,
        1,
        _UNBOUNDED,
        f"requests in the engine before a 503 (default {EngineArgs.max_queued_requests})",
        True,
    ),
    _Number(
        "max_request_bytes",
        int,
        1024,
        _UNBOUNDED,
        f"largest request body in bytes (default {EngineArgs.max_request_bytes})",
        True,
    ),
    _Number(
        "shutdown_deadline_s",
        float,
        0,
        86400,
        f"seconds for requests and storage at SIGTERM or SIGINT "
        f"(default {EngineArgs.shutdown_deadline_s:g}); a second signal ends at once",
        True,
    ),
)


def _one_of(choices: Sequence[str]) -> str:
    return "{" + ",".join(choices) + "}"


def _require_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ArgumentError(f"{option} {value}: not allowed; give one of {_one_of(choices)}")


class OneLineParser(argparse.ArgumentParser):
    """Ends with one line on stderr and status 2, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


__all__ = ["ENGINES", "ArgumentError", "EngineArgs", "HiCacheConfigError", "OneLineParser"]
