"""The engine's arguments with ours in place of its own `--hicache-*` flags.

`hicache/config.py` defines the flags, here as everywhere. The engine's own fields of the same names stay at their
defaults, with which it keeps its own HiCache off; what was asked for is in `hicache`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.server_args import ServerArgs

_PREFIX = "hicache_"
_THRESHOLD = "--hicache-write-through-threshold"
_THRESHOLD_ADVICE = f"{_THRESHOLD} has no meaning here: every page is backed up at once; remove it"


@dataclasses.dataclass
class HiCacheServerArgs(ServerArgs):
    """The engine's arguments and `hicache`. Raises HiCacheConfigError for what does not go together."""

    hicache: HiCacheConfig = dataclasses.field(default_factory=HiCacheConfig)

    def __post_init__(self) -> None:
        if self.hicache.enabled:
            _refuse_conflicts(self)
            self._allow_recurrent_models()
        super().__post_init__()

    def _allow_recurrent_models(self) -> None:
        """What the engine wants before a model with recurrent layers may reuse prefixes; other models do not mind."""
        self.enable_unified_radix_tree = True
        # Snapshots at page borders. The engine refuses them with either of these (and with speculation, see below).
        if self.page_size > 1 and not self.enable_mixed_chunk:
            self.enable_recurrent_extra_buffer = True
        ours: int | None = self.hicache.checkpoint_interval
        engine_args: Any = self  # the engine's fields have no types that mypy sees
        theirs: int | None = engine_args.recurrent_track_interval
        if ours is not None and theirs is not None and ours != theirs:
            raise HiCacheConfigError(
                f"--hicache-checkpoint-interval {ours} and --recurrent-track-interval {theirs}: one interval is kept; "
                "give one of them"
            )
        if ours is not None and ours % self.page_size:
            # The cache says so too, but the engine first, about a flag that was not given.
            raise HiCacheConfigError(
                f"--hicache-checkpoint-interval {ours}: not a multiple of --page-size {self.page_size}"
            )
        if theirs is not None:
            self.hicache = dataclasses.replace(self.hicache, checkpoint_interval=theirs)
        elif self.enable_recurrent_extra_buffer:
            engine_args.recurrent_track_interval = ours

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """The engine's flags, with those of `HiCacheConfig` in place of the engine's of the same name."""
        ServerArgs.add_cli_args(parser)
        parser.conflict_handler = "resolve"
        HiCacheConfig.add_cli_args(parser)
        # A group takes the parser's conflict handler when it is made.
        parser.add_argument_group().add_argument(
            _THRESHOLD,
            action=_Refused,
            default=ServerArgs.hicache_write_through_threshold,
            help=argparse.SUPPRESS,
        )
        parser.conflict_handler = "error"

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> HiCacheServerArgs:
        """Build from what `add_cli_args` parsed."""
        if args.multimodal:
            raise HiCacheConfigError(
                "--multimodal: HiCache does not serve such models; use the engine's own launcher"
            )
        args.hicache = HiCacheConfig.from_args(args)
        for name in _engine_hicache_fields():
            setattr(args, name, getattr(ServerArgs, name))
        server_args: HiCacheServerArgs = super().from_cli_args(args)
        return server_args

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> HiCacheServerArgs:
        """Build from keyword arguments: the engine's, and `hicache_storage="file"` and so on, or a whole `hicache`."""
        ours = {name: value for name, value in settings.items() if name.startswith(_PREFIX)}
        rest = {name: value for name, value in settings.items() if name not in ours}
        if "hicache_write_through_threshold" in ours:
            raise HiCacheConfigError(_THRESHOLD_ADVICE)
        if unknown := ours.keys() - _flag_names():
            raise HiCacheConfigError(
                f"{', '.join(sorted(unknown))}: not allowed; HiCache knows {', '.join(sorted(_flag_names()))}"
            )
        if ours and "hicache" in rest:
            raise HiCacheConfigError(f"give hicache or {', '.join(sorted(ours))}, not both")
        given = {name: value for name, value in ours.items() if value is not None}
        if given:
            rest["hicache"] = HiCacheConfig.from_args(argparse.Namespace(**given))
        return cls(**rest)


class _Refused(argparse.Action):
    """A flag of the engine's own HiCache that has no meaning in ours."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        raise HiCacheConfigError(_THRESHOLD_ADVICE)


@dataclasses.dataclass(frozen=True)
class _Conflict:
    """A setting that HiCache does not go with: how to see it, and what to say."""

    holds: Callable[[ServerArgs], bool]
    said: str


_CONFLICTS = (
    _Conflict(
        lambda args: args.disable_radix_cache,
        "--disable-radix-cache: there is nothing to store; remove one of them",
    ),
    _Conflict(
        lambda args: args.multimodal,
        "--multimodal: what an image adds to a prompt is not part of a page's name; remove one of them",
    ),
    _Conflict(
        lambda args: args.disaggregation_mode != "null" or bool(args.pd_disaggregation),
        "prefill/decode disaggregation: its pools are not known to HiCache; remove one of them",
    ),
    _Conflict(
        lambda args: bool(args.speculative_algorithm),
        "--speculative-algorithm: the draft model's pages would be left behind; remove one of them",
    ),
    _Conflict(
        lambda args: args.enable_static_lora,
        "--enable-static-lora: its weights change under one name; remove one of them",
    ),
    _Conflict(
        lambda args: args.nnodes > 1 and args.dp_size > 1,
        "--nnodes above 1 and --dp-size above 1 at once: a rank's pages would lie in one process, the others can not "
        "vouch for them; remove one of them",
    ),
)


def _refuse_conflicts(args: HiCacheServerArgs) -> None:
    for conflict in _CONFLICTS:
        if conflict.holds(args):
            raise HiCacheConfigError(f"--hicache-storage does not go with {conflict.said}")


def _engine_hicache_fields() -> list[str]:
    return [f.name for f in dataclasses.fields(ServerArgs) if f.name.startswith(_PREFIX)]


def _flag_names() -> frozenset[str]:
    return frozenset(_PREFIX + f.name for f in dataclasses.fields(HiCacheConfig))
