"""Prompts, predictions and options of the API, checked and turned into token ids and parameters."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, cast

import numpy as np

from leapahead.chat.template import chat_text
from leapahead.core.bias import LogitBias
from leapahead.core.errors import BadParameter, ContextOverflow, counted
from leapahead.core.grammar import CompiledGrammar
from leapahead.core.parameters import finite, flag, is_whole, unicode_text, whole
from leapahead.core.processors import LogitsProcessor, PrefixFree
from leapahead.core.relaxed import Relaxed
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams, check_lengths
from leapahead.core.text import Tokenizer
from leapahead.drafters.base import Drafter, SequenceDrafter
from leapahead.grammar import Grammar, Grammars, validate
from leapahead.models.base import TargetInfo
from leapahead.models.decoder import longest_prompt, prompt_vocabulary

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages
Prompts = list[str] | list[list[int]] | Sequence[Sequence[Mapping[str, Any]]] | list[Prompt]
Prediction = str | Sequence[int]  # text, or token ids


class OneText(TypedDict, total=False):
    """The keyword options of `LLM.generate` beside `n`, explained there."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str | int | Sequence[int]]
    min_new_tokens: int
    seed: int | Sequence[int] | None
    logprobs: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logits_processors: Sequence[LogitsProcessor]
    criteria: Sequence[Callable[[Sequence[int]], bool]]
    drafter: str | type[Drafter] | type[SequenceDrafter]
    drafter_options: Mapping[str, Any]
    prediction: Prediction | Sequence[Prediction | None] | None
    grammar: Grammar | Sequence[Grammar | None] | None
    acceptance: str | Relaxed


class Options(OneText, total=False):  # all of them
    n: int


# Those of `SamplingParams` that depend on no vocabulary.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("min_new_tokens", *PENALTIES, "temperature", "top_k", "top_p", "min_p")


def check_values(options: Options) -> None:
    """Refuses values that no model can take, as far as they can be told without a model, whose load may take long.

    Raises:
        BadParameter: a number out of its range, an empty stop string or bad word, a grammar that cannot be compiled.
    """
    StopParams(**_lengths_and_strings(options))
    for (seed,) in seeds(options.get("seed"), 1, 1, sampled=False):
        SamplingParams(**_numbers(options), seed=seed)
    _bad_words(options)
    grammar = options.get("grammar")
    if isinstance(grammar, Grammar):
        _check_ignore_eos(options, [grammar])
        validate(grammar)


def check_prediction(given: Any, drafter: Drafter | type[Drafter] | type[SequenceDrafter]) -> None:
    """Refuses a prediction, which may be None, for a drafter that makes no use of it.

    Raises:
        BadParameter: there is one, and it makes none.
    """
    if given is not None and not drafter.takes_prediction:
        sourced = isinstance(drafter, Drafter) and type(drafter).takes_prediction
        remedy = "name prediction among its sources" if sourced else "use auto or prediction"
        raise BadParameter(f"drafter {drafter.name!r} makes no use of a prediction; {remedy}")


def encoded_predictions(given: Any, tokenizer: Tokenizer) -> Any:
    """A prediction, or a list of them, with token ids in place of text."""
    if isinstance(given, (list, tuple)):
        return [encoded_predictions(each, tokenizer) for each in given]
    if not isinstance(given, str):
        return given
    return tokenizer.encode(unicode_text("the prediction", given), add_special_tokens=False) if given else []


def drafter_options(options: Options) -> dict[str, Any]:
    """The options of a call's own drafter."""
    given = options.get("drafter_options", {})
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise BadParameter(f"drafter_options={given!r} is not possible: it must be a dictionary of names and values")
    return dict(given)


