"""Every drafter on every kind of target gives plain decoding's text, inside its budget, and the same again.

To put another target under the contract, add a `Case` to `CASES`: nothing below knows what the targets are. Many
architectures of Transformers and llama.cpp have tests of their own. What a drafter does depends on neither, so the fast
suite takes a few targets; the whole product is slow.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import heads
import pytest
from helpers import (
    GREEDY,
    AnyDrafter,
    Empty,
    Oracle,
    RandomTrees,
    Run,
    Scattered,
    Spelling,
    Watched,
    attached,
    drafters_for,
    full_text,
    run,
)

from leapahead import Engine, Request, SamplingParams, SequenceDrafter, StopParams
from leapahead.core.text import fingerprint
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, PerSequence
from leapahead.drafters.plain import Plain
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.corpus import write
from leapahead.drafters.sources.datastore import Header
from leapahead.models.base import CHAIN, HIDDEN, LOGITS, TOP_K, TREE, KeepsPrefixes, Target
from leapahead.models.toy import ToyTarget

Text = Callable[[int], str]


@dataclass(frozen=True)
class Case:
    """A target with a prompt for it and the text of its tokens."""

    target: Target
    prompt: tuple[int, ...]
    text: Text
    length: int = 26  # of a text
    together: int = 100  # sequences that there is room for

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens that its text begins with: the prompt, or those that a decoder starts with."""
        return self.prompt if self.target.info.decoder is None else self.target.info.decoder.start


def letters(token: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[token % 26] * (1 + token % 2)


def toy(prompt: Sequence[int], **options: Any) -> Callable[[], Case]:
    return lambda: Case(ToyTarget(**options), tuple(prompt), letters)


def llama_cpp(together: int = 100, **options: Any) -> Case:
    """A random llama in float32, which brings its cache in float32: no two scores are equal by rounding."""
    import gguf_models

    from leapahead.models.llama_cpp.context import LlamaCppOptions
    from leapahead.models.llama_cpp.model import LlamaCppTarget, load
    from leapahead.models.llama_cpp.separate import SeparateLlamaCppTarget

    options = {"n_ctx": 2048, "n_threads": 1, **options}
    kind = LlamaCppTarget if options.get("kv_unified", True) else SeparateLlamaCppTarget
    target, _ = load(gguf_models.llama(), LlamaCppOptions(**options), kind)
    return Case(target, (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), letters, together=together)


def openvino(by_states: bool = False) -> Case:
    """A random llama in float32; or a Gemma 2, which is decoded by the states of its graph."""
    from tempfile import TemporaryDirectory

    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    from leapahead.models.openvino import export, folder
    from leapahead.models.openvino.options import OpenVinoOptions

    with TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if by_states:
            model: Any = Gemma2ForCausalLM(Gemma2Config(**LLAMA, head_dim=8, sliding_window=8))
        else:
            model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        model.save_pretrained(f"{place}/model")
        export.export(f"{place}/model", f"{place}/exported", "f32")
        target = folder.load(f"{place}/exported", OpenVinoOptions(n_threads=1))
    return Case(target, (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), letters, length=20)


LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}


