"""`bench` measures what it says, compares every text, and loses nothing that it has measured."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner, Result

from leapahead import LLM, BadParameter, LeapaheadError, Refused, drafters
from leapahead.bench import cell, figures, peers, record, report, tasks
from leapahead.bench import run as runner
from leapahead.bench.contender import Configuration, Contender, Ours, Pass, Setting, Text, aligned
from leapahead.bench.peak_memory import Peak
from leapahead.bench.plan import Model, Plan
from leapahead.cli import main, screen
from leapahead.cli.bench import configurations
from leapahead.core.parameters import listed
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import SequenceDrafter
from leapahead.drafters.draft_models import DraftModel
from leapahead.drafters.plain import Plain
from leapahead.models import loading
from leapahead.models.loading import Loaded
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal, SequenceView

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [0, 3]]
PUBLISHED = {
    "humaneval.jsonl": [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}(x):\n"} for n in range(6)],
    "gsm8k_test.jsonl": [{"question": "Two and two?", "answer": "4"}],
    "mt_bench.jsonl": [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}],
    "spec_bench.jsonl": [
        {"question_id": n, "category": category, "turns": [f"{category} {n}", "more"]}
        for n, category in enumerate(["writing", "coding", "translation", "rag", "rag"])
    ],
}


class Timed(Contender):
    """A contender that takes the seconds it is told, and writes what it is told."""

    def __init__(self, name: str, seconds: Callable[[int], float], tokens: Callable[[list[int]], list[int]]) -> None:
        self.name, self.seconds, self.tokens = name, seconds, tokens
        self.passes: list[list[list[int]]] = []

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        self.passes.append(list(prompts))
        texts = [Text(self.tokens(prompt), first_token=0.5) for prompt in prompts]
        return Pass(texts, self.seconds(len(self.passes)), prefill=0.25)


def ten(prompt: list[int]) -> list[int]:
    return [*prompt[:1], *range(9)]


def never(*what: Any) -> bool:
    raise AssertionError("nothing differs")


def measured(contenders: Sequence[Any], rounds: int = 3, **options: Any) -> list[dict[str, Any]]:
    options = {"setting": Setting(max_new_tokens=24), "judge": never, "seed": 0, **options}
    return cell.measure_cell(contenders, PROMPTS, rounds=rounds, **options)


# ------------------------------------------------------------------------------------------------------- figures


def test_the_ratio_is_the_one_of_the_clocks() -> None:
    plain, fast = Timed("plain", lambda turn: 1.0, ten), Timed("peer:fast", lambda turn: 0.4, ten)
    rows = measured([plain, fast])
    assert [row["drafter"] for row in rows] == ["plain", "peer:fast"]
    assert rows[0]["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert rows[1]["speedup"] == {"median": 2.5, "low": 2.5, "high": 2.5}
    assert [row["tokens_per_second"] for row in rows] == [10.0, 25.0]
    assert rows[1]["time_to_first_token"] == 0.5
    assert rows[1]["seconds"] == {"prefill": 0.75, "rest": pytest.approx(1.2)}  # of one pass over three prompts
    assert (rows[1]["prompts"], rows[1]["tokens"]) == (3, 30)
    assert rows[1]["acceptance_length"] is None  # a peer that does not tell


def test_the_warm_up_is_not_measured_and_a_slow_round_is_one_of_many() -> None:
    """One slow warm-up, and then a neighbour who slows both down."""
    slow = [9.0] + [1.0] * 6 + [50.0] * 3
    plain = Timed("plain", lambda turn: 2.0 * slow[turn - 1], ten)
    other = Timed("peer:x", lambda turn: slow[turn - 1], ten)
    rows = measured([plain, other])
    assert len(plain.passes) == len(other.passes) == 1 + 3 * 3
    assert rows[1]["samples"]["seconds"] == [[1.0] * 3, [1.0] * 3, [50.0] * 3]
    assert rows[1]["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_the_interval_is_over_rounds_and_prompts() -> None:
    plain = {"tokens": [[10, 10]] * 2, "seconds": [[1.0, 1.0]] * 2}
    steady = {"tokens": [[10, 10]] * 2, "seconds": [[0.5, 0.5]] * 2}
    assert figures.speedup(steady, plain) == {"median": 2.0, "low": 2.0, "high": 2.0}
    rounds = figures.speedup({**steady, "seconds": [[0.5, 0.5], [1.0, 1.0]]}, plain)
    assert (rounds["low"], rounds["median"], rounds["high"]) == (1.0, 1.5, 2.0)
    prompts = figures.speedup({**steady, "seconds": [[0.5, 1.0]] * 2}, plain)
    assert (prompts["low"], prompts["high"]) == (1.0, 2.0)
    assert prompts["median"] == pytest.approx(4 / 3, abs=1e-4)
    assert prompts == figures.speedup({**steady, "seconds": [[0.5, 1.0]] * 2}, plain)  # seeded


def test_there_is_no_interval_from_one_prompt() -> None:
    """Rounds differ, but nothing is known of other prompts; the table says why the interval is missing."""
    plain = {"tokens": [[10]] * 3, "seconds": [[1.0]] * 3}
    mine = {"tokens": [[10]] * 3, "seconds": [[0.5], [0.4], [0.8]]}
    assert figures.speedup(mine, plain) == {"median": 2.0, "low": None, "high": None}
    contenders = [Timed("plain", lambda turn: 1.0, ten), Timed("peer:x", lambda turn: 0.5, ten)]
    settings: dict[str, Any] = {"rounds": 2, "seed": 0, "judge": never}
    rows = cell.measure_cell(contenders, PROMPTS[:1], Setting(max_new_tokens=24), **settings)
    named = [{"task": "one", "target": "toy", **row} for row in rows]
    assert report.cells(named[1])[2:4] == ["2.00", ""]
    assert "single prompt" in report.notes(named)[0]
    assert report.notes([{"task": "one", **row} for row in measured(contenders)]) == []


def test_the_interval_of_one_batch_of_several_prompts_is_over_the_rounds() -> None:
    plain = {"tokens": [[40]] * 3, "seconds": [[1.0]] * 3}
    mine = {"tokens": [[40]] * 3, "seconds": [[0.5], [0.4], [0.8]]}
    assert figures.speedup(mine, plain, prompts=4) == {"median": 2.0, "low": 1.25, "high": 2.5}
    one = {key: value[:1] for key, value in mine.items()}
    others = {key: value[:1] for key, value in plain.items()}
    assert figures.speedup(one, others, prompts=4) == {"median": 2.0, "low": None, "high": None}


def test_few_batches_have_more_rounds() -> None:
    prompts = [tasks.Task("one", ["x"] * 12), tasks.Task("two", ["y"] * 4)]
    plan = Plan(tasks=prompts, configurations=[Configuration("auto")], rounds=1)
    assert [plan.rounds_of(prompts[0], batch) for batch in (1, 2, 4, 8, 16)] == [1, 2, 4, 4, 4]
    assert plan.rounds_of(prompts[1], 4) == 4, "whatever other tasks there are"
    assert replace(plan, rounds=3).rounds_of(prompts[0], 2) == 3
    assert plan.rounds_of(tasks.Task("one", ["x"]), 1) == 1, "one prompt stays one prompt"


def test_texts_decoded_alone_are_known_to_the_next_batch_size() -> None:
    """Batches are compared with plain decoding alone, which is not repeated for every batch size."""
    expected: dict[int, list[int]] = {}
    counts = []
    for batch in (1, 2, 3):
        plain = Timed("plain", lambda turn: 1.0, ten)
        measured([plain], rounds=1, setting=Setting(batch=batch), expected=expected)
        counts.append(sum(len(each) == 1 for each in plain.passes))
    assert counts == [4, 0, 0]  # the warm-up and each prompt, once
    assert expected == {index: ten(prompt) for index, prompt in enumerate(PROMPTS)}


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Ratios of 20 prompts, lognormal around 1.5: about 95 of 100 intervals hold it; fewer than 85 has p < 1e-4."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        seconds = np.exp(rng.normal(scale=0.2, size=20))
        plain = {"tokens": [[10] * 20] * 3, "seconds": [[1.5] * 20] * 3}
        mine = {"tokens": [[10] * 20] * 3, "seconds": [(seconds / np.exp(0.02)).tolist()] * 3}  # of mean 1
        found = figures.speedup(mine, plain)
        inside += found["low"] <= 1.5 <= found["high"]
    assert inside >= 85


def test_turns_are_drawn_and_seeded() -> None:
    names = ["plain", "a", "b", "c"]
    drawn = [tuple(cell.order(names, 0, turn, group)) for turn in range(10) for group in range(5)]
    assert drawn == [tuple(cell.order(names, 0, turn, group)) for turn in range(10) for group in range(5)]
    assert all(sorted(each) == sorted(names) for each in drawn)
    assert len(set(drawn)) > 10
    assert {each[0] for each in drawn} == set(names)
    assert cell.order(names, 0, 1, 1) != cell.order(names, 5, 1, 1)


def test_contenders_take_turns_within_a_group() -> None:
    log: list[str] = []
    contenders = [Timed(name, lambda turn, name=name: log.append(name) or 1.0, ten) for name in ("plain", "a", "b")]
    measured(contenders, rounds=2, seed=3)
    whole = [(turn, group) for turn in (1, 2) for group in range(3)]
    expected = [cell.order(["plain", "a", "b"], 3, *when) for when in [(0, 0), *whole]]
    assert log == [name for names in expected for name in names]


# --------------------------------------------------------------------------------------------------- our drafters


class Slow(SequenceDrafter):
    """Takes two milliseconds to propose nothing."""

    name: ClassVar[str] = "slow"

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        time.sleep(0.002)
        return Proposal(TokenTree.root(sequence.root))


def test_a_drafter_that_is_slow_is_measured_slow() -> None:
    target = ToyTarget()
    rows = measured([Ours("plain", target, None, Plain), Ours("slow", target, None, Slow)], rounds=2)
    assert rows[1]["seconds"]["draft"] >= 0.002 * 3 * 23  # the last token of a text needs no draft
    assert rows[1]["speedup"]["high"] < 1
    assert (rows[1]["acceptance_length"], rows[1]["nodes_per_step"], rows[1]["mismatches"]) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("prompts", "batch", "sizes"),
    [(3, 1, [1, 1, 1]), (2, 3, [2]), (8, 2, [8]), (9, 2, [9]), (10, 2, [8, 2]), (17, 2, [8, 9]), (33, 8, [33])],
)
def test_every_group_fills_a_batch(prompts: int, batch: int, sizes: list[int]) -> None:
    """One text that is decoded alone is no figure of a batch of eight."""
    groups = cell.groups_of(range(prompts), batch)
    assert [len(group) for group in groups] == sizes
    assert [index for group in groups for index in group] == list(range(prompts))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_counters(batch: int, temperature: float) -> None:
    target = ToyTarget()
    seen: list[str] = []
    contenders = [Ours(name, target, None, name) for name in ("plain", "lookahead", "jacobi")]
    setting = Setting(temperature=temperature, batch=batch, max_new_tokens=24, seed=1)
    rows = measured(contenders, rounds=2, setting=setting, progress=seen.append)
    groups, total = 3 if batch == 1 else 1, sum(setting.limit(prompt) for prompt in PROMPTS)
    assert len(seen) == 3 * (1 + 2 * groups) == 3 * cell.passes(3, batch, 2)
    for row in rows:
        assert (row["prompts"], row["groups"], row["tokens"]) == (3, groups, total)
        assert (row["mismatches"], row["ties"]) == (0, 0)
        assert row["acceptance_length"] == pytest.approx(total / row["steps"], abs=1e-4)
        assert sum(row["accepted_by"].values()) == sum(row["accepted_at"].values()) == total - row["steps"]
        assert row["distinct_4"] == rows[0]["distinct_4"]
        wall = sum(map(sum, row["samples"]["seconds"])) / 2
        assert sum(row["seconds"].values()) - row["seconds"]["prefill"] == pytest.approx(wall, abs=1e-4)
        assert row["time_to_first_token"] > 0
        # two rounds with a prefill for each text, the warm-up of one group, and plain decoding of whole texts alone
        alone = 3 * 25 if batch > 1 and row["drafter"] == "plain" else 0
        warm_up = row["forwards"] - 2 * (row["steps"] + 3) - alone
        texts = 3 // groups
        tokens = 24 if batch == 1 else total
        assert warm_up == (tokens + texts if row["drafter"] == "plain" else warm_up)
        assert texts * 2 < warm_up <= tokens + texts
    assert rows[1]["acceptance_length"] > 1
    assert rows[1]["nodes_per_step"] > 2


def test_texts_of_a_batch_differ_in_length() -> None:
    prompts = [[index, 7] for index in range(50)]
    alone, batch = Setting(max_new_tokens=64), Setting(batch=4, max_new_tokens=64)
    assert {alone.limit(prompt) for prompt in prompts} == {64}
    limits = [batch.limit(prompt) for prompt in prompts]
    assert limits == [Setting(batch=8, max_new_tokens=64).limit(prompt) for prompt in prompts]
    assert 32 <= min(limits) < 40 < 56 < max(limits) <= 64
    text = Text([1, 2, 3, 4], timed=3)
    text.cut(2)
    assert (text.tokens, text.timed) == ([1, 2], 1), "the first token came from the prefill"
    text = Text(timed=3)  # of a contender that gives only text
    text.cut(2)
    assert text.timed == 2


def test_a_round_begins_without_what_the_last_one_remembers() -> None:
    """Else every prompt would be drafted from its own answer."""
    target, setting = ToyTarget(vocab_size=40, order=4), Setting(max_new_tokens=60)

    def steps(contender: Contender) -> list[int]:
        texts = contender.run([PROMPTS[0]], setting).texts + contender.run([PROMPTS[1]], setting).texts
        return [text.stats.steps for text in texts if text.stats is not None]

    forgets, remembers = (Ours("suffix", target, None, "suffix", {"nodes": 8}) for _ in range(2))
    rounds, others = [], []
    for _ in range(3):
        forgets.begin_round()
        rounds.append(steps(forgets))
        others.append(steps(remembers))
    assert rounds[0] == others[0]
    # Acceptance estimates are kept between rounds, which changes a little; texts are not.
    assert min(rounds[1] + rounds[2]) > min(rounds[0]) * 0.8
    assert max(others[1]) < min(others[0]) / 3


def test_every_round_is_begun() -> None:
    log: list[str] = []

    class Told(Timed):
        def begin_round(self) -> None:
            log.append(f"{self.name} begins")

        def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
            log.append(self.name)
            return super().run(prompts, setting)

    measured([Told("plain", lambda turn: 1.0, ten)], rounds=2)
    assert log == ["plain begins", "plain", *(["plain begins"] + ["plain"] * 3) * 2]


def test_a_peer_without_steps_is_a_row_and_joins_the_overall_row() -> None:
    rows = measured([Timed("plain", lambda turn: 1.0, ten), Timed("peer:x", lambda turn: 0.5, ten)])
    whole = figures.overall([rows[1], rows[1]], [rows[0], rows[0]], 0)
    assert whole["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert (whole["prompts"], whole["tokens"], whole["acceptance_length"]) == (6, 60, None)


def test_texts_of_a_single_token_give_peers_no_speed() -> None:
    """Their prefill yields it; they would be said to be infinitely slow."""
    said: list[str] = []
    target = ToyTarget()
    ours, peer = Ours("plain", target, None, Plain), Timed("peer:x", lambda turn: 0.0, ten)
    form = runner.Form("toy", Loaded(target, None, ()), [ours, peer], said.append)
    task = tasks.Task("one", ["x"])
    assert runner._able(form, PROMPTS, Setting(max_new_tokens=1), task) == [ours]
    assert said == [
        "one, temperature 0, batch 1: peer:x is left out: the only token of a text comes from its prefill, which is "
        "not timed"
    ]
    assert runner._able(form, PROMPTS, Setting(max_new_tokens=2), task) == [ours, peer]
    rows = measured([Timed("plain", lambda turn: 1.0, ten), peer])  # all texts ended with the prefill
    assert rows[1]["samples"]["seconds"] == [[1e-6] * 3] * 3


def test_tasks_of_different_numbers_of_rounds_have_an_overall_row() -> None:
    """A task of few batches has more rounds; the overall row is over the rounds that all tasks have."""
    contenders = [Timed("plain", lambda turn: 1.0, ten), Timed("peer:x", lambda turn: 0.5, ten)]
    one, two = measured(contenders, rounds=1), measured(contenders, rounds=4)
    whole = figures.overall([one[1], two[1]], [one[0], two[0]], 0)
    assert whole["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert (whole["prompts"], whole["tokens"], whole["tokens_per_second"]) == (6, 60, 20.0)
    assert figures.overall_beside([one[1], two[1]], [one[0], two[0]], 0)["median"] == 2.0


# ---------------------------------------------------------------------------------------------- texts that differ


class Broken(ToyTarget):
    """Everybody sees everybody."""

    def mask(self, tree: TokenTree) -> Any:
        return np.ones_like(tree.ancestor_mask)


def test_a_broken_target_is_a_mismatch() -> None:
    target = Broken()
    contenders = [Ours(name, target, None, name) for name in ("plain", "lookahead")]
    rows = measured(contenders, judge=cell.tie_on(target))
    assert rows[0]["mismatches"] == 0
    assert rows[1]["mismatches"] > 0
    assert rows[1]["ties"] == 0


def test_ties_are_counted_apart_and_judged_once() -> None:
    judged: list[tuple[list[int], list[int]]] = []

    def judge(prompt: list[int], expected: list[int], got: list[int], setting: Setting) -> bool:
        judged.append((expected, got))
        return prompt == PROMPTS[1]

    other = Timed("peer:x", lambda turn: 1.0, lambda p: [*ten(p)[:4], 7] if p != PROMPTS[2] else ten(p))
    rows = measured([Timed("plain", lambda turn: 1.0, ten), other], judge=judge)
    assert (rows[1]["mismatches"], rows[1]["ties"]) == (1, 1)
    assert len(judged) == 2  # not once a round


class Rounding(ToyTarget):
    """Wider forwards round otherwise, as much as `size`; the two best logits are 1e-6 apart."""

    def __init__(self, size: float) -> None:
        super().__init__(order=1, sharpness=3.0)
        self.size = size
        self.info = replace(self.info, precision=float(np.finfo(np.float32).eps))

    def row(self, seen: Any) -> Any:
        row = super().row(seen).copy()
        first, second = np.argsort(-row)[:2]
        row[second] = row[first] - 1e-6
        return row

    def logits(self, session: Any, tree: TokenTree, num_computed: int = 0) -> Any:
        logits = super().logits(session, tree, num_computed)
        rng = np.random.default_rng([len(tree), len(session.tokens)])
        return logits + rng.uniform(-self.size, self.size, size=logits.shape) * (len(tree) > 1)


@pytest.mark.parametrize(("size", "kind", "other"), [(2e-5, "ties", "mismatches"), (0.5, "mismatches", "ties")])
def test_rounding_is_a_tie_and_more_is_a_mismatch(size: float, kind: str, other: str) -> None:
    target = Rounding(size)
    contenders = [Ours(name, target, None, name) for name in ("plain", "lookahead")]
    plain, row = measured(contenders, rounds=1, judge=cell.tie_on(target))
    assert plain["mismatches"] == plain["ties"] == 0
    assert row[kind] > 0
    assert row[other] == 0


def test_a_text_that_ends_early_is_no_tie() -> None:
    assert not cell.tie_on(ToyTarget())([1, 2], [3, 4], [3], Setting())


class Letters:
    """A token is a letter; token 26 is the end, 27 half a character, 28 "ab"."""

    eos_token_id = 26
    known: ClassVar[list[str]] = [*"abcdefghijklmnopqrstuvwxyz", "", "\ufffd", "ab"]

    def __len__(self) -> int:
        return len(self.known)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.known.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.known[token] for token in token_ids)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **_: Any) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("written", "expected", "found"),
    [
        ("abc", [0, 1, 2], [0, 1, 2]),
        ("abcde", [0, 1, 2], [0, 1, 2]),  # more than was asked for
        ("abc", [28, 2], [28, 2]),  # other tokens of the same text
        ("abd", [28, 2], [28, 3]),
        ("acd", [28, 2], [0, 2, 3]),  # parted within a token
        ("abé", [0, 1, 27], [0, 1, 27]),  # the length ended it within a character
        ("ab", [0, 1, 2], [0, 1]),  # ended too early
        ("ab", [0, 1, 26], [0, 1, 26]),
        ("abc", [0, 1, 26], [0, 1, 26, 2]),  # went on behind the end
        ("", [0], []),
    ],
)
def test_a_text_without_tokens_gets_plain_decodings(written: str, expected: list[int], found: list[int]) -> None:
    assert aligned(written, expected, Letters(), Setting(eos_token_ids=(26,))) == found


def test_a_contender_that_gives_text_is_compared_and_its_own_count_of_tokens_is_its_speed() -> None:
    class Writer(Timed):
        def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
            found = super().run(prompts, setting)
            texts = [Text(written=Letters().decode(text.tokens) + "zz", timed=5) for text in found.texts]
            return Pass(texts, found.seconds, memory=12.5)

    rows = measured(
        [Timed("plain", lambda turn: 1.0, ten), Writer("peer:x", lambda turn: 1.0, ten)], tokenizer=Letters()
    )
    assert rows[1]["speedup"]["median"] == 0.5
    assert rows[1]["mismatches"] == rows[1]["ties"] == 0
    assert rows[1]["distinct_4"] == rows[0]["distinct_4"]
    assert rows[1]["peak_memory_mib"] == 12.5


# ---------------------------------------------------------------------------------------------------------- tasks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in PUBLISHED.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_published_files(data: Path) -> None:
    found = {task.name: task for task in tasks.read(data)}
    names = ["humaneval", "gsm8k", "mt_bench", "spec_bench/mt_bench", "spec_bench/translation", "spec_bench/rag"]
    assert list(found) == names
    assert found["gsm8k"].prompts == ["Two and two?"]
    assert found["mt_bench"].prompts == [[{"role": "user", "content": "Write."}]]  # the first turn
    assert len(found["spec_bench/mt_bench"].prompts) == 2
    assert [task.chat for task in found.values()] == [False, False, True, True, True, True]
    assert [task.name for task in tasks.read(data, ["spec_bench", "gsm8k"])] == [names[1], *names[3:]]
    (limited,) = tasks.read(data, ["humaneval"], 2)
    assert limited.prompts == ["def f0(x):\n", "def f3(x):\n"]
    assert limited.digest != found["humaneval"].digest
    chosen = tasks.read(data, ["humaneval=4", "gsm8k", "spec_bench=1"], 3)
    assert [len(task.prompts) for task in chosen] == [4, 1, 1, 1, 1]
    for wrong in ("humaneval=0", "humaneval=x", "humaneval="):
        with pytest.raises(BadParameter, match="is not possible"):
            tasks.read(data, [wrong])


def test_our_own_prompts() -> None:
    found = tasks.read(None)
    assert [task.name for task in found] == [
        *("code", "maths", "chat", "summarise", "edit-this-code", "structured-output")
    ]
    assert {len(task.prompts) for task in found} == {3}


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`leapahead bench` with the tiny model as the bundled one, on a task of two prompts unless `data` is named."""
    monkeypatch.setattr(loading, "bundled", lambda: str(tiny_folder))
    monkeypatch.setattr(
        "leapahead.bench.plan.conditions", lambda **_: {"versions": {"leapahead": "0"}, **dict.fromkeys(MACHINE)}
    )
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "humaneval.jsonl").write_text('{"prompt": "def add(a, b):"}\n{"prompt": "for number in"}\n')
    (folder / "mt_bench.jsonl").write_text('{"turns": ["Hi", "Ho"]}\n')
    few = ("--rounds", "1", "--max-new-tokens", "6", "--dtype", "float32", "-t", "0", "-d", "prompt_lookup")

    def invoke(*args: str, plain: bool = False) -> Result:
        given = args if plain else (*few, "--data", str(folder), "--out", str(tmp_path / "out"), *args)
        result = CliRunner().invoke(main, ["bench", *given])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


