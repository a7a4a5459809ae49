"""Options of the tests that run the engine itself; give them with this folder as the path to test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engine_runs import CPU_ENGINE, TINY_ON_CPU, EngineRuns
from tiny_qwen3 import write_model

from sgl_jax_hicache import overlay

sys.path.append(str(Path(__file__).parents[1] / "tree"))  # its world, for what needs no engine


def pytest_addoption(parser: pytest.Parser) -> None:
    """On a TPU VM: a real model, and how it lies on the devices."""
    group = parser.getgroup("sgl-jax")
    group.addoption(
        "--sgl-jax-model-path",
        help="a model to serve (default: a tiny Qwen3 with random weights, on CPU)",
    )
    group.addoption(
        "--sgl-jax-engine-args",
        default="{}",
        help='arguments of Engine as JSON, for instance \'{"tp_size": 8, "dp_size": 2, "page_size": 128}\'',
    )
    group.addoption(
        "--sgl-jax-preload",
        help="a Python file that every process of the engine runs first (default: cpu_engine.py for tiny models)",
    )
    group.addoption(
        "--sgl-jax-tolerance",
        type=float,
        default=1e-5,
        help="largest difference of log probabilities between a computed and a reused prefix",
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights of a fixed seed."""
    if not overlay.engine_installed():
        pytest.skip("the sgl-jax engine is not installed here")
    return write_model(tmp_path_factory.mktemp("model") / "tiny-qwen3", seed=7)


@pytest.fixture
def engine_runs(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> EngineRuns:
    """Runs of the engine over one storage folder, with what the options ask for."""
    given = request.config.getoption("--sgl-jax-model-path", default=None)
    settings = {"model_path": given} if given else {"model_path": str(tiny_model), **TINY_ON_CPU}
    settings |= json.loads(request.config.getoption("--sgl-jax-engine-args", default="{}"))
    preload = request.config.getoption("--sgl-jax-preload", default=None)
    return EngineRuns(
        settings,
        folder=tmp_path,
        preload=preload or (None if given else CPU_ENGINE),
        tolerance=request.config.getoption("--sgl-jax-tolerance", default=1e-5),
    )
