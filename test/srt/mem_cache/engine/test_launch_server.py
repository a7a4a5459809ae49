"""The server as a process: it answers, survives SIGKILL with what it stored, and ends in order at SIGTERM."""

from __future__ import annotations

from pathlib import Path

from launched_server import ServerProcess

PROMPT = [i % 250 for i in range(200)]


def test_what_was_stored_survives_sigkill_and_sigterm_ends_in_order(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path)
    try:
        computed = first.ask(PROMPT)
        assert computed["meta_info"]["cached_tokens_details"]["computed"] == 200
        assert first.client.post("/flush_cache").json() == {"flushed": True}
    finally:
        first.end(kill=True)
    second = ServerProcess(tmp_path)
    try:
        restored = second.ask(PROMPT)
    finally:
        status = second.end(kill=False)
    assert restored["meta_info"]["cached_tokens_details"]["storage"] == 192
    assert restored["output_ids"] == computed["output_ids"]
    assert status == 0
