"""Brings the host part of a prefix to the device: every component's share of it, or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .components.base import PrefetchPlan, TreeComponent
from .device_eviction import DeviceEviction
from .in_flight import LoadFuture
from .tiered_tree import TieredTree
from .tree_node import TreeNode
from .types import ComponentKind

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class LoadedPart:
    """One component's share of a load, on the device but not yet in its buffers, and the host pages it came from."""

    component: ComponentKind
    future: LoadFuture
    host_pages: Int32Array


@dataclass(frozen=True)
class PendingLoad:
    """A loaded prefix that is not yet in the device buffers.

    Until it is, its nodes are locked, and so are the host pages they came from: a node keeps its host copy, so that
    nobody makes a new one from slots that hold nothing yet.
    """

    node: TreeNode
    parts: tuple[LoadedPart, ...]
    epoch: int


@dataclass
class _Slots:
    """Device slots taken for a load, by component; all in the order of the path."""

    dp_rank: int
    by_kind: dict[ComponentKind, Int32Array]


class LoadBack:
    """Loads for one tree. Scheduler thread only; `load` waits for its own copies."""

    def __init__(self, tree: TieredTree, eviction: DeviceEviction) -> None:
        self._tree = tree
        self._eviction = eviction

    def load(self, path: list[TreeNode], device_len: int) -> PendingLoad | None:
        """Bring the path behind `device_len` tokens to the device, or as much of it as there is room for, and wait for
        it. None if there is no room, or a copy failed.

        Everything the load reads or hangs on is pinned before room is made for it: making room can back up, and so
        evict host pages, and may not evict these.
        """
        limit = sum(node.num_tokens for node in path)
        while (border := self._tree.usable(path, limit, with_host=True)) > device_len:
            target = self._tree.cut(path, border)[-1]
            self._tree.lock(target)
            pending, limit = self._load_locked(target, border)
            if pending is not None:
                return pending
            self._tree.unlock(target)
            path = target.path()
        return None

    def _load_locked(self, target: TreeNode, border: int) -> tuple[PendingLoad | None, int]:
        """Load the prefix that ends at `target`. If there is no room: None, and how long a prefix may be tried next (0:
        none)."""
        tree = self._tree
        page_size = tree.codec.page_size
        plans = tree.prefetch_plans(target.path(), border // page_size)
        short = self._shortage(plans, target.namespace.dp_rank)
        if short:
            return None, border - short
        with ExitStack() as pinned:
            for plan in plans:
                tree.tiers.host_pool(plan.component).lock(plan.host_pages)
                pinned.callback(tree.tiers.controller.release, plan.component, plan.host_pages)
            parts = self._load_pinned(plans, target)
            if parts is None:
                return None, 0
            pinned.pop_all()
        return PendingLoad(target, parts, tree.epoch), border

    def _shortage(self, plans: Sequence[PrefetchPlan], dp_rank: int) -> int:
        """Tokens by which a shorter prefix must be shorter, as far as one can tell; 0 if there is room."""
        page_size = self._tree.codec.page_size
        for plan in plans:
            component = self._tree.component(plan.component)
            need = sum(map(component.num_slots, plan.load_nodes))
            short = need - self._available(component, dp_rank)
            short -= component.device.evictable(dp_rank)
            if short > 0:
                # Of the others a shorter prefix may need as much, or nothing.
                is_full = component is self._tree.full
                return -(-short // page_size) * page_size if is_full else page_size
        return 0

    def _load_pinned(
        self, plans: Sequence[PrefetchPlan], target: TreeNode
    ) -> tuple[LoadedPart, ...] | None:
        tree, dp_rank = self._tree, target.namespace.dp_rank
        slots = _Slots(dp_rank, {})
        for plan in plans:
            taken = self._alloc(tree.component(plan.component), plan)
            if taken is None:
                self._give_back(slots)
                return None
            slots.by_kind[plan.component] = taken
        parts = tuple(
            LoadedPart(
                plan.component,
                tree.tiers.load(
                    plan,
                    tree.component(plan.component).device_pages_of(slots.by_kind[plan.component]),
                    dp_rank,
                ),
                plan.host_pages,
            )
            for plan in plans
            if len(plan.host_pages)
        )
        arrived = tree.tiers.wait_loads([part.future for part in parts])
        tree.settle()
        if not arrived:
            self._give_back(slots)
            return None
        self._attach(target, slots)
        return parts

    # -- device slots ------------------------------------------------------------------------------------------------

    def _available(self, component: TreeComponent, dp_rank: int) -> int:
        device = self._tree.device
        if component.kind is ComponentKind.FULL:
            return device.full_available(dp_rank)
        if component.kind is ComponentKind.SWA:
            return device.swa_available(dp_rank)
        return device.states_available(dp_rank)

    def _alloc(self, component: TreeComponent, plan: PrefetchPlan) -> Int32Array | None:
        """Slots for the plan's nodes, evicting others if need be."""
        need = sum(map(component.num_slots, plan.load_nodes))
        if not need:
            return np.empty(0, np.int32)
        dp_rank = plan.load_nodes[0].namespace.dp_rank
        short = need - self._available(component, dp_rank)
        device = self._tree.device
        if component.kind is ComponentKind.FULL:
            self._eviction.evict_full(short, dp_rank)
            return device.alloc_full(need, dp_rank)
        if component.kind is ComponentKind.SWA:
            self._eviction.evict_swa(short, dp_rank)
            return device.alloc_swa(need, dp_rank)
        self._eviction.evict_states(short, dp_rank)
        slot = device.alloc_state(dp_rank)
        return None if slot is None else np.array([slot], np.int32)

    def _give_back(self, slots: _Slots) -> None:
        device = self._tree.device
        for kind, taken in slots.by_kind.items():
            if kind is ComponentKind.FULL:
                device.free_full(taken, slots.dp_rank)
            elif kind is ComponentKind.SWA:
                device.give_back_swa(taken, slots.dp_rank)
            else:
                for slot in taken.tolist():
                    device.free_state(slot, slots.dp_rank)

    def _attach(self, target: TreeNode, slots: _Slots) -> None:
        """Give loaded slots to the nodes they belong to, as the path is now (settling may have split it)."""
        tree, path = self._tree, target.path()
        for component in tree.components:
            taken, start = slots.by_kind[component.kind], 0
            for node in component.needed_nodes(path):
                if component.data(node).device_slots is not None:
                    continue
                piece = taken[start : start + component.num_slots(node)]
                if component is tree.swa:
                    full_slots = tree.full.data(node).device_slots
                    assert full_slots is not None  # Full comes first
                    tree.device.map_swa(full_slots, piece, slots.dp_rank)
                tree.attach(component, node, piece)
                start += len(piece)

    # -- the end of a load -------------------------------------------------------------------------------------------

    def finish(self, load: PendingLoad) -> None:
        """Put loaded pages into the buffers and release what the load held. After a reset nothing is written."""
        controller = self._tree.tiers.controller
        if load.epoch == self._tree.epoch:
            for part in load.parts:
                controller.commit_load(part.component, part.future)
            self._tree.unlock(load.node)
        for part in load.parts:
            controller.release(part.component, part.host_pages)
