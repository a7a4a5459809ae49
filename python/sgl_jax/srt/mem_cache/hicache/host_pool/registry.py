"""The schemes by name, as chosen by configuration."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import HiCacheConfigError
from ..types import PageLayout
from .base import HostArrays, HostKVPool
from .per_block import PerBlockHostPool
from .slab import SlabHostPool

HOST_POOL_SCHEMES: dict[str, Callable[[int, PageLayout, HostArrays], HostKVPool]] = {
    "per_block": PerBlockHostPool,
    "slab": SlabHostPool,
}


def create_host_pool(
    scheme: str, num_pages: int, layout: PageLayout, arrays: HostArrays
) -> HostKVPool:
    """Build the pool of a scheme; HiCacheConfigError names the known ones."""
    constructor = HOST_POOL_SCHEMES.get(scheme)
    if constructor is None:
        raise HiCacheConfigError(
            f"unknown host pool scheme {scheme!r}; known: {', '.join(sorted(HOST_POOL_SCHEMES))}"
        )
    return constructor(num_pages, layout, arrays)
