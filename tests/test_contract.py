"""Every drafter on every target gives plain decoding's text, inside its budget, and again when asked again.

To put another target under the contract, add a `Case` to `CASES`: nothing below knows what the targets are. The
Transformers target has its own, over many architectures (test_transformers_architectures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
from helpers import (
    GREEDY,
    Empty,
    Oracle,
    RandomTrees,
    Run,
    Scattered,
    Text,
    Watched,
    assert_same_text,
    begin,
    drafters_for,
    full_text,
    run,
)

from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.drafters.planned import Grown
from leapahead.drafters.registry import BUILT_IN, factory, load
from leapahead.planner.source import Source
from leapahead.drafters.sources.corpus import write
from leapahead.drafters.sources.datastore import Header
from leapahead.drafters.sources.lookahead import Judge, LookaheadSource
from leapahead.engine.loop import decode
from leapahead.models.base import CHAIN, LOGITS, TOP_K, TREE, Forgetful, Target
from leapahead.models.toy import ToyTarget
from leapahead.planner import profile


@dataclass(frozen=True)
class Case:
    """A target with a prompt for it and the text of its tokens."""

    target: Target
    prompt: tuple[int, ...]
    text: Text
    length: int = 26  # of a text
    together: int = 100  # sequences that there is room for


def letters(token: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[token % 26] * (1 + token % 2)


def toy(prompt: Sequence[int], **options: Any) -> Callable[[], Case]:
    return lambda: Case(ToyTarget(**options), tuple(prompt), letters)


def llama_cpp(together: int = 100, **options: Any) -> Case:
    """A random llama in float32, which brings its cache in float32: no two scores are equal by rounding."""
    import gguf_models

    from leapahead.models.llama_cpp.context import LlamaCppOptions
    from leapahead.models.llama_cpp.model import load

    options = {"n_ctx": 2048, "n_threads": 1, **options}
    target, _ = load(gguf_models.llama(), LlamaCppOptions(**options))
    return Case(target, (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), letters, together=together)


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
    CASES["llama.cpp, few sequence ids"] = lambda: llama_cpp(together=20, n_seq_max=30)

# A toy takes as long as its twin.
pytestmark = pytest.mark.filterwarnings("ignore:the draft model toy")

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

TWIN, POOR = "a twin", "a poor one"  # stand for draft models: one that is always right, and one that seldom is
STORE = "a datastore"  # stands for the file that knows the texts of the case

# The registered drafters with their defaults, and at the edges of their options.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "auto": [
        {},
        {"nodes": 8},
        {"nodes": 40, "sources": "prediction, recycling, lookahead", "datastore": STORE},
        {"nodes": 9, "max_nodes": 3, "seed_aware": False},
        {"nodes": 7, "draft": POOR},
    ],
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
    "ngram": [{}, {"longest": 1, "nodes": 2}],
    "suffix": [{}, {"nodes": 0}],
    "recycling": [{}, {"k": 1, "longest": 1, "nodes": 2}],
    "datastore": [{"file": STORE}],
    "prediction": [{}, {"nodes": 0}],
    "draft_model": [
        {"draft": TWIN, "nodes": 4, "depth": 4, "chain": True},
        {"draft": TWIN},
        {"draft": POOR, "nodes": 9, "depth": 3},
    ],
}
NAMES = [name for name in BUILT_IN if load(name).same_text]
REGISTERED = {
    f"{name} {options or ''}".strip(): (name, options) for name in NAMES for options in OPTIONS.get(name, [{}])
}
MADE_UP = list(drafters_for(()))


class Windowed(Auto):
    """`auto` with a window that rides along from the first step, whether it pays or not."""

    name: ClassVar[str] = "windowed"

    def _enter(self, target: Target) -> list[Source]:
        sources = super()._enter(target)
        for source in sources:
            if isinstance(source, LookaheadSource) and source.judge.level == 0:
                source.judge = Judge()
                source.judge.level = 2
        return sources


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@dataclass(frozen=True)
class Maker:
    """Makes one of the drafters for a case; those that must be told something are told about the text of the case."""

    name: str
    case: Case
    folder: Path  # for datastores

    def __call__(self, params: SamplingParams) -> Drafter:
        if self.name in REGISTERED:
            name, options = REGISTERED[self.name]
            return factory(name, **self.filled(options))()
        if self.name == Windowed.name:
            return Windowed(nodes=5)
        return drafters_for(plain_text(self.case, params))[self.name]()

    def filled(self, options: dict[str, Any]) -> dict[str, Any]:
        made = {STORE: lambda: str(self.store()), TWIN: self.twin, POOR: self.poor}
        return {key: made[value]() if value in made else value for key, value in options.items()}

    def twin(self) -> Target:
        return self.case.target if isinstance(self.case.target, ToyTarget) else self.poor()

    def poor(self) -> Target:
        return ToyTarget(vocab_size=self.case.target.vocab_size, order=1, seed=9)

    def store(self) -> Path:
        """Of plain decoding's texts under all parameters."""
        file = self.folder / f"{id(self.case)}.store"
        if not file.exists():
            texts = [plain_text(self.case, params) for params in PARAMS.values()]
            write(file, Header.of("", "", self.case.target.vocab_size, sum(map(len, texts)), len(texts)), texts)
        return file

    def given(self, params: SamplingParams) -> dict[str, Any]:
        """What goes with the request: plain decoding's text with gaps and with tokens that are not its own."""
        name, options = REGISTERED.get(self.name, ("", {}))
        if name != "prediction" and "prediction" not in options.get("sources", ""):
            return {}
        text = plain_text(self.case, params)[len(self.case.prompt) :]
        return {"prediction": [0 if at % 9 == 4 else token for at, token in enumerate(text) if at % 8 != 7]}


