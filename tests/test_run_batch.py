"""`leapahead run-batch`: results as a server gives them, wrong lines, and batches that were interrupted."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gguf_models
import pytest
from helpers import mostly_slow

from leapahead import LLM
from leapahead.cli import main, screen
from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.serve import app, batch, batch_lines
from leapahead.serve.batch_lines import Asked, Result, requests
from leapahead.serve.batch_results import Results
from leapahead.serve.settings import Settings
from tests.serving import SlowToy, calling_llm, serving, toy_llm

command = sys.modules["leapahead.cli.run_batch"]  # the name in the package is the command's
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPTS = ("ab", "the cat", "x = [1, 2", "def add(a, b):")


def request(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def some(count: int = 4, **body: Any) -> list[dict[str, Any]]:
    """Requests whose texts differ, greedy and sampled by turns."""
    return [
        request(
            f"r{index}", {"prompt": PROMPTS[index % 4], "max_tokens": 8, "temperature": index % 2, "seed": index} | body
        )
        for index in range(count)
    ]


def written(*members: Any) -> bytes:
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in members)


def read(content: bytes | Path) -> dict[str | None, dict[str, Any]]:
    """The results by their custom_id, of which each must have one."""
    lines = (content.read_bytes() if isinstance(content, Path) else content).decode().splitlines()
    found = [json.loads(line) for line in lines]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def texts(results: dict[str | None, dict[str, Any]]) -> dict[str | None, Any]:
    return {name: [choice["text"] for choice in each["response"]["body"]["choices"]] for name, each in results.items()}


def parsed(content: bytes, kept: dict[str, str] | None = None) -> list[Asked | Result]:
    return list(requests(lambda: io.BytesIO(content), kept or {}))


def error_of(content: bytes) -> tuple[str | None, str, str | None, int]:
    (found,) = (each for each in parsed(content) if isinstance(each, Result))
    assert found.response is None
    assert found.error is not None
    return found.error.code, found.error.message, found.error.param, found.error.line


@pytest.fixture
def toy(leapahead: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Runs the command with a toy in place of a model, on a file with this content; gives click's result."""
    source = tmp_path / "requests.jsonl"
    made: list[LLM] = []

    def opened(*_: Any, **__: Any) -> LLM:
        made.append(toy_llm(target=command_toy))
        return made[-1]

    command_toy = SlowToy()
    monkeypatch.setattr("leapahead.cli.served.open_llm", opened)

    def run(content: bytes, *args: str, output: str = str(tmp_path / "results.jsonl")) -> Any:
        source.write_bytes(content)
        return leapahead("run-batch", "toy", "-i", str(source), "-o", output, *args)

    run.target = command_toy  # type: ignore[attr-defined]
    return run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


# ------------------------------------------------------------------------------------------------------- the answers


def test_texts_are_those_of_the_library(leapahead: Any, tiny_folder: Path, tmp_path: Path, output: Path) -> None:
    (tmp_path / "in").write_bytes(written(*some(8)))
    args = (
        "-m",
        str(tiny_folder),
        "-i",
        str(tmp_path / "in"),
        "-d",
        "suffix",
        "--max-batch",
        "3",
        "--dtype",
        "float32",
    )
    done = leapahead("run-batch", *args, "-o", str(output))
    assert done.exit_code == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert first == "8 requests answered"
    assert second.startswith("64 tokens, ")
    with LLM(str(tiny_folder), dtype="float32") as llm:
        for index, each in enumerate(some(8)):
            own = llm.generate(PROMPTS[index % 4], max_new_tokens=8, temperature=index % 2, seed=index)
            assert texts(read(output))[each["custom_id"]] == [own.text]


CHANGING = ("id", "created", "created_at", "call_id", "usage")


def without_ids(found: Any) -> Any:
    """An answer without what differs from one to the next: ids, times, what was cached, digits of log-probabilities."""
    if isinstance(found, float):
        return round(found, 3)
    if isinstance(found, dict):
        members = {name: without_ids(each) for name, each in found.items()}
        return {name: each for name, each in members.items() if name not in CHANGING}
    return [without_ids(each) for each in found] if isinstance(found, list) else found