@dataclass(frozen=True)
class Inputs:
    """Turns what a user gives into token ids and parameters.

    Attributes:
        info: of the target.
        tokenizer: None where prompts must be token ids.
        eos_token_ids: of the model and its tokenizer together.
    """

    info: TargetInfo
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    def prediction(self, given: Any) -> tuple[int, ...]:
        """One prediction's token ids; none for None."""
        if given is None:
            return ()
        if isinstance(given, str):
            if self.tokenizer is None:
                raise BadParameter("a prediction as text needs a tokenizer; pass tokenizer=..., or its token ids")
            given = encoded_predictions(given, self.tokenizer)
        if not isinstance(given, (list, tuple, np.ndarray)) or not all(is_whole(token) for token in given):
            raise BadParameter(
                f"a prediction must be text or token ids, or a list with one for each prompt, got {given!r}"
            )
        return self._ids("the prediction", given)

    def predictions(self, given: Any, count: int, drafter: Drafter) -> list[tuple[int, ...]]:
        """The prediction of each of `count` prompts: one for all, or a list with one (or None) for each.

        Raises:
            BadParameter: it is none, there are too few or too many, or the drafter makes no use of them.
        """
        check_prediction(given, drafter)
        if isinstance(given, (list, tuple)) and any(not is_whole(each) for each in given):
            if len(given) != count:
                counts = f"{counted(len(given), 'prediction')} for {counted(count, 'prompt')}"
                raise BadParameter(f"{counts} is not possible; give one for all, or one for each")
            return [self.prediction(each) for each in given]
        return [self.prediction(given)] * count

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for this vocabulary."""
        return Grammars(self.tokenizer, self.info.vocab_size, self.eos_token_ids)

    def grammar(self, options: Options, count: int) -> list[CompiledGrammar | None]:
        """The grammar of each of `count` prompts: one for all, or a list with one (or None) for each."""
        given = options.get("grammar")
        each: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * count
        if len(each) != count:
            counts = f"{counted(len(each), 'grammar')} for {counted(count, 'prompt')}"
            raise BadParameter(f"{counts} is not possible; give one for all, or one for each")
        _check_ignore_eos(options, each)
        return [None if one is None else self.grammars.compile(one) for one in each]

    def sampling(self, options: Options) -> SamplingParams:
        """How the target chooses, seed and grammar apart, which are those of a text."""
        return SamplingParams(
            bad_words=tuple(ids for word in _bad_words(options) for ids in self._bad_word(word)),
            eos_token_ids=(*self._eos(options), *self._stop_token_ids(options)),
            processors=(*self._bias(options), *_functions("logits_processors", options)),
            **_numbers(options),
        )

    def _bias(self, options: Options) -> tuple[LogitsProcessor, ...]:
        """The processor that `logit_bias` asks for, if it does."""
        given: Any = options.get("logit_bias", {})
        if not isinstance(given, Mapping):
            raise BadParameter(
                f"logit_bias={given!r} is not possible: it must be a dictionary of token ids and numbers"
            )
        if not given:
            return ()
        values = [finite(f"logit_bias of token {token}", bias) for token, bias in given.items()]
        tokens = self._ids("logit_bias", list(given))
        return (PrefixFree(LogitBias(dict(zip(tokens, values, strict=True)))),)

    def stop(self, options: Options) -> StopParams:
        """When the text ends."""
        return StopParams(
            eos_token_ids=self._eos(options),
            stop_token_ids=self._stop_token_ids(options),
            criteria=_functions("criteria", options),
            **_lengths_and_strings(options),
        )

    def _eos(self, options: Options) -> tuple[int, ...]:
        return () if options.get("ignore_eos", False) else self.eos_token_ids

    def _stop_token_ids(self, options: Options) -> tuple[int, ...]:
        return self._ids("stop_token_ids", options.get("stop_token_ids", ()))

    def _bad_word(self, word: str | int | Sequence[int]) -> list[tuple[int, ...]]:
        if not isinstance(word, str):
            return [self._ids("bad_words", word)]
        if self.tokenizer is None:
            raise BadParameter(f"the bad word {word!r} needs a tokenizer; pass tokenizer=..., or its token ids")
        written = (unicode_text("a bad word", word), " " + word.lstrip(" "))
        return list(dict.fromkeys(tuple(self.tokenizer.encode(w, add_special_tokens=False)) for w in written))

    def _ids(self, name: str, given: Any) -> tuple[int, ...]:
        listed = [given] if is_whole(given) else given
        if not isinstance(listed, (list, tuple, set, np.ndarray)) or not all(is_whole(token) for token in listed):
            raise BadParameter(f"{name}={given!r} is not possible: it must consist of token ids")
        ids = tuple(int(token) for token in listed)
        if outside := [token for token in ids if not 0 <= token < self.info.vocab_size]:
            raise BadParameter(f"{name} has {outside[0]}, which is outside the vocabulary of {self.info.vocab_size}")
        return ids


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    info: TargetInfo,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt's token ids.

    Args:
        prompt: text, token ids, or chat messages.
        tokenizer: None where prompts must be token ids.
        info: of the target.
        add_generation_prompt: let the chat template begin the assistant's message.
        variables: further ones of the chat template.

    Raises:
        BadParameter: what is given is empty, is no prompt, or needs a tokenizer or a chat template that is missing.
        ContextOverflow: it leaves no room in the target's context.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise BadParameter("a text prompt needs a tokenizer; pass tokenizer=..., or a list of token ids")
        tokens = tokenizer.encode(unicode_text("the prompt", prompt)) if prompt else []
    elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
        messages = cast(Sequence[Mapping[str, Any]], prompt)
        text = unicode_text("the chat", chat_text(messages, tokenizer, add_generation_prompt, variables))
        assert tokenizer is not None, "it has the template"
        tokens = tokenizer.encode(text, add_special_tokens=False)  # the template writes them itself
    elif all(is_whole(token) for token in prompt):
        tokens = [int(token) for token in cast(Sequence[int], prompt)]
    else:
        raise BadParameter("a list of token ids must hold whole numbers only")
    if not tokens:
        raise BadParameter("the prompt is empty; give some text, or at least one token id")
    vocabulary = prompt_vocabulary(info.vocab_size, info.decoder)
    for token in tokens:
        if not 0 <= token < vocabulary:
            belongs = "; the tokenizer is not this model's" if isinstance(prompt, str) else ""
            raise BadParameter(f"the prompt's token id {token} is outside the vocabulary of {vocabulary}{belongs}")
    if len(tokens) > (most := longest_prompt(info.context_length, info.decoder)):
        remedy = "shorten it" + f", or load the model with a larger {info.length_option}" * bool(info.length_option)
        counts = f"{len(tokens)} tokens and the context of {info.name} {most + (info.decoder is None)}"
        raise ContextOverflow(f"the prompt has {counts}; {remedy}")
    return tokens


def is_single(prompt: Any) -> bool:
    """Whether it is one prompt, not a list of them."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise BadParameter(f"a prompt must be text, a list of token ids or chat messages, got {type(prompt).__name__}")
    if len(prompt) == 0:
        raise BadParameter("the prompt is empty; give some text, at least one token id, or at least one prompt")
    if is_whole(prompt[0]) or isinstance(prompt[0], Mapping):
        return True
    for each in prompt:
        if not isinstance(each, str) and not is_single(each):
            raise BadParameter("a list of prompts must hold prompts, not further lists of them")
    return False


