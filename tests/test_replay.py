"""Models with recurrent layers that take chains: whatever is drafted, reused or interrupted, the text stays the same.

Every family whose drafts are read again after a rejection; three of them are fast: one with a gated delta rule, one
with Mamba-2, and RWKV, which takes its states as a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, VOCABULARY
from helpers import NoisyChain, attached

from leapahead import Engine, Request
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.models.base import BRANCHES, Capture, read_prompt
from leapahead.models.transformers import selftest
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.recurrent import NativeExecutor
from leapahead.models.transformers.replay import MOST_REPLAYED, ReplayExecutor
from leapahead.planner.draft import Proposal, SequenceView

FAST = ("qwen3_next", "rwkv")
NAMES = [each.name for each in ARCHITECTURES if each.expect == "replay"]
FAMILIES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES]
PROMPTS = ([5, 6, 7], [*range(3, 23)], [9], [5, 6, 7, 8])
LENGTH = 200
GREEDY = SamplingParams()
MODES = {
    "greedy": [GREEDY] * len(PROMPTS),
    "sampled": [SamplingParams(temperature=1.0, top_k=40, seed=11 + i) for i in range(len(PROMPTS))],
}


@cache
def target_of(name: str) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build())


def request(
    engine: Engine,
    prompt: Sequence[int],
    drafter: Any = None,
    params: SamplingParams = GREEDY,
    length: int = LENGTH,
    **options: Any,
) -> Request:
    """`drafter` is one of the test's own, or a name and options; None decodes plainly."""
    made = engine.drafter(drafter[0], **drafter[1]) if isinstance(drafter, tuple) else attached(engine, drafter)
    return Request(list(prompt), made, params, StopParams(max_new_tokens=length), **options)


@cache
def plain(name: str, prompt: tuple[int, ...], params: SamplingParams = GREEDY, length: int = LENGTH) -> list[int]:
    """The prompt and its text, decoded by itself with nothing kept from before."""
    target = target_of(name)
    target.forget()
    engine = Engine(target)
    handle = engine.submit(request(engine, prompt, None, params, length))
    engine.run([handle])
    return [*prompt, *handle.tokens]


def drafted(
    target: TransformersTarget, made: Sequence[Any], params: Sequence[SamplingParams], first: int
) -> tuple[list[list[int]], list[Any]]:
    """`PROMPTS` decoded together, `first` of them at once, each of the others some steps later; prompts in chunks."""
    engine = Engine(target, max_batch=4, prefill_chunk=8)
    requests = [request(engine, *each) for each in zip(PROMPTS, made, params, strict=False)]
    handles = [engine.submit(each) for each in requests[:first]]
    for each in requests[first:]:
        for _ in range(5):
            engine.step()
        handles.append(engine.submit(each))
    engine.run(handles)
    texts = [[*prompt, *handle.tokens] for prompt, handle in zip(PROMPTS, handles, strict=False)]
    return texts, [handle.stats for handle in handles]


DRAFTERS: dict[str, Callable[[list[int], int], Any]] = {
    "noisy": NoisyChain,
    "prompt_lookup": lambda text, seed: ("prompt_lookup", {}),
    "auto": lambda text, seed: ("auto", {"nodes": 4}),
    "recycling": lambda text, seed: ("recycling", {"nodes": 4}),
}
FAST_CASES = (("rwkv", "sampled", "noisy", 1),)
CASES = [
    pytest.param(
        name,
        mode,
        drafter,
        batch,
        marks=() if (name, mode, drafter, batch) in FAST_CASES else pytest.mark.slow,
    )
    for name in NAMES
    for mode in MODES
    for drafter in DRAFTERS
    for batch in (1, 4)
]


