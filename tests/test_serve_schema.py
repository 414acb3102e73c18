"""The OpenAPI schema is true: schemathesis sends what it allows and what it forbids, and checks every answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from helpers import mostly_slow
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from leapahead import LLM
from leapahead.serve import bounds
from tests.serving import Letters, Running, SlowToy, serving

PATHS = (
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages"),
    *("POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize"),
    *("GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /metrics"),
    *("GET /version", "GET /load", "GET /tokenizer_info"),
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(LLM(SlowToy(), tokenizer=Letters()), {"max_tokens": 20}, tokenizer_info=True) as found:
        yield found


@pytest.fixture(scope="module")
def operations(running: Running) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    found = [each.ok() for each in schema.get_all_operations()]
    return {f"{each.method.upper()} {each.path}": each for each in found}


def check(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        case.call_and_validate(timeout=60)

    run()


@pytest.mark.parametrize("size", [1, 2, 10, 11, 19, 96, 100, 101, 1250])
def test_numbers_below_a_size_have_one_spelling(size: int) -> None:
    pattern = re.compile(bounds.below(size))
    assert [number for number in range(2 * size + 20) if pattern.match(str(number))] == list(range(size))
    assert not any(pattern.match(f"0{number}") for number in range(size))


def test_the_schema_has_these_paths(operations: dict[str, Any]) -> None:
    assert set(operations) == set(PATHS) | {"GET /v1/models/{name}"}


@pytest.mark.parametrize("path", mostly_slow(PATHS, *PATHS[1:2], *PATHS[-7:]))
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_every_path(operations: dict[str, Any], path: str, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and path.startswith("GET"):
        pytest.skip("nothing can be wrong in it")
    check(operations[path], mode, 12)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS[:7])
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
def test_every_path_at_length(operations: dict[str, Any], path: str, mode: GenerationMode) -> None:
    check(operations[path], mode, 200)
