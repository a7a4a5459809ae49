"""The HTTP server over the fake runner: answers, streams, refusals, disconnects, metrics."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from engine_fakes import expected_output
from http_world import MODEL, POOL_TOKENS, WAIT_S, HttpWorld, http_world
from scheduler_world import MAX_CONTEXT_LEN

PROMPT = "The capital of France is"
OUTPUT = expected_output(list(PROMPT.encode()), 60)
TEXT = bytes(OUTPUT).decode("utf-8", "replace")
GREEDY = {"temperature": 0.0}
JSON = {"Content-Type": "application/json"}
TIERS = ("device", "host", "storage", "computed")


@pytest.fixture(scope="module")
def world() -> Iterator[HttpWorld]:
    with http_world() as running:
        yield running


@pytest.fixture
def fresh() -> Iterator[HttpWorld]:
    with http_world() as running:
        yield running


def _text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def _events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


# -- answers -------------------------------------------------------------------------------------


def test_generate(world: HttpWorld) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 12}, "rid": "mine"}
    answer = world.client.post("/generate", json=body).json()
    assert answer["output_ids"] == OUTPUT[:12]
    assert answer["text"] == _text_of(OUTPUT[:12])
    info = answer["meta_info"]
    assert info["id"] == "mine"
    assert info["prompt_tokens"] == len(PROMPT)
    assert info["completion_tokens"] == 12
    assert info["finish_reason"] == {"type": "length", "length": 12}
    assert 0 < info["ttft_s"] <= info["e2e_latency_s"]
    assert sum(info["cached_tokens_details"].values()) == len(PROMPT)


def test_generate_counts_cached_tokens_by_tier(world: HttpWorld) -> None:
    body = {"input_ids": list(range(100, 141)), "sampling_params": {"max_new_tokens": 2}}
    first, second = (world.client.post("/generate", json=body).json() for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] == 40
    details = second["meta_info"]["cached_tokens_details"]
    assert details == {"device": 40, "host": 0, "storage": 0, "computed": 1}
    isolated = world.client.post("/generate", json={**body, "extra_key": "tenant"}).json()
    assert isolated["meta_info"]["cached_tokens"] == 0
    assert isolated["output_ids"] == first["output_ids"]


def test_generate_several_prompts(world: HttpWorld) -> None:
    body = {"text": ["a", "bc"], "sampling_params": {"max_new_tokens": 3}}
    answers = world.client.post("/generate", json=body).json()
    assert [answer["output_ids"] for answer in answers] == [
        expected_output(prompt, 3) for prompt in (b"a", b"bc")
    ]


def test_generate_log_probabilities(world: HttpWorld) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    info = world.client.post("/generate", json=body).json()["meta_info"]
    assert [entry[1] for entry in info["output_token_logprobs"]] == OUTPUT[:3]
    assert info["output_token_logprobs"][0][0] == pytest.approx(-OUTPUT[0] / 100)
    assert [len(entry) for entry in info["output_top_logprobs"]] == [2, 2, 2]


def test_generate_stream_grows_to_the_whole_answer(world: HttpWorld) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 9}, "stream": True}
    events = _events(world.client.post("/generate", json=body))
    assert events.pop() == "[DONE]"
    answers = [json.loads(event) for event in events]
    assert [len(answer["output_ids"]) for answer in answers] == list(range(1, 10))
    assert answers[-1]["text"] == _text_of(OUTPUT[:9])
    assert [answer["meta_info"]["finish_reason"] for answer in answers[:-1]] == [None] * 8
    assert answers[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_stop_string_is_cut_off_and_never_shown_in_a_stream(world: HttpWorld) -> None:
    stop = TEXT[10:12]
    expected = TEXT[: TEXT.index(stop)]
    body = {"prompt": PROMPT, "max_tokens": 40, "stop": stop, **GREEDY}
    choice = world.client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    events = _events(world.client.post("/v1/completions", json={**body, "stream": True}))
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == expected


def test_completions(world: HttpWorld) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "logprobs": 2, **GREEDY}
    answer = world.client.post("/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    choice = answer["choices"][0]
    assert choice["text"] == _text_of(OUTPUT[:5])
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == 5
    usage = answer["usage"]
    assert usage["total_tokens"] == len(PROMPT) + 5
    details = usage["prompt_tokens_details"]
    assert sum(details[tier] for tier in TIERS) == len(PROMPT)
    assert details["cached_tokens"] == len(PROMPT) - details["computed"]


def test_completions_take_tokens_and_lists(world: HttpWorld) -> None:
    for prompt, count in (([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2, 3]], 2)):
        body = {"prompt": prompt, "max_tokens": 2, **GREEDY}
        answer = world.client.post("/v1/completions", json=body).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["completion_tokens"] == 2 * count


def test_chat(world: HttpWorld) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    body = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 1, **GREEDY}
    answer = world.client.post("/v1/chat/completions", json=body).json()
    expected = expected_output(b"user: Hello\nassistant:", 4)
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": _text_of(expected)}
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[b] for b in expected]
    assert answer["usage"]["completion_tokens"] == 4


def test_chat_stream_with_usage(world: HttpWorld) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        **GREEDY,
    }
    events = _events(world.client.post("/v1/chat/completions", json=body))
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    expected = expected_output(b"user: Hello\nassistant:", 4)
    assert "".join(delta["content"] for delta in deltas) == _text_of(expected)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_chat_without_a_limit_runs_to_the_end_of_the_context(world: HttpWorld) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, **GREEDY}
    usage = world.client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == MAX_CONTEXT_LEN


# -- refusals ------------------------------------------------------------------------------------

_TEXT = {"type": "text", "text": "What is this?"}
_CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/generate", {"text": ""}, "text", "empty"),
        ("/generate", {"input_ids": []}, "input_ids", "empty"),
        ("/generate", {"input_ids": [[1]] * 65}, "input_ids", "64 are allowed"),
        ("/generate", {"text": ["a"] * 65}, "text", "64 are allowed"),
        ("/generate", {}, "text", "exactly one"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text", "exactly one"),
        ("/generate", {"input_ids": [1, 300]}, "input_ids", "outside"),
        ("/generate", {"input_ids": [1, -1]}, "input_ids", "outside"),
        ("/generate", {"input_ids": [1] * MAX_CONTEXT_LEN}, "input_ids", "context holds 512"),
        ("/generate", {"text": "a", "temprature": 1}, "temprature", "unknown field"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"max_tokens": 1}},
            "sampling_params.max_tokens",
            "unknown field",
        ),
        (
            "/generate",
            {"text": "a", "sampling_params": {"max_new_tokens": 0}},
            "sampling_params.max_new_tokens",
            "less than 1",
        ),
        ("/generate", {"text": "a", "top_logprobs_num": 1}, "top_logprobs_num", "return_logprob"),
        ("/generate", {"text": "a", "stream": "yes"}, "stream", "boolean"),
        ("/generate", {"text": 5}, "text", "string"),
        ("/generate", {"text": "\ud800"}, "text", "Unicode"),
        ("/generate", {"text": "a", "extra_key": "\udc00"}, "extra_key", "unicode"),
        ("/generate", {"text": "a", "\ud800": 1}, "body", "unicode"),
        ("/v1/completions", {"max_tokens": 1}, "prompt", "required"),
        ("/v1/completions", {"prompt": ""}, "prompt", "empty"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "less than 1"),
        ("/v1/completions", {"prompt": "a", "temperature": -1.0}, "temperature", "-1.0"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ("/v1/completions", {"prompt": "a", "top_p": 0.0}, "top_p", "outside"),
        ("/v1/completions", {"prompt": "a", "top_k": 0}, "top_k", "neither"),
        ("/v1/completions", {"prompt": "a", "n": 2}, "n", "1"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, "stop", "empty"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, "stop", "16 are allowed"),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs", "20"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo", "unknown field"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt", "64 are allowed"),
        ("/generate", {"text": ["a"] * 17}, "body", "17 prompts; this server takes 16 at once"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content", "requir"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role",
            "'assistant'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [_TEXT, {"type": "image_url"}]}]},
            "messages.0.content",
            "only text content is supported, not 'image_url'",
        ),
        ("/v1/chat/completions", {"messages": _CHAT, "top_logprobs": 2}, "top_logprobs", "needs"),
        ("/abort_request", {}, "rid", "required"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    world: HttpWorld, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = world.client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "the body is not valid JSON: "),
        (b'{"text": }', "the body is not valid JSON: "),
        (b"", "the body is empty; send a JSON object"),
        (b'{"text": "\xff"}', "the body is not valid UTF-8"),
        (b"\xff\xfe", "the body is not"),
        (b"[]", "the body must be a JSON object, not an array"),
        (b'"text"', "the body must be a JSON object, not a string"),
        (b"1.5", "the body must be a JSON object, not a number"),
        (b"true", "the body must be a JSON object, not a boolean"),
        (b"null", "the body must be a JSON object, not null"),
    ],
)
def test_a_body_that_is_no_object_is_a_400_that_says_so(
    world: HttpWorld, content: bytes, said: str
) -> None:
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        response = world.client.post(path, content=content, headers=JSON)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["message"].startswith(said)
        assert error["param"] == "body"


def test_a_deeply_nested_body_is_a_400(world: HttpWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_args: object, **_settings: object) -> object:
        raise RecursionError  # how deep is too deep depends on the version of Python

    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", loads)
        response = world.client.post("/generate", content=b"[[]]", headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the body is nested too deeply"
    deep = world.client.post("/generate", content=b"[" * 5000, headers=JSON)
    assert deep.status_code == 400, deep.text


def test_other_statuses(world: HttpWorld) -> None:
    assert world.client.get("/nowhere").status_code == 404
    assert world.client.get("/generate").status_code == 405
    wrong_model = {"prompt": "a", "model": "other"}
    response = world.client.post("/v1/completions", json=wrong_model)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"
    assert world.client.post("/flush_cache?timeout_s=-1").status_code == 400
    untyped = world.client.post("/generate", content=json.dumps({"text": "a"}))
    assert untyped.status_code == 415
    assert "Content-Type: application/json" in untyped.json()["error"]["message"]


def test_a_large_body_is_a_413(world: HttpWorld) -> None:
    large = json.dumps({"text": "a" * 9000})
    assert world.client.post("/generate", content=large, headers=JSON).status_code == 413
    chunks = (b"x" * 1000 for _ in range(10))
    assert world.client.post("/generate", content=chunks).status_code == 413


def test_a_text_that_can_not_fit_is_refused_without_tokenising(fresh: HttpWorld) -> None:
    def encode(text: str, *, add_bos: bool = True) -> list[int]:
        raise AssertionError("tokenised")

    fresh.engine.tokenizer.encode = encode  # type: ignore[method-assign]
    text = "a" * MAX_CONTEXT_LEN
    for path, body, param in (
        ("/generate", {"text": text}, "text"),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        response = fresh.client.post(path, json=body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert "the prompt has at least 5" in error["message"]
        assert "the context holds 512" in error["message"]


def test_the_server_answers_while_a_prompt_is_tokenised(fresh: HttpWorld) -> None:
    tokenizer, entered, gate = fresh.engine.tokenizer, threading.Event(), threading.Event()
    encode = tokenizer.encode

    def held(text: str, *, add_bos: bool = True) -> list[int]:
        entered.set()
        assert gate.wait(WAIT_S)
        return encode(text, add_bos=add_bos)

    tokenizer.encode = held  # type: ignore[method-assign]
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(fresh.client.post, "/generate", json=body)
        try:
            assert entered.wait(WAIT_S)
            assert fresh.client.get("/health").status_code == 200
            other = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
            assert fresh.client.post("/generate", json=other).status_code == 200
            assert not slow.done()
        finally:
            gate.set()
        assert slow.result(WAIT_S).json()["output_ids"] == OUTPUT[:2]


def test_an_answer_ends_where_the_context_does(world: HttpWorld) -> None:
    text = "a" * (MAX_CONTEXT_LEN - 12)
    body = {"text": text, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    info = world.client.post("/generate", json=body).json()["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 12}
    completion = {"prompt": text, "max_tokens": 100, "ignore_eos": True, **GREEDY}
    answer = world.client.post("/v1/completions", json=completion).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_nothing_is_held_after_all_those_refusals(world: HttpWorld) -> None:
    world.assert_nothing_held()


def test_api_key() -> None:
    with http_world(api_key="secret") as locked:
        assert locked.client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = locked.client.get("/get_server_info", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer secret"}
        assert locked.client.get("/get_server_info", headers=good).status_code == 200


def test_a_full_server_is_a_503() -> None:
    with http_world(max_queued_requests=1) as full:
        full.hold(from_step=1)
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
        with full.client.stream("POST", "/generate", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            response = full.client.post("/generate", json={"text": "a"})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            full.gate.set()
            assert list(lines)[-2] == "data: [DONE]"
        assert full.client.post("/generate", json={"text": "a"}).status_code == 200


def test_a_rid_in_use_is_a_400(fresh: HttpWorld) -> None:
    fresh.hold(from_step=1)
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True, "rid": "r"}
    with fresh.client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        response = fresh.client.post("/generate", json={"text": "a", "rid": "r"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "rid"
        fresh.gate.set()
        assert list(lines)[-2] == "data: [DONE]"


# -- aborts --------------------------------------------------------------------------------------

_LONG = {"text": PROMPT, "sampling_params": {"max_new_tokens": 400}}


def test_a_client_that_leaves_a_stream_frees_everything(fresh: HttpWorld) -> None:
    fresh.hold(from_step=2)
    with fresh.client.stream("POST", "/generate", json={**_LONG, "stream": True}) as stream:
        next(stream.iter_lines())
    assert fresh.aborted.wait(WAIT_S), "the disconnect was not noticed"
    fresh.gate.set()
    assert fresh.released.wait(WAIT_S)
    fresh.assert_nothing_held()


def test_a_client_that_does_not_wait_for_its_answer_frees_everything(fresh: HttpWorld) -> None:
    fresh.hold()
    body = json.dumps(_LONG).encode()
    with socket.create_connection(fresh.address, timeout=WAIT_S) as client:
        head = "POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert fresh.dispatched.wait(WAIT_S)
    assert fresh.aborted.wait(WAIT_S), "the disconnect was not noticed"
    fresh.gate.set()
    assert fresh.released.wait(WAIT_S)
    fresh.assert_nothing_held()


def test_abort_request_ends_a_stream(fresh: HttpWorld) -> None:
    fresh.hold(from_step=2)
    body = {**_LONG, "stream": True, "rid": "victim"}
    with fresh.client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert fresh.client.post("/abort_request", json={"rid": "victim"}).status_code == 200
        fresh.gate.set()
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    finish = json.loads(events.pop())["meta_info"]["finish_reason"]
    assert finish == {"type": "abort", "message": "aborted"}
    fresh.assert_nothing_held()
    assert fresh.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200


def test_a_server_that_stops_ends_its_streams(fresh: HttpWorld) -> None:
    fresh.hold(from_step=2)
    with fresh.client.stream("POST", "/generate", json={**_LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        fresh.gate.set()
        fresh.server.should_exit = True
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]", "what runs is finished"


# -- administration ------------------------------------------------------------------------------


def _samples(world: HttpWorld) -> dict[str, float]:
    lines = world.client.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_have_every_label_at_zero_and_then_count(fresh: HttpWorld) -> None:
    before = _samples(fresh)
    for tier in TIERS:
        assert before[f'sglang:hicache_prompt_tokens_total{{tier="{tier}"}}'] == 0
    for finish in ("stop", "length", "abort", "error"):
        assert before[f'sglang:requests_total{{finish="{finish}"}}'] == 0
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 3}}
    for _ in range(2):
        fresh.client.post("/generate", json=body)
    after = _samples(fresh)
    assert after['sglang:hicache_prompt_tokens_total{tier="computed"}'] == len(PROMPT) + 4
    assert after['sglang:hicache_prompt_tokens_total{tier="device"}'] == len(PROMPT) - 4
    assert after['sglang:hicache_prompt_tokens_total{tier="host"}'] == 0
    assert after['sglang:requests_total{finish="length"}'] == 2
    assert after["sglang:generated_tokens_total"] == 6
    assert after["sglang:time_to_first_token_seconds_count"] == 2
    assert after['sglang:requests_now{state="running"}'] == 0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(fresh: HttpWorld, method: str) -> None:
    fresh.client.post("/generate", json={"text": PROMPT})
    assert fresh.state()["evictable_tokens"] > 0
    assert fresh.client.request(method, "/flush_cache").json() == {"flushed": True}
    assert fresh.state()["free_tokens"] == POOL_TOKENS


def test_flush_cache_waits_no_longer_than_told(fresh: HttpWorld) -> None:
    fresh.hold(from_step=2)
    with fresh.client.stream("POST", "/generate", json={**_LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = fresh.engine._thread.flush_cache(timeout_s=0)
        fresh.gate.set()
        assert refused.result(WAIT_S) is False
        assert list(lines)[-2] == "data: [DONE]"
    assert fresh.engine.flush_cache(WAIT_S)


def test_information_routes(world: HttpWorld) -> None:
    assert world.client.get("/health").json() == {"status": "ok"}
    models = world.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [MODEL]
    info = world.client.get("/get_server_info").json()
    assert info["engine"] == "test"
    assert info["state"]["pool_tokens"] == POOL_TOKENS


def test_a_failed_engine_is_unhealthy_and_answers_with_an_error(fresh: HttpWorld) -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("the device is gone")

    fresh.runner.on_dispatch = fail
    response = fresh.client.post("/generate", json={"text": "a"})
    assert response.status_code == 500
    assert "the device is gone" in response.json()["error"]["message"]
    assert fresh.client.get("/health").status_code == 503
    assert fresh.client.post("/generate", json={"text": "a"}).status_code == 503
    fresh.engine.shutdown = lambda deadline_s: True  # type: ignore[method-assign,assignment]