@pytest.mark.parametrize(("name", "mode", "drafter", "batch"), CASES)
def test_texts_are_those_of_plain_decoding(name: str, mode: str, drafter: str, batch: int) -> None:
    target, params = target_of(name), MODES[mode]
    texts = [plain(name, tuple(prompt), each) for prompt, each in zip(PROMPTS[:batch], params, strict=False)]
    found, stats = drafted(target, [DRAFTERS[drafter](text, i) for i, text in enumerate(texts)], params, min(batch, 2))
    assert found == texts
    accepted, tried = sum(each.accepted for each in stats), sum(each.drafted for each in stats)
    assert tried > 0
    if drafter == "noisy":
        assert 0.3 < accepted / tried < 0.9, "drafts are right and wrong"


class Forked(NoisyChain):
    """A noisy chain, before or behind two branches of random tokens."""

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        tree = super().propose(sequence, budget).tree
        right = tree.token_list[1:]
        forks = [
            [*right[: self.rng.integers(len(right) + 1)], *self.rng.integers(3, VOCABULARY, 2).tolist()]
            for _ in range(2)
        ]
        paths = [right, *forks] if self.rng.random() < 0.5 else [*forks, right]
        return Proposal(TokenTree.from_paths(sequence.root, paths, budget))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_with_branches(name: str, mode: str) -> None:
    """While one session runs: the right path is one of several, and often cut off before its end."""
    target, params = target_of(name), MODES[mode]
    executor = target.executor
    assert isinstance(executor, ReplayExecutor)
    assert BRANCHES not in target.info.capabilities, "they are for accelerators"
    if not executor.masked:  # such as RWKV, whose own forward of two rows is wrong
        assert target.max_leaves == 1
        return
    assert "on a CPU" in target.refusals[BRANCHES]
    if mode == "greedy":
        native = NativeExecutor(target.model, target.config, shared=False)
        with torch.no_grad():
            own = selftest.OwnOutputs(target.model)
            found = selftest.run(executor, own, target.ordinary_ids(), (16,), native=native, branches=True)
        assert found.passed
    for prompt, each in zip(PROMPTS[:2], params, strict=False):
        text = plain(name, tuple(prompt), each, 80)
        engine = Engine(target, prefill_chunk=8)
        handle = engine.submit(request(engine, prompt, Forked(text, 3), each, 80))
        engine.run([handle])
        assert [*prompt, *handle.tokens] == text
        assert handle.stats.accepted > 20
        assert handle.stats.replayed > 0


SETTINGS = ("granitemoehybrid", "nemotron_h", "zamba2", "falcon_h1", "qwen3_next")


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_modules_have_other_settings_while_they_read_drafts(name: str) -> None:
    """On models that nobody else runs: short chunks and time steps without bounds, and none of it for prompts."""
    model = replace(BY_NAME[name], options={**BY_NAME[name].options, **LONG_CHUNKS.get(name, {})}).build()
    target, seen = TransformersTarget(model, exclusive=True), set[tuple[bool, Any, Any]]()
    assert target.info.replays
    layers = [module for module in model.modules() if hasattr(module, "chunk_size")]
    before = [(layer.chunk_size, layer.time_step_limit) for layer in layers]

    def hook(module: Any, inputs: Any, output: Any) -> None:
        seen.add((output.shape[1] > 8, module.chunk_size, module.time_step_limit))

    hooks = [layer.register_forward_hook(hook) for layer in layers]
    prompt, engine = list(range(3, 23)), Engine(target)
    text: list[int] = []
    for drafter in (None, NoisyChain):
        handle = engine.submit(request(engine, prompt, drafter and drafter([*prompt, *text]), length=60))
        engine.run([handle])
        assert not text or handle.tokens == text
        text = handle.tokens
    for each in hooks:
        each.remove()
    assert [(layer.chunk_size, layer.time_step_limit) for layer in layers] == before
    if layers:
        (chunk, limit), *_ = before
        assert (True, chunk, limit) in seen
        assert (False, 8, (0.0, math.inf)) in seen
        assert chunk == 32


LONG_CHUNKS = {
    "granitemoehybrid": {"mamba_chunk_size": 32},
    "falcon_h1": {"mamba_chunk_size": 32},
    "nemotron_h": {"chunk_size": 32},
    "zamba2": {"chunk_size": 32},
}


