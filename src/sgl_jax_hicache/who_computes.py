"""Who computes: all that the bits of a KV page depend on besides weights, config and the code of the decoder."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import jax

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
"""Variables of the environment that can change how XLA computes."""

_CPUINFO = Path("/proc/cpuinfo")

_FLOAT_SETS = ("sse", "avx", "fma", "f16c", "amx", "fp", "asimd", "sve", "sme", "bf16")
"""Beginnings of the names of instruction sets that XLA makes use of for sums and products."""


def who_computes() -> str:
    """One text, equal only where the same device, compiler and settings compute. Another release of the compiler or a
    processor without fused multiply-add gives pages that differ in their last bits.
    """
    device = jax.devices()[0]
    parts = [
        f"platform={jax.default_backend()}:{device.device_kind}:{device.client.platform_version}",
        f"jax={jax.__version__}",
        f"jaxlib={metadata.version('jaxlib')}",
        f"matmul_precision={jax.config.jax_default_matmul_precision}",  # type: ignore[attr-defined]
        *(f"{name}={os.environ.get(name)}" for name in _VARIABLES),
    ]
    if jax.default_backend() == "cpu":
        parts.append(f"cpu={platform.machine()}:{_float_sets()}")
    return "\n".join(parts)


def _float_sets() -> str:
    """The processor's instruction sets as Linux names them; "" where it does not say."""
    try:
        lines = _CPUINFO.read_text(encoding="latin1").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(s for s in value.split() if s.startswith(_FLOAT_SETS)))
    return ""
