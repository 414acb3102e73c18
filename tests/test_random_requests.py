"""Random requests with random options, in threads and in streams, on random models of many families.

Every text is that of a plain `LLM` of the same model, which decodes nothing else meanwhile. Other tests take the
options one by one; here they meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import architectures
import gguf_architectures
import gguf_models
import pytest
import seq2seq

from leapahead import LLM, Result
from leapahead.core.errors import CacheFull, LeapaheadError, Refused
from leapahead.grammar import Grammar

OPTIONS_OF_DRAFTERS: dict[str, list[dict[str, Any]]] = {
    "auto": [{}, {"nodes": 5}, {"nodes": 12}, {"sources": "suffix,recycling"}, {"nodes": 8, "seed_aware": False}],
    "lookahead": [{}, {"window": 3, "ngram": 3, "guesses": 3}, {"start_from_pool": True}],
    "prompt_lookup": [{}, {"num_tokens": 3, "max_ngram": 2}],
    "jacobi": [{}, {"block": 4}, {"variant": "pgj"}],
    "recycling": [{}],
    "suffix": [{}],
    "ngram": [{}],
    "plain": [{}],
}
DRAFTERS = ["auto", "auto", *OPTIONS_OF_DRAFTERS]
TEXTS = [
    "def f(x):\n    return ",
    "import os\nimport sys\n",
    "abababab",
    "for i in range(10):\n",
    '{"a": 1, "b": [1, 2',
]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}}}
GRAMMARS = [Grammar.regex("[a-z ]{3,30}"), Grammar.regex("(ab|ba|abc)*c"), Grammar.json_schema(OBJECT)]


@dataclass
class World:
    """A model, as a loader of it, and what its requests may have.

    Attributes:
        load: makes an `LLM` of it from options.
        vocab: prompts have ids below this.
        options: with which it is loaded, beside the drafter; None of it changes a text.
        has_text: whether it has a tokenizer.
    """

    load: Callable[..., LLM]
    vocab: int
    options: dict[str, Any]
    has_text: bool


def transformers(rng: random.Random) -> World:
    family = rng.choice(architectures.ARCHITECTURES)
    options = {"cache_tokens": rng.choice([None, None, 64, 128, 300])}
    return World(lambda **given: LLM(family.build(), **given), architectures.VOCABULARY, options, has_text=False)


def encoder_decoder(rng: random.Random) -> World:
    name = rng.choice(list(seq2seq.MODELS))
    options = {"cache_tokens": rng.choice([None, None, 64, 128, 300])}
    return World(lambda **given: LLM(seq2seq.build(name), **given), architectures.VOCABULARY, options, has_text=False)


def gguf(rng: random.Random) -> World:
    family = rng.choice(gguf_architectures.ARCHITECTURES)
    options: dict[str, Any] = {"kept_tokens": rng.choice([None, 0, 64])}
    if not family.stateful:
        options["kv_unified"] = rng.choice([None, True, False])
    vocab = gguf_architectures.VOCABULARY
    return World(lambda **given: LLM(str(family.path()), n_threads=1, **given), vocab, options, has_text=True)


def bundled_gguf(rng: random.Random) -> World:
    options = {"kept_tokens": rng.choice([None, 0, 64]), "kv_unified": rng.choice([None, True, False])}
    path = str(gguf_models.bundled("f32"))
    return World(lambda **given: LLM(path, n_threads=1, **given), 4000, options, has_text=True)


WORLDS = (transformers, encoder_decoder, gguf, bundled_gguf)


def random_prompt(rng: random.Random, world: World, llm: LLM, earlier: Sequence[list[int]]) -> list[int]:
    """Token ids: often an earlier prompt with its text or a part of them, so that sessions share entries."""
    which = rng.random()
    if earlier and which < 0.4:
        whole = rng.choice(earlier)
        kept = whole[: rng.randrange(1, len(whole) + 1)] if rng.random() < 0.5 else list(whole)
        return kept + [rng.randrange(3, world.vocab) for _ in range(rng.choice([0, 0, 1, 3, 9]))]
    if llm.tokenizer is not None and which < 0.75:
        return llm.tokenizer.encode("".join(rng.choice(TEXTS) for _ in range(rng.choice([1, 2, 4]))))
    once = [rng.randrange(3, world.vocab) for _ in range(rng.choice([1, 2, 5, 9]))]
    return (once * rng.choice([1, 2, 4, 8]))[: rng.choice([1, 7, 40, 70])]


def random_options(rng: random.Random, world: World) -> dict[str, Any]:
    """Options that the text depends on."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, world.vocab) for _ in range(count)]

    found: dict[str, Any] = {"max_new_tokens": rng.choice([8, 24, 40, 60])}
    if rng.random() < 0.55:
        found |= {"temperature": rng.choice([0.3, 0.8, 1.0, 1.5]), "seed": rng.randrange(1000)}
    some = {
        "top_k": rng.choice([1, 3, 10]),
        "top_p": rng.choice([0.5, 0.9]),
        "min_p": 0.1,
        "repetition_penalty": rng.choice([1.3, 0.8]),
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {token: rng.choice([-5.0, 4.0, -100.0]) for token in ids(3)},
        "bad_words": [ids(1), ids(2), ids(2)],
        "stop_token_ids": ids(2),
        "min_new_tokens": 6,
        "logprobs": rng.choice([0, 1, 4]),
        "ignore_eos": True,
    }
    found |= {name: value for name, value in some.items() if rng.random() < 0.2}
    if world.has_text and rng.random() < 0.25:
        found |= {"stop": [rng.choice(["a", "\n", "ab", "self", "e ", "):"])], "include_stop": rng.random() < 0.4}
    if world.has_text and rng.random() < 0.2 and "ignore_eos" not in found:
        found["grammar"] = rng.choice(GRAMMARS)
    return found


