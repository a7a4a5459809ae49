"""Our flags in the engine's parser and in its ServerArgs: with a stand-in, and with the engine where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_stand_in import write_stand_in

from sgl_jax_hicache import overlay

SRC = Path(__file__).resolve().parents[4] / "src"

PROGRAM = """
import dataclasses, json, pickle, sys
from sgl_jax_hicache import overlay
overlay.activate()
from sgl_jax.srt.mem_cache.hicache.errors import HiCacheConfigError
from sgl_jax_hicache.sgl_jax_engine.server_args import HiCacheServerArgs

def build(call):
    try:
        args = HiCacheServerArgs.from_cli(call) if isinstance(call, list) else HiCacheServerArgs.from_settings(call)
    except HiCacheConfigError as error:
        return {"error": str(error)}
    except SystemExit as error:
        return {"exit": error.code}
    args = pickle.loads(pickle.dumps(args))
    fields = dataclasses.asdict(args)
    shown = ("hicache", "hicache_storage", "enable_unified_radix_tree", "page_size", "recurrent_track_interval")
    return {name: fields[name] for name in (*shown, "enable_recurrent_extra_buffer")}

answers = [build(call) for call in json.loads(sys.argv[1])]
print(json.dumps(answers, default=lambda x: getattr(x, "value", None) or str(x)))
"""


class Engine:
    """Asks for settings in a process that sees one kind of engine."""

    def __init__(self, *paths: Path) -> None:
        self._env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(map(str, [SRC, *paths])),
        }

    def build(self, *calls: Any) -> list[dict[str, Any]]:
        """What comes of each command line (a list) or set of keyword arguments (a dictionary)."""
        answers: list[dict[str, Any]] = json.loads(
            self.run("-c", PROGRAM, json.dumps(calls)).stdout.splitlines()[-1]
        )
        return answers

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """The interpreter with these arguments."""
        return subprocess.run(
            [sys.executable, *args], env=self._env, capture_output=True, text=True, timeout=300
        )


@pytest.fixture(scope="module", params=["stand-in", "installed"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    if request.param == "stand-in":
        return Engine(write_stand_in(tmp_path_factory.mktemp("engine")))
    if not overlay.engine_installed():
        pytest.skip("the sgl-jax engine is not installed here")
    return Engine()


def test_all_our_values_are_taken(engine: Engine, tmp_path: Path) -> None:
    path = str(tmp_path / "l3")
    line = (
        f"--model-path m --page-size 16 --hicache-storage file --hicache-storage-path {path} --hicache-ratio 3 "
        "--hicache-write-policy write_through_and_back --hicache-async-impl future --hicache-host-scheme slab "
        "--hicache-prefetch-deadline-s 2.5"
    )
    settings = {
        "model_path": "m",
        "page_size": 16,
        "hicache_storage": "file",
        "hicache_storage_path": path,
        "hicache_ratio": 3,
        "hicache_write_policy": "write_through_and_back",
        "hicache_async_impl": "future",
        "hicache_host_scheme": "slab",
        "hicache_prefetch_deadline_s": 2.5,
    }
    from_line, from_settings, off = engine.build(line.split(), settings, ["--model-path", "m"])
    assert from_line == from_settings
    found = from_line["hicache"]
    assert found["storage"] == "file"
    assert found["storage_path"] == path
    assert found["ratio"] == 3.0
    assert found["write_policy"] == "write_through_and_back"
    assert found["async_impl"] == "future"
    assert found["host_scheme"] == "slab"
    assert found["prefetch_deadline_s"] == 2.5
    assert from_line["hicache_storage"] == "disable", "the engine's own HiCache stays off"
    assert from_line["enable_unified_radix_tree"] is True
    assert from_line["page_size"] == 16
    assert off["hicache"]["storage"] is None
    assert off["enable_unified_radix_tree"] is False


def test_what_recurrent_models_need(engine: Engine) -> None:
    line = "--model-path m --page-size 16 --hicache-storage none"
    plain, ours, theirs, mixed, single, both, between = engine.build(
        line.split(),
        f"{line} --hicache-checkpoint-interval 64".split(),
        f"{line} --recurrent-track-interval 64".split(),
        f"{line} --enable-mixed-chunk".split(),
        line.replace("16", "1").split(),
        f"{line} --hicache-checkpoint-interval 64 --recurrent-track-interval 128".split(),
        f"{line} --hicache-checkpoint-interval 72".split(),
    )
    assert plain["enable_recurrent_extra_buffer"] is True
    assert plain["hicache"]["checkpoint_interval"] is None
    for args in (ours, theirs):
        assert args["hicache"]["checkpoint_interval"] == 64
        assert args["recurrent_track_interval"] == 64
    assert mixed["enable_recurrent_extra_buffer"] is False
    assert single["enable_recurrent_extra_buffer"] is False
    assert "one interval is kept" in both["error"]
    assert "--hicache-checkpoint-interval 72: not a multiple of --page-size 16" in between["error"]


REFUSED = [
    ({"hicache_storage": "disk"}, "--hicache-storage disk: not allowed; give one of {none,file}"),
    ({"hicache_ratio": 2}, "--hicache-ratio has no effect"),
    ({"hicache_size": 2}, "hicache_size: not allowed; HiCache knows "),
    ({"hicache_write_through_threshold": 2}, "every page is backed up at once; remove it"),
    (
        {"hicache_storage": "none", "disable_radix_cache": True},
        "does not go with --disable-radix-cache",
    ),
    (
        {"hicache_storage": "none", "speculative_algorithm": "EAGLE"},
        "does not go with --speculative-algorithm",
    ),
    (
        {"hicache_storage": "none", "enable_static_lora": True},
        "does not go with --enable-static-lora",
    ),
    (
        {"hicache_storage": "none", "pd_disaggregation": "pathways"},
        "does not go with prefill/decode",
    ),
    ({"hicache_storage": "none", "nnodes": 2, "dp_size": 2}, "does not go with --nnodes"),
    ({"hicache_storage": "none", "multimodal": True}, "does not go with --multimodal"),
]


def test_what_does_not_work_is_said_in_a_line(engine: Engine) -> None:
    answers = engine.build(*({"model_path": "m", **settings} for settings, _ in REFUSED))
    for (settings, said), answer in zip(REFUSED, answers, strict=True):
        assert said in answer.get("error", ""), (settings, answer)
        assert "\n" not in answer["error"]
    lines = engine.build(
        ["--model-path", "m", "--hicache-write-through-threshold", "2"],
        ["--model-path", "m", "--multimodal"],
        ["--model-path", "m", "--no-such-flag"],
    )
    assert "every page is backed up at once" in lines[0]["error"]
    assert "--multimodal" in lines[1]["error"]
    assert lines[2] == {"exit": 2}


def test_the_help_is_ours(engine: Engine) -> None:
    done = engine.run("-m", "sgl_jax_hicache.launch_server", "--engine", "sgl-jax", "--help")
    assert "--hicache-storage {none,file}" in done.stdout, done.stderr
    assert "--hicache-prefetch-deadline-s SECONDS" in done.stdout
    assert "--hicache-write-through-threshold" not in done.stdout
    assert "THE ENGINE'S OWN HELP" not in done.stdout


def test_another_engine_is_refused(tmp_path: Path) -> None:
    """An engine is installed, so it is the default; it is not the one we know, and no model is asked for."""
    engine = Engine(write_stand_in(tmp_path))
    done = engine.run("-m", "sgl_jax_hicache.launch_server", "--model-path", "m")
    assert done.returncode == 2
    assert "sgl_jax.srt.entrypoints.engine" in done.stderr
    assert "is not there" in done.stderr
    assert "cddbf6f1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_arguments_it_says_which_it_needs(tmp_path: Path) -> None:
    engine = Engine(write_stand_in(tmp_path))
    done = engine.run("-m", "sgl_jax_hicache.launch_server", "--engine", "sgl-jax")
    assert done.returncode == 2
    assert "--model-path is the one it needs" in done.stderr
    assert done.stderr.count("\n") == 1
