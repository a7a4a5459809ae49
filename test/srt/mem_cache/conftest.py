"""What every test runs under: the overlay, CPU devices, strict JAX, a seed that is printed on failure."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

# Before jax is imported. Tests never touch an accelerator that happens to be there, unless JAX_PLATFORMS says so.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" in os.environ:
    # One worker per core: Eigen's own pool in each of them would only fight over the cores.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

# What enable_compilation_cache sets: two workers compile the same small programs many times over.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[3] / ".cache" / "compiled")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import numpy as np
import pytest
from soak_figures import Figures

from sgl_jax_hicache import overlay

overlay.activate()

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


FIGURES = pytest.StashKey[Figures]()
SOAK_PARTS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seed N` repeats a random test exactly; `--soak-minutes N` is the time of all soak tests together."""
    parser.addoption("--seed", type=int, default=None, help="seed of the random tests")
    parser.addoption(
        "--soak-minutes", type=float, default=60.0, help="time of all soak tests together"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Figures()


def soak_parts(item: pytest.Item) -> int:
    """How many parts of the soak's time a test takes."""
    assert "soak_seconds" in getattr(item, "fixturenames", ()), f"{item.nodeid} has no end"
    mark = item.get_closest_marker("soak")
    assert mark is not None, f"{item.nodeid} asks for soak_seconds and is not marked soak"
    parts: int = mark.kwargs.get("parts", 1)
    return parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `soak` and `matrix` tests unless -m asks for them, and `accelerator` tests where there is none."""
    config.stash[SOAK_PARTS] = sum(soak_parts(i) for i in items if i.get_closest_marker("soak"))
    if not config.getoption("-m"):
        long = [item for item in items if any(map(item.get_closest_marker, ("soak", "matrix")))]
        items[:] = [item for item in items if item not in long]
        if long:
            config.hook.pytest_deselected(items=long)
    needs_accelerator = [item for item in items if item.get_closest_marker("accelerator")]
    if needs_accelerator and jax.default_backend() == "cpu":
        for item in needs_accelerator:
            item.add_marker(pytest.mark.skip(reason="jax has only CPU devices here"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What the soak tests did, if they were asked for."""
    if config.getoption("-m") == "soak":
        terminalreporter.section("soak figures")
        for line in config.stash[FIGURES].lines():
            terminalreporter.write_line(line)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Where a soak test adds up what it did; printed at the end of the run."""
    return request.config.stash[FIGURES]


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    """The time that this soak test has: its parts of `--soak-minutes`."""
    minutes: float = request.config.getoption("--soak-minutes")
    return 60.0 * minutes * soak_parts(request.node) / request.config.stash[SOAK_PARTS]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed fixed by the test's own name (or --seed); printed, so pytest shows it when the test fails."""
    given = request.config.getoption("--seed")
    value = int(given) if given is not None else zlib.crc32(request.node.nodeid.encode())
    print(f"seed {value} (repeat with --seed {value})")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A numpy generator seeded by `seed`."""
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def _seeded_globals() -> None:
    """The global generators start equal in every test, whichever worker runs it."""
    random.seed(0)
    np.random.seed(0)
