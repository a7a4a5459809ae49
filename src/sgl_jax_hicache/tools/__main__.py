"""`sgl-jax-hicache <what> [options]`: look after the files of HiCache, and size its levels.

Exit status: 0 if all is well, 1 if something is damaged or was not done, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from sgl_jax_hicache import overlay

overlay.activate()

from sgl_jax_hicache.engine.engine_args import OneLineParser  # noqa: E402 - needs the overlay

from .errors import ToolError  # noqa: E402

PROG = "sgl-jax-hicache"

TOOLS = {
    "ls": ("listing", "models, page sizes, pages, bytes and ages"),
    "stat": (
        "statistics",
        "the same by layout, with what is cut off (reads every header)",
    ),
    "verify": ("verify", "read every file and check it"),
    "gc": ("collect", "free room: what was unused for longest goes first"),
    "show": ("show", "what one page is, and the pages before it"),
    "size": ("size", "how large L1, L2 and L3 are, or have to be, for a model"),
}
"""Every tool: its module and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a tool; the exit status. A wrong command line exits with 2."""
    parser = OneLineParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsers = parser.add_subparsers(dest="what", required=True, metavar="what")
    for name, (module_name, text) in TOOLS.items():
        module = importlib.import_module(f"{__package__}.{module_name}")
        tool = parsers.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        tool.add_argument("--json", action="store_true", help="print JSON instead of tables")
        module.add_arguments(tool)
        tool.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        report = args.run(args)
    except ToolError as error:
        print(f"{PROG} {args.what}: {error}", file=sys.stderr)
        return 2
    try:
        report.show(sys.stdout, as_json=args.json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(report.status)


if __name__ == "__main__":
    sys.exit(main())
