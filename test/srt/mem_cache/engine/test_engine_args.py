"""Settings: one line and status 2 for whatever is wrong, before a model is read."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_jax_hicache.engine import model_spec
from sgl_jax_hicache.engine.engine_args import ArgumentError, EngineArgs
from sgl_jax_hicache.engine.engine_builder import check_settings
from sgl_jax_hicache.engine.weights import random_weights
from sgl_jax_hicache.launch_server import build_parser, main, parse_args

SRC = Path(__file__).resolve().parents[4] / "src"


def test_defaults_and_values() -> None:
    assert parse_args([]) == EngineArgs()
    line = (
        "--model-path random:tiny-mha:0 --page-size 64 --port 0 --disable-overlap-schedule "
        "--decode-reserve-ratio 0.25 --hicache-storage none --hicache-ratio 3"
    )
    args = parse_args(line.split())
    assert args.page_size == 64
    assert args.disable_overlap_schedule
    assert args.decode_reserve_ratio == 0.25
    assert args.hicache.enabled
    assert args.hicache.ratio == 3.0


def test_every_flag_is_a_field_and_every_field_a_flag() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    flags = {action.dest for action in parser._actions if not action.dest.startswith("hicache_")}
    assert flags - {"help"} == set(EngineArgs.__dataclass_fields__) - {"hicache"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--page-size 0", "--page-size 0: not allowed; give a whole number, 1 to 4,096"),
        ("--page-size 1.5", "--page-size 1.5: not allowed"),
        ("--port 70000", "--port 70000: not allowed; give a whole number, 0 to 65,535"),
        ("--max-total-tokens 1000", "--max-total-tokens 1000: not a multiple of --page-size 16"),
        ("--chunked-prefill-size 8", "--chunked-prefill-size 8: not a multiple"),
        ("--decode-reserve-ratio nan", "--decode-reserve-ratio nan: not allowed"),
        ("--swa-full-tokens-ratio 1.5", "--swa-full-tokens-ratio 1.5: not allowed; give a number"),
        ("--swa-full-tokens-ratio 0", "--swa-full-tokens-ratio 0.0: not allowed; give a number"),
        (
            "--max-recurrent-states 3",
            "--max-recurrent-states 3: not allowed; give a whole number, 4",
        ),
        (
            "--model-path random:tiny-swa:0 --disable-radix-cache --max-total-tokens 1024 "
            "--swa-full-tokens-ratio 0.5",
            "512 tokens for sliding layers, but a window of 40 with --chunked-prefill-size 512 needs 592",
        ),
        ("--dtype int4", "--dtype int4: not allowed; give one of {float32,bfloat16}"),
        ("--log-level loud", "--log-level loud: not allowed"),
        ("--shutdown-deadline-s -1", "--shutdown-deadline-s -1.0: not allowed"),
        ("--engine sgl-jax", "--engine sgl-jax: no sgl-jax engine is installed here"),
        ("--engine other", "--engine other: not allowed; give one of embedded, sgl-jax"),
        ("--hicache-storage disk", "--hicache-storage disk: not allowed"),
        ("--hicache-ratio 2", "--hicache-ratio has no effect"),
        ("--disable-radix-cache --hicache-storage none", "there is nothing to store"),
        ("--model-path /nowhere", "--model-path /nowhere: no model at '/nowhere'; give smollm2, "),
        ("--model-path random:foo:1", "called 'foo'; give smollm2, a folder with config.json"),
        ("--model-path random:tiny-mha", "not of the form random:<name>:<seed>; give smollm2, "),
        (f"--model-path {SRC}", "the folder has no config.json; give smollm2, "),
        (f"--model-path random:{SRC}:1", "the folder has no config.json; give smollm2, "),
        (f"--model-path {__file__}", "the file is no .gguf file; give smollm2, "),
        ("--model-path random:tiny-mha:0 --context-length 99999999", "--context-length 99999999"),
        (
            "--model-path random:tiny-mha:0 --hicache-storage none --hicache-ratio 90000000",
            "asks for a host pool",
        ),
        (
            "--model-path random:tiny-mha:0 --max-total-tokens 1000000000000",
            "--max-total-tokens 1000000000000 asks for a device pool of",
        ),
        (
            "--model-path random:tiny-mha:0 --max-total-tokens 1000000000000 --hicache-storage none",
            "--max-total-tokens 1000000000000 asks for a device pool of",
        ),
        ("--model-path random:tiny-mha:0 --host 256.0.0.1", "cannot listen there"),
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *line.split()]) == 2
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.count("\n") == 1
    assert stderr.startswith("sgl_jax_hicache.launch_server: ")


def test_a_port_in_use_is_told_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model-path", "random:tiny-mha:0", "--port", str(port)]) == 2
    assert f"--port {port}: cannot listen there" in capsys.readouterr().err


def test_the_presets_are_those_there_are_and_in_the_help() -> None:
    assert model_spec.PRESET_NAMES == random_weights.PRESET_NAMES
    help_text = "".join(build_parser().format_help().split())  # it breaks at hyphens
    for name in model_spec.PRESET_NAMES:
        assert name in help_text


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "70000"],
        ["--model-path", "/nowhere"],
        ["--model-path", "random:foo:1"],
        ["--model-path", str(SRC)],
        ["--model-path", "random:tiny-mha:0", "--host", "256.0.0.1"],
    ],
)
def test_what_needs_no_jax_is_told_without_it(flags: list[str]) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sgl_jax_hicache.launch_server import main\n"
        "print(main(sys.argv[2:]), 'jax' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(SRC), *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "2 False\n", done.stderr


def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--pagesize", "1"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_storage_path_is_tried_at_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    line = f"--model-path random:tiny-mha:0 --hicache-storage file --hicache-storage-path {file}"
    with pytest.raises(ValueError, match="file"):
        check_settings(parse_args(line.split()))


def test_the_key_is_not_shown() -> None:
    assert "hush" not in repr(EngineArgs(api_key="hush"))
    with pytest.raises(ArgumentError, match="--api-key"):
        EngineArgs(api_key="")


def test_the_second_signal_ends_the_process_at_once() -> None:
    program = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from sgl_jax_hicache import overlay; overlay.activate()\n"
        "from sgl_jax_hicache.engine.http_server.server import exit_on_signals\n"
        # Not print: the signal may come while the line below is still being written.
        "exit_on_signals(lambda: os.write(1, b'first\\n'))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(SRC)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "first\n"
        process.terminate()
        assert process.wait(20) == 128 + 15
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
