"""The names of pages: stable, injective, chained, equal in every process."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from sgl_jax.srt.mem_cache.hicache.page_key import (
    CHAIN_START,
    PageHasher,
    StorageNamespace,
    namespace_digest,
)
from sgl_jax.srt.mem_cache.hicache.types import PageKey

SPACE = StorageNamespace(
    model_id="org/model",
    model_version="0123abcd",
    page_size=4,
    kv_dtype="bfloat16",
    layout_id="hicache-page-v1|full|page=4|shard=0/1|k0:bfloat16[4,2,8]",
    page_bytes=512,
)


def token_bytes(first: int, num_tokens: int) -> bytes:
    return np.arange(first, first + num_tokens, dtype="<i8").tobytes()


def hex_keys(keys: list[PageKey]) -> list[str]:
    return [key.hex() for key in keys]


def framed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def int_field(number: int) -> bytes:
    return number.to_bytes(8, "little")


def independent_key(parent: bytes, extra: bytes, tokens: bytes, width: int = 8) -> str:
    """The formula of the module's docstring, written a second time."""
    message = framed(
        parent,
        b"org/model",
        b"0123abcd",
        int_field(4),
        b"bfloat16",
        hashlib.sha256(SPACE.layout_id.encode()).digest(),
        extra,
        int_field(width),
        tokens,
    )
    return hashlib.sha256(message).hexdigest()


GOLDEN = [
    "4d6c869ebd1d9ba8e84f064f74cca7e0e675093573db4f88794442c22cc959db",
    "18245e7e613323122b65e8343c3122ea93f67b861b9592efcce7b2005a39bc7f",
]


def test_the_format_is_pinned() -> None:
    """A change here orphans every page in every storage: raise the version in CHAIN_START and say so."""
    assert hex_keys(PageHasher(SPACE, None).chain(None, token_bytes(0, 8))) == GOLDEN


def test_keys_follow_the_written_formula() -> None:
    tokens = token_bytes(5, 8)
    first = independent_key(CHAIN_START, b"\x00", tokens[:32])
    second = independent_key(bytes.fromhex(first), b"\x00", tokens[32:])
    assert hex_keys(PageHasher(SPACE, None).chain(None, tokens)) == [first, second]
    salted = independent_key(CHAIN_START, b"\x01tenant", tokens[:32])
    assert hex_keys(PageHasher(SPACE, "tenant").chain(None, tokens[:32])) == [salted]


def test_a_chain_can_be_continued_from_any_page() -> None:
    hasher, tokens = PageHasher(SPACE, None), token_bytes(0, 40)
    whole = hasher.chain(None, tokens)
    assert len(whole) == 10
    for cut in range(1, 10):
        rest = hasher.chain(whole[cut - 1], memoryview(tokens)[cut * 32 :])
        assert hasher.chain(None, tokens, cut) + rest == whole


def test_equal_tokens_after_different_prefixes_differ() -> None:
    hasher, page = PageHasher(SPACE, None), token_bytes(100, 4)
    after_a = hasher.chain(None, token_bytes(0, 4) + page)[1]
    after_b = hasher.chain(None, token_bytes(1, 4) + page)[1]
    at_start = hasher.chain(None, page)[0]
    assert len({after_a, after_b, at_start}) == 3


def test_every_part_of_the_identity_enters_the_key() -> None:
    variants = [
        SPACE,
        replace(SPACE, model_id="org/model2"),
        replace(SPACE, model_id="org/mode", model_version="l0123abcd"),
        replace(SPACE, model_version="0123abc", kv_dtype="dbfloat16"),
        replace(SPACE, model_version="0123abce"),
        replace(SPACE, kv_dtype="float16"),
        replace(SPACE, layout_id=SPACE.layout_id.replace("shard=0/1", "shard=0/2")),
        replace(SPACE, layout_id=SPACE.layout_id.replace("shard=0/1", "shard=1/2")),
        replace(SPACE, model_id="", model_version=""),
    ]
    extras = [None, "", "a", "b", "aa", "\x00", "\ud800"]
    tokens = token_bytes(0, 4)
    keys = [
        PageHasher(space, extra).chain(None, tokens)[0]
        for space, extra in itertools.product(variants, extras)
    ]
    assert len(set(keys)) == len(variants) * len(extras)


def test_page_size_and_token_width_enter_the_key() -> None:
    """64 bytes of tokens: two pages of 4, one page of 8, or one page of 4 bigrams."""
    tokens = token_bytes(0, 8)
    by_four = PageHasher(SPACE, None).chain(None, tokens)
    by_eight = PageHasher(replace(SPACE, page_size=8), None).chain(None, tokens)
    bigrams = PageHasher(SPACE, None, 16).chain(None, tokens)
    wide = PageHasher(replace(SPACE, page_size=2), None, 32).chain(None, tokens)
    assert len({*by_four, *by_eight, *bigrams, *wide}) == 5
    assert bigrams[0].hex() == independent_key(CHAIN_START, b"\x00", tokens, width=16)


def test_every_namespace_field_enters_the_digest() -> None:
    variants = [
        SPACE,
        replace(SPACE, model_id="x"),
        replace(SPACE, model_version="x"),
        replace(SPACE, page_size=8),
        replace(SPACE, kv_dtype="x"),
        replace(SPACE, layout_id="x"),
        replace(SPACE, page_bytes=513),
        replace(SPACE, model_id="org/model0", model_version="123abcd"),
    ]
    assert len({namespace_digest(space) for space in variants}) == len(variants)


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_other_processes_compute_the_same(hash_seed: str) -> None:
    program = (
        "from sgl_jax_hicache import overlay; overlay.activate()\n"
        "import numpy as np\n"
        "from sgl_jax.srt.mem_cache.hicache.page_key import PageHasher, StorageNamespace\n"
        f"keys = PageHasher({SPACE!r}, None).chain(None, np.arange(8, dtype='<i8').tobytes())\n"
        "print(' '.join(key.hex() for key in keys))\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == GOLDEN, done.stderr


def test_num_pages_hashes_only_the_first_ones() -> None:
    hasher, tokens = PageHasher(SPACE, None), token_bytes(0, 12)
    assert hasher.chain(None, tokens, 2) == hasher.chain(None, tokens)[:2]
    assert hasher.chain(None, tokens, 0) == []
    assert hasher.chain(None, b"") == []


def test_wrong_calls_are_refused() -> None:
    hasher = PageHasher(SPACE, None)
    with pytest.raises(ValueError, match="33 token bytes are not whole pages of 32"):
        hasher.chain(None, bytes(33))
    with pytest.raises(ValueError, match="2 pages asked of 32 token bytes"):
        hasher.chain(None, bytes(32), 2)
    with pytest.raises(ValueError, match="-1 pages"):
        hasher.chain(None, bytes(32), -1)
    with pytest.raises(ValueError, match="32 bytes, the parent has 3"):
        hasher.chain(PageKey(b"abc"), bytes(32))
    with pytest.raises(ValueError, match="page_size 0"):
        PageHasher(replace(SPACE, page_size=0), None)
