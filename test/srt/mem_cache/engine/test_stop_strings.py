"""Stop strings: found across tokens, never shown, nothing else held back for good."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_jax_hicache.engine.stop_strings import StopStringMatcher, StopTrimmer, earliest_stop
from sgl_jax_hicache.engine.tokenizer import byte_tokenizer


def test_earliest_stop_prefers_the_first_then_the_longest() -> None:
    assert earliest_stop("xabcab", ["ab", "abc", "c"]) == (1, "abc")
    assert earliest_stop("xyz", ["ab"]) is None


@pytest.mark.parametrize(
    "pieces", [["hello END more"], ["hel", "lo EN", "D", " more"], list("hello END more")]
)
def test_trimmer_cuts_at_the_stop_however_the_text_arrives(pieces: list[str]) -> None:
    trimmer = StopTrimmer(["END"])
    shown = [trimmer.feed(piece, final=False) for piece in pieces]
    assert "".join(shown) + trimmer.feed("", final=True) == "hello "
    assert not any("E" in text for text in shown)


def test_trimmer_lets_a_false_beginning_go() -> None:
    trimmer = StopTrimmer(["END"])
    assert trimmer.feed("the E", final=False) == "the "
    assert trimmer.feed("N", final=False) == ""
    assert trimmer.feed("T", final=False) == "ENT"
    assert trimmer.feed("EN", final=False) == ""
    assert trimmer.feed("", final=True) == "EN"


def test_random_texts_agree_with_find(rng: np.random.Generator) -> None:
    for _ in range(300):
        text = "".join(rng.choice(list("ab"), 12))
        stops = ["".join(rng.choice(list("ab"), int(rng.integers(1, 5)))) for _ in range(2)]
        first_end = min(
            (end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)),
            default=None,
        )
        matcher, trimmer = StopStringMatcher(byte_tokenizer(300), stops), StopTrimmer(stops)
        shown, ended = "", None
        for end, byte in enumerate(text.encode(), start=1):
            found = matcher.add(byte)
            shown += trimmer.feed(chr(byte), final=found is not None)
            if found is not None:
                ended = end
                break
        else:
            shown += trimmer.feed("", final=True)
        assert ended == first_end
        if first_end is None:
            assert shown == text
        else:
            position, stop = earliest_stop(text[:first_end], stops) or (0, "")
            assert shown == text[:position]
            assert text[position:].startswith(stop)
