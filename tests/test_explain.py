"""`leapahead explain`: what is recorded is what happened, and the page shows every text as text."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from leapahead import LLM, drafters
from leapahead.cli.explain import explain, show
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import Budget
from leapahead.drafters.lookahead import Lookahead
from leapahead.explain import Recording, page, record, visible
from leapahead.models import loading
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal, SequenceView, Step

PROMPT = "def add(a, b):\n    return a"
EVIL = "</script><b>x</b><!--<script>&amp;"
SAMPLED = SamplingParams(temperature=0.7, top_k=50, seed=5)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> Any:
    return loading.load(str(tiny_folder))


def recorded(
    loaded: Any, prompt: Any = PROMPT, drafter: str = "lookahead", given: dict[str, Any] | None = None, **options: Any
) -> Recording:
    return record(loaded.target, loaded.tokenizer, prompt, drafter, given, **options)


def data_of(html: str) -> Any:
    """What the page's own script reads: an HTML parser's view of the data element."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL)
    (text,) = found
    return json.loads(text)


WINDOW = {"window": 4, "ngram": 4, "guesses": 3}


class Watched(Lookahead):
    """Keeps what it proposed and saw, in the list `kept` of its class."""

    kept: ClassVar[list[Watched]] = []

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self.kept.append(self)
        self.proposals: list[Proposal] = []
        self.tails: list[list[tuple[int, ...]]] = []
        self.seen: list[Step] = []

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        self.tails.append([tail for key, tail in reversed(self.pool.ngrams()) if key == sequence.root])
        self.proposals.append(super().propose(sequence, budget))
        return self.proposals[-1]

    def observe(self, sequence: SequenceView, step: Step) -> None:
        self.seen.append(step)
        super().observe(sequence, step)


# ----------------------------------------------------------------------------------------------- what is recorded


@pytest.mark.slow
@pytest.mark.parametrize("drafter", drafters.ready())
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_one_that_generate_gives(loaded: Any, drafter: str, sampling: Any) -> None:
    given = {"nodes": 8} if drafter == "auto" else {}  # so that no clock decides
    loaded.target.forget()  # rows of a reused prefix are not captured
    recording = recorded(loaded, drafter=drafter, given=given, sampling=sampling, max_new_tokens=30)
    options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "seed": sampling.seed}
    loaded.target.forget()
    llm = LLM(loaded.target, tokenizer=loaded.tokenizer, drafter=drafter, drafter_cache=False, **given)
    result = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True, **options)
    assert (recording.tokens, recording.text) == (result.tokens, result.text)
    assert recording.finish_reason == result.finish_reason
    assert len(recording.steps) == result.stats.steps  # the recorder does not disturb the drafter either
    flags = [i < len(step.accepted) for step in recording.steps for i in range(len(step.tokens))]
    assert flags == result.drafted
    assert sum(len(step.nodes) for step in recording.steps) == result.stats.nodes
    assert recording.drafter == drafter
    assert all((step.pool is not None) == (drafter == "lookahead") for step in recording.steps)
    assert recording.seed == (None if sampling.temperature == 0 else 5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_every_step_is_what_went_through_the_loop(sampling: SamplingParams) -> None:
    target, prompt = ToyTarget(order=1, seed=3), [1, 2, 3, 1, 2]
    recording = record(target, None, prompt, Watched, WINDOW, sampling=sampling, max_new_tokens=40)
    drafter = Watched.kept[-1]
    assert len(drafter.seen) == len(recording.steps) - 1  # a drafter is not told the last
    assert any(step.accepted for step in recording.steps)
    position = len(prompt) - 1
    for step, proposal, tails in zip(recording.steps, drafter.proposals, drafter.tails, strict=False):
        tree = proposal.tree
        assert [(n.token, n.parent, n.depth) for n in step.nodes] == list(
            zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist(), strict=True)
        )
        assert [n.source for n in step.nodes[1:]] == list(proposal.sources[1:])
        assert step.position == position
        path = [0, *step.accepted]
        assert [step.nodes[i].token for i in step.accepted] == list(step.tokens[: len(step.accepted)])
        assert [step.nodes[i].parent for i in step.accepted] == path[:-1]
        assert [step.nodes[i].chosen for i in path][: len(step.tokens)] == list(step.tokens)
        assert step.pool is not None
        assert (step.pool.key, list(step.pool.tails)) == (step.nodes[0].token, tails)
        assert all(step.nodes[i].depth == depth for depth, i in enumerate(step.spine, start=1))
        assert len(step.spine) <= 3
        position += len(step.tokens)
    for step, seen in zip(recording.steps, drafter.seen, strict=False):
        assert (step.tokens, len(step.accepted)) == (seen.tokens, seen.verdict.accepted)


