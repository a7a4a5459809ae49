"""Whose pages these are: the weights as they were loaded, the config they run with, and who computes with them.

The same weights under another rope base, on another platform, with another attention kernel or another release of the
engine give other pages, so all of it goes into the version. An upgrade therefore starts with an empty L3.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from sgl_jax.srt.mem_cache.hicache.builder import ModelIdentity
from sgl_jax_hicache.who_computes import who_computes

from .array_digest import digest_array

_CONFIG_LEFT_OUT = frozenset({"_name_or_path", "transformers_version"})
_SETTINGS = (
    "dtype",
    "dtype_config",
    "kv_cache_dtype",
    "quantization",
    "quantization_config_path",
    "quantization_param_path",
    "model_impl",
    "attention_backend",
    "moe_backend",
    "gdn_prefill_impl",
    "enable_topk_kernel",
    "enable_sequence_parallel",
    "json_model_override_args",
    "tp_size",
    "dp_size",
    "ep_size",
)
"""Arguments of the engine that change the arithmetic, or the order of its sums."""

_VARIABLES = (
    "SGLANG_JAX_CONV_STATE_DTYPE",
    "SGLANG_JAX_RECURRENT_STATE_DTYPE",
    "DSA_INDEX_TOPK",
    "DSA_PAGE_TOPK",
    "DSA_PREFILL_SPARSE",
    "DSA_INDEXER_KERNEL",
)
"""Variables of the environment that do."""


def model_identity(server_args: Any, model_config: Any, model: Any) -> ModelIdentity:
    """The identity of `model`, an nnx module with its weights loaded. Reads every weight once, on its device."""
    import sgl_jax.version

    parts = [
        weights_digest(model),
        _config_text(model_config.hf_config),
        *(f"{name}={getattr(server_args, name, None)}" for name in _SETTINGS),
        *(f"{name}={os.environ.get(name)}" for name in _VARIABLES),
        who_computes(),
        f"sgl_jax={sgl_jax.version.__version__}",
    ]
    return ModelIdentity(_model_id(server_args), _sha256(parts))


def weights_digest(model: Any) -> str:
    """A hex digest of every tensor's name, shape, dtype and all of its bytes; does not depend on their order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model))
    lines = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {digest_array(leaf).hex()}"
        for path, leaf in leaves
        if isinstance(leaf, jax.Array)
    ]
    return _sha256(sorted(lines))


def _model_id(server_args: Any) -> str:
    """A name for people: the last part of the path, so that the folder may lie elsewhere tomorrow."""
    served, path = str(server_args.served_model_name), str(server_args.model_path)
    return Path(path).name if served == path else served


def _config_text(config: Any) -> str:
    fields = {k: v for k, v in config.to_dict().items() if k not in _CONFIG_LEFT_OUT}
    return json.dumps(fields, sort_keys=True, default=str)


def _sha256(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
