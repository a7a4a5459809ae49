"""Time to the first token of the same prompts when they are computed, found in L2 and found in L3.

The device holds one of the longest prompts and little more, so another one of that length pushes everything to L2; what
is asked for after device and host were emptied comes from L3. Prompts come one at a time, when everything that the last
one set going has ended. The limit is computing the prompt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax.srt.mem_cache.hicache.types import Tier
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

from .hybrid_ttft import Visit, ask
from .record import Record, measured

PAGE_SIZE = 16
_VOCABULARY = (3, 250)
"""Token ids that every model has."""


def make_engine(model: str, longest: int, num_prompts: int, folder: Path) -> Engine:
    """All three levels; L2 holds the prompts of one length and the one that takes their place on the device."""
    device_tokens = (longest // PAGE_SIZE + 3) * PAGE_SIZE
    return build_engine(
        EngineArgs(
            model_path=model,
            page_size=PAGE_SIZE,
            max_total_tokens=device_tokens,
            max_running_requests=1,
            hicache=HiCacheConfig(
                storage=StorageKind.FILE, ratio=num_prompts + 2.0, storage_path=folder
            ),
        )
    )


def visits(
    engine: Engine, prompts: Sequence[list[int]], other: list[int], rounds: int
) -> dict[Tier, list[Visit]]:
    """Every prompt computed once, then `rounds` times from L2 and from L3. `other` fills the device.

    Raises RuntimeError if a prompt was not served from where it should be.
    """
    found: dict[Tier, list[Visit]] = {Tier.HOST: [], Tier.STORAGE: []}
    found[Tier.COMPUTED] = [ask(engine, prompt) for prompt in prompts]
    for prompt in [*prompts] * rounds:
        ask(engine, other)
        found[Tier.HOST].append(ask(engine, prompt))
    for _ in range(rounds):
        if not engine.flush_cache():
            raise RuntimeError("the engine did not come to rest")
        found[Tier.STORAGE] += [ask(engine, prompt) for prompt in prompts]
    for tier, made in found.items():
        if wrong := [visit.tokens for visit in made if visit.served_from != tier.value]:
            raise RuntimeError(f"{tier.value} should have served {wrong[0]}")
    return found


def records_of(
    engine: Engine, args: argparse.Namespace, lengths: Sequence[int]
) -> Iterator[Record]:
    """Every length, in one engine."""
    rng = np.random.default_rng(0)
    other = rng.integers(*_VOCABULARY, max(lengths)).tolist()
    for length in lengths:
        prompts = rng.integers(*_VOCABULARY, (args.prompts, length)).tolist()
        found = visits(engine, prompts, other, args.rounds)
        ms = {tier: [visit.seconds * 1e3 for visit in made] for tier, made in found.items()}
        params = {"prompt_tokens": length, "model": args.model_path}
        yield measured("TTFT, computed", ms[Tier.COMPUTED], "ms", **params)
        for tier, level in ((Tier.HOST, "L2"), (Tier.STORAGE, "L3")):
            yield measured(
                f"TTFT, {level} hit",
                ms[tier],
                "ms",
                ms[Tier.COMPUTED],
                **params,
                computed_tokens=length - found[tier][0].tokens[tier.value],
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048], metavar="N")
    parser.add_argument("--prompts", type=int, default=4, help="of each length")
    parser.add_argument("--rounds", type=int, default=3, help="hits of each prompt in each level")


def run(args: argparse.Namespace) -> list[Record]:
    """Every length asked for. Raises ArgumentTypeError for prompts shorter than four pages."""
    if min(args.tokens) < 4 * PAGE_SIZE or args.prompts < 1 or args.rounds < 1:
        raise argparse.ArgumentTypeError(
            f"--tokens must be at least {4 * PAGE_SIZE}, --prompts and --rounds at least 1"
        )
    with (
        tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder,
        make_engine(args.model_path, max(args.tokens), args.prompts, Path(folder) / "l3") as engine,
    ):
        return list(records_of(engine, args, args.tokens))
