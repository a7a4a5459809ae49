"""Storage that takes some pages and refuses others, for a while or for ever: who pays for it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from faulty_shelf import Shelves
from tree_steps import evict_all, match_len, tokens
from tree_world import World

from sgl_jax.srt.mem_cache.hicache import storage_writer
from sgl_jax.srt.mem_cache.hicache.config import StorageKind, WritePolicy
from sgl_jax.srt.mem_cache.hicache.storage_backoff import StorageBackoff
from sgl_jax.srt.mem_cache.hicache.tree_node import TreeNode
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind, PageKey

POLICIES = pytest.mark.parametrize("policy", list(WritePolicy))


class Clinic:
    """A world with a clock, and the storage of its pages."""

    def __init__(self, policy: WritePolicy, **kwargs: Any) -> None:
        self.now_s = 0.0
        shelves = Shelves()
        self.world = World(
            storage=StorageKind.FILE,
            policy=policy,
            storage_factories={"file": shelves.open},
            clock=lambda: self.now_s,
            **kwargs,
        )
        (self.shelf,) = shelves.by_namespace.values()

    def run(self, token_ids: list[int], seconds: float = 0.05) -> None:
        self.world.run(token_ids)
        self.world.settle()
        self.now_s += seconds

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.world.cache.check_hicache_events()
        self.world.settle()

    def keys_of(self, token_ids: list[int]) -> list[PageKey]:
        num_tokens = (len(token_ids) - 1) // self.world.page_size * self.world.page_size
        encoded = self.world.cache._codec.encode(token_ids[:num_tokens])
        keys: list[PageKey] = self.world.tree.keys.hasher(None).chain(None, encoded)
        return keys

    @property
    def stored(self) -> set[PageKey]:
        return set(self.shelf.pages)

    @property
    def is_paused(self) -> bool:
        return not self.world.controller.storage_writable(ComponentKind.FULL)


@POLICIES
def test_pages_that_a_storage_always_refuses_cost_no_other_page(policy: WritePolicy) -> None:
    """As when one of the 256 folders cannot be written to: it is not the storage that is in trouble."""
    clinic = Clinic(policy, device_pages=24, ratio=8.0)
    clinic.shelf.refuses = lambda key: key[0] < 16
    prompts = [tokens(4 * (1 + i * 7 % 19) + 1, 1000 * i) for i in range(60)]
    num_paused = 0
    for token_ids in prompts:
        clinic.run(token_ids)
        num_paused += clinic.is_paused
    assert num_paused == 0
    clinic.world.cache.flush_to_storage(10.0)
    good = {
        k for token_ids in prompts for k in clinic.keys_of(token_ids) if not clinic.shelf.refuses(k)
    }
    num_pages = sum(len(clinic.keys_of(token_ids)) for token_ids in prompts)
    assert 0.85 * num_pages < len(good) < num_pages
    assert clinic.stored == good
    clinic.world.verify_at_rest()


@POLICIES
def test_what_is_refused_for_ever_leaves_the_host_when_its_room_is_needed(
    policy: WritePolicy,
) -> None:
    clinic = Clinic(policy, device_pages=16, ratio=5.0)
    bad: set[PageKey] = set()
    clinic.shelf.refuses = bad.__contains__
    for i in range(100):
        token_ids = tokens(9, 100 * i)
        bad.add(clinic.keys_of(token_ids)[0])
        clinic.run(token_ids)
        clinic.run(tokens(5, 50_000 + 100 * i))
    late = tokens(33, 90_000)
    for _ in range(4):
        clinic.run(late)
    evict_all(clinic.world)
    assert clinic.world.run(late).host == 32
    clinic.world.cache.flush_to_storage(10.0)
    assert clinic.stored.issuperset(clinic.keys_of(late))


@POLICIES
def test_what_is_refused_throughout_an_outage_is_stored_after_it(policy: WritePolicy) -> None:
    """However long it takes: that storage took nothing is no verdict on any page."""
    clinic = Clinic(policy, device_pages=16, ratio=1.0)
    clinic.shelf.refuse_sets = True
    kept = tokens(33)
    clinic.run(kept)
    evict_all(clinic.world)
    for _ in range(300):
        clinic.wait(1.0)
    assert not clinic.stored
    clinic.shelf.heal()
    clinic.wait(StorageBackoff.LONGEST_S)
    for i in range(3):
        clinic.run(tokens(17, 1000 * (i + 1)))
        evict_all(clinic.world)
        clinic.wait(1.0)
    assert clinic.stored.issuperset(clinic.keys_of(kept))
    clinic.world.verify_at_rest()


@POLICIES
def test_a_blip_that_one_page_meets_does_not_give_the_page_up(policy: WritePolicy) -> None:
    """However often the tree looks meanwhile: its chances are a second apart."""
    clinic = Clinic(policy, device_pages=16, ratio=1.0)
    unlucky = tokens(9)
    clinic.shelf.refuses = set(clinic.keys_of(unlucky)[:1]).__contains__
    clinic.run(unlucky, seconds=0.0)
    evict_all(clinic.world)
    for i in range(1, 5):
        clinic.run(tokens(13, 1000 * i), seconds=0.0)
        evict_all(clinic.world)
        for _ in range(8):
            clinic.wait(0.01)
    assert len(clinic.stored) > 1, "others are taken meanwhile"
    clinic.shelf.heal()
    for _ in range(3):
        clinic.wait(1.0)
    assert clinic.stored.issuperset(clinic.keys_of(unlucky))


def test_new_refusals_do_not_put_off_what_is_to_be_written_again() -> None:
    clinic = Clinic(WritePolicy.WRITE_THROUGH, device_pages=16, ratio=8.0)
    unlucky = tokens(9)
    bad = set(clinic.keys_of(unlucky)[:1])
    clinic.shelf.refuses = bad.__contains__
    clinic.run(unlucky)
    bad.clear()
    for i in range(1, 60):
        late = tokens(9, 1000 * i)
        bad.update(clinic.keys_of(late)[:1])
        clinic.run(late)
    assert clinic.stored.issuperset(clinic.keys_of(unlucky))


def test_flush_gives_up_what_is_refused_and_stores_what_has_no_room_beside_it() -> None:
    clinic = Clinic(WritePolicy.WRITE_THROUGH_AND_BACK, device_pages=16, ratio=1.0)
    bad = tokens(61)
    clinic.shelf.refuses = set(clinic.keys_of(bad)[-1:]).__contains__
    clinic.run(bad)
    evict_all(clinic.world)
    good = tokens(33, 1000)
    clinic.run(good)
    assert not clinic.world.cache.flush_to_storage(10.0)
    assert clinic.stored == {*clinic.keys_of(bad)[:-1], *clinic.keys_of(good)}


def test_flush_tries_once_more_what_was_given_up() -> None:
    clinic = Clinic(WritePolicy.WRITE_THROUGH, device_pages=16)
    bad = tokens(9)
    clinic.shelf.refuses = set(clinic.keys_of(bad)[:1]).__contains__
    clinic.run(bad)
    for _ in range(9):
        clinic.wait(1.0)
    clinic.shelf.heal()
    for _ in range(9):
        clinic.wait(1.0)
    assert clinic.stored == set(clinic.keys_of(bad)[1:]), "it had its chances"
    assert clinic.world.cache.flush_to_storage(10.0)
    assert clinic.stored == set(clinic.keys_of(bad))


@POLICIES
def test_flush_gives_nothing_up_while_storage_takes_nothing(policy: WritePolicy) -> None:
    clinic = Clinic(policy, device_pages=16, ratio=0.5)
    clinic.shelf.refuse_sets = True
    kept = tokens(33)
    clinic.run(kept)
    evict_all(clinic.world)
    clinic.run(tokens(17, 1000))
    assert not clinic.world.cache.flush_to_storage(10.0)
    assert match_len(clinic.world, kept) == (0, 32)


def test_an_outage_keeps_no_nodes_alive_that_left_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_writer, "FEW_NODES", 8)
    monkeypatch.setattr(storage_writer, "STORE_RETRY_NODES", 1)

    def num_removed() -> int:
        gc.collect()
        nodes = [node for node in gc.get_objects() if isinstance(node, TreeNode)]
        return sum(node.parent is None for node in nodes)

    before = num_removed()
    clinic = Clinic(WritePolicy.WRITE_THROUGH, device_pages=8)
    clinic.shelf.refuse_sets = True
    for i in range(200):
        clinic.run(tokens(17, 1000 * i))
        clinic.wait(10.0)
    assert num_removed() - before < 40
