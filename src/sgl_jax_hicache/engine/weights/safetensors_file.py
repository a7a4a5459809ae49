"""A directory with config.json and *.safetensors, as Hugging Face lays models out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from ..model_config import ModelConfig, ModelError, config_from_file
from .fingerprint import TensorBytes, model_version
from .tensor_reader import Tensor


class SafetensorsDirectory:
    """Opens every *.safetensors file of a directory. Raises ModelError if there is none or one is unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            for name in _names(file):
                self._files[name] = file
        if not self._files:
            raise ModelError(f"{path} holds no *.safetensors file")

    @property
    def config(self) -> ModelConfig:
        """The model's config, from config.json."""
        return config_from_file(self.path / "config.json")

    def tensor(self, name: str) -> Tensor:
        """One tensor by name, in its stored dtype. Raises KeyError if no file has it."""
        with safe_open(self._files[name], framework="numpy") as handle:
            return np.asarray(handle.get_tensor(name))

    def version(self) -> str:
        """The model version: a digest over the stored tensors."""
        return model_version(self._tensor_bytes())

    def _tensor_bytes(self) -> Iterator[TensorBytes]:
        for name in self._files:
            tensor = np.ascontiguousarray(self.tensor(name))
            data = tensor.reshape(-1).view(np.uint8)
            yield TensorBytes(name, tensor.shape, tensor.dtype.name, data)


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="numpy") as handle:
            return list(handle.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights file {file}: {error}") from error
