"""The command line where something goes wrong: bytes that are not text, closed outputs, interrupts, errors in chat."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import click
import gguf_models
import heads
import pytest
from click.testing import CliRunner
from helpers import mostly_slow

from leapahead import LLM, BadLogits, interrupts, layer_search
from leapahead import drafters as registry
from leapahead.cli import main, screen, text_input
from leapahead.cli.generate import open_llm
from leapahead.cli.typed import HomePath
from leapahead.core import parameters
from leapahead.drafters import saved_skips
from leapahead.drafters.saved_skips import Found
from leapahead.models import loading
from leapahead.models.self_draft.layer_skip import Skip

PROMPT = "def add(a, b):"
FEW = ("--max-new-tokens", "8", "--ignore-eos")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def process(*args: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A command in a process of its own, with what it wrote to standard error."""
    command = [sys.executable, "-m", "leapahead", *args]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=120, env=ENVIRONMENT, check=False, **options)


# -------------------------------------------------------------------------------------------------- every drafter


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "datastore"])
def test_every_drafter_shows_its_text(leapahead: Any, name: str, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "expected.txt").write_text("return a + b")
    more: list[str] = []
    if name in ("draft_model", "cascade", "ouroboros", "speculative_sampling"):
        more = ["--draft", "bundled"]
    if name == "head":
        vocabulary = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
        more = ["--head", str(heads.write(tmp_path / "head", "medusa", vocabulary)), "-o", "nodes=4"]
    if name == "prediction":
        more = ["--prediction", str(tmp_path / "expected.txt")]
    result = leapahead("generate", PROMPT, *FEW, "-d", name, *more)
    assert (result.exit_code, result.stderr.count("8 tokens, ")) == (0, 1)


def test_lookahead_everywhere(leapahead: Any) -> None:
    assert leapahead("generate", PROMPT, *FEW, "-d", "lookahead", "--compare", "--rounds", "1").exit_code == 0
    assert leapahead("demo", "-d", "lookahead", "--max-new-tokens", "8", "--rounds", "1").exit_code == 0
    assert leapahead("chat", "-d", "lookahead", *FEW, stdin="Hi\n").exit_code == 0


# ----------------------------------------------------------------------------------------- bytes that are not text


def test_text_of_utf_8_is_read_where_the_locale_is_ascii() -> None:
    assert text_input.utf8("h\udcc3\udca9llo", "the prompt") == "h\u00e9llo"


