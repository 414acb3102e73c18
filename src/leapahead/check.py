"""Checks exactness on the user's own model: every drafter's text against plain decoding's, token for token.

    reference   plain decoding, one sequence at a time
    compared    each drafter, in batches

The first difference between two texts is measured (`ties`) and counts as a numeric tie or as a mismatch. Both texts
then continue from the drafter's text, its differing token included, so that the rest is compared as well. On an exact
target (`TargetInfo.exact`) there are no ties: every difference is a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import Tokenizer
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.drafters.registry import DrafterClass
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.inputs import Prompt, encode
from leapahead.models.base import Target, TargetInfo
from leapahead.models.decoder import AT_START, DecoderInput
from leapahead.ties import Gap, measure

MOST_MISMATCHES = 8  # of one prompt; what follows them is not compared
GREEDY = SamplingParams()

Progress = Callable[[str, int, int], None]  # drafter, texts begun, texts in all


@dataclass(frozen=True)
class Difference:
    """A position where a drafter's text differs from plain decoding's.

    Attributes:
        prompt: index of the prompt.
        position: index of the new token.
        expected: plain decoding's token; None where its text had ended.
        got: the drafter's.
        gap, noise, tie: see `ties.Gap`.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    gap: float
    noise: float
    tie: bool


@dataclass
class DrafterReport:
    """One drafter's row.

    Attributes:
        name: the drafter's.
        refused: why the target cannot serve it, or why its text cannot be compared; the other fields are empty then.
        tokens: number of tokens compared.
        differences: see `Difference`.
        stats: of its texts, without the continuations after a difference.
    """

    name: str
    refused: str | None = None
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def mismatches(self) -> list[Difference]:
        return [difference for difference in self.differences if not difference.tie]

    @property
    def ties(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.tie]

    @property
    def largest_tie(self) -> float:
        """Largest score gap between two tokens that counted as a tie."""
        return max((abs(tie.gap) for tie in self.ties), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {"name": self.name}
        if self.refused is not None:
            return {**row, "refused": self.refused}
        return {
            **row,
            "tokens": self.tokens,
            "mismatches": len(self.mismatches),
            "ties": len(self.ties),
            "largest_tie_gap": self.largest_tie,
            "acceptance_length": round(self.stats.acceptance_length, 4),
            "nodes_per_step": round(self.stats.nodes_per_step, 3),
            "differences": [
                # JSON has no infinity: a token that was filtered out has no finite gap
                {**vars(d), "gap": _finite(d.gap), "noise": _finite(d.noise)}
                for d in self.differences
            ],
        }


@dataclass
class Report:
    """What `check` has found.

    Attributes:
        target: name of the target.
        prompts: number of prompts.
        tokens: number of tokens of plain decoding's texts.
        distinct_4_grams: distinct 4-grams divided by all 4-grams of those texts, on average; where it is low, the model
            repeats itself and acceptance lengths are higher than for ordinary text.
        drafters: a row for each drafter that was refused or is finished.
    """

    target: str
    prompts: int
    tokens: int = 0
    distinct_4_grams: float = 0.0
    drafters: list[DrafterReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(row.mismatches for row in self.drafters)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "target": self.target,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "distinct_4_grams": round(self.distinct_4_grams, 4),
            "drafters": [row.as_dict() for row in self.drafters],
        }


def check(
    target: Target,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    drafters: Sequence[str | DrafterClass] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    sampling: SamplingParams = GREEDY,
    eos_token_ids: Sequence[int] = (),
    batch: int = 4,
    progress: Progress = lambda what, done, total: None,
    finished: Callable[[Report], None] = lambda report: None,
    references: References | None = None,
) -> Report:
    """Decodes every prompt plainly and with every drafter, and compares the texts.

    Args:
        target: the model.
        tokenizer: for text prompts.
        prompts: text, token ids or chat messages.
        drafters: names or classes; None for all registered drafters that need nothing but a target. Of those, the ones
            that the target cannot serve are reported as refused.
        options: of the drafters; each is given those that it has.
        max_new_tokens: of each text.
        sampling: greedy by default.
        eos_token_ids: end a text.
        batch: number of sequences that a drafter decodes together.
        progress: called before every text.
        finished: called with the report so far, before the first drafter and after each; what it has seen can be shown
            when a check is interrupted.
        references: plain decoding's texts, where they are known of an earlier check with the same target, sampling and
            ends of texts; those that are missing are added.

    Raises:
        ContextOverflow: a prompt that leaves no room in the target's context.
        BadParameter: no prompts, an unknown drafter, an option that none of them has, or a datastore that was built
            with another tokenizer.
        Refused: a drafter that was named and that the target cannot serve.
    """
    if not prompts:
        raise BadParameter("there are no prompts to check; give at least one")
    if batch < 1:
        raise BadParameter(f"batch={batch} is not possible: it must be at least 1")
    jobs = _jobs(prompts, tokenizer, target.info)
    engine = Engine(target, tokenizer=tokenizer, max_batch=batch)
    rows = _rows(engine, drafters, options or {}, sampling)
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    total = len(jobs) * (1 + sum(chosen is not None for _, chosen in rows))
    checker = _Checker(engine, sampling, stop, progress, total, {} if references is None else references)
    texts = [checker.reference(job) for job in jobs]
    report = Report(target.info.name, len(prompts), sum(map(len, texts)), distinct(texts))
    finished(report)
    for row, chosen in rows:
        if chosen is not None:
            checker.compare(jobs, row, chosen)
        report.drafters.append(row)
        finished(report)
    return report


def refuse(
    drafters: Sequence[str | DrafterClass] | None, options: Mapping[str, Any], sampling: SamplingParams = GREEDY
) -> None:
    """Refuses what `check` refuses for every target, before one is loaded. Arguments and errors as of `check`."""
    for drafter, given in _given(drafters, options):
        made = registry.make(drafter, **given)
        if drafters is not None:
            _comparable(made, sampling)


def distinct(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Distinct n-grams divided by all n-grams, averaged over the texts that have any; 1 means no repetition."""
    shares = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else 1.0


@dataclass(frozen=True)
class _Job:
    """A text to decode.

    Attributes:
        prompt: index of the prompt.
        tokens: the prompt.
        text: the drafter's text up to and including a difference; empty before the first one.
    """

    prompt: int
    tokens: tuple[int, ...]
    text: tuple[int, ...] = ()

    def given(self, info: TargetInfo) -> tuple[list[int], DecoderInput]:
        """What a target with this `info` is given to go on with the text."""
        if info.decoder is None:
            return [*self.tokens, *self.text], AT_START
        return list(self.tokens), DecoderInput((*info.decoder.start, *self.text))


def _jobs(prompts: Sequence[Prompt], tokenizer: Tokenizer | None, info: TargetInfo) -> list[_Job]:
    """The prompts as token ids.

    Raises:
        BadParameter, ContextOverflow: one is no prompt, or does not fit the context; the message has its index.
    """
    found = []
    for index, prompt in enumerate(prompts):
        try:
            found.append(_Job(index, tuple(encode(prompt, tokenizer, info))))
        except (BadParameter, ContextOverflow) as error:
            raise type(error)(f"prompt {index}, numbered from 0: {error}") from error
    return found


References = dict[_Job, list[int]]  # what is decoded -> plain decoding's text


class _Checker:
    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        stop: StopParams,
        progress: Progress,
        total: int,
        references: References,
    ) -> None:
        self.engine, self.sampling, self.stop = engine, sampling, stop
        self._alone = Engine(engine.target, max_batch=1)
        self._plain = self._alone.drafter(Plain)
        self._progress, self._total, self._begun = progress, total, 0
        self._references = references  # drafters that differ at the same tie share the rest

    def reference(self, job: _Job) -> list[int]:
        """Plain decoding's text."""
        if job not in self._references:
            self._references[job] = self._texts(self._alone, [job], self._plain)[0][0]
        return self._references[job]

    def compare(self, jobs: list[_Job], row: DrafterReport, drafter: Drafter) -> None:
        """Fills in the drafter's row."""
        while jobs:
            further = []
            for job, (tokens, stats) in zip(jobs, self._texts(self.engine, jobs, drafter), strict=True):
                if not job.text:
                    row.stats += stats
                expected = self.reference(job)
                at = next(
                    (i for i, (e, t) in enumerate(zip(expected, tokens, strict=False)) if e != t),
                    min(len(expected), len(tokens)),
                )
                row.tokens += min(at + 1, len(tokens))
                if at == len(expected) == len(tokens):
                    continue
                row.differences.append(self._judge(job, at, expected, tokens))
                goes_on = at + 1 < len(tokens)  # else the context may be full, too
                if goes_on and sum(m.prompt == job.prompt for m in row.mismatches) < MOST_MISMATCHES:
                    further.append(replace(job, text=(*job.text, *tokens[: at + 1])))
            jobs = further

    def _judge(self, job: _Job, at: int, expected: list[int], tokens: list[int]) -> Difference:
        position = len(job.text) + at
        if at >= min(len(expected), len(tokens)):  # one text ended where the other, with the same tokens, did not
            pair = (expected[at] if at < len(expected) else None, tokens[at] if at < len(tokens) else None)
            return Difference(job.prompt, position, *pair, float("inf"), 0.0, False)
        pair = (expected[at], tokens[at])
        if self.engine.target.info.exact:  # nothing rounds differently, so there are no ties
            return Difference(job.prompt, position, *pair, float("inf"), 0.0, False)
        target, batch = self.engine.target, self.engine.max_batch
        before, text = [*job.tokens, *job.text], expected[:at]
        if target.info.decoder is not None:
            before, text = list(job.tokens), [*job.text, *text]
        found: Gap = measure(target, before, text, pair, self.sampling, batch)
        return Difference(job.prompt, position, *pair, gap=found.gap, noise=found.noise, tie=found.tie)

    def _texts(self, engine: Engine, jobs: Sequence[_Job], drafter: Drafter) -> list[tuple[list[int], Stats]]:
        """Each job's new tokens and statistics."""
        handles = []
        for job in jobs:
            most = self.stop.max_new_tokens - len(job.text)
            left = StopParams(max_new_tokens=most, eos_token_ids=self.stop.eos_token_ids)
            prompt, begin = job.given(engine.target.info)
            handles.append(engine.submit(Request(prompt, drafter, sampling=self.sampling, stop=left, begin=begin)))
        try:
            for job, handle in zip(jobs, handles, strict=True):
                if not job.text:
                    self._progress(drafter.name, self._begun, self._total)
                    self._begun += 1
                engine.run([handle])
        finally:
            engine.cancel(*handles)
        return [(handle.tokens, handle.stats) for handle in handles]


def _rows(
    engine: Engine, drafters: Sequence[str | DrafterClass] | None, options: Mapping[str, Any], sampling: SamplingParams
) -> list[tuple[DrafterReport, Drafter | None]]:
    """An empty row for each drafter, and the drafter unless it is refused."""
    rows: list[tuple[DrafterReport, Drafter | None]] = []
    for drafter, given in _given(drafters, options):
        row, chosen = DrafterReport(drafter if isinstance(drafter, str) else drafter.name), None
        try:
            chosen = _comparable(engine.drafter(drafter, **given), sampling)
        except Refused as error:
            if drafters is not None:
                raise
            row.refused = str(error)
        rows.append((row, chosen))
    return rows


def _given(
    drafters: Sequence[str | DrafterClass] | None, options: Mapping[str, Any]
) -> list[tuple[str | DrafterClass, dict[str, Any]]]:
    """The drafters to check, each with those of the options that it has."""
    chosen = list(dict.fromkeys(registry.ready() if drafters is None else drafters))
    known = {each: registry.options(registry.load(each) if isinstance(each, str) else each) for each in chosen}
    every = {option for each in known.values() for option in each}
    if unknown := [option for option in options if option not in every]:
        raise BadParameter(
            f"none of these drafters has an option {unknown[0]!r}; they have {', '.join(sorted(every)) or 'none'}"
        )
    return [(each, {name: value for name, value in options.items() if name in known[each]}) for each in chosen]


def _comparable(drafter: Drafter, sampling: SamplingParams) -> Drafter:
    """The drafter, unless its sampled text differs from plain decoding's by design."""
    if sampling.temperature > 0 and not drafter.same_text:
        raise Refused(f"drafter {drafter.name!r} is exact in distribution, not in text; check it at temperature 0")
    return drafter


def _finite(value: float) -> float | None:
    """The value, or None for what JSON cannot represent."""
    return value if abs(value) != float("inf") and value == value else None
