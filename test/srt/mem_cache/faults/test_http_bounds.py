"""What a client can take from the server is bounded: connections, bodies, time; and strangers are told nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from engine_fakes import expected_output
from fastapi import FastAPI
from http_world import WAIT_S, HttpWorld, http_world
from starlette.types import Message, Receive, Scope, Send

from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.forward_batch import SamplingParams
from sgl_jax_hicache.engine.generation import Generation
from sgl_jax_hicache.engine.http_server import generate_routes
from sgl_jax_hicache.engine.http_server.generate_routes import LONG_ANSWER
from sgl_jax_hicache.engine.http_server.middleware import BodyLimitMiddleware
from sgl_jax_hicache.engine.http_server.protocol import BoundedProtocol
from sgl_jax_hicache.engine.http_server.server import Server, bind, connection_bounds
from sgl_jax_hicache.engine.outputs import FinishKind, FinishReason, OutputChunk, RequestStats
from sgl_jax_hicache.engine.requests import (
    MAX_TOP_LOGPROBS,
    GenerateSpec,
    RequestChecker,
    RequestError,
)
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer

BODY: dict[str, Any] = {
    "input_ids": [1, 2, 3],
    "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
}
HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MAX_BODY = 8192  # of `http_world`


@pytest.fixture
def world() -> Iterator[HttpWorld]:
    with http_world() as running:
        yield running


def serves(world: HttpWorld) -> bool:
    """Whether somebody else is still answered."""
    with httpx.Client(base_url=world.client.base_url, timeout=WAIT_S, trust_env=False) as other:
        answer = other.post("/generate", json=BODY)
        return bool(
            answer.status_code == 200
            and answer.json()["output_ids"] == expected_output([1, 2, 3], 2)
        )


def connect(world: HttpWorld) -> socket.socket:
    return socket.create_connection(world.address, timeout=WAIT_S)


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_the_server_listens_on_loopback_unless_told_otherwise() -> None:
    with bind(EngineArgs().host, 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_every_route_but_health_demands_the_key() -> None:
    """Also those that fastapi adds, and paths that do not exist: nothing is told to strangers."""
    with http_world(api_key="secret") as world:
        key = {"Authorization": "Bearer secret"}
        paths = set(world.client.get("/openapi.json", headers=key).json()["paths"])
        assert len(paths) > 8
        strange = {
            "/openapi.json",
            "/nowhere",
            "//health",
            "/health/",
            "/health/../metrics",
            "/HEALTH",
        }
        for path in sorted((paths | strange) - {"/health"}):
            for method in ("GET", "POST"):
                response = world.client.request(method, path, json=BODY)
                assert response.status_code == 401, f"{method} {path}"
        assert world.client.get("/health").status_code == 200
        assert world.client.post("/generate", json=BODY, headers=key).status_code == 200
        for wrong in (
            "Bearer secre",
            "Bearer secret x",
            "bearer secret",
            "Basic secret",
            "Bearer \xff",
        ):
            headers = {"Authorization": wrong.encode("latin1")}
            assert world.client.get("/metrics", headers=headers).status_code == 401, wrong


def test_connections_are_bounded_and_a_refusal_says_so(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "max_connections", 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            client = stack.enter_context(connect(world))
            client.sendall(HEAD)
        head, _, body = read_all(stack.enter_context(connect(world))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["message"] == "the server is full: 3 connections are open"
    assert serves(world)


@pytest.mark.parametrize("file_limit", [64, 256, 1024, 1 << 20])
def test_connections_never_take_all_descriptors(file_limit: int) -> None:
    """asyncio accepts a batch, and only then looks at it: those to be refused are open too, and the next batch may come
    before they are closed. Without descriptors it would log a traceback for each, thousands in a second.
    """
    most, at_once = connection_bounds(file_limit)
    assert most + 3 * at_once <= file_limit * 7 // 8
    assert Server(FastAPI(), 1.0).config.backlog <= 64


@pytest.mark.parametrize("sent", [b"", b"POST /gener", HEAD[:-2]])
def test_a_client_that_never_asks_is_not_waited_for(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.05)
    with connect(world) as client:
        client.sendall(sent)
        assert read_all(client) == b"", "the server closed it"
    assert serves(world)


def test_a_long_answer_is_not_cut_off_by_the_time_for_asking(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 1.0)
    world.hold(from_step=1)
    body = {**BODY, "stream": True}
    with world.client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        with connect(world) as other:
            assert read_all(other) == b"", "the time for asking is over"
        world.gate.set()
        assert list(lines)[-2] == "data: [DONE]"


def test_nor_is_the_answer_to_a_request_that_came_before_the_last_answer(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 1.0)
    world.hold(from_step=1)

    def asking(max_new_tokens: int, head: bytes) -> bytes:
        sampling = {**BODY["sampling_params"], "max_new_tokens": max_new_tokens}
        body = json.dumps({**BODY, "sampling_params": sampling}).encode()
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    with connect(world) as client:
        client.sendall(asking(1, HEAD) + asking(2, HEAD + b"Connection: close\r\n"))
        assert client.recv(12) == b"HTTP/1.1 200"
        with connect(world) as other:
            assert read_all(other) == b"", "the time for asking is over"
        world.gate.set()
        assert read_all(client).count(b"HTTP/1.1 200") == 1


class Upload:
    """The server's side of one request whose body comes when the test says so."""

    def __init__(self, limit: BodyLimitMiddleware) -> None:
        self.statuses: list[int] = []
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "http", "path": "/", "headers": []}
        self.task = asyncio.ensure_future(limit(scope, self._messages.get, self._send))

    async def part(self, num_bytes: int, *, last: bool = False) -> None:
        """A piece arrives, and the server has looked at it."""
        self._messages.put_nowait(
            {"type": "http.request", "body": bytes(num_bytes), "more_body": not last}
        )
        while not self._messages.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


