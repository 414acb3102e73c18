"""Every drafter on every target gives plain decoding's text, inside its budget, and again when asked again.

To put another target under the contract, add a `Case` to `CASES`: nothing below knows what the targets are. The
Transformers target has its own, over many architectures (test_transformers_architectures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from helpers import (
    GREEDY,
    Empty,
    Oracle,
    RandomTrees,
    Scattered,
    Text,
    Watched,
    assert_same_text,
    begin,
    drafters_for,
    full_text,
    run,
)

from leapahead.decode import decode
from leapahead.drafter import Drafter
from leapahead.drafters import BUILT_IN, factory, load
from leapahead.drafters.plain import Plain
from leapahead.sampling import SamplingParams
from leapahead.stop import StopParams
from leapahead.target import CHAIN, TREE, Target
from leapahead.targets.toy import ToyTarget

MakeFor = Callable[[SamplingParams], Drafter]


@dataclass(frozen=True)
class Case:
    """A target with a prompt for it and the text of its tokens."""

    target: Target
    prompt: tuple[int, ...]
    text: Text
    length: int = 26  # of a text


def letters(token: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[token % 26] * (1 + token % 2)


def toy(prompt: Sequence[int], **options: Any) -> Callable[[], Case]:
    return lambda: Case(ToyTarget(**options), tuple(prompt), letters)


def llama_cpp(**options: Any) -> Case:
    """A random llama in float32, which brings its cache in float32: no two scores are equal by rounding."""
    import gguf_models

    from leapahead.targets.llama_context import LlamaCppOptions
    from leapahead.targets.llama_cpp import load

    options = {"n_ctx": 2048, "n_threads": 1, **options}
    target, _ = load(gguf_models.llama(), LlamaCppOptions(**options))
    return Case(target, (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), letters)


CASES: dict[str, Callable[[], Case]] = {
    "repetitive": toy([0, 1, 2, 0, 1, 2], vocab_size=5, order=2, sharpness=3.0),
    "usual": toy([3, 1, 4, 1, 5, 9, 2, 6], vocab_size=12, order=2, sharpness=2.0),
    "flat": toy([7], vocab_size=30, order=3, sharpness=0.7),
    "far-sighted": toy([1, 2, 3, 4] * 3, vocab_size=8, order=5, seed=2),
    "tiny": toy([1, 0, 2], vocab_size=3, order=4, sharpness=1.0),
    "one leaf": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, max_leaves=1),
    "three leaves": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, max_leaves=3),
    "short context": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, context_length=20),
}
if find_spec("llama_cpp") is not None:
    CASES["llama.cpp"] = llama_cpp
    CASES["llama.cpp, few sequence ids"] = lambda: llama_cpp(n_seq_max=30)

PARAMS = {
    "greedy": GREEDY,
    "T 0.7": SamplingParams(temperature=0.7, seed=1),
    "T 1.5, everything": SamplingParams(
        temperature=1.5,
        seed=2,
        top_k=20,
        top_p=0.95,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        bad_words=((0, 0), (1, 1, 2)),
        min_new_tokens=5,
        eos_token_ids=(1,),
    ),
}

# The registered drafters with their defaults, and at the edges of their options.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "jacobi": [{}, {"block": 1}, {"block": 3}],
    "prompt_lookup": [{}, {"num_tokens": 1}, {"max_ngram": 1, "places": 1}],
    "lookahead": [
        {},
        {"window": 1, "ngram": 2, "guesses": 1},
        {"window": 5, "ngram": 2, "guesses": 3},
        {"window": 1, "ngram": 5, "guesses": 4},
        {"window": 15, "ngram": 5, "guesses": 15, "start_from_pool": True},
        {"window": 4, "ngram": 3, "guesses": 2, "prompt_ngrams": False, "pool_capacity": 3},
    ],
}
REGISTERED = {
    f"{name} {options or ''}".strip(): (name, options) for name in BUILT_IN for options in OPTIONS.get(name, [{}])
}
MADE_UP = list(drafters_for(()))


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


@cache
def plain_text(case: Case, params: SamplingParams, length: int | None = None) -> list[int]:
    """Prompt and plain decoding's tokens."""
    return full_text(case.target, case.prompt, params=params, stop=StopParams(max_new_tokens=length or case.length))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.fixture(params=PARAMS.values(), ids=PARAMS)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param


@pytest.fixture(params=[*REGISTERED, *MADE_UP])
def make(request: pytest.FixtureRequest, case: Case) -> MakeFor:
    """Makes one of the drafters for some parameters; the made-up ones are told the text of the case."""
    if request.param in REGISTERED:
        name, options = REGISTERED[request.param]
        return lambda params: factory(name, **options)()
    return lambda params: drafters_for(plain_text(case, params))[request.param]()


