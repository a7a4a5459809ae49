"""`size`: how large the levels are for a model and a machine, or have to be.

From the model's config.json: bytes of a token by kind of layer, what fits into device memory (L1), what host memory a
--hicache-ratio takes (L2) or which ratio fits into --host, and what the files take (L3).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_jax.srt.mem_cache.hicache.byte_size import parse_bytes, show_bytes
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.model_config import ModelError
from sgl_jax_hicache.engine.model_spec import PRESET_NAMES, SMOLLM2

from .errors import ToolError
from .kv_shape import HeadsKV, KVShape, LatentKV, shape_of_file, shape_of_model
from .report import Report
from .sizing import DTYPE_BYTES, ENGINES, Demand, Sizing, size_levels

_NAMES = {
    ComponentKind.FULL: "full attention",
    ComponentKind.SWA: "sliding windows",
    ComponentKind.RECURRENT: "recurrent states",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `size`."""
    add = parser.add_argument
    add(
        "--model-path",
        required=True,
        metavar="MODEL",
        help=f"a folder with config.json, a config.json, a .gguf file, {SMOLLM2} or one of {', '.join(PRESET_NAMES)}",
    )
    add("--hbm", required=True, metavar="BYTES", help="memory of one device, as 32GiB")
    add(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="devices of the tensor-parallel group (default 1)",
    )
    add(
        "--weights",
        metavar="BYTES",
        help="size of the weights in all; default: the files beside config.json",
    )
    add(
        "--mem-fraction",
        type=float,
        default=0.9,
        metavar="FLOAT",
        help="share of device memory for weights and cache; the rest is for computing (default 0.9)",
    )
    add("--page-size", type=int, default=64, metavar="TOKENS", help="tokens of a page (default 64)")
    add(
        "--kv-dtype",
        choices=sorted(DTYPE_BYTES),
        default=None,
        help="default bfloat16; presets: float32",
    )
    add(
        "--hicache-ratio",
        type=float,
        default=None,
        metavar="FLOAT",
        help="L2 as a multiple of L1 (default 2.0)",
    )
    add("--host", metavar="BYTES", help="host memory for L2; gives the ratio instead of taking it")
    add("--storage", metavar="BYTES", help="room for the files, to see how many tokens they hold")
    add(
        "--context",
        type=int,
        metavar="TOKENS",
        help="length of a prompt (default: the longest, at most 32768)",
    )
    add(
        "--max-running",
        type=int,
        default=16,
        metavar="N",
        help="requests at once (default 16); recurrent models",
    )
    add(
        "--max-recurrent-states",
        type=int,
        metavar="N",
        help="states the cache holds in L1 (default 4 a request)",
    )
    add(
        "--swa-full-tokens-ratio",
        type=float,
        default=0.8,
        metavar="FLOAT",
        help="default 0.8; sliding windows",
    )
    add(
        "--hicache-checkpoint-interval",
        type=int,
        metavar="TOKENS",
        help="default: chosen from the model",
    )
    add(
        "--engine",
        choices=sorted(ENGINES),
        default=None,
        help="whose layout (default sgl-jax; presets: embedded)",
    )


def run(args: argparse.Namespace) -> Report:
    """Do the sums."""
    shape, weight_bytes, is_own = _model(args)
    engine = args.engine or ("embedded" if is_own else "sgl-jax")
    demand = _demand(args, weight_bytes, args.kv_dtype or ("float32" if is_own else "bfloat16"))
    sizing = size_levels(shape, ENGINES[engine], demand)
    if args.host is not None:
        demand = replace(demand, ratio=_fitting_ratio(sizing, _bytes("--host", args.host)))
        sizing = size_levels(shape, ENGINES[engine], demand)
    context = args.context or min(shape.max_tokens or 32_768, 32_768)
    storage_bytes = None if args.storage is None else _bytes("--storage", args.storage)
    report = Report(_facts(shape, sizing, demand, engine, weight_bytes, context, storage_bytes))
    _show(report, shape)
    return report


