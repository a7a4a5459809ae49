"""Which storage folder a tool looks at: arguments, and the inventory of it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sgl_jax.srt.mem_cache.hicache.config import DEFAULT_STORAGE_PATH
from sgl_jax.srt.mem_cache.hicache.storage.folders import open_folder, safe_name
from sgl_jax.srt.mem_cache.hicache.storage.inventory import Inventory, take_inventory

from .errors import ToolError
from .progress import progress

_ESCAPED = re.compile(r"%([0-9A-F]{2})")


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """`--path` and `--model`."""
    parser.add_argument(
        "--path",
        "--hicache-storage-path",
        type=Path,
        default=DEFAULT_STORAGE_PATH,
        metavar="PATH",
        help=f"root folder of the files, as the server's --hicache-storage-path (default {DEFAULT_STORAGE_PATH})",
    )
    parser.add_argument("--model", metavar="NAME", help="only this model's folder")


def root_of(args: argparse.Namespace) -> Path:
    """The storage root that was asked for. Raises ToolError if it cannot be opened, or is not this user's own."""
    try:
        root = Path(args.path).expanduser().absolute()
    except RuntimeError as error:
        raise ToolError(f"--path {args.path}: {error}") from error
    try:
        with open_folder(root, (), create=False):
            return root
    except OSError as error:
        raise ToolError(f"--path {root}: {error.strerror or error}") from error


def inventory_of(args: argparse.Namespace) -> Inventory:
    """All files below the root, or of one model. Raises ToolError if there is no such folder or model."""
    root = root_of(args)
    models = None if args.model is None else (model_folder(root, args.model),)
    try:
        with progress("looking", None) as tick:
            return take_inventory(root, models, tick)
    except OSError as error:
        raise ToolError(f"--path {root}: {error.strerror or error}") from error


def model_folder(root: Path, model: str) -> str:
    """The folder of a model, by its name or by the folder's own. Raises ToolError if there is none."""
    for name in (safe_name(model), model):
        if "/" not in name and name not in (".", "..", "") and (root / name).is_dir():
            return name
    known = sorted(shown_model(path.name) for path in root.iterdir() if path.is_dir())
    raise ToolError(
        f"--model {model}: {root} has no such model; it has {', '.join(known) if known else 'none'}"
    )


def shown_model(folder: str) -> str:
    """The model's name from its folder's: the inverse of `safe_name`, as far as there is one."""
    if folder == "%empty":
        return ""
    if "%sha256-" in folder:
        return folder
    raw = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), folder)
    return raw.encode("latin1", "replace").decode("utf-8", "replace")
