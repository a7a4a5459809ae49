"""Keeps compiled programs on disk, so that a second start of the same server takes seconds instead of half a minute."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_FOLDER = Path("~/.cache/sgl-jax/compiled")


def enable_compilation_cache(folder: Path = DEFAULT_FOLDER) -> None:
    """Point jax's persistent cache at `folder`, unless the environment says otherwise. Call before jax is imported.

    Every program is kept: ours are many and each compiles in less than jax's default threshold of a second.
    """
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.expanduser()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