def _plain(prompt: Any) -> Any:
    """Arrays and tensors as lists of numbers; everything else as it is."""
    return prompt.tolist() if callable(getattr(prompt, "tolist", None)) else prompt


def seeds(seed: Any, prompts: int, samples: int, sampled: bool) -> list[list[int]]:
    """The seeds of each prompt's samples: the prompt's own seed, then the numbers that follow it, modulo 2**64.

    Args:
        seed: one for all prompts, or a list with one for each; None draws them at random.
        samples: of each prompt.
        sampled: whether the temperature is above 0; greedy texts need no seed.
    """
    if seed is None:
        firsts = [secrets.randbits(32) if sampled else 0 for _ in range(prompts)]
    elif is_whole(seed):
        firsts = [int(seed)] * prompts
    elif isinstance(seed, (list, tuple, np.ndarray)) and len(seed) == prompts and all(is_whole(each) for each in seed):
        firsts = [int(each) for each in seed]
    else:
        raise BadParameter(
            f"seed={seed!r} is not possible: one whole number, or a list of {prompts}, one for each prompt"
        )
    return [[first, *((first + index) % 2**64 for index in range(1, samples))] for first in firsts]


def _numbers(options: Options) -> dict[str, Any]:
    """The `NUMBERS` that were given."""
    given: Mapping[str, Any] = options
    return {name: given[name] for name in NUMBERS if name in given}


def _lengths_and_strings(options: Options) -> dict[str, Any]:
    """The arguments of `StopParams` that depend on no vocabulary."""
    for name in ("ignore_eos", "include_stop"):
        flag(name, options.get(name, False))
    length = whole("max_new_tokens", options.get("max_new_tokens", 128), least=1)
    check_lengths(options.get("min_new_tokens", 0), length)
    stop = options.get("stop", ())
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(text, str) for text in strings):
        raise BadParameter(f"stop={stop!r} is not possible: it must be a string or a list of strings")
    return {"max_new_tokens": length, "stop_strings": tuple(strings)}


def _bad_words(options: Options) -> list[Any]:
    """The bad words as given, strings or token ids."""
    value = options.get("bad_words", ())
    if not isinstance(value, (str, list, tuple)) and not is_whole(value):
        raise BadParameter(f"bad_words={value!r} is not possible: it must be a list of strings or token ids")
    words = [value] if isinstance(value, str) or is_whole(value) else list(cast(Sequence[Any], value))
    if any(isinstance(word, str) and not word.strip() for word in words):
        raise BadParameter(
            "an empty bad word, or one of white space alone, cannot be banned as text; leave it out, or give token ids"
        )
    return words


def _check_ignore_eos(options: Options, grammars: Sequence[Any]) -> None:
    if options.get("ignore_eos", False) and any(each is not None for each in grammars):
        raise BadParameter("ignore_eos=True is not possible with a grammar, which decides where the text ends")


def _functions(name: str, options: Options) -> tuple[Any, ...]:
    value = options.get(name, ())
    if not isinstance(value, Iterable) or not all(map(callable, found := tuple(value))):
        raise BadParameter(f"{name}={value!r} is not possible: it must be a list of functions")
    return found