@pytest.mark.parametrize(
    ("args", "stdin", "sentence"),
    [
        (["generate", "-"], b"x\xff\xfe", "error: standard input is not UTF-8 text: byte 0xff at character 1"),
        (["chat"], b"\xff\nHi\n", "error: the line is not UTF-8 text: byte 0xff at character 0"),
        (["generate", "x\udcff"], None, "error: the prompt is not UTF-8 text: byte 0xff at character 1"),
        (["generate", "x", "--stop", "\udc80"], None, "error: --stop is not UTF-8 text: byte 0x80 at character 0"),
        (["chat", "--system", "\udc80"], None, "error: --system is not UTF-8 text: byte 0x80 at character 0"),
    ],
)
def test_invalid_utf_8_is_one_sentence(leapahead: Any, args: list[str], stdin: bytes | None, sentence: str) -> None:
    result = leapahead(*args, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(sentence)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("generate", PROMPT, "--draft", "/nowhere/draft"), "there is no folder '/nowhere/draft'"),
        (("generate", PROMPT, "--draft", "my draft"), "there is no folder 'my draft'"),
        (("generate", PROMPT, "--draft", "bundled,draft.gguf"), "there is no file 'draft.gguf'"),
        (("generate", PROMPT, "--draft", "bundled", "-d", "plain"), "drafter 'plain' has no option --draft"),
        (("generate", PROMPT, "--draft", "bundled", "-o", "nodes=-1"), "nodes=-1 is not possible"),
        (
            ("generate", PROMPT, "-o", f"nodes={10**11}"),
            "nodes=100000000000 is not possible: it must be at most 16777216",
        ),
        (("generate", PROMPT, "-d", "jacobi", "-o", f"block={10**20}"), f"block={10**20} is not possible"),
        (("generate", PROMPT, "--head", "nowhere"), "there is no head at nowhere"),
        (
            ("generate", PROMPT, "-o", "nodes=9", "-o", "nodes=3"),
            "--option nodes=9 and --option nodes=3 are the same option",
        ),
        (
            ("check", "-W", "3", "-o", "window=15"),
            "--window 3 and --option window=15 are the same option; leave one out",
        ),
        (
            ("explain", PROMPT, "--draft", "nowhere.gguf", "-o", "draft=other.gguf"),
            "--draft nowhere.gguf and --option draft=other.gguf are the same option",
        ),
        (("chat", "--head", "."), ". is no head: it has no config.json"),
        (("explain", PROMPT, "--draft", "./draft"), "there is no folder './draft'"),
        (("generate", PROMPT, "-o", "max_batch=2"), "drafter 'auto' has no option 'max_batch'"),  # an argument of `LLM`
        (("chat", "-o", "tokenizer=nowhere"), "drafter 'auto' has no option 'tokenizer'"),
        (("explain", PROMPT, "-o", "drafter=plain"), "drafter 'auto' has no option --drafter"),
        (("check", "-o", "depths=1"), "none of these drafters has an option 'depths'"),
        (("check", "-d", "auto", "-W", "3"), "none of these drafters has an option --window"),
        (("check", "-d", "datastore"), "the drafter 'datastore' needs file=..."),
        (("check", "-d", "auto", "--draft", "/nowhere/draft"), "there is no folder '/nowhere/draft'"),
        (
            ("check", "-d", "speculative_sampling", "--draft", "bundled", "-t", "1"),
            "drafter 'speculative_sampling' is exact in distribution, not in text",
        ),
        (("bench", "--config", "draft_model:draft=/nowhere/draft"), "there is no folder '/nowhere/draft'"),
        (("bench", "--config", "auto:nodes=x"), "--config auto:nodes=x is not possible: the value must be of type int"),
        (("bench", "--config", "auto:nodes=1,nodes=2"), "--config auto:nodes=1 and --config auto:nodes=2 are the same"),
        (("bench", "-t", "-1"), "--temperature=-1.0 is not possible"),
        (("bench", "--acceptance", "typical"), "--acceptance='typical' is not possible"),
    ],
)
def test_drafters_that_are_not_possible_are_refused_before_the_model_is_loaded(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], sentence: str
) -> None:
    def load(*model: Any, **options: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("leapahead.models.loading.load", load)
    monkeypatch.chdir(tmp_path)
    result = leapahead(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {sentence}")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_log_messages_of_other_packages_are_discarded() -> None:
    """Such as those of matplotlib and OpenVINO where no folder is writable. Handlers of a test would take them."""
    code = (
        "import logging, click\nfrom leapahead.cli import main\n"
        "@main.command()\ndef tell(): logging.warning('noise'); logging.getLogger('other').warning('noise')\n"
        "main(['tell'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ----------------------------------------------------------------------------------------- outputs that are closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "args", mostly_slow([["drafters"], ["drafters", "--json"], ["--help"]], ["drafters", "--json"])
)
def test_a_full_disk(args: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = process(*args, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        # The line of figures is lost, and the text is whole.
        pytest.param(["generate", PROMPT, *FEW], 0, marks=pytest.mark.slow),
        pytest.param(["generate", PROMPT, *FEW, "--no-stream"], 0, marks=pytest.mark.slow),
        pytest.param(["explain", PROMPT, "--max-new-tokens", "2", "--out"], 0, marks=pytest.mark.slow),
        (["generate", PROMPT, "--max-new-tokens", "0"], 2),
        (["generate", "--no-such-option"], 2),
    ],
)
def test_a_full_standard_error(args: list[str], code: int, tiny_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    more = [str(page)] * (args[-1] == "--out") + ["-m", str(tiny_folder)]
    command = [sys.executable, "-m", "leapahead", *args, *more]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=120, env=ENVIRONMENT, check=False)
    assert done.returncode == code
    assert bool(done.stdout) == (args[0] == "generate" and code == 0)
    assert page.exists() == (args[0] == "explain")


def test_a_closed_standard_output() -> None:
    done = process("drafters", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (2, b"error: standard output is closed\n")


@pytest.mark.parametrize("args", mostly_slow([["drafters"], ["drafters", "--json"]], ["drafters"]))
def test_a_reader_that_leaves(args: list[str]) -> None:
    """Its exit code is that of a process ended by SIGPIPE: 1 would mean that texts differ."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process(*args, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_interrupted_while_it_is_imported_without_anybody_who_reads_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = interrupted_in_an_import("numpy", tmp_path, "drafters", stderr=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout) == (130, b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "written"),
    [
        (("explain", PROMPT, "--max-new-tokens", "2", "--terminal", "--out", "{file}"), "{file}"),
        (("tune", "--seconds", "0.1", "--text-seconds", "0", "--plot", "{file}"), "{file}"),
        (
            ("bench", "--quick", "-d", "jacobi", "--limit", "1", "--max-new-tokens", "2", "--out", "{file}"),
            "{file}/report.md",
        ),
    ],
)
def test_files_are_written_where_nobody_reads_standard_output(
    leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], written: str
) -> None:
    def leave(*_: Any, **__: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(screen.Console, "print", leave)
    file = tmp_path / "written.svg"
    assert leapahead(*(each.format(file=file) for each in args)).exit_code == 141
    assert Path(written.format(file=file)).stat().st_size > 0


def test_a_page_is_written_whole_or_not_at_all(leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old page")

    def full(path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = leapahead("explain", PROMPT, "--max-new-tokens", "4", "--out", str(page))
    assert (result.exit_code, result.stderr) == (2, f"error: {page} cannot be written: No space left on device\n")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("page.html", "the old page")]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ("explain", PROMPT, "--out", "{folder}/page.html"),
            "the page cannot be written to {folder}/page.html: {folder}",
        ),
        (("tune", "--plot", "{folder}/plot.svg"), "the plot cannot be written to {folder}/plot.svg: {folder}"),
        (
            ("generate", PROMPT, "--drafter-cache", "{folder}/drafts.npz"),
            "the drafter cache {folder}/drafts.npz cannot be created: the folder {folder}",
        ),
        (
            ("train-head", "--kind", "medusa", "--data", __file__, "--out", "{folder}/a/b"),
            "{folder}/a/b cannot be written, because {folder}",
        ),
    ],
)
def test_places_that_are_not_writable_are_refused_before_the_model_is_loaded(
    leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], sentence: str
) -> None:
    def load(*model: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("leapahead.models.loading.load", load)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
    result = leapahead(*(each.format(folder=tmp_path) for each in args))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {sentence.format(folder=tmp_path)} is ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("tune", "--plot", "pipe.svg"),
        ("cache", "merge", "missing.npz", "--output", "pipe.svg"),
        ("cache", "merge", "missing.npz", "--output", "pipe.svg", "--force"),
        ("export-gguf", ".", "pipe.svg", "--force"),
    ],
)
def test_a_device_or_a_pipe_is_refused_before_anything_is_read(
    leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.svg")
    result = leapahead(*args)
    sentence = "error: pipe.svg cannot be written, because it is a device or another special file; name another file\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", sentence)
    assert (tmp_path / "pipe.svg").is_fifo()


# ------------------------------------------------------------------------------------------------------ interrupts


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.3])  # while modules are imported, then perhaps later
@pytest.mark.parametrize(
    "begin",
    [["-m", "leapahead"], ["-c", "import sys\nfrom leapahead.__main__ import main\nsys.exit(main())"]],
    ids=["module", "entry point"],
)
def test_interrupted_while_it_is_imported(begin: list[str], delay: float) -> None:
    command = [sys.executable, *begin, "generate", "--max-new-tokens", "100000", PROMPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as started:
        time.sleep(delay)
        started.send_signal(signal.SIGINT)
        errors = started.communicate(timeout=60)[1].decode()
    if started.returncode in (1, -signal.SIGINT) and f"leapahead{os.sep}" not in errors:
        pytest.skip("Python had not begun to import the package yet")
    assert (started.returncode, "Traceback" in errors) == (130, False), errors
    assert errors.splitlines()[-1] == "interrupted"


def interrupted_in_an_import(
    module: str, folder: Path, *args: str, stderr: int = subprocess.PIPE, sent: signal.Signals = signal.SIGINT
) -> subprocess.CompletedProcess[bytes]:
    """A command to which the signal comes while it imports this module."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            exec('os.kill(os.getpid(), {int(sent)})\\nfor _ in range(1000): pass')\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    source = str(Path(interrupts.__file__).parent.parent)
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder), source])}
    command = [sys.executable, "-m", "leapahead", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, timeout=60, env=environment, check=False)


