"""Control of the cache over HTTP while requests run: storage that comes and goes, flushes, statistics, warm-up."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_disk_trouble import SlowOps, prompts
from tier_world import WAIT_S, TierWorld, tier_world

KEY = {"api_key": "sesame"}
BACKEND = "/hicache/storage-backend"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[TierWorld]:
    with tier_world(tmp_path / "root", **KEY) as running:
        yield running


def put(world: TierWorld, path: object, **fields: Any) -> httpx.Response:
    return world.client.put(BACKEND, json={"path": str(path), **fields})


def detach(world: TierWorld, **params: Any) -> dict[str, Any]:
    response = world.client.delete(BACKEND, params=params)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def statistics(world: TierWorld) -> dict[str, Any]:
    response = world.client.get("/hicache/statistics")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def num_files(root: Path) -> int:
    return sum(1 for path in root.rglob("*.npy") if ".quarantine" not in path.parts)


def message(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status
    text: str = error["message"]
    return text


def test_detach_and_attach_again_hits(world: TierWorld, tmp_path: Path, seed: int) -> None:
    first, second = prompts(seed, 2)
    world.ask(first)
    world.settle()
    assert detach(world) == {"detached": True, "drained": True}
    assert statistics(world)["storage_path"] is None
    world.forget()
    assert world.ask(first) == {"computed": 41}
    world.ask(second)
    world.forget()
    attached = put(world, tmp_path / "root", max_bytes=0)
    assert attached.json() == {"attached": True, "path": str(tmp_path / "root"), "max_bytes": 0}
    assert world.ask(first) == {"storage": 40, "computed": 1}
    assert world.ask(second) == {"computed": 41}, "computed while there was no storage"


def test_another_folder_gets_what_the_host_has(world: TierWorld, tmp_path: Path, seed: int) -> None:
    (prompt,) = prompts(seed, 1)
    world.ask(prompt)
    world.settle()
    detach(world)
    assert put(world, tmp_path / "new" / "root").status_code == 200
    world.settle()
    while num_files(tmp_path / "new") < num_files(tmp_path / "root"):
        world.clock.advance(2.0)
        world.ask([1, 2, 3])
    world.forget()
    assert world.ask(prompt) == {"storage": 40, "computed": 1}
    assert (tmp_path / "new" / "root").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("gate", ["read", "write"])
def test_detach_while_pages_are_in_flight(tmp_path: Path, seed: int, gate: str) -> None:
    first, second = prompts(seed, 2)
    ops = SlowOps(gate)
    with tier_world(tmp_path / "root", ops=ops, **KEY) as world:
        world.ask(first)
        world.forget()
        ops.gate.clear()
        asked = first if gate == "read" else second
        with ThreadPoolExecutor(1) as client:
            answer = client.submit(world.ask, asked)
            assert ops.stuck.wait(WAIT_S)
            assert detach(world, timeout_s=0) == {"detached": True, "drained": False}
            assert answer.result(WAIT_S) == {"computed": 41}, "nobody waits for what is gone"
        assert statistics(world)["storage_path"] is None
        ops.gate.set()
        world.settle()
        world.check_at_rest()
        world.forget()
        assert put(world, tmp_path / "root").status_code == 200
        assert world.ask(first) == {"storage": 40, "computed": 1}


def test_storage_comes_and_goes_under_load(world: TierWorld, tmp_path: Path, seed: int) -> None:
    """Every answer is compared with the right one by `ask`."""
    asked = prompts(seed, 6)
    stop = threading.Event()

    def keep_asking(mine: list[list[int]]) -> int:
        count = 0
        while not stop.is_set():
            for prompt in mine:
                world.ask(prompt)
                count += 1
        return count

    with ThreadPoolExecutor(3) as clients:
        counts = [clients.submit(keep_asking, asked[i::3]) for i in range(3)]
        try:
            for i in range(6):
                detach(world, timeout_s=i % 2)
                assert put(world, tmp_path / ("root", "other")[i % 2]).status_code == 200
        finally:
            stop.set()
        assert all(count.result(4 * WAIT_S) >= 2 for count in counts)
    world.check_at_rest()


def test_flush_with_storage_removes_this_models_pages_and_no_others(
    world: TierWorld, tmp_path: Path, seed: int
) -> None:
    (prompt,) = prompts(seed, 1)
    world.ask(prompt)
    world.settle()
    num_stored = num_files(tmp_path / "root")
    theirs = next((tmp_path / "root").rglob("*.npy")).parent / ("0" * 64 + ".npy")
    theirs.write_bytes(b"another model's")
    assert world.client.post("/flush_cache", params={"storage": "keep"}).json() == {"flushed": True}
    assert num_files(tmp_path / "root") == num_stored + 1
    answer = world.client.post("/flush_cache", params={"storage": "clear"}).json()
    assert answer == {"flushed": True, "storage_pages_removed": num_stored}
    assert [path.name for path in (tmp_path / "root").rglob("*.npy")] == [theirs.name]
    assert world.ask(prompt) == {"computed": 41}
    world.forget()
    assert world.ask(prompt) == {"storage": 40, "computed": 1}, "storage is there again"


def test_flush_with_storage_while_requests_run_changes_nothing(tmp_path: Path, seed: int) -> None:
    first, second = prompts(seed, 2)
    ops = SlowOps("write")
    with tier_world(tmp_path / "root", ops=ops, **KEY) as world:
        world.ask(first)
        world.settle()
        num_stored = num_files(tmp_path / "root")
        ops.gate.clear()
        world.ask(second)
        assert ops.stuck.wait(WAIT_S)
        refused = world.client.post("/flush_cache", params={"storage": "clear", "timeout_s": 0})
        assert "unfinished" in message(refused, 409)
        ops.gate.set()
        world.settle()
        assert num_files(tmp_path / "root") >= num_stored


def test_what_cannot_be_is_refused_and_changes_nothing(
    world: TierWorld, tmp_path: Path, seed: int
) -> None:
    (prompt,) = prompts(seed, 1)
    world.ask(prompt)
    world.settle()
    assert "attached already" in message(put(world, tmp_path / "other"), 409)
    assert statistics(world)["storage_path"] == str(tmp_path / "root")
    detach(world)
    assert "no storage is attached" in message(world.client.delete(BACKEND), 409)
    cleared = world.client.post("/flush_cache", params={"storage": "clear"})
    assert "no storage is attached" in message(cleared, 409)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("in the way")
    link.symlink_to(tmp_path / "root")
    for path, reason in (
        ("relative/path", "absolute"),
        (file, "is not a folder"),
        (link, "symbolic link"),
        (file / "below", "cannot be created"),
        ("/" + "x" * 4000, "cannot be created"),
        ("/\0", "cannot be created"),
    ):
        assert reason in message(put(world, path), 400)
    for body in (
        {},
        {"path": ""},
        {"path": 1},
        {"path": "/x", "max_bytes": -1},
        {"path": "/x", "max_bytes": "much"},
        {"path": "/x", "kind": "file"},
    ):
        message(world.client.put(BACKEND, json=body), 400)
    # The test's storage keeps no bound; it is asked for one.
    assert str(2**30) in message(put(world, tmp_path / "other", max_bytes="1GiB"), 400)
    for params in ({"timeout_s": -1}, {"timeout_s": "soon"}):
        message(world.client.delete(BACKEND, params=params), 400)
    message(world.client.post("/flush_cache", params={"storage": "burn"}), 400)
    assert statistics(world)["storage_path"] is None
    assert world.ask(prompt)["computed"] == 1


def test_a_folder_of_somebody_else_is_refused(world: TierWorld, tmp_path: Path) -> None:
    detach(world)
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    assert "written to by others" in message(put(world, tmp_path / "open"), 400)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_control_needs_the_key(world: TierWorld, tmp_path: Path, key: str | None) -> None:
    headers = {"Authorization": "" if key is None else f"Bearer {key}"}
    for method, path in (
        ("PUT", BACKEND),
        ("DELETE", BACKEND),
        ("POST", "/flush_cache?storage=clear"),
        ("GET", "/hicache/statistics"),
        ("POST", "/hicache/warm_up"),
    ):
        message(world.client.request(method, path, headers=headers), 401)
    assert statistics(world)["storage_path"] == str(tmp_path / "root")


def test_without_a_key_nobody_moves_the_storage(tmp_path: Path) -> None:
    with tier_world(tmp_path / "root") as world:
        assert "--api-key" in message(put(world, tmp_path / "other"), 403)
        assert "--api-key" in message(world.client.delete(BACKEND), 403)
        cleared = world.client.post("/flush_cache", params={"storage": "clear"})
        assert "--api-key" in message(cleared, 403)
        assert statistics(world)["storage_path"] == str(tmp_path / "root")
        assert not (tmp_path / "other").exists()


def test_warm_up_tells_what_was_there_and_serves_the_prompts_afterwards(
    world: TierWorld, seed: int
) -> None:
    first, second = prompts(seed, 2)
    world.ask(first)
    answer = world.client.post("/hicache/warm_up", json={"input_ids": [first, second]})
    assert answer.status_code == 200, answer.text
    known, new = answer.json()["prompts"]
    assert known["cached_tokens"] == 40
    assert new == {
        "prompt_tokens": 41,
        "cached_tokens": 0,
        "cached_tokens_details": {"device": 0, "host": 0, "storage": 0, "computed": 41},
    }
    assert world.ask(second) == {"device": 40, "computed": 1}
    text = world.client.post("/hicache/warm_up", json={"text": "a few words", "extra_key": "me"})
    assert [prompt["prompt_tokens"] for prompt in text.json()["prompts"]] == [11]
    for body in ({}, {"text": "a", "input_ids": [1]}, {"text": []}, {"text": 1}, {"prompts": []}):
        message(world.client.post("/hicache/warm_up", json=body), 400)


def test_statistics_add_up(world: TierWorld, seed: int) -> None:
    (prompt,) = prompts(seed, 1)
    for _ in range(2):
        world.ask(prompt)
        world.forget()
    found = statistics(world)
    assert found["hicache"] is True
    assert found["prompt_tokens"] == {"device": 0, "host": 0, "storage": 40, "computed": 42}
    full = found["components"]["full"]
    assert full["storage"]["hits"] == 10
    assert full["host_pages_used"] == full["device_pages_used"] == 0
    assert world.metric("device_pages_capacity", component="full") == 24
    assert world.metric("page_bytes", component="full") == full["page_bytes"]
