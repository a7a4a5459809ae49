"""The model version: which weights these are, whatever name they are served under.

KV written by one fine-tune must never be read by another, so the version digests every tensor's name, shape, dtype and
all of its bytes: a fine-tune may differ in the embedding of a single token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..model_config import ModelConfig

DECODER_VERSION = "embedded-3"
"""Changes whenever the decoder computes other bits than before."""


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


def serving_version(weights_version: str, config: ModelConfig, who_computes: str) -> str:
    """The version that names KV pages: the weights, the config they are run with, and who computes with them.

    The same tensors with another rope base, or on another device or compiler (`who_computes`), give other pages.
    `DECODER_VERSION` changes with the decoder's arithmetic.
    """
    config_text = json.dumps(config.to_json(), sort_keys=True)
    parts = (weights_version, config_text, who_computes, DECODER_VERSION)
    return hashlib.sha256(b"".join(_framed(part) for part in parts)).hexdigest()


def _framed(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _tensor_digest(tensor: TensorBytes) -> bytes:
    digest = hashlib.sha256()
    shape = ",".join(map(str, tensor.shape))
    for part in (tensor.name, shape, tensor.dtype, str(tensor.data.size)):
        digest.update(_framed(part))
    digest.update(np.ascontiguousarray(tensor.data).data)
    return digest.digest()
