"""The command line of the benchmarks, and the report that `all` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_jax_hicache.bench.__main__ import BENCHMARKS, main
from sgl_jax_hicache.bench.record import Record, write_json
from sgl_jax_hicache.bench.targets import REASONS, TARGETS, judged

RUN = {"command": "python -m sgl_jax_hicache.bench tree", "commit": "abc", "jax": "0", "cpu": "x"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "what"),
        (["nothing"], "invalid choice"),
        (["tree", "--nonsense"], "unrecognized"),
        (["scaling", "--leaves", "many"], "invalid int"),
        (["scaling", "--leaves", "1"], "at least 4"),
        (["transfer", "--pages", "huge"], "invalid choice"),
        (["scaling", "--slots", "8", "--pages", "9"], "has no 9"),
        (["ttft", "--tokens", "16"], "at least 64"),
        (["step_profile", "--new-tokens", "8"], "at least 16"),
        (["storage", "--folder", "/nowhere"], "no such folder"),
        (["memory", "--host-pages", "1"], "--host-pages at least"),
        (["replay", "--trace", "/nowhere"], "cannot be read"),
        (["replay", "--l1-blocks", "0"], "at least 1"),
        (["replay", "--l1-blocks", "5", "--l3"], "--l3 needs --l2-blocks"),
        (["replay", "--l1-blocks", "5"], "does not fit"),
        (["decode_overhead", "--new-tokens", "8"], "--new-tokens must be"),
        (["all", "--from", "/nowhere"], "no records"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


def test_one_benchmark_prints_and_writes_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.json"
    argv = ["replay", "--requests", "3", "--l1-blocks", "400", "--json", str(path)]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    records = json.loads(path.read_text())
    assert records[0]["name"] == "replay hit rate"
    assert "replay hit rate" in printed
    assert records[0]["params"]["run"]["command"].startswith(
        "python -m sgl_jax_hicache.bench replay"
    )


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in BENCHMARKS)


def replayed(l1: int, l2: int, l3: str, hit: int) -> Record:
    levels = "L1" + "+L2" * bool(l2) + "+L3" * (l3 != "none")
    tokens = {"device": hit, "host": 0, "storage": 0, "computed": 100 - hit}
    sizes = {"levels": levels, "l1_blocks": l1, "l2_blocks": l2, "l3": l3, "requests": 3993}
    return Record(
        "replay hit rate", float(hit), "%", 8.0, params={**sizes, "tokens": tokens, "run": RUN}
    )


def transferred(
    scheme: str, executor: str, ratio: float, environment: dict[str, str] | None = None
) -> Record:
    run = {**RUN, "environment": environment or {}}
    params = {"pages": "8x16KB-f32", "scheme": scheme, "executor": executor, "run": run}
    return Record("transfer backup", ratio, "GB/s", 1.0, params=params)


def test_the_report_shows_targets_figures_and_plots(tmp_path: Path) -> None:
    records = [
        Record("tree evict one node", 7.0, "us", 7.0, (7.0,), {"leaves": 10, "run": RUN}),
        Record("tree evict one node", 28.0, "us", 7.0, (28.0,), {"leaves": 100, "run": RUN}),
        Record("tree match, all there", 300.0, "M tokens/s", params={"tokens": 8, "run": RUN}),
        Record("storage set", 3.0, "GB/s", 5.0, params={"against": "write", "run": RUN}),
        replayed(1000, 0, "none", 9),
        replayed(1000, 3000, "none", 19),
        replayed(1000, 3000, "memory", 64),
        transferred("per_block", "threadpool", 0.4),
        transferred("slab", "threadpool", 0.2),
        transferred("per_block", "future", 0.5),
        transferred("per_block", "threadpool", 0.9, {"GLIBC_TUNABLES": "other"}),
        Record(
            "replay L3 blocks kept",
            200.0,
            "blocks",
            params={"levels": "L1+L2+L3", "requests": 3993, "asked_again": 50, "run": RUN},
        ),
    ]
    source, out = tmp_path / "records.json", tmp_path / "docs"
    write_json(records, source)
    assert main(["all", "--from", str(source), "--output-dir", str(out)]) == 0
    text = (out / "bench.md").read_text()
    assert text.count("**not met**") == 3  # 28 us, and four times the smallest tree; 0.6 of a write
    assert "**storage set**: beyond the raw write" in text
    assert RUN["command"] in text
    for answer in (
        "Of 1 comparisons `per_block` is ahead in 1, `slab` is ahead in 0",
        "Of 1 comparisons `threadpool` is ahead in 0, `future` is ahead in 1",
        "| 3 | 19 | 3.333 |",
        "| L1+L2+L3 | 3,993 | 200 | 50 | 25 |",
    ):
        assert answer in text
    for name in ("bench-ratio.png", "bench-levels.png", "bench-growth.png"):
        assert f"({name})" in text
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_the_report_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    run = {
        **RUN,
        "command": "python -m bench replay --trace /somewhere/on/it/trace.jsonl --json /out",
    }
    record = Record("storage set", 3.0, "GB/s", 5.0, params={"run": run})
    source = tmp_path / "records.json"
    write_json([record], source)
    assert main(["all", "--from", str(source), "--output-dir", str(tmp_path)]) == 0
    text = (tmp_path / "bench.md").read_text()
    assert "--trace trace.jsonl`" in text
    assert "/somewhere" not in text


def test_every_reason_is_one_of_a_target() -> None:
    assert REASONS.keys() <= {target.name for target in TARGETS}


def test_every_target_bounds_a_figure_in_the_right_direction() -> None:
    records = [replayed(1000, 0, "none", 9), replayed(1000, 0, "none", 7)]
    assert [target.met(record) for target, record in judged(records)] == [True, False]
    bounds = {(t.name, t.of, t.at_least, str(sorted(t.where.items()))) for t in TARGETS}
    assert len(bounds) == len(TARGETS)
