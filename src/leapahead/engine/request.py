"""What the engine takes, and the handle by which a request is followed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import ReferenceType

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import check_token_ids, flag, is_whole, whole
from leapahead.core.relaxed import Relaxed, rule
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import Detokenizer
from leapahead.drafters.base import Drafter
from leapahead.engine.output import Output, TokenLogprobs
from leapahead.models.base import LOGITS, Capture, TargetInfo, require
from leapahead.models.choices import Choices
from leapahead.models.decoder import AT_START, DecoderInput
from leapahead.models.prompt_entries import PromptEntries
from leapahead.planner.draft import Proposal, SectionStore, Step

MAX_LOGPROBS = 2**18  # all of the largest vocabularies
SHORT = 16  # new tokens; the captured rows of a prompt cost more than they bring to a shorter text
GREEDY, UNTIL_FULL = SamplingParams(), StopParams()


@dataclass(frozen=True, eq=False)
class Request:
    """One text to be decoded.

    Attributes:
        tokens: the prompt's token ids.
        drafter: from `Engine.drafter`.
        sampling: how the target chooses.
        stop: when the text ends.
        prediction: token ids that the user expects the text to consist of.
        drafter_cache: what drafters keep from one text to the next; None to keep nothing.
        logprobs: number of likeliest alternatives to report beside the log-probability of each token; None for no
            log-probabilities, 0 for those of the chosen tokens alone.
        stream: whether somebody reads the outputs one by one. Such a request is not stepped while it holds `ahead`
            unread outputs.
        ahead: greatest number of unread outputs of a streamed request.
        owner: requests of different owners never share the cache entries of a prompt.
        begin: what the decoder of an encoder-decoder model begins with, or entries of a prompt that was read elsewhere,
            which no other request shares; usually the default.
        as_configured: whether what a model says of its texts (`TargetInfo.decoder`, `suppressed`) is applied.
        acceptance: a relaxed rule, which makes the text lossy; None for exact matching, or for the drafter's own rule.
        on_choices: called in every step before the commit, with what went through the target and what it chose.
        on_step: called in every step after the commit.
    """

    tokens: Sequence[int]
    drafter: Drafter
    sampling: SamplingParams = GREEDY
    stop: StopParams = UNTIL_FULL
    prediction: Sequence[int] = ()
    drafter_cache: SectionStore | None = None
    logprobs: int | None = None
    stream: bool = False
    ahead: int = 1
    owner: str = ""
    begin: DecoderInput | PromptEntries = AT_START
    as_configured: bool = True
    acceptance: Relaxed | None = None
    on_choices: Callable[[Proposal, Choices], None] | None = None
    on_step: Callable[[Step], None] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.drafter, Drafter) and hasattr(self.drafter, "host")):  # unattached, it has no host
            raise BadParameter(
                f"drafter={self.drafter!r} is not possible: it must be a drafter, which Engine.drafter gives"
            )
        check_token_ids("tokens", self.tokens)
        check_token_ids("prediction", self.prediction)
        for name in ("stream", "as_configured"):
            flag(name, getattr(self, name))
        whole("ahead", self.ahead, least=1)
        if self.logprobs is not None and not (is_whole(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise BadParameter(
                f"logprobs={self.logprobs!r} is not possible: give None, or a whole number from 0 to {MAX_LOGPROBS}"
            )
        if self.acceptance is not None:
            object.__setattr__(self, "acceptance", rule(self.acceptance))
        if self.acceptance is not None:
            if not self.drafter.same_text:
                raise BadParameter(
                    f"{self.acceptance.name} is not possible with the drafter {self.drafter.name!r}, which has an "
                    "acceptance rule of its own; use another drafter"
                )
            self._require_logits(f"the rule {self.acceptance.name!r}", "leave it out")
        if self.logprobs is not None:
            self._require_logits(f"logprobs={self.logprobs}", "leave it out")

    def _require_logits(self, what: str, remedy: str) -> None:
        require(self.drafter.host.info, frozenset({LOGITS}), what, remedy)

    def sampled(self, params: SamplingParams, info: TargetInfo) -> Request:
        """The request with these parameters, and what the model says of its texts."""
        if info.decoder is not None and self.as_configured and isinstance(self.begin, DecoderInput):
            given = len(self.begin.text or info.decoder.start)
            params = info.decoder.applied(params, given, self.stop.max_new_tokens)
        if info.suppressed and self.as_configured:
            params = replace(params, bad_words=(*params.bad_words, *((token,) for token in info.suppressed)))
        return replace(self, sampling=params)

    @property
    def longest(self) -> int:
        """Tokens of its prompt and of the longest text."""
        return len(self.tokens) + self.stop.max_new_tokens

    def prompt_capture(self) -> Capture:
        """What its drafter captures of its prompt."""
        capture = self.drafter.capture_of(self.tokens, self.owner)
        return capture if self.stop.max_new_tokens > SHORT else replace(capture, top_k=0)

    @property
    def lossy(self) -> str:
        """The relaxed rule, as it was given; "" where the text is exact."""
        return "" if self.acceptance is None else str(self.acceptance)


@dataclass(eq=False)
class Handle:
    """A request in the engine.

    Attributes:
        request: as it was submitted.
        tokens: the new token ids so far.
        drafted: for each of `tokens`, whether it had been drafted.
        logprobs: for each of `tokens`, where they were asked for.
        stats: counters and seconds of the request.
        finish_reason: "stop" or "length" once the text is complete; "cancelled" after `Engine.cancel`; else None.
        stop_reason: see `Output`.
        error: what ended the request, if it failed.
        cancelled: whether `Engine.cancel` was called.
        done: whether it is over, for whatever reason.
        unread: outputs that nobody has read yet, of a streamed request.
        notify: see `Engine.submit`.
        told: whether `notify` was told of the end.
        before: the last of the tokens that the text follows, once its turn has come.
        opened: when its turn came and its prompt began to be read, in seconds of `time.perf_counter`; 0 before that.
        times: when each output came, on the same clock.
        thread: that submitted it, or that read it last.
        task: the same as a weak reference to a task of asyncio, where `AsyncLLM` has submitted it.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    cancelled: bool = False
    done: bool = False
    unread: deque[Output] = field(default_factory=deque, repr=False)
    notify: Callable[[], None] | None = field(default=None, repr=False)
    told: bool = field(default=False, repr=False)
    before: list[int] = field(default_factory=list, repr=False)
    opened: float = field(default=0.0, repr=False)
    times: list[float] = field(default_factory=list, repr=False)
    thread: int = field(default_factory=get_ident, repr=False)
    task: ReferenceType[Any] | None = field(default=None, repr=False)

    @property
    def paused(self) -> bool:
        """Whether a stream waits for its reader."""
        return self.request.stream and len(self.unread) >= self.request.ahead

    def blocks(self, waiting: Handle) -> bool:
        """Whether nobody reads this stream while the thread, or task, that submitted another one waits for that one."""
        same = self.thread == waiting.thread if self.notify is None else self.task == waiting.task is not None
        return self.paused and same and not waiting.done

    def open(self, tokens: list[int], unread: int) -> None:
        """Its turn has come.

        Args:
            tokens: that the text follows: the prompt's, or the decoder's of an encoder-decoder model.
            unread: so many tokens of the prompt are still to be read, the last one apart.
        """
        self.before, self.opened = tokens[-Detokenizer.KEPT :], self.opened or perf_counter()
        self.stats.prompt_tokens = len(self.request.tokens)
        is_given = isinstance(self.request.begin, PromptEntries)  # by a forward of somebody else's
        self.stats.prefill_forwards += is_given
        self.stats.reused_tokens = 0 if is_given else max(0, self.stats.prompt_tokens - 1 - unread)

    def add(self, output: Output) -> None:
        """Takes the output of a step."""
        self.times.append(perf_counter())
        self.tokens += output.tokens
        self.drafted += [True] * output.accepted + [False] * (len(output.tokens) - output.accepted)
        self.logprobs += output.logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self.request.stream:
            self.unread.append(output)

    def tell(self) -> None:
        """Notifies the reader of a stream of what `add` has taken."""
        if self.request.stream:
            self.wake()

    def wake(self) -> None:
        """Calls `notify`. What it raises is an error of this request alone."""
        if self.notify is not None:
            try:
                self.notify()
            except Exception as error:
                self.error = self.error or error
