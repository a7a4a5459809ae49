"""Many clients at once against one server, each answer compared with a run that reuses nothing.

Clients ask for prompts that share beginnings, want whole answers or streams, leave in the middle, abort by name, and
come back. What they are told is compared token by token.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

TIMEOUT_S = 300.0
"""No answer at all for so long is a fault; a busy machine may have dozens of clients wait for minutes."""
MOST_NEW = 8


@dataclass(frozen=True)
class Script:
    """Prompts and the answer of each, `MOST_NEW` tokens long, of a run without any cache."""

    answers: Mapping[tuple[int, ...], Sequence[int]]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """All of them."""
        return list(self.answers)


def make_prompts(
    dice: random.Random, num_prompts: int, longest: int, num_token_ids: int
) -> list[list[int]]:
    """Prompts of which many begin alike: a few stems, cut anywhere, with an end of their own."""
    stems = [[dice.randrange(num_token_ids) for _ in range(longest - 8)] for _ in range(6)]
    return [
        [
            *dice.choice(stems)[: dice.randrange(1, longest - 7)],
            *(dice.randrange(num_token_ids) for _ in range(dice.randrange(1, 8))),
        ]
        for _ in range(num_prompts)
    ]


class Client:
    """One client. `tolerant`: a connection that breaks is no fault, because somebody kills the server."""

    def __init__(
        self,
        url: str,
        script: Script,
        seed: int,
        *,
        tolerant: bool,
        on_answer: Callable[[], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._dice = random.Random(seed)
        self._script = script
        self._tolerant = tolerant
        self._on_answer = on_answer
        self._name = f"client-{seed}"
        # Idle connections go before the server closes them, after 5 s: a request on one that just closes would fail.
        limits = httpx.Limits(keepalive_expiry=1.0)
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)

    def run(self, go_on: Callable[[], bool]) -> None:
        """Ask until told otherwise, or until the server is gone."""
        with self._http:
            while go_on():
                try:
                    self._ask()
                except httpx.TransportError as error:
                    if not self._tolerant:
                        self.wrong.append(f"{type(error).__name__}: {error}")
                    return

    def _ask(self) -> None:
        prompt = self._dice.choice(self._script.prompts)
        num_new = self._dice.randrange(1, MOST_NEW + 1)
        rid = f"{self._name}-{self.counts['requests']}"
        body = {
            "input_ids": list(prompt),
            "rid": rid,
            "sampling_params": {"max_new_tokens": num_new, "ignore_eos": True},
        }
        self.counts["requests"] += 1
        action = self._dice.random()
        if action < 0.15:
            self._leave(body, prompt)
        elif action < 0.25:
            self._abort(body, rid, prompt)
        elif action < 0.5:
            self._stream(body, prompt, num_new)
        else:
            response = self._http.post("/generate", json=body)
            if response.status_code != 200:
                self._refused(response)
                return
            self._compare(prompt, response.json()["output_ids"], num_new)

    def _stream(self, body: dict[str, object], prompt: tuple[int, ...], num_new: int) -> None:
        with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                self._refused(response)
                return
            events = [line for line in response.iter_lines() if line]
        if len(events) < 2:
            raise httpx.RemoteProtocolError("the stream ended early")
        answer = json.loads(events[-2].removeprefix("data: "))
        if "output_ids" not in answer:
            self._refused_with(str(answer))
            return
        self._compare(prompt, answer["output_ids"], num_new)

    def _leave(self, body: dict[str, object], prompt: tuple[int, ...]) -> None:
        """Read a little of a stream and close the connection."""
        self.counts["left"] += 1
        with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    answer = json.loads(line.removeprefix("data: "))
                    if "output_ids" in answer:
                        self._compare(prompt, answer["output_ids"], None)
                    break

    def _abort(self, body: dict[str, object], rid: str, prompt: tuple[int, ...]) -> None:
        """Ask, and have somebody else abort it: what comes is the answer, its beginning, or a refusal."""
        self.counts["aborted"] += 1
        with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            self._http.post("/abort_request", json={"rid": rid})
            for line in response.iter_lines():
                if line.startswith("data: {") and "output_ids" in line:
                    self._compare(
                        prompt, json.loads(line.removeprefix("data: "))["output_ids"], None
                    )

    def _compare(
        self, prompt: tuple[int, ...], output_ids: Sequence[int], num_new: int | None
    ) -> None:
        answer = list(self._script.answers[prompt])
        expected = answer[: len(output_ids) if num_new is None else num_new]
        self.counts["answers"] += 1
        self._on_answer()
        if list(output_ids) != expected:
            self.counts["wrong_tokens"] += 1
            self.wrong.append(f"{len(prompt)} tokens: {output_ids} instead of {expected}")

    def _refused(self, response: httpx.Response) -> None:
        self._refused_with(f"{response.status_code} {response.text}")

    def _refused_with(self, text: str) -> None:
        """A full server, or one that is shutting down, may say so; nothing else is expected."""
        self.counts["refused"] += 1
        if "the server is full" not in text and not (self._tolerant and "shutting down" in text):
            self.wrong.append(text)


class Crowd:
    """Clients in threads of their own."""

    def __init__(
        self, url: str, script: Script, num_clients: int, dice: random.Random, *, tolerant: bool
    ) -> None:
        self._answered = threading.Condition()
        self._num_answers = 0
        self._clients = [
            Client(url, script, dice.getrandbits(32), tolerant=tolerant, on_answer=self._on_answer)
            for _ in range(num_clients)
        ]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=client.run, args=(lambda: not self._stop.is_set(),))
            for client in self._clients
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, count: int) -> int:
        """Until there are that many answers; how many there are."""
        with self._answered:
            while self._num_answers < count:
                assert self._answered.wait(TIMEOUT_S), "nobody is answered any more"
            return self._num_answers

    def stop(self) -> Counter[str]:
        """Let everybody finish; the counts, of wrong answers too."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client waits for ever"
        return sum((client.counts for client in self._clients), Counter())

    def check(self) -> None:
        """Raises AssertionError for whatever was wrong."""
        wrong = [text for client in self._clients for text in client.wrong]
        assert not wrong, (len(wrong), wrong[:5])

    def _on_answer(self) -> None:
        with self._answered:
            self._num_answers += 1
            self._answered.notify_all()
