"""What HiCache costs a decode step of a server that never hits: pairs of the same work with it on and off.

Two engines with the same model live in one process. In each pair both decode as many fresh random prompts, one engine
after the other, in alternating order. The figures are the mean time of a decode step, and on/off pair by pair: the
machine's slow moments hit both of a pair, so that tells more than the ratio of medians. No prompt comes twice, so every
page is backed up (and, with `file`, written) and none is ever reused.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

from .record import Record, measured


@dataclass(frozen=True)
class Work:
    """What one engine does in one pair."""

    num_requests: int
    prompt_len: int
    num_new_tokens: int

    @property
    def num_common_steps(self) -> int:
        """Steps that all requests take part in: the first run while other prompts are still computed, the last ones
        for fewer requests."""
        return self.num_new_tokens - 2 * self.num_requests


def make_engine(model: str, work: Work, hicache: HiCacheConfig) -> Engine:
    """A pool that holds all requests of one run, and little more."""
    page_size = 16
    per_request = -(-(work.prompt_len + work.num_new_tokens) // page_size) * page_size
    return build_engine(
        EngineArgs(
            model_path=model,
            page_size=page_size,
            max_total_tokens=(work.num_requests + 2) * per_request,
            max_running_requests=work.num_requests,
            hicache=hicache,
        )
    )


def seconds_per_step(engine: Engine, work: Work, rng: np.random.Generator) -> float:
    """Decode fresh prompts side by side; the mean of the steps that all requests took part in."""
    prompts = rng.integers(3, 4000, (work.num_requests, work.prompt_len)).tolist()
    results = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": work.num_new_tokens, "ignore_eos": True},
    )
    if any(result["meta_info"]["cached_tokens"] for result in results):
        raise RuntimeError("a fresh prompt hit the cache")
    steps = engine.decode_step_seconds(work.num_new_tokens)[-work.num_common_steps :]
    return float(np.mean(steps))


def measure(
    model: str, work: Work, storage: StorageKind, num_pairs: int
) -> list[tuple[float, float]]:
    """(on, off) seconds per step of every pair, after one pair that is not counted."""
    pairs = []
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        config = HiCacheConfig(storage=storage, storage_path=Path(folder) / "l3")
        with (
            make_engine(model, work, config) as on,
            make_engine(model, work, HiCacheConfig()) as off,
        ):
            for index in range(num_pairs + 1):
                order = (on, off) if index % 2 else (off, on)
                seconds = {id(engine): seconds_per_step(engine, work, rng) for engine in order}
                if index:
                    pairs.append((seconds[id(on)], seconds[id(off)]))
    return pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--storage", choices=[kind.value for kind in StorageKind], default="file")


def run(args: argparse.Namespace) -> list[Record]:
    """All pairs. Raises ArgumentTypeError if there are no steps that all requests share."""
    work = Work(args.requests, args.prompt_len, args.new_tokens)
    if work.num_common_steps < 1:
        raise argparse.ArgumentTypeError(
            f"--new-tokens must be more than twice --requests, {2 * work.num_requests}"
        )
    pairs = measure(args.model_path, work, StorageKind(args.storage), args.pairs)
    params = {**asdict(work), "storage": args.storage}
    return [
        measured(
            "decode step, HiCache on",
            [on * 1e3 for on, _ in pairs],
            "ms",
            [off * 1e3 for _, off in pairs],
            **params,
        ),
        measured("decode step, on / off", [on / off for on, off in pairs], "ratio", 1.0, **params),
    ]
