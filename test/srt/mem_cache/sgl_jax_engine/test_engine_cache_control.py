"""Control of the cache in the sgl-jax engine, without the engine: commands on a real cache, and the routes to it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from tree_world import ManualExecutor, World

from sgl_jax.srt.mem_cache.hicache.config import StorageKind
from sgl_jax.srt.mem_cache.hicache.storage.registry import STORAGE_FACTORIES
from sgl_jax.srt.mem_cache.hicache.types import TierTokens
from sgl_jax_hicache.engine.http_server.schema import WarmUpBody
from sgl_jax_hicache.sgl_jax_engine.cache_control import (
    CacheAction,
    CacheAnswer,
    CacheCommand,
    CacheControl,
)
from sgl_jax_hicache.sgl_jax_engine.control_routes import add_control_routes

PROMPT = list(range(1, 34))
BACKEND = "/hicache/storage-backend"


@dataclass
class Engine:
    """What the launching process and the scheduler do with a command, in one process."""

    world: World
    num_processes: int = 1
    idle: bool = True
    asked: list[WarmUpBody] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.control = CacheControl(self.world.cache, self.num_processes, self._flush)

    def _flush(self) -> str | None:
        if not self.idle:
            return "requests are running"
        self.world.cache.reset()
        self.world.allocator.clear()
        return None

    async def control_cache(self, command: CacheCommand) -> CacheAnswer:
        answer = self.control.answer(pickle.loads(pickle.dumps(command)))
        self.world.cache.check_hicache_events()
        found: CacheAnswer = pickle.loads(pickle.dumps(answer))
        return found

    async def compute(self, body: WarmUpBody, request: Any) -> list[dict[str, Any]]:
        self.asked.append(body)
        if body.text == "too long":
            raise ValueError("the prompt is too long")
        return [{"prompt_tokens": 3, "cached_tokens": 2, "id": "r"}]


class Client:
    """The routes on an application that has a flush of its own, as the engine's has."""

    def __init__(self, engine: Engine, *, has_key: bool = True) -> None:
        app = FastAPI()

        @app.api_route("/flush_cache", methods=["GET", "POST"])
        async def flush_cache() -> PlainTextResponse:
            return PlainTextResponse("the engine's own")

        add_control_routes(app, lambda: engine, has_key=has_key)
        self._transport = httpx.ASGITransport(app=app)

    def __call__(self, method: str, path: str, **fields: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://x") as client:
                return await client.request(method, path, **fields)

        return asyncio.run(ask())


def make_world(path: Path, **settings: Any) -> World:
    settings = {"storage": StorageKind.FILE, "path": path, "device_pages": 32, **settings}
    return World(storage_factories=STORAGE_FACTORIES, **settings)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path / "root")
    yield made
    assert made.cache.shutdown(5.0)


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    text: str = response.json()["error"]["message"]
    return text


def test_storage_goes_and_comes_back(world: World, tmp_path: Path) -> None:
    client = Client(Engine(world))
    world.run(PROMPT)
    world.settle()
    assert client("DELETE", BACKEND).json() == {"detached": True, "drained": True}
    assert "no storage is attached" in message(client("DELETE", BACKEND), 409)
    assert world.run(PROMPT) == TierTokens(device=32, computed=1)
    world.settle()
    world.cache.reset()
    world.allocator.clear()
    attached = client("PUT", BACKEND, json={"path": str(tmp_path / "root"), "max_bytes": "1MiB"})
    assert attached.json()["max_bytes"] == 2**20
    assert "attached already" in message(client("PUT", BACKEND, json={"path": "/x/y"}), 409)
    assert world.run(PROMPT) == TierTokens(storage=32, computed=1)
    found = client("GET", "/hicache/statistics").json()
    assert found["storage_path"] == str(tmp_path / "root")
    assert found["prompt_tokens"]["storage"] == 32
    world.verify_at_rest()


