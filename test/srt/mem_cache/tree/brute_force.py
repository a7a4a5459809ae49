"""How much of a prompt can be reused, straight from the definition, page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_pools import FULL, STATE, SWA, Mix, encoded
from hybrid_world import HybridWorld

from sgl_jax.srt.mem_cache.hicache.types import ComponentKind

HasPage = Callable[[ComponentKind, int], bool]


def longest_legal_border(mix: Mix, page_size: int, num_tokens: int, has_page: HasPage) -> int:
    """The greatest border within `num_tokens` tokens that every kind of layer can go on from.

    `has_page(kind, page)`: the page (for states: the state after its last token) is there.
    """
    for border in range(num_tokens // page_size * page_size, 0, -page_size):
        pages = border // page_size
        needed = {FULL: range(pages), STATE: range(pages - 1, pages)}
        if mix.window is not None:
            first_seen = max(border - (mix.window - 1), 0)
            needed[SWA] = range(first_seen // page_size, pages)
        if all(has_page(kind, page) for kind in mix.kinds for page in needed[kind]):
            return border
    return 0


class Dictionary:
    """The tree's content as a dictionary: (extra_key, tokens up to the end of a page) -> the kinds it has, by tier."""

    def __init__(self, world: HybridWorld) -> None:
        self._mix, self._page_size = world.settings.mix, world.settings.page_size
        self._device: set[tuple[str | None, bytes, ComponentKind]] = set()
        self._host: set[tuple[str | None, bytes, ComponentKind]] = set()
        page_bytes = 8 * self._page_size
        for node in world.tree.tree.nodes():
            before = b"".join(above.key for above in node.path()[:-1])
            for component in world.tree.components:
                data = component.data(node)
                first = component.first_page_in(node)
                for end in range((first + 1) * page_bytes, len(node.key) + 1, page_bytes):
                    page = (node.namespace.extra_key, before + node.key[:end], component.kind)
                    if data.device_slots is not None:
                        self._device.add(page)
                    if component.host_ready(node):
                        self._host.add(page)

    def usable(self, token_ids: Sequence[int], extra_key: str | None) -> tuple[int, int]:
        """Tokens of a prompt that the device has, and how many more device and host have together."""
        key = encoded(list(token_ids))

        def within(tier: set[tuple[str | None, bytes, ComponentKind]]) -> int:
            def has_page(kind: ComponentKind, page: int) -> bool:
                return (extra_key, key[: 8 * self._page_size * (page + 1)], kind) in tier

            return longest_legal_border(self._mix, self._page_size, len(token_ids), has_page)

        device = within(self._device)
        return device, within(self._device | self._host) - device
