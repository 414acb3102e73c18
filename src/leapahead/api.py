"""Text in, text out: prompts and chat messages, batches, streaming. The loop itself is in `decode`.

Knows tokenizers and targets by their protocols only; no backend is imported before `LLM(...)` loads a model.
"""

from __future__ import annotations

import difflib
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast, overload

import numpy as np

from leapahead import drafters
from leapahead.core.errors import BadParameter, CacheFull, ContextOverflow
from leapahead.core.sampling import LogitsProcessor, SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.text import Detokenizer, TextStream, Tokenizer, fingerprint
from leapahead.drafters import cache_sections, draft_models
from leapahead.drafters.base import Drafter, Step
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.loop import Generation, decode
from leapahead.models import loading
from leapahead.models.base import Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages
Prediction = str | Sequence[int]  # text, or token ids
Prompts = list[str] | list[list[int]] | list[Prompt]


@dataclass(frozen=True)
class Result:
    """One finished text.

    Attributes:
        text: the new text; it ends before a stop string, and special tokens are left out. "" without a tokenizer.
        tokens: the new token ids, up to and including the one that ended the text.
        prompt_tokens: the ids that the prompt became.
        drafted: for each of `tokens`, whether a drafter had guessed it.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it; None at EOS and at the length limit.
        seed: of the dice; give it again, with the same parameters, for the same text.
        stats: what it cost.
    """

    text: str
    tokens: list[int]
    prompt_tokens: list[int]
    drafted: list[bool]
    finish_reason: str
    stop_reason: int | str | None
    seed: int
    stats: Stats = field(repr=False)


@dataclass(frozen=True)
class Piece:
    """What one step added. The texts of all pieces, one after another, are exactly `Result.text`.

    Attributes:
        text: may be "" while a character or a possible stop string is unfinished; it may come with a later piece.
        tokens: the step's new token ids; the first `drafted` of them had been drafted.
        drafted: see `tokens`.
        spans: (text, drafted) parts; together they are `text`.
        finish_reason: "stop" or "length" on the last piece, else None.
        result: the whole, on the last piece.
    """

    text: str
    tokens: list[int]
    drafted: int
    spans: tuple[tuple[str, bool], ...]
    finish_reason: str | None = None
    result: Result | None = None


