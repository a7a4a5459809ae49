"""The rules of the house that a reviewer should not have to check: layers, allowed imports, docstrings, no pickles."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sgl_jax_hicache import overlay

TREE = overlay.tree_root() / "sgl_jax"
MEM_CACHE = TREE / "srt" / "mem_cache"
PACKAGE = "sgl_jax.srt.mem_cache"

# Lowest first. A module may import from its own layer and from every layer before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("hicache.errors", "hicache.types", "hicache.byte_size"),
    (
        "hicache.config",
        "hicache.contract",
        "hicache.token_key",
        "hicache.page_key",
        "hicache.coverage",
    ),
    ("hicache.memory_budget", "hicache.tree_node", "hicache.host_split"),
    ("hicache.path_keys",),
    ("hicache.tree_types", "hicache.radix_tree"),
    ("hicache.storage", "hicache.host_pool"),
    ("hicache.storage_census",),
    (
        "hicache.metrics",
        "hicache.storage_mount",
        "hicache.storage_backoff",
        "hicache.storage_query",
    ),
    ("hicache.device_buffers", "hicache.chunks"),
    ("hicache.pool_buffers", "hicache.page_programs", "hicache.host_memory"),
    ("hicache.transfer",),
    ("hicache.async_impl",),
    ("hicache.in_flight",),
    ("hicache.controller",),
    ("hicache.components",),
    ("hicache.lower_tiers", "hicache.prefetch_table", "hicache.device_slots"),
    ("hicache.tiered_tree",),
    (
        "hicache.device_eviction",
        "hicache.insertion",
        "hicache.storage_writer",
        "hicache.host_arrivals",
    ),
    ("hicache.load_back", "hicache.request_states", "hicache.storage_prefetch"),
    ("hicache.statistics",),
    ("unified_radix_cache",),
    ("hicache.builder",),
)
# Small libraries that an sgl-jax installation can take; anything else must be in the standard library or the extension.
THIRD_PARTY = frozenset({"numpy", "jax", "ml_dtypes", "psutil", "prometheus_client", "xxhash"})


@dataclass(frozen=True)
class Import:
    """One imported name, as an absolute dotted path, and where it stands."""

    target: str
    where: str


def extension_files() -> list[Path]:
    return sorted(MEM_CACHE.rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, module: str) -> Iterator[Import]:
    """Every import of a file, those inside functions too, relative ones resolved against `module`."""
    is_package = path.name == "__init__.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:kept], *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", where) for alias in node.names)


def layer_of(name: str) -> int | None:
    """Index in LAYERS of a dotted name below mem_cache; None for a package's own `__init__` above all layers."""
    for index, members in enumerate(LAYERS):
        if any(name == member or name.startswith(member + ".") for member in members):
            return index
    return None


def layer_faults(root: Path, package: str) -> list[str]:
    """What breaks the import direction below `root`, which is the folder of `package`."""
    faults = []
    for path in sorted(root.rglob("*.py")):
        name = module_name(path, root)
        own = layer_of(name)
        if own is None:
            if path.name != "__init__.py":
                faults.append(f"{name}: stands in no layer; add it to LAYERS")
            continue
        for imported in imports_of(path, f"{package}.{name}"):
            if not imported.target.startswith(package + "."):
                continue
            target = layer_of(imported.target.removeprefix(package + "."))
            if target is not None and target > own:
                faults.append(f"{imported.where}: {name} imports {imported.target}, which is above")
    return faults


def foreign_imports(root: Path, package: str) -> list[str]:
    """Imports below `root` that are neither the standard library, nor THIRD_PARTY, nor the extension itself."""
    own = (f"{package}.hicache", f"{package}.unified_radix_cache")
    faults = []
    for path in sorted(root.rglob("*.py")):
        for imported in imports_of(path, f"{package}.{module_name(path, root)}"):
            top = imported.target.partition(".")[0]
            is_own = any(imported.target == o or imported.target.startswith(o + ".") for o in own)
            if not (is_own or top in THIRD_PARTY or top in sys.stdlib_module_names):
                faults.append(f"{imported.where}: {imported.target}")
    return faults


def test_imports_go_one_way() -> None:
    assert layer_faults(MEM_CACHE, PACKAGE) == []


def test_the_extension_imports_no_engine() -> None:
    assert foreign_imports(MEM_CACHE, PACKAGE) == []


