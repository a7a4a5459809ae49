"""Every kind of cache in the engine, from every tier, in every layout: what is reused is what was computed.

One test a layout, three starts of the engine each: about five minutes on two busy cores, longer where states make XLA
slow. The scheduler is a thread of the driver here, which saves two of the engine's three processes their long import;
`test_in_the_engine.py` has them as they are.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from engine_runs import (
    CPU_ENGINE,
    FLUSH,
    KILL,
    SHUTDOWN,
    TINY_ON_CPU,
    Answer,
    EngineRuns,
    Step,
    abort,
    ask,
    ask_until_eos,
)
from test_in_the_engine import prompt, same
from tiny_models import MODELS

from sgl_jax_hicache import overlay

pytestmark = pytest.mark.skipif(
    not overlay.engine_installed(), reason="the sgl-jax engine is not installed here"
)

TOLERANCE = 1e-5
DECODED_TOLERANCE = 1e-4
# A decode step takes the last inputs of its convolutions from the state, where they are bfloat16 otherwise.
FLOAT32_CONV_STATES = ("SGLANG_JAX_CONV_STATE_DTYPE", "float32")
# The engine's switches for tests: every 23rd step takes a request off the device, full or not, if more than one runs.
RETRACTING = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "23"}
RANK_TOKENS = 1024

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2, "devices": 2},
    "dp2": {"tp_size": 2, "dp_size": 2, "devices": 2},
}


class Trial:
    """One model in one layout, with prompts of `length` tokens of which `reused` can be reused."""

    def __init__(self, name: str, folder: Path, layout: str, page_size: int) -> None:
        model = MODELS[name]
        self._layout = LAYOUTS[layout]
        self._ranks: int = self._layout.get("dp_size", 1)
        self._reused = max(192, 2 * page_size)
        # What is never reused: the last token, and a page that is not full.
        self._length = self._reused + min(8, page_size)
        settings = {
            **TINY_ON_CPU,
            "enable_single_process": True,
            "model_path": str(model.write(folder / "model")),
            "load_format": "dummy",
            "page_size": page_size,
            "max_total_tokens": RANK_TOKENS,
            "chunked_prefill_size": 128,
            "precompile_token_paddings": [128],
            **model.settings,
        }
        if "hicache_checkpoint_interval" in settings:
            settings["hicache_checkpoint_interval"] = max(64, page_size)
        self._runs = EngineRuns(settings, folder, preload=CPU_ENGINE, tolerance=TOLERANCE)

    def prompts(self, seed: int) -> Step:
        """As many as there are ranks, so that each has one."""
        prompts = [prompt(seed + rank, self._length) for rank in range(self._ranks)]
        return ask(*prompts, max_new_tokens=12)

    def others(self, seed: int) -> Step:
        """So many that nothing else stays on the device."""
        count = self._ranks * (RANK_TOKENS // self._length + 3)
        return ask(*(prompt(seed + i, self._length) for i in range(count)), max_new_tokens=2)

    def run(self, *steps: Step, overlap: bool, **settings: Any) -> list[list[Any]]:
        """Start the engine and play the steps; the answers, question by question."""
        settings |= {"disable_overlap_schedule": not overlap, **self._layout}
        answers = self._runs.run(*steps, **settings)
        counts = [len(arguments["prompts"]) for name, arguments in steps if name == "ask"]
        asked = (answer for answer in answers if isinstance(answer, Answer))
        return [list(islice(asked, count)) for count in counts]

    @property
    def num_retracted(self) -> int:
        """Requests that the engine took off the device in the last run, to go on later."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", self._runs.log())))

    def check(self, tier: str, answers: list[Answer], computed: list[Answer]) -> None:
        """All that can be reused came from `tier`, and the answers are those that were computed."""
        for answer, other in zip(answers, computed, strict=True):
            reused = 0 if tier == "computed" else self._reused
            expected = {"device": 0, "host": 0, "storage": 0}
            if reused:
                expected[tier] = reused
            assert answer.tiers == expected | {"computed": self._length - reused}
            assert len(set(answer.output_ids)) > 1, "such an answer would prove nothing"
            same(answer, other, TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_every_tier(tmp_path: Path, name: str, layout: str) -> None:
    """Without overlap: computed, device, host. After a kill, with overlap: storage, and the same once more with other
    prompts. After another kill, without overlap: storage."""
    trial = Trial(name, tmp_path, layout, page_size=16)
    mine, theirs = trial.prompts(1), trial.prompts(11)
    cold, device, _, host = trial.run(mine, mine, trial.others(50), mine, KILL, overlap=False)
    storage, cold2, device2, _, host2 = trial.run(
        mine, theirs, theirs, trial.others(80), theirs, KILL, overlap=True
    )
    storage2, _, flushed = trial.run(theirs, mine, FLUSH, theirs, SHUTDOWN, overlap=False)
    for tier, answers in {
        "computed": cold,
        "device": device,
        "host": host,
        "storage": storage,
    }.items():
        trial.check(tier, answers, cold)
    for tier, answers in {
        "computed": cold2,
        "device": device2,
        "host": host2,
        "storage": storage2,
    }.items():
        trial.check(tier, answers, cold2)
    trial.check("storage", flushed, cold2)
    if layout != "dp2":  # there, how two requests share the ranks changes the shapes of a step
        for answers in (host, storage):
            assert [a.logprobs for a in answers] == [a.logprobs for a in device], (
                "not the same bits"
            )
        for answers in (host2, storage2):
            assert [a.logprobs for a in answers] == [a.logprobs for a in device2], (
                "not the same bits"
            )


# Snapshots are taken at page borders, and the MLA pool's kernel wants pages of more than a token.
PAGED_ONLY = ("deepseek_v3", "kimi_linear", "qwen3_5")


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        (name, size)
        for name in MODELS
        for size in (1, 64, 128)
        if size > 1 or name not in PAGED_ONLY
    ],
)
def test_page_sizes(tmp_path: Path, name: str, page_size: int) -> None:
    """With overlap: computed, device, host, and storage after a kill."""
    trial = Trial(name, tmp_path, "one", page_size)
    mine = trial.prompts(1)
    cold, device, _, host = trial.run(mine, mine, trial.others(50), mine, KILL, overlap=True)
    (storage,) = trial.run(mine, SHUTDOWN, overlap=True)
    for tier, answers in {
        "computed": cold,
        "device": device,
        "host": host,
        "storage": storage,
    }.items():
        trial.check(tier, answers, cold)


