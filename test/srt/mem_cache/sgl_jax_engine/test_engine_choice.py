"""Which engine the launcher takes, and what it says if that can not be."""

from __future__ import annotations

import pytest

from sgl_jax_hicache import launch_server, overlay
from sgl_jax_hicache.engine.engine_args import ArgumentError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(overlay, "engine_installed", lambda: request.param)


@pytest.mark.parametrize(
    ("installed", "line", "engine", "rest"),
    [
        (False, "--port 1", "embedded", ["--port", "1"]),
        (True, "--port 1", "sgl-jax", ["--port", "1"]),
        (True, "--port 1 --engine embedded", "embedded", ["--port", "1"]),
        (
            True,
            "--engine=sgl-jax --tp-size 2 --hicache-ratio 2",
            "sgl-jax",
            ["--tp-size", "2", "--hicache-ratio", "2"],
        ),
        (True, "--enable-metrics", "sgl-jax", ["--enable-metrics"]),
    ],
    indirect=["installed"],
)
@pytest.mark.usefixtures("installed")
def test_choice(line: str, engine: str, rest: list[str]) -> None:
    assert launch_server.choose_engine(line.split()) == (engine, rest)


@pytest.mark.parametrize(
    ("installed", "line", "said"),
    [
        (False, "--engine sgl-jax", "no sgl-jax engine is installed here"),
        (True, "--engine vllm", "--engine vllm: not allowed; give one of embedded, sgl-jax"),
    ],
    indirect=["installed"],
)
@pytest.mark.usefixtures("installed")
def test_refusal(line: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        launch_server.choose_engine(line.split())
