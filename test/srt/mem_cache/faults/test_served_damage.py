"""Damaged pages under a running server: a counted miss, the request recomputes, and the page is stored whole again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_fakes import VOCAB_SIZE
from page_damage import fifo, flip, folder, symlink_to_a_good_page, truncate, zero_file
from storage_kit import FailingOps
from tier_world import PAGE_SIZE, TierWorld, tier_world

from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher

PROMPT_LEN = 41
REUSABLE = 40


def zero_all_but_the_header(path: Path) -> None:
    """What a power loss can leave: the first block is there, the rest is zeroes."""
    data = path.read_bytes()
    path.write_bytes(data[:-32] + bytes(32))


def another_pages_file(path: Path) -> None:
    """A page of the same prompt under this page's name."""
    other = next(p for p in path.parents[1].rglob("*.npy") if p != path)
    path.write_bytes(other.read_bytes())


DAMAGES = {
    "payload bit": flip(-1),
    "header bit": flip(60),
    "half": truncate(300),
    "empty": truncate(0),
    "zeroes": zero_file,
    "zero payload": zero_all_but_the_header,
    "folder": folder,
    "fifo": fifo,
    "symlink": symlink_to_a_good_page,
    "another page": another_pages_file,
}


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]


def pages_in_order(world: TierWorld, token_ids: list[int]) -> list[Path]:
    """The prompt's page files, first page first."""
    tokens = b"".join(token.to_bytes(8, "little") for token in token_ids[:REUSABLE])
    keys = PageHasher(world.storage.namespace, None).chain(None, tokens)
    return [world.storage.path_of(key) for key in keys]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_page_is_recomputed_and_stored_again(
    tmp_path: Path, seed: int, name: str
) -> None:
    token_ids = prompt(seed)
    with tier_world(tmp_path / "root") as world:
        world.ask(token_ids)
        world.forget()
        paths = pages_in_order(world, token_ids)
        assert all(path.is_file() for path in paths)
        DAMAGES[name](paths[6])
        corrupt = {"component": "full", "outcome": "corrupt"}
        assert world.metric("storage_reads_total", **corrupt) == 0
        assert world.ask(token_ids) == {"storage": 6 * PAGE_SIZE, "computed": PROMPT_LEN - 24}
        assert world.metric("storage_reads_total", **corrupt) == 1
        world.forget()
        assert world.ask(token_ids) == {"storage": REUSABLE, "computed": 1}
        world.storage.check_invariants()


def test_every_page_damaged_at_once(tmp_path: Path, seed: int) -> None:
    """Each in its own way; the next start finds nothing, serves on, and stores all again."""
    dice, token_ids = random.Random(seed), prompt(seed)
    with tier_world(tmp_path / "root") as world:
        world.ask(token_ids)
        world.settle()
        paths = pages_in_order(world, token_ids)
    for path in paths:
        dice.choice([flip(-1), flip(3), truncate(100), zero_file, folder, fifo])(path)
    with tier_world(tmp_path / "root") as world:
        assert world.ask(token_ids) == {"computed": PROMPT_LEN}
        world.forget()
        again = world.ask(token_ids)
        while again != {
            "storage": REUSABLE,
            "computed": 1,
        }:  # a damaged page is met when it is read
            world.forget()
            before, again = again, world.ask(token_ids)
            assert again.get("storage", 0) > before.get("storage", 0)


class Unreliable(FailingOps):
    """Fails now and then, for a passing reason."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def _fail(self, call: str) -> None:
        if self._dice.random() < 0.2:
            raise OSError(self._dice.choice([5, 24, 28, 116]), f"injected into {call}")


def test_calls_that_fail_now_and_then_cost_hits_only(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    stems = [prompt(seed + i) for i in range(3)]
    with tier_world(tmp_path / "root", ops=Unreliable(dice)) as world:
        for _ in range(25):
            world.clock.advance(dice.random() * 20)
            stem = dice.choice(stems)[: dice.randrange(1, PROMPT_LEN)]
            world.ask([*stem, *(dice.randrange(VOCAB_SIZE) for _ in range(3))])
            if dice.random() < 0.3:
                world.forget()
        world.settle()
        world.storage.check_invariants()
