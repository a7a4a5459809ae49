"""From settings to a running engine: first everything that can be refused is checked, then the model is loaded."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import jax
from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache import builder as hicache_builder
from sgl_jax.srt.mem_cache.hicache.memory_budget import host_pool_pages
from sgl_jax.srt.mem_cache.hicache.storage.registry import STORAGE_FACTORIES, StorageFactory
from sgl_jax.srt.mem_cache.hicache.storage.root import prepare_root

from .device_pools import DevicePools, build_device_pools
from .engine import Engine, EngineParts
from .engine_args import ArgumentError, EngineArgs
from .engine_metrics import EngineMetrics
from .kv_cache_builder import build_kv_cache, register_kv_cache
from .model_config import ModelConfig, ModelError
from .model_runner import DEFAULT_TILES, ModelRunner
from .pool_budget import read_device_room
from .pool_sizes import PoolSizes, check_device_room, pool_sizes
from .requests import RequestChecker
from .scheduler import Scheduler, SchedulerConfig
from .tree_cache import TreeCache
from .weights import LoadedModel, ModelParams, load_model, read_config

logger = logging.getLogger(__name__)


def check_settings(args: EngineArgs) -> ModelConfig:
    """Everything that can be refused before weights are read; reads the model's config only.

    Raises ArgumentError or HiCacheConfigError, with one line for a person.
    """
    try:
        config = read_config(args.model_path)
    except ModelError as error:
        raise ArgumentError(f"--model-path {args.model_path}: {error}") from error
    _check_context(args, config)
    if args.hicache.has_storage:
        prepare_root(args.hicache.storage_path)
    check_device_room(args, config, _weight_bytes(config), read_device_room())
    if args.hicache.enabled:
        host_pool_pages(
            args.hicache,
            device_pages=args.max_total_tokens // args.page_size,
            page_bytes=args.page_size * config.kv_bytes_per_token(args.dtype),
            engine_bytes=_engine_bytes(args, config),
        )
    return config


def build_engine(
    args: EngineArgs,
    storage_factories: Mapping[str, StorageFactory] = STORAGE_FACTORIES,
    watch: Callable[[TreeCache], TreeCache] = lambda tree: tree,
) -> Engine:
    """Load the model and start the engine. `storage_factories`: the kinds of storage by the name of
    `args.hicache.storage`. `watch` may put something between scheduler and cache, to see their traffic. Raises like
    `check_settings`, and ModelError for broken weights."""
    check_settings(args)
    with _told(f"loading the weights of {args.model_path}"):
        model = load_model(args.model_path)
    context_len = args.context_length or model.config.max_position_embeddings
    sizes = pool_sizes(args, model.config)
    pools = build_device_pools(
        model.config,
        sizes,
        page_size=args.page_size,
        dtype=args.dtype,
        max_running_requests=args.max_running_requests,
        context_len=context_len,
    )
    runner = ModelRunner(
        model.config,
        ModelParams(**jax.device_put(vars(model.params), jax.devices()[0])),
        pools.kv,
        max_running_requests=args.max_running_requests,
        extend_tile_tokens=DEFAULT_TILES,
        max_context_len=context_len,
        recurrent_pool=pools.states,
    )
    registry = CollectorRegistry()
    tree = watch(_build_tree(args, model, sizes, pools, registry, storage_factories))
    scheduler = Scheduler(
        SchedulerConfig(
            args.chunked_prefill_size,
            overlap=not args.disable_overlap_schedule,
            decode_reserve_ratio=args.decode_reserve_ratio,
        ),
        runner,
        tree,
        pools.rows,
        pools.allocator,
        EngineMetrics(registry),
    )
    parts = EngineParts(
        scheduler=scheduler,
        tree=tree,
        tokenizer=model.tokenizer,
        checker=RequestChecker(
            model.tokenizer, context_len, args.max_total_tokens, args.random_seed
        ),
        registry=registry,
        served_model_name=args.served_model_name or model.model_id,
        max_queued_requests=args.max_queued_requests,
        info=_info(args, model, context_len),
    )
    with _told(_preparation()):
        return Engine(parts)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Log what takes a while, before it and after it."""
    logger.info("%s ...", what)
    started_s = time.monotonic()
    yield
    logger.info("%s: %.1f s", what.partition(" (")[0], time.monotonic() - started_s)