class Options(TypedDict, total=False):
    """The keyword options of `LLM.generate` and `LLM.stream`, explained there."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bad_words: Sequence[str | int | Sequence[int]]
    min_new_tokens: int
    seed: int | Sequence[int] | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logits_processors: Sequence[LogitsProcessor]
    criteria: Sequence[Callable[[Sequence[int]], bool]]
    drafter: str | type[Drafter]
    drafter_options: Mapping[str, Any]
    prediction: Prediction | Sequence[Prediction | None] | None


class LLM:
    """A model that emits several tokens per forward pass, with exactly the text of one at a time.

    Args:
        model: a hub name, a folder, a GGUF file, a loaded `torch.nn.Module`, or a `Target`; None for the bundled small
            model.
        tokenizer: instead of the model's own. A loaded model or a target without one takes prompts of token ids.
        drafter: a registered name (`leapahead drafters` lists them) or a subclass of `Drafter`.
        dtype: "auto", "float32", "bfloat16" or "float16"; of a model given by name or folder.
        device: "auto", "cpu", "cuda", "mps", ...; of a model given by name or folder.
        max_batch: greatest number of sequences decoded together; further prompts join as others end.
        trust_remote_code: run Python code that comes with the model.
        options: of the drafter, for example `window=7, ngram=5, guesses=7`; and with a GGUF file of llama.cpp, for
            example `n_ctx=8192, n_threads=4` (see `LlamaCppOptions`).
        draft: a smaller model that drafts, for the drafters that take one (`draft_model`, `auto`): a name, a folder, a
            GGUF file, "bundled" for the bundled model's own, or a loaded one; or a list of several. Its tokenizer must
            be the target's. Loaded with the same dtype, device and llama.cpp options.
        drafter_cache: what drafters learn from one text for the next, which changes speed and never text. True keeps it as
            long as this LLM lives; False keeps nothing; a file is read if it exists, and `save_drafter_cache` writes it; a
            `DrafterCache` is shared with whoever else holds it, if they have the same vocabulary. It is bounded: by an
            estimated 100 MB when full of sampled texts, by less of greedy ones. It holds pieces of prompts and texts:
            give users who must not learn of each other's texts a memory each, or none.

    Attributes:
        target, tokenizer, drafter_name, eos_token_ids: what was loaded.
        drafter_cache: see above; None where nothing is kept.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        tokenizer: Tokenizer | str | None = None,
        drafter: str | type[Drafter] = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_batch: int = 8,
        trust_remote_code: bool = False,
        draft: Any = None,
        drafter_cache: DrafterCache | str | Path | bool = True,
        **options: Any,
    ) -> None:
        if isinstance(max_batch, bool) or not isinstance(max_batch, int) or max_batch < 1:
            raise BadParameter(f"max_batch={max_batch!r} is not possible: it must be a whole number >= 1")
        backend = {name: options.pop(name) for name in loading.LLAMA_CPP_OPTIONS if name in options}
        if draft is None:
            self._new_drafter = _factory(drafter, options)  # before the load, which may take long
        self.drafter_cache = cache_sections.given(drafter_cache)
        loaded = loading.load(
            model,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            **backend,
        )
        self.target: Target = loaded.target
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.max_batch = max_batch
        self._drafts = []
        if draft is not None:
            self._drafts = draft_models.given(draft, dtype=dtype, device=device, **backend)
            self._new_drafter = _factory(drafter, {**options, "draft": self._drafts})
        first = self._new_drafter()
        self.drafter_name = first.name
        first.fits(self.target, self.tokenizer)
        if self.drafter_cache is not None:
            name = partial(self._vocabulary, self.tokenizer, self.target.vocab_size)
            self.drafter_cache.belong(name if drafter_cache is True else name(), self.target.vocab_size)

    def __repr__(self) -> str:
        return f"LLM({self.target.name!r}, drafter={self.drafter_name!r})"

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    def generate(self, prompt: Any, **options: Unpack[Options]) -> Result | list[Result]:
        """Completes a prompt, or a list of prompts together.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"} each), which go through the tokenizer's chat
                template; or a list of those, and the results come in its order.
            max_new_tokens: 128 by default.
            temperature: 0 (greedy) by default. With more, the text is a function of the seed.
            top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: see `SamplingParams`.
            bad_words: strings or token sequences that must not appear. A string is banned as the tokenizer writes it at
                the beginning of a text and after a space.
            min_new_tokens: before so many no EOS and none of `stop_token_ids`.
            seed: of the dice. One for all prompts, or a list with one for each. By default every prompt is given its
                own at random, found in its result.
            stop: strings that end the text, which then ends before them.
            stop_token_ids: ids that end the text; like EOS they are the last of its `tokens`.
            ignore_eos: go on after an EOS.
            include_stop: let the text end behind the stop string.
            logits_processors: the user's own, with Transformers' convention; see `LogitsProcessor`.
            criteria: called with all tokens after each new one; true ends the text.
            drafter, drafter_options: for this call, instead of the LLM's.
            prediction: what the text will be, about: text or token ids, for all prompts, or a list with one (or None)
                for each. Wrong parts cost time, never text. A drafter that makes no use of it is refused.

        Returns:
            A `Result`, or a list of them for a list.

        Raises:
            LeapaheadError: one clear sentence for whatever is wrong.
        """
        single = _is_single(prompt)
        prompts = [prompt] if single else list(prompt)
        results: dict[int, Result] = {}
        with closing(self._run(self._requests(prompts, options))) as pieces:
            for index, piece in pieces:
                if piece.result is not None:
                    results[index] = piece.result
        return results[0] if single else [results[index] for index in range(len(prompts))]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Piece, None, None]:
        """Completes one prompt, piece by piece as the steps go. Arguments as of `generate`.

        Yields:
            A `Piece` per step. Closing the generator ends the text there.
        """
        if not _is_single(prompt):
            raise BadParameter("stream takes one prompt; use generate for a list")
        return self._pieces(self._requests([prompt], options))

    def _pieces(self, requests: list[_Request]) -> Generator[Piece, None, None]:
        with closing(self._run(requests)) as pieces:
            for _, piece in pieces:
                yield piece

    def _requests(self, prompts: list[Prompt], options: Options) -> list[_Request]:
        known = list(Options.__annotations__)
        for name in options:
            if name not in known:
                raise BadParameter(f"there is no option {name!r}{_nearest(name, known)}; there are {', '.join(known)}")
        new_drafter = self._new_drafter
        if "drafter" in options or "drafter_options" in options:
            chosen = options.get("drafter", self.drafter_name)
            given = dict(options.get("drafter_options", {}))
            if self._drafts and "draft" in drafters.options(_class(chosen)):
                given.setdefault("draft", self._drafts)
            new_drafter = _factory(chosen, given)
            new_drafter().fits(self.target, self.tokenizer)
        predictions = self._predictions(options.get("prediction"), len(prompts), new_drafter)
        sampled = options.get("temperature", 0.0) != 0
        requests = []
        seeds = _seeds(options.get("seed"), len(prompts), sampled)
        for prompt, seed, prediction in zip(prompts, seeds, predictions, strict=True):
            tokens = encode(prompt, self.tokenizer, self.target)
            requests.append(_Request(tokens, new_drafter, *self._params(options, seed), prediction))
        return requests

    def _predictions(self, given: Any, count: int, new_drafter: Callable[[], Drafter]) -> list[tuple[int, ...]]:
        """Token ids for each prompt."""
        if given is None:
            return [()] * count
        if not (drafter := new_drafter()).predicts:
            raise BadParameter(f"drafter {drafter.name!r} makes no use of a prediction; use auto or prediction")
        if isinstance(given, (list, tuple)) and any(not _is_id(each) for each in given):
            if len(given) != count:
                raise BadParameter(
                    f"there are {len(given)} predictions and {count} prompts; give one for all, or one for each"
                )
            return [self._predicted(each) for each in given]
        return [self._predicted(given)] * count

    def _predicted(self, given: Any) -> tuple[int, ...]:
        if given is None:
            return ()
        if isinstance(given, str):
            if self.tokenizer is None:
                raise BadParameter("a prediction as text needs a tokenizer; pass tokenizer=..., or its token ids")
            given = self.tokenizer.encode(given, add_special_tokens=False) if given else []
        if not isinstance(given, (list, tuple, np.ndarray)) or not all(_is_id(token) for token in given):
            raise BadParameter(
                f"a prediction must be text or token ids, or a list with one for each prompt, got {given!r}"
            )
        return self._ids("the prediction", given)

    def _params(self, options: Options, seed: int) -> tuple[SamplingParams, StopParams, bool]:
        stop = options.get("stop", ())
        stop_token_ids = self._ids("stop_token_ids", options.get("stop_token_ids", ()))
        eos = () if options.get("ignore_eos", False) else self.eos_token_ids
        length = options.get("max_new_tokens", 128)
        if isinstance(length, bool) or not isinstance(length, int):
            raise BadParameter(f"max_new_tokens={length!r} is not possible: it must be a whole number >= 1")
        sampling = SamplingParams(
            bad_words=tuple(ids for word in _listed("bad_words", options) for ids in self._bad_word(word)),
            min_new_tokens=options.get("min_new_tokens", 0),
            eos_token_ids=(*eos, *stop_token_ids),
            repetition_penalty=options.get("repetition_penalty", 1.0),
            presence_penalty=options.get("presence_penalty", 0.0),
            frequency_penalty=options.get("frequency_penalty", 0.0),
            processors=tuple(options.get("logits_processors", ())),
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k", 0),
            top_p=options.get("top_p", 1.0),
            min_p=options.get("min_p", 0.0),
            seed=seed,
        )
        stop_strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) for text in stop_strings):
            raise BadParameter(f"stop={stop!r} is not possible: it must be a string or a list of strings")
        stops = StopParams(
            max_new_tokens=length,
            eos_token_ids=eos,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            criteria=tuple(options.get("criteria", ())),
        )
        return sampling, stops, options.get("include_stop", False)

    def _bad_word(self, word: str | int | Sequence[int]) -> list[tuple[int, ...]]:
        if not isinstance(word, str):
            return [self._ids("bad_words", word)]
        if self.tokenizer is None:
            raise BadParameter(f"the bad word {word!r} needs a tokenizer; pass tokenizer=..., or its token ids")
        if not word.strip():
            raise BadParameter("an empty bad word bans nothing; leave it out")
        written = (word, " " + word.lstrip())
        return list(dict.fromkeys(tuple(self.tokenizer.encode(w, add_special_tokens=False)) for w in written))

    def _ids(self, name: str, given: Any) -> tuple[int, ...]:
        listed = [given] if _is_id(given) else given
        if not isinstance(listed, (list, tuple, set, np.ndarray)) or not all(_is_id(token) for token in listed):
            raise BadParameter(f"{name}={given!r} is not possible: it must be made of token ids")
        ids = tuple(int(token) for token in listed)
        if outside := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise BadParameter(f"{name} has {outside[0]}, which is outside the vocabulary of {self.target.vocab_size}")
        return ids

    def _run(self, requests: list[_Request]) -> Generator[tuple[int, Piece], None, None]:
        """Decodes all requests, at most `max_batch` at once; the next one joins as soon as one leaves."""
        waiting = deque(enumerate(requests))
        running: list[Generation] = []  # the live list that `decode` steps
        writing: dict[Generation, tuple[int, _Writer]] = {}
        try:
            self._fill(waiting, running, writing)
            for generation, step in decode(self.target, running):
                index, writer = writing[generation]
                yield index, writer.write(step)
                if generation.finished:
                    del writing[generation]
                    self._fill(waiting, running, writing)
        finally:
            for generation in running:  # closing twice is harmless
                generation.close()

    def _fill(
        self,
        waiting: deque[tuple[int, _Request]],
        running: list[Generation],
        writing: dict[Generation, tuple[int, _Writer]],
    ) -> None:
        """Lets requests join, in order, while there is room for them."""
        while waiting and len(running) < self.max_batch:
            index, request = waiting[0]
            try:
                generation = self._begin(request)
            except CacheFull:
                if not running:
                    raise
                return  # it joins when another has left
            waiting.popleft()
            stream = TextStream(self.tokenizer, request.stop.stop_strings, request.include_stop)
            running.append(generation)
            writing[generation] = index, _Writer(request, generation, stream)

    def _begin(self, request: _Request) -> Generation:
        text = Detokenizer(self.tokenizer).add if self.tokenizer is not None else None
        return Generation.begin(
            self.target,
            request.tokens,
            request.new_drafter(),
            request.sampling,
            request.stop,
            text=text,
            drafter_cache=self.drafter_cache,
            prediction=request.prediction,
        )

    def save_drafter_cache(self, path: str | Path | None = None) -> Path:
        """Writes the memory to a file, merged with what other processes saved there meanwhile.

        Args:
            path: by default the file that `memory` named.

        Returns:
            The file. It holds pieces of prompts and texts; a new one can be read by its owner only.

        Raises:
            BadParameter: nothing is kept, there is nowhere to write, or what is there is something else.
        """
        if self.drafter_cache is None:
            raise BadParameter("drafter_cache=False keeps nothing that could be saved; leave it out, or name a file")
        return self.drafter_cache.save(path)

    @contextmanager
    def without_drafter_cache(self) -> Iterator[None]:
        """Inside, texts are decoded as if none had come before, and teach nothing: to measure a prompt many times."""
        kept, self.drafter_cache = self.drafter_cache, None
        try:
            yield
        finally:
            self.drafter_cache = kept

    @staticmethod
    def _vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> str:
        """The name under which a memory knows a model's tokens."""
        return f"vocabulary of {vocab_size}" if tokenizer is None else fingerprint(tokenizer)


