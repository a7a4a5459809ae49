"""The demo's own parts, without a model: what is asked, how a stream is read, what counts as different, the report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_jax.srt.mem_cache.hicache.types import Tier, TierTokens
from sgl_jax_hicache.demo.__main__ import DEVICE_TOKENS
from sgl_jax_hicache.demo.client import Answer, ChatClient
from sgl_jax_hicache.demo.conversations import (
    BYTE_LENGTHS,
    WORD_LENGTHS,
    Lengths,
    Message,
    conversation_turns,
    document,
    long_prompt,
)
from sgl_jax_hicache.demo.model import DemoModel
from sgl_jax_hicache.demo.play import LongPrompt, Record, Script, Step, mismatches, play
from sgl_jax_hicache.demo.plot import write_plot
from sgl_jax_hicache.demo.report import Findings, write_json
from sgl_jax_hicache.demo.server_process import ServerFailedError, ServerProcess
from sgl_jax_hicache.engine.model_spec import PRESET_NAMES, check_spec
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer
from sgl_jax_hicache.engine.weights.random_weights import preset_config
from sgl_jax_hicache.provenance import commit


def answer(text: str = "x", ttft_s: float = 0.1, **tiers: int) -> Answer:
    return Answer(text, tuple(text), TierTokens(**tiers), ttft_s, 1.0)


class EchoChat:
    """Answers with the length of what was said, and remembers every prompt."""

    def __init__(self) -> None:
        self.prompts: list[list[Message]] = []

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        self.prompts.append(list(messages))
        return answer(f"{sum(len(m['content']) for m in messages)} of {max_tokens}", computed=1)


def played(steps: Sequence[Step]) -> tuple[EchoChat, list[Record]]:
    chat = EchoChat()
    return chat, list(play(chat, steps, 7))


def test_the_text_is_the_same_in_every_process() -> None:
    assert document(1, 2) == document(1, 2)
    assert document(1, 2) != document(2, 2)
    assert document(1, 1).startswith("On ")
    assert long_prompt(0, WORD_LENGTHS) != long_prompt(1, WORD_LENGTHS)


def test_conversations_open_with_two_turns_in_a_row_then_take_turns() -> None:
    names = [turn.name for turn in conversation_turns(3, 4, WORD_LENGTHS)]
    assert names == ["A1", "A2", "B1", "B2", "C1", "C2", "A3", "B3", "C3", "A4", "B4", "C4"]


def test_a_turn_repeats_everything_said_before_with_the_answers() -> None:
    chat, records = played(conversation_turns(2, 3, WORD_LENGTHS))
    prompt_of = {r.step.name: p for r, p in zip(records, chat.prompts, strict=True)}
    answer_of = {r.step.name: r.answer.text for r in records}
    assert prompt_of["A2"][:2] == prompt_of["A1"]
    assert prompt_of["A2"][2] == {"role": "assistant", "content": answer_of["A1"]}
    assert prompt_of["A3"][: len(prompt_of["A2"])] == prompt_of["A2"]
    assert prompt_of["A1"][0] == prompt_of["B1"][0], "the system prompt is shared"
    assert prompt_of["A1"][1] != prompt_of["B1"][1]


def test_every_cached_step_has_an_answer_to_compare_with() -> None:
    script = Script(WORD_LENGTHS)
    expected = {step.name for step in script.without_cache()}
    cached = [*script.with_cache(), *script.after_restart()]
    assert {step.name for step in cached} <= expected
    assert {"A1", "long 1"} <= {step.name for step in script.after_restart()}


class RandomBytesChat(EchoChat):
    """Answers as a model of random bytes may at worst: each of its tokens is shown as a sign of three bytes."""

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        super().chat(messages, max_tokens)
        return answer("\ufffd" * max_tokens, computed=1)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_prompts_fit_a_tiny_model_and_its_pool(name: str) -> None:
    model = DemoModel.named(name)
    check_spec(model.path)
    assert model.is_tiny
    config = preset_config(name)
    tokenizer = byte_tokenizer(config.vocab_size, config.eos_token_ids)
    answer_tokens = 16
    chat = RandomBytesChat()
    steps = [record.step for record in play(chat, Script(model.lengths).without_cache(), 16)]
    for step, prompt in zip(steps, chat.prompts, strict=True):
        num_tokens = len(tokenizer.encode_chat(prompt))
        assert num_tokens + answer_tokens <= min(DEVICE_TOKENS, config.max_position_embeddings)
        if isinstance(step, LongPrompt):
            assert num_tokens == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize(
    ("name", "path", "lengths"),
    [
        ("smollm2", "smollm2", WORD_LENGTHS),
        ("random:/a/folder:3", "random:/a/folder:3", WORD_LENGTHS),
        ("tiny-recurrent", "random:tiny-recurrent:7", BYTE_LENGTHS),
        ("random:tiny-swa:1", "random:tiny-swa:1", BYTE_LENGTHS),
    ],
)
def test_a_model_is_named_as_for_the_launcher_or_by_its_preset(
    name: str, path: str, lengths: Lengths
) -> None:
    assert DemoModel.named(name) == DemoModel(path, lengths, lengths is BYTE_LENGTHS)


def test_mismatches_are_found_by_name() -> None:
    script = Script(WORD_LENGTHS)
    _, expected = played(script.without_cache())
    _, found = played(script.with_cache())
    assert mismatches(expected, found) == []
    changed = Record(found[3].step, answer("something else"))
    assert mismatches(expected, [*found, changed]) == [changed.step.name]


def test_equal_text_of_other_tokens_differs() -> None:
    step = LongPrompt(0, WORD_LENGTHS)
    one = Answer("ab", ("a", "b"), TierTokens(), 0.1, 0.1)
    other = Answer("ab", ("ab",), TierTokens(), 0.1, 0.1)
    assert mismatches([Record(step, one)], [Record(step, other)]) == ["long 1"]


def sse(*events: dict[str, Any]) -> bytes:
    return (
        b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    )


def delta(content: str, *tokens: bytes) -> dict[str, Any]:
    logprobs = [{"token": "?", "bytes": list(t), "logprob": -0.1} for t in tokens]
    return {"choices": [{"delta": {"content": content}, "logprobs": {"content": logprobs}}]}


def client(handler: Any) -> ChatClient:
    return ChatClient("http://test", transport=httpx.MockTransport(handler))


def test_a_stream_becomes_text_tokens_and_tiers() -> None:
    asked: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        details = {"cached_tokens": 60, "device": 10, "host": 20, "storage": 30, "computed": 40}
        usage = {"prompt_tokens": 100, "prompt_tokens_details": details}
        return httpx.Response(
            200,
            content=sse(
                {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
                delta("Pa", b"Pa"),
                delta("ris\u00e9", b"ris", b"\xc3", b"\xa9"),
                {"choices": [], "usage": usage},
            ),
        )

    got = client(handler).chat([{"role": "user", "content": "?"}], max_tokens=5)
    assert got.text == "Paris\u00e9"
    assert got.tokens == ("5061", "726973", "c3", "a9")
    assert got.tiers == TierTokens(device=10, host=20, storage=30, computed=40)
    assert got.prompt_tokens == 100
    assert got.main_tier is Tier.COMPUTED
    assert 0 < got.ttft_s <= got.total_s
    assert asked[0]["temperature"] == 0
    assert asked[0]["max_tokens"] == 5


def test_a_refusal_carries_the_servers_words() -> None:
    refusing = client(lambda request: httpx.Response(400, text="prompt too long"))
    with pytest.raises(httpx.HTTPStatusError, match="400: prompt too long"):
        refusing.chat([], max_tokens=1)


def test_an_error_inside_a_stream_is_not_an_answer() -> None:
    failing = client(
        lambda request: httpx.Response(200, content=sse({"error": {"message": "gone"}}))
    )
    with pytest.raises(httpx.StreamError, match="gone"):
        failing.chat([], max_tokens=1)


def test_bytes_moved_are_summed_over_components() -> None:
    text = "\n".join(
        [
            "# TYPE sglang:hicache_transfer_bytes counter",
            'sglang:hicache_transfer_bytes_total{component="full",kind="backup"} 5.0',
            'sglang:hicache_transfer_bytes_total{component="swa",kind="backup"} 2.0',
            'sglang:hicache_transfer_bytes_total{component="full",kind="fetch"} 1.0',
            "",
        ]
    )
    moved = client(lambda request: httpx.Response(200, text=text)).bytes_moved()
    assert moved == {"backup": 7, "load": 0, "store": 0, "fetch": 1}


@pytest.fixture
def findings() -> Findings:
    long = LongPrompt(0, WORD_LENGTHS)
    return Findings(
        without_cache=[Record(long, answer(ttft_s=8.0, computed=2000))],
        with_cache=[
            Record(long, answer(ttft_s=9.0, computed=2000)),
            Record(long, answer(ttft_s=0.2, host=1990, computed=10)),
            Record(long, answer(ttft_s=0.4, host=1990, computed=10)),
        ],
        after_restart=[Record(long, answer(ttft_s=0.8, storage=1990, computed=10))],
        bytes_moved={"backup": 1, "load": 2, "store": 3, "fetch": 4},
    )


def test_the_report_has_the_agreed_keys(findings: Findings, tmp_path: Path) -> None:
    write_json(findings, tmp_path / "demo-report.json")
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert set(report) == {
        *("mismatched_answers", "tokens", "ttft_ms", "long_prompt_ttft_ms"),
        *("bytes_moved", "machine", "commit"),
    }
    assert report["mismatched_answers"] == 0
    assert report["tokens"] == {"device": 0, "host": 3980, "storage": 1990, "computed": 2030}
    assert report["ttft_ms"] == {
        "device": None,
        "host": 300.0,
        "storage": 800.0,
        "computed": 9000.0,
    }
    assert report["bytes_moved"] == findings.bytes_moved
    assert report["commit"] == commit()


def test_recomputing_is_timed_without_any_cache(findings: Findings) -> None:
    assert findings.long_prompt_ttft_ms() == {
        Tier.COMPUTED: 8000.0,
        Tier.HOST: 300.0,
        Tier.STORAGE: 800.0,
    }


def test_the_plot_is_a_png(findings: Findings, tmp_path: Path) -> None:
    write_plot(findings, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
print("listening", flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ServerProcess([], log, 30.0, launch=(sys.executable, "-c", SERVER)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.kill()
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health")
    assert "listening" in log.read_text()


def test_the_next_server_takes_the_port_of_the_one_that_was_killed(tmp_path: Path) -> None:
    launch = (sys.executable, "-c", SERVER)
    with ServerProcess([], tmp_path / "log", 30.0, launch=launch) as first:
        port = first.port
    with ServerProcess([], tmp_path / "log", 30.0, launch=launch, port=port) as second:
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert second.port == port


def test_a_server_that_ends_shows_its_last_words(tmp_path: Path) -> None:
    launch = (sys.executable, "-c", "import sys; print('no such model'); sys.exit(2)")
    with (
        pytest.raises(ServerFailedError, match=r"status 2:\nno such model"),
        ServerProcess([], tmp_path / "log", 30.0, launch=launch),
    ):
        pass
