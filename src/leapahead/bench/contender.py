"""The contenders of a bench: the interface, and this package's drafters. Each peer has a class of its own.

A contender reports its texts and its times; the bench computes all rates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from zlib import crc32

from leapahead.core.relaxed import Relaxed
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import REPLACEMENT, Tokenizer
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.registry import DrafterClass
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import KeepsPrefixes, Target
from leapahead.planner.compiled import acceptance_table
from leapahead.planner.draft import Step
from leapahead.planner.profile import LatencyProfiles
from leapahead.results import Writer


@dataclass(frozen=True)
class Setting:
    """The settings of a cell, equal for all contenders.

    Attributes:
        temperature: 0 is greedy.
        batch: number of texts decoded together.
        max_new_tokens: of a text, at most; see `limit`.
        eos_token_ids: end a text.
        seed: of the sampling, the same for every text.
        predictions: by the tokens of a prompt, what its text is expected to be. Of the peers, vllm-leapahead
            alone is told.
    """

    temperature: float = 0.0
    batch: int = 1
    max_new_tokens: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    predictions: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)

    def limit(self, prompt: Sequence[int]) -> int:
        """New tokens of this prompt's text, at most.

        In batches it is a number from half of `max_new_tokens` on, which depends on the prompt only. Texts of equal
        length would all end in the same step of plain decoding, as they do nowhere else, and never leave a batch half
        empty.
        """
        if self.batch == 1:
            return self.max_new_tokens
        least = (self.max_new_tokens + 1) // 2
        return least + crc32(",".join(map(str, prompt)).encode()) % (self.max_new_tokens - least + 1)


@dataclass
class Text:
    """One continuation.

    Attributes:
        tokens: the new tokens.
        first_token: seconds from the beginning of its prefill to its first new token.
        stats: its counters; None from a contender that does not report any.
        timed: number of tokens that were made in `Pass.seconds`; None for all of them. The prefill of peers yields the
            first token, that of this package's drafters yields none, unless a step reads the prompt, too; and some
            peers write more than they were asked for.
        written: the text, from a contender that gives no tokens; `aligned` makes tokens of it.
    """

    tokens: list[int] = field(default_factory=list)
    first_token: float = 0.0
    stats: Stats | None = None
    timed: int | None = None
    written: str | None = None

    def cut(self, limit: int) -> None:
        """Drops what a contender wrote beyond the limit, because it cannot be given one for each text of a batch."""
        dropped = max(0, len(self.tokens) - limit)
        self.tokens = self.tokens[:limit]
        if self.timed is not None:
            self.timed = min(max(0, self.timed - dropped), limit)


@dataclass
class Pass:
    """The texts of some prompts, and the time that they took.

    Attributes:
        texts: in the order of the prompts.
        seconds: wall clock without the prefill: steps, drafting, detokenising, bookkeeping.
        prefill: seconds of the prefill.
        detokenise: the part of `seconds` in which tokens were turned into text.
        memory: peak memory in MiB, of a contender that runs in a process of its own.
    """

    texts: list[Text]
    seconds: float
    prefill: float = 0.0
    detokenise: float = 0.0
    memory: float | None = None

    def add(self, other: Pass) -> None:
        """Puts the texts of another one behind these, and its times on top."""
        self.texts += other.texts
        self.seconds += other.seconds
        self.prefill += other.prefill
        self.detokenise += other.detokenise
        self.memory = max(filter(None, (self.memory, other.memory)), default=None)


class Contender(ABC):
    """Something that continues prompts, measured against plain decoding.

    Attributes:
        name: in tables; of a peer `peer:NAME`.
        same_text: false where sampled texts are another sample of the same distribution and cannot be compared.
        lossy: the relaxed rule whose texts may differ; "" where they must not.
    """

    name: str
    same_text: bool = True
    lossy: str = ""

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        """Continues all prompts, `setting.batch` of them at once, from an empty cache."""

    def begin_round(self) -> None:  # noqa: B027 -- most keep nothing between texts
        """Called before every round: drops what is kept of earlier texts, since a round repeats the prompts."""

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        """Why it cannot run such a cell; None if it can."""
        return None

    def close(self) -> None:  # noqa: B027 -- most keep nothing
        """Releases what it holds, such as a process."""


def aligned(written: str, expected: Sequence[int], tokenizer: Tokenizer, setting: Setting) -> list[int]:
    """The tokens of a contender's text: plain decoding's own tokens as far as the two texts agree.

    A text can be tokenised in several ways, so encoding it again would report differences where there are none.

    Args:
        written: the contender's text. Where the length limit ended `expected`, text beyond it does not count.
        expected: plain decoding's tokens.
        tokenizer: of both.
        setting: of both.
    """

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    whole = text(expected)
    ended = bool(expected) and expected[-1] in setting.eos_token_ids
    if written == whole or (not ended and written.startswith(whole.rstrip(REPLACEMENT))):  # an incomplete character
        return list(expected)
    same = max(n for n in range(len(expected) + 1) if written.startswith(text(expected[:n])))
    rest = written[len(text(expected[:same])) :]
    return [*expected[:same], *tokenizer.encode(rest, add_special_tokens=False)]


@dataclass(frozen=True)
class Configuration:
    """A drafter with its options, under the name that the tables show."""

    drafter: str
    options: dict[str, Any] = field(default_factory=dict)
    acceptance: Relaxed | None = None

    @property
    def name(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.options.items())
        name = f"{self.drafter}({given})" if given else self.drafter
        return name if self.acceptance is None else f"{name}, {self.acceptance}"

    def as_dict(self) -> dict[str, Any]:
        """For the conditions of a bench."""
        rule = {} if self.acceptance is None else {"lossy": str(self.acceptance)}
        return {"drafter": self.drafter, **self.options, **rule}


class _First:
    """Whether the first step of a text read its prompt, too, so that its time is that of the prefill.

    Attributes:
        with_prompt: tokens that such a step committed; 0 where it read none.
    """

    def __init__(self) -> None:
        self.with_prompt, self._seen = 0, False

    def see(self, step: Step) -> None:
        """Called in every step."""
        if not self._seen and step.forward.cost.read:
            self.with_prompt = len(step.tokens)
        self._seen = True


class Ours(Contender):
    """A drafter on a target, decoded by the engine.

    Args:
        name: in tables.
        target: the model.
        tokenizer: of the target.
        drafter: name or class.
        options: of the drafter.
        latency: profiles of the target, shared by all drafters that are measured on it.
        acceptance: a relaxed rule; None for exact matching.

    Raises:
        Refused: the target cannot give what the drafter or the rule needs.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        tokenizer: Tokenizer | None,
        drafter: str | DrafterClass,
        options: dict[str, Any] | None = None,
        latency: LatencyProfiles | None = None,
        acceptance: Relaxed | None = None,
    ) -> None:
        self.name, self.target, self.tokenizer = name, target, tokenizer
        self.drafter_cache = DrafterCache()
        self._drafter, self._options = drafter, options or {}
        self._latency = latency or LatencyProfiles(target.info)
        self._acceptance = acceptance_table()
        self._engines: dict[int, Engine] = {}  # batch size -> engine
        own = self._engine(1).drafter(drafter, **self._options)
        self.same_text, self._rule = own.same_text, acceptance
        self.lossy = Request([0], own, acceptance=acceptance).lossy  # refuses what is not possible

    def begin_round(self) -> None:
        self.drafter_cache = DrafterCache()

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        engine = self._engine(setting.batch)
        drafter = engine.drafter(self._drafter, **self._options)
        engine.prepare(drafter)
        if isinstance(self.target, KeepsPrefixes):
            with self.target.lock:
                self.target.forget()
        texts, detokenise = [Text() for _ in prompts], 0.0
        began = perf_counter()
        handles, firsts = [], list[_First]()
        for tokens in prompts:
            stop = StopParams(max_new_tokens=setting.limit(tokens), eos_token_ids=setting.eos_token_ids)
            expected = setting.predictions.get(tuple(tokens), ()) if drafter.takes_prediction else ()
            given = (tokens, drafter, setting.params, stop, expected, self.drafter_cache)
            first = _First()
            firsts.append(first)
            handles.append(engine.submit(Request(*given, acceptance=self._rule, on_step=first.see)))
        owners = {
            handle: (text, Writer(self.tokenizer, (), False)) for handle, text in zip(handles, texts, strict=True)
        }
        try:
            while not all(handle.done for handle in handles):
                outputs = engine.step()
                now = perf_counter()
                for handle, output in outputs:
                    text, writer = owners[handle]
                    text.first_token = text.first_token or now - handle.opened
                    writer.piece(handle, output)
                detokenise += perf_counter() - now
        finally:
            engine.cancel(*handles)
        seconds = perf_counter() - began
        for handle, text, first in zip(handles, texts, firsts, strict=True):
            if handle.error is not None:
                raise handle.error
            text.tokens, text.stats = handle.tokens, handle.stats
            text.timed = max(1, len(text.tokens) - first.with_prompt)  # a text of one step has a speed, too
        prefill = sum(handle.stats.prefill_seconds for handle in handles)
        return Pass(texts, seconds - prefill, prefill, detokenise)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _engine(self, batch: int) -> Engine:
        """The engine for a batch size; all of a drafter's engines share what was learned of its acceptance."""
        if batch not in self._engines:
            self._engines[batch] = Engine(
                self.target,
                tokenizer=self.tokenizer,
                max_batch=batch,
                latency=self._latency,
                acceptance=self._acceptance,
            )
        return self._engines[batch]
