"""`python -m sgl_jax_hicache.launch_server`: serve a model with the three-level KV cache.

    python -m sgl_jax_hicache.launch_server --model-path smollm2 --hicache-storage file
    curl -s localhost:30000/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'

With `--engine sgl-jax`, which is the default where that engine is installed, the sgl-jax engine serves, with its own
arguments beside `--hicache-*`; `--engine embedded` is the compact engine of this package, with the flags of `--help`.

A wrong flag ends with one line and status 2 before the model loads.
"""

from __future__ import annotations

from sgl_jax_hicache import overlay

overlay.activate()

# The overlay comes first, in spawned processes too. They import this module as well, and with it as little as can be.
import argparse  # noqa: E402
import logging  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError  # noqa: E402
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root  # noqa: E402
from sgl_jax_hicache.compilation_cache import enable_compilation_cache  # noqa: E402
from sgl_jax_hicache.engine.engine_args import (  # noqa: E402
    ENGINES,
    ArgumentError,
    EngineArgs,
    OneLineParser,
)
from sgl_jax_hicache.engine.model_config import ModelError  # noqa: E402
from sgl_jax_hicache.engine.model_spec import check_spec  # noqa: E402

_PROG = "sgl_jax_hicache.launch_server"
logger = logging.getLogger(_PROG)


def build_parser() -> argparse.ArgumentParser:
    """Every flag of the launcher."""
    parser = OneLineParser(
        prog=_PROG,
        description="Serve a model with a three-level KV cache.",
        epilog="SIGTERM and SIGINT (Ctrl-C) finish what runs and store what is to be stored; "
        "a second signal ends the process at once.",
    )
    _add_engine_choice(parser)
    EngineArgs.add_cli_args(parser)
    return parser


def _add_engine_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        metavar="{" + ",".join(ENGINES) + "}",
        help="embedded: the compact engine of this package; sgl-jax: the installed engine, with its own arguments "
        "(default: sgl-jax where it is installed)",
    )


def choose_engine(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The engine that a command line asks for, and the rest of the line. Raises ArgumentError."""
    parser = OneLineParser(prog=_PROG, add_help=False, allow_abbrev=False)
    _add_engine_choice(parser)
    namespace, rest = parser.parse_known_args(argv)
    installed = overlay.engine_installed()
    engine = namespace.engine or ("sgl-jax" if installed else "embedded")
    if engine not in ENGINES:
        raise ArgumentError(f"--engine {engine}: not allowed; give one of {', '.join(ENGINES)}")
    if engine == "sgl-jax" and not installed:
        raise ArgumentError(
            "--engine sgl-jax: no sgl-jax engine is installed here; install it beside this package, "
            "or use --engine embedded"
        )
    return engine, rest


def parse_args(argv: Sequence[str] | None = None) -> EngineArgs:
    """Settings of the embedded engine from a command line. Raises ArgumentError or HiCacheConfigError."""
    return EngineArgs.from_cli(build_parser().parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal. The exit status: 0 after an orderly end, 1 if it was cut short, 2 for wrong settings."""
    try:
        engine, rest = choose_engine(sys.argv[1:] if argv is None else argv)
        if engine == "sgl-jax":
            from sgl_jax_hicache.sgl_jax_engine import server

            return server.main(rest, _PROG)
        return _serve(parse_args(rest))
    except (ArgumentError, HiCacheConfigError) as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 2


def _serve(args: EngineArgs) -> int:
    started_s = time.monotonic()
    # Until there is something to finish, Ctrl-C ends the process at once, as SIGTERM does: an exception in the middle
    # of loading or compiling could bring down the runtime with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    enable_compilation_cache()
    _check_paths(args)
    # Imported late, the heaviest last: what is wrong is told as soon as it can be known.
    from prometheus_client import disable_created_metrics

    from sgl_jax_hicache.engine.http_server.server import Server, bind, exit_on_signals

    with bind(args.host, args.port) as listener:
        from sgl_jax_hicache.engine.engine_builder import build_engine, check_settings
        from sgl_jax_hicache.engine.http_server.app import create_app

        check_settings(args)
        _configure_logging(args.log_level)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        engine = build_engine(args)
        app = create_app(engine, api_key=args.api_key, max_request_bytes=args.max_request_bytes)
        server = Server(app, args.shutdown_deadline_s, args.log_level)
        stopped_at_s: list[float] = []

        def stop() -> None:
            stopped_at_s.append(time.monotonic())
            server.should_exit = True

        exit_on_signals(stop)
        logger.info("ready after %.1f s", time.monotonic() - started_s)
        print(f"listening on http://{args.host}:{listener.getsockname()[1]}", flush=True)
        server.serve_on(listener)
    spent_s = time.monotonic() - stopped_at_s[0] if stopped_at_s else 0.0
    orderly = engine.shutdown(max(0.0, args.shutdown_deadline_s - spent_s))
    return 0 if orderly else 1


def _check_paths(args: EngineArgs) -> None:
    """The model and the storage folder, as far as that needs no jax."""
    try:
        check_spec(args.model_path)
    except ModelError as error:
        raise ArgumentError(f"--model-path {args.model_path}: {error}") from error
    if args.hicache.has_storage:
        prepare_root(args.hicache.storage_path)


def _configure_logging(level: str) -> None:
    """One format for every line, on stderr; stdout has the address and nothing else."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("jax").setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
