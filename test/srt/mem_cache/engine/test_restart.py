"""Write, kill -9 in the middle of it, restart: what was stored is found, verifies, and is exactly what is hit."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from launched_server import MAX_TOTAL_TOKENS, MODEL, PAGE_SIZE, WAIT_S, ServerProcess

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage_mount import StorageMount
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageKey
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine


def mount_of(engine: Engine) -> StorageMount:
    """The L3 of a running engine."""
    tree = engine._parts.tree._tree  # type: ignore[attr-defined]
    mount = tree.tiers.controller.mount
    assert isinstance(mount, StorageMount)
    return mount


def page_keys(storage: LocalFileStorage, prompt: list[int]) -> list[PageKey]:
    """Names of the prompt's whole pages, one token left to compute."""
    num_pages = (len(prompt) - 1) // PAGE_SIZE
    tokens = np.array(prompt[: num_pages * PAGE_SIZE], "<i8").tobytes()
    return PageHasher(storage.namespace, None).chain(None, tokens)


def small_engine(folder: Path) -> Engine:
    """An engine with its files below `folder`."""
    return build_engine(
        EngineArgs(
            model_path=MODEL,
            page_size=PAGE_SIZE,
            max_total_tokens=MAX_TOTAL_TOKENS,
            max_running_requests=2,
            hicache=HiCacheConfig(storage=StorageKind.FILE, storage_path=folder),
        )
    )


def test_an_idle_server_shows_how_many_pages_are_held(tmp_path: Path) -> None:
    with small_engine(tmp_path) as engine:

        def shown() -> float | None:
            name = "sglang:hicache_storage_pages_held"
            return engine.registry.get_sample_value(name, {"component": "full"})

        mount = mount_of(engine)
        assert mount.census.first_count_done.wait(WAIT_S)
        time.sleep(2.0)  # now it is idle
        assert shown() == 0
        storage = mount.storages[ComponentKind.FULL]
        page = np.zeros(storage.namespace.page_bytes, np.uint8)
        storage.set([PageKey(bytes(32)), PageKey(bytes(31) + b"1")], [[page]] * 2)
        give_up_s = time.monotonic() + WAIT_S
        while shown() != 2 and time.monotonic() < give_up_s:
            time.sleep(0.05)
        assert shown() == 2


def test_hits_after_a_kill_are_exactly_what_had_been_stored(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    prompts = [[int(t) for t in rng.integers(3, 250, 330)] for _ in range(4)]
    server = ServerProcess(tmp_path)
    try:
        answers = [server.ask(prompt)["output_ids"] for prompt in prompts]
    finally:
        server.end(kill=True)  # the last prompt's pages may or may not be there
    with small_engine(tmp_path / "pages") as engine:
        mount = mount_of(engine)
        storage = mount.storages[ComponentKind.FULL]
        assert isinstance(storage, LocalFileStorage)
        storage.check_invariants()
        stored = set(storage.iter_keys())
        assert stored, "nothing had been stored before the kill"
        assert mount.census.first_count_done.wait(WAIT_S)
        assert mount.census.stats()[ComponentKind.FULL].pages_held == len(stored)
        for prompt, answer in zip(prompts, answers, strict=True):
            there = [key in stored for key in page_keys(storage, prompt)]
            expected = there.index(False) if False in there else len(there)
            result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 4})
            assert result["output_ids"] == answer
            assert result["meta_info"]["cached_tokens_details"]["storage"] == expected * PAGE_SIZE
        assert storage.stats().corrupt == 0
