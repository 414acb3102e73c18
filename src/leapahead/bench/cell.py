"""One cell of a bench: all contenders take turns on the same prompts, and every text is compared with plain decoding's.

    warm-up        every contender once on the first group of prompts; its times are not kept
    round 1 ..     for each group: every contender once, in a random order for this group and round

A group is one prompt, or of a batch size of n, 4 n prompts or more: a text that ends is followed by the next one, as
where requests wait. The texts of a batch differ in length, see `Setting.limit`.

The speed of a machine drifts, so a ratio is formed within a round: tokens per second of the contender over all prompts,
divided by those of plain decoding. The speed-up is the median over the rounds. Its interval is a percentile bootstrap
over rounds and groups of prompts. From a single prompt there is no interval, because nothing is known of how much other
prompts differ from it; from a single batch of several, it is over the rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from leapahead.bench.contender import Contender, Pass, Setting, Text, aligned
from leapahead.bench.figures import Measured, row
from leapahead.bench.peak_memory import Peak
from leapahead.core.text import Tokenizer
from leapahead.models.base import Target
from leapahead.ties import measure

PLAIN = "plain"
BATCHES = 4  # of a group

Judge = Callable[[list[int], list[int], list[int], Setting], bool]  # prompt, expected, got -> whether it is a tie
T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """What is measured of one target in a cell.

    Attributes:
        contenders: plain decoding first, with which the others are compared.
        judge: whether a difference from plain decoding's text is a numeric tie.
        setting: of the cell, with the end tokens of this target.
        tokenizer: for contenders that give only text.
        expected: prompt -> plain decoding's tokens, decoded alone, where they are known of another batch size; those
            that are missing are added.
    """

    contenders: Sequence[Contender]
    judge: Judge
    setting: Setting
    tokenizer: Tokenizer | None = None
    expected: dict[int, list[int]] = field(default_factory=dict)


def order(names: Sequence[T], seed: int, turn: int, group: int) -> list[T]:
    """The order in which the contenders run on a group in a round."""
    shuffled = list(names)
    random.Random(f"{seed}, round {turn}, group {group}").shuffle(shuffled)
    return shuffled


def measure_cell(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    setting: Setting,
    *,
    rounds: int,
    seed: int,
    judge: Judge,
    tokenizer: Tokenizer | None = None,
    progress: Callable[[str], None] = lambda what: None,
    expected: dict[int, list[int]] | None = None,
) -> list[dict[str, Any]]:
    """A row for each contender of one target, see `measure_sides`."""
    side = Side(contenders, judge, setting, tokenizer, {} if expected is None else expected)
    (rows,) = measure_sides([side], prompts, rounds=rounds, seed=seed, progress=progress)
    return rows


def measure_sides(
    sides: Sequence[Side],
    prompts: Sequence[list[int]],
    *,
    rounds: int,
    seed: int,
    progress: Callable[[str], None] = lambda what: None,
) -> list[list[dict[str, Any]]]:
    """For each side a row for each of its contenders, see `figures.row`. All contenders of all sides take turns.

    Args:
        sides: of one target each; several are forms of one model, which read the same prompts.
        prompts: token ids of each.
        rounds: measured rounds, after the warm-up.
        seed: of the order.
        progress: called with a contender's name after each of its passes; there are `passes` of each.
    """
    turns = [_Turns(side, prompts) for side in sides]
    everyone = [(each, name) for each in turns for name in each.by_name]
    for each in turns:
        each.decode_alone()
    groups = groups_of(prompts, sides[0].setting.batch)
    for turn in range(rounds + 1):
        for each, name in everyone:
            each.by_name[name].begin_round()
        for group, members in enumerate(groups if turn else groups[:1]):
            done: dict[tuple[_Turns, str], Pass] = {}
            for each, name in order(everyone, seed, turn, group):
                done[each, name] = each.run(name, members, turn == 1)
                progress(name)
            for each in turns:
                each.compare(members, {name: done[each, name] for name in each.by_name}, turn)
    return [each.rows(len(groups), seed) for each in turns]


class _Turns:
    """The contenders of a side with their samples.

    Attributes:
        by_name: the contenders.
    """

    def __init__(self, side: Side, prompts: Sequence[list[int]]) -> None:
        self._prompts, self._setting = prompts, side.setting
        self.by_name = {contender.name: contender for contender in side.contenders}
        self._plain = side.contenders[0]
        self._found = {name: Measured(lossy=set() if each.lossy else None) for name, each in self.by_name.items()}
        self._comparison = _Comparison(prompts, side.setting, side.judge, side.tokenizer, side.expected)

    def decode_alone(self) -> None:
        """Decodes plainly what plain decoding's texts of a batch are compared with."""
        expected = self._comparison.expected
        for index in range(len(self._prompts)) if self._setting.batch > 1 else ():
            if index not in expected:
                text = self._plain.run([self._prompts[index]], replace(self._setting, batch=1)).texts[0]
                self._found[self._plain.name].count([text])
                expected[index] = text.tokens

    def run(self, name: str, members: Sequence[int], with_memory: bool) -> Pass:
        """A contender's pass over a group of prompts."""
        given = [self._prompts[index] for index in members]
        peak = Peak() if with_memory else None
        done = self.by_name[name].run(given, self._setting)
        for prompt, text in zip(given, done.texts, strict=True):
            text.cut(self._setting.limit(prompt))
        if peak is not None:
            self._found[name].reach(done.memory or peak.mib(), peak.gpu_mib())
        return done

    def compare(self, members: Sequence[int], done: dict[str, Pass], turn: int) -> None:
        """Compares the texts of a group with plain decoding's, and keeps the times of a measured round."""
        for index, text in zip(members, done[self._plain.name].texts, strict=True):
            self._comparison.expected.setdefault(index, text.tokens)
        for name, each in done.items():
            mine = self._found[name]
            for index, text in zip(members, each.texts, strict=True):
                self._comparison.compare(index, text, self.by_name[name], mine)
            mine.count(each.texts)
            if turn:
                mine.keep(turn, each)

    def rows(self, groups: int, seed: int) -> list[dict[str, Any]]:
        """The figures of every contender."""
        plain = self._found[self._plain.name]
        return [row(name, self._found[name], plain, self._setting, groups, seed) for name in self.by_name]


