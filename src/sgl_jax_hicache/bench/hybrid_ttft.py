"""Time to the first token with tiny models of every kind: computed, from L2, from L3, at several sizes of L2.

The device holds little more than one prompt, so whoever asks again is served from L2 or L3: the larger L2, the more
often from L2. Prompts come one at a time, when everything that the last one set going has ended.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig, StorageKind
from sgl_jax_hicache.compilation_cache import DEFAULT_FOLDER
from sgl_jax_hicache.engine.engine import Engine
from sgl_jax_hicache.engine.engine_args import EngineArgs
from sgl_jax_hicache.engine.engine_builder import build_engine

from .record import Record, measured

TTFT, TTFT_AGAIN = "hybrid TTFT", "hybrid TTFT, asked again"

PRESETS = {
    "full": "tiny-gqa",
    "swa": "tiny-swa-only",
    "full+swa": "tiny-swa",
    "full+recurrent": "tiny-recurrent",
    "full+swa+recurrent": "tiny-hybrid",
}
"""The tiny model of each kind."""

PAGE_SIZE = 16
_SEED = 0


@dataclass(frozen=True)
class Visits:
    """Prompts of `prompt_tokens`, each asked once, then all again in random order `rounds` times, and once more when
    device and host have been forgotten."""

    num_prompts: int = 8
    prompt_tokens: int = 1024
    rounds: int = 3

    @property
    def device_tokens(self) -> int:
        """Room for one prompt and its answer, and a quarter more."""
        return (self.prompt_tokens * 5 // 4 // PAGE_SIZE + 1) * PAGE_SIZE


@dataclass(frozen=True)
class Visit:
    """One prompt: seconds to its first token, and the tokens by tier."""

    seconds: float
    tokens: dict[str, int]

    @property
    def served_from(self) -> str:
        """Where most of its reused tokens came from; "computed" if there are none."""
        reused = {tier: n for tier, n in self.tokens.items() if tier != "computed" and n}
        return max(reused, key=reused.__getitem__) if reused else "computed"


@dataclass(frozen=True)
class Visited:
    """All visits of one engine: `first` were computed, `again` found what L2's size allows, `last` only files."""

    first: tuple[Visit, ...]
    again: tuple[Visit, ...]
    last: tuple[Visit, ...]

    def seconds(self, served_from: str) -> list[float]:
        """Of the visits that were served from there."""
        visits = (*self.first, *self.again, *self.last)
        return [visit.seconds for visit in visits if visit.served_from == served_from]


def keep_compiled() -> None:
    """Find compiled programs where servers keep them: five models are minutes of compiling. Before jax compiles."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        settings = {
            "jax_compilation_cache_dir": str(DEFAULT_FOLDER.expanduser()),
            "jax_persistent_cache_min_compile_time_secs": 0,
        }
        for name, value in settings.items():
            jax.config.update(name, value)  # type: ignore[no-untyped-call]


def ttft_records(ratios: Sequence[float], visits: Visits) -> Iterator[Record]:
    """Time to the first token of tiny models, from each tier and on the whole; the limit is that of computing."""
    for kind, preset in PRESETS.items():
        for ratio in ratios:
            begun_s = time.perf_counter()
            yield from _records_of(kind, preset, ratio, visits)
            took_s = time.perf_counter() - begun_s
            print(f"TTFT of {preset}, ratio {ratio:g}: {took_s:.0f} s", file=sys.stderr)


def _records_of(kind: str, preset: str, ratio: float, visits: Visits) -> Iterator[Record]:
    visited = visit(preset, ratio, visits)
    computed_ms = [v.seconds * 1e3 for v in visited.first]
    params = {
        "kind": kind,
        "model": preset,
        "hicache_ratio": ratio,
        "prompt_tokens": visits.prompt_tokens,
        "l1_tokens": visits.device_tokens,
    }
    tokens = {tier: sum(v.tokens[tier] for v in visited.again) for tier in visited.again[0].tokens}
    again_ms = [v.seconds * 1e3 for v in visited.again]
    yield measured(TTFT_AGAIN, again_ms, "ms", computed_ms, **params, tokens=tokens)
    for served_from in ("computed", "host", "storage"):
        from_there_ms = [s * 1e3 for s in visited.seconds(served_from)]
        if from_there_ms:
            yield measured(
                TTFT, from_there_ms, "ms", computed_ms, **params, served_from=served_from
            )


def visit(preset: str, ratio: float, visits: Visits, prompts_seed: int = _SEED) -> Visited:
    """Serve the prompts with all three levels and an L2 of `ratio` times the device."""
    rng = np.random.default_rng(prompts_seed)
    prompts = rng.integers(3, 250, (visits.num_prompts, visits.prompt_tokens)).tolist()
    again = np.concatenate([rng.permutation(visits.num_prompts) for _ in range(visits.rounds)])
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        hicache = HiCacheConfig(
            storage=StorageKind.FILE, ratio=ratio, storage_path=Path(folder) / "l3"
        )
        args = EngineArgs(
            model_path=f"random:{preset}:0",
            page_size=PAGE_SIZE,
            max_total_tokens=visits.device_tokens,
            max_running_requests=1,
            hicache=hicache,
        )
        with build_engine(args) as engine:
            first = _ask_all(engine, prompts)
            later = _ask_all(engine, [prompts[i] for i in again])
            if not engine.flush_cache():
                raise RuntimeError("the engine did not come to rest")
            last = _ask_all(engine, prompts)
    return Visited(first, later, last)


def _ask_all(engine: Engine, prompts: Sequence[list[int]]) -> tuple[Visit, ...]:
    return tuple(ask(engine, prompt) for prompt in prompts)


def ask(engine: Engine, prompt: list[int]) -> Visit:
    """One prompt, from its arrival until everything that it set going has ended."""
    info = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})["meta_info"]
    _rest(engine)
    return Visit(info["ttft_s"], dict(info["cached_tokens_details"]))


def _rest(engine: Engine) -> None:
    """Until copies and files are done: a TTFT is to show its own work only."""
    while engine.get_server_info()["state"]["pending_transfers"]:
        time.sleep(0.001)
