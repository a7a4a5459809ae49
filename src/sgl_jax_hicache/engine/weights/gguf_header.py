"""The header of a GGUF file: metadata values and where each tensor lies.

`gguf.GGUFReader` keeps every string of the vocabulary as several numpy views, which takes seconds for a tokenizer of
50,000 pieces; reading the same bytes with `struct` takes a tenth of one. Dequantisation stays with the `gguf` package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

from ..model_config import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PLAIN_TYPES: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` is row-major (the file lists it reversed); `data` maps the file, quantised as stored."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: npt.NDArray[Any]


@dataclass(frozen=True)
class GGUFHeader:
    """All metadata values by key, and all tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFHeader:
    """Reads the header and maps the tensors. Raises ModelError if the file is missing, short or no GGUF."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(_Cursor(buffer))
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelError(f"cannot read the GGUF file {path}: {error}") from error


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.offset = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.buffer, self.offset)[0]
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = struct.unpack_from("<Q", self.buffer, self.offset)[0]
        start = self.offset + 8
        self.offset = start + length
        if self.offset > len(self.buffer):
            raise ValueError(f"a string of {length} bytes reaches past the end")
        return self.buffer[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALAR_FORMATS[kind])
        item_kind, length = self.scalar("I"), self.scalar("Q")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind) for _ in range(length)]
        layout = f"<{length}{_SCALAR_FORMATS[item_kind]}"
        items = struct.unpack_from(layout, self.buffer, self.offset)
        self.offset += struct.calcsize(layout)
        return list(items)


def _parse(cursor: _Cursor) -> GGUFHeader:
    magic, version = cursor.buffer[:4], struct.unpack_from("<I", cursor.buffer, 4)[0]
    if magic != _MAGIC or version not in _VERSIONS:
        raise ValueError(f"found magic {magic!r} version {version}, not GGUF of {_VERSIONS}")
    cursor.offset = 8
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    fields = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_fields)}
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = int(fields.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = -(-cursor.offset // alignment) * alignment
    tensors = [_map(cursor.buffer, start, info) for info in infos]
    return GGUFHeader(fields, {tensor.name: tensor for tensor in tensors})


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """(name, row-major shape, quantisation, offset from the start of the data)."""
    name, num_dims = cursor.string(), cursor.scalar("I")
    reversed_shape = [cursor.scalar("Q") for _ in range(num_dims)]
    return name, tuple(reversed(reversed_shape)), _quantisation(cursor), cursor.scalar("Q")


def _quantisation(cursor: _Cursor) -> GGMLQuantizationType:
    return GGMLQuantizationType(cursor.scalar("I"))


def _map(
    buffer: mmap.mmap, start: int, info: tuple[str, tuple[int, ...], GGMLQuantizationType, int]
) -> GGUFTensor:
    name, shape, kind, offset = info
    dtype: np.dtype[Any] = _PLAIN_TYPES.get(kind, np.dtype(np.uint8))
    stored = shape if kind in _PLAIN_TYPES else quant_shape_to_byte_shape(shape, kind)
    count = int(np.prod(stored))
    if start + offset + count * dtype.itemsize > len(buffer):
        raise ValueError(f"tensor {name!r} reaches past the end of the file")
    data = np.frombuffer(buffer, dtype, count=count, offset=start + offset).reshape(stored)
    return GGUFTensor(name, shape, kind, data)
