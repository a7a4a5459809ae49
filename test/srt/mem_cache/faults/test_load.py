"""Many clients, pools that thrash all levels, aborts, disconnects, damage and kills: no wrong token, and no leak.

The short form runs over the fake model in this process; the soak runs real servers in processes of their own.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from engine_fakes import VOCAB_SIZE, expected_output
from launched_server import MAX_TOTAL_TOKENS, MODEL, PAGE_SIZE, ServerProcess
from page_damage import flip, truncate, zero_file
from soak_figures import Figures
from tier_world import tier_world
from traffic import MOST_NEW, Crowd, Script, make_prompts

from sgl_jax.srt.mem_cache.hicache.errors import StorageCorruptionError
from sgl_jax.srt.mem_cache.hicache.storage.page_info import describe
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

SIGKILLED = -9
NUM_CLIENTS = 64


@pytest.fixture
def dice(seed: int) -> random.Random:
    return random.Random(seed)


def damage_one(root: Path, dice: random.Random) -> int:
    """Damages, or removes, one page file, wherever it stands with its readers; how many there were to damage."""
    paths = [path for path in root.rglob("*.npy") if path.is_file()]
    if not paths:
        return 0
    path = dice.choice(paths)
    with suppress(OSError, IndexError):  # a server was faster
        anywhere, payload = flip(dice.randrange(path.stat().st_size)), flip(-dice.randrange(1, 65))
        dice.choice([anywhere, payload, payload, truncate(500), zero_file, Path.unlink])(path)
    return 1


def test_a_crowd_gets_the_tokens_of_a_run_without_a_cache(
    tmp_path: Path, dice: random.Random
) -> None:
    prompts = make_prompts(dice, 40, 70, VOCAB_SIZE)
    script = Script({tuple(p): expected_output(p, MOST_NEW) for p in prompts})
    with tier_world(tmp_path / "root", device_pages=32, ratio=1.5) as world:
        crowd = Crowd(str(world.client.base_url), script, 16, dice, tolerant=False)
        num_damaged = 0
        for count in range(5, 100, 5):
            crowd.wait(count)
            for _ in range(4):
                num_damaged += damage_one(tmp_path / "root", dice)
        counts = crowd.stop()
        crowd.check()
        assert num_damaged > 10
        assert counts["left"] and counts["aborted"]
        for tier in ("device", "host", "storage"):
            assert world.metric("prompt_tokens_total", tier=tier) > 0, tier


@dataclass(frozen=True)
class Served:
    """A model, how it is served, and its answers without any cache."""

    model: str
    flags: tuple[str, ...]
    bound: str
    script: Script


# The bound on the files holds less than half of what the prompts need.
SERVED = {
    "full": (MODEL, PAGE_SIZE, "4MiB"),
    "hybrid": ("random:tiny-hybrid:0", 16, "3MiB"),
}


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest) -> Served:
    """Prompts for the real servers, answered by an engine that reuses nothing."""
    model, page_size, bound = SERVED[request.param]
    flags = ["--model-path", model, "--page-size", str(page_size)]
    if request.param == "hybrid":
        flags += ["--hicache-checkpoint-interval", "64", "--chunked-prefill-size", "128"]
    prompts = make_prompts(random.Random(1), 60, 330, 250)
    args = EngineArgs(
        model_path=model,
        page_size=page_size,
        max_total_tokens=2048,
        chunked_prefill_size=128,
        disable_radix_cache=True,
    )
    with build_engine(args) as engine:
        results = engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": MOST_NEW, "ignore_eos": True}
        )
    answers = [result["output_ids"] for result in results]
    script = Script({tuple(p): answer for p, answer in zip(prompts, answers, strict=True)})
    return Served(model, tuple(flags), bound, script)


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """One server; it is dead when the block ends."""
    running = ServerProcess(folder, "--engine", "embedded", "--log-level", "warning", *flags)
    try:
        yield running
    finally:
        with suppress(psutil.NoSuchProcess):
            running.end(kill=True)


def stop(crowd: Crowd, figures: Figures) -> None:
    """The crowd's counts are figures, also if something was wrong with its answers, which ends the test."""
    counts = crowd.stop()
    figures.add(requests=counts["requests"], wrong_tokens=counts["wrong_tokens"])
    crowd.check()


