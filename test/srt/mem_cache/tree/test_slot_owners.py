"""Who owns a device slot, and who gives it back: the tree or the request."""

from __future__ import annotations

import numpy as np
from tree_steps import evict_all, match_len, tokens
from tree_world import Request, World


def test_slots_of_a_revived_node_are_not_freed() -> None:
    """Scenario: a host-only prefix is computed again without load-back; the node takes over the request's slots."""
    world = World()
    world.run(tokens(33))
    world.settle()
    evict_all(world)
    req = Request("again", tokens(33))
    req.last_node = world.cache.root_node
    world.cache.inc_lock_ref(req.last_node)
    assert world.extend(req, 33)
    world.cache.cache_unfinished_req(req)
    world.verify(in_use=4)
    world.finish(req)
    world.verify_at_rest()
    assert match_len(world, tokens(33)) == (32, 0)


def test_the_same_prompt_computed_twice_at_once_keeps_one_copy() -> None:
    world = World()
    first, second = world.start(tokens(18)), world.start(tokens(18))
    for req in (first, second):
        assert world.extend(req, 18)
    for req in (first, second):
        world.cache.cache_unfinished_req(req)
    np.testing.assert_array_equal(first.prefix_indices[:16], second.prefix_indices[:16])
    world.finish(first)
    world.finish(second, is_insert=False)
    world.verify_at_rest()
    assert world.cache.total_size() == 16


def test_a_retracted_request_gives_back_all_but_what_the_tree_owns() -> None:
    world = World()
    world.run(tokens(9))
    req = world.start(tokens(30))
    assert world.extend(req, 15)
    world.cache.cache_unfinished_req(req)
    assert world.extend(req, 26)
    world.finish(req, is_insert=False)
    world.verify_at_rest()
    assert match_len(world, tokens(30)) == (12, 0)


def test_a_request_that_outlives_a_reset_gives_back_nothing() -> None:
    world = World()
    world.run(tokens(9))
    old = world.start(tokens(30))
    assert world.extend(old, 30)
    world.cache.reset()
    world.allocator.clear()
    world.run(tokens(40, 700))
    world.finish(old)
    world.cache.dec_lock_ref(old.last_node)
    world.verify_at_rest()
    assert world.cache.protected_size() == 0
