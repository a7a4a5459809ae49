"""The benchmarks of levels and engines: every size measured, hits from where they are said to be, steps told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from sgl_jax.srt.mem_cache.hicache.types import Tier
from sgl_jax_hicache.bench.__main__ import main
from sgl_jax_hicache.bench.step_profile import Call, Profile, TimedTree, profile
from sgl_jax_hicache.bench.ttft import visits
from sgl_jax_hicache.engine.engine import Engine


def test_every_operation_is_measured_at_every_size(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    sizes = ["--leaves", "4", "40", "--slots", "8", "80", "--files", "5", "50"]
    assert main(["scaling", *sizes, "--pages", "4", "--repeats", "2", "--json", str(path)]) == 0
    found: dict[str, list[int]] = {}
    for record in json.loads(path.read_text()):
        if record["name"] == "tree memory":
            continue
        (size,) = (
            record["params"][k] for k in ("leaves", "slots", "files") if k in record["params"]
        )
        found.setdefault(record["name"], []).append(size)
        assert record["value"] > 0
        assert record["ratio"] == pytest.approx(record["value"] / record["limit"])
    assert found == {
        "tree match, 32 tokens": [4, 40],
        "tree insert one node": [4, 40],
        "tree evict one node": [4, 40],
        "host pool alloc + free": [8, 80],
        "host pool alloc + put + mark_ready + free": [8, 80],
        "storage exists": [5, 50],
    }


class ShortMemory:
    """An engine that has the last prompt on the device and the others in L2; after a flush all are in L3."""

    def __init__(self, roomy: bool = False) -> None:
        self.roomy = roomy
        self.places: dict[int, Tier] = {}

    def generate(self, input_ids: list[int], sampling_params: dict[str, int]) -> dict[str, Any]:
        assert sampling_params == {"max_new_tokens": 1}
        place = self.places.get(input_ids[0], Tier.COMPUTED)
        for first, where in self.places.items():
            if where is Tier.DEVICE and not self.roomy:
                self.places[first] = Tier.HOST
        self.places[input_ids[0]] = Tier.DEVICE
        tokens = {tier.value: 0 for tier in Tier}
        tokens[Tier.COMPUTED.value] = 16
        tokens[place.value] += len(input_ids) - 16
        seconds = {Tier.COMPUTED: 4.0, Tier.HOST: 1.0, Tier.STORAGE: 2.0, Tier.DEVICE: 0.5}[place]
        return {"meta_info": {"ttft_s": seconds, "cached_tokens_details": tokens}}

    def get_server_info(self) -> dict[str, Any]:
        return {"state": {"pending_transfers": False}}

    def flush_cache(self) -> bool:
        self.places = dict.fromkeys(self.places, Tier.STORAGE)
        return True


PROMPTS = [[1] * 64, [2] * 64]
OTHER = [3] * 64


def test_a_time_to_the_first_token_belongs_to_the_level_that_served_the_prompt() -> None:
    found = visits(cast(Engine, ShortMemory()), PROMPTS, OTHER, rounds=3)
    seconds = {tier: [visit.seconds for visit in made] for tier, made in found.items()}
    assert seconds == {Tier.COMPUTED: [4.0] * 2, Tier.HOST: [1.0] * 6, Tier.STORAGE: [2.0] * 6}


def test_a_prompt_that_another_level_served_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="host should have served"):
        visits(cast(Engine, ShortMemory(roomy=True)), PROMPTS, OTHER, rounds=1)


class Tree:
    """What a watcher sees of a cache."""

    page_size = 16

    def evict(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError("negative")
        return 2 * num_tokens

    def cache_unfinished_req(self, req: int) -> None:
        pass

    def cache_finished_req(self, req: int) -> None:
        pass

    def flush_write_through_acks(self) -> None:
        pass

    def wait_events(self, timeout_s: float) -> bool:
        return timeout_s > 0


def test_a_watched_cache_answers_as_itself_and_its_calls_are_written_down() -> None:
    tree = TimedTree(Tree())
    assert tree.page_size == 16
    assert [tree.evict(3), tree.evict(num_tokens=4)] == [6, 8]
    with pytest.raises(ValueError, match="negative"):
        tree.evict(-1)
    assert tree.wait_events(1.0)
    assert [call.name for call in tree.calls] == ["evict"] * 3
    assert tree.calls[0].begun_s + tree.calls[0].seconds <= tree.calls[1].begun_s


class Steps:
    """An engine whose requests come one after the other, run together for `shared` steps, and end."""

    def __init__(self, tree: TimedTree, shared: int) -> None:
        self.tree, self.shared = tree, shared

    def generate(self, input_ids: list[list[int]], sampling_params: Any) -> list[dict[str, Any]]:
        for number, _ in enumerate(input_ids):
            self.tree.cache_unfinished_req(number)
            self.tree.flush_write_through_acks()
        for step in range(self.shared):
            self.tree.flush_write_through_acks()
            self.tree.evict(step)
        for number, _ in enumerate(input_ids):
            self.tree.cache_finished_req(number)
            self.tree.flush_write_through_acks()
        return [{"meta_info": {"cached_tokens": 0}} for _ in input_ids]

    def get_server_info(self) -> dict[str, Any]:
        return {"state": {"pending_transfers": False}}


def test_the_steps_that_count_are_those_of_all_requests() -> None:
    tree = TimedTree(Tree())
    found = profile(cast(Engine, Steps(tree, 5)), tree, num_requests=3, prompt_len=4, new_tokens=8)
    # The step after the last prompt is one of theirs, too; the last one has no end in sight.
    assert [call.name for call in found.in_steps].count("evict") == 4
    assert len(found.steps_s) == 5
    assert set(found.us_per_step()) == {"evict", "flush_write_through_acks"}
    assert "cache_finished_req" in found.us_per_request(3)


def test_requests_that_never_run_all_at_once_are_no_figure() -> None:
    tree = TimedTree(Tree())
    with pytest.raises(RuntimeError, match="never ran all at once"):
        profile(cast(Engine, Steps(tree, 0)), tree, num_requests=3, prompt_len=4, new_tokens=8)


def test_a_profile_shares_the_time_of_each_call_among_the_steps() -> None:
    calls = (Call("match", 0.0, 1e-6), Call("evict", 0.1, 2e-6), Call("match", 0.2, 5e-6))
    found = Profile(steps_s=(0.1, 0.1), in_steps=calls, in_all=calls)
    assert found.us_per_step() == pytest.approx({"match": 3.0, "evict": 1.0})
    assert list(found.us_per_request(4)) == ["match", "evict"]
