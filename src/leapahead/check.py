"""The promise, tested on the user's own model: every drafter's text against plain decoding's, token for token.

    reference   plain decoding, one sequence at a time
    the other   a drafter, in batches

At a first difference the position is measured (`ties`). Then both go on from the drafter's text, its token included, so
that what follows is compared again and tails that parted long ago are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leapahead import drafters as registry
from leapahead.api import Prompt, encode
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import Tokenizer
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Target
from leapahead.ties import Gap, measure

ENOUGH = 8  # mismatches of one prompt; what follows them is not compared
GREEDY = SamplingParams()

Progress = Callable[[str, int, int], None]  # what is being done, texts done, texts in all


@dataclass(frozen=True)
class Difference:
    """Where a drafter's text parted from plain decoding's.

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
        refused: why the target cannot serve it; then nothing else counts.
        tokens: how many were compared.
        stats: of its texts, continuations after a difference left out.
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
        """Largest gap between two tokens that counted as a tie."""
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
                # infinity is no JSON: a token that was filtered out has no finite gap
                {**vars(d), "gap": _finite(d.gap), "noise": _finite(d.noise)}
                for d in self.differences
            ],
        }


@dataclass
class Report:
    """What `check` found.

    Attributes:
        target: its name.
        prompts: how many.
        tokens: of plain decoding's texts.
        distinct_4_grams: distinct over all 4-grams of those texts, on average; low means that the model loops, and that
            acceptance lengths flatter.
        drafters: a row each.
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
    drafters: Sequence[str | type[Drafter]] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    sampling: SamplingParams = GREEDY,
    eos_token_ids: Sequence[int] = (),
    batch: int = 4,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Decodes every prompt plainly and with every drafter, and compares.

    Args:
        target: the model.
        tokenizer: for text prompts.
        prompts: text, token ids or chat messages.
        drafters: names or classes; None for all that are registered, of which those that the target cannot serve are
            reported as refused.
        options: for the drafters; each is given those that it has.
        max_new_tokens: of each text.
        sampling: greedy by default.
        eos_token_ids: end a text.
        batch: how many sequences a drafter decodes together.
        progress: called before every text.

    Raises:
        BadParameter: no prompts, an unknown drafter, an option that none of them has, or a datastore that was built
            with another tokenizer.
        Refused: a drafter that was named and that the target cannot serve.
    """
    if not prompts:
        raise BadParameter("there are no prompts to check")
    if batch < 1:
        raise BadParameter(f"batch={batch} is not possible: it must be at least 1")
    encoded = [encode(prompt, tokenizer, target) for prompt in prompts]
    factories = _factories(drafters, options or {})
    report = Report(target.name, len(prompts))
    allowed: list[tuple[DrafterReport, Callable[[], Drafter]]] = []
    for name, factory in factories.items():
        row = DrafterReport(name)
        try:
            first = factory()
            first.fits(target, tokenizer)
            if sampling.temperature > 0 and not first.same_text:
                raise Refused(f"drafter {name!r} is exact in distribution, not in text, so there is nothing to compare")
            allowed.append((row, factory))
        except Refused as error:
            if drafters is not None:
                raise
            row.refused = str(error)
        report.drafters.append(row)
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    total = len(encoded) * (1 + len(allowed))
    checker = _Checker(target, sampling, stop, batch, progress, total)
    jobs = [_Job(index, tokens, 0) for index, tokens in enumerate(encoded)]
    texts = [checker.reference(job) for job in jobs]
    report.tokens = sum(len(text) for text in texts)
    report.distinct_4_grams = distinct(texts)
    for row, factory in allowed:
        checker.compare(jobs, row, factory)
    return report