MACHINE = ("commit", "system", "cpu", "gpu")


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return found


@pytest.mark.slow
def test_predictions_are_drafted_and_peers_are_not_told(run: Any, tmp_path: Path, tiny_folder: Path) -> None:
    folder = tmp_path / "edited"
    folder.mkdir()
    llm = LLM(str(tiny_folder), dtype="float32")
    prompts = ["def add(a, b):", "while True:"]
    predictions = [result.text for result in llm.generate(prompts, max_new_tokens=24, drafter="plain")]
    rows = [{"prompt": prompt, "prediction": text} for prompt, text in zip(prompts, predictions, strict=True)]
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("--data", str(folder), "-d", "prediction", "--max-new-tokens", "24")
    assert result.exit_code == 0, result.output
    found = {row["drafter"]: row for row in results(tmp_path / "out")["results"] if row["task"] == "edits"}
    assert found["prediction"]["mismatches"] == 0
    assert found["prediction"]["drafted_by"]["prediction"] > 0
    assert "prediction" not in found["prompt_lookup"]["drafted_by"]
    changed = tasks.Task("edits", tasks.read(folder)[0].prompts, {prompts[0]: "another text"})
    assert changed.digest != tasks.read(folder)[0].digest


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--data", "--prompts"])
def test_prompts_of_a_file(run: Any, tmp_path: Path, option: str) -> None:
    rows = [{"prompt": "def add(a, b):", "prediction": "return"}, {"question": "Why?"}, {"turns": ["Hi"]}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(option, str(tmp_path / "mine.jsonl"), "-d", "prediction")
    assert result.exit_code == 0, result.output
    found = results(tmp_path / "out")
    assert {name: task["prompts"] for name, task in found["conditions"]["tasks"].items()} == {"mine": 3}
    assert next(row for row in found["results"] if row["drafter"] == "prediction")["drafted_by"]["prediction"] > 0
    assert "there are mine" in run(option, str(tmp_path / "mine.jsonl"), "--task", "gsm8k").output
    assert "there is no folder or file" in run(option, str(tmp_path / "none.jsonl")).output


def test_bench_writes_everything(run: Any, tmp_path: Path) -> None:
    with (tmp_path / "small" / "mt_bench.jsonl").open("a") as file:
        file.write('{"turns": ["Why?"]}\n')  # two prompts, as the other task has
    result = run("--config", "lookahead:window=3,ngram=3,guesses=2", "-t", "1", "--batch", "1", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert "Every text equals that of plain decoding" in result.stdout
    assert "bundled, temperature 1, batch 2" in result.stdout
    out = tmp_path / "out"
    names = {"bench.json", "report.md"}
    names |= {f"{name}.{kind}" for name in ("speedup", "acceptance", "batches") for kind in ("png", "svg")}
    assert {path.name for path in out.iterdir()} == names
    found = results(out)
    assert {*MACHINE, "versions", "date", "threads", "dtype", "tasks", "targets"} <= set(found["conditions"])
    target = found["conditions"]["targets"]["bundled"]
    assert (target["dtype"], target["chat"]) == ("float32", "chat template")
    rows = found["results"]
    drafters = ["plain", "prompt_lookup", "lookahead(window=3, ngram=3, guesses=2)"]
    assert len(rows) == 3 * (2 + 1) * 2 * 2  # drafters, tasks and their sum, temperatures, batches
    for row in rows:
        assert row["drafter"] in drafters
        assert set(row["speedup"]) == {"median", "low", "high"}
        assert row["mismatches"] == row["ties"] == 0
        keys = {"task", "target", "temperature", "batch", "acceptance_length", "nodes_per_step", "distinct_4"}
        keys |= {"tokens_per_second", "accepted_at", "accepted_by", "drafted_by", "time_to_first_token", "seconds"}
        keys |= {"peak_memory_mib", "forwards", "prompts", "tokens"}
        assert keys <= set(row)
    assert {row["task"] for row in rows} == {"humaneval", "mt_bench", "overall"}
    assert "| humaneval | prompt_lookup |" in (out / "report.md").read_text()


def test_names_are_shown_as_they_are(run: Any, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a[b]:cat:"
    shutil.copytree(tiny_folder, folder)
    result = run("-m", str(folder), "--task", "humaneval=1")
    assert "\na[b]:cat:, greedy, batch 1" in f"\n{result.stdout}"


@pytest.mark.slow
def test_the_report_is_made_of_the_file_alone(run: Any, tmp_path: Path) -> None:
    run()
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for path in out.iterdir():
        if path.name != "bench.json":
            path.unlink()
    again = run("--report-only", "--out", str(out), plain=True)
    assert again.exit_code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert report.markdown(results(out)) == before["report.md"].decode()


@pytest.mark.slow
def test_resume_measures_what_is_missing(run: Any, tmp_path: Path) -> None:
    assert run("--task", "humaneval").exit_code == 0
    first = results(tmp_path / "out")
    refused = run()
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert run("--resume").exit_code == 0
    second = results(tmp_path / "out")
    assert [row for row in second["results"] if row["task"] == "humaneval"] == first["results"]
    assert {row["task"] for row in second["results"]} == {"humaneval", "mt_bench", "overall"}
    assert second["conditions"]["resumed"]
    other = run("--resume", "--rounds", "2")
    assert other.exit_code == 2
    assert "the condition 'rounds' was 1 and is 2" in other.stderr
    limited = run("--resume", "--limit", "1")
    assert "tasks: humaneval" in limited.stderr
    assert results(tmp_path / "out") == second


def test_ctrl_c_keeps_and_reports_what_there_is(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = runner.measure_sides, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(runner, "measure_sides", interrupted)
    result = run()
    assert result.exit_code == 130
    assert "humaneval" in result.stdout
    assert "--resume continues" in result.stderr
    assert {row["task"] for row in results(tmp_path / "out")["results"]} == {"humaneval"}
    assert (tmp_path / "out" / "speedup.png").is_file()
    assert run("--resume").exit_code == 0
    assert {row["task"] for row in results(tmp_path / "out")["results"]} == {"humaneval", "mt_bench", "overall"}


def test_values_with_commas_stand_in_quotes() -> None:
    (found,) = configurations([], ['auto:nodes=8, sources="ngram,recycling"'])
    assert (found.drafter, found.options) == ("auto", {"nodes": 8, "sources": "ngram,recycling"})
    with pytest.raises(BadParameter, match="'recycling' must be KEY=VALUE, and a value with commas in quotes"):
        configurations([], ["auto:sources=ngram,recycling"])
    assert listed(" a = 1,b='x, y' , c=\"'\",, d=it's,e,f=") == ["a = 1", "b=x, y", "c='", "d=it's", "e", "f="]
    assert listed("") == listed(" , ") == []


@pytest.mark.slow
def test_a_bench_that_measured_nothing_is_refused_and_leaves_nothing(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("--max-new-tokens", "100000")
    assert (result.exit_code, result.stdout) == (2, "")
    *left_out, line = result.stderr.splitlines()
    assert [each.partition(" prompts left out")[0] for each in left_out] == [
        "bundled: humaneval: 2 of 2",
        "bundled: mt_bench: 1 of 1",
    ]
    assert line == (
        "error: nothing was measured, since the prompts do not fit the context with --max-new-tokens=100000; give "
        "fewer, or shorter prompts"
    )
    assert not (tmp_path / "out").exists()  # so that the next one is not told to resume it

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "measure_sides", interrupted)
        result = run()
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patched:
        patched.setattr(screen, "quiet_transformers", interrupted)
        assert run().exit_code == 130
    assert not (tmp_path / "out").exists()
    record.Record.open(tmp_path / "out", {}, resume=False)  # as of a bench that was killed
    result = run("--report-only", "--out", str(tmp_path / "out"), plain=True)
    assert result.exit_code == 2
    assert result.stderr.endswith("bench.json holds no results yet, since no cell was finished\n")
    assert run().exit_code == 0, "it holds no results, so that nothing is lost"


FOREIGN = (
    [],
    {"results": []},
    {"conditions": {}, "results": {}},
    {"conditions": {}, "results": ["task"]},
    {"conditions": {}, "results": [{"task": "a"}]},
)


@pytest.mark.parametrize("content", FOREIGN, ids=str)
@pytest.mark.parametrize("option", ["--resume", "--report-only", "--quick"])
def test_a_file_that_is_not_a_benchs(run: Any, tmp_path: Path, content: Any, option: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / record.FILE).write_text(json.dumps(content))
    result = run(option, "--out", str(tmp_path / "out"), plain=option == "--report-only")
    assert result.exit_code == 2
    assert result.stderr.endswith("bench.json is not the result of a bench; choose another --out\n")


@pytest.mark.slow
def test_a_mismatch_is_exit_code_1_after_everything_is_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner.measure_sides

    def differing(*args: Any, **options: Any) -> Any:
        (rows,) = whole(*args, **options)
        rows[1]["mismatches"] = 1
        return [rows]

    monkeypatch.setattr(runner, "measure_sides", differing)
    result = run()
    assert result.exit_code == 1
    assert "MISMATCH" in result.stdout
    assert (tmp_path / "out" / "report.md").is_file()


def test_a_full_disk_loses_nothing(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, out = os.replace, tmp_path / "out"

    def full(source: Path, goal: Path) -> None:
        if goal.parent == out and len(json.loads(source.read_text())["results"]) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, goal)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(record.tempfile, "tempdir", str(tmp_path))
    result = run()
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert "No space left on device" in line
    assert "mt_bench" in result.stdout  # the table has the cell that was not written
    (rescued,) = tmp_path.glob("leapahead-bench-*/bench.json")
    assert str(rescued) in line
    assert {row["task"] for row in results(rescued.parent)["results"]} == {"humaneval", "mt_bench", "overall"}
    assert {row["task"] for row in results(out)["results"]} == {"humaneval"}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["-d", "lokahead"], "did you mean 'lookahead'"),
        (["--config", "lookahead:windw=3"], "did you mean 'window'"),
        (["--config", "lookahead:window"], "'window' must be KEY=VALUE"),
        (["--config", "lookahead:window=0"], "window=0"),
        (["-d", "jacobi", "-d", "jacobi"], "jacobi was given twice"),
        (["--task", "humanevl"], "did you mean 'humaneval'"),
        (["--task", "humaneval=1", "--task", "humaneval=2"], "given twice, with 1 and 2 prompts; give it once"),
        (["-t", "-1"], "temperature=-1.0"),
        (
            ["--batch", "1", "--batch", "3"],
            "--batch=3 is not possible, since the greatest number of prompts of a task is 2",
        ),
        (["--model", "no/such/model.gguf"], "no/such/model.gguf"),
    ],
)
def test_bad_input_is_one_sentence(run: Any, args: list[str], sentence: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert sentence in line


def test_bad_folders_and_files(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "humaneval.jsonl").write_text('{"prompt": "x"}\n{"question": "y"}\n')
    (tmp_path / "edits").mkdir()
    (tmp_path / "edits" / "edits.jsonl").write_text('{"prompt": "x", "prediction": 1}\n')
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "bench.json").write_text("[]")
    (tmp_path / "overall.txt").write_text("one\n")
    repeated = '{"prompt": "x", "prediction": "y"}\n{"prompt": "x", "prediction": "z"}\n'
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "edits.jsonl").write_text(repeated)
    for args, sentence in [
        (["--data", str(tmp_path / "overall.txt")], "a task cannot be named 'overall'"),
        (["--data", str(tmp_path / "twice")], "line 2: an earlier line has the same prompt with another 'prediction'"),
        (["--data", str(tmp_path / "none")], f"there is no folder or file '{tmp_path / 'none'}' of prompts"),
        (["--data", str(tmp_path / "empty")], "holds prompts in none of the files"),
        (["--data", str(tmp_path / "broken")], "line 2: the field 'prompt' holds no text"),
        (["--data", str(tmp_path / "edits")], "line 1: an edit must have the texts 'prompt' and 'prediction'"),
        (["--out", str(tmp_path / "file" / "out")], "cannot be written to"),
        (["--out", ""], "--out='' is no folder; give one"),
        (["--out", str(tmp_path / "foreign"), "--resume"], "is not the result of a bench"),
        (["--out", str(tmp_path / "nowhere"), "--report-only"], "cannot be read"),
        (["--report-only", "-d", "auto"], "--drafter is not possible with --report-only, which measures nothing"),
        (["--report-only", "--prompts", "mine.jsonl"], "--prompts is not possible with --report-only"),
        (["--report-only", "--resume"], "--resume is not possible with --report-only"),
    ]:
        result = run(*args, plain="--report-only" in args)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert sentence in line