def test_answers_are_those_of_the_server() -> None:
    """Of every path, with several texts, tools and a form, and of requests that the server refuses."""
    messages = [{"role": "user", "content": "Hi"}]
    common = {"seed": 3, "max_tokens": 24}
    function = {"name": "clock", "parameters": {}, "strict": True}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["red", "blue"]}}}
    asked = [
        request("n", {"prompt": ["a", "b"], "n": 2, **common}),
        request("chat", {"messages": messages, "logprobs": True, "model": "tiny", **common}, CHATS),
        request("form", {"messages": messages, "response_format": form, **common}, CHATS),
        request("tools", {"messages": messages, "parallel_tool_calls": False, **tools, **common}, CHATS),
        request("response", {"input": "Hi", "seed": 3, "max_output_tokens": 12}, "/v1/responses"),
        request("message", {"messages": messages, "stream": False, **common}, "/v1/messages"),
        request("refused", {"messages": messages, "temperature": -1}, CHATS),
        request("model", {"prompt": "a", "model": "gpt-4o"}),
    ]
    results = answered_by(calling_llm(), written(*asked))
    with serving(calling_llm(), reasoning_parser="none") as running:
        for each in asked:
            found = running.post(each["url"], each["body"])
            result = results[each["custom_id"]]
            assert result["response"]["status_code"] == found.status_code
            assert without_ids(result["response"]["body"]) == without_ids(found.json())
            assert (result["error"] is None) == (found.status_code == 200)
    assert {name for name, each in results.items() if each["error"]} == {"refused", "model"}
    assert results["model"]["response"]["status_code"] == 404
    assert results["refused"]["error"] == {
        "code": "invalid_value",
        "message": results["refused"]["response"]["body"]["error"]["message"],
        "param": "temperature",
        "line": 7,
    }
    assert results["tools"]["response"]["body"]["choices"][0]["message"]["tool_calls"]
    ids = [each["response"]["request_id"] for each in results.values()]
    assert len(set(ids)) == len(ids)


def answered_by(llm: LLM, content: bytes, width: int = 8) -> dict[str | None, dict[str, Any]]:
    """The results of requests to a model, without the command."""
    served, worker = app.make(llm, Settings(names=("tiny",), reasoning_parser="none"))
    lines: list[bytes] = []
    items = requests(lambda: io.BytesIO(content), {})
    asyncio.run(batch.run(served, worker, items, width, lambda result: lines.append(result.line())))
    return read(b"".join(lines))


def test_no_more_requests_are_read_than_are_answered_at_a_time() -> None:
    served, worker = app.make(toy_llm(), Settings(names=("tiny",)))
    taken, done = [], []

    def items() -> Iterator[Asked | Result]:
        for each in parsed(written(*some(40))):
            taken.append(each)
            yield each

    def write(result: Result) -> None:
        done.append(result)
        assert len(taken) - len(done) < 4

    asyncio.run(batch.run(served, worker, items(), 4, write))
    assert len(done) == 40
    assert worker.pending == 0
    assert worker.total.committed > 40


def test_the_queue_is_never_full(toy: Any, output: Path) -> None:
    """Whatever number of texts the requests have."""
    content = written(*some(20, n=4, prompt=["a", "b"], max_tokens=1))
    limits = ("--max-samples", "4", "--max-prompts", "2")
    assert toy(content, "--max-batch", "2", *limits).exit_code == 0
    assert {len(each) for each in texts(read(output)).values()} == {8}


# -------------------------------------------------------------------------------------------------------- wrong lines


def line(**members: Any) -> bytes:
    return written({**request("a", {"prompt": "a"}), **members})


