"""What must be true of a `HybridWorld` after every operation, and what at rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from hybrid_pools import FULL, STATE, SWA, chain, chain_start
from hybrid_world import HybridWorld

from sgl_jax.srt.mem_cache.hicache.tree_node import TreeNode
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.req import Req


def check(world: HybridWorld) -> None:
    """Everything that must be true at any moment: each slot and host page in one hand, the right content in all of
    them, and exactly the locks that the running requests need."""
    world.cache.check_invariants()
    world.allocator.check_invariants()
    nodes = list(_walk(world))
    _check_locks(world, nodes)
    _check_device(world, nodes)
    if world.cache.hicache_enabled:
        _check_host(world, nodes)


def check_at_rest(world: HybridWorld) -> None:
    """Nothing runs and nothing is under way: no locks, no tables, every slot and page free or the tree's, and only
    right pages in storage."""
    assert not world.admitted
    assert not world.pending_loads
    world.settle()
    check(world)
    assert world.memory.check_conservation() is None
    assert world.rows.held() is None
    assert all(pool.protected == 0 for pool in world.memory.counts())
    prefetch = world.cache._prefetch
    assert not prefetch._table._by_transfer
    assert not prefetch._lookups + prefetch._fetches
    if not world.cache.hicache_enabled:
        return
    controller = world.controller
    assert controller.num_in_flight == 0
    assert controller.in_flight.backup_bytes == 0
    for component in world.tree.components:
        pool = world.host_pool(component.kind)
        assert pool.num_locked == 0
        assert not controller.in_flight._given_up[component.kind]
        assert pool.num_free + component.host.num_pages == pool.num_pages
        assert not component.host.storing
    if world.tree.has_storage:
        _check_storage(world)


@dataclass(frozen=True)
class Placed:
    """A node, the tokens before it, and the oracle's numbers of its tokens, int64[num_tokens]."""

    node: TreeNode
    start: int
    numbers: np.ndarray


def _walk(world: HybridWorld) -> Iterator[Placed]:
    """Every node but the root, parents first."""
    ends: dict[TreeNode, tuple[int, int]] = {}
    for node in world.tree.tree.nodes():
        start, number = ends.get(node.parent, (0, chain_start(node.namespace.extra_key)))
        numbers = chain(number, node.key)
        ends[node] = (start + node.num_tokens, int(numbers[-1]))
        yield Placed(node, start, numbers)


# -- locks -----------------------------------------------------------------------------------------------------------


def _check_locks(world: HybridWorld, nodes: Iterable[Placed]) -> None:
    """Full: the whole path; SWA: the window before the border; states: the one at the border. Nothing else."""
    want: dict[tuple[TreeNode, ComponentKind], int] = {}
    holders = [req.last_node for req in world.admitted] + [p.node for p in world.pending_loads]
    for holder in holders:
        tokens_below = 0
        for above in holder.ancestors():
            needed = {FULL}
            if SWA in world.settings.mix.kinds and tokens_below < window_tokens(world):
                needed.add(SWA)
            if STATE in world.settings.mix.kinds and above is holder:
                needed.add(STATE)
            for kind in needed:
                want[above, kind] = want.get((above, kind), 0) + 1
            tokens_below += above.num_tokens
    for placed in nodes:
        for component in world.tree.components:
            locks = component.data(placed.node).device_lock
            wanted = want.get((placed.node, component.kind), 0)
            assert locks == wanted, f"{component.kind} of {placed.node!r}: {locks} locks, {wanted}"
            # A request that goes on from its own running state keeps the place of one, too.
            if wanted and component.kind is not STATE:
                assert component.data(placed.node).device_slots is not None, f"{placed.node!r}"


