"""`python -m sgl_jax_hicache.launch_server --engine sgl-jax ...`: the engine's HTTP server, with HiCache."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root

from . import seams
from .errors import EngineMismatchError
from .installation import install


def main(argv: Sequence[str], prog: str) -> int:
    """Serve until a signal, with the engine's own arguments and ours. The exit status: 2 for wrong settings.

    At SIGTERM the process ends from within (see `tokenizer_manager`), with status 0.
    """
    try:
        return _serve(list(argv))
    except (HiCacheConfigError, EngineMismatchError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2


def _serve(argv: list[str]) -> int:
    if not argv:
        raise HiCacheConfigError(
            "--engine sgl-jax takes the engine's own arguments; --model-path is the one it needs (see --help)"
        )
    # Imported late: the engine takes seconds, and what is wrong is told as soon as it can be known.
    seams.check(seams.FLAG_SEAMS)
    from .server_args import HiCacheServerArgs

    server_args = HiCacheServerArgs.from_cli(argv)
    if server_args.hicache.has_storage:
        prepare_root(server_args.hicache.storage_path)

    install()
    from sgl_jax.srt.entrypoints import http_server
    from sgl_jax.srt.utils import kill_process_tree

    from .control_routes import add_control_routes
    from .orderly_end import stop_schedulers, wait_for_schedulers_at_sigterm

    if server_args.node_rank > 0:
        # This process only waits; when all end is rank 0's to say.
        wait_for_schedulers_at_sigterm()
    add_control_routes(
        http_server.app,
        lambda: http_server._global_state.tokenizer_manager,
        has_key=bool(server_args.api_key),
    )
    try:
        http_server.launch(server_args)
        return 0 if stop_schedulers() else 1
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
