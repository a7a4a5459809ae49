"""`python -m sgl_jax_hicache.bench <what> [--json FILE]`: measure one part, or `all` and write the report."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from sgl_jax_hicache.provenance import commit

from .record import provenance, show, stamped, write_json

_PROG = "python -m sgl_jax_hicache.bench"

BENCHMARKS = {
    "transfer": "device to host and back, against memcpy",
    "tree": "match of long prompts and insertion of many",
    "hashing": "page keys, against the bare hash chain",
    "storage": "set and get of page files, against raw files",
    "memory": "host memory held after many evictions and loads, against what the flags promised",
    "replay": "a request trace through all tiers, against a plain LRU",
    "ttft": "time to the first token: computed, from L2, from L3",
    "scaling": "what an operation costs with 1, 10 and 100 times as much in each level",
    "step_profile": "what the cache costs of a scheduler step at 64 requests, by call",
    "prefetch": "waiting for files by policy, on simulated disks of several speeds",
    "decode_overhead": "the decode step with the cache on and off",
    "hybrid": "models with sliding windows and recurrent states: hits by ratio and interval, TTFT",
}
"""Every benchmark module and what it measures, in the order in which `all` runs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status. A wrong command line exits with 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    what = _parse_what(argv[:1])
    module = importlib.import_module(f"{__package__}.{'report' if what == 'all' else what}")
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} {what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there as well")
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    begun_at = commit()
    try:
        records = module.run(args)
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    run = provenance(argv, begun_at)
    if what != "all":
        records = stamped(records, run)
        show(records, run)
        if hasattr(module, "write_report"):
            module.write_report(args, records)
    if args.json is not None:
        write_json(records, args.json)
    return 0


def _parse_what(argv: Sequence[str]) -> str:
    names = "\n".join(f"  {name:16} {text}" for name, text in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description=f"{__doc__}\n\n{names}\n  {'all':16} all of these, and a report with plots",
        epilog="Options of one benchmark: <what> --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*BENCHMARKS, "all"], metavar="what")
    return str(parser.parse_args(argv).what)


if __name__ == "__main__":
    sys.exit(main())
