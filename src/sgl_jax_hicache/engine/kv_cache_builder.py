"""Prefix caches by name: the engine asks for one, whoever implements it registers a factory.

A factory takes the engine's objects as keyword arguments and returns a ready cache. Registering a name again replaces
the factory, so that importing an extension twice does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

KVCacheFactory = Callable[..., Any]


class KVCacheRegistry:
    """Name -> factory."""

    def __init__(self) -> None:
        self._factories: dict[str, KVCacheFactory] = {}

    def register(self, name: str, factory: KVCacheFactory) -> None:
        """Make `factory` the maker of caches called `name`."""
        self._factories[name] = factory

    def build(self, name: str, **engine_objects: Any) -> Any:
        """A new cache. Raises KeyError, naming what there is, for an unknown name."""
        if name not in self._factories:
            known = ", ".join(sorted(self._factories)) or "none"
            raise KeyError(f"no kv cache is registered as {name!r}; registered: {known}")
        return self._factories[name](**engine_objects)


_REGISTRY = KVCacheRegistry()


def register_kv_cache(name: str, factory: KVCacheFactory) -> None:
    """Register with the process's table of caches."""
    _REGISTRY.register(name, factory)


def build_kv_cache(name: str, **engine_objects: Any) -> Any:
    """Build a registered cache by name."""
    return _REGISTRY.build(name, **engine_objects)