def test_imports_inside_hicache_are_relative() -> None:
    """One spelling, so that a module cannot be loaded twice under two names."""
    absolute = [
        f"{path.name}:{node.lineno}"
        for path in (MEM_CACHE / "hicache").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.ImportFrom) and not node.level and "sgl_jax" in (node.module or "")
        )
        or (isinstance(node, ast.Import) and any("sgl_jax" in alias.name for alias in node.names))
    ]
    assert absolute == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("hicache/types.py", "from .controller import X", "above"),
        ("hicache/storage/file.py", "def f():\n    from ..transfer import X", "above"),
        ("hicache/controller.py", "import sgl_jax.srt.mem_cache.unified_radix_cache", "above"),
        ("hicache/mystery.py", "", "no layer"),
    ],
)
def test_the_layer_check_finds_faults(tmp_path: Path, file: str, text: str, expected: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    faults = layer_faults(tmp_path, PACKAGE)
    assert len(faults) == 1
    assert expected in faults[0]


@pytest.mark.parametrize(
    "text",
    [
        "import sgl_jax.srt.managers.scheduler",
        "from sgl_jax.srt.mem_cache.memory_pool import KVCache",
        "from ..memory_pool import KVCache",
        "import sgl_jax_hicache.engine",
        "import torch",
    ],
)
def test_the_engine_check_finds_faults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hicache" / "types.py"
    path.parent.mkdir()
    path.write_text(text)
    assert len(foreign_imports(tmp_path, PACKAGE)) == 1


def test_the_tree_is_a_piece_of_the_engines_tree() -> None:
    """An `__init__.py` of ours in these folders would shadow the engine's package."""
    for folder in (TREE, TREE / "srt", MEM_CACHE):
        assert not (folder / "__init__.py").exists()


def unpickling(path: Path) -> Iterator[str]:
    """Imports of a pickling module and calls that allow pickles, in one file."""
    banned_modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    for imported in imports_of(path, path.stem):
        if imported.target.partition(".")[0] in banned_modules:
            yield f"{imported.where}: {imported.target}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            forbidden = isinstance(node.value, ast.Constant) and node.value.value is False
            if not forbidden:
                yield f"{path.name}:{node.value.lineno}: allow_pickle"


def test_nothing_unpickles(tmp_path: Path) -> None:
    """Cache files come from a shared disk: reading one must never be able to run code."""
    sources = [*extension_files(), *sorted(Path(overlay.__file__).parent.rglob("*.py"))]
    assert [fault for path in sources for fault in unpickling(path)] == []

    bad = tmp_path / "bad.py"
    bad.write_text("import pickle\nnp.load(f, allow_pickle=True)\nnp.load(f, allow_pickle=False)\n")
    assert len(list(unpickling(bad))) == 2


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Public classes, functions and methods without a docstring; a subclass may leave a method's to its base."""
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield prefix + node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from undocumented(node.body, f"{node.name}.")


def test_every_public_name_has_a_docstring() -> None:
    missing = []
    for path in extension_files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = module_name(path, MEM_CACHE)
        if tree.body and ast.get_docstring(tree) is None:
            missing.append(name)
        missing += [f"{name}: {thing}" for thing in undocumented(tree.body)]
    assert missing == []


HOOKS = ("write_through", "write_back", "prefetch")


def component_hook_calls(path: Path) -> list[str]:
    """Calls `<something>.<hook>(...)`, except on `self`, which is an object's own method of that name."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in HOOKS
            and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "self")
        ):
            calls.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
    return calls


def test_the_tree_and_nobody_else_calls_the_hooks() -> None:
    callers = {
        path.name: calls for path in extension_files() if (calls := component_hook_calls(path))
    }
    assert set(callers) == {"tiered_tree.py"}
    assert {call.rsplit(".", 1)[1] for call in callers["tiered_tree.py"]} == set(HOOKS)


def test_no_document_has_a_placeholder() -> None:
    root = Path(__file__).parents[3]
    documents = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    assert len(documents) > 1
    left = [path.name for path in documents if "PLACEHOLDER" in path.read_text(encoding="utf-8")]
    assert not left, left


def modules_of_one_name(folder: Path) -> list[str]:
    """File names that more than one module of the tests has: pytest imports them by that name alone."""
    names = Counter(path.name for path in folder.rglob("*.py") if path.name != "conftest.py")
    return sorted(name for name, count in names.items() if count > 1)


def test_no_two_test_modules_have_one_name(tmp_path: Path) -> None:
    assert modules_of_one_name(Path(__file__).parent) == []
    for path in (tmp_path / "test_a.py", tmp_path / "b" / "test_a.py", tmp_path / "b" / "c.py"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert modules_of_one_name(tmp_path) == ["test_a.py"]
