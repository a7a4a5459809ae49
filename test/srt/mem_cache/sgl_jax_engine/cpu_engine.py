"""Makes the engine right on CPU, for tests; every process of the engine runs this file first (`--sgl-jax-preload`).

Nothing of it is about the cache. The engine's CPU attention is replaced, `--load-format dummy` gives random weights in
place of zeros (with which every answer is token 0, and every comparison holds), and a step gets a table of its own.
"""

from __future__ import annotations

import zlib
from typing import Any

import cpu_attention
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sgl_jax.srt.layers.attention import native_backend
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.models import qwen3_5
from sgl_jax.srt.utils.weight_utils import WeightLoader


def random_weights(loader: Any, params: Any, weight_mappings: Any, seed: int = 1234) -> None:
    """What `--load-format dummy` loads: values that depend on a parameter's name alone, with its sharding."""
    fill_with_zeros(loader, params, weight_mappings, seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(nnx.state(loader.model))
    filled = [_random(jax.tree_util.keystr(path).lower(), leaf) for path, leaf in leaves]
    nnx.update(loader.model, jax.tree_util.tree_unflatten(structure, filled))


def _random(name: str, leaf: Any) -> Any:
    if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)):
        return leaf
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = _scaled(name, rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: values[index])


def _scaled(name: str, normal: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Such that activations neither vanish nor grow, states decay, and answers differ from token to token."""
    if "a_log" in name:
        return np.log1p(np.abs(normal))
    if "bias" in name:
        return 0.05 * normal
    if normal.ndim < 2 or "norm" in name:
        return 1 + 0.05 * normal
    if "embed_tokens" in name:
        return 0.05 * normal  # where it is the head too, a large one only repeats the last token
    if "embed" in name or "head" in name or "conv1d" in name:
        return 0.4 * normal
    return normal / np.sqrt(normal.shape[-2], dtype=np.float32)


def no_files_of_dummy_weights(loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Qwen3.5 looks for its files with `--load-format dummy` too."""
    return {} if loader.dummy_mode else scan_files(loader, *args, **kwargs)


def table_of_its_own(batch: Any, *args: Any, **kwargs: Any) -> Any:
    """On CPU a device array may lie in the numpy buffer that it came from, which the engine fills anew for the next
    step while, with overlap, this one still reads it."""
    return merge_cache_loc(batch, *args, **kwargs).copy()


fill_with_zeros = WeightLoader._load_dummy_weights
scan_files = WeightLoader._scan_weight_info
merge_cache_loc = ScheduleBatch._merge_cache_loc

native_backend.NativeAttention = cpu_attention.CpuAttention
WeightLoader._load_dummy_weights = random_weights
WeightLoader._scan_weight_info = no_files_of_dummy_weights
ScheduleBatch._merge_cache_loc = table_of_its_own
for model in qwen3_5.EntryClass:
    model._load_gdn_layer = model._load_moe_gate_up = lambda *args, **kwargs: None
