"""docs/file_format.md is enough to find a prompt's pages and to check them: the reader here knows nothing else.

`Reader` stands on numpy, xxhash and the standard library; the cache's own code only writes what it reads.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from tool_kit import SPACE, chain, path_of, store_chain

from sgl_jax.srt.mem_cache.hicache.device_buffers import DeviceBuffers
from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher, StorageNamespace, companion_key
from sgl_jax.srt.mem_cache.hicache.pool_buffers import kv_buffer_refs
from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage
from sgl_jax.srt.mem_cache.hicache.storage.page_file import VERSION_1, VERSION_2, RecordVersion
from sgl_jax.srt.mem_cache.hicache.types import ComponentKind
from sgl_jax_hicache.engine.swa_kv_pool import build_kv_pool
from sgl_jax_hicache.engine.weights import read_config

DOCUMENT = (Path(__file__).parents[4] / "docs" / "file_format.md").read_text(encoding="utf-8")
START = hashlib.sha256(b"hicache page key chain, version 1").digest()


def framed(*fields: bytes | str | int) -> bytes:
    encoded = [
        f.encode() if isinstance(f, str) else struct.pack("<Q", f) if isinstance(f, int) else f
        for f in fields
    ]
    return b"".join(struct.pack("<Q", len(field)) + field for field in encoded)


def safe(model_id: str) -> str:
    plain = re.compile(r"[A-Za-z0-9_.-]")
    bytes_ = (chr(byte) for byte in model_id.encode())
    name = "".join(c if plain.match(c) else f"%{ord(c):02X}" for c in bytes_)
    return "%2E" + name[1:] if name.startswith(".") else name


@dataclass(frozen=True)
class Reader:
    """A reader of one model's full-attention pages, as another program would write it."""

    root: Path
    model_id: str
    model_version: str
    page_size: int
    kv_dtype: str
    layout: str

    def keys(self, tokens: Sequence[int], extra_key: str | None = None) -> list[bytes]:
        layout = hashlib.sha256(self.layout.encode()).digest()
        extra = b"\x00" if extra_key is None else b"\x01" + extra_key.encode()
        keys = [START]
        for first in range(0, len(tokens) // self.page_size * self.page_size, self.page_size):
            page = struct.pack(f"<{self.page_size}q", *tokens[first : first + self.page_size])
            named = (self.model_id, self.model_version, self.page_size, self.kv_dtype)
            link = framed(keys[-1], *named, layout, extra, 8, page)
            keys.append(hashlib.sha256(link).digest())
        return keys[1:]

    def path(self, key: bytes) -> Path:
        name = key.hex()
        folder = self.root / safe(self.model_id) / str(self.page_size) / name[:2]
        return folder / f"{name}.npy"

    def page(self, key: bytes) -> npt.NDArray[np.uint8]:
        """The payload. Raises ValueError for what is no good page."""
        path = self.path(key)
        record = np.load(path, allow_pickle=False)[0]
        payload: npt.NDArray[np.uint8] = record["payload"]
        header = path.read_bytes()[: -len(payload)]
        checksum = {"xxh3_64": xxhash.xxh3_64_intdigest, "crc32": zlib.crc32}
        named = (self.model_id, self.model_version, self.page_size, self.kv_dtype, self.layout)
        facts = {
            "magic": (record["magic"], b"HICACHEP"),
            "format_version": (record["format_version"], 2),
            "header_crc32": (record["header_crc32"], zlib.crc32(header[:-4])),
            "checksum": (
                record["checksum"],
                checksum[record["checksum_kind"].decode()](payload.tobytes()),
            ),
            "page_key": (record["page_key"].tobytes(), key),
            "namespace": (
                record["namespace"].tobytes(),
                hashlib.sha256(framed(*named, len(payload))).digest(),
            ),
        }
        wrong = [name for name, (found, expected) in facts.items() if found != expected]
        if wrong:
            raise ValueError(", ".join(wrong))
        return payload


def reader(root: Path, space: StorageNamespace = SPACE) -> Reader:
    return Reader(
        root,
        space.model_id,
        space.model_version,
        space.page_size,
        space.kv_dtype,
        space.layout_id,
    )


def test_a_reader_written_from_the_document_finds_and_checks_a_prompt(root: Path) -> None:
    store_chain(root, 3)
    other = reader(root)
    keys = other.keys(range(3 * SPACE.page_size))
    for key, page in zip(keys, chain(3)[1], strict=True):
        np.testing.assert_array_equal(other.page(key), page)
    assert int.from_bytes(keys[2][:1], "big") == int(other.path(keys[2]).parent.name, 16)


@pytest.mark.parametrize("extra_key", ["", "tenant é", None])
def test_keys_are_those_of_the_document(root: Path, extra_key: str | None) -> None:
    tokens = np.arange(-3, 9, dtype="<i8")
    own = PageHasher(SPACE, extra_key).chain(None, tokens.tobytes())
    assert reader(root).keys([int(t) for t in tokens], extra_key) == own


def test_the_key_of_a_window_or_state_is_that_of_the_document() -> None:
    space = (SPACE.model_id, SPACE.model_version, SPACE.page_size, SPACE.kv_dtype)
    layout = hashlib.sha256(SPACE.layout_id.encode()).digest()
    full = chain(1)[0][0]
    assert hashlib.sha256(framed(full, *space, layout)).digest() == companion_key(SPACE)(full)


@pytest.mark.parametrize(
    ("place", "fault"), [(-1, "checksum"), (-SPACE.page_bytes - 60, "header_crc32")]
)
def test_the_checks_of_the_document_find_damage(root: Path, place: int, fault: str) -> None:
    (key,) = store_chain(root, 1)
    content = bytearray(path_of(root, key).read_bytes())
    content[place] ^= 1
    path_of(root, key).write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        reader(root).page(key)


@pytest.mark.parametrize("model_id", ["org/model", "a model", "Ünï", ".hidden"])
def test_the_file_of_a_model_is_where_the_document_says(root: Path, model_id: str) -> None:
    space = StorageNamespace(model_id, "v", 4, "float32", "layout", 16)
    (key,) = reader(root, space).keys(range(4))
    assert LocalFileStorage(root, space).path_of(key) == reader(root, space).path(key)


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)
    assert match is not None
    return match[1]


