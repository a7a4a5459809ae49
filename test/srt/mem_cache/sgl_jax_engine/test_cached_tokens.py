"""The count that carries its tiers through the engine's messages."""

from __future__ import annotations

import json
import pickle

from sgl_jax_hicache.sgl_jax_engine.cached_tokens import CachedTokens

TIERS = {"device": 16, "host": 32, "storage": 64, "computed": 8}


def test_it_survives_the_way_between_processes() -> None:
    arrived = pickle.loads(pickle.dumps([CachedTokens(112, TIERS)]))[0]
    assert arrived == 112
    assert isinstance(arrived, CachedTokens)
    assert arrived.tiers == TIERS


def test_to_everybody_else_it_is_a_number() -> None:
    count = CachedTokens(112, TIERS)
    assert json.dumps({"cached_tokens": count}) == '{"cached_tokens": 112}'
    assert type(count + 8) is int
    assert repr(count) == "112"
