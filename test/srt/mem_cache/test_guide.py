"""The documents agree with the code: flags, metrics and links."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path

from prometheus_client import CollectorRegistry

from sgl_jax.srt.mem_cache.hicache.config import HiCacheConfig
from sgl_jax.srt.mem_cache.hicache.metrics import PREFIX, HiCacheMetrics
from sgl_jax_hicache import overlay

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "hicache.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows(text: str, heading: str) -> Iterator[list[str]]:
    """The cells of the first table after a heading, without its head."""
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def options() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    HiCacheConfig.add_cli_args(parser)
    return [action.option_strings[0] for action in parser._actions]


def test_the_table_of_flags_has_every_flag_with_its_choices_and_default() -> None:
    table = {row[0].strip("`"): row for row in rows(GUIDE, "## Which flags are there")}
    assert sorted(table) == sorted(options())
    config = HiCacheConfig()
    for field in fields(HiCacheConfig):
        _, values, default, when = table["--hicache-" + field.name.replace("_", "-")]
        assert when
        value = field.default
        if isinstance(value, Enum):
            assert re.findall(r"`(\w+)`", values) == [choice.value for choice in type(value)]
            assert default == f"`{value.value}`"
        elif isinstance(value, Path):
            assert default == f"`{value}`"
        elif value is not None:
            assert re.split(r"[ :]", default)[0] == str(value)
    assert config.storage is None


def test_every_flag_that_a_document_names_exists() -> None:
    own = set(options())
    # Named to say that it is refused.
    engines = {"--hicache-write-through-threshold"}
    named = {
        (path.name, flag)
        for path in DOCUMENTS
        for flag in re.findall(r"--hicache-[a-z-]*[a-z]", path.read_text(encoding="utf-8"))
    }
    assert {(name, flag) for name, flag in named if flag not in own | engines} == set()


def exported() -> dict[str, dict[str, set[str]]]:
    """Each metric's labels and their values, as a cache with all components has them from the start."""
    registry = CollectorRegistry()
    HiCacheMetrics(registry)
    found: dict[str, dict[str, set[str]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            if sample.name.endswith("_created"):
                continue
            labels = found.setdefault(name.removeprefix(PREFIX), {})
            for label, value in sample.labels.items():
                if label != "le":
                    labels.setdefault(label, set()).add(value)
    return found


def test_the_table_of_metrics_has_every_metric_with_its_labels() -> None:
    metrics = exported()
    listed: dict[str, dict[str, set[str]]] = {}
    for names, labels, _ in rows(GUIDE, "## What do the metrics say"):
        parsed = {}
        for label in filter(None, (part.strip() for part in labels.split(";"))):
            name, _, values = label.partition(":")
            parsed[name] = {value.strip() for value in values.split(",") if value.strip()}
        for name in re.findall(r"`(\w+)`", names):
            listed[name] = parsed
    assert sorted(listed) == sorted(metrics)
    for name, labels in listed.items():
        assert set(labels) == set(metrics[name]), name
        for label, values in labels.items():
            assert not values or values == metrics[name][label], (name, label)


def test_the_table_of_modules_has_every_module() -> None:
    folder = overlay.tree_root() / "sgl_jax" / "srt" / "mem_cache" / "hicache"
    there = {p.name if p.is_file() else f"{p.name}/" for p in folder.iterdir()}
    listed = {
        name
        for row in rows(GUIDE, "## Where is what")
        for name in re.findall(r"`([\w/.]+)`", row[0])
    }
    assert listed - {"../unified_radix_cache.py"} == there - {"__init__.py", "__pycache__/"}


def anchors(path: Path) -> set[str]:
    """The headings of a document as the repository view names them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:", target):
                continue
            file, _, anchor = target.partition("#")
            to = (path.parent / file) if file else path
            if not to.exists() or (anchor and anchor not in anchors(to)):
                broken.append(f"{path.name}: {target}")
    assert not broken


def test_every_picture_is_shown() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    pictures = [p for kind in ("*.png", "*.svg") for p in (ROOT / "docs").rglob(kind)]
    assert [picture.name for picture in pictures if f"{picture.name})" not in texts] == []
