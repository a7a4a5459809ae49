"""The model version: which weights these are, whatever name they are served under.

KV written by one fine-tune must never be read by another, so the version digests every tensor's name, shape, dtype and
bytes. Tensors over 16 MiB are sampled in windows spread over their whole length: two trainings differ everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model_config import ModelConfig

_WHOLE_BYTES = 16 << 20
_WINDOW_BYTES = 4096


@dataclass(frozen=True)
class TensorBytes:
    """One tensor as its file holds it; `data` is uint8[num_bytes]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[np.uint8]


def model_version(tensors: Iterable[TensorBytes]) -> str:
    """A hex digest of all tensors; does not depend on their order."""
    digests = sorted(_tensor_digest(tensor) for tensor in tensors)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def config_version(weights_version: str, config: ModelConfig) -> str:
    """The version of weights as `config` computes with them.

    A window, or which layers slide, changes the KV of later layers without a trace in the tensors.
    """
    if config.is_full_attention:
        return weights_version
    fields = config.to_json()
    named = [fields.get(name) for name in ("layer_kinds", "sliding_window", "recurrent")]
    return hashlib.sha256(json.dumps([weights_version, named]).encode()).hexdigest()


def _tensor_digest(tensor: TensorBytes) -> bytes:
    digest = hashlib.sha256()
    shape = ",".join(map(str, tensor.shape))
    for part in (tensor.name, shape, tensor.dtype, str(tensor.data.size)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    for window in _windows(tensor.data):
        digest.update(window)
    return digest.digest()


def _windows(data: npt.NDArray[np.uint8]) -> list[bytes]:
    """The bytes to digest: all of them, or equally spaced windows that include both ends."""
    if data.size <= _WHOLE_BYTES:
        return [data.tobytes()]
    count = _WHOLE_BYTES // _WINDOW_BYTES
    starts = np.linspace(0, data.size - _WINDOW_BYTES, count).astype(np.int64)
    return [data[s : s + _WINDOW_BYTES].tobytes() for s in starts]
