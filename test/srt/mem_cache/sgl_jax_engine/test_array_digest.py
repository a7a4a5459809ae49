"""The digest of weights: every element counts, and so does its place; how the array is sharded does not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sgl_jax_hicache.sgl_jax_engine.array_digest import digest_array

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "uint8",
    "int32",
    "bool",
    "float8_e4m3fn",
    "int4",
)


def values_of(dtype: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, shape).astype(bool))
    return jnp.asarray(
        rng.integers(-7, 8, shape) if "uint" not in dtype else rng.integers(0, 8, shape)
    ).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_changes_it(dtype: str, rng: np.random.Generator) -> None:
    array = values_of(dtype, rng, (3, 5, 4))
    digest = digest_array(array)
    assert digest == digest_array(jnp.array(array))
    assert len(digest) == 8
    for place in [(0, 0, 0), (2, 4, 3), (1, 2, 3)]:
        other = np.array(array)
        other[place] = not other[place] if dtype == "bool" else (1 if other[place] == 2 else 2)
        assert digest_array(jnp.asarray(other)) != digest


def test_the_place_counts(rng: np.random.Generator) -> None:
    array = rng.permutation(24).reshape(4, 6).astype(np.float32)
    seen = {digest_array(jnp.asarray(array))}
    for changed in (array[::-1], array[:, ::-1], array.T):
        seen.add(digest_array(jnp.asarray(changed.copy())))
    assert len(seen) == 4


def test_zeros_of_each_sign_and_every_nan_differ() -> None:
    bits = np.array([0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    digests = {
        digest_array(jnp.asarray(bits[i : i + 1].view(np.float32))) for i in range(len(bits))
    }
    assert len(digests) == len(bits)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "spec", [("data", "tensor"), (None, "tensor"), (("data", "tensor"), None), ()]
)
def test_sharding_does_not_change_it(
    spec: tuple[Any, ...], axis_type: AxisType, rng: np.random.Generator
) -> None:
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2
    )
    array = jnp.asarray(rng.standard_normal((8, 12)), jnp.bfloat16)
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))  # type: ignore[no-untyped-call]
    with jax.set_mesh(mesh):
        assert digest_array(sharded) == digest_array(array)


def test_keys_and_nothing() -> None:
    assert digest_array(jax.random.key(1)) != digest_array(jax.random.key(2))
    assert digest_array(jnp.zeros((0, 3))) == b""
