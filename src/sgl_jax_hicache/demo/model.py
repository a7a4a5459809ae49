"""The model of the demo: what the servers are started with, and how long its prompts must be."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_jax_hicache.engine.model_spec import PRESET_NAMES

from .conversations import BYTE_LENGTHS, WORD_LENGTHS, Lengths

SEED = 7
"""The weights of a tiny model are made from this when its server starts, and so are the same in every run."""


@dataclass(frozen=True)
class DemoModel:
    """`path`: what `launch_server` takes. `lengths`: of prompts that its context and the device pool hold.

    `is_tiny`: its weights are random, so that its answers mean nothing, and its times little.
    """

    path: str
    lengths: Lengths
    is_tiny: bool

    @classmethod
    def named(cls, name: str) -> DemoModel:
        """The tiny model of that name, or whatever `launch_server` knows by it. Tiny models read bytes."""
        if name in PRESET_NAMES:
            name = f"random:{name}:{SEED}"
        is_tiny = any(name.startswith(f"random:{preset}:") for preset in PRESET_NAMES)
        return cls(name, BYTE_LENGTHS if is_tiny else WORD_LENGTHS, is_tiny)
