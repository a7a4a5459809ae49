"""The answers to the prompts of one HTTP request: started together, read in the order in which they grow.

Whatever happens to the client, `close` is reached and ends what is unfinished: a disconnect is noticed while waiting
for tokens, streaming or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engine import Engine
from ..generation import Generation
from ..outputs import OutputChunk
from ..requests import GenerateSpec

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, as server-sent events",
        "content": {"text/event-stream": {}},
    }
}
"""What the routes that can stream add to the OpenAPI."""


class ClientGone(Exception):
    """The client closed the connection; nobody will read the answer."""


@dataclass(frozen=True)
class Delta:
    """What one chunk added to answer `index`; `first_token` is its place in `generation.token_ids`."""

    index: int
    generation: Generation
    text: str
    first_token: int


class Answers:
    """Made and used on the server's event loop."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, OutputChunk]] = asyncio.Queue()
        self._unread: Counter[int] = Counter()  # chunks in the queue, by answer
        self._gone = asyncio.ensure_future(_until_disconnect(request.receive))
        self.generations: list[Generation] = []

    @classmethod
    async def start(
        cls, engine: Engine, request: Request, make_specs: Callable[[], Sequence[GenerateSpec]]
    ) -> Answers:
        """Submit every spec, or none: raises what `make_specs` or `Engine.submit` raise."""
        answers = cls(engine, request)
        try:
            # Tokenising a long prompt takes a while; the loop goes on serving.
            await run_in_threadpool(lambda: answers._submit(make_specs()))
        except BaseException:
            answers.close()
            raise
        return answers

    def _submit(self, specs: Sequence[GenerateSpec]) -> None:
        self._engine.check_batch(len(specs))
        for index, spec in enumerate(specs):
            self.generations.append(
                self._engine.submit(spec, lambda chunk, i=index: self._deliver(i, chunk))  # type: ignore[misc]
            )

    def _deliver(self, index: int, chunk: OutputChunk) -> None:
        # RuntimeError: the server's loop is closed, so that nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, index, chunk)

    def _put(self, index: int, chunk: OutputChunk) -> None:
        self._unread[index] += 1
        self._queue.put_nowait((index, chunk))

    def more_waits(self, index: int) -> bool:
        """True if an answer has grown already beyond its last delta."""
        return self._unread[index] > 0

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, until every answer has ended. Raises ClientGone."""
        unfinished = len(self.generations)
        while unfinished:
            index, chunk = await self._next()
            self._unread[index] -= 1
            generation = self.generations[index]
            first_token = len(generation.token_ids)
            text = generation.feed(chunk)
            unfinished -= generation.finish is not None
            yield Delta(index, generation, text, first_token)

    async def finish(self) -> list[Generation]:
        """Wait for all answers; raises ClientGone. Closes in any case."""
        try:
            async for _ in self.deltas():
                pass
            return self.generations
        finally:
            self.close()

    def close(self) -> None:
        """Abort what is unfinished and stop watching the client. Idempotent."""
        self._gone.cancel()
        for generation in self.generations:
            if generation.finish is None:
                self._engine.abort(generation.rid)

    async def _next(self) -> tuple[int, OutputChunk]:
        if not self._queue.empty():
            return self._queue.get_nowait()
        arrival = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait({arrival, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if arrival.done():
                return arrival.result()
            raise ClientGone
        finally:
            arrival.cancel()


class EventStream(Response):
    """A server-sent-event answer that closes its answers whether or not the first byte could be sent."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]) -> None:
        super().__init__(media_type="text/event-stream")
        self._answers = answers
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then `[DONE]`."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._events:
                await _send_event(send, event)
            await _send_event(send, "[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            return  # nobody is left to be told
        finally:
            self._answers.close()


async def _send_event(send: Callable[[dict[str, object]], Awaitable[None]], event: str) -> None:
    body = f"data: {event}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
