"""Requests with different extra_key (a tenant's salt, an adapter) share no page on any level, asked for over HTTP."""

from __future__ import annotations

import random
from pathlib import Path

from engine_fakes import VOCAB_SIZE
from tier_world import tier_world

TENANTS = (None, "a", "b", "a\0", "\0a", "A", "ä")


def test_tenants_share_no_page_on_any_level(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    prompt = [dice.randrange(VOCAB_SIZE) for _ in range(21)]
    filler = [dice.randrange(VOCAB_SIZE) for _ in range(90)]
    settings = {"device_pages": 40, "ratio": 4.0}
    with tier_world(tmp_path / "root", **settings) as world:
        for tenant in TENANTS:
            assert world.ask(prompt, extra_key=tenant) == {"computed": 21}, tenant
        for tenant in TENANTS:
            assert world.ask(prompt, extra_key=tenant) == {"device": 20, "computed": 1}, tenant
        world.settle()
        for _ in range(2):
            world.ask([*filler, dice.randrange(VOCAB_SIZE)])
            filler.reverse()
        assert world.ask(prompt, extra_key="nobody yet") == {"computed": 21}
        from_host = [world.ask(prompt, extra_key=tenant) for tenant in TENANTS]
        assert all("host" in tiers for tiers in from_host), from_host
        world.forget()
        assert world.ask(prompt, extra_key="nobody before") == {"computed": 21}
        world.forget()
        for tenant in TENANTS:
            assert world.ask(prompt, extra_key=tenant) == {"storage": 20, "computed": 1}, tenant
    pages = list((tmp_path / "root").rglob("*.npy"))
    assert len({page.name for page in pages}) == len(pages) >= 5 * (len(TENANTS) + 2)
    with tier_world(tmp_path / "root", **settings) as world:
        assert world.ask(prompt, extra_key="after a restart") == {"computed": 21}
        assert world.ask(prompt, extra_key="b") == {"storage": 20, "computed": 1}
