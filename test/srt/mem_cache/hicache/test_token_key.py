"""Tokens become the same bytes however they are given, and different tokens different bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.token_key import TokenCodec

EXTREMES = [0, 1, -1, 151_643, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63)]


def bytes_of(*positions: int) -> bytes:
    """Little-endian int64, one after the other."""
    return b"".join(token.to_bytes(8, "little", signed=True) for token in positions)


@pytest.mark.parametrize("token", EXTREMES)
def test_a_list_a_tuple_and_an_array_give_the_same_bytes(token: int) -> None:
    codec, tokens = TokenCodec(2), [7, token, token, 9]
    assert codec.encode(tokens) == bytes_of(*tokens)
    assert codec.encode(tuple(tokens)) == bytes_of(*tokens)
    assert codec.encode(np.array(tokens, np.int64)) == bytes_of(*tokens)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_arrays_of_every_width_give_the_same_bytes(dtype: type) -> None:
    assert TokenCodec(2).encode(np.array([7, 65_000], dtype)) == bytes_of(7, 65_000)


@pytest.mark.parametrize("token", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 1.5, "7", None])
def test_what_is_no_int64_is_refused(token: object) -> None:
    """2**64 - 1 has the bits of -1: to take it would let two prompts share pages."""
    with pytest.raises(struct.error):
        TokenCodec(1).encode([token])  # type: ignore[list-item]


def test_only_whole_pages_are_encoded() -> None:
    codec, tokens = TokenCodec(4), list(range(11))
    assert codec.encode(tokens) == bytes_of(*range(8))
    assert codec.encode(tokens[:3]) == codec.encode([]) == b""
    assert codec.encode([*range(8), "no token"]) == bytes_of(*range(8))  # type: ignore[list-item]


@pytest.mark.parametrize("num_tokens", [4095, 4096, 4097, 8200])
def test_long_lists_are_encoded_whole(rng: np.random.Generator, num_tokens: int) -> None:
    tokens = rng.integers(0, 2**40, num_tokens)
    assert TokenCodec(1).encode(tokens.tolist()) == tokens.tobytes()
    tokens[-1] = -1
    assert TokenCodec(1).encode(tokens.tolist()) == tokens.tobytes()


def test_a_bigram_is_two_neighbours() -> None:
    codec = TokenCodec(2, is_eagle=True)
    wanted = bytes_of(1, 2, 2, 3)
    assert codec.encode([1, 2, 3]) == codec.encode(np.array([1, 2, 3, 4])) == wanted
    assert codec.encode([1, 2]) == b""


def test_random_lists_and_arrays_agree(rng: np.random.Generator) -> None:
    for _ in range(50):
        tokens = rng.integers(-(2**63), 2**63 - 1, int(rng.integers(1, 200)), endpoint=True)
        shift = int(rng.integers(0, 63))
        tokens >>= shift
        assert TokenCodec(1).encode(tokens.tolist()) == TokenCodec(1).encode(tokens)