def transformers(**options: Any) -> Case:
    """A random llama in float64."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from leapahead.models.transformers.model import TransformersTarget

    config = LlamaConfig(**LLAMA, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float64)
    return Case(
        TransformersTarget(model, name="random llama", **options), (3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4), letters, length=20
    )


def captured() -> Case:
    """The same, its forwards captured."""
    from static_parts import recorded

    return transformers(static=recorded(), eager_choice=True)


def two_devices() -> Case:
    """The same on two devices."""
    from parallel import divided

    one, other = transformers(), transformers()
    target = divided([one.target, other.target])
    atexit.register(target.close)  # the thread of the other device must not outlive the interpreter
    return Case(target, one.prompt, letters, length=20)


@cache
def encoder_decoder(seed: int = 1) -> Case:
    """A random T5 in float64, whose texts begin with a start token."""
    import seq2seq
    import torch

    from leapahead.models.transformers.encoder_decoder import new_target

    with torch.random.fork_rng(devices=[]):
        target = new_target(seq2seq.build("mt5", torch.float64, seed=seed), name="random T5")
    return Case(target, (33, 31, 34, 31, 35, 39, 32), letters, length=20)


FAST: dict[str, Callable[[], Case]] = {
    "toy": toy([3, 1, 4, 1, 5, 9, 2, 6], vocab_size=12, order=2, sharpness=2.0),
    "three leaves": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, max_leaves=3),
    "short context": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, context_length=20),
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}
SLOW: dict[str, Callable[[], Case]] = {
    "repetitive": toy([0, 1, 2, 0, 1, 2], vocab_size=5, order=2, sharpness=3.0),
    "flat": toy([7], vocab_size=30, order=3, sharpness=0.7),
    "far-sighted": toy([1, 2, 3, 4] * 3, vocab_size=8, order=5, seed=2),
    "tiny": toy([1, 0, 2], vocab_size=3, order=4, sharpness=1.0),
    "one leaf": toy([3, 1, 3, 1, 3], vocab_size=6, order=2, max_leaves=1),
    "openvino": openvino,
    "two devices": two_devices,
    "openvino, by states": lambda: openvino(by_states=True),
    "captured": captured,
    "encoder-decoder": encoder_decoder,
    "llama.cpp, a cache each": lambda: llama_cpp(together=12, n_ctx=256, n_seq_max=12, kv_unified=False),
    "llama.cpp, few sequence ids": lambda: llama_cpp(together=20, n_seq_max=30),
}
CASES = {**FAST, **SLOW}

# A toy takes as long as its twin.
pytestmark = pytest.mark.filterwarnings("ignore:.*(draft model|head)")

EVERYTHING = SamplingParams(
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
)
SAMPLED = SamplingParams(temperature=0.7, seed=1)
PARAMS = {"greedy": GREEDY, "T 1.5, everything": EVERYTHING}

TWIN, POOR = "a twin", "a poor one"  # stand for draft models: one that is always right, and one that seldom is
STORE = "a datastore"  # stands for the file that holds the texts of the case
HEAD = "a head"  # stands for a folder with a random Medusa head

# The registered drafters with their defaults, and then at the edges of their options, which the fast suite leaves out.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "auto": [
        {"nodes": 8},
        {},
        {"nodes": 40, "sources": "prediction, recycling, siblings", "datastore": STORE},
        {"max_nodes": 3, "seed_aware": False},
        {"nodes": 7, "draft": POOR},
        {"nodes": 7, "head": HEAD},
    ],
    "plain": [{}],
    "jacobi": [{}, {"block": 1}, {"block": 3}],
    "prompt_lookup": [{}, {"num_tokens": 1}, {"max_ngram": 1, "max_matches": 1}],
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
        {"draft": POOR, "nodes": 9, "depth": 3},
        {"draft": TWIN, "nodes": 4, "depth": 4, "chain": True},
        {"draft": TWIN},
    ],
    "cascade": [
        {"draft": POOR, "nodes": 9},
        {"draft": [TWIN, POOR], "nodes": 5, "chain": True, "longest": 1},
        {"draft": [POOR, TWIN], "lengths": "2,3", "nodes": 8},
        {"draft": TWIN, "lengths": "3", "ahead": 6},
        {"draft": [TWIN, POOR]},
    ],
    "ouroboros": [
        {"draft": POOR, "nodes": 9},
        {"draft": TWIN, "nodes": 12, "length": 4, "chain": True, "phrases": 1},
        {"draft": TWIN, "window": 1, "ngram": 2, "guesses": 1},
        {"draft": POOR, "window": 7, "ngram": 5, "guesses": 7, "length": 3},
    ],
    "triforce": [
        {"budget": 8, "chunk": 2, "refresh": 3},
        {"budget": 8, "chunk": 2, "draft": POOR, "draft_window": 0},
        {"budget": 100, "shortest": 0},
    ],
    "head": [{"head": HEAD, "nodes": 9}, {"head": HEAD, "nodes": 3, "chain": True}, {"head": HEAD}],
}
NAMES = [name for name in registry.BUILT_IN if registry.load(name).same_text]
REGISTERED = {
    f"{name} {options or ''}".strip(): (name, options) for name in NAMES for options in OPTIONS.get(name, [{}])
}
USUAL = [f"{name} {OPTIONS.get(name, [{}])[0] or ''}".strip() for name in NAMES]
MADE_UP = list(drafters_for(()))


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


@cache
def plain_run(case: Case, params: SamplingParams, stop: StopParams) -> tuple[list[int], Any]:
    """Plain decoding's tokens, and how they ended."""
    plain = run(case.target, None, case.prompt, params=params, stop=stop, text=case.text)
    return plain.tokens, plain.finish


