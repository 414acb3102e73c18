"""The command line: what goes to standard output, to standard error, and to the exit code."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner

from leapahead import LLM, Piece
from leapahead import drafters as registry
from leapahead.bench import prompts
from leapahead.bench.compare import Comparison
from leapahead.check import Difference, DrafterReport, Report
from leapahead.cli import main, screen
from leapahead.cli.command import Command, Group, name_options
from leapahead.cli.drafters import arguments, describe
from leapahead.cli.screen import TextWriter, show_text
from leapahead.cli.typed import value_of
from leapahead.core.errors import BadParameter
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Proposal, SequenceDrafter, SequenceView
from leapahead.models import loading
from leapahead.models.transformers.kv_cache import KVCache

check: Any = import_module("leapahead.cli.check")

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> Any:
    return LLM(str(tiny_folder), drafter="plain").generate(PROMPT, max_new_tokens=20, ignore_eos=True)


FEW = ("--max-new-tokens", "20", "--ignore-eos")


# ------------------------------------------------------------------------------------------------------ generate


def test_generate_writes_the_text_and_a_line_of_figures(leapahead: Any, expected: Any) -> None:
    result = leapahead("generate", PROMPT, *FEW)
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("20 tokens, ")
    assert "steps, acceptance length" in line
    assert line.endswith("tokens/s")


@pytest.mark.parametrize("flag", ["--quiet", "--no-stream"])
def test_generate_less(leapahead: Any, expected: Any, flag: str) -> None:
    result = leapahead("generate", PROMPT, *FEW, flag)
    assert result.stdout == expected.text + "\n"
    assert bool(result.stderr) == (flag == "--no-stream")


def test_generate_json_is_one_object(leapahead: Any, expected: Any) -> None:
    result = leapahead("generate", PROMPT, *FEW, "--json", "--seed", "5")
    assert result.stderr == ""  # no noise of any library
    found = json.loads(result.stdout)
    assert (found["text"], found["tokens"], found["finish_reason"]) == (expected.text, expected.tokens, "length")
    assert (found["target"], found["drafter"], found["seed"]) == ("bundled", "auto", 5)
    names = {"steps", "committed", "acceptance_length", "drafted", "accepted", "nodes_per_step", "tokens_per_second"}
    assert names <= set(found["stats"])


def test_the_bundled_model_has_a_name(leapahead: Any, expected: Any) -> None:
    assert leapahead("generate", "-m", "bundled", PROMPT, *FEW, "--quiet").stdout == expected.text + "\n"


def test_generate_with_a_seed(leapahead: Any) -> None:
    options = ("generate", PROMPT, *FEW, "--json", "-t", "1", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01")
    texts = [
        json.loads(leapahead(*options, *more).stdout) for more in (["--seed", "3"], ["--seed", "3", "-d", "plain"])
    ]
    assert texts[0]["text"] == texts[1]["text"]
    drawn = json.loads(leapahead(*options).stdout)
    assert json.loads(leapahead(*options, "--seed", str(drawn["seed"])).stdout)["text"] == drawn["text"]


def test_where_the_prompt_comes_from(leapahead: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert leapahead("generate", "-", *FEW, stdin=PROMPT).stdout == expected.text + "\n"
    assert leapahead("generate", "-f", str(tmp_path / "prompt.txt"), *FEW).stdout == expected.text + "\n"
    assert leapahead("generate", "-f", "-", *FEW, stdin=PROMPT).stdout == expected.text + "\n"
    chat = leapahead("generate", "Hi", "--chat", *FEW, "--json")
    assert json.loads(chat.stdout)["stats"]["prompt_tokens"] > 10


def test_the_mark_of_an_encoding_is_no_part_of_the_prompt(leapahead: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("\ufeff" + PROMPT)
    assert leapahead("generate", "-", *FEW, stdin="\ufeff" + PROMPT).stdout == expected.text + "\n"
    assert leapahead("generate", "-f", str(tmp_path / "prompt.txt"), *FEW).stdout == expected.text + "\n"


def test_stops(leapahead: Any, expected: Any) -> None:
    stop = expected.text[5:7]
    assert leapahead("generate", PROMPT, *FEW, "--stop", stop, "-q").stdout.rstrip("\n") == expected.text[
        : expected.text.index(stop)
    ].rstrip("\n")
    found = json.loads(leapahead("generate", PROMPT, *FEW, "--stop-token-id", str(expected.tokens[2]), "--json").stdout)
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", expected.tokens[2])


@pytest.mark.parametrize(
    ("args", "figures"),
    [
        (["-d", "lookahead", "-W", "3", "-N", "3", "-G", "2"], {"window": 3, "ngram": 3, "guesses": 2}),
        (["-d", "lookahead", "--preset", "creative"], {"window": 5, "ngram": 4, "guesses": 8}),
        (["-d", "lookahead", "-o", "window=4", "-o", "start-from-pool=yes"], {"window": 4}),
        (["-o", "sources=recycling", "-o", "nodes=2", "-o", "max-nodes=3"], {}),
        (["-d", "jacobi", "-o", "block=3"], {}),
    ],
)
def test_drafter_options(leapahead: Any, expected: Any, args: list[str], figures: dict[str, int]) -> None:
    found = json.loads(leapahead("generate", PROMPT, *FEW, *args, "--json").stdout)
    assert found["text"] == expected.text
    assert figures.items() <= found["stats"]["drafter"].items()
    if "jacobi" in args:
        assert found["stats"]["nodes_per_step"] <= 4
    if "sources=recycling" in args:
        assert set(found["stats"]["drafter"]) - {"acceptance", "milliseconds"} == {"recycling"}
        assert found["stats"]["nodes_per_step"] <= 3


@pytest.mark.parametrize(
    ("env", "terminal", "shown"),
    [
        ({"FORCE_COLOR": "1"}, False, "a\x1b[32mbc\x1b[0m\u241b[31m\n"),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, "abc\x1b[31m\n"),
        ({}, False, "abc\x1b[31m\n"),
        ({"NO_COLOR": "1"}, True, "abc\u241b[31m\n"),  # a terminal is not controlled by a text
    ],
)
def test_drafted_tokens_in_colour(
    env: dict[str, str],
    terminal: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    writer = TextWriter()
    writer.write(Piece("ab", [1, 2], 1, (("a", False), ("b", True))))
    writer.write(Piece("c\x1b[31m", [3, 4], 1, (("c", True), ("\x1b[31m", False))))
    writer.end()
    writer.end()
    assert capsys.readouterr().out.replace("\x1b[0m\x1b[32m", "") == shown
    writer.write(Piece("\x9b31m\x9d0;title", [5], 0, (("\x9b31m\x9d0;title\x85", False),)))
    eight_bits = "\ufffd31m\ufffd0;title\x85" if "\u241b" in shown else "\x9b31m\x9d0;title\x85"
    assert eight_bits in capsys.readouterr().out
    show_text("\x1b[31m")
    assert capsys.readouterr().out == ("\u241b" if terminal else "\x1b") + "[31m\n"


def test_compare(leapahead: Any, expected: Any) -> None:
    result = leapahead("generate", PROMPT, *FEW, "--compare", "--rounds", "1")
    assert result.exit_code == 0
    *text, figures, verdict = result.stdout.removesuffix("\n").split("\n")
    assert "\n".join(text) == expected.text
    assert "times plain decoding's speed (" in figures
    assert verdict == "The text equals that of plain decoding, token for token (20 tokens)."
    quiet = leapahead("generate", PROMPT, *FEW, "--compare", "--rounds", "1", "--quiet")
    assert quiet.stdout.removesuffix("\n") == expected.text
    found = json.loads(leapahead("generate", PROMPT, *FEW, "--compare", "--rounds", "2", "--json").stdout)
    assert found["compare"]["equal"] is True
    assert found["compare"]["rounds"] == 2
    assert found["compare"]["low"] <= found["compare"]["ratio"] <= found["compare"]["high"]


def test_compare_does_not_send_to_a_check_that_refuses_the_drafter() -> None:
    """`leapahead check` refuses drafters that preserve the distribution only where texts are sampled."""
    differs = Comparison([1.0], equal=False, plain=None, first_difference=3)  # type: ignore[arg-type]
    assert "`leapahead check`" in screen.verdict(differs)
    assert screen.verdict(differs, same_text=False) == (
        "The text differs from that of plain decoding at token 3: the drafter preserves the distribution of sampled "
        "texts, not each text."
    )


def broken_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the first nodes of a tree instead of the path's, once prompts are read."""
    original = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, row, path: original(self, row, range(len(path))))


