"""Makes the extension importable as `sgl_jax.srt.mem_cache.{hicache, unified_radix_cache}`, with or without an engine.

The extension is a piece of the sgl-jax tree and has no `__init__.py` above `hicache/`. It can not be on sys.path for
good: as a namespace portion it would hide an engine that is installed in editable mode. So `activate()` decides once
per process. With a real engine installed, the extension's folder goes first on `sgl_jax.srt.mem_cache.__path__`: our
modules are found there and everything else stays the engine's, no file of it replaced. Without one, the tree's root
goes onto sys.path and `sgl_jax` is a namespace of ours alone.

Spawned processes re-import the main module, so an entry point that calls `activate()` at import time is enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_PACKAGE_DIR = Path(__file__).resolve().parent
_CHECKOUT_ROOT = _PACKAGE_DIR.parents[1] / "python"
_WHEEL_ROOT = _PACKAGE_DIR / "_tree"
_MEM_CACHE = Path("sgl_jax", "srt", "mem_cache")


def tree_root() -> Path:
    """The folder that holds our `sgl_jax/`: `python/` in a checkout, `_tree/` in an installed wheel.

    Raises ModuleNotFoundError if neither is there (a broken install).
    """
    for root in (_WHEEL_ROOT, _CHECKOUT_ROOT):
        if (root / _MEM_CACHE / "hicache" / "__init__.py").is_file():
            return root
    raise ModuleNotFoundError(
        f"the HiCache tree is neither in {_WHEEL_ROOT} nor in {_CHECKOUT_ROOT}: reinstall sgl-jax-hicache",
        name="sgl_jax.srt.mem_cache.hicache",
    )


def engine_installed() -> bool:
    """True where a real `sgl_jax` is installed: a regular package, not the namespace that our tree forms."""
    spec = importlib.util.find_spec("sgl_jax")
    return spec is not None and spec.origin is not None


def activate() -> Path:
    """Make the extension importable; returns the tree root used. Idempotent, and cheap when called again.

    Must run before the engine's own `unified_radix_cache` is imported. Changes `sys.path` (no engine) or imports the
    engine's `sgl_jax.srt.mem_cache` package and changes its `__path__` (engine installed).
    Raises ImportError if it comes too late.
    """
    root = tree_root()
    _refuse_if_too_late(root)
    if engine_installed():
        mem_cache = importlib.import_module("sgl_jax.srt.mem_cache")
        # A plain list: the engine's package may itself be a namespace, whose path object can not be written to.
        folder = str(root / _MEM_CACHE)
        mem_cache.__path__ = [folder, *(entry for entry in mem_cache.__path__ if entry != folder)]
    elif str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    return root


def _refuse_if_too_late(root: Path) -> None:
    loaded = sys.modules.get("sgl_jax.srt.mem_cache.unified_radix_cache")
    origin = getattr(loaded, "__file__", None)
    if origin is not None and not Path(origin).is_relative_to(root):
        raise ImportError(
            f"{origin} is already imported: call sgl_jax_hicache.overlay.activate() before the engine"
        )