def plain_text(case: Case, params: SamplingParams, length: int | None = None) -> list[int]:
    """The prompt and plain decoding's tokens."""
    stop = StopParams(max_new_tokens=length or case.length)
    return [*case.begin, *plain_run(case, params, stop)[0]]


def assert_plain_text(case: Case, drafter: AnyDrafter, params: SamplingParams, stop: StopParams, **given: Any) -> Run:
    found = run(case.target, drafter, case.prompt, params=params, stop=stop, text=case.text, **given)
    assert (found.tokens, found.finish) == plain_run(case, params, stop)
    return found


def slow(name: str, usual: Sequence[str]) -> Any:
    return name if name in usual else pytest.param(name, marks=pytest.mark.slow)


def is_fast(name: str, how: str) -> bool:
    """Greedy decoding is sampling without noise, filters and penalties, so one target is enough for it."""
    return name in FAST and (how != "greedy" or name == "toy")


@pytest.fixture(params=[slow(name, list(FAST)) for name in CASES])
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
    """Makes one of the drafters for a case; those that must know something of the text of the case are given it."""

    name: str
    case: Case
    folder: Path  # for datastores

    def __call__(self, params: SamplingParams) -> Drafter:
        if self.name in REGISTERED:
            name, options = REGISTERED[self.name]
            if not self.is_able:
                pytest.skip("this target cannot serve the drafter")
            return registry.make(name, **self.filled(options))
        drafter: SequenceDrafter = drafters_for(plain_text(self.case, params))[self.name]()
        return PerSequence(lambda: drafter)

    @property
    def is_able(self) -> bool:
        """Whether the target can serve the drafter."""
        name, _ = REGISTERED.get(self.name, ("plain", {}))
        kind = registry.load(name)
        if not kind.needs <= self.case.target.info.capabilities:
            return False
        if not kind.copies_target:
            return True
        from leapahead.models.transformers.model import TransformersTarget

        return isinstance(self.case.target, TransformersTarget) and self.case.target.info.decoder is None

    def head(self) -> str:
        info = self.case.target.info
        if HIDDEN not in info.capabilities:
            pytest.skip("this target gives no hidden states")
        where = self.folder / f"head of {info.hidden_size} and {info.vocab_size}"
        if not where.exists():
            heads.write(where, "medusa", info.vocab_size, size=info.hidden_size)
        return str(where)

    def filled(self, options: dict[str, Any]) -> dict[str, Any]:
        made = {STORE: lambda: str(self.store()), TWIN: self.twin, POOR: self.poor, HEAD: self.head}

        def fill(value: Any) -> Any:
            if isinstance(value, list):
                return [fill(each) for each in value]
            return made[value]() if value in made else value

        return {key: fill(value) for key, value in options.items()}

    def twin(self) -> Target:
        return self.case.target if isinstance(self.case.target, ToyTarget) else self.poor()

    def poor(self) -> Target:
        if self.case.target.info.decoder is not None:
            return encoder_decoder(seed=2).target
        return ToyTarget(vocab_size=self.case.target.info.vocab_size, order=1, seed=9)

    def store(self) -> Path:
        """Of plain decoding's texts under all parameters."""
        file = self.folder / f"{id(self.case)}.store"
        if not file.exists():
            texts = [plain_text(self.case, params) for params in (*PARAMS.values(), SAMPLED)]
            vocab_size = self.case.target.info.vocab_size
            spelling: Any = Spelling(self.case.text)
            write(file, Header.of("", fingerprint(spelling), vocab_size, sum(map(len, texts)), len(texts)), texts)
        return file

    def given(self, params: SamplingParams) -> dict[str, Any]:
        """What goes with the request: plain decoding's text with gaps and with tokens that are not its own."""
        name, options = REGISTERED.get(self.name, ("", {}))
        if name != "prediction" and "prediction" not in options.get("sources", ""):
            return {}
        text = plain_text(self.case, params)[len(self.case.begin) :]
        return {"prediction": [0 if at % 9 == 4 else token for at, token in enumerate(text) if at % 8 != 7]}


