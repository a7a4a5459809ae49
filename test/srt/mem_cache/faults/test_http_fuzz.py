"""Requests that nobody would write, from the server's own OpenAPI and from noise: an answer or a clear refusal, and no
server error; nothing is held afterwards."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from http_world import MAX_REQUEST_BYTES, HttpWorld, http_world
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from soak_figures import Figures

CHECKS: list[schemathesis.CheckFunction] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
BODY_PATHS = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"),
    "/hicache/warm_up",
)
MOST_TOKENS = 4
TOO_LONG = 413
TIMEOUT_S = 120.0  # a busy machine is no fault of an answer
FEW = ("max_new_tokens", "max_tokens", "max_completion_tokens")


@pytest.fixture(scope="module")
def world() -> Iterator[HttpWorld]:
    with http_world() as running:
        yield running


def settings(max_examples: int, seed: int | None) -> Callable[[Any], Any]:
    """That many examples; without a seed the same ones each time."""
    chosen = hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: chosen(test if seed is None else hypothesis.seed(seed)(test))


def shorten(body: Any) -> Any:
    """A valid body asks for few tokens, so that many bodies can be tried."""
    if isinstance(body, dict):
        for name, value in body.items():
            shorten(value)
            if name in FEW and isinstance(value, int) and value > MOST_TOKENS:
                body[name] = MOST_TOKENS
    return body


def fuzz_from_the_openapi(world: HttpWorld, max_examples: int, seed: int | None) -> int:
    """Right and wrong requests to every operation; how many."""
    base_url = str(world.client.base_url)
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    count = 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        takes_data = {"parameters", "requestBody"} & set(operation.definition.raw)
        for mode in MODES if takes_data else MODES[:1]:

            @settings(max_examples, seed)
            @hypothesis.given(case=operation.as_strategy(mode))
            def every_request(case: schemathesis.Case) -> None:
                nonlocal count
                count += 1
                if case.meta is not None and case.meta.generation.mode.is_positive:
                    case.body = shorten(case.body)
                response = case.call(base_url=base_url, timeout=TIMEOUT_S)
                # A wrong body that is also too long is refused for its length.
                too_long = response.status_code == TOO_LONG
                checks = [c for c in CHECKS if not (too_long and c is negative_data_rejection)]
                case.validate_response(response, checks=checks)

            every_request()
    return count


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["", "\ud800", "\0", "a" * 3000, "1e999", 2**63, -(2**63), 10**40]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*FEW, "text", "stop", "type", "role", ""]), inner),
    ),
    max_leaves=8,
)


def fields_of(world: HttpWorld, path: str) -> list[str]:
    """The fields that a route's body knows."""
    spec = world.client.get("/openapi.json").json()
    body = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return list(spec["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"])


def noise(fields: list[str]) -> st.SearchStrategy[bytes]:
    """Known fields with any value, JSON with a piece cut out, and bytes."""
    values = st.dictionaries(st.sampled_from(fields), json_values, max_size=6)
    texts = values.map(lambda value: json.dumps(shorten(value)).encode())
    cut = st.tuples(texts, st.floats(0, 1), st.integers(1, 4)).map(
        lambda t: t[0][: int(t[1] * len(t[0]))] + t[0][int(t[1] * len(t[0])) + t[2] :]
    )
    return st.one_of(texts, texts, cut, st.binary(max_size=200))


def fuzz_with_noise(world: HttpWorld, max_examples: int, seed: int | None) -> int:
    """Bodies that no schema describes; how many."""
    count = 0
    for path in BODY_PATHS:

        @settings(max_examples, seed)
        @hypothesis.given(path=st.just(path), content=noise(fields_of(world, path)))
        def every_body(path: str, content: bytes) -> None:
            nonlocal count
            count += 1
            headers = {"Content-Type": "application/json"}
            response = world.client.post(path, content=content, headers=headers)
            is_too_long = len(content) > MAX_REQUEST_BYTES
            assert response.status_code in ((TOO_LONG,) if is_too_long else (200, 400, 404)), (
                f"{response.status_code}: {response.text}"
            )
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["message"]
                assert error["code"] == response.status_code

        every_body()
    return count


@pytest.mark.parametrize(("fuzz", "examples"), [(fuzz_from_the_openapi, 12), (fuzz_with_noise, 25)])
def test_no_body_is_a_server_error(
    world: HttpWorld, fuzz: Callable[[HttpWorld, int, int | None], int], examples: int
) -> None:
    assert fuzz(world, examples, None) > 3 * examples
    world.assert_nothing_held()
    assert world.client.get("/health").status_code == 200


@pytest.mark.soak
@pytest.mark.parametrize("fuzz", [fuzz_from_the_openapi, fuzz_with_noise])
def test_many_more_bodies(
    fuzz: Callable[[HttpWorld, int, int | None], int],
    seed: int,
    soak_seconds: float,
    figures: Figures,
) -> None:
    dice, end_s = random.Random(seed), time.monotonic() + soak_seconds
    with http_world() as world:
        while time.monotonic() < end_s:
            figures.add(requests=fuzz(world, 200, dice.getrandbits(32)))
            world.assert_nothing_held()