def _model(args: argparse.Namespace) -> tuple[KVShape, int | None, bool]:
    """(what it keeps, bytes of its weights if known, whether only the embedded engine serves it)."""
    weight_bytes = None if args.weights is None else _bytes("--weights", args.weights)
    name = str(args.model_path)
    try:
        if name in PRESET_NAMES:
            from sgl_jax_hicache.engine.weights.random_weights import preset_config

            return shape_of_model(preset_config(name)), weight_bytes, True
        path = Path(name).expanduser()
        if name == SMOLLM2 or path.suffix == ".gguf":
            from sgl_jax_hicache.engine.weights.gguf_file import GGUFFile
            from sgl_jax_hicache.engine.weights.smollm2 import smollm2_path

            path = smollm2_path() if name == SMOLLM2 else path
            return shape_of_model(GGUFFile(path).config), weight_bytes, True
    except (ModelError, OSError) as error:
        raise ToolError(f"--model-path {name}: {error}") from error
    if path.is_dir():
        if weight_bytes is None:
            weight_bytes = sum(f.stat().st_size for f in path.glob("*.safetensors")) or None
        path = path / "config.json"
    if not path.is_file():
        raise ToolError(
            f"--model-path {name}: no such model; give a folder with config.json, a config.json, a .gguf file, "
            f"{SMOLLM2} or one of {', '.join(PRESET_NAMES)}"
        )
    return shape_of_file(path), weight_bytes, False


def _demand(args: argparse.Namespace, weight_bytes: int | None, kv_dtype: str) -> Demand:
    for option in ("devices", "page_size", "max_running"):
        _require(option, getattr(args, option) >= 1, "1 or more")
    _require("mem_fraction", 0 < args.mem_fraction <= 1, "more than 0 and at most 1")
    _require(
        "swa_full_tokens_ratio", 0 < args.swa_full_tokens_ratio <= 1, "more than 0 and at most 1"
    )
    _require("context", args.context is None or args.context >= 1, "1 or more")
    ratio = 2.0 if args.hicache_ratio is None else args.hicache_ratio
    _require("hicache_ratio", math.isfinite(ratio) and ratio > 0, "a finite number greater than 0")
    if args.host is not None and args.hicache_ratio is not None:
        raise ToolError("give --host or --hicache-ratio, not both")
    interval = args.hicache_checkpoint_interval
    _require(
        "hicache_checkpoint_interval",
        interval is None or (interval > 0 and interval % args.page_size == 0),
        f"a multiple of the page size, {args.page_size}",
    )
    kept = args.max_recurrent_states
    _require("max_recurrent_states", kept is None or kept >= 4, "4 or more")
    usable = int(_bytes("--hbm", args.hbm) * args.devices * args.mem_fraction)
    return Demand(
        cache_bytes=usable - (weight_bytes or 0),
        page_size=args.page_size,
        kv_bytes=DTYPE_BYTES[kv_dtype],
        num_devices=args.devices,
        ratio=ratio,
        swa_ratio=args.swa_full_tokens_ratio,
        max_running=args.max_running,
        kept_states=4 * args.max_running if kept is None else kept,
        interval=interval,
    )


def _require(option: str, holds: bool, allowed: str) -> None:
    if not holds:
        raise ToolError(f"--{option.replace('_', '-')}: not allowed; give {allowed}")


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ToolError(f"{option} {error}") from error