def test_without_matplotlib_nothing_is_measured(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run()
    assert result.exit_code == 2
    assert 'pip install "leapahead[bench]"' in result.stderr
    assert not (tmp_path / "out").exists()


def test_quick_is_less_where_nothing_else_is_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr(runner, "run", lambda plan, kept, **options: plans.append(plan))
    run("--quick")
    assert (plans[0].rounds, plans[0].max_new_tokens) == (1, 6)
    (name,) = (each.name for each in plans[0].configurations)
    assert name == "prompt_lookup"


def test_configurations() -> None:
    every = [each.name for each in configurations([], [])]
    assert every[:2] == ["auto", "jacobi"]  # plain is there anyway
    assert set(every) == set(drafters.ready()) - {"plain"}
    (found,) = configurations([], ["lookahead: window=7, ngram=5, start-from-pool=no"])
    assert found == Configuration("lookahead", {"window": 7, "ngram": 5, "start_from_pool": False})
    assert found.name == "lookahead(window=7, ngram=5, start_from_pool=False)"


# ------------------------------------------------------------------------------------------------ targets, in a plan


class Words:
    """A tokenizer without a chat template: a character is a token."""

    eos_token_id = None

    def __len__(self) -> int:
        return 12

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 12 for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **_: Any) -> str:
        raise ValueError


