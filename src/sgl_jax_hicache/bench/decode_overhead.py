"""What HiCache costs a decode step of a server that never hits: pairs of the same work with it on and off.

    python -m sgl_jax_hicache.bench.decode_overhead [--json FILE] [--pairs N] [--storage none|file]

Two engines with the same model live in one process. In each pair both decode as many fresh random prompts, one engine
after the other, in alternating order; the figure is the ratio on/off of the mean seconds of a decode step, pair by
pair. No prompt comes twice, so every page is backed up (and, with `file`, written) and none is ever reused.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sgl_jax_hicache import overlay

overlay.activate()

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind  # noqa: E402
from sgl_jax_hicache.engine.engine import Engine  # noqa: E402
from sgl_jax_hicache.engine.engine_args import EngineArgs  # noqa: E402
from sgl_jax_hicache.engine.engine_builder import build_engine  # noqa: E402
from sgl_jax_hicache.provenance import commit, machine  # noqa: E402


@dataclass(frozen=True)
class Work:
    """What one engine does in one pair."""

    num_requests: int
    prompt_len: int
    num_new_tokens: int


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
    # The first steps run while the other prompts are still computed, the last ones for fewer requests.
    common = work.num_new_tokens - 2 * work.num_requests
    return float(np.mean(engine.decode_step_seconds(work.num_new_tokens)[-common:]))


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


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--storage", choices=[kind.value for kind in StorageKind], default="file")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write JSON if asked."""
    args = parse_args(argv)
    work = Work(args.requests, args.prompt_len, args.new_tokens)
    pairs = measure(args.model_path, work, StorageKind(args.storage), args.pairs)
    ratios = np.array([on / off for on, off in pairs])
    on_ms, off_ms = np.median(np.array(pairs), axis=0) * 1e3
    print(f"command   python -m sgl_jax_hicache.bench.decode_overhead {shlex.join(argv)}")
    print(f"machine   {machine()}")
    print(f"commit    {commit()}")
    print(f"work      {work}")
    print(f"decode step, median: on {on_ms:.2f} ms, off {off_ms:.2f} ms")
    print(
        f"ratio on/off over {len(ratios)} pairs: median {np.median(ratios):.4f}, "
        f"P90 {np.percentile(ratios, 90):.4f}, min {ratios.min():.4f}, max {ratios.max():.4f}"
    )
    if args.json:
        record = {
            "name": "decode_step_on_off",
            "value": float(np.median(ratios)),
            "unit": "ratio",
            "limit": 1.02,
            "ratio": float(np.median(ratios)) / 1.02,
            "samples": ratios.tolist(),
            "params": {
                **asdict(work),
                "storage": args.storage,
                "machine": machine(),
                "commit": commit(),
            },
        }
        args.json.write_text(json.dumps([record], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
