"""The prefix tree with its tiers: nodes, what each component keeps on them, and what happens when either changes.

Here, and nowhere else, the components' hooks are called: write_through when nodes are on the device and may lack a
host copy, write_back when pages must be safe in storage, prefetch when a prefix is about to be used. `LowerTiers`
carries their plans out. Around it stand `Insertion`, `DeviceEviction`, `LoadBack`, `StorageWriter` and
`StoragePrefetch`, each with one reason to change the tree; `UnifiedRadixCache` puts the engine's contract on top.
Scheduler thread only; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from .components.base import PrefetchPlan, PrefetchRequest, TreeComponent
from .components.recurrent import RecurrentStateComponent
from .components.swa import SWAComponent
from .contract import DonationBarrier
from .coverage import Part, usable_prefix
from .device_slots import DeviceSlots
from .lower_tiers import HostVictim, LowerTiers, Settlement
from .path_keys import PathKeys
from .radix_tree import RadixTree
from .storage_mount import DetachedStorage, StorageMount
from .token_key import TokenCodec
from .tree_node import KeyNamespace, TreeNode
from .types import ComponentKind

Int32Array = npt.NDArray[np.int32]

NO_SLOTS: Int32Array = np.empty(0, np.int32)


class TieredTree:
    """Nodes, their components' data on every tier, and the moves between tiers.

    `components`: Full first. `tiers` and `keys` are None without a host. `store_early`: storage gets a page as soon as
    its host copy is complete (write_through), else when it is to leave the host.
    """

    def __init__(
        self,
        *,
        codec: TokenCodec,
        components: Sequence[TreeComponent],
        device: DeviceSlots,
        tiers: LowerTiers | None,
        keys: PathKeys | None,
        store_early: bool = True,
    ) -> None:
        self.components = tuple(components)
        self.full = self.components[0]
        self.swa = next((c for c in components if isinstance(c, SWAComponent)), None)
        self.recurrent = next(
            (c for c in components if isinstance(c, RecurrentStateComponent)), None
        )
        self.codec = codec
        self.device = device
        self.tree = RadixTree(codec, len(self.components))
        self.donation_barrier: DonationBarrier | None = None
        self.epoch = 0
        self.host_only_changed = True  # for who looks at the nodes that left the device
        self._page_size = codec.page_size
        self._tiers = tiers
        self._keys = keys
        self._store_early = store_early
        self._on_settled: list[Callable[[Settlement], None]] = []
        self._on_split: list[Callable[[TreeNode, TreeNode], None]] = []

    @property
    def tiers(self) -> LowerTiers:
        """The lower tiers; only called where a page of theirs is at hand."""
        if self._tiers is None:
            raise LookupError("there are no lower tiers")
        return self._tiers

    @property
    def keys(self) -> PathKeys:
        """Storage keys; only called where there are lower tiers."""
        if self._keys is None:
            raise LookupError("there are no lower tiers")
        return self._keys

    @property
    def has_tiers(self) -> bool:
        """True if there is a host tier."""
        return self._tiers is not None

    @property
    def has_storage(self) -> bool:
        """True if there is a storage tier now."""
        return self._tiers is not None and self._tiers.controller.mount is not None

    @property
    def stores_early(self) -> bool:
        """True if storage is to get what is on the device without waiting for it to leave."""
        return self._store_early and self.has_storage

    @property
    def longest_node(self) -> int:
        """Tokens of the longest node that can be backed up whole; 0 without a host."""
        return (
            self.tiers.host_pool(self.full.kind).num_pages * self._page_size if self._tiers else 0
        )

    def component(self, kind: ComponentKind) -> TreeComponent:
        """The component of a kind."""
        return next(c for c in self.components if c.kind is kind)

    # -- structure ---------------------------------------------------------------------------------------------------

    def path_of(self, namespace: KeyNamespace, key: bytes) -> list[TreeNode]:
        """The nodes along `key`, as far as the tree goes; a node that matches in part is split."""
        walk = self.tree.walk(namespace, key)
        if walk.partial is not None:
            walk.path.append(self.split(walk.partial, walk.partial_tokens))
            self.touch(walk.path[-1])
        return walk.path

    def cut(self, path: list[TreeNode], num_tokens: int) -> list[TreeNode]:
        """The part of `path` that holds its first `num_tokens` tokens; splits the node across the border, if any."""
        end = 0
        for index, node in enumerate(path):
            if end == num_tokens:
                return path[:index]
            if end + node.num_tokens > num_tokens:
                return [*path[:index], self.split(node, num_tokens - end)]
            end += node.num_tokens
        return path

    def cut_at(self, path: list[TreeNode], borders: Iterable[int]) -> list[TreeNode]:
        """The path with no node across any of `borders` (tokens from the start, ascending)."""
        pieces: list[TreeNode] = []
        remaining, start = iter(path), 0
        node = next(remaining, None)
        for border in borders:
            while node is not None and start + node.num_tokens <= border:
                pieces.append(node)
                start += node.num_tokens
                node = next(remaining, None)
            if node is None:
                break
            if start < border:
                pieces.append(self.split(node, border - start))
                start = border
        if node is not None:
            pieces.append(node)
        pieces.extend(remaining)
        return pieces

    def split(self, node: TreeNode, num_tokens: int) -> TreeNode:
        """Cut `node`; the new upper part is returned, `node` stays the lower part."""
        upper = self.tree.split(node, num_tokens)
        for component in self.components:
            component.split(upper, node)
        for on_split in self._on_split:
            on_split(upper, node)
        return upper

    def touch(self, node: TreeNode) -> None:
        """The prefix that ends at `node` was used."""
        for component in self.components:
            component.touch(node)

    def lock(self, node: TreeNode) -> int:
        """Keep on the device what a reader of the prefix that ends at `node` needs; Full tokens that stopped being
        evictable.

        Before the first lock a node across the start of a window is cut there, so that exactly the window is locked and
        later cuts of it find the lock on both sides.
        """
        for component in self.components:
            if component.reach and component is not self.recurrent:  # a state's lock is one node's
                self._cut_before(node, component.reach * self._page_size)
        num_locked = [component.lock(node) for component in self.components]
        return num_locked[0]

    def unlock(self, node: TreeNode) -> int:
        """Undo one `lock` of the same node; Full tokens that became evictable."""
        num_unlocked = [component.unlock(node) for component in self.components]
        return num_unlocked[0]

    def _cut_before(self, node: TreeNode, num_tokens: int) -> None:
        """Make a node border `num_tokens` before the end of `node`, unless the root is nearer."""
        for above in node.ancestors():
            if num_tokens < above.num_tokens:
                if num_tokens:
                    self.split(above, above.num_tokens - num_tokens)
                return
            num_tokens -= above.num_tokens

    # -- what can be used --------------------------------------------------------------------------------------------

    def parts(self, path: Sequence[TreeNode], *, with_host: bool) -> list[Part]:
        """What every component has of the path."""
        return [component.part(path, with_host=with_host) for component in self.components]

    def usable(self, path: Sequence[TreeNode], limit: int, *, with_host: bool) -> int:
        """The longest usable prefix of the path within `limit`, in tokens."""
        parts = self.parts(path, with_host=with_host)
        return usable_prefix(parts, limit // self._page_size) * self._page_size

    def usable_full(self, path: Sequence[TreeNode], limit: int) -> int:
        """The longest prefix within `limit` tokens whose Full slots are on the device, whatever the others lack."""
        part = self.full.part(path, with_host=False)
        return usable_prefix([part], limit // self._page_size) * self._page_size

    def device_slots(self, path: Sequence[TreeNode]) -> Int32Array:
        """int32[tokens of path] Full slots, a copy."""
        slots = [s for n in path if (s := self.full.data(n).device_slots) is not None]
        return np.concatenate(slots) if slots else NO_SLOTS

    def on_device(self, node: TreeNode) -> bool:
        """True if the node has Full slots."""
        return self.full.data(node).device_slots is not None

    def state_slot(self, node: TreeNode) -> int | None:
        """The slot of the recurrent state at the node's end, if it is on the device."""
        if self.recurrent is None or node.parent is None:
            return None
        slots = self.recurrent.data(node).device_slots
        return None if slots is None else int(slots[0])

    # -- device ------------------------------------------------------------------------------------------------------

    def attach(self, component: TreeComponent, node: TreeNode, device_slots: Int32Array) -> None:
        """`node` takes over these slots of a component."""
        component.device.attach(node, device_slots.astype(np.int32, copy=True))
        component.host.device_changed(node)

    def detach(self, component: TreeComponent, node: TreeNode) -> Int32Array:
        """`node` loses its slots of a component; the caller frees them."""
        slots = component.device.detach(node)
        component.data(node).mirror_dropped = False
        component.host.device_changed(node)
        self.host_only_changed = True
        return slots

    # -- device -> host ----------------------------------------------------------------------------------------------

    @contextmanager
    def backing_up(self) -> Iterator[None]:
        """Around calls of `back_up_part`: at the end, in whatever way, the backups begin, as few gathers for all of
        them. Nobody may write the device meanwhile; what is freed is free for those who come after."""
        try:
            yield
        finally:
            if self._tiers is not None and self._tiers.has_backups:
                if self.donation_barrier is not None:
                    self.donation_barrier()
                self._tiers.start_backups()

    def back_up(self, path: Sequence[TreeNode]) -> None:
        """Start the backup of what the path's nodes lack on the host, from the top: a Full child is of use only with
        what lies above it. Each component stops where it has no room; eviction or the next insert tries again.

        What is on the device needs no copy yet, so it takes nobody's place on the host, unless storage is to get it
        early and takes pages now: a full host would lose, for copies that the device makes useless, what nobody else
        has. What made room on
        the host while on the device is left until it leaves the device: copied again with every chunk of a long prompt,
        the nodes of its path would push each other out in turn.
        """
        with self.backing_up():
            for component in self.components:
                make_room = self.stores_early and self.tiers.storage_writable(component)
                for node in path:
                    if component.data(node).mirror_dropped:
                        continue
                    if self.back_up_part(component, node, make_room=make_room) is False:
                        break

    def back_up_part(
        self, component: TreeComponent, node: TreeNode, *, make_room: bool = True
    ) -> bool | None:
        """Have backed up what the node's component lacks on the host, within `backing_up`. `make_room`: also at the
        cost of what is there. False if there is no room or too much waits, None if it lacks nothing."""
        plan = component.write_through(node)
        if plan is None:
            return None
        if not self.tiers.backup_fits(plan):
            return False
        num_pages = len(plan.device_pages)
        has_room = self.make_host_room if make_room else self._has_host_room
        return has_room(component, num_pages) and self.tiers.backup(plan)

    def _has_host_room(self, component: TreeComponent, num_pages: int) -> bool:
        return self.tiers.has_room(component.kind, num_pages)

    def make_host_room(self, component: TreeComponent, num_pages: int) -> bool:
        """Evict host pages until `num_pages` are free, as far as that is possible without waiting."""
        while not self.tiers.has_room(component.kind, num_pages):
            victims = self.tiers.find_victims(component, num_pages)
            for victim in victims.clean:
                self._drop_victim(component, victim)
            self.store_parts(
                (leaving, node)
                for node in victims.dirty
                if node.parent is not None
                for leaving in self._leaving_with(component)
            )
            if not victims.clean:
                return False
        return True

    def _drop_victim(self, component: TreeComponent, victim: HostVictim) -> None:
        node = victim.node
        upper = None
        if victim.keep_pages:
            upper = self.split(node, victim.keep_pages * self._page_size)
        if component is self.full and not self.on_device(node):
            self.remove_subtree(node)
        else:
            self.tiers.drop_host(component, node)
            data = component.data(node)
            data.mirror_dropped = data.device_slots is not None
        if upper is not None:
            component.host.age(upper)

    def remove_subtree(self, top: TreeNode) -> None:
        """Take a node and all below it, none of which is on the device, out of the tree."""
        stack, order = [top], []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):
            for component in self.components:
                if component.data(node).host_pages is not None:
                    self.tiers.drop_host(component, node)
            self.tree.remove(node)

    # -- host -> storage ---------------------------------------------------------------------------------------------

    def store_parts(
        self, parts: Iterable[tuple[TreeComponent, TreeNode]]
    ) -> list[tuple[TreeComponent, TreeNode]]:
        """Start writing to storage what it lacks of these nodes' components, and of what those are of no use without,
        in as few transfers as are worth having. The parts of which it lacked something; none without a storage."""
        if not self.has_storage:
            return []
        plans = {part: plan for part in parts if (plan := part[0].write_back(part[1])) is not None}
        self.tiers.store(plans.values())
        return list(plans)

    def _leaving_with(self, component: TreeComponent) -> Sequence[TreeComponent]:
        """What leaves the tree with a node's component: with Full everything."""
        return self.components if component is self.full else (component,)

    def attach_storage(self, mount: StorageMount) -> None:
        """Storage is there from now on. Raises StorageAttachError if there is one already."""
        self.tiers.attach_storage(mount)
        self.host_only_changed = True

    def detach_storage(self) -> DetachedStorage:
        """Storage is gone; no page is in it any more. Raises StorageAttachError if there is none."""
        detached = self.tiers.detach_storage()
        for node in self.tree.nodes():
            for data in node.data:
                data.in_storage = False
        return detached

    # -- what is about to be used ------------------------------------------------------------------------------------

    def prefetch_plans(self, path: Sequence[TreeNode], num_pages: int) -> list[PrefetchPlan]:
        """What each component must move up before the first `num_pages` pages of a prefix can be used. `path`: the
        nodes of those pages, as far as there are any."""
        request = PrefetchRequest(path, num_pages)
        return [component.prefetch(request) for component in self.components]

    # -- what has ended ----------------------------------------------------------------------------------------------

    def subscribe(self, on_settled: Callable[[Settlement], None]) -> None:
        """Call this with everything that `settle` finds."""
        self._on_settled.append(on_settled)

    def subscribe_to_splits(self, on_split: Callable[[TreeNode, TreeNode], None]) -> None:
        """Call this with the upper and the lower part of every node that is cut."""
        self._on_split.append(on_split)

    def settle(self) -> None:
        """Take note of ended transfers."""
        if self._tiers is None:
            return
        self._tiers.report_pages()
        if not self._tiers.controller.num_in_flight:
            self._tiers.report_storage()
            return
        settlement = self._tiers.settle()
        for node, component in settlement.lost:
            if node.parent is not None and component.data(node).host_pages is not None:
                self.tiers.drop_host(component, node)
                if component is self.full and not self.on_device(node):
                    self.remove_subtree(node)
        self.host_only_changed = True
        for on_settled in self._on_settled:
            on_settled(settlement)

    def is_current(self, node: TreeNode) -> bool:
        """False for a node that a reset has forgotten."""
        while node.parent is not None:
            node = node.parent
        return node is self.tree.root

    def reset(self) -> None:
        """Forget every node. Host pages are given back (those in transfer when it ends); device slots are not touched,
        the engine clears its allocator itself."""
        self.epoch += 1
        self.tree = RadixTree(self.codec, len(self.components))
        for component in self.components:
            component.device.clear()
            pages = np.array(component.host.clear(), np.int32)
            if len(pages):
                self.tiers.give_up(component.kind, pages)

    def check_invariants(self) -> None:
        """The tree's, the components' and the tiers' own; raises InvariantError."""
        self.tree.check_invariants()
        for component in self.components:
            component.check_invariants(self.tree.nodes())
        if self._tiers is not None:
            self._tiers.controller.check_invariants()
