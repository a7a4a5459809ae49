"""What can stand in a page's place: every kind of damage, as a function of the page's path."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from storage_kit import SPACE, make_keys, make_page

from sgl_jax.srt.mem_cache.hicache.storage.local_file import LocalFileStorage

KEYS = make_keys(3)
PAGES = [make_page(i) for i in range(3)]


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def truncate(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, num_bytes)


def zero_payload(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1000] + bytes(1000))


def zero_file(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def other_key(path: Path) -> None:
    name = f"{KEYS[0].hex()}.npy"
    shutil.copy(path.parent.parent / name[:2] / name, path)


def other_namespace(path: Path) -> None:
    """Same key, same sizes, another dtype."""
    foreign = LocalFileStorage(path.parents[3], replace(SPACE, kv_dtype="float16"))
    path.unlink()
    assert foreign.set([KEYS[1]], [[PAGES[1]]]) == [True]
    assert path.exists()


def pickle(path: Path) -> None:
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.".ljust(path.stat().st_size, b"."))


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "something").write_text("of somebody")


def symlink_to_a_good_page(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def dangling_symlink(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/somewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path may be longer than a socket address can be
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s")
        Path("s").rename(path.name)
    finally:
        os.chdir(here)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "numpy magic": flip(0),
    "numpy header": flip(20),
    "record magic": flip(-1384),
    "format version": flip(-1376),
    "checksum kind": flip(-1372),
    "checksum": flip(-1358),
    "key": flip(-1348),
    "namespace": flip(-1318),
    "layout": flip(-1288),
    "page size": flip(-1255),
    "payload bytes": flip(-1246),
    "dtype": flip(-1238),
    "model id": flip(-1218),
    "parent key": flip(-1120),
    "page index": flip(-1098),
    "layout text": flip(-1080),
    "header crc": flip(-1002),
    "first payload byte": flip(-1000),
    "last payload byte": flip(-1),
    "empty": truncate(0),
    "header only": truncate(700),
    "half": truncate(1000),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte long": extend,
    "zero payload": zero_payload,
    "zeroes": zero_file,
    "page of another key": other_key,
    "page of another namespace": other_namespace,
    "pickle": pickle,
    "folder": folder,
    "full folder": full_folder,
    "symlink to a good page": symlink_to_a_good_page,
    "dangling symlink": dangling_symlink,
    "fifo": fifo,
    "socket": unix_socket,
}