@pytest.mark.parametrize(
    ("content", "code", "param", "words"),
    [
        (b"{", "invalid_json", None, "the line is not valid JSON: EOF while parsing an object at column 1"),
        (b'{"a": NaN}', "invalid_json", None, "expected value at column 7"),
        (b"[" * 10_000, "invalid_json", None, "recursion limit"),
        (b'{"custom_id": "\xff"}', "invalid_json", None, "is not UTF-8 text: byte 0xff at position 15; convert"),
        ("{}".encode("utf-16"), "invalid_json", None, "is not UTF-8 text: byte 0xff at position 0"),
        (b"[]", "invalid_request", None, "the line is []; a request is a JSON object"),
        (b'"' + b"a" * 500 + b'"', "invalid_request", None, "aaa...; a request is a JSON object"),
        (b"{}", "invalid_custom_id", "custom_id", "custom_id is missing"),
        (line(custom_id=""), "invalid_custom_id", "custom_id", 'custom_id="" is not possible'),
        (line(custom_id=7), "invalid_custom_id", "custom_id", "custom_id=7 is not possible"),
        (line(method="GET"), "invalid_method", "method", 'method="GET" is not possible; it must be POST'),
        (line(method=None), "invalid_method", "method", "method=null"),
        (line(url="/v1/embeddings"), "invalid_url", "url", 'url="/v1/embeddings" is not possible; it must be one of'),
        (line(url=["/v1/completions"]), "invalid_url", "url", "url="),
        (line(body=None), "invalid_body", "body", "body=null is not possible; it must be a JSON object"),
        (line(body="{}"), "invalid_body", "body", 'body="{}" is not possible'),
        (line(body={"stream": True}), "invalid_value", "stream", "stream=true is not possible: a result is whole"),
    ],
)
def test_a_line_that_is_no_request(content: bytes, code: str, param: str | None, words: str) -> None:
    found = error_of(b"\n" + content)
    assert (found[0], found[2], found[3]) == (code, param, 2)
    assert words in found[1]
    assert len(found[1]) < 200


def test_the_others_are_answered(toy: Any, output: Path) -> None:
    """The results say in which line the errors are, and the exit code and a sentence that there were some."""
    wrong = request("wrong", {"prompt": "a", "max_tokens": -1})
    first, second, *_ = some()
    content = written(first, b"oops\n", {**first, "body": {"prompt": "other"}}, wrong, second)
    done = toy(content)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] == "2 requests answered, 3 failed: the error is in the result"
    found = [json.loads(each) for each in output.read_text().splitlines()]
    lines = {each["error"]["line"]: each for each in found if each["error"]}
    assert set(lines) == {2, 3, 4}
    assert (lines[2]["custom_id"], lines[2]["response"]) == (None, None)
    assert lines[3]["error"]["message"] == 'custom_id="r0" occurs before; give another one'
    assert lines[4]["response"]["status_code"] == 400
    assert {each["custom_id"] for each in found if not each["error"]} == {"r0", "r1"}
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in found)
    assert len({each["id"] for each in found}) == 5


def test_forms_of_text_files(toy: Any, output: Path) -> None:
    """A byte order mark, CRLF, blank lines, and a last line without an end."""
    content = b"\xef\xbb\xbf" + written(*some()).replace(b"\n", b"\r\n\r\n \n").rstrip()
    assert toy(content).exit_code == 0
    assert set(read(output)) == {"r0", "r1", "r2", "r3"}


def test_no_requests(toy: Any, output: Path) -> None:
    done = toy(b"\n\n")
    assert (done.exit_code, done.stderr, output.read_bytes()) == (0, "0 requests answered\n", b"")


def test_lines_of_megabytes(toy: Any, output: Path) -> None:
    """They are read, and it is the model's context that refuses a prompt."""
    long = request("long", {"prompt": "a" * 10**6})
    padded = written(request("padded", {"prompt": "a", "max_tokens": 4})).replace(
        b'"body": ', b'"body":' + b" " * 10**7
    )
    assert toy(written(long, padded, *some())).exit_code == 1
    found = read(output)
    assert {name for name, each in found.items() if each["error"]} == {"long"}
    assert (found["long"]["error"]["code"], found["long"]["error"]["param"]) == ("context_length_exceeded", "prompt")
    assert len(found["long"]["error"]["message"]) < 400


def test_a_line_that_is_longer_than_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "LONGEST", 200)
    for length in (200, 201, 399, 400, 401, 402, 603):
        content = b" " * (length - 1) + b"\n" if length == 200 else b"a" * (length - 1) + b"\n"
        *wrong, good = parsed(content + written(*some(1)))
        assert isinstance(good, Asked)
        assert good.line == 2
        assert [each.error.code for each in wrong] == ([] if length == 200 else ["line_too_long"])  # type: ignore
    (last,) = parsed(b"a" * 300)
    assert isinstance(last, Result)


