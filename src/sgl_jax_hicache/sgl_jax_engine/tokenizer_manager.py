"""The launching process's end of a request: tiers in the answer, and an orderly end at SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import psutil

from sgl_jax.srt.managers.io_struct import GenerateReqInput, SetInternalStateReq
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.utils import get_bool_env_var, kill_process_tree
from sgl_jax_hicache.engine.http_server.schema import WarmUpBody

from .cache_control import STATE_KEY, CacheAnswer, CacheCommand
from .cached_tokens import CachedTokens
from .orderly_end import stop_schedulers

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class HiCacheTokenizerManager(TokenizerManager):
    """See the module."""

    async def _wait_one_response(
        self, obj: Any, state: Any, request: Any = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The engine's answers, with `cached_tokens_details` beside `cached_tokens`."""
        async with aclosing(super()._wait_one_response(obj, state, request)) as answers:
            async for answer in answers:
                _tell_tiers(answer["meta_info"])
                yield answer

    async def control_cache(self, command: CacheCommand) -> CacheAnswer:
        """Ask the scheduler; see `cache_control`."""
        state_data = {STATE_KEY: command}
        output = await self.set_internal_state(
            SetInternalStateReq(request_id=secrets.token_hex(8), state_data=state_data)
        )
        answer = getattr(output, "cache_answer", None)
        if not isinstance(answer, CacheAnswer):
            return CacheAnswer(500, message=output.error_msg or "the scheduler gave no answer")
        return answer

    async def compute(self, body: WarmUpBody, request: Any) -> list[dict[str, Any]]:
        """Prefill these prompts; the `meta_info` of each. Raises ValueError for what cannot be served."""
        asked = GenerateReqInput(
            text=body.text,
            input_ids=body.input_ids,
            extra_key=body.extra_key,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        )
        found = await anext(self.generate_request(asked, request))
        return [one["meta_info"] for one in (found if isinstance(found, list) else [found])]

    async def sigterm_watchdog(self) -> None:
        """Started with the first request. At SIGTERM: answer what was asked, bring pages to storage, end with 0."""
        while not self.gracefully_exit:
            await asyncio.sleep(_POLL_S)
        while self.rid_to_state and not self._nobody_will_answer():
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_POLL_S)  # the last answer is on its way to its client
        if self.crash_dump_folder:
            self.dump_requests_before_crash()
        await asyncio.to_thread(stop_schedulers)
        kill_process_tree(os.getpid(), include_parent=False)
        os._exit(0)

    def _nobody_will_answer(self) -> bool:
        return bool(
            self.health_check_failed
            or get_bool_env_var("SGL_FORCE_SHUTDOWN")
            or not (self.server_args.enable_single_process or psutil.Process().children())
        )


def _tell_tiers(meta_info: dict[str, Any]) -> None:
    cached = meta_info.get("cached_tokens")
    if isinstance(cached, CachedTokens):
        meta_info["cached_tokens"] = int(cached)
        meta_info["cached_tokens_details"] = dict(cached.tiers)
