"""The overlay, in processes of its own: in a checkout, from a wheel, with and without a (fake) engine, under spawn."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from sgl_jax_hicache import overlay

CHECKOUT = Path(overlay.__file__).resolve().parents[2]
TIMEOUT_S = 60

SHOW = """
import sgl_jax.srt.mem_cache as package
from sgl_jax.srt.mem_cache.hicache import errors
print(errors.__file__)
"""


def run(code: str, *paths: Path, cwd: Path) -> str:
    """Run code in a fresh interpreter that sees only `paths` and its site-packages; returns what it printed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as built from this checkout, unpacked the way pip lays a pure wheel out."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import hatchling.build as b; print(b.build_wheel({str(folder)!r}))",
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    site = folder / "site"
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as wheel:
        wheel.extractall(site)
    return site


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A stand-in for an installed sgl-jax: regular packages, a module of its own beside where ours goes."""
    root = tmp_path / "engine"
    mem_cache = root / "sgl_jax" / "srt" / "mem_cache"
    mem_cache.mkdir(parents=True)
    for folder in (mem_cache, mem_cache.parent, mem_cache.parent.parent):
        (folder / "__init__.py").write_text("")
    (mem_cache / "memory_pool.py").write_text("OWNER = 'engine'\n")
    (mem_cache / "unified_radix_cache.py").write_text("OWNER = 'engine'\n")
    return root


def test_checkout_without_engine(tmp_path: Path) -> None:
    out = run(
        "from sgl_jax_hicache import overlay\n"
        "assert overlay.activate() == overlay.activate()\n"
        "import sys; assert sys.path.count(str(overlay.tree_root())) == 1\n" + SHOW,
        CHECKOUT / "src",
        cwd=tmp_path,
    )
    assert Path(out.strip()).is_relative_to(CHECKOUT / "python")


def test_wheel_installs_no_top_level_sgl_jax(installed_wheel: Path) -> None:
    names = {path.name for path in installed_wheel.iterdir() if path.suffix != ".dist-info"}
    assert names == {"sgl_jax_hicache"}


def test_wheel_without_engine(installed_wheel: Path, tmp_path: Path) -> None:
    out = run(
        "from sgl_jax_hicache import overlay; overlay.activate()\n" + SHOW,
        installed_wheel,
        cwd=tmp_path,
    )
    assert Path(out.strip()).is_relative_to(installed_wheel / "sgl_jax_hicache" / "_tree")


def test_wheel_beside_an_engine(installed_wheel: Path, engine: Path, tmp_path: Path) -> None:
    """Ours is found, everything else stays the engine's, and calling again changes nothing."""
    out = run(
        "from sgl_jax_hicache import overlay; overlay.activate(); overlay.activate()\n"
        + SHOW
        + "from sgl_jax.srt.mem_cache import memory_pool; print(memory_pool.OWNER)\n"
        "import importlib.util\n"
        "print(importlib.util.find_spec('sgl_jax').origin)\n"
        "print(len(list(package.__path__)), len(set(package.__path__)))\n",
        installed_wheel,
        engine,
        cwd=tmp_path,
    )
    ours, owner, origin, path_lens = out.splitlines()
    assert Path(ours).is_relative_to(installed_wheel)
    assert owner == "engine"
    assert Path(origin) == engine / "sgl_jax" / "__init__.py"
    assert path_lens == "2 2"


def test_too_late_is_an_error(installed_wheel: Path, engine: Path, tmp_path: Path) -> None:
    run(
        """
        import sgl_jax.srt.mem_cache.unified_radix_cache
        from sgl_jax_hicache import overlay
        try:
            overlay.activate()
        except ImportError as error:
            assert "before the engine" in str(error)
        else:
            raise SystemExit("nothing was raised")
        """,
        installed_wheel,
        engine,
        cwd=tmp_path,
    )


def test_broken_install_is_an_error(installed_wheel: Path, tmp_path: Path) -> None:
    lonely = tmp_path / "sgl_jax_hicache"
    lonely.mkdir()
    for name in ("__init__.py", "overlay.py"):
        (lonely / name).write_bytes((installed_wheel / "sgl_jax_hicache" / name).read_bytes())
    run(
        """
        from sgl_jax_hicache import overlay
        try:
            overlay.activate()
        except ModuleNotFoundError as error:
            assert "reinstall" in str(error)
        else:
            raise SystemExit("nothing was raised")
        """,
        tmp_path,
        cwd=tmp_path,
    )


@pytest.mark.parametrize("with_engine", [False, True])
def test_spawned_process_finds_the_extension(
    installed_wheel: Path, engine: Path, tmp_path: Path, with_engine: bool
) -> None:
    """Spawn re-imports the main module, whose call at import time is all that the child needs."""
    script = tmp_path / "launcher.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            from sgl_jax_hicache import overlay
            overlay.activate()
            from sgl_jax.srt.mem_cache.hicache import errors

            def child():
                print(errors.__file__, flush=True)

            if __name__ == "__main__":
                process = multiprocessing.get_context("spawn").Process(target=child)
                process.start()
                process.join()
                raise SystemExit(process.exitcode)
            """
        )
    )
    paths = (installed_wheel, engine) if with_engine else (installed_wheel,)
    out = run(
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(script)!r}]))",
        *paths,
        cwd=tmp_path,
    )
    assert Path(out.strip()).is_relative_to(installed_wheel)