@dataclass(frozen=True)
class Other(peers.Peer):
    """A peer that enters where it is said to."""

    name: ClassVar[str] = "other"
    speed: int = 1
    there: str = peers.where("nowhere", default="")

    def version(self) -> str:
        return "other 1.0"

    def enter(self, name: str, entry: peers.Entry) -> Contender:
        if self.there:
            raise Refused("it runs no toys")
        return Timed(name, lambda turn: 1 / self.speed, ten)


class Sampler(Timed):
    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        return None if setting.temperature == 0 else "it has no such noise"


def test_what_a_target_cannot_do_is_left_out_by_name(tmp_path: Path) -> None:
    target = ToyTarget(capabilities=frozenset({"chain"}), context_length=20)
    chat = [{"role": "user", "content": "Hello"}]
    plan = Plan(
        tasks=[tasks.Task("chat", [chat, "x" * 30, "x" * 18]), tasks.Task("long", ["x" * 19])],
        configurations=[Configuration("lookahead"), Configuration("prompt_lookup")],
        peers=[Other(), Other(2, there="x")],
        temperatures=[0.0],
        rounds=1,
        max_new_tokens=8,
    )
    assert plan.conditions("now")["peers"] == {"other": "other 1.0", "other(speed=2)": "other 1.0"}
    kept = record.Record.open(tmp_path, plan.conditions("now"), resume=False)
    said: list[str] = []
    progress: list[tuple[int, int]] = []
    runner.run(
        plan,
        kept,
        say=said.append,
        progress=lambda what, done, total: progress.append((done, total)),
        load=lambda model, plan: Loaded(target, Words(), ()),
    )
    assert any("lookahead is left out" in line for line in said)
    assert any("2 of 3 prompts left out" in line for line in said)
    assert any("peer:other(speed=2) is left out: it runs no toys" in line for line in said)
    assert [(row["task"], row["drafter"], row["prompts"]) for row in kept.rows] == [
        *(("chat", "plain", 1), ("chat", "prompt_lookup", 1), ("chat", "peer:other", 1))
    ]
    assert kept.rows[2]["mismatches"] == 1  # for peers too
    told = kept.conditions["targets"]["bundled"]
    assert told["chat"] == "plain text"
    assert "needs tree" in told["refused"]["lookahead"]
    dones = [done for done, _ in progress]
    assert dones == sorted(dones)
    assert dones[-1] == progress[-1][1]
    report.write(kept.as_dict(), tmp_path)


