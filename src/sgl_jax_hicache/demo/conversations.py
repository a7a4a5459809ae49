"""What is said in the demo: conversations about long documents, the same text in every run.

Each document is made of plain sentences drawn with a fixed seed, so that prompts are long, differ from the first
document sentence on, and share only the system prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

Message = dict[str, str]

SYSTEM_PROMPT = (
    "You are the archivist of a small harbour town. You answer questions about the documents you are given, briefly "
    "and in plain English, and you never invent a name or a number that is not in them. When a document does not say, "
    "you say so. Dates are given as day and month, weights in tons, and prices in silver crowns. People are called by "
    "their family names. If a question has several parts, you answer them in the order in which they were asked. You "
    "do not repeat the question, you do not apologise, and you keep every answer below three sentences."
)

_PEOPLE = ("Alder", "Brandt", "Castell", "Dahl", "Ekholm", "Fenwick", "Grieg", "Holt", "Ivarsen")
_SHIPS = ("Aurora", "Blue Heron", "Cordelia", "Dunlin", "Esperance", "Falcon", "Guillemot")
_GOODS = ("salt", "timber", "oil", "grain", "wool", "copper", "tar", "linen", "barley", "glass")
_PLACES = ("north quay", "old pier", "fish market", "customs house", "rope walk", "east mole")
_MONTHS = ("March", "April", "May", "June", "July", "August", "September")

_QUESTIONS = (
    "Which ship is named first in the document, and what did it carry?",
    "Who signed the last entry, and where?",
    "What is the most expensive cargo that you can find?",
    "Summarise the document in one sentence.",
    "Name one person who appears more than once.",
)


@dataclass(frozen=True)
class Lengths:
    """Sentences of the document that opens a conversation, of the appendix in its third turn, and of a long prompt."""

    document: int
    appendix: int
    long_prompt: int


WORD_LENGTHS = Lengths(document=24, appendix=15, long_prompt=64)
"""For a vocabulary of words: a sentence is about 31 tokens, and a long prompt about 2,000."""

BYTE_LENGTHS = Lengths(document=7, appendix=4, long_prompt=19)
"""For a model that reads bytes: a sentence is about 100 tokens, and a long prompt about 2,000 again."""


@dataclass(frozen=True)
class Turn:
    """One question: in which conversation, its index there (from 0), and the user's text."""

    conversation: int
    index: int
    text: str

    @property
    def name(self) -> str:
        """Such as "B2": conversation B, second turn."""
        return f"{chr(ord('A') + self.conversation)}{self.index + 1}"


def document(seed: int, num_sentences: int) -> str:
    """A harbour log of so many sentences; the same for the same arguments on every machine."""
    rng = random.Random(seed)
    return " ".join(_sentence(rng) for _ in range(num_sentences))


def _sentence(rng: random.Random) -> str:
    return (
        f"On {rng.randint(1, 28)} {rng.choice(_MONTHS)} the {rng.choice(_SHIPS)} unloaded "
        f"{rng.randint(2, 90)} tons of {rng.choice(_GOODS)} at the {rng.choice(_PLACES)}, "
        f"signed by {rng.choice(_PEOPLE)} for {rng.randint(10, 99)} crowns."
    )


def conversation_turns(num_conversations: int, num_turns: int, lengths: Lengths) -> list[Turn]:
    """All turns in the order in which they are played.

    Two turns in a row open each conversation, so that the second finds the first on the device; the later turns go
    round the conversations, so that by then the device has forgotten them.
    """
    opening = [
        turn
        for number in range(num_conversations)
        for turn in _turns(number, min(2, num_turns), lengths)
    ]
    later = [
        turn
        for index in range(2, num_turns)
        for number in range(num_conversations)
        for turn in _turns(number, num_turns, lengths)
        if turn.index == index
    ]
    return opening + later


def _turns(conversation: int, num_turns: int, lengths: Lengths) -> Iterator[Turn]:
    for index in range(num_turns):
        question = _QUESTIONS[(conversation + index) % len(_QUESTIONS)]
        # The first turn brings the document, the third an appendix; the others only ask.
        sentences = {0: lengths.document, 2: lengths.appendix}.get(index, 0)
        log = document(100 * conversation + index, sentences)
        yield Turn(conversation, index, f"{log}\n\n{question}" if sentences else question)


def long_prompt(number: int, lengths: Lengths) -> list[Message]:
    """One of a family of prompts of about 2,000 tokens that share nothing, not even the system prompt."""
    text = document(9_000 + number, lengths.long_prompt)
    return [
        {"role": "system", "content": f"Log book number {number + 1} of the harbour."},
        {"role": "user", "content": f"{text}\n\n{_QUESTIONS[0]}"},
    ]


class History:
    """The messages of each conversation so far, answers included."""

    def __init__(self) -> None:
        self._messages: dict[int, list[Message]] = {}

    def ask(self, turn: Turn) -> list[Message]:
        """The whole prompt of a turn: system prompt, everything said, and the question."""
        so_far = self._messages.setdefault(
            turn.conversation, [{"role": "system", "content": SYSTEM_PROMPT}]
        )
        so_far.append({"role": "user", "content": turn.text})
        return list(so_far)

    def answered(self, turn: Turn, answer: str) -> None:
        """Add the answer to the conversation."""
        self._messages[turn.conversation].append({"role": "assistant", "content": answer})
