"""The script of the demo: what is asked in which order, and what came back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from sgl_jax.srt.mem_cache.hicache.types import Tier, TierTokens

from .client import Answer
from .conversations import History, Lengths, Message, Turn, conversation_turns, long_prompt

NUM_CONVERSATIONS = 3
NUM_TURNS = 3
NUM_LONG_PROMPTS = 2


@dataclass(frozen=True)
class LongPrompt:
    """A prompt of about 2,000 tokens that shares nothing with the others."""

    number: int
    lengths: Lengths

    @property
    def name(self) -> str:
        """Such as "long 1"."""
        return f"long {self.number + 1}"


Step = Turn | LongPrompt


@dataclass(frozen=True)
class Record:
    """One answered step."""

    step: Step
    answer: Answer


class Chat(Protocol):
    """What the script needs of a client."""

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """One greedy answer."""


class Script:
    """What is asked of each server, with prompts of these lengths."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._turns = conversation_turns(NUM_CONVERSATIONS, NUM_TURNS, lengths)

    def without_cache(self) -> list[Step]:
        """Every step once: the answers that all others are compared with, and the time to recompute."""
        return [*self._turns, *self._long_prompts()]

    def with_cache(self) -> list[Step]:
        """Conversations that the device must forget between turns, then long prompts that push each other out.

        The device keeps about 2,500 tokens: second turns come from L1, later turns and repeated long prompts from L2.
        """
        opening = [turn for turn in self._turns if turn.index < 2]
        later = [turn for turn in self._turns if turn.index >= 2]
        long = self._long_prompts()
        return [*opening, *long, *later, *long, *long]

    def after_restart(self) -> list[Step]:
        """First turns and long prompts, which only files can know now."""
        first = [turn for turn in self._turns if turn.index == 0]
        return [*first, *self._long_prompts()]

    def _long_prompts(self) -> list[Step]:
        return [LongPrompt(number, self._lengths) for number in range(NUM_LONG_PROMPTS)]


def play(client: Chat, script: Iterable[Step], answer_tokens: int) -> Iterator[Record]:
    """Ask one step after the other, each conversation with its own answers as history."""
    history = History()
    for step in script:
        if isinstance(step, LongPrompt):
            yield Record(step, client.chat(long_prompt(step.number, step.lengths), answer_tokens))
        else:
            answer = client.chat(history.ask(step), answer_tokens)
            history.answered(step, answer.text)
            yield Record(step, answer)


def mismatches(expected: Iterable[Record], found: Iterable[Record]) -> list[str]:
    """Names of the steps whose tokens or text differ from those of the same step without a cache."""
    by_name: Mapping[str, Answer] = {record.step.name: record.answer for record in expected}
    return [
        record.step.name
        for record in found
        if (record.answer.tokens, record.answer.text)
        != (by_name[record.step.name].tokens, by_name[record.step.name].text)
    ]


def total_tokens(records: Iterable[Record]) -> TierTokens:
    """Prompt tokens by tier, summed."""
    totals = dict.fromkeys((tier.value for tier in Tier), 0)
    for record in records:
        for name in totals:
            totals[name] += getattr(record.answer.tiers, name)
    return TierTokens(**totals)


def median_ttft_ms(records: Iterable[Record]) -> dict[str, float | None]:
    """Median time to first token of the requests that each tier served most of; None where there was none."""
    by_tier: dict[Tier, list[float]] = {tier: [] for tier in Tier}
    for record in records:
        by_tier[record.answer.main_tier].append(1000 * record.answer.ttft_s)
    return {
        tier.value: round(median(times), 1) if times else None for tier, times in by_tier.items()
    }


def long_prompts_only(records: Iterable[Record]) -> list[Record]:
    """The records of the 2,000-token prompts."""
    return [record for record in records if isinstance(record.step, LongPrompt)]