def test_a_drafter_whose_options_do_not_fit_a_model_is_left_out_there_by_name(tmp_path: Path) -> None:
    """The others are measured: a window that is too large for a draft model is found when that is loaded."""
    draft = DraftModel.of(Loaded(ToyTarget(context_length=64), None, ()))
    plan = Plan(
        tasks=[tasks.Task("chat", ["a", "b"])],
        configurations=[
            Configuration("draft_model", {"draft": draft, "draft_window": 500}),
            Configuration("prompt_lookup"),
        ],
        temperatures=[0.0],
        rounds=1,
        max_new_tokens=8,
    )
    kept, said = record.Record.open(tmp_path, {}, resume=False), list[str]()
    runner.run(plan, kept, say=said.append, load=lambda model, plan: Loaded(ToyTarget(), Words(), ()))
    assert [row["drafter"] for row in kept.rows] == ["plain", "prompt_lookup"]
    assert len(said) == 1
    assert "is left out: draft_window=500 is too large for" in said[0]

    draft.target.info = replace(draft.target.info, context_length=65)  # another reason does not end what goes on
    runner.run(replace(plan, batches=(2,)), kept, load=lambda model, plan: Loaded(ToyTarget(), Words(), ()))
    assert [row["batch"] for row in kept.rows] == [1, 1, 2, 2]


