"""The scheduler's own part: which rank a request is given to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_jax_hicache import overlay

pytestmark = pytest.mark.skipif(
    not overlay.engine_installed(), reason="the sgl-jax engine is not installed here"
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # those of the engine's own imports
def test_what_waits_is_load() -> None:
    """As many as there is room for may wait for their pages; another rank takes the next."""
    from sgl_jax.srt.managers.schedule_batch import Req
    from sgl_jax.srt.sampling.sampling_params import SamplingParams
    from sgl_jax_hicache.sgl_jax_engine.scheduler import HiCacheScheduler

    def request(dp_rank: int, prompt_len: int) -> Req:
        sampling = SamplingParams(max_new_tokens=10)
        return Req(f"{dp_rank} {prompt_len}", "", [0] * prompt_len, sampling, dp_rank=dp_rank)

    scheduler = HiCacheScheduler.__new__(HiCacheScheduler)
    scheduler.dp_size, scheduler.page_size, scheduler.new_token_ratio = 2, 16, 1.0
    scheduler.per_dp_max_running_requests, scheduler.max_req_len = 2, 1000
    running = SimpleNamespace(reqs=[request(1, 5)], batch_is_full=False)
    nobody = SimpleNamespace(reqs=[], batch_is_full=False)
    scheduler.running_batch = SimpleNamespace(reqs_info=[nobody, running])
    scheduler.last_batch = None
    scheduler.waiting_queue = []
    assert scheduler._dp_load_and_eligible([0, 0], [0, 0])[:2] == ([0, 1], [0, 1])
    prompts, answers = scheduler._get_dp_io_snapshot()
    scheduler.waiting_queue = [request(0, 100), request(0, 200)]
    assert scheduler._dp_load_and_eligible([0, 0], [0, 0])[:2] == ([1], [2, 1])
    with_waiting = scheduler._get_dp_io_snapshot()
    assert with_waiting[0] == [prompts[0] + 300, prompts[1]]
    assert with_waiting[1] == [answers[0] + 2 * answers[1], answers[1]]
