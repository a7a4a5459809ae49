"""`python -m sgl_jax_hicache.demo`: play conversations against three cache levels and show what each level gave.

1. A server without any cache answers everything once.
2. A server with HiCache, files included, and a device pool too small for the traffic answers the same: L1 and L2 hits.
3. It is killed with SIGKILL and started again on the same folder: first turns now come from L3.

Exits with 1 if any answer differs from the one without a cache, with 2 if a server does not start or refuses a prompt.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sgl_jax_hicache import overlay

overlay.activate()

from sgl_jax_hicache.engine.model_spec import PRESET_NAMES  # noqa: E402 - needs the overlay

from .client import ChatClient  # noqa: E402
from .model import DemoModel  # noqa: E402
from .play import Record, Script, Step, play  # noqa: E402
from .plot import write_plot  # noqa: E402
from .report import (  # noqa: E402
    Findings,
    long_prompt_table,
    moved_table,
    run_table,
    summary_table,
    write_json,
)
from .server_process import ServerFailedError, ServerProcess  # noqa: E402

DEVICE_TOKENS = 2_560
"""Device pool of every server: one long prompt and half a conversation."""

HOST_RATIO = 5.0
"""The host holds all conversations and long prompts."""

STORAGE_MAX_BYTES = "2GiB"
"""A multiple of what the demo stores, so that its files have a bound to be seen against and nothing is removed."""


class Demo:
    """Runs the servers and the script, and shows progress on the console."""

    def __init__(
        self,
        model: DemoModel,
        storage_path: Path,
        answer_tokens: int,
        console: Console,
        port: int = 0,
    ) -> None:
        self._port = port
        self._storage_path = storage_path
        self._answer_tokens = answer_tokens
        self._console = console
        self._log_path = storage_path / "server.log"
        self._script = Script(model.lengths)
        self._common = ("--model-path", model.path, "--max-total-tokens", str(DEVICE_TOKENS))
        self._hicache = (
            *("--hicache-storage", "file", "--hicache-storage-path", str(storage_path / "pages")),
            *("--hicache-ratio", str(HOST_RATIO)),
            *("--hicache-storage-max-bytes", STORAGE_MAX_BYTES),
        )

    def run(self) -> Findings:
        """All three runs. Raises ServerFailedError if a server does not start."""
        without_cache, _ = self._run_server(
            "no cache", ("--disable-radix-cache",), self._script.without_cache()
        )
        with_cache, moved_before = self._run_server(
            "L1 + L2 + L3", self._hicache, self._script.with_cache()
        )
        self._console.print(run_table("With a device pool too small for the traffic", with_cache))
        self._console.print(
            "The server was killed with SIGKILL; starting it again on the same folder."
        )
        after_restart, moved_after = self._run_server(
            "after SIGKILL", self._hicache, self._script.after_restart()
        )
        self._console.print(run_table("First turns after the restart", after_restart))
        moved = {kind: moved_before[kind] + moved_after[kind] for kind in moved_before}
        return Findings(without_cache, with_cache, after_restart, moved)

    def _run_server(
        self, title: str, flags: Sequence[str], script: Sequence[Step]
    ) -> tuple[list[Record], dict[str, int]]:
        """Start a server, play, read its counters, and leave it to SIGKILL."""
        records = []
        if not self._console.is_terminal:  # no bar will move there
            self._console.print(f"{title}: a server is started, then asked {len(script)} times")
        with self._progress() as progress:
            task = progress.add_task(title, total=len(script), step="starting the server")
            with (
                ServerProcess((*self._common, *flags), self._log_path, port=self._port) as server,
                closing(ChatClient(server.url)) as client,
            ):
                for record in play(client, script, self._answer_tokens):
                    records.append(record)
                    progress.update(task, advance=1, step=record.step.name)
                moved = client.bytes_moved()
            progress.update(task, step="done")
        return records, moved

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[step]:<20}"),
            TimeElapsedColumn(),
            console=self._console,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    # SIGTERM unwinds like Ctrl-C, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    arguments = _parse(argv)
    console = Console()
    model = DemoModel.named(arguments.model)
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as temporary:
        storage_path = arguments.storage_path or Path(temporary)
        storage_path.mkdir(parents=True, exist_ok=True)
        try:
            findings = Demo(
                model, storage_path, arguments.answer_tokens, console, arguments.port
            ).run()
        except (ServerFailedError, httpx.HTTPError, httpx.StreamError) as error:
            console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            return 2
    return _show(findings, model, arguments.output_dir, console)


def _show(findings: Findings, model: DemoModel, output_dir: Path, console: Console) -> int:
    report_path = output_dir / "demo-report.json"
    plot_path = output_dir / "demo-report.png"
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(findings, report_path)
    write_plot(findings, plot_path)
    for table in (summary_table(findings), long_prompt_table(findings), moved_table(findings)):
        console.print(table)
    if model.is_tiny:
        console.print(
            "The model is tiny, its weights are random: its times say little of other models."
        )
    console.print(f"Written: {report_path}, {plot_path}")
    compared = len(findings.cached_runs)
    if findings.mismatched:
        names = ", ".join(findings.mismatched)
        console.print(
            f"{len(findings.mismatched)} of {compared} answers differ: {names}", style="red"
        )
        return 1
    console.print(f"All {compared} answers are the same tokens as without a cache.", style="green")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_jax_hicache.demo", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="what launch_server takes (default smollm2), or the name of a tiny model with random weights: "
        + ", ".join(PRESET_NAMES),
    )
    parser.add_argument(
        "--storage-path",
        type=Path,
        help="folder for the pages and the server's log (default: a temporary one)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="port of the servers, one after the other, for a Prometheus that looks on (default 0: any free one)",
    )
    parser.add_argument("--answer-tokens", type=int, default=16, help="longest answer (default 16)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path(),
        help="where the report and the plot go (default: here)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
