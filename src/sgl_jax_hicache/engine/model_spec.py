"""What may be given as a model, and the checks of it that read no more than a config.json.

Nothing here imports jax or a reader of weights: a mistyped path is told at once.
"""

from __future__ import annotations

from pathlib import Path

from .model_config import ModelError, config_from_file

SMOLLM2 = "smollm2"
PRESET_NAMES = (
    *("tiny-mha", "tiny-gqa", "tiny-mla"),
    *("tiny-swa", "tiny-swa-only", "tiny-recurrent", "tiny-hybrid"),
)
"""The models with random weights, as in random:tiny-mha:0."""

ALLOWED = (
    f"{SMOLLM2}, a folder with config.json, a .gguf file, or random:<name>:<seed> "
    f"with a name of {', '.join(PRESET_NAMES)} or such a folder"
)


def check_spec(spec: str) -> None:
    """Raises ModelError, saying what is allowed, if `spec` can name no model that this engine serves."""
    if spec == SMOLLM2:
        return
    if spec.startswith("random:"):
        name, _ = parse_random(spec)
        if name not in PRESET_NAMES:
            _check_folder(name, f"no model with random weights is called {name!r}")
        return
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"the file is no .gguf file; give {ALLOWED}")
        return
    _check_folder(spec, f"no model at {spec!r}")


def parse_random(spec: str) -> tuple[str, int]:
    """(preset or folder, seed) of random:<preset or folder>:<seed>. Raises ModelError for another form."""
    name, separator, seed = spec.removeprefix("random:").rpartition(":")
    if not separator or not seed.isdecimal():
        raise ModelError(f"not of the form random:<name>:<seed>; give {ALLOWED}")
    return name, int(seed)


def _check_folder(name: str, otherwise: str) -> None:
    path = Path(name).expanduser()
    if not name or not path.is_dir():
        raise ModelError(f"{otherwise}; give {ALLOWED}")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"the folder has no config.json; give {ALLOWED}")
    config_from_file(file)