@pytest.mark.slow
def test_rejections_in_a_row_do_not_add_up() -> None:
    """Every draft is wrong: ever more tokens are replayed, until they are read by themselves."""
    target, prompt = target_of("qwen3_next"), PROMPTS[0]
    text = plain("qwen3_next", tuple(prompt), GREEDY, 60)
    replayed: list[int] = []
    engine = Engine(target)
    wrong = NoisyChain([(token + 1) % VOCABULARY for token in text])
    handle = engine.submit(
        request(engine, prompt, wrong, length=60, on_step=lambda step: replayed.append(handle.stats.replayed))
    )
    engine.run([handle])
    assert [*prompt, *handle.tokens] == text
    steps = np.diff([0, *replayed])
    assert steps.max() == MOST_REPLAYED + 1
    assert (steps == 1).sum() >= 2


def test_rows_that_are_filled_up_reach_no_further_than_their_text() -> None:
    """Rotary embeddings that scale with the length take it from the greatest position of the whole forward."""
    target, greatest = target_of("qwen3_next"), list[int]()
    sessions = [target.open(range(3, 3 + length), GREEDY) for length in (30, 12)]
    for session in sessions:
        read_prompt(target, session)
    rotary = target.model.model.rotary_emb
    hook = rotary.register_forward_pre_hook(lambda module, given: greatest.append(int(given[1].max())))
    target.step(sessions, [TokenTree.root(32), TokenTree.chain(14, [5, 6, 7, 8])])
    hook.remove()
    for session in sessions:
        session.close()
    assert greatest == [29]


def test_states_that_stay_behind_keep_no_memory_of_other_rows() -> None:
    """Those of a row whose draft was rejected, and those that are kept of a closed session."""
    target = target_of("qwen3_next")
    target.forget()
    sessions: list[Any] = [target.open(prompt, GREEDY) for prompt in PROMPTS[:2]]
    rows = [session.state.row for session in sessions]

    def step(draft: list[int]) -> None:
        """One forward for both, of which the roots alone are kept."""
        trees = [TokenTree.chain(session.tokens[-1], draft) for session in sessions]
        for session, choices in zip(sessions, target.step(sessions, trees), strict=True):
            session.commit(Verdict((0,), (int(choices[0]),), 0))

    def parts(states: Any) -> set[float]:
        """Of the memory that these tensors hold, the part that is their own."""
        return {each.nbytes / each.untyped_storage().nbytes() for each in states.tensors.values()}

    for session in sessions:
        read_prompt(target, session)
    step([])
    assert all(parts(row.states) == {0.5} for row in rows), "one forward computes the states of both"
    step([1])
    assert all(row.replay == 1 for row in rows)
    assert all(parts(row.states) == {1.0} for row in rows)
    step([])
    assert all(row.replay == 0 for row in rows)
    for session in sessions:
        session.close()
    for row in rows:
        assert row.kept[-1] is row.states
        assert all(parts(each) == {1.0} for each in row.kept)


