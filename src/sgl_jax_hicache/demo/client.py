"""The client side of the demo: streaming chat completions, timed where the user sits, and the server's metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from sgl_jax.srt.mem_cache.hicache.types import Tier, TierTokens, TransferKind

from .conversations import Message


@dataclass(frozen=True)
class Answer:
    """One streamed answer. `tokens` are the sampled tokens as text, one entry each; times are the client's."""

    text: str
    tokens: tuple[str, ...]
    tiers: TierTokens
    ttft_s: float
    total_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, over all tiers."""
        return self.tiers.cached + self.tiers.computed

    @property
    def main_tier(self) -> Tier:
        """The tier that most prompt tokens came from."""
        return max(Tier, key=lambda tier: getattr(self.tiers, tier.value))


class ChatClient:
    """Talks to one server over HTTP. Raises httpx.HTTPError if it does not answer or refuses."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """One greedy answer, streamed. Blocks until it is complete."""
        request = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text: list[str] = []
        tokens: list[str] = []
        usage: dict[str, Any] = {}
        start_s = time.perf_counter()
        first_s: float | None = None
        with self._http.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.status_code != 200:
                response.read()
                raise httpx.HTTPStatusError(
                    f"{response.status_code}: {response.text}",
                    request=response.request,
                    response=response,
                )
            for event in _events(response.iter_lines()):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    tokens += _token_texts(choice)
                    text.append(choice.get("delta", {}).get("content") or "")
                    if first_s is None and (tokens or text[-1]):
                        first_s = time.perf_counter()
        end_s = time.perf_counter()
        return Answer(
            text="".join(text),
            tokens=tuple(tokens),
            tiers=_tiers(usage),
            ttft_s=(first_s if first_s is not None else end_s) - start_s,
            total_s=end_s - start_s,
        )

    def bytes_moved(self) -> dict[str, int]:
        """Bytes moved between tiers since the server started, by kind of transfer."""
        response = self._http.get("/metrics").raise_for_status()
        moved = dict.fromkeys((kind.value for kind in TransferKind), 0)
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == "sglang:hicache_transfer_bytes_total":
                    moved[sample.labels["kind"]] += int(sample.value)
        return moved


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its [DONE]."""
    for line in lines:
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise httpx.StreamError(f"the server ended the stream: {event['error']}")
            yield event


def _token_texts(choice: dict[str, Any]) -> list[str]:
    """The tokens of one chunk, as hexadecimal bytes where the server gives them: half a character is no text."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    return [
        bytes(token["bytes"]).hex() if token.get("bytes") is not None else token["token"]
        for token in content
    ]


def _tiers(usage: dict[str, Any]) -> TierTokens:
    details = usage["prompt_tokens_details"]
    return TierTokens(**{tier.value: int(details[tier.value]) for tier in Tier})