def test_a_task_with_fewer_prompts_than_a_batch_is_left_out_there_by_name(tmp_path: Path) -> None:
    """Three texts that are decoded together are no figure of a batch of eight."""
    plan = Plan(
        tasks=[tasks.Task("few", ["a", "b", "c"]), tasks.Task("many", list("abcdefgh"))],
        configurations=[],
        batches=(3, 8),
        temperatures=[0.0],
        rounds=1,
        max_new_tokens=8,
    )
    kept, said = record.Record.open(tmp_path, plan.conditions("now"), resume=False), list[str]()
    runner.run(plan, kept, say=said.append, load=lambda model, plan: Loaded(ToyTarget(), Words(), ()))
    assert [(row["task"], row["batch"]) for row in kept.rows] == [("few", 3), ("many", 3), ("many", 8)]
    assert said == ["bundled: few: batch 8 is left out, since the task has too few prompts (3); give more"]


def test_texts_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    """The second form is measured alone at first, with a prompt that does not fit the context of the first one."""
    task = [tasks.Task("chat", ["x" * 30, "a", "bcd"])]
    small, large = Model(), Model(options={"dtype": "float32"}, spelled="large")

    def measure(models: list[Model], batches: tuple[int, ...], resume: bool) -> list[dict[str, Any]]:
        plan = Plan(
            tasks=task,
            models=models,
            configurations=[],
            batches=batches,
            temperatures=[0.0],
            rounds=1,
            max_new_tokens=8,
        )
        kept = record.Record.open(tmp_path, plan.conditions("now"), resume)
        lengths = {"": 20, "large": 100}
        targets = {name: ToyTarget(context_length=length) for name, length in lengths.items()}
        runner.run(plan, kept, load=lambda model, plan: Loaded(targets[model.spelled], Words(), ()))
        return kept.rows

    measure([small], (1,), resume=False)
    rows = measure([small, large], (1, 2), resume=True)
    assert [(row["target"], row["batch"], row["prompts"], row["mismatches"]) for row in rows] == [
        *(("bundled", 1, 2, 0), ("bundled(large)", 1, 3, 0), ("bundled", 2, 2, 0), ("bundled(large)", 2, 2, 0))
    ]