# ------------------------------------------------------------------------------------------------------------ prefixes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_begin_like_earlier_ones(name: str) -> None:
    """One is the same again, one continues its text, one parts in its middle; also while a session is open."""
    prompt = tuple(range(3, 23))
    text = plain(name, prompt, GREEDY, 40)
    others = {"again": prompt, "continued": (*text[:50], 7, 8, 9), "parted": (*prompt[:11], 30, 31, 32, 33)}
    texts = {what: plain(name, other, GREEDY, 40) for what, other in others.items()}
    target = target_of(name)
    for is_open in (False, True):
        target.forget()
        engine = Engine(target, prefill_chunk=8)
        running = engine.submit(request(engine, PROMPTS[0], None)) if is_open else None
        for _ in range(6):
            engine.step()
        first = engine.submit(request(engine, prompt, NoisyChain(text), length=40))
        engine.run([first])
        assert [*prompt, *first.tokens] == text
        for what, other in others.items():
            handle = engine.submit(request(engine, other, NoisyChain(texts[what]), length=40))
            engine.run([handle])
            assert [*other, *handle.tokens] == texts[what], what
            assert (handle.stats.reused_tokens >= len(prompt) - 1) == (what != "parted"), what
        if running is not None:
            engine.run([running])
            assert [*PROMPTS[0], *running.tokens] == plain(name, tuple(PROMPTS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_a_prompt(name: str) -> None:
    """They are forks of one session, which may be made where a rejected draft left tokens to be read again."""
    target, prompt = target_of(name), tuple(range(3, 23))
    params = [SamplingParams(temperature=1.0, top_k=40, seed=seed) for seed in range(3)]
    texts = [plain(name, prompt, each, 40) for each in params]
    target.forget()
    engine = Engine(target)
    handles = engine.submit_samples(request(engine, prompt, ("recycling", {"nodes": 4}), length=40), params)
    engine.run(handles)
    assert [[*prompt, *handle.tokens] for handle in handles] == texts

    session = target.open(prompt, GREEDY)
    read_prompt(target, session)
    advance(target, session, plain(name, prompt, GREEDY, 60), seed=2, steps=5, wrong=True)
    assert session.replay > 0
    fork = target.fork(session, GREEDY)
    text = plain(name, prompt, GREEDY, 60)
    advance(target, fork, text, seed=3, steps=6)
    advance(target, session, text, seed=4, steps=6)
    for each in (fork, session):
        assert each.tokens == text[: len(each.tokens)]
        each.close()


def advance(
    target: TransformersTarget, session: Any, text: Sequence[int], seed: int, steps: int, wrong: bool = False
) -> None:
    """Some steps with noisy chains; the last one is rejected whole if `wrong`."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        at = len(session.tokens)
        chain = [t if rng.random() < 2 / 3 else int(rng.integers(VOCABULARY)) for t in text[at : at + 4]]
        if wrong and step == steps - 1:
            chain = [(text[at] + 1) % VOCABULARY, *chain]
        tree = TokenTree.chain(session.tokens[-1], chain)
        (choices,) = target.step([session], [tree])
        session.commit(verify(tree, choices))


# -------------------------------------------------------------------------------------------------------------- faults


@contextmanager
def raising(module: torch.nn.Module) -> Iterator[None]:
    """The module's next output is an interrupt."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = module.register_forward_hook(interrupt)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_interrupted_forward_leaves_states_as_they_were(name: str) -> None:
    """At the beginning of a forward, behind all of its layers, and while a prompt is read."""
    prompts = (tuple(range(3, 23)), (9, 4))
    texts = [plain(name, prompt, GREEDY, 60) for prompt in prompts]
    target = target_of(name)
    target.forget()
    places = [target.model.get_input_embeddings(), target.model.get_output_embeddings()]
    sessions = [target.open(prompt, GREEDY) for prompt in prompts]
    for session in sessions:
        while session.unread:
            with pytest.raises(KeyboardInterrupt), raising(places[1]):
                target.prefill(session, 8)
            target.prefill(session, 8)
    rng, interrupted = np.random.default_rng(0), 0
    while all(len(session.tokens) < 60 for session in sessions):
        trees = []
        for session, text in zip(sessions, texts, strict=True):
            at, depth = len(session.tokens), int(rng.integers(0, 5))
            chain = [t if rng.random() < 2 / 3 else int(rng.integers(VOCABULARY)) for t in text[at : at + depth]]
            trees.append(TokenTree.chain(session.tokens[-1], chain))
        before = [kept_of(session) for session in sessions]
        with pytest.raises(KeyboardInterrupt), raising(places[int(rng.integers(2))]):
            target.step(sessions, trees)
        for session, (length, replay, states) in zip(sessions, before, strict=True):
            now = kept_of(session)
            assert now[:2] == (length, replay)
            assert all(torch.equal(now[2][place], state) for place, state in states.items())
        interrupted += any(session.replay for session in sessions)
        for session, tree, choices in zip(sessions, trees, target.step(sessions, trees), strict=True):
            session.commit(verify(tree, choices))
    assert interrupted > 3, "some with tokens to be read again"
    for session, text in zip(sessions, texts, strict=True):
        assert session.tokens == text[: len(session.tokens)]
        session.close()


def kept_of(session: Any) -> tuple[int, int, dict[Any, torch.Tensor]]:
    row = session.state.row
    states = {} if row.states is None else {place: each.clone() for place, each in row.states.tensors.items()}
    return row.length, row.replay, states


# ------------------------------------------------------------------------------------ draft models and what is captured


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_as_a_draft_model_and_with_one(name: str) -> None:
    """Drafts that grow by a forward for each token: the hybrid drafts for a llama, for itself, and a llama for it."""
    llama, hybrid = target_of("llama"), target_of(name)
    itself = TransformersTarget(BY_NAME[name].build())
    for target, draft, whose in ((llama, hybrid, "llama"), (hybrid, llama, name), (hybrid, itself, name)):
        engine = Engine(target)
        drafter = engine.drafter("draft_model", draft=draft, nodes=4, depth=4, chain=True)
        params = [GREEDY, MODES["sampled"][1]]
        handles = [
            engine.submit(Request(prompt, drafter, each, StopParams(max_new_tokens=40)))
            for prompt, each in zip(PROMPTS, params, strict=False)
        ]
        engine.run(handles)
        for prompt, each, handle in zip(PROMPTS, params, handles, strict=False):
            assert [*prompt, *handle.tokens] == plain(whose, tuple(prompt), each, 40)
            assert handle.stats.drafted > 0
        if draft is itself:
            assert handles[0].stats.acceptance_length > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_captures_are_those_of_the_model(name: str) -> None:
    """Hidden states of all layers, logits, top-k tokens; of prompts in chunks, and of chains behind replayed tokens."""
    target, rng = target_of(name), np.random.default_rng(1)
    target.forget()
    layers = tuple(range(target.info.layers + 1))
    capture = Capture(top_k=3, logits=True, hidden=layers)
    prompt = rng.integers(3, VOCABULARY, size=20).tolist()
    session = target.open(prompt, GREEDY, capture)
    rows = read_prompt(target, session, 7)
    logits, hidden = own(target, prompt[:-1], layers)
    assert near(torch.cat([torch.as_tensor(each.hidden) for each in rows]), hidden)
    top = np.concatenate([each.top_k(3)[0] for each in rows])
    assert (top == logits.topk(3).indices[-len(top) :].numpy()).all()
    replayed = 0
    for _ in range(5):
        replayed += session.replay
        drawn = rng.integers(3, VOCABULARY, size=int(rng.integers(1, 6))).tolist()
        tree = TokenTree.chain(session.tokens[-1], drawn)
        (choices,) = target.step([session], [tree], capture=capture)
        logits, hidden = own(target, [*session.tokens, *drawn], layers)
        size = len(tree)
        assert near(torch.as_tensor(choices.hidden), hidden[-size:])
        assert near(torch.as_tensor(choices.logits), logits[-size:])
        assert (choices.top_k(3)[0] == logits[-size:].topk(3).indices.numpy()).all()
        path = tree.path(int(rng.integers(size)))
        tokens = [int(tree.tokens[node]) for node in path[1:]]
        session.commit(Verdict(tuple(path), (*tokens, int(rng.integers(3, VOCABULARY))), len(tokens)))
    session.close()
    assert replayed > 0


def own(target: TransformersTarget, tokens: list[int], layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        outputs = selftest.own_outputs(target.model, np.array([tokens]), layers)
    assert outputs.hidden is not None
    return outputs.logits[0], outputs.hidden[0]


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() < 1e-4 * other.std())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities(name: str) -> None:
    target, prompt = target_of(name), PROMPTS[1]
    found = []
    for drafter in (None, NoisyChain(plain(name, tuple(prompt), GREEDY, 60))):
        engine = Engine(target)
        handle = engine.submit(request(engine, prompt, drafter, length=60, logprobs=3))
        engine.run([handle])
        found.append(handle)
    assert found[0].tokens == found[1].tokens
    assert found[1].stats.accepted > 0
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
