"""Takes named tensors out of a checkpoint, as float32, with the shapes that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model_config import ModelError

Tensor = npt.NDArray[Any]
TensorSource = Callable[[str], Tensor]
"""Gives one tensor by its Hugging Face name; raises KeyError if the checkpoint lacks it."""


class TensorReader:
    """Takes tensors as float32 and checks their shapes."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def take(self, name: str, *shape: int) -> npt.NDArray[np.float32]:
        """float32[shape]. Raises ModelError if the tensor is missing or has another shape."""
        try:
            tensor = self._source(name)
        except KeyError:
            raise ModelError(f"the checkpoint has no tensor {name!r}") from None
        if tensor.shape != shape:
            raise ModelError(f"tensor {name!r} has shape {tensor.shape}, the config needs {shape}")
        return tensor.astype(np.float32)
