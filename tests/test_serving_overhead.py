"""The measurement of what a streamed token costs beyond `LLM.generate`, and times of the server's answers."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from leapahead.core.errors import BadParameter, LeapaheadError
from research import serving, serving_memory, serving_overhead
from research.serving_overhead import Seen


@pytest.mark.slow
def test_streams_are_compared_with_generate(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    arguments = ["--streams", "1", "--streams", "3", "--max-tokens", "20", "--rounds", "2", "--out", str(out)]
    ran = CliRunner().invoke(serving_overhead.main, [*arguments, "--drafter", "plain"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    one, three = json.loads(out.read_text())["rows"]
    assert (one["streams"], three["streams"]) == (1, 3)
    for row in (one, three):
        assert row["generate_us"] > 0
        assert row["stream_us"] > 0
        assert row["more_us"]["low"] <= row["more_us"]["median"] <= row["more_us"]["high"]
        assert 0 <= row["gap_us"]["p50"] <= row["gap_us"]["p95"]


def test_times_are_those_of_all_texts_together() -> None:
    texts = [[1.0, 1.5, 2.0], [1.2, 2.0, 3.0]]  # seconds
    assert serving_overhead._token_us(texts, tokens=6) == pytest.approx(1e6 * (3.0 - 1.0) / (6 - 2))
    pairs = [(Seen(100.0, 50.0), Seen(130.0, 70.0, [90.0, 110.0])), (Seen(100.0, 50.0), Seen(110.0, 90.0, [100.0]))]
    row = serving_overhead._row(pairs)
    assert row["more_us"] == {"median": 20.0, "low": 10.0, "high": 30.0}
    assert row["more_cpu_us"] == 30.0
    assert row["gap_us"]["p50"] == 100.0


@pytest.mark.slow
def test_an_answer_that_is_no_stream_is_reported() -> None:
    with serving_overhead.serving(serving_overhead.LLM()) as port, pytest.raises(LeapaheadError, match="400"):
        serving_overhead.streams(port, [{"prompt": "", "max_tokens": -1, "stream": True}])


def test_times_between_pieces_need_an_answer_of_several_pieces() -> None:
    assert serving._quantiles([1.0, 2.0, 3.0])["p50"] == 2.0
    with pytest.raises(BadParameter, match="raise --max-tokens"):
        serving._quantiles([])


class Patient(random.Random):
    """Leaves where leaving is certain, and asks for whole answers."""

    def random(self) -> float:
        return 0.9


@pytest.mark.parametrize(("error", "left"), [(httpx.ConnectTimeout, True), (httpx.ReadTimeout, True), (None, False)])
def test_a_client_that_leaves_a_busy_server(error: type[httpx.TimeoutException] | None, left: bool) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if error is not None:
            raise error("too late", request=request)
        return httpx.Response(200)

    async def ask() -> bool:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server") as client:
            return await serving_memory.ask(client, Patient(0), 0, aborts=1.0)

    assert asyncio.run(ask()) is left