def test_detach_waits_for_what_is_under_way_no_longer_than_told(tmp_path: Path) -> None:
    executor = ManualExecutor(auto=False)
    world = make_world(tmp_path / "root", executor=executor)
    engine = Engine(world)
    world.run(PROMPT, prefetch=False)
    executor.run_one()  # the backup; its store waits
    world.cache.check_hicache_events()
    answer = Client(engine)("DELETE", BACKEND, params={"timeout_s": 0})
    assert answer.json() == {"detached": True, "drained": False}
    drained = CacheCommand(CacheAction.IS_DRAINED)
    assert engine.control.answer(drained).body == {"drained": False}
    executor.run_all()
    world.cache.check_hicache_events()
    assert engine.control.answer(drained).body == {"drained": True}
    world.verify_at_rest()


def test_flush_goes_to_the_engine_unless_storage_is_to_be_cleared(
    world: World, tmp_path: Path
) -> None:
    engine = Engine(world)
    client = Client(engine)
    world.run(PROMPT)
    world.settle()
    for method, params in (("GET", {}), ("POST", {}), ("POST", {"storage": "keep"})):
        assert client(method, "/flush_cache", params=params).text == "the engine's own"
    engine.idle = False
    refused = client("POST", "/flush_cache", params={"storage": "clear"})
    assert "requests are running" in message(refused, 409)
    assert len(list((tmp_path / "root").rglob("*.npy"))) == 8
    engine.idle = True
    cleared = client("POST", "/flush_cache", params={"storage": "clear"})
    assert cleared.json() == {"flushed": True, "storage_pages_removed": 8}
    assert not list((tmp_path / "root").rglob("*.npy"))
    world.run(PROMPT)
    world.settle()
    assert len(list((tmp_path / "root").rglob("*.npy"))) == 8, "storage is there again"
    world.verify_at_rest()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"path": "relative"}, 400, "absolute"),
        ({"path": "/x", "max_bytes": "much"}, 400, "max_bytes"),
        ({"path": "/proc/nothing/here"}, 400, "cannot be created"),
    ],
)
def test_what_cannot_be_is_refused(
    world: World, body: dict[str, Any], status: int, reason: str
) -> None:
    client = Client(Engine(world))
    client("DELETE", BACKEND)
    assert reason in message(client("PUT", BACKEND, json=body), status)
    assert client("GET", "/hicache/statistics").json()["storage_path"] is None


def test_without_a_key_nobody_moves_or_removes_files(world: World, tmp_path: Path) -> None:
    client = Client(Engine(world), has_key=False)
    for method, path, fields in (
        ("PUT", BACKEND, {"json": {"path": str(tmp_path / "other")}}),
        ("DELETE", BACKEND, {}),
        ("POST", "/flush_cache?storage=clear", {}),
    ):
        assert "--api-key" in message(client(method, path, **fields), 403)
    assert client("GET", "/hicache/statistics").json()["storage_path"] == str(tmp_path / "root")
    assert not (tmp_path / "other").exists()


def test_several_processes_keep_their_storage(world: World) -> None:
    client = Client(Engine(world, num_processes=2))
    assert client("GET", "/hicache/statistics").status_code == 200
    for method, fields in (("DELETE", {}), ("PUT", {"json": {"path": "/x"}})):
        assert "--nnodes" in message(client(method, BACKEND, **fields), 409)


def test_another_cache_than_ours_cannot_be_controlled() -> None:
    control = CacheControl(object(), 1, lambda: None)
    for action in CacheAction:
        answer = control.answer(CacheCommand(action))
        assert (answer.status, "HiCache is off" in answer.message) == (409, True)


def test_warm_up(world: World) -> None:
    engine = Engine(world)
    client = Client(engine)
    answer = client("POST", "/hicache/warm_up", json={"text": ["a", "b"], "extra_key": "me"})
    assert answer.json() == {
        "prompts": [{"prompt_tokens": 3, "cached_tokens": 2, "cached_tokens_details": None}]
    }
    assert engine.asked[0].extra_key == "me"
    assert message(client("POST", "/hicache/warm_up", json={}), 400)
    assert "too long" in message(client("POST", "/hicache/warm_up", json={"text": "too long"}), 400)