def test_p_is_the_softmax_of_the_parents_logits() -> None:
    target = ToyTarget(order=1, seed=3)
    recording = record(target, None, [1, 2, 3, 1, 2], Lookahead, WINDOW, max_new_tokens=30)
    for step in recording.steps:
        of_children: dict[int, float] = defaultdict(float)
        for node in step.nodes[1:]:
            logits = target.row(((0, step.nodes[node.parent].token),))  # of order 1: the last token says it all
            assert node.p == pytest.approx(np.exp(logits[node.token]) / np.exp(logits).sum(), abs=1e-5)
            of_children[node.parent] += node.p or 0.0
        assert all(total <= 1 + 1e-5 for total in of_children.values())
        for node in step.nodes:  # greedy: the chosen token is the likeliest
            assert node.chosen == node.likeliest[0][0]
            shares = [p for _, p in node.likeliest]
            assert shares == sorted(shares, reverse=True)
        if len(step.tokens) > len(step.accepted):
            end = step.nodes[step.accepted[-1] if step.accepted else 0]
            assert step.bonus_p == end.likeliest[0][1]
        else:
            assert step.bonus_p is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_q_is_the_softmax_of_the_draft_models_logits(temperature: float) -> None:
    """Of all of them, where the drafter keeps those of the likeliest tokens."""
    target, draft = (ToyTarget(2000, order=1, sharpness=1.0, seed=seed) for seed in (3, 4))
    options = {"draft": draft, "nodes": 4, "depth": 2}
    sampling = SamplingParams(temperature=temperature, seed=5)
    recording = record(target, None, [1, 2, 3], "draft_model", options, sampling=sampling, max_new_tokens=12)
    drafted = [(step, node) for step in recording.steps for node in step.nodes[1:]]
    assert len(drafted) > 12
    for step, node in drafted:
        logits = draft.row(((0, step.nodes[node.parent].token),))  # of order 1: the last token says it all
        (q,) = node.q.values()
        assert q == pytest.approx(np.exp(logits[node.token]) / np.exp(logits).sum(), abs=1e-6)


def test_real_logits_too(loaded: Any) -> None:
    recording = recorded(loaded, max_new_tokens=20)
    for step in recording.steps:
        for node in step.nodes:
            assert node.chosen == node.likeliest[0][0]
            assert node.p is None or 0 <= node.p <= 1
        for index in step.accepted:
            assert step.nodes[index].p == step.nodes[step.nodes[index].parent].likeliest[0][1]


def test_logits_that_are_no_numbers_on_a_branch_that_is_not_taken() -> None:
    class Broken(ToyTarget):
        def logits(self, session: Any, tree: Any, num_computed: int = 0) -> Any:
            logits = super().logits(session, tree, num_computed)
            if len(tree) > 1:
                logits[-1] = np.nan  # the foot of the last column
            return logits

    recording = record(Broken(order=1, seed=3), None, [1, 2, 3, 1, 2], Lookahead, WINDOW, max_new_tokens=3)
    first = recording.steps[0].nodes
    assert (first[-1].likeliest, first[-1].chosen) == ((), -1)
    assert data_of(page(recording))["steps"][0]["nodes"][-1]["likeliest"] == []


def test_the_end_of_text_ends_it(loaded: Any) -> None:
    tokens = recorded(loaded, max_new_tokens=20).tokens
    recording = recorded(loaded, max_new_tokens=20, eos_token_ids=(tokens[4],))
    assert recording.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert recording.finish_reason == "stop"


def test_every_token_has_a_text_that_can_be_seen(loaded: Any) -> None:
    recording = recorded(loaded, prompt="日本語 €5\n", max_new_tokens=20, sampling=SAMPLED)
    ids = {n.token for step in recording.steps for n in step.nodes} | set(recording.tokens)
    assert ids <= recording.texts.keys()
    assert all(text and text.isprintable() and " " not in text for text in recording.texts.values())


def test_visible() -> None:
    assert visible(" a\n\tb\x1b[1m\u202e") == "·a↵⇥b␛[1m\\u202e"


# --------------------------------------------------------------------------------------------------- the page


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]


def elements(html: str) -> Elements:
    found = Elements()
    found.feed(html)
    return found


def test_a_text_with_html_in_it_is_data(loaded: Any) -> None:
    recording = recorded(loaded, EVIL, drafter="prompt_lookup", max_new_tokens=10)
    html, harmless = page(recording), page(recorded(loaded, "x", drafter="prompt_lookup", max_new_tokens=10))
    assert EVIL not in html
    assert "<b>" not in html
    assert elements(html).started == elements(harmless).started
    found = data_of(html)
    assert found["prompt"] == EVIL
    assert "".join(text for step in found["steps"] for text, _ in step["spans"]) == recording.text
    assert found["texts"] == {str(token): text for token, text in recording.texts.items()}


