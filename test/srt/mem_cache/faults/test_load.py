"""Many clients, pools that thrash all levels, aborts, disconnects, damage and kills: no wrong token, and no leak.

The short form runs over the fake model in this process; the soak runs real servers in processes of their own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        assert num_damaged > 10
        assert counts["left"] and counts["aborted"]
        for tier in ("device", "host", "storage"):
            assert world.metric("prompt_tokens_total", tier=tier) > 0, tier


@pytest.fixture(scope="module")
def script() -> Script:
    """Prompts for the real servers, answered by an engine that reuses nothing."""
    prompts = make_prompts(random.Random(1), 60, 330, 250)
    args = EngineArgs(
        model_path=MODEL, page_size=PAGE_SIZE, max_total_tokens=2048, disable_radix_cache=True
    )
    with build_engine(args) as engine:
        results = engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": MOST_NEW, "ignore_eos": True}
        )
    answers = [result["output_ids"] for result in results]
    return Script({tuple(p): answer for p, answer in zip(prompts, answers, strict=True)})


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """One server; it is dead when the block ends."""
    running = ServerProcess(folder, "--engine", "embedded", "--log-level", "warning", *flags)
    try:
        yield running
    finally:
        with suppress(psutil.NoSuchProcess):
            running.end(kill=True)


@pytest.mark.soak
def test_sixty_four_clients_and_a_vandal(
    tmp_path: Path, dice: random.Random, script: Script, soak_seconds: float, figures: Figures
) -> None:
    """All levels thrash, files are damaged all the time: no wrong token, nothing grows, the end is orderly."""
    end_s = time.monotonic() + soak_seconds
    root = tmp_path / "pages"
    with server(tmp_path, "--hicache-storage-max-bytes", "4MiB") as running:
        process = psutil.Process(running.pid)
        crowd = Crowd(str(running.client.base_url), script, NUM_CLIENTS, dice, tolerant=False)
        answers = crowd.wait(500)
        before = (process.memory_info().rss, process.num_threads())
        while time.monotonic() < end_s:
            answers = crowd.wait(answers + dice.randrange(1, 20))
            figures.add(damaged_files=damage_one(root, dice))
        counts = crowd.stop()
        figures.add(requests=counts["requests"], wrong_tokens=counts["wrong_tokens"])
        assert running.client.post("/flush_cache").status_code == 200
        state = running.client.get("/get_server_info").json()["state"]
        assert state["free_tokens"] == state["pool_tokens"] == MAX_TOTAL_TOKENS
        assert state["protected_tokens"] == 0
        assert process.num_fds() < 64, "connections or files stay open"
        assert process.num_threads() <= before[1]
        assert process.memory_info().rss < before[0] * 1.3 + (64 << 20)
        assert running.end(kill=False) == 0


@pytest.mark.soak
def test_servers_on_one_directory_killed_under_traffic(
    tmp_path: Path, dice: random.Random, script: Script, soak_seconds: float, figures: Figures
) -> None:
    """Two servers share a directory; one after the other is killed, or told to end, and comes back to its pages."""
    end_s = time.monotonic() + soak_seconds
    root = tmp_path / "pages"
    rounds = 0
    with server(tmp_path) as steady:
        beside = Crowd(str(steady.client.base_url), script, 4, dice, tolerant=False)
        while rounds < 4 or time.monotonic() < end_s:
            rounds += 1
            kill = rounds % 4 != 0
            with server(tmp_path) as doomed:
                crowd = Crowd(str(doomed.client.base_url), script, 8, dice, tolerant=True)
                crowd.wait(dice.randrange(1, 60))
                status = doomed.end(kill=kill)
                assert status == (SIGKILLED if kill else 0), doomed.log_path.read_text()[-2000:]
                counts = crowd.stop()
            figures.add(kills=int(kill), requests=counts["requests"])
            figures.add(wrong_tokens=counts["wrong_tokens"], operations=verify_all(root))
        counts = beside.stop()
        figures.add(requests=counts["requests"], wrong_tokens=counts["wrong_tokens"])
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
