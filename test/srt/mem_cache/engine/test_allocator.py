"""The allocator against a set of pages, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax_hicache.engine.allocator import PagedTokenToKVPoolAllocator, SlotStateError


def _allocator(num_pages: int = 8, page_size: int = 4) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(num_pages * page_size, page_size, kvcache=None)


def test_pages_are_contiguous_inside_and_the_sentinel_is_never_handed_out() -> None:
    allocator = _allocator()
    slots = allocator.alloc(32)
    assert slots is not None
    assert slots.dtype == np.int32
    assert np.array_equal(slots.reshape(8, 4) - slots[::4, None], np.tile(np.arange(4), (8, 1)))
    assert set(slots // 4) == set(range(1, 9))
    assert allocator.alloc(4) is None


def test_alloc_refuses_half_a_page() -> None:
    with pytest.raises(ValueError, match="not a multiple of 4"):
        _allocator().alloc(6)


def test_one_slot_frees_its_page_and_a_second_time_raises() -> None:
    allocator = _allocator()
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free(slots[1:2])
    assert allocator.available_size() == 28
    with pytest.raises(SlotStateError, match="not handed out"):
        allocator.free(slots)
    assert allocator.available_size() == 28, "a refused free changes nothing"
    allocator.free(slots[4:])
    allocator.check_invariants()


def test_free_outside_the_pool_raises() -> None:
    allocator = _allocator()
    for slot in (0, 3, 36):
        with pytest.raises(SlotStateError):
            allocator.free(np.array([slot], dtype=np.int32))


def test_free_group_defers() -> None:
    allocator = _allocator()
    slots = allocator.alloc(16)
    assert slots is not None
    allocator.free_group_begin()
    allocator.free(slots[:8])
    assert allocator.available_size() == 16
    with pytest.raises(SlotStateError):
        allocator.free(slots[:4])
    allocator.free_group_end()
    assert allocator.available_size() == 24
    allocator.check_invariants()


def test_extend_fills_the_last_page_first() -> None:
    allocator = _allocator()
    first = allocator.alloc_extend([0], [6], [0], 6)
    assert first is not None
    more = allocator.alloc_extend([6], [13], [int(first[-1])], 7)
    assert more is not None
    assert more[0] == first[-1] + 1
    assert more[1] == first[-1] + 2
    assert allocator.available_size() == 16
    assert allocator.alloc_extend([0], [17], [0], 17) is None
    assert allocator.available_size() == 16
    with pytest.raises(SlotStateError, match="does not end a prefix"):
        allocator.alloc_extend([6], [7], [int(first[0])], 1)


def test_decode_takes_a_page_only_at_a_border() -> None:
    allocator = _allocator()
    first = allocator.alloc_extend([0, 0], [3, 4], [0, 0], 7)
    assert first is not None
    slots = allocator.alloc_decode([4, 5], [int(first[2]), int(first[6])])
    assert slots is not None
    assert slots[0] == first[2] + 1
    assert slots[1] % 4 == 0
    assert allocator.available_size() == 20


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_operations_agree_with_a_set(page_size: int, rng: np.random.Generator) -> None:
    num_pages = 40
    allocator = _allocator(num_pages, page_size)
    free = set(range(1, num_pages + 1))
    owned: list[np.ndarray] = []
    for _ in range(400):
        if rng.random() < 0.55:
            want = int(rng.integers(0, 8))
            slots = allocator.alloc(want * page_size)
            assert (slots is None) == (want > len(free))
            if slots is not None and want:
                pages = set((slots // page_size).tolist())
                assert pages <= free
                assert len(pages) == want
                free -= pages
                owned.append(slots)
        elif owned:
            slots = owned.pop(int(rng.integers(0, len(owned))))
            allocator.free(slots)
            free |= set((slots // page_size).tolist())
        assert allocator.available_size() == len(free) * page_size
        assert set(allocator.free_pages().tolist()) == free
        allocator.check_invariants()