@pytest.mark.parametrize("name", MODELS)
def test_crowded_and_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A device too small for the answers of all that run: some wait, some are retracted and computed again. Then all
    are aborted, some while they wait. Neither changes an answer, nor leaves a slot behind (the engine would end itself
    when idle)."""
    monkeypatch.setenv(*FLOAT32_CONV_STATES)
    for variable, value in RETRACTING.items():
        monkeypatch.setenv(variable, value)
    trial = Trial(name, tmp_path, "one", page_size=16)
    prompts = [prompt(30 + i, 100 + i) for i in range(6)]
    alone = [ask_until_eos(each, max_new_tokens=90) for each in prompts]
    together = ask_until_eos(*prompts, max_new_tokens=90)
    *computed, crowded, after_abort, stored = trial.run(
        *alone,
        together,
        abort(*prompts, max_new_tokens=300),
        together,
        FLUSH,
        together,
        SHUTDOWN,
        overlap=True,
        max_total_tokens=512,
        schedule_conservativeness=0.1,
    )
    assert trial.num_retracted >= 6, "the device was to be too small in each of the rounds"
    for answers in (crowded, after_abort, stored):
        for answer, (other,) in zip(answers, computed, strict=True):
            same(answer, other, DECODED_TOLERANCE)


@pytest.mark.parametrize("overlap", [False, True], ids=["no_overlap", "overlap"])
@pytest.mark.parametrize(
    ("name", "reused_len"),
    # A state is kept every 64 tokens; a window of 64 tokens every 64 tokens leaves no gap.
    [("gemma2", 272), ("kimi_linear", 256), ("qwen3_5", 256)],
)
def test_an_answer_leaves_checkpoints_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reused_len: int, overlap: bool
) -> None:
    """A prompt that leaves an earlier answer in its middle goes on from the last border before, not from the prompt."""
    monkeypatch.setenv(*FLOAT32_CONV_STATES)
    trial = Trial(name, tmp_path, "one", page_size=16)
    asked = prompt(1, 200)
    ((answer,),) = trial.run(ask(asked, max_new_tokens=150), SHUTDOWN, overlap=overlap)
    assert len(answer.output_ids) == 150
    fork = [*asked, *answer.output_ids[:80], *prompt(3, 20)]
    again = ask(fork, max_new_tokens=12)
    ((reused,),) = trial.run(again, SHUTDOWN, overlap=overlap)
    elsewhere = str(tmp_path / "elsewhere")
    ((computed,),) = trial.run(again, SHUTDOWN, overlap=overlap, hicache_storage_path=elsewhere)
    assert reused.tiers is not None
    assert reused.tiers["storage"] == reused_len
    assert computed.tiers == {"device": 0, "host": 0, "storage": 0, "computed": len(fork)}
    # What decode steps computed differs from what a chunk would by rounding.
    same(reused, computed, DECODED_TOLERANCE)