class _Comparison:
    """Compares texts with plain decoding's.

    Attributes:
        expected: prompt -> plain decoding's tokens, decoded alone.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        setting: Setting,
        judge: Judge,
        tokenizer: Tokenizer | None,
        expected: dict[int, list[int]],
    ) -> None:
        self._prompts, self._setting, self._judge, self._tokenizer = prompts, setting, judge, tokenizer
        self.expected = expected
        self._known: dict[tuple[int, tuple[int, ...]], bool] = {}  # differing texts that were judged before

    def compare(self, index: int, text: Text, contender: Contender, measured: Measured) -> None:
        """Records whether the text of a prompt differs; makes its tokens where the contender gave only text."""
        setting = self._setting
        limit = setting.limit(self._prompts[index])
        expected = self.expected[index][:limit]
        if text.written is not None:
            assert self._tokenizer is not None  # it was loaded with the model that the text came from
            text.tokens = aligned(text.written, expected, self._tokenizer, setting)[:limit]
        if text.tokens == expected or (setting.temperature and not contender.same_text):
            return
        if measured.lossy is not None:
            measured.lossy.add(index)
            return
        key = (index, tuple(text.tokens))
        if key not in self._known:
            self._known[key] = self._judge(self._prompts[index], expected, text.tokens, setting)
        measured.differing[index] = measured.differing.get(index, True) and self._known[key]


def passes(prompts: int, batch: int, rounds: int) -> int:
    """Number of passes of each contender in a cell."""
    return 1 + rounds * len(groups_of(range(prompts), batch))


def groups_of(prompts: Sequence[Any], batch: int) -> list[range]:
    """Indices of the prompts of each group. A rest of less than a batch is decoded with the group before it."""
    size, count = 1 if batch == 1 else BATCHES * batch, len(prompts)
    starts = list(range(0, max(1, count - batch + 1), size))
    return [range(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


def tie_on(target: Target) -> Judge:
    """Judges texts by their first difference. What follows a tie is not compared; `check` does that.

    On an exact target there are no ties.
    """

    def judge(prompt: list[int], expected: list[int], got: list[int], setting: Setting) -> bool:
        at = next((i for i, (e, t) in enumerate(zip(expected, got, strict=False)) if e != t), None)
        if at is None or target.info.exact:  # one text ended where the other, with the same tokens, did not
            return False
        what = (target, prompt, expected[:at], (expected[at], got[at]), setting.params, setting.batch)
        return measure(*what, thorough=False).tie or measure(*what).tie  # the cheap measurement first

    return judge