def test_bodies_under_way_are_bounded_together() -> None:
    """Eight times the largest body; who comes then hears that the server is full, and the others go on."""
    bodies: list[bytes] = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        bodies.append((await receive())["body"])

    async def scenario() -> None:
        limit = BodyLimitMiddleware(app, max_bytes=100)
        uploads = [Upload(limit) for _ in range(8)]
        for upload in uploads:
            await upload.part(100)
        late = Upload(limit)
        await late.part(1, last=True)
        await late.task
        assert late.statuses == [503]
        await uploads[0].part(0, last=True)
        await uploads[0].task
        assert bodies == [bytes(100)]
        later = Upload(limit)
        await later.part(100, last=True)
        await later.task
        assert bodies == [bytes(100)] * 2
        for upload in uploads[1:]:
            await upload.part(1, last=True)
            await upload.task
            assert upload.statuses == [413]

    asyncio.run(scenario())


def test_a_body_that_is_given_up_counts_no_longer(world: HttpWorld) -> None:
    for _ in range(20):
        with connect(world) as client:
            client.sendall(
                HEAD + f"Content-Length: {MAX_BODY}\r\n\r\n".encode() + bytes(MAX_BODY - 1)
            )
    assert serves(world)
    world.assert_nothing_held()


def test_log_probabilities_are_bounded_over_a_whole_answer() -> None:
    """One request for every token of a large vocabulary at every position would take all memory."""
    tokenizer = byte_tokenizer(50_000)
    checker = RequestChecker(tokenizer, max_context_len=8192, pool_tokens=8192, random_seed=0)

    def spec(num_new: int, top: int) -> GenerateSpec:
        sampling = SamplingParams(max_new_tokens=num_new)
        return GenerateSpec(
            input_ids=[1], sampling=sampling, return_logprob=True, top_logprobs_num=top
        )

    checker.check(spec(20, 50_000))
    checker.check(spec(8191, MAX_TOP_LOGPROBS))
    with pytest.raises(RequestError, match="ask for 128 or less, or for fewer tokens"):
        checker.check(spec(1 << 30, 50_000))


def test_a_long_stream_sends_no_event_that_is_out_of_date(world: HttpWorld) -> None:
    """Each event repeats the whole answer: sending all of them takes time that grows with the square of its length."""
    chunk = OutputChunk("r", (65,), (), None, RequestStats(1))
    tokens = 4 * LONG_ANSWER

    class Eager:
        """An engine whose answers are there at once."""

        def check_batch(self, num_prompts: int) -> None:
            """One prompt is not too many."""

        def submit(self, spec: GenerateSpec, sink: Callable[[OutputChunk], None]) -> Generation:
            for _ in range(tokens - 1):
                sink(chunk)
            sink(replace(chunk, finish=FinishReason(FinishKind.LENGTH)))
            return Generation("r", world.engine.tokenizer)

        def abort(self, rid: str) -> None:
            """Nothing is left to abort."""

    app = FastAPI()
    app.include_router(generate_routes.build_router(Eager()))  # type: ignore[arg-type]

    async def scenario() -> list[str]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post("/generate", json={**BODY, "stream": True})
        return [line.removeprefix("data: ") for line in response.text.splitlines() if line]

    *events, done = asyncio.run(scenario())
    assert done == "[DONE]"
    lengths = [len(json.loads(event)["output_ids"]) for event in events]
    assert lengths[:LONG_ANSWER] == list(range(1, LONG_ANSWER + 1))
    assert lengths[-1] == tokens
    assert len(lengths) < LONG_ANSWER + 20
