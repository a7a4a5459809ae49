"""Benchmarks: each measures one part beside what bounds it, in the same run. `python -m sgl_jax_hicache.bench --help`.

A benchmark is a module with `add_arguments(parser)` and `run(args) -> list[Record]`; `record` has the one record all of
them give, the timing and the printing. With `write_report(args, records)` it also writes a report of its own.
"""

from sgl_jax_hicache import overlay

overlay.activate()
