"""Makes a request's part of a step out of the tables of this moment.

Every index array is made fresh: a dispatched step reads it while the tables go on changing.
"""

from __future__ import annotations

import numpy as np

from .fault import SchedulerFault
from .forward_batch import ForwardItem, Int32Array, SWASlots
from .req import Req
from .req_to_token_pool import ReqToTokenPool
from .state_tracking import StateTracking
from .swa_allocator import SWATokenToKVPoolAllocator, TokenAllocator


class ItemBuilder:
    """`window`: tokens that a sliding layer sees; needed if `allocator` has an SWA pool."""

    def __init__(
        self,
        rows: ReqToTokenPool,
        allocator: TokenAllocator,
        window: int | None,
        tracking: StateTracking,
    ) -> None:
        self._rows = rows
        self._page_size = allocator.page_size
        self._tracking = tracking
        self._window = window or 0
        self._mapping: Int32Array | None = None
        if isinstance(allocator, SWATokenToKVPoolAllocator):
            if self._window < 1:
                raise ValueError(f"an SWA pool needs a window of 1 or more, not {window}")
            self._mapping = allocator.full_to_swa_index_mapping

    def build(
        self,
        req: Req,
        prefix_len: int,
        out_slots: Int32Array,
        token_ids: Int32Array | None,
        wants_token: bool,
    ) -> ForwardItem:
        """The item that computes the tokens after `prefix_len` into `out_slots`; the request's row and lengths move on.

        Raises SchedulerFault if what it would read is not there.
        """
        row, seq_len = req.req_pool_idx, prefix_len + len(out_slots)
        self._rows.write((row, slice(prefix_len, seq_len)), out_slots)
        req.kv_committed_len = req.kv_allocated_len = seq_len
        table = self._rows.page_table(row, seq_len, self._page_size)
        return ForwardItem(
            rid=req.rid,
            req_pool_idx=row,
            token_ids=token_ids,
            prefix_len=prefix_len,
            out_slots=out_slots,
            page_table=table,
            wants_token=wants_token,
            sampling=req.sampling,
            num_sampled=req.num_sampled,
            states=self._tracking.advance(req, prefix_len, seq_len),
            swa=self._swa_slots(req, prefix_len, out_slots, table),
            top_logprobs_num=req.request.top_logprobs_num,
        )

    def _swa_slots(
        self, req: Req, prefix_len: int, out_slots: Int32Array, page_table: Int32Array
    ) -> SWASlots | None:
        if self._mapping is None:
            return None
        slots = self._mapping[out_slots]
        pages = self._mapping[page_table * np.int32(self._page_size)] // np.int32(self._page_size)
        # The oldest token that the first computed one sees, itself included.
        first_seen = max(0, prefix_len - self._window + 1)
        if not (slots.all() and pages[first_seen // self._page_size :].all()):
            raise SchedulerFault(
                f"request {req.rid}: the window before token {prefix_len} is not in the SWA pool"
            )
        return SWASlots(slots, pages)
