"""What changes a page's bits changes its name: a restart with other settings reads nothing that is not its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from sgl_jax_hicache import overlay

pytestmark = [
    pytest.mark.skipif(
        not overlay.engine_installed(), reason="the sgl-jax engine is not installed here"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # those of the engine's own imports
]

SETTINGS: dict[str, Any] = {
    "model_path": "/models/tiny",
    "served_model_name": "/models/tiny",
    "dtype": "float32",
    "dtype_config": None,
    "attention_backend": "fa",
    "tp_size": 1,
}


def version(weight: float = 1.0, rope_theta: float = 1e4, **changed: Any) -> str:
    from flax import nnx

    from sgl_jax_hicache.sgl_jax_engine.model_identity import model_identity

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.array([1.0, weight]))

    config = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": rope_theta, "_name_or_path": "x"})
    )
    return model_identity(SimpleNamespace(**SETTINGS | changed), config, Model()).model_version


def test_where_the_model_lies_does_not_matter() -> None:
    assert version() == version(model_path="/elsewhere/tiny", served_model_name="/elsewhere/tiny")


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": 1.0000001},
        {"rope_theta": 2e4},
        {"dtype": "bfloat16"},
        {"dtype_config": "softmax.json"},
        {"attention_backend": "native"},
        {"tp_size": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_the_arithmetic_changes_the_version(changed: dict[str, Any]) -> None:
    assert version(**changed) != version()


@pytest.mark.parametrize("variable", ["SGLANG_JAX_CONV_STATE_DTYPE", "DSA_INDEX_TOPK"])
def test_so_do_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    without = version()
    monkeypatch.setenv(variable, "1")
    assert version() != without


def test_so_does_the_precision_of_products() -> None:
    import jax

    without = version()
    with jax.default_matmul_precision("highest"):
        assert version() != without
