"""What the names of pages cost, against the bare chain of `hashlib` over the same tokens.

`bytes` hashes tokens that are bytes already, as tree keys are; `list` encodes a list of integers first.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np

from sgl_jax.srt.mem_cache.hicache.page_key import CHAIN_START, PageHasher, StorageNamespace
from sgl_jax.srt.mem_cache.hicache.token_key import TokenCodec

from .record import Record, measured, rates, side_by_side


def bare_chain(tokens: bytes, page_bytes: int) -> list[bytes]:
    """A hash chain over pages, with nothing else in it."""
    link, links = CHAIN_START, []
    for start in range(0, len(tokens), page_bytes):
        digest = hashlib.sha256(link)
        digest.update(tokens[start : start + page_bytes])
        link = digest.digest()
        links.append(link)
    return links


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--repeats", type=int, default=50)


def run(args: argparse.Namespace) -> list[Record]:
    """Chains of every page size."""
    records = []
    for page_size in args.page_sizes:
        num_tokens = max(args.tokens // page_size, 1) * page_size
        ids = np.random.default_rng(0).integers(0, 100_000, num_tokens)
        token_list, codec = ids.tolist(), TokenCodec(page_size)
        tokens = codec.encode(token_list)
        namespace = StorageNamespace("bench", "0", page_size, "float32", "layout " * 50, 4096)
        hasher = PageHasher(namespace, None)
        actions = (
            lambda tokens=tokens, codec=codec: bare_chain(tokens, codec.page_bytes),
            lambda hasher=hasher, tokens=tokens: hasher.chain(None, tokens),
            lambda hasher=hasher, codec=codec, ids=token_list: hasher.chain(
                None, codec.encode(ids)
            ),
        )
        bare, from_bytes, from_list = (
            rates(num_tokens / 1e6, seconds) for seconds in side_by_side(actions, args.repeats)
        )
        for source, samples in (("bytes", from_bytes), ("list", from_list)):
            name = f"page keys from {source}"
            records.append(measured(name, samples, "M tokens/s", bare, page_size=page_size))
    return records
