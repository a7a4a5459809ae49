"""Replay of hybrid kinds: proportions and bytes as promised, hits at the last checkpoint, broken content found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.host_split import choose_interval
from sgl_jax.srt.mem_cache.hicache.types import BufferLayout, ComponentKind, PageLayout
from sgl_jax_hicache.bench.__main__ import main
from sgl_jax_hicache.bench.hybrid import DEFAULT_CONVERSATIONS
from sgl_jax_hicache.bench.hybrid_hits import every_nth_conversation, unbounded_records
from sgl_jax_hicache.bench.hybrid_models import (
    FULL,
    HYBRIDS,
    WORD_BYTES,
    HybridModel,
    delta_state_bytes,
)
from sgl_jax_hicache.bench.hybrid_pools import (
    chosen_interval,
    device_sizes,
    layouts_of,
    tokens_in_same_bytes,
    window_pages,
)
from sgl_jax_hicache.bench.hybrid_replay import HybridEngine, Memory, replay_hybrid
from sgl_jax_hicache.bench.record import Record, read_json, write_json
from sgl_jax_hicache.bench.replay_engine import ReplayError
from sgl_jax_hicache.bench.trace import TraceRequest, read_trace

SWA_ONLY = HybridModel("swa only", "a test", sliding_layers=2, sliding_token_bytes=64, window=700)
SWA = HybridModel("swa", "a test", 1, 64, sliding_layers=2, sliding_token_bytes=64, window=700)
STATES = HybridModel("states", "a test", 1, 64, recurrent_layers=3, state_bytes=40_000)
ALL = HybridModel(
    "all",
    "a test",
    1,
    64,
    sliding_layers=1,
    sliding_token_bytes=64,
    window=700,
    recurrent_layers=2,
    state_bytes=40_000,
)
KINDS = (SWA_ONLY, SWA, STATES, ALL)
INTERVAL = 2048  # four blocks


def requests(*prompts: range) -> list[TraceRequest]:
    """Prompts of blocks; a block's id names all that comes before it too."""
    return [TraceRequest(i, tuple(prompt)) for i, prompt in enumerate(prompts)]


TALK = requests(range(10), range(12), range(100, 130), range(200, 230), range(13))
"""A conversation, two long prompts that push it out of a device of 32 blocks, and its next turn."""


def memory(l3_blocks: int | None = None, ratio: float = 4.0) -> Memory:
    return Memory(32, ratio, l3_blocks, INTERVAL, chunk_tokens=4096)