@dataclass(frozen=True)
class _Request:
    tokens: list[int]
    new_drafter: Callable[[], Drafter]
    sampling: SamplingParams
    stop: StopParams
    include_stop: bool
    prediction: tuple[int, ...] = ()


@dataclass(eq=False)
class _Writer:
    """Turns the steps of one generation into pieces, and at last into the result."""

    request: _Request
    generation: Generation
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def write(self, step: Step) -> Piece:
        flags = [index < step.verdict.accepted for index in range(len(step.tokens))]
        for token, drafted in zip(step.tokens, flags, strict=True):
            self.stream.add(token, drafted)
        self.tokens += step.tokens
        self.drafted += flags
        stopper = self.generation.stopper
        spans = self.stream.finish(stopper.stop_reason) if self.generation.finished else self.stream.take()
        text = "".join(text for text, _ in spans)
        self.texts.append(text)
        return Piece(text, list(step.tokens), sum(flags), spans, stopper.finish_reason, self._result())

    def _result(self) -> Result | None:
        stopper = self.generation.stopper
        if stopper.finish_reason is None:
            return None
        return Result(
            text="".join(self.texts),
            tokens=self.tokens,
            prompt_tokens=self.request.tokens,
            drafted=self.drafted,
            finish_reason=stopper.finish_reason,
            stop_reason=stopper.stop_reason,
            seed=self.request.sampling.seed,
            stats=self.generation.stats,
        )