def distinct(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Distinct over all n-grams, averaged over the texts that have one; 1 is no repetition at all."""
    shares = []
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else 1.0


@dataclass(frozen=True)
class _Job:
    """A text to decode: a prompt, or the drafter's own text up to and including a difference."""

    prompt: int
    tokens: list[int]
    done: int  # new tokens of the prompt's text that are already in `tokens`


class _Checker:
    def __init__(
        self, target: Target, sampling: SamplingParams, stop: StopParams, batch: int, progress: Progress, total: int
    ) -> None:
        self.target, self.sampling, self.stop, self.batch = target, sampling, stop, batch
        self._progress, self._total, self._begun = progress, total, 0
        self._references: dict[tuple[int, ...], list[int]] = {}  # drafters that part at a tie share what follows

    def reference(self, job: _Job) -> list[int]:
        """Plain decoding's text."""
        key = (job.done, *job.tokens)
        if key not in self._references:
            self._references[key] = self._texts([job], Plain, 1)[0][0]
        return self._references[key]

    def compare(self, jobs: list[_Job], row: DrafterReport, factory: Callable[[], Drafter]) -> None:
        """Fills in the drafter's row."""
        while jobs:
            further = []
            for job, (tokens, stats) in zip(jobs, self._texts(jobs, factory, self.batch), strict=True):
                if job.done == 0:
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
                done = job.done + at + 1
                ended = at >= len(tokens) or tokens[at] in self.stop.eos_token_ids or done >= self.stop.max_new_tokens
                if not ended and sum(m.prompt == job.prompt for m in row.mismatches) < ENOUGH:
                    further.append(_Job(job.prompt, job.tokens + tokens[: at + 1], done))
            jobs = further

    def _judge(self, job: _Job, at: int, expected: list[int], tokens: list[int]) -> Difference:
        if at >= min(len(expected), len(tokens)):  # one ended where the other, with the same tokens, did not
            pair = (expected[at] if at < len(expected) else None, tokens[at] if at < len(tokens) else None)
            return Difference(job.prompt, job.done + at, *pair, float("inf"), 0.0, False)
        found: Gap = measure(
            self.target, job.tokens, expected[:at], (expected[at], tokens[at]), self.sampling, self.batch
        )
        return Difference(
            job.prompt, job.done + at, expected[at], tokens[at], gap=found.gap, noise=found.noise, tie=found.tie
        )

    def _texts(self, jobs: Sequence[_Job], factory: Callable[[], Drafter], batch: int) -> list[tuple[list[int], Stats]]:
        """Each job's new tokens and what they cost, at most `batch` at once."""
        waiting, running = deque(enumerate(jobs)), list[Generation]()
        owner: dict[Generation, int] = {}
        texts: list[tuple[list[int], Stats]] = [([], Stats()) for _ in jobs]

        def join() -> None:
            index, job = waiting.popleft()
            if job.done == 0:
                self._progress(factory().name, self._begun, self._total)
                self._begun += 1
            left = StopParams(max_new_tokens=self.stop.max_new_tokens - job.done, eos_token_ids=self.stop.eos_token_ids)
            stats = texts[index][1]
            generation = Generation.begin(self.target, job.tokens, factory(), self.sampling, left, stats=stats)
            running.append(generation)
            owner[generation] = index

        try:
            while waiting and len(running) < batch:
                join()
            for generation, step in decode(self.target, running):
                texts[owner[generation]][0].extend(step.tokens)
                if generation.finished and waiting:
                    join()
        finally:
            for generation in running:
                generation.session.close()
        return texts


def _factories(
    drafters: Sequence[str | type[Drafter]] | None, options: Mapping[str, Any]
) -> dict[str, Callable[[], Drafter]]:
    """By name; every drafter is given those of the options that it has."""
    classes = [
        registry.load(d) if isinstance(d, str) else d for d in (registry.ready() if drafters is None else drafters)
    ]
    known = {option for each in classes for option in registry.options(each)}
    if unknown := [option for option in options if option not in known]:
        raise BadParameter(
            f"no drafter here has an option {unknown[0]!r}; they have {', '.join(sorted(known)) or 'none'}"
        )
    return {
        each.name: registry.factory(each, **{k: v for k, v in options.items() if k in registry.options(each)})
        for each in classes
    }


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None
