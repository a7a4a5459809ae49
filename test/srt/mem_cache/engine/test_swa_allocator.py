"""The allocator of two pools: against an oracle of pages, all or nothing, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from sgl_jax_hicache.engine.allocator import SlotStateError
from sgl_jax_hicache.engine.memory_pool import MHATokenToKVPool
from sgl_jax_hicache.engine.swa_allocator import SWATokenToKVPoolAllocator
from sgl_jax_hicache.engine.swa_kv_pool import SWAKVPool


def _allocator(
    num_pages: int = 8, num_swa_pages: int = 5, page_size: int = 4
) -> SWATokenToKVPoolAllocator:
    sizes = num_pages * page_size, num_swa_pages * page_size
    pools = (MHATokenToKVPool(size, page_size, "float32", 1, 2, 0) for size in sizes)
    return SWATokenToKVPoolAllocator(*sizes, page_size, SWAKVPool(*pools))


def _snapshot(allocator: SWATokenToKVPoolAllocator) -> tuple[object, ...]:
    return (
        allocator.full_attn_allocator.free_pages().tolist(),
        allocator.swa_attn_allocator.free_pages().tolist(),
        allocator.full_to_swa_index_mapping.tolist(),
    )


def _extend(
    allocator: SWATokenToKVPoolAllocator, prefix: int, seq: int, last: int
) -> np.ndarray | None:
    return allocator.alloc_extend([prefix], [seq], [last], seq - prefix)


def test_a_page_is_mapped_whole_to_one_page_and_keeps_its_offsets() -> None:
    allocator = _allocator()
    swa = allocator.swa_attn_allocator.alloc(4)  # so that page numbers differ
    assert swa is not None
    slots = _extend(allocator, 0, 6, 0)
    assert slots is not None
    mapped = allocator.full_to_swa_index_mapping[slots]
    assert mapped.tolist() == [8, 9, 10, 11, 12, 13]
    assert np.array_equal(mapped % 4, slots % 4)
    more = _extend(allocator, 6, 9, int(slots[-1]))
    assert more is not None
    assert more[:2].tolist() == [slots[-1] + 1, slots[-1] + 2]
    assert allocator.full_to_swa_index_mapping[more].tolist() == [14, 15, 16]
    allocator.swa_attn_allocator.free(swa)
    allocator.check_invariants()


def test_the_mapping_is_one_object_for_pool_and_allocator() -> None:
    allocator = _allocator()
    mapping = allocator.get_kvcache().full_to_swa_index_mapping
    assert allocator.full_to_swa_index_mapping is mapping
    assert len(mapping) == 8 * 4 + 4
    assert mapping.dtype == np.int32
    slots = allocator.alloc(8)
    assert slots is not None
    assert mapping[slots].all()
    allocator.clear()
    assert allocator.full_to_swa_index_mapping is mapping
    assert not mapping.any()
    allocator.check_invariants()
    with pytest.raises(ValueError, match="not made for 40 tokens"):
        SWATokenToKVPoolAllocator(40, 20, 4, allocator.get_kvcache())


@pytest.mark.parametrize(("full", "swa"), [(8, 3), (3, 8)])
def test_an_allocation_that_one_pool_cannot_meet_changes_neither(full: int, swa: int) -> None:
    allocator = _allocator(full, swa)
    slots = _extend(allocator, 0, 6, 0)
    assert slots is not None
    before = _snapshot(allocator)
    assert allocator.available_size() == 4
    assert allocator.alloc(8) is None
    assert _extend(allocator, 6, 13, int(slots[-1])) is None
    assert allocator.alloc_decode([9, 9], [int(slots[3])] * 2) is None
    assert _snapshot(allocator) == before
    # The half filled page is the request's still: its next token goes there.
    after = _extend(allocator, 6, 8, int(slots[-1]))
    assert after is not None
    assert after.tolist() == [slots[-1] + 1, slots[-1] + 2]
    allocator.check_invariants()


def test_decode_takes_a_page_of_both_at_a_border_only() -> None:
    allocator = _allocator()
    slots = allocator.alloc_extend([0, 0], [3, 4], [0, 0], 7)
    assert slots is not None
    new = allocator.alloc_decode([4, 5], [int(slots[2]), int(slots[6])])
    assert new is not None
    mapping = allocator.full_to_swa_index_mapping
    assert new[0] == slots[2] + 1
    assert mapping[new[0]] == mapping[slots[2]] + 1
    assert new[1] % 4 == mapping[new[1]] % 4 == 0
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (20, 8)


def test_the_window_is_freed_alone_and_once() -> None:
    allocator = _allocator()
    slots = allocator.alloc(12)
    assert slots is not None
    allocator.free_swa(slots[:8])
    allocator.free_swa(slots[:4])
    allocator.free_swa(slots[5:6])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (20, 16)
    assert allocator.full_to_swa_index_mapping[slots].tolist()[:8] == [0] * 8
    allocator.check_invariants()
    allocator.free(slots)
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 20)
    with pytest.raises(SlotStateError, match="not handed out"):
        allocator.free(slots)
    allocator.check_invariants()


def test_one_slot_frees_its_whole_page_in_both_pools() -> None:
    allocator = _allocator()
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free(slots[6:7])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (28, 16)
    assert allocator.full_to_swa_index_mapping[slots[4:]].tolist() == [0] * 4
    allocator.check_invariants()


def test_a_refused_free_changes_nothing() -> None:
    allocator = _allocator()
    slots = allocator.alloc(4)
    assert slots is not None
    before = _snapshot(allocator)
    with pytest.raises(SlotStateError):
        allocator.free(np.concatenate([slots, slots + 4]))
    assert _snapshot(allocator) == before


def test_a_half_filled_page_without_its_window_is_not_continued() -> None:
    allocator = _allocator()
    slots = _extend(allocator, 0, 6, 0)
    assert slots is not None
    allocator.free_swa(slots[4:])
    before = _snapshot(allocator)
    with pytest.raises(SlotStateError, match="without an SWA page"):
        _extend(allocator, 6, 7, int(slots[-1]))
    assert _snapshot(allocator) == before


def test_a_free_group_defers_both_pools() -> None:
    allocator = _allocator()
    slots = allocator.alloc(16)
    assert slots is not None
    allocator.free_group_begin()
    allocator.free(slots[:4])
    allocator.free_swa(slots[4:8])
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (16, 4)
    with pytest.raises(SlotStateError):
        allocator.free(slots[:4])
    allocator.check_invariants()
    allocator.free_group_end()
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (20, 12)
    allocator.check_invariants()


def test_a_cache_may_map_pages_that_it_took_by_itself() -> None:
    allocator = _allocator()
    full = allocator.full_attn_allocator.alloc(8)
    assert full is not None
    assert allocator.swa_available_size() == 20
    swa = allocator.swa_attn_allocator.alloc(4)
    assert swa is not None
    allocator.full_to_swa_index_mapping[full[4:]] = swa
    allocator.check_invariants()
    allocator.free(full)
    allocator.check_invariants()
    assert (allocator.full_available_size(), allocator.swa_available_size()) == (32, 20)


def test_broken_mappings_are_found() -> None:
    for spoil, message in (
        (lambda mapping, slots: mapping.__setitem__(slots[1], 0), "in part"),
        (lambda mapping, slots: mapping.__setitem__(slots[:4], mapping[slots[4:]]), "differ"),
        (lambda mapping, slots: mapping.__setitem__(slots[:4], 0), "differ"),
        (lambda mapping, slots: mapping.__setitem__(slots[:4], mapping[slots[:4]] + 1), "in part"),
    ):
        allocator = _allocator()
        slots = allocator.alloc(8)
        spoil(allocator.full_to_swa_index_mapping, slots)
        with pytest.raises(SlotStateError, match=message):
            allocator.check_invariants()
    allocator = _allocator()
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.full_attn_allocator.free(slots[:4])
    with pytest.raises(SlotStateError, match=r"full pages \[1\] are mapped but not handed out"):
        allocator.check_invariants()


@dataclass
class _Sequence:
    """The oracle's record of one request: its slots, and the first page that is still in the SWA pool."""

    slots: list[int] = field(default_factory=list)
    swa_from: int = 0

    def pages(self, page_size: int) -> int:
        return -(-len(self.slots) // page_size)


@pytest.mark.parametrize(("scarce", "num_pages", "num_swa"), [("swa", 40, 24), ("full", 24, 22)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_histories_agree_with_an_oracle(
    page_size: int, scarce: str, num_pages: int, num_swa: int, rng: np.random.Generator
) -> None:
    allocator = _allocator(num_pages, num_swa, page_size)
    live: list[_Sequence] = []
    refused = {"full": 0, "swa": 0}
    for _ in range(800):
        free_full = num_pages - sum(s.pages(page_size) for s in live)
        free_swa = num_swa - sum(s.pages(page_size) - s.swa_from for s in live)
        act = rng.random()
        if act < 0.35 or not live:
            old = live[int(rng.integers(0, len(live)))] if live and rng.random() < 0.5 else None
            sequence = old or _Sequence()
            prefix, grow = len(sequence.slots), int(rng.integers(1, 4 * page_size + 1))
            need = -(-(prefix + grow) // page_size) - sequence.pages(page_size)
            last = sequence.slots[-1] if sequence.slots else 0
            slots = _extend(allocator, prefix, prefix + grow, last)
            assert (slots is None) == (need > min(free_full, free_swa))
            refused["full"] += need > free_full
            refused["swa"] += need > free_swa
            if slots is not None:
                sequence.slots += slots.tolist()
                if old is None:
                    live.append(sequence)
        elif act < 0.6:
            new = allocator.alloc_decode(
                [len(s.slots) + 1 for s in live], [s.slots[-1] for s in live]
            )
            need = sum(len(s.slots) % page_size == 0 for s in live)
            assert (new is None) == (need > min(free_full, free_swa))
            for sequence, slot in zip(live, [] if new is None else new.tolist(), strict=False):
                sequence.slots.append(slot)
        elif act < 0.8:
            sequence = live[int(rng.integers(0, len(live)))]
            # Up to the last page, which the next token may have to go on with.
            until = int(rng.integers(0, sequence.pages(page_size)))
            allocator.free_swa(np.array(sequence.slots[: until * page_size], np.int32))
            sequence.swa_from = max(sequence.swa_from, until)
        else:
            sequence = live.pop(int(rng.integers(0, len(live))))
            allocator.free(np.array(sequence.slots, np.int32))
        allocator.check_invariants()
        _expect(allocator, live, num_pages, num_swa)
    assert refused[scarce] > 0


def _expect(
    allocator: SWATokenToKVPoolAllocator, live: list[_Sequence], num_pages: int, num_swa: int
) -> None:
    page_size, mapping = allocator.page_size, allocator.full_to_swa_index_mapping
    full = sum(s.pages(page_size) for s in live)
    swa = sum(s.pages(page_size) - s.swa_from for s in live)
    assert allocator.full_available_size() == (num_pages - full) * page_size
    assert allocator.swa_available_size() == (num_swa - swa) * page_size
    seen: set[int] = set()
    for sequence in live:
        slots = np.array(sequence.slots)
        mapped = mapping[slots]
        cut = sequence.swa_from * page_size
        assert not mapped[:cut].any()
        assert np.array_equal(mapped[cut:] % page_size, slots[cut:] % page_size)
        assert mapped[cut:].all()
        seen |= set(mapped[cut:].tolist())
    assert len(seen) == sum(len(s.slots) - s.swa_from * page_size for s in live)
