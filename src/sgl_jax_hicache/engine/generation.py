"""The answer to one request, as it grows: text, tokens, log probabilities and the account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .outputs import FinishKind, FinishReason, OutputChunk, RequestStats, TokenLogprob
from .stop_strings import StopTrimmer
from .tokenizer import IncrementalDetokenizer, Tokenizer


class Generation:
    """Takes a request's chunks in order. The text ends before a stop string or an end token.

    `token_ids` and `logprobs` are what was sampled, the end token included. One thread at a time.
    """

    def __init__(self, rid: str, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.rid = rid
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._trimmer = StopTrimmer(stops)
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: FinishReason | None = None
        self.stats = RequestStats(prompt_tokens=0)

    @property
    def failed(self) -> bool:
        """True if the request ended without an answer."""
        return self.finish is not None and self.finish.kind in (FinishKind.ABORT, FinishKind.ERROR)

    def feed(self, chunk: OutputChunk) -> str:
        """Take a chunk; the text that it adds."""
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish, self.stats = chunk.finish, chunk.stats
        shown = chunk.token_ids
        if self.finish is not None and isinstance(self.finish.matched, int):
            shown = shown[:-1]
        piece = "".join(self._detokenizer.push(token) for token in shown)
        if self.finish is not None:
            piece += self._detokenizer.flush()
        delta = self._trimmer.feed(piece, final=self.finish is not None)
        self.text += delta
        return delta

    def meta_info(self) -> dict[str, Any]:
        """The account of the request as the /generate route shows it."""
        tiers = self.stats.tiers
        info: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish_json(self.finish, self.stats.completion_tokens),
            "prompt_tokens": self.stats.prompt_tokens,
            "completion_tokens": self.stats.completion_tokens,
            "cached_tokens": tiers.cached,
            "cached_tokens_details": {
                "device": tiers.device,
                "host": tiers.host,
                "storage": tiers.storage,
                "computed": tiers.computed,
            },
            "queue_s": self.stats.queue_s,
            "ttft_s": self.stats.ttft_s,
            "e2e_latency_s": self.stats.e2e_latency_s,
            "num_retractions": self.stats.num_retractions,
        }
        if self.logprobs:
            info["output_token_logprobs"] = [
                [entry.logprob, entry.token_id, self.token_text(entry.token_id)]
                for entry in self.logprobs
            ]
        if any(entry.top for entry in self.logprobs):
            info["output_top_logprobs"] = [
                [[logprob, token, self.token_text(token)] for token, logprob in entry.top]
                for entry in self.logprobs
            ]
        return info

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        return self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """One token as text; parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def result(self) -> dict[str, Any]:
        """The whole answer so far."""
        return {
            "text": self.text,
            "output_ids": list(self.token_ids),
            "meta_info": self.meta_info(),
        }


def finish_json(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    """Why a request ended, as a JSON object; None while it goes on."""
    if finish is None:
        return None
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": completion_tokens}
    return {"type": finish.kind.value, "message": finish.message}