def test_a_bench_is_not_resumed_with_other_weights_of_the_same_name(tmp_path: Path) -> None:
    plan = Plan(tasks=[tasks.Task("chat", ["a"])], configurations=[], temperatures=[0.0], rounds=1, max_new_tokens=8)

    def measure(plan: Plan, sharpness: float, resume: bool) -> None:
        kept = record.Record.open(tmp_path, plan.conditions("now"), resume)
        loaded = Loaded(ToyTarget(sharpness=sharpness), Words(), ())
        runner.run(plan, kept, load=lambda model, plan: loaded)

    measure(plan, 1.0, resume=False)
    more = replace(plan, temperatures=[0.0, 1.0])
    with pytest.raises(BadParameter, match="the condition 'weights of bundled' was"):
        measure(more, 2.0, resume=True)
    measure(more, 1.0, resume=True)


def test_the_figure_shows_the_greatest_speed_up_of_any_panel() -> None:
    def row(target: str, task: str, speed: float) -> dict[str, Any]:
        speedup = {"median": speed, "low": speed, "high": speed}
        setting = {"target": target, "temperature": 0.0, "batch": 1}
        return {**setting, "task": task, "drafter": "suffix", "speedup": speedup}

    speeds = {"one": 2.0, "other": 3.0, "another": 1.1}
    found = [
        row(name, task, speed) for name in speeds for task, speed in ((record.OVERALL, 1.0), ("edits", speeds[name]))
    ]
    panels = report.speedups({"results": found}).axes
    assert {axes.get_xlim()[0] for axes in panels} == {0.0}
    assert all(axes.get_xlim()[1] > 3.0 for axes in panels)


