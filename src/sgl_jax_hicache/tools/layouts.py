"""A page's layout in words, from what its file says of it."""

from __future__ import annotations

from sgl_jax.srt.mem_cache.hicache.byte_size import show_bytes
from sgl_jax.srt.mem_cache.hicache.storage.page_info import PageFileInfo
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind

_KINDS = {kind.value for kind in ComponentKind}


def component_of(info: PageFileInfo) -> str | None:
    """The attention kind that a page belongs to; None where the file does not tell (the first format)."""
    parts = info.layout_id.split("|")
    return parts[1] if len(parts) > 1 and parts[1] in _KINDS else None


def shard_of(info: PageFileInfo) -> str | None:
    """Which part of a tensor-parallel page the file holds, as `0/2`; None where it does not tell."""
    for part in info.layout_id.split("|"):
        if part.startswith("shard="):
            return part.removeprefix("shard=")
    return None


def shown_layout(component: str | None, page_size: int, kv_dtype: str, page_bytes: int) -> str:
    """One line: what a page holds and how large it is."""
    what = "one state" if component == ComponentKind.RECURRENT.value else f"{page_size} tokens"
    return f"{component or 'pages'}, {what}, {kv_dtype}, {show_bytes(page_bytes)}"