@pytest.mark.parametrize("module", ["click", "numpy", "leapahead.api"])
def test_interrupted_in_an_import(module: str, tmp_path: Path) -> None:
    done = interrupted_in_an_import(module, tmp_path, "drafters")
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize(("command", "expected"), [("serve", (0, b"ended by SIGTERM\n")), ("drafters", (-15, b""))])
def test_sigterm_in_an_import(command: str, expected: tuple[int, bytes], tmp_path: Path) -> None:
    """A server ends in order, also as the first process of a container, which gets signals with handlers only."""
    done = interrupted_in_an_import("click", tmp_path, command, sent=signal.SIGTERM)
    assert (done.returncode, done.stderr) == expected


def test_interrupted_in_an_import_of_the_command(tmp_path: Path) -> None:
    done = interrupted_in_an_import("torch", tmp_path, "generate", "--max-new-tokens", "4", PROMPT)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_the_command_is_entered_where_interrupts_end_it() -> None:
    project = Path(__file__).parent.parent / "pyproject.toml"
    assert 'leapahead = "leapahead.__main__:main"' in project.read_text()


def test_interrupted_while_the_process_ends(tmp_path: Path) -> None:
    """As by a second Ctrl-C: what runs at the end of a process, as torch registers it, shows no traceback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, signal\natexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT), sum(range(1000))])\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(interrupts.__file__).parent.parent)])
    command = [sys.executable, "-m", "leapahead", "cache", "models"]
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "LEAPAHEAD_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"There are no converted models.\n", b"interrupted\n")


def interrupted_after(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stream is interrupted after so many pieces."""
    original = LLM.stream

    def stream(self: LLM, prompt: Any, **options: Any) -> Any:
        yield from (piece for piece, _ in zip(original(self, prompt, **options), range(pieces), strict=False))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", stream)