def test_of_plain_decoding_alone_nothing_is_drawn(run: Any, tmp_path: Path, recwarn: Any) -> None:
    few = ("--data", str(tmp_path / "small"), "--rounds", "1", "--max-new-tokens", "6", "-t", "0", "-d", "plain")
    assert run(*few, "--out", str(tmp_path / "out"), plain=True).exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json", "report.md"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 round, seed 0" in text
    assert "svg" not in text
    assert not [each for each in recwarn if "matplotlib" in each.filename or "report.py" in each.filename]


def test_the_legend_of_batch_sizes_lies_beside_the_curves() -> None:
    rows = [
        {"target": "one", "temperature": 0.0, "batch": batch, "task": "edits", "drafter": name, "speedup": speedup}
        for batch in (1, 4)
        for name in ("suffix", "auto")
        for speedup in [{"median": 2.0, "low": 1.0, "high": 3.0}]
    ]
    conditions = {"rounds": 1, "cpu": "a cpu", "versions": {"leapahead": "1"}}
    figure = report.batches({"results": rows, "conditions": conditions})
    figure.canvas.draw()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert "1 round; a cpu" in figure.get_supxlabel()


def test_a_target_starts_every_pass_from_an_empty_cache() -> None:
    class Keeper(ToyTarget):
        forgotten = 0

        def forget(self) -> None:
            self.forgotten += 1

    target = Keeper()
    Ours("plain", target, None, Plain).run(PROMPTS, Setting(batch=2))
    assert target.forgotten == 1


def test_the_same_model_twice() -> None:
    with pytest.raises(BadParameter, match="the model bundled was given twice"):
        Plan(tasks=[], models=[Model(), Model()], configurations=[])


def test_a_record_keeps_a_symbolic_link_and_replaces_no_special_file(tmp_path: Path) -> None:
    (tmp_path / record.FILE).symlink_to(tmp_path / "real.json")
    record.Record.open(tmp_path, {"date": "now", "seed": 0}, resume=False)
    assert (tmp_path / record.FILE).is_symlink()
    assert "results" in json.loads((tmp_path / "real.json").read_text())
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / record.FILE)
    with pytest.raises(BadParameter, match=r"bench\.json cannot be written, because it is a device or another special"):
        record.Record.open(tmp_path / "out", {"date": "now", "seed": 0}, resume=False)


def test_a_record_that_cannot_be_rescued_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = record.Record.open(tmp_path / "out", {"date": "now", "seed": 0}, resume=False)

    def full(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(record.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(LeapaheadError, match="the last cell is in the printed table only"):
        kept.add([{"task": "a", "target": "t", "temperature": 0.0, "batch": 1, "drafter": "plain"}])
    assert kept.rows


def test_the_memory_of_all_gpus_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever the model is on; a GPU that torch does not use has no figure."""
    cuda = pytest.importorskip("torch").cuda
    assert Peak().gpu_mib() is None
    found, reset = {0: 0, 1: 3 << 20}, list[int]()
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(cuda, "max_memory_allocated", found.__getitem__)
    assert Peak().gpu_mib() == 3.0
    assert reset == [0, 1]