def _fitting_ratio(sizing: Sizing, host_bytes: int) -> float:
    """The largest ratio, to three digits, whose host pools fit."""
    device_units = max(sizing.device.num_bytes // sizing.unit_bytes, 1)
    ratio = math.floor(host_bytes / sizing.unit_bytes / device_units * 1000) / 1000
    if ratio <= 0:
        raise ToolError(f"--host {host_bytes}: not even a thousandth of L1 fits")
    return ratio


def _facts(
    shape: KVShape,
    sizing: Sizing,
    demand: Demand,
    engine: str,
    weight_bytes: int | None,
    context: int,
    storage_bytes: int | None,
) -> dict[str, Any]:
    def level(pages: dict[ComponentKind, int], num_bytes: int, tokens: int) -> dict[str, Any]:
        return {
            "pages": {kind.value: count for kind, count in pages.items()},
            "bytes": num_bytes,
            "tokens": tokens,
            "prompts": tokens / context,
        }

    per_token = sizing.file_bytes_per_token
    page_size = demand.page_size
    return {
        "engine": engine,
        "page_size": page_size,
        "context": context,
        "weight_bytes": weight_bytes,
        "cache_bytes": demand.cache_bytes,
        "hicache_ratio": demand.ratio,
        "components": {
            kind.value: {
                "page_bytes": num_bytes,
                "bytes_per_token": None
                if kind is ComponentKind.RECURRENT
                else num_bytes / page_size,
            }
            for kind, num_bytes in sizing.page_bytes.items()
        },
        "window": shape.window,
        "checkpoint_interval": sizing.checkpoints.interval if len(sizing.page_bytes) > 1 else None,
        "request_states": sizing.request_states,
        "l1": level(sizing.device.pages, sizing.device.num_bytes, sizing.device.tokens),
        "l2": level(sizing.host.pages, sizing.host.num_bytes, sizing.host.tokens)
        | {"bytes_per_token": sizing.host_bytes_per_token},
        "l3": {
            "bytes_per_token": per_token,
            "bytes_per_prompt": math.ceil(per_token * context),
            "max_bytes": storage_bytes,
            "tokens": None if storage_bytes is None else int(storage_bytes / per_token),
            "prompts": None if storage_bytes is None else storage_bytes / per_token / context,
        },
    }


def _show(report: Report, shape: KVShape) -> None:
    facts = report.data
    report.table(
        ["component", "layers", ">a token", ">a page (state)", ">L1 pages", ">L2 pages"],
        [
            [
                _NAMES[kind],
                _layers(shape, kind),
                _per_token(component["bytes_per_token"]),
                show_bytes(component["page_bytes"]),
                f"{facts['l1']['pages'][kind.value]:,}",
                f"{facts['l2']['pages'][kind.value]:,}",
            ]
            for kind in ComponentKind
            if (component := facts["components"].get(kind.value))
        ],
    )
    context, storage = facts["context"], facts["l3"]
    rows = [
        ["L1 device", *_level(facts["l1"])],
        [f"L2 host, ratio {facts['hicache_ratio']:g}", *_level(facts["l2"])],
    ]
    if storage["max_bytes"] is not None:
        rows.append(
            [
                "L3 files",
                show_bytes(storage["max_bytes"]),
                f"{storage['tokens']:,}",
                f"{storage['prompts']:,.1f}",
            ]
        )
    report.table(["level", ">bytes", ">tokens", f">prompts of {context:,}"], rows)
    weights = facts["weight_bytes"]
    if weights is None:
        report.line("The weights' size is not known and was taken as 0: give --weights.")
    else:
        report.line(
            f"Weights: {show_bytes(weights)}. For the cache: {show_bytes(facts['cache_bytes'])}."
        )
    report.line(
        f"In files a token takes {storage['bytes_per_token']:,.0f} bytes, a prompt of {context:,} tokens "
        f"{show_bytes(storage['bytes_per_prompt'])}."
    )
    if facts["checkpoint_interval"] is not None:
        report.line(
            f"Windows and states are kept every {facts['checkpoint_interval']:,} tokens on host and in files."
        )
    if facts["request_states"]:
        report.line(
            f"Of the states in L1 {facts['request_states']} belong to running requests, the others to the cache."
        )


def _layers(shape: KVShape, kind: ComponentKind) -> str:
    if kind is ComponentKind.RECURRENT:
        return "" if shape.state is None else f"{shape.state.num_layers}"
    kv = shape.full if kind is ComponentKind.FULL else shape.sliding
    if isinstance(kv, LatentKV):
        return f"{kv.num_layers} MLA, latent {kv.latent_dim} + {kv.rope_dim}"
    if isinstance(kv, HeadsKV):
        window = f", window {shape.window:,}" if kind is ComponentKind.SWA else ""
        return f"{kv.num_layers}, {kv.num_kv_heads} KV heads of {kv.head_dim}{window}"
    return "none: names only"


def _per_token(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes:,.0f} B"


def _level(level: dict[str, Any]) -> tuple[str, str, str]:
    return show_bytes(level["bytes"]), f"{level['tokens']:,}", f"{level['prompts']:,.1f}"