def window_tokens(world: HybridWorld) -> int:
    """Tokens of the whole pages that a reader at a page border needs of the window before it."""
    window, size = world.settings.mix.window, world.settings.page_size
    assert window is not None
    return -(-(window - 1) // size) * size


# -- device ----------------------------------------------------------------------------------------------------------


_NOTHING = np.int64(-1)


class _Held:
    """Who has which slots of one kind, and what is in them; `unset` slots wait for the bytes of a load."""

    def __init__(self, unset: Iterable[int]) -> None:
        self._slots: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._unset = np.array(list(unset), np.int32)

    def add(self, slots: np.ndarray, numbers: np.ndarray | None) -> None:
        """`numbers`: of what is in the slots, None if that is nothing yet."""
        self._slots.append(slots)
        self._numbers.append(np.full(len(slots), _NOTHING) if numbers is None else numbers)

    def all(self) -> np.ndarray:
        """int32[n] every held slot."""
        return np.concatenate([np.empty(0, np.int32), *self._slots])

    def content(self) -> tuple[np.ndarray, np.ndarray]:
        """The slots that hold something, and the numbers of what."""
        slots, numbers = self.all(), np.concatenate([np.empty(0, np.int64), *self._numbers])
        there = (numbers != _NOTHING) & ~np.isin(slots, self._unset)
        return slots[there], numbers[there]


def _check_device(world: HybridWorld, nodes: Iterable[Placed]) -> None:
    """Slots of the tree, of requests and free ones are apart and add up to the pools; held ones have their content."""
    held = {kind: _Held(_slots_in_loads(world, kind)) for kind in world.settings.mix.kinds}
    for placed in nodes:
        for component in world.tree.components:
            slots = component.data(placed.node).device_slots
            if slots is not None:
                ends = component.kind is STATE
                held[component.kind].add(slots, placed.numbers[-1:] if ends else placed.numbers)
        if SWA in held:
            _check_mapping(world, placed.node)
    for req in world.admitted:
        _add_own_slots(world, req, held)
    image = world.pools.image()
    for kind, free in world.free_slots().items():
        everything = np.sort(np.concatenate([held[kind].all(), free]))
        first = 1 if kind is STATE else world.settings.page_size
        np.testing.assert_array_equal(
            everything, np.arange(first, len(image[kind])), f"{kind} slots do not add up"
        )
        slots, numbers = held[kind].content()
        np.testing.assert_array_equal(
            image[kind][slots], world.pools.expected(kind, numbers), f"{kind} on the device"
        )


def _slots_in_loads(world: HybridWorld, kind: ComponentKind) -> Iterator[int]:
    for load in world.pending_loads:
        for part in load.parts:
            if part.component is kind:
                for page in part.future.device_pages.tolist():
                    size = 1 if kind is STATE else world.settings.page_size
                    yield from range(page * size, (page + 1) * size)


def _check_mapping(world: HybridWorld, node: TreeNode) -> None:
    """What a node has of SWA slots is what its Full slots are mapped to."""
    full = world.tree.full.data(node).device_slots
    if full is not None:
        swa = world.component(SWA).data(node).device_slots
        mapped = world.allocator.full_to_swa_index_mapping[full]
        np.testing.assert_array_equal(mapped, np.zeros_like(full) if swa is None else swa)


def _add_own_slots(world: HybridWorld, req: Req, held: dict[ComponentKind, _Held]) -> None:
    """What a request has beside the tree: pages behind its prefix, its running state and its snapshots."""
    page_size = world.settings.page_size
    protected, committed = req.cache_protected_len, req.kv_committed_len
    row = world.rows.req_to_token[req.req_pool_idx]
    np.testing.assert_array_equal(
        row[: len(req.prefix_indices)],
        req.prefix_indices[: len(row)],
        f"{req.rid}: row and prefix differ",
    )
    np.testing.assert_array_equal(
        row[:protected], world.tree.device_slots(req.last_node.path()), f"{req.rid}: its prefix"
    )
    if committed > protected:
        numbers = world.numbers(req, committed)[protected:]
        own = row[protected:committed]
        tail = np.arange(own[-1] + 1, -(-(own[-1] + 1) // page_size) * page_size, dtype=np.int32)
        held[FULL].add(own, numbers)
        held[FULL].add(tail, None)
        if SWA in held:
            mapping = world.allocator.full_to_swa_index_mapping
            lives = slice(max(req.swa_evicted_seqlen - protected, 0), None)
            assert mapping[own[lives]].all(), f"{req.rid}: its window is not mapped"
            assert not mapping[own[: lives.start]].any(), f"{req.rid}: freed, but mapped"
            held[SWA].add(mapping[own[lives]], numbers[lives])
            held[SWA].add(mapping[tail], None)
    if STATE in held:
        _add_own_states(world, req, held[STATE])


def _add_own_states(world: HybridWorld, req: Req, held: _Held) -> None:
    def add(slot: int, num_consumed: int) -> None:
        numbers = world.numbers(req, num_consumed)[-1:] if num_consumed else None
        held.add(np.array([slot], np.int32), numbers)

    add(req.recurrent_pool_idx, req.recurrent_state_len)
    slots = req.recurrent_ping_pong_track_buffer
    last = (req.recurrent_next_track_idx + len(slots) - 1) % len(slots)
    for index, slot in enumerate(slots):
        add(slot, req.recurrent_last_track_seqlen if index == last else 0)


# -- host ------------------------------------------------------------------------------------------------------------


def _check_host(world: HybridWorld, nodes: list[Placed]) -> None:
    """Host pages that are not free have an owner or a transfer; complete ones of the tree have their content."""
    page_size = world.settings.page_size
    for component in world.tree.components:
        kind, pool = component.kind, world.host_pool(component.kind)
        owned: list[int] = []
        ready: list[int] = []
        want: list[bytes] = []
        for placed in nodes:
            pages = component.data(placed.node).host_pages
            if pages is None:
                continue
            owned += pages.tolist()
            if not component.host_ready(placed.node):
                continue
            of_pages = placed.numbers.reshape(-1, page_size)[component.first_page_in(placed.node) :]
            ready += pages.tolist()
            want += [world.pools.expected_page(kind, numbers) for numbers in of_pages]
        held = set(owned) | _in_flight(world, kind)
        assert len(owned) == len(set(owned))
        assert pool.num_free + len(held) == pool.num_pages, f"{kind}: host pages of nobody"
        got = [b"".join(part.tobytes() for part in page) for page in _read(pool, ready)]
        wrong = [page for page, g, w in zip(ready, got, want, strict=True) if g != w]
        assert not wrong, f"{kind}: host pages {wrong} hold something else"


def _read(pool: object, pages: list[int]) -> list[list[np.ndarray]]:
    return pool.read_bytes(np.array(pages, np.int32)) if pages else []  # type: ignore[attr-defined]


def _in_flight(world: HybridWorld, kind: ComponentKind) -> set[int]:
    """Host pages of transfers that have not ended, or whose end nobody has used yet."""
    controller, prefetch = world.controller, world.cache._prefetch
    pages = set(controller.in_flight._given_up[kind])
    results = [r for r in [*controller._settled, *prefetch._fetches] if hasattr(r, "host_pages")]
    for waiting in set(prefetch._table._by_transfer.values()):
        results += waiting.arrived.values()
    for transfer in [*controller.in_flight.transfers(), *results]:
        if transfer.component is kind:
            pages.update(np.asarray(transfer.host_pages).tolist())
    return pages


# -- storage ---------------------------------------------------------------------------------------------------------


def _check_storage(world: HybridWorld) -> None:
    """Every stored page is one that some request computed, byte for byte."""
    page_size = world.settings.page_size
    expected: dict[ComponentKind, dict[bytes, bytes]] = {
        kind: {} for kind in world.settings.mix.kinds
    }
    for extra_key, tokens in world.sequences:
        whole = tokens[: len(tokens) // (8 * page_size) * 8 * page_size]
        numbers = chain(chain_start(extra_key), whole).reshape(-1, page_size)
        keys = world.tree.keys.hasher(extra_key).chain(None, whole)
        for component in world.tree.components:
            for key, of_page in zip(keys, numbers, strict=True):
                own_key = component.key_of_page(key)
                if own_key not in expected[component.kind]:
                    expected[component.kind][own_key] = world.pools.expected_page(
                        component.kind, of_page
                    )
    for kind, pages in expected.items():
        for key, page in world.shelf(kind).pages.items():
            assert page == pages.get(key), f"{kind}: {key.hex()} holds something else in storage"