def _preparation() -> str:
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    kept = f" (the first start compiles them, later ones find them in {folder})" if folder else ""
    return f"preparing the programs{kept}"


def _tell_without_hicache(args: EngineArgs, config: ModelConfig, sizes: PoolSizes) -> None:
    reuse = "nothing is reused" if args.disable_radix_cache else "prefixes are reused from L1 only"
    also = "".join(
        f", {number} {what}"
        for number, what in (
            (sizes.swa_tokens // args.page_size, "pages of sliding layers"),
            (sizes.states, "recurrent states"),
        )
        if number
    )
    logger.info(
        "HiCache is off (no --hicache-storage): %s. L1 device: %d pages of %d tokens%s, %.2f GiB. "
        "L2 host: none. L3 storage: none.",
        reuse,
        args.max_total_tokens // args.page_size,
        args.page_size,
        also,
        (sizes.kv_bytes(config, args.page_size, args.dtype) + sizes.state_bytes(config)) / 2**30,
    )


def _check_context(args: EngineArgs, config: ModelConfig) -> None:
    longest = config.max_position_embeddings
    if args.context_length is not None and args.context_length > longest:
        raise ArgumentError(
            f"--context-length {args.context_length}: {args.model_path} was made for {longest} tokens; "
            f"use {longest} or less"
        )


def _engine_bytes(args: EngineArgs, config: ModelConfig) -> int:
    """Host memory that the engine itself will take: on CPU the weights and the device pool."""
    if jax.default_backend() != "cpu":
        return 0
    sizes = pool_sizes(args, config)
    kv_bytes = sizes.kv_bytes(config, args.page_size, args.dtype)
    return _weight_bytes(config) + kv_bytes + sizes.state_bytes(config)


def _weight_bytes(config: ModelConfig) -> int:
    """Memory of the weights, as float32; an estimate from the config alone."""
    attention = 4 * config.hidden_size * config.num_attention_heads * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    values = config.num_layers * (attention + mlp) + 2 * config.vocab_size * config.hidden_size
    return values * 4


def _build_tree(
    args: EngineArgs,
    model: LoadedModel,
    sizes: PoolSizes,
    pools: DevicePools,
    registry: CollectorRegistry,
    storage_factories: Mapping[str, StorageFactory],
) -> Any:
    if not args.hicache.enabled:
        _tell_without_hicache(args, model.config, sizes)
    hicache_builder.register(register_kv_cache)
    return build_kv_cache(
        hicache_builder.UNIFIED_RADIX_CACHE,
        config=args.hicache,
        req_to_token_pool=pools.rows,
        token_to_kv_pool_allocator=pools.allocator,
        page_size=args.page_size,
        model_identity=hicache_builder.ModelIdentity(model.model_id, model.model_version),
        disable=args.disable_radix_cache,
        registry=registry,
        storage_factories=storage_factories,
        **_hybrid_parts(model.config, pools),
    )


def _hybrid_parts(config: ModelConfig, pools: DevicePools) -> dict[str, Any]:
    """What the cache must know of layers that do not attend to the whole past; nothing for models without them."""
    parts: dict[str, Any] = {}
    if config.sliding_window is not None:
        parts["sliding_window_size"] = config.sliding_window
    if pools.states is not None:
        parts["recurrent_state_pool"] = pools.states
    return parts


def _info(args: EngineArgs, model: LoadedModel, context_len: int) -> dict[str, Any]:
    """What /get_server_info shows; no secrets."""
    settings = asdict(replace(args, api_key=None))
    settings.pop("api_key")
    settings["hicache"] = {
        name: getattr(value, "value", value)
        if not hasattr(value, "__fspath__")
        else os.fspath(value)
        for name, value in settings["hicache"].items()
    }
    return {
        "engine": "embedded",
        "jax_version": metadata.version("jax"),
        "settings": settings,
        "model": {
            "id": model.model_id,
            "version": model.model_version,
            "context_length": context_len,
            "vocab_size": model.tokenizer.vocab_size,
            "num_layers": model.config.num_layers,
            "kv_bytes_per_token": model.config.kv_bytes_per_token(args.dtype),
            "sliding_window": model.config.sliding_window,
            "state_bytes_per_request": model.config.state_bytes_per_request(),
        },
        "platform": jax.default_backend(),
    }
