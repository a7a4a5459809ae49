"""A whole server over the fake model: HTTP, engine, three levels, real page files, and a clock that the test moves.

The fake model reads what lies in the pages, so a wrong byte on any level is a wrong token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from engine_fakes import expected_output
from prometheus_client import CollectorRegistry
from scheduler_world import MAX_CONTEXT_LEN, SchedulerWorld

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity, build_unified_radix_cache
from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.page_key import StorageNamespace
from sgl_jax.srt.mem_cache.hicache.storage.base import HiCacheStorage
from sgl_jax.srt.mem_cache.hicache.storage.file_ops import FileOps
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root
from sgl_jax_hicache.engine.engine import Engine, EngineParts
from sgl_jax_hicache.engine.http_server.app import create_app
from sgl_jax_hicache.engine.http_server.server import Server, bind
from sgl_jax_hicache.engine.requests import RequestChecker
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer

PAGE_SIZE = 4
WAIT_S = 30.0


class Clock:
    """Seconds that pass when the test says so. Any thread."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._now_s += seconds


class TierWorld:
    """One server on `root`. `ops`: the system calls of its storage."""

    def __init__(
        self,
        root: Path,
        *,
        ops: FileOps | None = None,
        device_pages: int = 24,
        ratio: float = 2.0,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        prefetch_deadline_s: float = 5.0,
        api_key: str | None = None,
    ) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.storage: LocalFileStorage
        self._ops = ops
        config = HiCacheConfig(
            storage=StorageKind.FILE,
            storage_path=root,
            ratio=ratio,
            write_policy=policy,
            prefetch_deadline_s=prefetch_deadline_s,
        )
        self.parts = SchedulerWorld(
            num_pages=device_pages, page_size=PAGE_SIZE, tree=self._build_tree, hicache=config
        )
        tokenizer = byte_tokenizer(300)
        self.engine = Engine(
            EngineParts(
                scheduler=self.parts.scheduler,
                tree=self.parts.tree,
                tokenizer=tokenizer,
                checker=RequestChecker(tokenizer, MAX_CONTEXT_LEN, device_pages * PAGE_SIZE, 0),
                registry=self.registry,
                served_model_name="fake",
                max_queued_requests=64,
                info={},
            )
        )
        self._listener = bind("127.0.0.1", 0)
        self._server = Server(create_app(self.engine, api_key=api_key), deadline_s=2)
        self._thread = threading.Thread(target=self._server.serve_on, args=(self._listener,))
        self._thread.start()
        port = self._listener.getsockname()[1]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=2 * WAIT_S,
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

    def _build_tree(
        self, rows: Any, allocator: Any, page_size: int, config: HiCacheConfig, **_fields: Any
    ) -> Any:
        return build_unified_radix_cache(
            config,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            model_identity=ModelIdentity("fake", "0"),
            registry=self.registry,
            storage_factories={"file": self._open_storage},
            clock=self.clock,
        )

    def _open_storage(self, root: str | Path, namespace: StorageNamespace) -> HiCacheStorage:
        self.storage = LocalFileStorage(prepare_root(root), namespace, ops=self._ops)
        return self.storage

    def ask(self, prompt: Sequence[int], num_new: int = 2, **fields: Any) -> dict[str, int]:
        """One request over HTTP, which must be answered as without any cache; its prompt tokens by tier."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": num_new, "ignore_eos": True},
            **fields,
        }
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["output_ids"] == expected_output(prompt, num_new), "wrong tokens"
        tiers: dict[str, int] = answer["meta_info"]["cached_tokens_details"]
        return {tier: count for tier, count in tiers.items() if count}

    def settle(self) -> None:
        """Until no request runs, those included whose clients have left, and no transfer is under way."""
        deadline_s = time.monotonic() + WAIT_S
        busy = ("running_requests", "waiting_requests", "pending_transfers")
        while any((state := self.engine.get_server_info()["state"])[name] for name in busy):
            assert time.monotonic() < deadline_s, f"no end comes: {state}"

    def forget(self) -> None:
        """Empty device and host."""
        assert self.engine.flush_cache(WAIT_S)

    def metric(self, name: str, **labels: str) -> float:
        """A HiCache sample of /metrics."""
        given = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = f"sglang:hicache_{name}" + (f"{{{given}}}" if given else "")
        for line in self.client.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == wanted:
                return float(value)
        raise AssertionError(f"/metrics has no {wanted}")

    def check_at_rest(self) -> None:
        """Every transfer ended, nothing is held, every invariant holds, the engine lives."""
        self.settle()
        state = self.engine.get_server_info()["state"]
        assert state["protected_tokens"] == 0
        assert state["free_tokens"] + state["evictable_tokens"] == state["pool_tokens"]
        self.engine._thread.call(self.parts.tree.check_invariants).result(WAIT_S)
        assert self.engine.healthy

    def close(self) -> None:
        """Stop the server, then the engine."""
        self.client.close()
        self._server.should_exit = True
        self._thread.join(WAIT_S)
        self._listener.close()
        assert not self._thread.is_alive()
        self.engine.shutdown(WAIT_S)


@contextmanager
def tier_world(root: Path, **settings: Any) -> Iterator[TierWorld]:
    """A world that is checked and closed at the end."""
    world = TierWorld(root, **settings)
    try:
        yield world
        world.check_at_rest()
    finally:
        world.close()