def tokens_by_tier(running: ServerProcess) -> dict[str, int]:
    """Prompt tokens so far, by the tier that served them."""
    sample = re.compile(r'^sglang:hicache_prompt_tokens_total\{tier="(\w+)"\} (\S+)$', re.MULTILINE)
    text = running.client.get("/metrics").text
    return {f"prompt_tokens_{tier}": int(float(n)) for tier, n in sample.findall(text)}


@pytest.mark.soak(parts=8)
def test_sixty_four_clients_and_a_vandal(
    tmp_path: Path, dice: random.Random, served: Served, soak_seconds: float, figures: Figures
) -> None:
    """All levels thrash, files are damaged all the time: no wrong token, nothing grows, the end is orderly."""
    root = tmp_path / "pages"
    flags = (*served.flags, "--hicache-storage-max-bytes", served.bound)
    with server(tmp_path, *flags) as running:
        process = psutil.Process(running.pid)
        url = str(running.client.base_url)
        crowd = Crowd(url, served.script, NUM_CLIENTS, dice, tolerant=False)
        answers = crowd.wait(300)
        before = (process.memory_info().rss, process.num_threads())
        end_s = time.monotonic() + soak_seconds
        while time.monotonic() < end_s:
            answers = crowd.wait(answers + dice.randrange(1, 20))
            figures.add(damaged_files=damage_one(root, dice))
        stop(crowd, figures)
        by_tier = tokens_by_tier(running)
        figures.add(**by_tier)
        assert len(by_tier) == 4
        assert all(by_tier.values()), by_tier
        assert running.client.post("/flush_cache").status_code == 200
        state = running.client.get("/get_server_info").json()["state"]
        assert state["free_tokens"] == state["pool_tokens"] == MAX_TOTAL_TOKENS
        assert state["protected_tokens"] == 0
        assert process.num_fds() < 64, "connections or files stay open"
        assert process.num_threads() <= before[1]
        assert process.memory_info().rss < before[0] * 1.3 + (64 << 20)
        assert running.end(kill=False) == 0


@pytest.mark.soak(parts=4)
def test_servers_on_one_directory_killed_under_traffic(
    tmp_path: Path, dice: random.Random, served: Served, soak_seconds: float, figures: Figures
) -> None:
    """Two servers share a directory; one after the other is killed, or told to end, and comes back to its pages."""
    root, script = tmp_path / "pages", served.script
    rounds = 0
    with server(tmp_path, *served.flags) as steady:
        end_s = time.monotonic() + soak_seconds
        beside = Crowd(str(steady.client.base_url), script, 4, dice, tolerant=False)
        while rounds < 4 or time.monotonic() < end_s:
            rounds += 1
            kill = rounds % 4 != 0
            with server(tmp_path, *served.flags) as doomed:
                crowd = Crowd(str(doomed.client.base_url), script, 8, dice, tolerant=True)
                crowd.wait(dice.randrange(1, 60))
                status = doomed.end(kill=kill)
                assert status == (SIGKILLED if kill else 0), doomed.log_path.read_text()[-2000:]
                stop(crowd, figures)
            figures.add(kills=int(kill), operations=verify_all(root))
        stop(beside, figures)
        assert steady.end(kill=False) == 0
    verify_all(root)


def verify_all(root: Path) -> int:
    """Every visible page verifies; how many there are."""
    count = 0
    for path in root.rglob("*.npy"):
        with suppress(FileNotFoundError):
            try:
                assert describe(path).page_key.hex() == path.stem
            except StorageCorruptionError as error:
                raise AssertionError(f"{path}: {error}") from error
            count += 1
    return count