@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_interrupted_text_shows_its_figures(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, command: str, pieces: int
) -> None:
    interrupted_after(pieces, monkeypatch)
    args = ["generate", PROMPT] if command == "generate" else ["chat"]
    result = leapahead(*args, "-d", "plain", *FEW, stdin="Hi\nAgain\n")
    assert result.exit_code == 130
    figures, last = result.stderr.splitlines()
    if pieces:
        assert figures.startswith("interrupted: 3 tokens, 3 steps, acceptance length 1.00, ")
    else:
        assert figures == "interrupted before the first token"
    assert last == "interrupted"


def test_an_interrupted_text_that_is_not_streamed_is_shown(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("generate", PROMPT, "-d", "plain", *FEW, "--no-stream")
    whole = leapahead(*args).stdout
    interrupted_after(3, monkeypatch)
    result = leapahead(*args)
    assert result.exit_code == 130
    assert len(result.stdout) > 1
    assert whole.startswith(result.stdout[:-1])
    assert result.stderr.startswith("interrupted: 3 tokens, 3 steps, ")
    assert leapahead(*args, "--json").stdout == ""


def test_a_text_that_is_not_streamed_is_shown_before_it_is_compared(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("generate", PROMPT, "-d", "plain", *FEW, "--no-stream")
    whole = leapahead(*args).stdout

    def interrupted(*given: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "without_drafter_cache", interrupted)  # of a comparison alone
    result = leapahead(*args, "--compare")
    assert (result.exit_code, result.stdout) == (130, whole)


@pytest.mark.parametrize("skip", ["1m", ""])
def test_an_interrupted_search_of_layers_keeps_what_pays(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, skip: str
) -> None:
    """That nothing pays is not stored before all was tried: it would refuse every later draft."""
    stored: list[Any] = []

    def search(target: Any, texts: Any, trials: int, seed: int, progress: Any, new: int) -> Any:
        progress(2, Found(Skip.parse(skip), 0.9, 0.5, 1.4, 2))
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_search, "search", search)
    monkeypatch.setattr(saved_skips, "save", lambda target, found: not stored.append(found))
    result = leapahead("search-layers", "--trials", "5", "--limit", "1", "--max-new-tokens", "4", "--json")
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted\n")
    assert len(stored) == bool(skip)
    assert [json.loads(line)["trials"] for line in result.stdout.splitlines()] == [2] * bool(skip)


@pytest.mark.parametrize("given", [["--file", "endless"], ["-"]])
def test_a_prompt_without_end_is_not_read_for_ever(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: list[str]
) -> None:
    monkeypatch.setattr(parameters, "MOST_CHARACTERS", 100)
    (tmp_path / "endless").write_text("a" * 101, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = leapahead("generate", *given, stdin="a" * 101)
    assert result.exit_code == 2
    assert " has more than 100 characters, which no model reads; shorten it" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["check", "bench"])
def test_prompts_without_end_are_not_read_for_ever(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(parameters, "MOST_CHARACTERS", 100)
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Thread(target=Path("pipe").write_text, args=("a" * 101,), daemon=True).start()
    result = leapahead(command, "--prompts", "pipe")
    sentence = "error: pipe has more than 100 characters, which no model reads; shorten it\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", sentence)


@pytest.mark.parametrize("command", [["check", "--batch"], ["tune", "--batch"], ["bench", "--batch"]])
def test_an_absurd_batch_is_refused_before_the_model_is_loaded(leapahead: Any, command: list[str]) -> None:
    result = leapahead(*command, "99999999", "-m", "no/such-model")
    assert result.exit_code == 2
    assert "99999999 is not in the range 1<=x<=65536" in result.stderr


def test_check_shows_the_drafters_that_are_finished(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = screen.Bar.__call__

    def interrupt(self: screen.Bar, what: str, done: int, total: int) -> None:
        if what == "jacobi":
            raise KeyboardInterrupt
        original(self, what, done, total)

    monkeypatch.setattr(screen.Bar, "__call__", interrupt)
    args = ("check", "-d", "lookahead", "-d", "jacobi", "--limit", "1", "--max-new-tokens", "8")
    result = leapahead(*args)
    assert result.exit_code == 130
    assert "lookahead" in result.stdout
    assert "jacobi" not in result.stdout
    assert result.stderr == "interrupted; finished: 1 drafter\n"
    found = json.loads(leapahead(*args, "--json").stdout)
    assert (found["interrupted"], [row["name"] for row in found["drafters"]]) == (True, ["lookahead"])


def test_an_interrupt_that_an_import_turned_into_its_own_error(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    causes: list[BaseException] = [KeyboardInterrupt(), KeyError()]

    def failing(*args: Any, **options: Any) -> Any:
        raise ImportError("initialization failed") from causes.pop(0)  # as modules made with pybind11 do

    monkeypatch.setattr("leapahead.models.loading.load", failing)
    result = leapahead("check")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    with pytest.raises(SystemExit, match="2"):  # any other is a bug, whose traceback is shown
        main(["check"])


def test_check_interrupted_before_any_drafter(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: screen.Bar, what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(screen.Bar, "__call__", interrupt)
    result = leapahead("check")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("kind", mostly_slow(["Transformers", "GGUF"], "GGUF"))
def test_ctrl_c(kind: str, tiny_folder: Path) -> None:
    """A signal, sent to a process of its own that waits for its next line; no library writes to standard error."""
    if kind == "GGUF":  # which starts in a quarter of the time
        pytest.importorskip("llama_cpp")
    model = tiny_folder if kind == "Transformers" else gguf_models.bundled("f32")
    command = [sys.executable, "-m", "leapahead", "chat", "-m", str(model), "-d", "plain", *FEW]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, text=True, **pipes) as chat:
        assert chat.stdin is not None
        assert chat.stderr is not None
        chat.stdin.write("Hi\n")
        chat.stdin.flush()
        assert "8 tokens" in chat.stderr.readline()
        chat.send_signal(signal.SIGINT)
        assert chat.wait(timeout=60) == 130
        assert chat.stderr.read() == "interrupted\n"


def test_the_first_ctrl_c_of_an_answer_waits_for_the_step(tiny_folder: Path) -> None:
    answer = screen.Answer()
    with LLM(str(tiny_folder), drafter="plain") as llm:
        with screen.interrupts_between_steps() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            screen.show_stream(llm, PROMPT, {"max_new_tokens": 8}, answer, stop)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert answer.figures() == "interrupted: 1 token, 1 step, acceptance length 1.00"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate(PROMPT, max_new_tokens=8).text.startswith(answer.text)


def test_a_bug_is_not_a_difference(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own exit code for a traceback is 1."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LLM, "stream", broken)
    result = CliRunner().invoke(main, ["generate", PROMPT, "-m", str(tiny_folder)])
    assert result.exit_code == 2
    assert "RuntimeError: a bug" in result.stderr


def test_every_path_may_begin_with_the_home_folder(leapahead: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Shells leave `~` as it is after `--out=`; `train-head` created a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    commands = [each for one in main.commands.values() for each in getattr(one, "commands", {"": one}).values()]
    paths = [each.type for command in commands for each in command.params if isinstance(each.type, click.Path)]
    assert len(paths) > 40
    assert [each for each in paths if not isinstance(each, HomePath)] == []
    result = leapahead("train-head", "--kind", "medusa", "--data=~/prompts.txt", "--out=~/new")
    assert result.stderr == f"error: there is no file {tmp_path / 'prompts.txt'}\n"
    assert leapahead("train-head", "--kind", "medusa", "--data", "a", "--out=").stderr.startswith("error: --out=''")


# ------------------------------------------------------------------------------------------------------------ chat


@pytest.mark.parametrize(
    ("stdin", "sentence"),
    [
        ("Hi\n/rest\nmore\n", "error: there is no command '/rest' (did you mean '/reset'?); there are /reset, "),
        ("Hi\n/exit now\nmore\n", "error: there is no command '/exit now' (did you mean '/exit'?)"),
        ("Hi\n" + "word " * 600 + "\nmore\n", "error: the prompt has "),
    ],
)
def test_an_error_in_a_piped_chat_ends_it(leapahead: Any, stdin: str, sentence: str) -> None:
    result = leapahead("chat", *FEW, stdin=stdin)
    assert result.exit_code == 2
    figures, line = result.stderr.splitlines()
    assert figures.startswith("8 tokens, ")
    assert line.startswith(sentence)


def test_an_error_on_a_terminal_keeps_the_conversation(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, asked = LLM.stream, []

    def failing_once(self: LLM, messages: Any, **options: Any) -> Any:
        asked.append([each["content"] for each in messages if each["role"] == "user"])
        if len(asked) == 2:
            raise BadLogits("the model's logits are not numbers")
        return stream(self, messages, **options)

    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    monkeypatch.setattr(LLM, "stream", failing_once)
    result = leapahead("chat", *FEW, "-q", stdin="one\ntwo\nthree\n")
    assert (result.exit_code, asked) == (0, [["one"], ["one", "two"], ["one", "three"]])
    assert "error: the model's logits are not numbers\n" in result.stderr


def test_commands_of_chat_are_no_messages(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    original = LLM.stream

    def stream(self: LLM, messages: Any, **options: Any) -> Any:
        seen.append(messages[-1]["content"])
        return original(self, messages, **options)

    monkeypatch.setattr(LLM, "stream", stream)
    result = leapahead("chat", *FEW, "-q", stdin="/help\n/usr/bin/env is a path\n")
    assert result.exit_code == 0
    assert seen == ["/usr/bin/env is a path"]
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["/reset", "/exit", "/help"]
    seen.clear()
    for marked in ("\ufeffHi\n", "\ufeff/help\n"):  # as from a file that an editor of Windows has saved
        assert leapahead("chat", *FEW, "-q", stdin=marked).exit_code == 0
    assert seen == ["Hi"]


@pytest.mark.parametrize(
    "args", [("tune", "--seconds", "nan"), ("tune", "--text-seconds", "inf"), ("serve", "--body-seconds", "nan")]
)
def test_numbers_of_seconds_are_finite(leapahead: Any, args: tuple[str, ...]) -> None:
    result = leapahead(*args)
    assert result.exit_code == 2
    assert f"Invalid value for '{args[1]}': '{args[2]}' is not a finite number." in result.stderr


def test_transformers_is_quiet_where_it_only_loads_the_tokenizer(tmp_path: Path) -> None:
    from transformers.utils import logging

    (tmp_path / "openvino_model.xml").write_text("")
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_warning()
        with screen.loading(str(tmp_path)):
            assert logging.get_verbosity() == logging.ERROR  # a prompt beyond the context is refused in one line
    finally:
        logging.set_verbosity(before)


# -------------------------------------------------------------------------------------- refusals, in the user's words


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["-t", "1e-300"], "error: --temperature=1e-300 is not possible"),
        (["--min-new-tokens", "10", "--max-new-tokens", "4"], "error: --min-new-tokens=10 is not possible with --max-"),
        (["-c", "100"], "error: --ctx-size=100 can be set for a GGUF file only, not for 'bundled'"),
        (["-m", "missing.gguf"], "error: there is no file 'missing.gguf'"),
        (["-m", ""], "error: --model='' is not possible: give a hub name, a folder or a file, or 'bundled'"),
        (
            ["-m", "x.gguf", "--copies", "2"],
            "error: --copies=2 can be set for an OpenVINO model (--engine='openvino') only, not",
        ),
        (
            ["-m", "x.gguf", "--engine", "openvino", "-c", "300"],
            "error: --ctx-size=300 can be set for a GGUF file only, not for 'x.gguf' under OpenVINO",
        ),
        (["--cache-tokens", "1"], "error: --cache-tokens=1 is not possible"),
        (["-m", "x.gguf", "--cache-tokens", "99"], "error: --cache-tokens=99 is for Transformers and OpenVINO models"),
    ],
)
def test_refusals_name_the_options(leapahead: Any, args: list[str], sentence: str) -> None:
    result = leapahead("generate", "x", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(sentence)


def test_the_kv_cache_is_bounded(leapahead: Any, tiny_folder: Path) -> None:
    more = ("--cache-tokens", "64", "--max-new-tokens", "100", "--ignore-eos", "--json")
    found = json.loads(leapahead("generate", PROMPT, "-m", str(tiny_folder), *more).stdout)
    assert found["finish_reason"] == "length"
    assert 40 < len(found["tokens"]) < 64


def test_our_warnings_are_one_line_and_others_are_discarded(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LLM.stream

    def stream(self: LLM, prompt: Any, **options: Any) -> Any:
        for module in ("leapahead.engine.scheduler", "torch.nn"):
            warnings.warn_explicit(f"drafting\nis off, by {module}", UserWarning, "file.py", 1, module=module)
        return original(self, prompt, **options)

    monkeypatch.setattr(LLM, "stream", stream)
    result = leapahead("generate", PROMPT, *FEW, "-q")
    assert (result.exit_code, result.stderr) == (0, "warning: drafting is off, by leapahead.engine.scheduler\n")


@pytest.mark.parametrize(
    "args", [("generate", "x"), ("cache", "show", "x.npz"), ("datastore", "build", "x.txt", "-o", "x")]
)
def test_a_working_directory_that_was_deleted(
    leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = leapahead(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the working directory does not exist any more; change to another one\n"


def test_rounds_without_a_comparison_are_refused(leapahead: Any) -> None:
    found = leapahead("generate", "--rounds", "2", "--max-new-tokens", "4", "hi")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "--rounds counts the rounds of --compare" in found.stderr


@pytest.mark.parametrize(
    ("command", "args", "sentence"),
    [
        ("generate", ["--max-new-tokens", "0"], "--max-new-tokens=0 is not possible"),
        ("generate", ["-t", "-1"], "--temperature=-1.0 is not possible"),
        ("generate", ["--top-p", "2"], "--top-p=2.0 is not possible"),
        ("generate", ["--min-p", "nan"], "--min-p=nan is not possible"),
        ("generate", ["--top-k", "-1"], "--top-k=-1 is not possible"),
        ("generate", ["--seed", str(2**64)], "--seed=18446744073709551616 is not possible"),
        ("generate", ["--repetition-penalty", "0"], "--repetition-penalty=0.0 is not possible"),
        ("generate", ["--presence-penalty", "inf"], "--presence-penalty=inf is not possible"),
        ("generate", ["--min-new-tokens", "9", "--max-new-tokens", "4"], "--min-new-tokens=9 is not possible with"),
        ("generate", ["--stop", ""], "an empty stop string"),
        ("generate", ["--bad-word", " "], "an empty bad word"),
        ("generate", ["--regex", "("], "the regular expression cannot be compiled"),
        ("generate", ["--json-schema", '{"type": "x"}'], "the JSON schema cannot be compiled"),
        ("generate", ["--json-object", "--ignore-eos"], "--ignore-eos is not possible with a grammar"),
        ("generate", ["-d", "ngram", "--prediction", __file__], "drafter 'ngram' makes no use of a prediction"),
        ("explain", ["--max-new-tokens", "0"], "--max-new-tokens=0 is not possible"),
        ("explain", ["--top-p", "0"], "--top-p=0.0 is not possible"),
        ("chat", ["--top-p", "nan"], "--top-p=nan is not possible"),
        ("check", ["--max-new-tokens", "0"], "--max-new-tokens=0 is not possible"),
        ("demo", ["--max-new-tokens", "0"], "--max-new-tokens=0 is not possible"),
        ("generate", [], "the prompt is empty"),
        ("explain", [], "the prompt is empty"),
    ],
)
def test_impossible_values_are_refused_before_the_model_is_loaded(
    leapahead: Any, monkeypatch: pytest.MonkeyPatch, command: str, args: list[str], sentence: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load", load)
    prompt = [PROMPT if args else ""] if command in ("generate", "explain") else []
    result = leapahead(command, *prompt, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sentence}")


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_a_pipe_is_written_to_by_the_name_of_its_descriptor() -> None:
    """Such a name is a link, which leads to no path: /dev/stdout, where that is a pipe."""
    read, written = os.pipe()
    screen.write_file(Path(f"/dev/fd/{written}"), "page")
    os.close(written)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"page"


def test_a_draft_model_is_loaded_once_and_with_the_same_trust(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted, load = [], loading.load

    def counted(model: Any = None, **options: Any) -> Any:
        trusted.append(options["trust_remote_code"])
        return load(model, **options)

    monkeypatch.setattr(loading, "load", counted)
    assert leapahead("generate", PROMPT, *FEW, "--draft", "bundled", "--trust-remote-code").exit_code == 0
    assert trusted == [True, True]  # the target and the draft model


def test_a_text_that_the_kv_cache_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(values: dict[str, Any]) -> LLM:
        open_llm(values).close()
        return LLM(cache_tokens=40)

    monkeypatch.setattr(sys.modules["leapahead.cli.generate"], "open_llm", small)
    given = CliRunner().invoke(main, ["generate", "-d", "plain", "--ignore-eos", "-n", "300", "def"])
    assert "because the KV cache of 40 tokens is full" in given.stderr