def test_a_text_with_line_separators_is_one_line() -> None:
    found = Result("id", "a\u2028b\x85c\u2029", None, None).line()
    assert len(found.decode().splitlines()) == 1
    assert json.loads(found)["custom_id"] == "a\u2028b\x85c\u2029"


def test_a_fault_of_the_model(toy: Any, output: Path) -> None:
    """Each of its requests fails, and standard error tells why. They are computed by the next run."""
    toy.target.fail = RuntimeError("out of memory")
    done = toy(written(*some(2)))
    assert done.exit_code == 1
    assert {each["response"]["status_code"] for each in read(output).values()} == {500}
    assert "error: fault: request_id=" in done.stderr
    assert "RuntimeError: out of memory\n" in done.stderr
    toy.target.fail = None
    assert toy(written(*some(2)), "--resume").exit_code == 0
    assert not any(each["error"] for each in read(output).values())


def test_a_file_that_cannot_be_read_to_its_end(toy: Any, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            found = super().readline(size)
            if not found:
                raise OSError(errno.EIO, "Input/output error")
            return found

    monkeypatch.setattr(command, "_opened", lambda _: Broken(written(*some(2))))
    done = toy(b"")
    assert (done.exit_code, done.stderr) == (2, "error: the requests cannot be read: Input/output error\n")


# -------------------------------------------------------------------------------------------------------------- resume


def test_resume_computes_what_is_missing(toy: Any, output: Path) -> None:
    """After a line that was cut, and with failed requests that are correct now; answers that are there stay."""
    asked = some(6)
    assert toy(written(*asked)).exit_code == 0
    whole = texts(read(output))
    lines = output.read_bytes().splitlines(keepends=True)
    failed = Result("batch_req_1", asked[4]["custom_id"], None, batch_lines.Error("invalid_url", "no", "url", 1))
    kept = [each for each in lines if json.loads(each)["custom_id"] in ("r0", "r1")]
    (cut,) = (each for each in lines if json.loads(each)["custom_id"] == "r2")
    output.write_bytes(kept[0] + failed.line() + kept[1] + cut[: len(cut) // 2])
    output.chmod(0o640)
    done = toy(written(*asked), "--resume")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0] == "4 requests answered, 2 answered before"
    assert texts(read(output)) == whole
    assert output.read_bytes().startswith(kept[0] + kept[1])
    assert output.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in output.parent.iterdir() if path.name.startswith(".")] == []
    before = output.read_bytes()
    done = toy(written(*asked), "--resume")
    assert (done.exit_code, done.stderr) == (0, "0 requests answered, 6 answered before\n")
    assert output.read_bytes() == before


def test_resume_counts_failures_once(toy: Any, output: Path) -> None:
    content = written(*some(2), b"oops\n", some(1)[0])
    for more in ((), ("--resume",), ("--resume",)):
        assert toy(content, *more).exit_code == 1
        assert output.read_bytes().count(b"\n") == 4


def test_resume_begins_where_there_is_nothing(toy: Any, output: Path) -> None:
    assert toy(written(*some()), "--resume").exit_code == 0
    assert len(read(output)) == 4
    output.write_bytes(b"")
    assert toy(written(*some())).exit_code == 0
    output.write_bytes(b'{"id": "batch_re')  # all that there is was cut
    assert toy(written(*some()), "--resume").exit_code == 0
    assert len(read(output)) == 4


def test_a_link_to_results_stays(toy: Any, output: Path, tmp_path: Path) -> None:
    output.symlink_to(tmp_path / "elsewhere.jsonl")
    content = written(*some(2), b"oops\n")
    for more in ((), ("--resume",)):
        assert toy(content, *more).exit_code == 1
        assert output.is_symlink()
        assert (tmp_path / "elsewhere.jsonl").read_bytes().count(b"\n") == 3


def test_what_is_not_resumed(toy: Any, output: Path, tmp_path: Path) -> None:
    content = written(*some())
    assert toy(content).exit_code == 0
    before = output.read_bytes()
    for more, words in (
        ((), f"{output} already holds results; pass --resume to continue, or name another file"),
        (("--resume", "--served-model-name", "other"), "holds a result of the model 'toy' in line 1, and this one is"),
    ):
        done = toy(content, *more)
        assert done.exit_code == 2
        assert words in done.stderr
    done = toy(written(*some(prompt="other")), "--resume")
    assert done.exit_code == 2
    assert 'the result of custom_id="r0" is of another request than that of line 1; name another' in done.stderr
    assert output.read_bytes() == before
    spaced = content.replace(b'"url": ', b'\t"url":')  # the same requests
    assert toy(spaced, "--resume").exit_code == 0
    listed = b'{"custom_id": ["r0"], "id": "x", "response": {"body": {"model": "toy"}}, "error": null}\n'
    for other in (b"notes\n", b"{}\n", b"[1]\n", listed, content):
        output.write_bytes(other)
        done = toy(content, "--resume")
        assert (done.exit_code, output.read_bytes()) == (2, other)
        assert f"{output} holds no result of run-batch in line 1; name another file" in done.stderr


def test_outputs_that_are_refused(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(*some(1))
    for output, more, words in (
        ("-", ("--resume",), "--resume is not possible with --output-file -"),
        (os.devnull, ("--resume",), f"--resume is not possible with {os.devnull}, which is no regular file"),
        (str(tmp_path / "none" / "out"), (), f"there is no folder {tmp_path / 'none'}"),
        (str(tmp_path), (), "is a directory"),
    ):
        done = toy(content, *more, output=output)
        assert done.exit_code == 2, output
        assert words in done.stderr, done.stderr
    assert toy(content, output=os.devnull).exit_code == 0
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    done = toy(content, output=str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "is not writable; name another" in done.stderr


class Full(io.BytesIO):
    """A file that has room for two results and a half."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__()
        self._path, self._error, self._left = path, error, 2

    def write(self, data: Any) -> int:
        self._left -= 1
        with self._path.open("ab") as file:
            file.write(data if self._left >= 0 else data[: len(data) // 2])
        if self._left < 0:
            raise self._error
        return len(data)


def test_a_full_disk(toy: Any, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Results, "open", lambda self: Full(self.path, full))
        done = toy(written(*some(8)))
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {output} cannot be written: No space left on device; where that is remedied, --resume goes on with "
        "what it holds\n"
    )
    assert output.read_bytes().count(b"\n") == 2
    assert toy(written(*some(8)), "--resume").stderr.startswith("6 requests answered, 2 answered before\n")
    assert len(read(output)) == 8


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: standard output cannot be written: No space"),
    ],
)
def test_standard_output_that_cannot_be_written(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int, words: str
) -> None:
    """The rest is not computed."""
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.buffer", Full(tmp_path / "seen", error))
    done = toy(written(*some(40)), output="-")
    assert done.exit_code == code
    assert done.stderr.startswith(words)
    assert (tmp_path / "seen").read_bytes().count(b"\n") == 2


def test_a_file_that_cannot_be_replaced(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error leaves it as it was."""
    content = Result("batch_req_1", "a", None, batch_lines.Error("invalid_url", "no", "url", 1)).line()
    output.write_bytes(content)

    def replace(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(LeapaheadError, match="cannot be written: No space left on device"):
        Results(output, True, ("toy",)).open()
    assert output.read_bytes() == content
    assert os.listdir(output.parent) == [output.name]


# ------------------------------------------------------------------------------------------------ streams and signals


def test_standard_input_and_output(toy: Any, leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = leapahead("run-batch", "toy", "-i", "-", "-o", "-", stdin=written(*some()))
    assert done.exit_code == 0
    assert set(read(done.stdout.encode())) == {"r0", "r1", "r2", "r3"}
    monkeypatch.setattr(sys, "stdin", None)
    given = main.commands["run-batch"].make_context("run-batch", ["-i", "-", "-o", "-"]).params  # type: ignore[attr-defined]
    with pytest.raises(BadParameter, match="standard input is closed"):
        command.run_batch.callback(**given)


def test_progress(toy: Any, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar knows how many results there will be, if the requests are in a file."""
    shown: list[tuple[int, int | None]] = []
    monkeypatch.setattr(screen.Bar, "__call__", lambda self, what, done, total: shown.append((done, total)))
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: self.name == "<stderr>")
    content = written(*some(3)) + b"\n"
    assert toy(content).exit_code == 0
    assert shown == [(1, 3), (2, 3), (3, 3)]
    assert toy(content + written(request("more", {"prompt": "a"})), "--resume").exit_code == 0
    assert shown[3:] == [(4, 4)]


def test_the_drafter_cache_is_saved(leapahead: Any, tmp_path: Path, output: Path) -> None:
    (tmp_path / "in").write_bytes(written(*some()))
    args = ("run-batch", "-i", str(tmp_path / "in"), "-d", "suffix", "--drafter-cache", str(tmp_path / "drafts.npz"))
    assert leapahead(*args, "-o", str(output)).exit_code == 0
    assert (tmp_path / "drafts.npz").is_file()


def test_a_package_that_is_missing(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "leapahead.serve.batch")
    monkeypatch.delattr("leapahead.serve.batch")
    done = toy(written(*some(1)))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: leapahead run-batch needs httpx, which is not installed: pip install ")


def test_the_model_is_given_once(leapahead: Any, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"")
    done = leapahead("run-batch", "one", "-m", "other", "-i", str(tmp_path / "in"), "-o", "-")
    assert (done.exit_code, "given twice" in done.stderr) == (2, True)
    done = leapahead("run-batch", "-o", "-", "-i", str(tmp_path / "in"), "--option", "nodes")
    assert done.stderr == "error: --option nodes is not possible: it must be KEY=VALUE\n"


@pytest.mark.parametrize("sent", mostly_slow([signal.SIGINT, signal.SIGTERM], signal.SIGINT))
def test_interrupted(leapahead: Any, sent: signal.Signals, tmp_path: Path, output: Path) -> None:
    """Also while standard input is waited for. The texts are those of a batch that was not interrupted.

    A GGUF file starts in a quarter of the time.
    """
    pytest.importorskip("llama_cpp")
    model = str(gguf_models.bundled("f32"))
    asked = some(12, ignore_eos=True)
    (tmp_path / "in").write_bytes(written(*asked))
    args = ("run-batch", model, "-d", "plain", "--exact", "--max-batch", "4", "-o", str(output))
    started = subprocess.Popen(
        [sys.executable, "-m", "leapahead", *args, "-i", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert started.stdin is not None
    assert started.stderr is not None
    try:
        started.stdin.write(written(*asked[:6]))
        started.stdin.flush()
        ends = time.monotonic() + 60
        while not (output.exists() and output.read_bytes().count(b"\n") == 6) and time.monotonic() < ends:
            time.sleep(0.02)
        started.send_signal(sent)
        assert started.wait(20) == 130
        last = started.stderr.read().decode().splitlines()[-1]
    finally:
        started.kill()
        started.stdin.close()
        started.stderr.close()
    assert last == f"interrupted; 6 results are in {output}, and --resume continues"
    done = leapahead(*args, "-i", str(tmp_path / "in"), "--resume")
    assert done.exit_code == 0, done.stderr
    assert "6 requests answered, 6 answered before\n" in done.stderr
    resumed = texts(read(output))
    output.unlink()
    assert leapahead(*args, "-i", str(tmp_path / "in")).exit_code == 0
    assert texts(read(output)) == resumed


def test_requests_that_are_interrupted_are_cancelled() -> None:
    """Nothing is left of them in the engine, and the thread that reads ends with the file closed."""
    llm = toy_llm(0.01)
    served, worker = app.make(llm, Settings(names=("tiny",)))
    file = io.BytesIO(written(*some(20, max_tokens=200, ignore_eos=True)))

    def opened() -> BinaryIO:
        return file

    async def interrupted() -> None:
        running = asyncio.create_task(batch.run(served, worker, requests(opened, {}), 8, lambda _: None))
        while not llm.engine.lengths():
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(interrupted())
    assert not llm.engine.lengths()
    assert worker.pending == 0
    ends = time.monotonic() + 5
    while not file.closed and time.monotonic() < ends:
        time.sleep(0.01)
    assert file.closed