def break_after_load(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loading.load

    def load(*args: Any, **options: Any) -> Any:
        loaded = original(*args, **options)
        broken_commit(monkeypatch)
        return loaded

    monkeypatch.setattr(loading, "load", load)


@pytest.mark.slow
def test_compare_exits_1_when_the_text_differs(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_after_load(monkeypatch)
    much = ("--max-new-tokens", "100", "-o", "nodes=16", "--rounds", "1")
    result = leapahead("generate", prompts.DEMO, *much, "--compare")
    assert result.exit_code == 1
    assert "The text differs from that of plain decoding at token" in result.stdout


# -------------------------------------------------------------------------------------------------- demo and chat


def test_demo(leapahead: Any) -> None:
    result = leapahead("demo", "--max-new-tokens", "20", "--rounds", "1")
    assert result.exit_code == 0
    assert result.stdout.startswith(prompts.DEMO)
    *_, figures, verdict = result.stdout.splitlines()
    for word in ("tokens, ", "steps, ", "acceptance length", "tokens/s", "times plain decoding's speed"):
        assert word in figures
    assert verdict.startswith("The text equals that of plain decoding, token for token")


@pytest.mark.slow
def test_demo_exits_1_when_the_text_differs(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_after_load(monkeypatch)
    assert leapahead("demo", "--max-new-tokens", "100", "--rounds", "1", "-o", "nodes=16").exit_code == 1


def chatted(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that the model was given."""
    seen: list[list[dict[str, str]]] = []
    original = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, m, **o: seen.append([dict(x) for x in m]) or original(self, m, **o))
    return seen


def test_chat_keeps_the_conversation(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = chatted(monkeypatch)
    result = leapahead("chat", *FEW, "--system", "Be brief.", stdin="Hi\n\nAnd?\n/reset\nAgain\n/exit\nnever\n")
    assert result.exit_code == 0
    assert [[m["role"] for m in messages] for messages in seen] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert seen[1][2]["content"] in result.stdout
    assert result.stderr.count("tokens/s") == 3


def test_chat_ends_with_its_input(leapahead: Any) -> None:
    assert leapahead("chat", stdin="").exit_code == 0


# --------------------------------------------------------------------------------------------- drafters and check


def test_drafters(leapahead: Any) -> None:
    result = leapahead("drafters", env={"COLUMNS": "200"})
    for word in ("lookahead", "prompt_lookup", "start_from_pool"):
        assert word in result.stdout
    found = {drafter["name"]: drafter for drafter in json.loads(leapahead("drafters", "--json").stdout)}
    assert list(found) == registry.names()
    options = {option["name"]: option for option in found["lookahead"]["options"]}
    assert (options["seed"]["type"], options["seed"]["default"]) == ("int", 0)
    for drafter in found.values():
        assert drafter["summary"]
        assert all(option["meaning"] for option in drafter["options"])


def test_a_drafter_without_a_docstring_has_no_summary_of_another_class() -> None:
    """As no class has under `python -OO`: `inspect.getdoc` goes on to the base classes."""
    assert describe(type("Silent", (SequenceDrafter,), {"name": "silent"}))["summary"] == ""


def test_arguments_of_a_docstring() -> None:
    doc = (
        "One line.\n\nArgs:\n    a: first,\n        over two lines.\n    b (int): second: with a colon.\n\nRaises:\n  X"
    )
    assert arguments(doc) == {"a": "first, over two lines.", "b": "second: with a colon."}
    assert arguments("Nothing.") == {}


def test_the_type_of_an_option_is_named() -> None:
    with pytest.raises(BadParameter, match=r"--option length=x is not possible: the value must be of type int$"):
        value_of("--option length=x", "x", int)


def test_drafters_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from leapahead.cli import main; main(['drafters', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)


def test_check(leapahead: Any, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"question": "def f(x):"}\n{"turns": ["for i in range(", "x"]}\n{"prompt": "x"}\n'
    )
    args = ("check", "--prompts", str(tmp_path / "p.jsonl"), "--limit", "2", "--max-new-tokens", "16")
    result = leapahead(*args)
    assert result.exit_code == 0
    for word in ("bundled, greedy, batch 1", "2 prompts, ", "lookahead", "acceptance", "token for token."):
        assert word in result.stdout
    assert "bundled, greedy, batch 2\n" in leapahead(*args, "-d", "jacobi", "--batch", "8").stdout  # of two prompts
    more = ("--batch", "2", "-t", "0.5", "--seed", "3", "-d", "lookahead", "-d", "jacobi", "-W", "4", "--json")
    found = json.loads(leapahead(*args, *more).stdout)
    assert (found["ok"], found["prompts"]) == (True, 2)
    assert [row["name"] for row in found["drafters"]] == ["lookahead", "jacobi"]
    assert {"name", "mismatches", "ties", "acceptance_length"} <= set(found["drafters"][0])


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_check_exits_1_on_a_mismatch(leapahead: Any, monkeypatch: pytest.MonkeyPatch, as_json: list[str]) -> None:
    break_after_load(monkeypatch)
    result = leapahead("check", "-d", "lookahead", "--limit", "2", "--max-new-tokens", "40", *as_json)
    assert result.exit_code == 1
    if as_json:
        assert json.loads(result.stdout)["ok"] is False
    else:
        assert "MISMATCH" in result.stdout


@pytest.mark.parametrize(
    ("gap", "noise", "is_bug"), [(0.0006, 0.9, False), (2.0, 0.9, True), (float("inf"), 0.0, True)]
)
def test_check_tells_a_bug_from_a_model_that_rounds_coarsely(
    capsys: pytest.CaptureFixture[str], gap: float, noise: float, is_bug: bool
) -> None:
    row = DrafterReport("auto", tokens=8, differences=[Difference(0, 6, 757, 349, gap, noise, False)])
    check._show(Report("model", 1, 8, 1.0, [row]), "greedy", 1)
    told = capsys.readouterr().out
    assert "MISMATCH: a drafter's text differs from that of plain decoding." in told
    assert ("Try shorter prompts" not in told) == is_bug
    assert "please report it." in told


class Telepath(SequenceDrafter):
    """Needs what no target has."""

    name: ClassVar[str] = "telepath"
    needs: ClassVar[frozenset[str]] = frozenset({"telepathy"})

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(sequence.root))


def test_check_lists_refusals(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "telepath", f"{__name__}:Telepath")
    args = ("check", "--limit", "1", "--max-new-tokens", "8")
    result = leapahead(*args)
    assert result.exit_code == 0
    assert "telepath: refused: drafter 'telepath' needs telepathy" in result.stdout
    named = leapahead(*args, "-d", "telepath")
    assert (named.exit_code, named.stderr.startswith("error: drafter 'telepath' needs telepathy")) == (2, True)


def test_search_layers(leapahead: Any, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "1 + 1 ="}\n')
    args = ("search-layers", "--trials", "2", "--limit", "1", "--max-new-tokens", "4", "--data", str(tmp_path))
    found = json.loads(leapahead(*args, "--json").stdout)
    assert {"skip", "agreement", "cost", "speedup", "length", "trials", "kept"} == set(found)
    assert leapahead(*args).stdout.startswith("bundled")
    assert leapahead(*args, "-n", "99999").stderr.startswith("error: no prompt fits the context of ")


# ----------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["generate", ""], "error: the prompt is empty"),
        (["generate", "x", "-d", "lokahead"], "error: there is no drafter 'lokahead' (did you mean 'lookahead'?)"),
        (["generate", "x", "-d", "jacobi", "-W", "3"], "error: drafter 'jacobi' has no option --window"),
        (["generate", "x", "-o", "nodes"], "error: --option nodes is not possible: it must be KEY=VALUE"),
        (["generate", "x", "-o", "nods=3"], "error: drafter 'auto' has no option 'nods' (did you mean 'nodes'?)"),
        (["generate", "x", "-W", "3"], "error: drafter 'auto' has no option --window"),
        (
            ["generate", "x", "-d", "lookahead", "-o", "window=wide"],
            "error: --option window=wide is not possible: the value must be of type int",
        ),
        (
            ["generate", "x", "-d", "lookahead", "-o", "prompt_ngrams=7"],
            "error: --option prompt_ngrams=7 is not possible: the value must be of type bool",
        ),
        (
            ["generate", "x", "-d", "lookahead", "-o", "widow=3"],
            "error: drafter 'lookahead' has no option 'widow' (did you mean",
        ),
        (["generate", "x", "-d", "lookahead", "--preset", "90b"], "error: there is no preset '90b'"),
        (["generate", "x", "--max-new-tokens", "0"], "error: --max-new-tokens=0 is not possible"),
        (["generate", "x", "-t", "-1"], "error: --temperature=-1.0 is not possible"),
        (["generate", "x", "--top-p", "0"], "error: --top-p=0.0 is not possible"),
        (["generate", "x", "--dtype", "float8"], "error: dtype 'float8' is not possible"),
        (["generate", "x", "--device", "abacus"], "error: device 'abacus' is not possible"),
        (["generate", "x", "-m", "/no/such/model"], "error: there is no folder '/no/such/model'"),
        (["generate", "x", "-m", r"C:\models\tiny"], r"error: there is no folder 'C:\\models\\tiny'; give the folder"),
        (
            ["generate", "x", "-m", "my model"],
            "error: there is no folder 'my model'; give the folder of a Transformers",
        ),
        (["generate", "x", "-m", "name--of/model"], "error: there is no folder 'name--of/model'"),
        (["generate", "x", "-m", "~no-such-user/model"], "error: there is no folder '~no-such-user/model'"),
        (["generate", "x", "-m", "~no-such-user/a.gguf"], "error: there is no file '~no-such-user/a.gguf'"),
        (
            ["generate", "x", "-m", "~no-such-user/a", "--engine", "openvino"],
            "error: there is no folder '~no-such-user/a'",
        ),
        (["generate", "x", "--draft", "~no-such-user/a"], "error: there is no folder '~no-such-user/a'"),
        (["generate", "x", "-m", __file__], f"error: '{__file__}' is a file, but not a GGUF file; give "),
        (["generate", "word " * 600], "error: the prompt has"),
        (["check", "-d", "nothing"], "error: there is no drafter 'nothing'"),
        (["check", "-d", "jacobi", "-W", "3"], "error: none of these drafters has an option --window"),
        (["check", "--seed", "-1"], "error: --seed=-1 is not possible"),
        (["check", "--max-new-tokens", "0"], "error: --max-new-tokens=0 is not possible"),
    ],
)
def test_errors_are_one_line(leapahead: Any, args: list[str], sentence: str) -> None:
    result = leapahead(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(sentence)


@pytest.mark.parametrize(
    "args", [["generate"], ["generate", "x", "-f", "none.txt"], ["check", "--batch", "0"], ["nothing"]]
)
def test_usage_errors(leapahead: Any, args: list[str]) -> None:
    result = leapahead(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_a_file_that_is_not_text(leapahead: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    result = leapahead("generate", "-f", str(tmp_path / "p.txt"))
    assert (result.exit_code, result.stderr) == (2, f"error: {tmp_path / 'p.txt'} is not UTF-8 text\n")
    both = leapahead("generate", "x", "-f", str(tmp_path / "p.txt"))
    assert both.exit_code == 2


def test_no_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading.resources, "files", lambda package: tmp_path)
    result = CliRunner().invoke(main, ["generate", "x"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: this installation has no bundled model")


def commands() -> dict[str, Command]:
    """Every command that runs something, by its words."""
    found = {}
    for name, command in main.commands.items():
        members = command.commands.items() if isinstance(command, Group) else [("", command)]
        found.update({f"{name} {member}".strip(): each for member, each in members})
    return found


def test_the_help_names_the_commands_and_the_exit_codes(leapahead: Any) -> None:
    shown = leapahead("--help").stdout
    assert all(f"  {name}" in shown for name in main.commands)
    assert "Exit codes:" in shown
    assert all(f"  {code}  " in shown for code in (0, 1, 2, 130, 141))


@pytest.mark.parametrize("words", commands())
def test_every_option_has_help_and_every_example_is_a_command_line(leapahead: Any, words: str) -> None:
    command = commands()[words]
    shown = leapahead(*words.split(), "--help", env={"COLUMNS": "120"}).stdout
    assert "Usage:" in shown
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help
            assert option.opts[-1] in shown
            if isinstance(option.default, (int, float)) and not option.is_flag:
                assert f"[default: {option.default}" in " ".join(shown.split())
    assert 2 - (" " in words) <= len(command.examples) <= 4
    for example in command.examples:
        assert f"  {example}\n" in shown
        line = shlex.split(example.partition("|")[2] or example)
        assert line[0] == "leapahead"
        name = next(name for name in (" ".join(line[1:3]), line[1]) if name in commands())
        commands()[name].make_context(name, line[1 + len(name.split()) :], resilient_parsing=True)


def test_errors_name_options() -> None:
    parameters = commands()["generate"].params
    for message, shown in (
        ("max_new_tokens=0 is not possible", "--max-new-tokens=0 is not possible"),
        ("n_ctx can be set for a GGUF file only", "--ctx-size can be set for a GGUF file only"),
        ("drafter 'ngram' has no option 'window'", "drafter 'ngram' has no option --window"),
        ("--option window=wide is not possible", "--option window=wide is not possible"),
        ("seed=-1: a seed is positive", "--seed=-1: a seed is positive"),
        ("the window and /a/seed=1", "the window and /a/seed=1"),
        ("the drafter 'datastore' needs file=...", "the drafter 'datastore' needs file=..."),
        ("kv_unified=False, or kv_unified=True", "--no-kv-unified, or --kv-unified"),
        ("exact=True and use_mmap=False", "--exact and --no-mmap"),
        ("in exact mode; leave out exact", "in exact mode; leave out --exact"),
        ("leave out static, or leave out the draft", "leave out --static, or leave out the draft"),
        ("flash_attn=False and pack=True", "--flash-attn=off and --pack"),
        ("model='a seed=1' and llama.cpp's n_ctx", "--model='a seed=1' and llama.cpp's --ctx-size"),
    ):
        assert name_options(message, parameters) == shown
    for name in ("bench", "check", "tune"):
        assert name_options("max_batch=300", commands()[name].params) == "--batch=300"


@pytest.mark.slow
def test_the_version_says_where_the_compiled_module_is_missing() -> None:
    code = "import sys; sys.modules['leapahead._native'] = None; from leapahead.cli import main; main(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "without its compiled module" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("generate --max-n", ["plain,--max-new-tokens"]),
        ("generate -d prompt_", ["plain,prompt_lookup"]),
        ("generate --engine open", ["plain,openvino"]),
        ("generate --engine none", []),
        ("generate -m mod", ["file,mod"]),
        ("serve mod", ["file,mod"]),
        ("export-g", ["plain,export-gguf"]),
    ],
)
def test_completion_in_a_shell(words: str, found: list[str]) -> None:
    variables = {
        "_LEAPAHEAD_COMPLETE": "bash_complete",
        "COMP_WORDS": f"leapahead {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    result = CliRunner().invoke(main, env=variables, prog_name="leapahead")
    assert result.output.split() == found
