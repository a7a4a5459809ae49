"""What an operation costs when each level holds as much, ten times and a hundred times as much.

Tokens in the tree (match, insert, evict), pages in L2 (alloc and free), files in L3 (exists). The limit is the smallest
size, so the ratio is the growth: 1 is what it should be.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from .host_pool import measure_pools
from .record import Record
from .storage import measure_exists
from .tree import measure_leaves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument(
        "--leaves",
        type=int,
        nargs="+",
        default=[1_000, 10_000, 100_000, 1_000_000],
        metavar="N",
        help="prompts in the tree",
    )
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=[8_192, 81_920, 1_048_576],
        metavar="N",
        help="pages of L2",
    )
    parser.add_argument(
        "--files",
        type=int,
        nargs="+",
        default=[2_000, 20_000, 200_000],
        metavar="N",
        help="files in L3",
    )
    parser.add_argument("--pages", type=int, default=4_096, help="pages of L2 taken at once")
    parser.add_argument("--repeats", type=int, default=60, help="look-ups in L3")
    parser.add_argument("--folder", type=Path, help="where the files go (a temporary folder)")


def run(args: argparse.Namespace) -> list[Record]:
    """Every size. Raises ArgumentTypeError for sizes that are too small, or a wrong folder."""
    if min(args.leaves) < 4:
        raise argparse.ArgumentTypeError("--leaves: a tree needs at least 4")
    if min(args.slots) < args.pages:
        raise argparse.ArgumentTypeError(f"a pool of {min(args.slots)} slots has no {args.pages}")
    if args.folder is not None and not args.folder.is_dir():
        raise argparse.ArgumentTypeError(f"--folder {args.folder}: no such folder")
    records = [*measure_leaves(args.leaves), *measure_pools(args.slots, args.pages)]
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=args.folder) as name:
        return [*records, *measure_exists(Path(name), args.files, args.repeats)]