def test_the_page_needs_nothing_but_itself(loaded: Any) -> None:
    html = page(recorded(loaded, max_new_tokens=5))
    assert elements(html).addresses == []
    assert not re.search(r"https?:|url\(|@import|\bfetch\(|XMLHttpRequest|innerHTML|insertAdjacent", html)
    assert "default-src 'none'" in html  # and the browser holds it to that


def test_the_data_reads_back(loaded: Any) -> None:
    recording = recorded(loaded, max_new_tokens=20)
    found = data_of(page(recording))
    assert [token for step in found["steps"] for token in step["tokens"]] == recording.tokens
    for step, read in zip(recording.steps, found["steps"], strict=True):
        assert read["accepted"] == list(step.accepted)
        assert [node["p"] for node in read["nodes"]] == [node.p for node in step.nodes]


# ------------------------------------------------------------------------------------------- the command, the terminal


@pytest.fixture
def command(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(loading, "bundled", lambda: str(tiny_folder))

    def run(*args: str) -> Result:
        runner = CliRunner(env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": "200"})
        result = runner.invoke(explain, [*args, "--ignore-eos"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_the_command_writes_a_page(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(PROMPT, "--max-new-tokens", "12")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("explain.html: ")
    found = data_of((tmp_path / "explain.html").read_text(encoding="utf-8"))
    assert sum(len(step["tokens"]) for step in found["steps"]) == 12
    assert (found["prompt"], found["drafter"]) == (PROMPT, "auto")
    command(
        PROMPT, "--max-new-tokens", "5", "-t", "1", "--seed", "4", "-d", "jacobi", "-o", "block=2", "--out", "j.html"
    )
    found = data_of((tmp_path / "j.html").read_text(encoding="utf-8"))
    assert (found["temperature"], found["seed"], found["drafter"]) == (1.0, 4, "jacobi")
    assert max(len(step["nodes"]) for step in found["steps"]) == 3


def test_a_prediction_and_a_prompt_from_files(command: Any, loaded: Any, tmp_path: Path) -> None:
    plain = recorded(loaded, drafter="plain", max_new_tokens=12)
    files = {name: str(tmp_path / name) for name in ("prompt", "expected", "x.html")}
    Path(files["prompt"]).write_text(PROMPT, encoding="utf-8")
    Path(files["expected"]).write_text(loaded.tokenizer.decode(plain.tokens), encoding="utf-8")
    args = ("-f", files["prompt"], "--prediction", files["expected"], "--out", files["x.html"])
    assert command(*args, "--max-new-tokens", "12", "-d", "prediction").exit_code == 0
    found = data_of((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert {node["source"] for step in found["steps"] for node in step["nodes"][1:]} == {"prediction"}
    refused = command(*args, "-d", "lookahead")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "makes no use of a prediction" in refused.stderr


def test_the_terminal(command: Any, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(PROMPT, "--max-new-tokens", "12", "-d", "lookahead", "--terminal")
    recording = recorded(loaded, max_new_tokens=12)
    assert result.exit_code == 0
    assert list(tmp_path.iterdir()) == []  # no page unless asked for
    assert f"step {len(recording.steps)} of {len(recording.steps)}" in result.stdout
    assert result.stdout.count(" bonus p ") == sum(len(s.tokens) > len(s.accepted) for s in recording.steps)
    assert result.stdout.count(" guess p ") + result.stdout.count(" window p ") == sum(
        len(step.nodes) - 1 for step in recording.steps
    )
    assert result.stdout.count("  accepted\n") == sum(len(step.accepted) for step in recording.steps)


def test_the_terminal_is_not_steered(loaded: Any) -> None:
    console = Console(width=200, force_terminal=True, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show(recorded(loaded, "a\x1b[2J [red]b[/red]", max_new_tokens=4), console)
    shown = console.export_text()
    assert "\x1b" not in shown
    assert "␛[2J [red]b[/red]" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["x", "--out", "{tmp}"], "which is a folder"),
        (["x", "--out", "{tmp}/none/x.html"], "there is no folder"),
        (["", "--out", "{tmp}/x.html"], "the prompt is empty"),
        (["x", "-d", "lokahead"], "did you mean 'lookahead'"),
        (["x", "--out", "{tmp}/x.html", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["x", "--out", "{tmp}/x.html", "-t", "-1"], "temperature"),
    ],
)
def test_bad_input_is_one_sentence(command: Any, tmp_path: Path, args: list[str], said: str) -> None:
    result = command(*(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of an earlier run stays as it is."""
    (tmp_path / "x.html").write_text("earlier")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = command("x", "--max-new-tokens", "2", "--out", str(tmp_path / "x.html"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("No space left on device")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.html", "earlier")]
