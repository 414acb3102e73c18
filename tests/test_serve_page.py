"""The page at `/`: its headers, and that its script uses the names of the API."""

from __future__ import annotations

import json
import re
from pathlib import Path

import leapahead
from leapahead import LLM
from leapahead.serve import page
from leapahead.serve.schema import ChatRequest
from tests.serving import serving, toy_llm

TEXT = (Path(leapahead.__file__).parent / "assets" / "serve.html").read_text(encoding="utf-8")


def test_the_page() -> None:
    with serving(toy_llm(), keys=("secret",)) as found:
        response = found.get("/")
        assert (response.status_code, response.text) == (200, TEXT)
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"] == page.POLICY
        assert found.get("/v1/models").status_code == 401
    meta = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]+)"', TEXT)
    assert meta is not None
    assert page.POLICY.startswith(meta[1])
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|innerHTML|@import", TEXT)


def test_the_request_of_the_page_is_one_that_is_answered() -> None:
    """The names in the page's script are those of the API."""
    script = TEXT[TEXT.index("function request()") :]
    names = re.findall(r"^    (\w+):", script[: script.index("return body")], re.MULTILINE)
    assert names[0] == "messages"
    assert set(names) <= set(ChatRequest.model_fields)
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "temperature": 0,
        "seed": 1,
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "leapahead": {"stats": True, "spans": True},
        "prediction": {"type": "content", "content": "Paris"},
    }
    assert set(names) | {"prediction"} == set(body)
    with serving(LLM()) as running:
        lines = running.post("/v1/chat/completions", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(event["usage"]["completion_tokens"] >= 0 for event in events)
    assert all("spans" in event["leapahead"] for event in events[1:-1])
    used = re.findall(r"const \{ ([^}]+) \} = event\.leapahead", script)[0]
    assert {name.split(":")[0].strip() for name in used.split(",")} <= set(events[-1]["leapahead"])
