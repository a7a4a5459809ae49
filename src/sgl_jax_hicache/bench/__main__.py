"""The benchmarks: `python -m sgl_jax_hicache.bench [tree|host_scheme|decode_overhead] ...`; without a name, all."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

BENCHMARKS = ("tree", "host_scheme", "decode_overhead")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that is named first, with the rest of the arguments; or every one with its defaults."""
    if argv and argv[0] not in BENCHMARKS:
        print(f"{argv[0]}: no such benchmark; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in argv[:1] or BENCHMARKS:
        sys.argv = [name, *argv[1:]]
        try:
            runpy.run_module(f"{__package__}.{name}", run_name="__main__")
        except SystemExit as end:
            if end.code:
                return int(end.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