def test_plain_numpy_reads_a_page_as_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = store_chain(root, 3)
    names: dict[str, Any] = {"path": path_of(root, keys[2])}
    exec(block("python"), names)
    np.testing.assert_array_equal(names["payload"], chain(3)[1][2])
    out = capsys.readouterr().out
    assert "page 2 of its prompt" in out
    assert f"follows {keys[1].hex()}" in out
    assert SPACE.kv_dtype in out


def fields_of(version: RecordVersion) -> list[tuple[str, int]]:
    record = np.dtype([*version.fields])
    return [(name, record[name].itemsize) for name in record.names or ()]


def test_the_table_of_fields_is_the_format() -> None:
    rows = re.findall(r"^\| ([a-z0-9_, ]+) \| ([\d +]+) \|", DOCUMENT, re.MULTILINE)
    listed = [
        (name, int(size))
        for names, sizes in rows
        for name, size in zip(names.split(", "), sizes.split(" + "), strict=True)
    ]
    assert listed == fields_of(VERSION_2)
    new = {"parent_key", "page_index", "layout_id"}
    assert [field for field in listed if field[0] not in new] == fields_of(VERSION_1)


def test_the_layout_that_is_shown_is_smollm2s() -> None:
    match = re.search(r"`(hicache-page-v1\|\S+;)`", DOCUMENT)
    assert match is not None
    config = read_config("smollm2")
    pool = build_kv_pool(config, size=16, swa_size=0, page_size=16, dtype="float32")
    layout = DeviceBuffers(kv_buffer_refs(pool)).layout(ComponentKind.FULL, page_size=16)
    assert layout.layout_id.startswith(match[1])
