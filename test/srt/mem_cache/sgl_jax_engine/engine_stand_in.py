"""A package `sgl_jax` with just what reading the flags needs, for machines where the engine is not installed.

It has the engine's names and their order of calls, not its code. What it lacks (everything else) is what the check of
the seams must find.
"""

from __future__ import annotations

from pathlib import Path

SERVER_ARGS = """
import argparse
import dataclasses
import sys


@dataclasses.dataclass
class ServerArgs:
    model_path: str
    served_model_name: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    page_size: int = 1
    multimodal: bool = False
    disable_radix_cache: bool = False
    enable_unified_radix_tree: bool = False
    enable_static_lora: bool = False
    enable_mixed_chunk: bool = False
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    pd_disaggregation: str | None = None
    hicache_storage: str = "disable"
    hicache_ratio: float = 2.0
    hicache_write_through_threshold: int = 1
    hicache_write_policy: str = "write_through"

    def __post_init__(self):
        if self.hicache_storage != "disable":
            raise ValueError("the engine's own HiCache was switched on")
        self.served_model_name = self.served_model_name or self.model_path

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--served-model-name")
        for name in ("tp", "dp"):
            parser.add_argument(f"--{name}-size", type=int, default=1)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--page-size", type=int, default=1)
        parser.add_argument("--recurrent-track-interval", type=int)
        for name in (
            "multimodal",
            "disable-radix-cache",
            "enable-unified-radix-tree",
            "enable-static-lora",
            "enable-mixed-chunk",
            "enable-recurrent-extra-buffer",
        ):
            parser.add_argument(f"--{name}", action="store_true")
        for name in ("speculative-algorithm", "pd-disaggregation"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--disaggregation-mode", default="null")
        parser.add_argument("--hicache-storage", choices=["disable", "none", "file"], default="disable")
        parser.add_argument("--hicache-ratio", type=float, default=2.0, help="THE ENGINE'S OWN HELP")
        parser.add_argument("--hicache-write-through-threshold", type=int, default=1)
        parser.add_argument("--hicache-write-policy", choices=["write_through"], default="write_through")

    @classmethod
    def from_cli_args(cls, args):
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})

    @classmethod
    def from_cli(cls, argv=None):
        parser = argparse.ArgumentParser()
        cls.add_cli_args(parser)
        return cls.from_cli_args(parser.parse_args(argv or sys.argv[1:]))
"""


def write_stand_in(root: Path) -> Path:
    """Write the package below `root`; returns what goes onto PYTHONPATH."""
    mem_cache = root / "sgl_jax" / "srt" / "mem_cache"
    mem_cache.mkdir(parents=True)
    for folder in (mem_cache, mem_cache.parent, mem_cache.parent.parent):
        (folder / "__init__.py").write_text("")
    (mem_cache.parent / "server_args.py").write_text(SERVER_ARGS)
    return root