def encode(prompt: Prompt, tokenizer: Tokenizer | None, target: Target) -> list[int]:
    """The prompt's token ids.

    Raises:
        BadParameter: what is given is empty, is no prompt, or needs a tokenizer or a chat template that is not there.
        ContextOverflow: it leaves no room in the target's context.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise BadParameter("a text prompt needs a tokenizer; pass tokenizer=..., or a list of token ids")
        tokens = tokenizer.encode(prompt) if prompt else []
    elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
        tokens = _encode_chat(cast(Sequence[Mapping[str, Any]], prompt), tokenizer)
    elif all(_is_id(token) for token in prompt):
        tokens = [int(token) for token in cast(Sequence[int], prompt)]
    else:
        raise BadParameter("a list of token ids must hold whole numbers only")
    if not tokens:
        raise BadParameter("the prompt is empty; give some text, or at least one token id")
    for token in tokens:
        if not 0 <= token < target.vocab_size:
            belongs = "; the tokenizer is not this model's" if isinstance(prompt, str) else ""
            raise BadParameter(
                f"the prompt's token id {token} is outside the vocabulary of {target.vocab_size}{belongs}"
            )
    if len(tokens) >= target.context_length:
        raise ContextOverflow(
            f"the prompt has {len(tokens)} tokens and the context of {target.name} {target.context_length}; shorten it"
        )
    return tokens


def _encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise BadParameter("chat messages need a tokenizer; pass tokenizer=..., or a list of token ids")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadParameter(f'a chat message is {{"role": "user", "content": "..."}}, got {message!r}')
    conversation = [dict(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is somebody's program, and may raise anything
        if getattr(tokenizer, "chat_template", None) is None:
            raise BadParameter(
                "the tokenizer has no chat template; give the prompt as text, or set tokenizer.chat_template"
            ) from None
        raise BadParameter(f"the chat template does not take these messages: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False)  # the template writes them itself


def _is_single(prompt: Any) -> bool:
    """Whether it is one prompt, not a list of them."""
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, (bytes, bytearray)):
        raise BadParameter(
            f"a prompt must be text, a list of token ids or chat messages, got {type(prompt).__name__} "
            "(of a tensor, give .tolist())"
        )
    if len(prompt) == 0:
        raise BadParameter("the prompt is empty; give some text, or at least one token id")
    if _is_id(prompt[0]) or isinstance(prompt[0], Mapping):
        return True
    for each in prompt:
        if not isinstance(each, str) and not _is_single(each):
            raise BadParameter("a list of prompts must hold prompts, not further lists of them")
    return False


def _is_id(token: object) -> bool:
    return isinstance(token, Integral) and not isinstance(token, bool)


def _seeds(seed: Any, count: int, sampled: bool) -> list[int]:
    if seed is None:
        return [secrets.randbits(32) if sampled else 0 for _ in range(count)]
    if _is_id(seed):
        return [int(seed)] * count
    if not isinstance(seed, (list, tuple)) or len(seed) != count:
        raise BadParameter(
            f"seed={seed!r} is not possible: one whole number, or a list of {count}, one for each prompt"
        )
    return list(seed)


def _listed(name: str, options: Options) -> list[Any]:
    value = options.get(name, ())
    return [value] if isinstance(value, str) or _is_id(value) else list(cast(Sequence[Any], value))


def _class(drafter: str | type[Drafter]) -> type[Drafter]:
    if isinstance(drafter, str):
        return drafters.load(drafter)
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise BadParameter(f"a drafter must be a registered name or a subclass of Drafter, got {drafter!r}")
    return drafter


def _factory(drafter: str | type[Drafter], options: Mapping[str, Any]) -> Callable[[], Drafter]:
    return drafters.factory(_class(drafter), **options)


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