EVERY = [*REGISTERED, *MADE_UP]


@pytest.fixture(params=[slow(name, [*USUAL, *MADE_UP]) for name in EVERY])
def make(request: pytest.FixtureRequest, case: Case, folder: Path) -> Maker:
    return Maker(request.param, case, folder)


def ways_to_stop(case: Case, params: SamplingParams) -> dict[str, StopParams]:
    """In the middle of the text by a token or a string, and by length."""
    text = plain_text(case, params)[len(case.begin) :]
    middle = text[len(text) // 2]
    string = "".join(case.text(token) for token in text[8:12])[1:]
    return {
        "eos": StopParams(max_new_tokens=case.length, eos_token_ids=(middle,)),
        "stop string": StopParams(max_new_tokens=case.length, stop_strings=(string,)),
        "length": StopParams(max_new_tokens=case.length // 2 - 2),
    }


@pytest.mark.parametrize(
    ("case", "params"),
    [
        pytest.param(name, PARAMS[how], marks=() if is_fast(name, how) else pytest.mark.slow, id=f"{name}-{how}")
        for name in CASES
        for how in PARAMS
    ],
    indirect=["case"],
)
def test_the_text_is_plain_decodings_however_it_ends(case: Case, params: SamplingParams, make: Maker) -> None:
    whole = StopParams(max_new_tokens=case.length)
    assert_plain_text(case, make(params), params, whole, **make.given(params))
    for way, stop in ways_to_stop(case, params).items():
        if isinstance(case.target, ToyTarget) or way == "stop string":  # who stops a text does not depend on the target
            assert_plain_text(case, make(params), params, stop, **make.given(params))


@pytest.mark.slow
def test_twice_the_same(case: Case, make: Maker) -> None:
    """The same drafts and steps: nothing but the text decides them. How much pays depends on time, so not here."""

    def once() -> Run:
        drafter, given = make(SAMPLED), make.given(SAMPLED)
        if isinstance(drafter, Planned):
            drafter.nodes, drafter.depth = drafter.nodes or 8, drafter.depth or 2
        if isinstance(case.target, KeepsPrefixes):
            case.target.forget()  # nothing is captured of a prompt that need not be read
        return run(case.target, drafter, case.prompt, params=SAMPLED, stop=stop, **given)

    stop = StopParams(max_new_tokens=case.length)
    one, two = once(), once()
    assert [step.tree for step in one.steps] == [step.tree for step in two.steps]
    assert [step.verdict for step in one.steps] == [step.verdict for step in two.steps]


@pytest.mark.parametrize("name", [slow(name, [*USUAL, *MADE_UP]) for name in EVERY])
@pytest.mark.parametrize("target", [slow(name, ["toy", "three leaves"]) for name in CASES])
def test_every_draft_keeps_to_its_budget(target: str, name: str, folder: Path) -> None:
    """`Watched` checks nodes, depth and leaves; towards the end of the text less and less depth is left."""
    case = case_of(target)
    make, stop = Maker(name, case, folder), StopParams(max_new_tokens=14)
    for nodes in (0, 1, 7):
        drafter = Watched(make(SAMPLED), nodes)
        assert_plain_text(case, drafter, SAMPLED, stop, **make.given(SAMPLED))
        assert len(drafter.trees) > 0


@pytest.mark.parametrize("params", [GREEDY, pytest.param(EVERYTHING, marks=pytest.mark.slow)], ids=list(PARAMS))
@pytest.mark.parametrize(
    "case",
    [slow(name, ["llama.cpp"]) for name in CASES],
    indirect=True,
)
def test_a_batch_of_all_drafters_gives_each_its_own_text(case: Case, params: SamplingParams, folder: Path) -> None:
    able = HIDDEN in case.target.info.capabilities
    makers = [Maker(name, case, folder) for name in EVERY if able or HEAD not in name]
    makers = [make for make in makers if make.is_able]
    parts = -(-len(makers) // case.together)
    for part in range(parts):
        decode_together(case, params, dict(list(enumerate(makers))[part::parts]))


def decode_together(case: Case, params: SamplingParams, makers: dict[int, Maker]) -> None:
    spelling: Any = Spelling(case.text)
    engine = Engine(case.target, tokenizer=spelling, max_batch=len(makers))
    handles, expected = [], []
    for number, make in makers.items():
        seeded = SamplingParams(**{**vars(params), "seed": 100 + number % 12})
        stop = StopParams(max_new_tokens=3 + number % 20)
        prompt = case.prompt[number % 3 :] or case.prompt
        longest = StopParams(max_new_tokens=22)
        whole = plain_run(Case(case.target, prompt, case.text), seeded, longest)[0]
        expected.append(whole[: stop.max_new_tokens])
        request = Request(prompt, attached(engine, make(params)), seeded, stop, **make.given(params))
        handles.append(engine.submit(request))
    engine.run(handles)
    assert [handle.tokens for handle in handles] == expected


# ---------------------------------------------------------------------------- what each made-up drafter must reach


@pytest.mark.parametrize("case", ["toy", "repetitive"], indirect=False)
def test_right_drafts_are_accepted_and_empty_ones_are_not(case: str, params: SamplingParams) -> None:
    """So that equality above is not the equality of drafts that are never accepted."""
    one = case_of(case)
    text, stop = plain_text(one, params), StopParams(max_new_tokens=one.length)

    def length(drafter: AnyDrafter) -> float:
        return run(one.target, drafter, one.prompt, params=params, stop=stop).stats.acceptance_length

    new = len(text) - len(one.prompt)
    assert length(Oracle(text, depth=4)) == new / -(-new // 5)
    assert length(Scattered(text, depth=4)) == new / -(-new // 5)
    assert length(Empty()) == length(Plain()) == 1.0
    assert 1 <= length(RandomTrees()) < 3


@pytest.mark.parametrize("name", [name for name in USUAL if name != "plain"])
def test_every_registered_drafter_pays_on_a_text_that_repeats(name: str, params: SamplingParams, folder: Path) -> None:
    """The table of the toy reads one token back, so that greedy text is a loop and sampled text recurs often."""
    case = case_that_repeats()
    make = Maker(name, case, folder)
    stop = StopParams(max_new_tokens=case.length)
    done = run(case.target, make(params), case.prompt, params=params, stop=stop, **make.given(params))
    assert done.stats.acceptance_length > 1.15


@cache
def case_that_repeats() -> Case:
    return Case(ToyTarget(vocab_size=4, order=1, sharpness=6.0, seed=1), (0, 1, 2, 3), letters, length=100)


@pytest.mark.parametrize("name", USUAL)
def test_a_drafter_declares_what_it_is(name: str, folder: Path) -> None:
    """Its registered name, its needs, its figures in plain types."""
    drafter = registry.load(REGISTERED[name][0])
    assert drafter.name == REGISTERED[name][0]
    assert drafter.needs <= {CHAIN, TREE, LOGITS, TOP_K, HIDDEN}
    make = Maker(name, case_of("toy"), folder)
    done = run(make.case.target, make(GREEDY), make.case.prompt, **make.given(GREEDY))

    def is_plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
        return type(value) in (int, float, str, bool)

    assert is_plain(done.stats.drafter)


@pytest.mark.parametrize("name", [name for name in USUAL if TREE not in registry.load(name.split()[0]).needs])
def test_a_drafter_that_needs_no_trees_drafts_chains(name: str, folder: Path) -> None:
    """Where a target has none; those that plan may branch on others."""
    options = {"vocab_size": 12, "order": 2, "sharpness": 2.0}
    chains = ToyTarget(**options, capabilities=frozenset({CHAIN, LOGITS, TOP_K}))
    case = Case(chains, (3, 1, 4, 1, 5, 9, 2, 6), letters)
    make = Maker(name, case, folder)
    drafter = Watched(make(SAMPLED), 1000)
    assert_plain_text(case, drafter, SAMPLED, StopParams(max_new_tokens=24), **make.given(SAMPLED))
    assert all(tree.is_chain for tree in drafter.trees)
    assert isinstance(drafter.inner, (Planned, PerSequence))


def test_the_reference_is_plain_decodings_text() -> None:
    case = case_of("toy")
    assert plain_text(case, GREEDY) == full_text(case.target, case.prompt, stop=StopParams(max_new_tokens=case.length))