def blocks(model: HybridModel, prompts: list[TraceRequest], given: Memory) -> list[tuple[int, ...]]:
    """Of each prompt, blocks from device, host and storage."""
    tiers = replay_hybrid(prompts, model, given).tiers
    return [(t.device // 512, t.host // 512, t.storage // 512) for t in tiers]


@pytest.mark.parametrize("model", HYBRIDS, ids=lambda model: model.name)
@pytest.mark.parametrize("page_size", [128, 512])
def test_small_pages_have_the_proportions_of_the_model(model: HybridModel, page_size: int) -> None:
    name_bytes = 0 if model.full_layers else 1
    true = {
        ComponentKind.FULL: model.full_layers * model.full_token_bytes * page_size + name_bytes,
        ComponentKind.SWA: model.sliding_layers * model.sliding_token_bytes * page_size,
        ComponentKind.RECURRENT: model.recurrent_layers * model.state_bytes,
    }
    small = layouts_of(model, page_size)
    assert small[ComponentKind.FULL].page_bytes == page_size * bool(model.full_layers) + name_bytes
    largest = max(true, key=true.__getitem__)
    for kind, num_bytes in true.items():
        if num_bytes > 1:
            share = small[kind].page_bytes / small[largest].page_bytes
            assert share == pytest.approx(num_bytes / true[largest], rel=0.01)
    real = {
        kind: PageLayout(kind, page_size, (BufferLayout("all", (n,), "uint8", n),))
        for kind, n in true.items()
        if n
    }
    chosen = choose_interval(real, page_size, window_pages(model, page_size))
    assert chosen_interval(model, page_size) == chosen


def test_the_published_numbers() -> None:
    """A token of Qwen3-Next: 24 KiB; its state: 2 MiB and 48 KiB of convolution in each of 36 layers."""
    qwen = next(model for model in HYBRIDS if "GDN" in model.name)
    assert qwen.full_layers * qwen.full_token_bytes == 24 * 1024
    assert qwen.state_bytes == (2 << 20) + 8192 * 3 * 2 == delta_state_bytes(32, 16, 128, 128, 4)
    kimi = next(model for model in HYBRIDS if "KDA" in model.name)
    assert kimi.full_layers * kimi.full_token_bytes == 7 * 576 * 2
    assert all(model.about for model in HYBRIDS)


def test_tokens_in_the_same_bytes() -> None:
    """Of ALL a page of 512 tokens takes 1 x 64 x 512 bytes full and as much sliding; if all layers were full 4 times
    that. At 4,096 tokens, 2 of 8 pages lie in windows, and 2 x 40,000 bytes of states come with them, a quarter more
    of both."""
    full_page = 64 * 512
    expected = 4 * full_page / (full_page + 1.25 * (2 * full_page + 2 * 40_000) / 8)
    assert tokens_in_same_bytes(ALL, 512, 4096) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.name)
def test_every_level_takes_the_bytes_it_may_and_no_more(model: HybridModel) -> None:
    given = memory(l3_blocks=64, ratio=2.0)
    engine = HybridEngine(model, given, 40 * 512)
    words = model.words(given.page_size)
    device = given.l1_blocks * given.block_bytes(model)
    # A page with its share of windows and states is less than three pages and states of all kinds.
    unit = 3 * WORD_BYTES * (words.full + words.sliding + words.state)
    assert device - unit <= engine.sizes.num_bytes(words) <= device
    for request in TALK:
        engine.serve(request)
    host = engine.host_bytes
    assert 2 * device - 3 * unit <= host <= 2 * device
    assert engine.folder.most_bytes <= given.l3_blocks * given.block_bytes(model)
    engine.close()


@pytest.mark.parametrize(
    ("model", "turns"),
    [
        (FULL, ((0, 0), (10, 0), (0, 0), (0, 0), (0, 12))),
        # The end of a prompt keeps its window: the next turn goes on there.
        (SWA, ((0, 0), (10, 0), (0, 0), (0, 0), (0, 12))),
        (SWA_ONLY, ((0, 0), (10, 0), (0, 0), (0, 0), (0, 12))),
        # States are kept at every fourth block only.
        (STATES, ((0, 0), (8, 0), (0, 0), (0, 0), (0, 12))),
        (ALL, ((0, 0), (8, 0), (0, 0), (0, 0), (0, 12))),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_turn_goes_on_at_the_last_checkpoint(
    model: HybridModel, turns: tuple[tuple[int, int], ...]
) -> None:
    found = blocks(model, TALK, memory())
    assert [(device, host) for device, host, _ in found] == list(turns)


@pytest.mark.parametrize("model", [FULL, ALL], ids=lambda model: model.name)
def test_a_long_prompt_in_chunks_copies_no_page_more_than_twice(model: HybridModel) -> None:
    """The host is full of it: what made room is copied again when it leaves the device, not with every chunk."""
    given = Memory(32, 0.5, None, INTERVAL, chunk_tokens=1024)
    engine = HybridEngine(model, given, 40 * 512)
    for prompt in requests(range(32), range(100, 132), range(200, 232)):
        engine.serve(prompt)
    copied = engine.metric("transfer_pages_total", kind="backup", component="full", outcome="ok")
    assert 3 * 16 < copied <= 2 * 3 * 32
    engine.close()


@pytest.mark.parametrize("model", KINDS, ids=lambda model: model.name)
def test_storage_serves_what_the_host_forgot(model: HybridModel) -> None:
    prompts = requests(range(12), *(range(n, n + 30) for n in range(100, 1000, 100)), range(13))
    given = memory(l3_blocks=0, ratio=0.5)
    first, second = (blocks(model, prompts, given) for _ in range(2))
    assert first == second
    assert first[-1] == (0, 0, 12)


def test_a_bound_on_storage_is_kept_and_shortens_hits() -> None:
    prompts = requests(range(12), *(range(n, n + 30) for n in range(100, 1000, 100)), range(13))
    assert blocks(FULL, prompts, memory(l3_blocks=60, ratio=0.5))[-1] == (0, 0, 0)


@pytest.mark.parametrize(
    ("model", "spoil"),
    [
        (STATES, lambda pools: pools.full.write(np.arange(1, 9, dtype=np.int32), _wrong(8))),
        (SWA, lambda pools: pools.sliding.write(np.arange(1, 21, dtype=np.int32), _wrong(20))),
        (STATES, lambda pools: [pools.states.write(slot, 3.0) for slot in range(1, 6)]),
    ],
    ids=["full", "sliding", "state"],
)
def test_a_reused_part_with_another_content_is_found(
    model: HybridModel, spoil: Callable[[object], object]
) -> None:
    engine = HybridEngine(model, memory(), 40 * 512)
    prompt, again = requests(range(12), range(13))
    engine.serve(prompt)
    assert engine.serve(prompt).device == {SWA: 11, STATES: 8}[model] * 512
    spoil(engine.pools)
    with pytest.raises(ReplayError, match="another content"):
        engine.serve(again)
    engine.close()


def _wrong(num_pages: int) -> np.ndarray:
    return np.full(num_pages, 3.0, np.float32)


def test_memory_that_is_too_small_is_said() -> None:
    with pytest.raises(ReplayError, match="does not fit the device"):
        replay_hybrid(requests(range(40)), FULL, memory())
    with pytest.raises(ReplayError, match="do not hold one page"):
        device_sizes(ALL, 512, 4096, 1000)
    with pytest.raises(ReplayError, match="do not divide"):
        replay_hybrid(TALK, SWA, Memory(32, 1.0, page_size=384))


def test_the_cut_keeps_how_often_prompts_come_back() -> None:
    cut = read_trace(DEFAULT_CONVERSATIONS)
    assert len(cut) == 254
    seen: set[int] = set()
    hits = 0
    for request in cut:
        hits += sum(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    assert hits / sum(len(r.hash_ids) for r in cut) == pytest.approx(0.66, abs=0.005)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--trace", "/nowhere"], "cannot be read"),
        (["--models", "nobody"], "none of"),
        (["--ratios", "0"], "above 0"),
        (["--intervals", "0"], "above 0"),
        (["--every", "0"], "at least 1"),
        (["--parts", "ttft", "--prompts", "0"], "above 0"),
        (["--parts", "intervals", "--requests", "2", "--intervals", "700"], "multiple of the page"),
        (["--l3", "tape"], "invalid choice"),
        (["--from", "/nowhere"], "no records"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["hybrid", *argv])
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_short_run_prints_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": {r.arrival_ms}, "hash_ids": {list(r.hash_ids)}}}' for r in TALK]
    trace.write_text("\n".join(lines))
    out, records = tmp_path / "docs", tmp_path / "records.json"
    argv = ["hybrid", "--trace", str(trace), "--every", "1", "--models", "GDN"]
    sizes = ["--l1-blocks", "40", "--l3-blocks", "200", "--intervals", "1024", "--ratios", "2"]
    parts = ["--parts", "hits", "intervals"]
    assert main([*argv, *sizes, *parts, "--output-dir", str(out), "--json", str(records)]) == 0
    printed = capsys.readouterr()
    assert "hybrid hit tokens" in printed.out
    assert printed.err.count("full+recurrent, GDN, ratio 2") == 2  # each interval once
    text = (out / "hybrid_bench.md").read_text()
    assert "| 2 | full |" in text
    assert "| 2 | full+recurrent, GDN | 2048 |" in text
    assert "hit tokens with the same bytes: met" in text
    kept, written = read_json(out / "hybrid_bench.json"), read_json(records)
    assert [(r.name, r.value, r.limit) for r in kept] == [
        (r.name, r.value, r.limit) for r in written
    ]
    assert str(tmp_path) not in (out / "hybrid_bench.json").read_text().replace(str(trace), "")
    for name in ("hybrid-ratio.png", "hybrid-interval.png"):
        assert f"({name})" in text
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again"
    assert main(["hybrid", "--from", str(records), "--output-dir", str(again)]) == 0
    assert (again / "hybrid_bench.md").read_text() == text
    # What is measured anew takes the place of what was read.
    anew = [*argv, *sizes, "--ratios", "4", "--parts", "hits", "--from", str(records)]
    assert main([*anew, "--output-dir", str(again)]) == 0
    mixed = (again / "hybrid_bench.md").read_text()
    assert "| 4 | full |" in mixed
    assert "| 2 | full |" not in mixed
    assert "| full+recurrent, GDN | " in mixed.partition("against the interval")[2]


def test_a_report_says_when_a_kind_finds_too_little(tmp_path: Path) -> None:
    sizes = {"l1_blocks": 10, "l3": "none", "l3_blocks": 0, "requests": 2}
    sizes |= {"interval": 0, "hicache_ratio": 1.0}
    run = {"command": "python -m sgl_jax_hicache.bench hybrid", "commit": "abc", "load": 0.5}
    tokens = {"device": 50, "host": 0, "storage": 0, "computed": 50}
    records = [
        Record(
            "hybrid hit tokens",
            hit,
            "%",
            50.0,
            (),
            {**sizes, "tokens": tokens, "model": name, "run": run},
        )
        for name, hit in (("full", 50.0), ("a kind", 44.0))
    ]
    source = tmp_path / "records.json"
    write_json(records, source)
    assert main(["hybrid", "--from", str(source), "--output-dir", str(tmp_path)]) == 0
    text = (tmp_path / "hybrid_bench.md").read_text()
    assert "**not met**. Least: 0.880, a kind at ratio 1." in text
    assert "commit abc, load average 0.5" in text


def test_what_an_interval_costs_a_cache_that_forgets_nothing() -> None:
    # Of 10, 13 and 13 blocks the second finds 10, and the third 12: its last block is left to compute.
    talk = requests(range(10), range(13), range(13))
    found = {r.params["interval"]: r for r in unbounded_records(talk, [512, 2048, 8192])}
    assert found[512].value == pytest.approx(100 * (10 + 12) / 36)
    assert found[2048].value == pytest.approx(100 * (8 + 12) / 36)
    assert found[8192].value == 0
    assert found[2048].ratio == pytest.approx(20 / 22)


def test_a_cut_of_conversations_keeps_each_whole() -> None:
    first, second, third = (range(n, n + 4) for n in (0, 100, 200))
    talk = requests(first, second, range(0, 6), third, range(100, 109), range(200, 203))
    assert every_nth_conversation(talk, 1) == talk
    assert every_nth_conversation(talk, 2) == [talk[0], talk[2], talk[3], talk[5]]
    assert every_nth_conversation(talk, 3) == [talk[0], talk[2]]


def test_the_report_of_first_tokens(tmp_path: Path) -> None:
    run = {"command": "python -m sgl_jax_hicache.bench hybrid", "commit": "abc"}
    params = {"kind": "full+swa", "model": "tiny-swa", "hicache_ratio": 2.0, "run": run}
    tokens = {"device": 0, "host": 75, "storage": 0, "computed": 25}
    records = [
        Record(
            "hybrid TTFT, asked again",
            4.0,
            "ms",
            30.0,
            (2.0, 4.0, 9.0),
            {**params, "tokens": tokens},
        ),
        Record("hybrid TTFT", 30.0, "ms", 30.0, (30.0,), {**params, "served_from": "computed"}),
        Record("hybrid TTFT", 2.0, "ms", 30.0, (2.0,), {**params, "served_from": "host"}),
    ]
    source = tmp_path / "records.json"
    write_json(records, source)
    assert main(["hybrid", "--from", str(source), "--output-dir", str(tmp_path)]) == 0
    text = (tmp_path / "hybrid_bench.md").read_text()
    assert "| 2 | full+swa (tiny-swa) | 30 | 2 |  | 5 | 0 | 75 | 0 |" in text
    assert (tmp_path / "hybrid-ttft.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "hybrid-ratio.png").exists()