def ways_to_stop(case: Case, params: SamplingParams) -> dict[str, StopParams]:
    """By length, and in the middle of the text by a token or a string."""
    text = plain_text(case, params)[len(case.prompt) :]
    middle = text[len(text) // 2]
    string = "".join(case.text(token) for token in text[8:12])[1:]
    return {
        "length": StopParams(max_new_tokens=case.length),
        "odd length": StopParams(max_new_tokens=case.length // 2 - 2),
        "one token": StopParams(max_new_tokens=1),
        "eos": StopParams(max_new_tokens=case.length, eos_token_ids=(middle,)),
        "stop token": StopParams(max_new_tokens=case.length, stop_token_ids=(middle,)),
        "stop string": StopParams(max_new_tokens=case.length, stop_strings=(string,)),
    }


def test_the_text_is_plain_decodings_however_it_ends(case: Case, params: SamplingParams, make: MakeFor) -> None:
    for stop in ways_to_stop(case, params).values():
        assert_same_text(case.target, make(params), case.prompt, params=params, stop=stop, text=case.text)


SAMPLED = PARAMS["T 0.7"]


def test_twice_the_same(case: Case, make: MakeFor) -> None:
    """Same drafts, same steps: nothing hidden decides, and a new instance remembers nothing."""
    stop = StopParams(max_new_tokens=case.length)
    one, two = (run(case.target, make(SAMPLED), case.prompt, params=SAMPLED, stop=stop) for _ in range(2))
    assert [step.tree for step in one.steps] == [step.tree for step in two.steps]
    assert [step.verdict for step in one.steps] == [step.verdict for step in two.steps]


def test_every_draft_keeps_to_its_budget(case: Case, make: MakeFor) -> None:
    """`Watched` looks at nodes, depth and leaves; towards the end of the text less and less depth is left."""
    stop = StopParams(max_new_tokens=14)
    for nodes in (0, 1, 2, 7):
        drafter = Watched(make(SAMPLED), nodes)
        assert_same_text(case.target, drafter, case.prompt, params=SAMPLED, stop=stop)
        assert len(drafter.trees) > 0


def test_a_batch_of_all_drafters_gives_each_its_own_text(case: Case, params: SamplingParams) -> None:
    text = plain_text(case, params)
    makes = [*(factory(name, **options) for name, options in REGISTERED.values()), *drafters_for(text).values()]
    generations, expected = [], []
    for number, make in enumerate(makes):
        seeded = SamplingParams(**{**vars(params), "seed": number})
        stop = StopParams(max_new_tokens=3 + number)
        prompt = case.prompt[number % 3 :] or case.prompt
        expected.append(full_text(case.target, prompt, params=seeded, stop=stop))
        generations.append(begin(case.target, make(), prompt, params=seeded, stop=stop))
    list(decode(case.target, list(generations)))
    assert [list(generation.session.tokens) for generation in generations] == expected


# ---------------------------------------------------------------------------- what each made-up drafter must reach


@pytest.mark.parametrize("case", ["repetitive", "usual", "flat", "far-sighted"], indirect=False)
def test_right_drafts_are_accepted_and_no_drafts_are_not(case: str, params: SamplingParams) -> None:
    """So that equality above is not the equality of drafts that nobody accepts."""
    one = case_of(case)
    text, stop = plain_text(one, params), StopParams(max_new_tokens=one.length)

    def length(drafter: Drafter) -> float:
        return run(one.target, drafter, one.prompt, params=params, stop=stop).generation.stats.acceptance_length

    new = len(text) - len(one.prompt)
    assert length(Oracle(text, depth=4)) == new / -(-new // 5)
    assert length(Scattered(text, depth=4)) == new / -(-new // 5)
    assert length(Empty()) == length(Plain()) == 1.0
    assert 1 <= length(RandomTrees()) < 3


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "plain"])
def test_every_registered_drafter_pays_on_a_text_that_repeats(name: str, params: SamplingParams) -> None:
    """The table of the toy looks one token back, so that greedy text is a loop and sampled text comes round often."""
    target = ToyTarget(vocab_size=4, order=1, sharpness=6.0, seed=1)
    stop = StopParams(max_new_tokens=100)
    done = run(target, factory(name)(), [0, 1, 2, 3], params=params, stop=stop)
    assert done.generation.stats.acceptance_length > 1.15


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_drafter_says_what_it_is(name: str) -> None:
    """Its registered name, its needs, its figures in plain types."""
    drafter = load(name)
    assert drafter.name == name
    assert drafter.needs <= {CHAIN, TREE}
    done = run(ToyTarget(), factory(name)())

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
        return type(value) in (int, float, str, bool)

    assert is_plain(done.generation.stats.drafter)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if TREE not in load(name).needs])
def test_a_drafter_that_needs_no_trees_drafts_chains(name: str, case: Case) -> None:
    drafter = Watched(factory(name)(), 1000)
    run(case.target, drafter, case.prompt, params=PARAMS["T 0.7"])
    assert all(tree.is_chain for tree in drafter.trees)
