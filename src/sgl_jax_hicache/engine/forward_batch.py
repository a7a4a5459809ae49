"""The records that pass between the scheduler and the model runner.

All index arrays are host numpy, built fresh for each step and never changed afterwards: a dispatched step may still be
reading them. Slots are token slots of the KV pool, pages are `slot // page_size`; page 0 is the sentinel that padding
points at.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import jax
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class ForwardMode(enum.Enum):
    """What a step does: prefill chunks (EXTEND) or one token for each running request (DECODE)."""

    EXTEND = "extend"
    DECODE = "decode"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; `seed` makes sampling repeatable per request."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class SWASlots:
    """Where sliding layers keep what `out_slots` and `page_table` of a ForwardItem name, in the same shapes.

    Pages before the window may be 0.
    """

    out_slots: Int32Array
    page_table: Int32Array


@dataclass(frozen=True)
class StateSlots:
    """A request's slots of the recurrent state pool; 0 is none.

    `running`: read and written by the step. Before it `cow_src` is copied to `running`, after it `running` to `track`.
    """

    running: int = 0
    cow_src: int = 0
    track: int = 0


NO_STATES = StateSlots()


@dataclass(frozen=True)
class ForwardItem:
    """One request's part of a step.

    EXTEND: `token_ids` int32[n] are computed at positions prefix_len .. prefix_len+n-1 and their KV is written to
    `out_slots` int32[n]. DECODE: n is 1 and `token_ids` is None: the input is the token this request sampled last,
    which the runner keeps on the device by `req_pool_idx` (so a step can be dispatched before the last one is read).
    `page_table` int32[ceil((prefix_len + n) / page_size)]: pages of the whole sequence, in order.
    `states`: none for models without a recurrent pool; `swa`: None for those without an SWA pool.
    `wants_token`: False for a prefill chunk that is not the prompt's last.
    """

    rid: str
    req_pool_idx: int
    token_ids: Int32Array | None
    prefix_len: int
    out_slots: Int32Array
    page_table: Int32Array
    wants_token: bool
    sampling: SamplingParams
    # Tokens this request has sampled before this step (position in its random stream).
    num_sampled: int = 0
    states: StateSlots = NO_STATES
    swa: SWASlots | None = None
    top_logprobs_num: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed for this request in this step."""
        return len(self.out_slots)


@dataclass(frozen=True)
class ForwardBatch:
    """One step: items of one mode, at most the runner's `max_running_requests`."""

    mode: ForwardMode
    items: tuple[ForwardItem, ...]


@dataclass(frozen=True)
class StepOutput:
    """What a dispatched step will yield; every array is a future, in the order of `batch.items`.

    next_token_ids: int32[>= num_items] (entries of items with wants_token=False are meaningless);
    next_logprobs: float32[>= num_items], log-softmax of the unscaled logits at the chosen token;
    top_logprobs: (int32 ids [>= num_items, k], float32 values [>= num_items, k]) or None, k = the largest asked for.
    """

    batch: ForwardBatch
    next_token_ids: jax.Array
    next_logprobs: jax.Array
    top_logprobs: tuple[jax.Array, jax.Array] | None = field(default=None)
