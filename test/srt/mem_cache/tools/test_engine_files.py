"""An engine with a bound on its files, looked at with the tools: the disk can not fill, and every answer is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tool_kit import Tools

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

MAX_BYTES = 1_000_000


def start(model: str, root: Path, max_bytes: int) -> Engine:
    return build_engine(
        EngineArgs(
            model_path=f"random:{model}:0",
            page_size=16,
            max_total_tokens=1024,
            max_running_requests=2,
            hicache=HiCacheConfig(
                storage=StorageKind.FILE, storage_path=root, storage_max_bytes=max_bytes
            ),
        )
    )


def ask(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """(tokens, how many of the prompt's came from files)."""
    result = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 6})
    return result["output_ids"], result["meta_info"]["cached_tokens_details"]["storage"]


def metric(engine: Engine, name: str) -> float:
    value = engine.registry.get_sample_value(f"sglang:hicache_{name}")
    assert value is not None
    return value


def test_an_engine_keeps_its_bound_and_what_stays_is_whole(
    tools: Tools, root: Path, rng: np.random.Generator
) -> None:
    """What goes is the ends of the oldest prompts; the youngest still hits, with its windows and states."""
    prompts = [[int(t) for t in rng.integers(3, 250, 330)] for _ in range(10)]
    with start("tiny-hybrid", root, MAX_BYTES) as engine:
        answers = [ask(engine, prompt)[0] for prompt in prompts]
    held = tools.run("ls").data["bytes"]
    assert held <= MAX_BYTES
    assert held > MAX_BYTES // 2
    assert metric(engine, "storage_evicted_pages_total") > 0
    assert metric(engine, "storage_max_bytes") == MAX_BYTES
    assert held <= metric(engine, "storage_bytes_held") <= MAX_BYTES
    assert tools.run("verify").status == 0
    full = next(e for e in tools.run("stat").data["layouts"] if e["component"] == "full")
    assert full["beginnings"] >= 1

    with start("tiny-hybrid", root, MAX_BYTES) as engine:
        again = [ask(engine, prompt) for prompt in reversed(prompts)]
    assert [answer for answer, _ in again] == answers[::-1]
    assert again[0][1] > 0, "the youngest prompt hit nothing"
    assert tools.run("ls").data["bytes"] <= MAX_BYTES
    assert tools.run("verify").status == 0


def test_a_stored_prompt_is_a_chain_of_files(
    tools: Tools, root: Path, rng: np.random.Generator
) -> None:
    prompt = [int(t) for t in rng.integers(3, 250, 330)]
    with start("tiny-hybrid", root, 0) as engine:
        ask(engine, prompt)
        assert metric(engine, "storage_bytes_held") == metric(engine, "storage_max_bytes") == 0
    entries = {entry["component"]: entry for entry in tools.run("stat").data["layouts"]}
    assert set(entries) == {"full", "swa", "recurrent"}
    assert entries["full"]["longest_tokens"] >= 320
    assert all(entry["cut_off_pages"] == 0 for entry in entries.values())
    removed = tools.run("gc", "--max-bytes", "0", "--apply").data["removed"]
    assert removed["pages"] == sum(entry["pages"] for entry in entries.values())
    with start("tiny-hybrid", root, 0) as engine:
        assert ask(engine, prompt)[1] == 0