@pytest.fixture(params=[*REGISTERED, Windowed.name, *MADE_UP])
def make(request: pytest.FixtureRequest, case: Case, folder: Path) -> Maker:
    return Maker(request.param, case, folder)


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


def test_the_text_is_plain_decodings_however_it_ends(case: Case, params: SamplingParams, make: Maker) -> None:
    for stop in ways_to_stop(case, params).values():
        options = {"params": params, "stop": stop, "text": case.text, **make.given(params)}
        assert_same_text(case.target, make(params), case.prompt, **options)


SAMPLED = PARAMS["T 0.7"]


def test_twice_the_same(case: Case, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same drafts, same steps: nothing hidden decides, and a new instance remembers nothing.

    What is learned of a target is shared, and how much to draft is decided by the clock; not here.
    """

    def once() -> Run:
        drafter, given = make(SAMPLED), make.given(SAMPLED)
        if isinstance(case.target, Forgetful):
            case.target.forget()  # of a prompt that need not be read, nothing is learned
        if isinstance(drafter, Grown):
            monkeypatch.setattr(profile, "_machines", WeakKeyDictionary())
            drafter.nodes, drafter.depth = drafter.nodes or 8, drafter.depth or 2
        return run(case.target, drafter, case.prompt, params=SAMPLED, stop=stop, **given)

    stop = StopParams(max_new_tokens=case.length)
    one, two = once(), once()
    assert [step.tree for step in one.steps] == [step.tree for step in two.steps]
    assert [step.verdict for step in one.steps] == [step.verdict for step in two.steps]


def test_every_draft_keeps_to_its_budget(case: Case, make: Maker) -> None:
    """`Watched` looks at nodes, depth and leaves; towards the end of the text less and less depth is left."""
    stop = StopParams(max_new_tokens=14)
    for nodes in (0, 1, 2, 7):
        drafter = Watched(make(SAMPLED), nodes)
        assert_same_text(case.target, drafter, case.prompt, params=SAMPLED, stop=stop, **make.given(SAMPLED))
        assert len(drafter.trees) > 0


def test_a_batch_of_all_drafters_gives_each_its_own_text(case: Case, params: SamplingParams, folder: Path) -> None:
    makers = [Maker(name, case, folder) for name in (*REGISTERED, Windowed.name, *MADE_UP)]
    parts = -(-len(makers) // case.together)
    for part in range(parts):
        decode_together(case, params, dict(list(enumerate(makers))[part::parts]))


def decode_together(case: Case, params: SamplingParams, makers: dict[int, Maker]) -> None:
    generations, expected = [], []
    for number, make in makers.items():
        seeded = SamplingParams(**{**vars(params), "seed": 100 + number})  # 23 meets a tie at the edge of top-p
        stop = StopParams(max_new_tokens=3 + number)
        prompt = case.prompt[number % 3 :] or case.prompt
        expected.append(full_text(case.target, prompt, params=seeded, stop=stop))
        given = make.given(params)
        generations.append(begin(case.target, make(params), prompt, params=seeded, stop=stop, **given))
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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "plain"])
def test_every_registered_drafter_pays_on_a_text_that_repeats(name: str, params: SamplingParams, folder: Path) -> None:
    """The table of the toy looks one token back, so that greedy text is a loop and sampled text comes round often."""
    case = case_that_repeats()
    options = OPTIONS[name][0] if name != "auto" else {"nodes": 8}  # here a forward takes no time, and drafting does
    make = Maker(f"{name} {options or ''}".strip(), case, folder)
    stop = StopParams(max_new_tokens=case.length)
    done = run(case.target, make(params), case.prompt, params=params, stop=stop, **make.given(params))
    assert done.generation.stats.acceptance_length > 1.15


@cache
def case_that_repeats() -> Case:
    return Case(ToyTarget(vocab_size=4, order=1, sharpness=6.0, seed=1), (0, 1, 2, 3), letters, length=100)


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_says_what_it_is(name: str, folder: Path) -> None:
    """Its registered name, its needs, its figures in plain types."""
    drafter = load(name)
    assert drafter.name == name
    assert drafter.needs <= {CHAIN, TREE, LOGITS, TOP_K}
    options = OPTIONS[name][0]
    make = Maker(f"{name} {options or ''}".strip(), case_of("usual"), folder)
    done = run(make.case.target, make(GREEDY), make.case.prompt, **make.given(GREEDY))

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
        return type(value) in (int, float, str, bool)

    assert is_plain(done.generation.stats.drafter)


@pytest.mark.parametrize("name", [name for name, (drafter, _) in REGISTERED.items() if TREE not in load(drafter).needs])
def test_a_drafter_that_needs_no_trees_drafts_chains(
    name: str, case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a target has none; those that plan for a target may branch in others."""
    make = Maker(name, case, folder)
    drafter = Watched(make(SAMPLED), 1000)
    if isinstance(drafter.inner, Grown):
        monkeypatch.setattr(case.target, "capabilities", case.target.capabilities - {TREE})
        drafter.inner.nodes = drafter.inner.nodes or 8
    done = run(case.target, drafter, case.prompt, params=SAMPLED, **make.given(SAMPLED))
    assert all(tree.is_chain for tree in drafter.trees)
    if isinstance(drafter.inner, Grown):
        assert done.tokens == plain_text(case, SAMPLED, 24)[len(case.prompt) :]