def random_drafter(rng: random.Random) -> dict[str, Any]:
    drafter = rng.choice(DRAFTERS)
    return {"drafter": drafter, "drafter_options": rng.choice(OPTIONS_OF_DRAFTERS[drafter])}


def outcome(call: Callable[..., Any], prompt: list[int], options: dict[str, Any]) -> Any:
    """What a call returns, or its error."""
    try:
        return call(prompt, **options)
    except LeapaheadError as error:
        return error


def in_turns(rng: random.Random, streams: dict[int, Any]) -> dict[int, Any]:
    """The results of streams that are read in turns, at random; or the tokens of those that are closed before."""
    found: dict[int, Any] = {index: stream for index, stream in streams.items() if isinstance(stream, LeapaheadError)}
    tokens: dict[int, list[int]] = {index: [] for index in streams}
    while left := sorted(streams.keys() - found.keys()):
        index = rng.choice(left)
        try:
            piece = next(streams[index])
            tokens[index] += piece.tokens
            if piece.result is not None:
                assert tokens[index] == piece.result.tokens
                found[index] = piece.result
            elif rng.random() < 0.05:
                streams[index].close()
                found[index] = tokens[index]
        except LeapaheadError as error:
            found[index] = error
    return found


def assert_same(expected: Any, found: Any) -> None:
    if isinstance(found, (CacheFull, Refused)):  # no room for so many, or the family takes no drafts
        return
    if isinstance(found, list):  # of a stream that was closed
        assert isinstance(expected, LeapaheadError) or expected.tokens[: len(found)] == found
        return
    assert type(found) is type(expected), found
    if isinstance(found, Result):
        if found.finish_reason == "length":  # a smaller cache may end a text earlier
            expected.tokens[len(found.tokens) :] = []
        assert found.tokens == expected.tokens
        if len(found.tokens) == len(expected.tokens) and found.finish_reason == expected.finish_reason:
            assert (found.text, found.stop_reason) == (expected.text, expected.stop_reason)
        for one, other in zip(found.logprobs, expected.logprobs, strict=False):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the drafter .* cannot draft for this target")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", WORLDS)
def test_every_text_is_plain_decodings(make: Callable[[random.Random], World], seed: int) -> None:
    rng = random.Random(f"{make.__name__} {seed}")
    world = make(rng)
    plain = world.load(max_batch=1, drafter="plain")
    options = {name: value for name, value in world.options.items() if value is not None}
    llm = world.load(max_batch=rng.choice([1, 2, 3, 5]), prefill_chunk=rng.choice([None, 4, 16, 33]), **options)
    earlier: list[list[int]] = []
    for _ in range(3):
        prompts = [random_prompt(rng, world, plain, earlier) for _ in range(rng.choice([1, 2, 4, 7]))]
        given = [random_options(rng, world) for _ in prompts]
        drafted = [one | random_drafter(rng) for one in given]
        expected = [outcome(plain.generate, prompt, one) for prompt, one in zip(prompts, given, strict=True)]
        if rng.random() < 0.5:
            with ThreadPoolExecutor(len(prompts)) as pool:
                found = list(pool.map(partial(outcome, llm.generate), prompts, drafted))
        else:
            streams = dict(enumerate(map(partial(outcome, llm.stream), prompts, drafted)))
            found = [one for _, one in sorted(in_turns(rng, streams).items())]
        earlier += [each.prompt_tokens + each.tokens for each in expected if isinstance(each, Result)]
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    llm.close()
    plain.close()
