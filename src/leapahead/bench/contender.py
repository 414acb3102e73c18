"""What takes part in a bench: something that continues prompts. Our drafters here; a peer is a class of its own.

A contender says how long it took, and which tokens came out. It is not asked for its own rates: the bench counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from leapahead import drafters
from leapahead.core.errors import CacheFull
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import REPLACEMENT, TextStream, Tokenizer
from leapahead.drafters.base import Drafter
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Forgetful, Target


@dataclass(frozen=True)
class Setting:
    """What all contenders of a cell are given alike.

    Attributes:
        temperature: 0 is greedy.
        batch: how many texts are decoded together.
        max_new_tokens: of each text.
        eos_token_ids: end a text.
        seed: of the dice, the same for every text.
    """

    temperature: float = 0.0
    batch: int = 1
    max_new_tokens: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed)


@dataclass
class Text:
    """One continuation.

    Attributes:
        tokens: the new ones.
        first_token: seconds from its start, prefill included, to its first new token.
        stats: what it cost; None from a contender that does not tell.
        timed: how many tokens were made in `Pass.seconds`; None for all of them. The prefill of others yields a first
            token, ours none; and some write more than they were asked for.
        written: from a contender that gives text and no tokens; `aligned` makes tokens of it.
    """

    tokens: list[int] = field(default_factory=list)
    first_token: float = 0.0
    stats: Stats | None = None
    timed: int | None = None
    written: str | None = None


@dataclass
class Pass:
    """What a contender made of some prompts.

    Attributes:
        texts: in the order of the prompts.
        seconds: wall clock of everything but the prefill: drafters begun, steps, text made of tokens, bookkeeping.
        prefill: seconds of the prefill.
        detokenise: seconds, of `seconds`, in which tokens became text.
        memory: MiB at the peak, of a contender that is a process of its own.
    """

    texts: list[Text]
    seconds: float
    prefill: float = 0.0
    detokenise: float = 0.0
    memory: float | None = None


class Contender(ABC):
    """Something that continues prompts, to be measured against plain decoding.

    Attributes:
        name: in tables; of a peer `peer:NAME`.
        same_text: false where sampled texts are another draw from the same distribution, and not to be compared.
    """

    name: str
    same_text: bool = True

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        """Continues all prompts, `setting.batch` of them at once, from an empty cache."""

    def begin_round(self) -> None:  # noqa: B027 -- most remember nothing
        """Every prompt comes once in a round: what was remembered of it is forgotten before the next one."""

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        """Why it cannot take part in such a cell; None if it can."""
        return None

    def close(self) -> None:  # noqa: B027 -- most keep nothing
        """Ends what it keeps running."""


def aligned(written: str, expected: Sequence[int], tokenizer: Tokenizer, setting: Setting) -> list[int]:
    """The tokens of a text that came as text, in plain decoding's own tokens as far as the two agree.

    A text can be made of tokens in many ways, so to encode it again would find differences that are none.

    Args:
        written: a contender's text. What it has beyond an `expected` that the length ended does not count.
        expected: plain decoding's tokens.
        tokenizer: of both.
        setting: of both.
    """

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    whole = text(expected)
    ended = bool(expected) and expected[-1] in setting.eos_token_ids
    if written == whole or (not ended and written.startswith(whole.rstrip(REPLACEMENT))):  # half a character
        return list(expected)
    same = max(n for n in range(len(expected) + 1) if written.startswith(text(expected[:n])))
    rest = written[len(text(expected[:same])) :]
    return [*expected[:same], *tokenizer.encode(rest, add_special_tokens=False)]


@dataclass(frozen=True)
class Configuration:
    """A drafter with its options, under the name that the tables show."""

    drafter: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.drafter}({given})" if given else self.drafter


class Ours(Contender):
    """A drafter and a target, decoded by our loop.

    Raises:
        Refused: the target cannot give what the drafter needs.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        tokenizer: Tokenizer | None,
        drafter: str | type[Drafter],
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.target, self.tokenizer = name, target, tokenizer
        self.drafter_cache = DrafterCache()
        self.new_drafter: Callable[[], Drafter] = drafters.factory(drafter, **(options or {}))
        first = self.new_drafter()
        first.fits(target, tokenizer)
        self.same_text = first.same_text

    def begin_round(self) -> None:
        self.drafter_cache = DrafterCache()

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        if isinstance(self.target, Forgetful):
            self.target.forget()
        texts = [Text() for _ in prompts]
        found = Pass(texts, 0.0)
        stop = StopParams(max_new_tokens=setting.max_new_tokens, eos_token_ids=setting.eos_token_ids)
        waiting, running = deque(enumerate(prompts)), list[Generation]()
        writing: dict[Generation, tuple[Text, TextStream, float]] = {}

        def join() -> None:
            while waiting and len(running) < setting.batch:
                index, tokens = waiting[0]
                texts[index].stats = stats = Stats()
                start = perf_counter()
                try:
                    new = Generation.begin(
                        self.target,
                        tokens,
                        self.new_drafter(),
                        setting.params,
                        stop,
                        stats=stats,
                        drafter_cache=self.drafter_cache,
                    )
                except CacheFull:
                    if not running:
                        raise
                    return  # it joins when another has left
                finally:
                    found.prefill += perf_counter() - start
                waiting.popleft()
                running.append(new)
                writing[new] = texts[index], TextStream(self.tokenizer), start

        began = perf_counter()
        try:
            join()
            for generation, step in decode(self.target, running):
                text, stream, start = writing[generation]
                now = perf_counter()
                text.first_token = text.first_token or now - start
                text.tokens += step.tokens
                for index, token in enumerate(step.tokens):
                    stream.add(token, index < step.verdict.accepted)
                _ = stream.finish(None) if generation.finished else stream.take()
                found.detokenise += perf_counter() - now
                if generation.finished:
                    join()
        finally:
            for generation in running:  # closing twice is harmless
                generation.close()
        found.seconds = perf_counter() - began - found.prefill
        return found
