"""A real server on a free port, over the fake runner."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
from engine_fakes import FakeRunner
from scheduler_world import MAX_CONTEXT_LEN, radix_tree

from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator
from sgl_jax_hicache.engine.engine import Engine, EngineParts
from sgl_jax_hicache.engine.engine_metrics import EngineMetrics
from sgl_jax_hicache.engine.http_server.app import create_app
from sgl_jax_hicache.engine.http_server.server import Server, bind
from sgl_jax_hicache.engine.req_to_token_pool import ReqToTokenPool
from sgl_jax_hicache.engine.requests import RequestChecker
from sgl_jax_hicache.engine.scheduler import Scheduler, SchedulerConfig
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer

MODEL = "fake-model"
POOL_TOKENS = 1024
MAX_REQUEST_BYTES = 8192
WAIT_S = 20.0


class EngineWorld:
    """A running engine whose steps a test can hold back.

    `gate` holds the results of steps from `gate_from` on; `dispatched` is set by every step; `aborted` once an abort
    was asked for; `released` once a request has left the scheduler.
    """

    def __init__(self, *, max_queued_requests: int = 16, page_size: int = 4) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.gate_from = 0
        self.dispatched = threading.Event()
        self.aborted = threading.Event()
        self.released = threading.Event()
        self.runner = FakeRunner(
            POOL_TOKENS + page_size,
            page_size,
            gate_of=lambda step: self.gate if step >= self.gate_from else None,
            on_dispatch=lambda batch: self.dispatched.set(),
        )
        allocator = PagedTokenToKVPoolAllocator(POOL_TOKENS, page_size, kvcache=None)
        rows = ReqToTokenPool(4, MAX_CONTEXT_LEN)
        metrics = EngineMetrics()
        self.tree = radix_tree(rows, allocator, page_size, registry=metrics.registry)
        release = self.tree.release_prefetch
        self.tree.release_prefetch = lambda rid: (release(rid), self.released.set())  # type: ignore
        config = SchedulerConfig(64, raise_on_idle_check=True)
        tokenizer = byte_tokenizer(300)
        self.engine = Engine(
            EngineParts(
                scheduler=Scheduler(config, self.runner, self.tree, rows, allocator, metrics),
                tree=self.tree,
                tokenizer=tokenizer,
                checker=RequestChecker(tokenizer, MAX_CONTEXT_LEN, POOL_TOKENS, 0),
                registry=metrics.registry,
                served_model_name=MODEL,
                max_queued_requests=max_queued_requests,
                info={"engine": "test"},
            )
        )
        abort = self.engine.abort
        self.engine.abort = lambda rid: (abort(rid), self.aborted.set())  # type: ignore

    def hold(self, from_step: int | None = None) -> None:
        """Hold back the results of the coming steps, or of those from a given one on."""
        self.gate_from = len(self.runner.batches) if from_step is None else from_step
        self.gate.clear()

    def state(self) -> dict[str, Any]:
        """The scheduler's numbers."""
        state: dict[str, Any] = self.engine.get_server_info()["state"]
        return state

    def assert_nothing_held(self) -> None:
        """No request, and every token free or evictable."""
        state = self.state()
        assert state["running_requests"] == state["waiting_requests"] == 0
        assert state["protected_tokens"] == 0
        assert state["free_tokens"] + state["evictable_tokens"] == POOL_TOKENS


class HttpWorld(EngineWorld):
    """The engine behind HTTP."""

    def __init__(self, *, api_key: str | None = None, **engine: Any) -> None:
        super().__init__(**engine)
        app = create_app(self.engine, api_key=api_key, max_request_bytes=MAX_REQUEST_BYTES)
        self.listener = bind("127.0.0.1", 0)
        self.address = self.listener.getsockname()
        self.server = Server(app, deadline_s=2)
        self._thread = threading.Thread(target=self.server.serve_on, args=(self.listener,))
        self._thread.start()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}", timeout=WAIT_S, trust_env=False
        )

    def close(self) -> None:
        """Stop server and engine."""
        self.gate.set()
        self.client.close()
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        self.listener.close()
        assert not self._thread.is_alive()
        assert self.engine.shutdown(5)


@contextlib.contextmanager
def http_world(**settings: Any) -> Iterator[HttpWorld]:
    """A world that is closed at the end."""
    world = HttpWorld(**settings)
    try:
        yield world
    finally:
        world.close()
