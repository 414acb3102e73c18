"""Captured forwards: what is replayed is the forward, for every tree, length and batch; the text is plain decoding's.

On the CPU a graph is a tape of operations, see `static_parts`.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from helpers import GREEDY, PROMPT, AnyDrafter, Oracle, RandomTrees, Scattered, is_freed, mostly_slow, run
from hypothesis import given, settings
from hypothesis import strategies as st
from static_parts import FakeCuda, recorded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from leapahead import LLM, Engine, Request, StopParams
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import verify
from leapahead.drafters import registry
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.models.base import HIDDEN, Capture, read_prompt
from leapahead.models.transformers import memory
from leapahead.models.transformers.arguments import CACHE_NAMES
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.static import choice, gate
from leapahead.models.transformers.static.cache import MOVES, StaticCache
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import Calls
from leapahead.models.transformers.static.shapes import ROWS
from leapahead.planner.measurement import rounds

SAMPLED = SamplingParams(temperature=0.8, seed=3, top_p=0.9)


def capturing(name: str = "llama", cuda: FakeCuda | None = None, **options: Any) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build(), static=recorded(cuda), **options)


def executor_of(target: TransformersTarget) -> StaticExecutor:
    assert isinstance(target.executor, StaticExecutor)
    return target.executor


def opened(target: TransformersTarget, prompt: Any, params: SamplingParams = GREEDY) -> TransformersSession:
    session = target.open(prompt, params)
    read_prompt(target, session)
    return session


@pytest.fixture(scope="module")
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture(scope="module")
def target(cuda: FakeCuda) -> TransformersTarget:
    return capturing(cuda=cuda)


@pytest.fixture(scope="module")
def usual() -> TransformersTarget:
    return TransformersTarget(BY_NAME["llama"].build())


# ------------------------------------------------------------------------------------------------------------ texts


DRAFTERS: dict[str, Any] = {
    "oracle": lambda text: Oracle(text),
    "scattered": lambda text: Scattered(text),
    "random": lambda text: RandomTrees(nodes=20),
    "lookahead": lambda text: registry.make("lookahead", window=5, ngram=3, guesses=3),
    "recycling": lambda text: registry.make("recycling"),
    "auto": lambda text: registry.make("auto", nodes=9),
}

FAST = ("scattered", "recycling")


@pytest.mark.parametrize("params", mostly_slow([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in DRAFTERS]
)
def test_the_text_is_plain_decodings_without_graphs(
    target: TransformersTarget, usual: TransformersTarget, cuda: FakeCuda, name: str, params: SamplingParams
) -> None:
    plain = run(usual, prompt=PROMPT, params=params)
    before = cuda.log.count("replay")
    found = run(target, DRAFTERS[name]([*PROMPT, *plain.tokens]), PROMPT, params)
    assert found.tokens == plain.tokens
    assert cuda.log.count("replay") - before >= len(found.steps)


@pytest.mark.slow
def test_right_drafts_are_accepted(target: TransformersTarget) -> None:
    """So that the equality above is not that of drafts that are never accepted."""
    plain = run(target, prompt=PROMPT)
    for drafter in (Oracle, Scattered):
        stats = run(target, drafter([*PROMPT, *plain.tokens]), PROMPT).stats
        assert stats.acceptance_length > 4


@pytest.mark.slow
@pytest.mark.parametrize("eager_choice", [False, True])
def test_a_batch_gives_each_text_its_own(usual: TransformersTarget, eager_choice: bool) -> None:
    """Sequences of different lengths join and end while others go on."""
    target = capturing(eager_choice=eager_choice)
    engine = Engine(target, max_batch=5)
    handles, expected = [], []
    for number in range(7):
        params = SamplingParams(temperature=0.9, seed=number) if number % 2 else GREEDY
        prompt, stop = PROMPT[number % 4 :], StopParams(max_new_tokens=6 + 3 * number)
        plain = run(usual, prompt=prompt, params=params, stop=stop).tokens
        drafters: list[AnyDrafter] = [Scattered([*prompt, *plain]), RandomTrees(), registry.make("recycling")]
        drafter = engine.drafter("recycling") if number % 3 == 2 else drafters[number % 3]
        expected.append(plain)
        handles.append(engine.submit(Request(list(prompt), _attached(engine, drafter), params, stop)))
    engine.run(handles)
    assert [handle.tokens for handle in handles] == expected


def _attached(engine: Engine, drafter: AnyDrafter) -> Any:
    from helpers import attached

    return attached(engine, drafter)


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gemma3",
                "mistral",
                "gpt2",
                "falcon",
                "qwen2_moe",
                "gemma2",
                "gpt_oss",
                "llama4",
                "deepseek_v3",
                "phi3",
            )
        ),
    ],
)
def test_families(name: str) -> None:
    """Windows and chunks are smaller than the texts; attention is grouped, latent, or a class of the model's own."""
    plain = run(TransformersTarget(BY_NAME[name].build()), prompt=PROMPT)
    found = run(capturing(name), Scattered([*PROMPT, *plain.tokens]), PROMPT)
    assert found.tokens == plain.tokens


def test_hidden_states_are_captured_too(target: TransformersTarget, usual: TransformersTarget) -> None:
    assert HIDDEN in target.info.capabilities
    capture, found = Capture(hidden=(0, -1), top_k=2), []
    for each in (target, usual):
        session = opened(each, PROMPT)
        tree = TokenTree.from_paths(PROMPT[-1], [[1, 2], [3]])
        each.step([session], [tree], capture=capture)
        session.commit(verify(tree, each.step([session], [tree], capture=capture)[0]))
        tree = TokenTree.from_paths(session.tokens[-1], [[4], [5, 6]])
        (choices,) = each.step([session], [tree], capture=capture)
        choices.layers = capture.hidden
        found.append((choices.hidden, choices.top_k(2)[0]))
        session.close()
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert (found[0][1] == found[1][1]).all()


# ------------------------------------------------------------------------------- what a replay depends on, and where


def test_a_draft_that_grows(target: TransformersTarget, usual: TransformersTarget) -> None:
    rows = []
    for each in (target, usual):
        sessions = [opened(each, PROMPT), opened(each, PROMPT[:4])]
        trees = [TokenTree.chain(session.tokens[-1], [5]) for session in sessions]
        found = [choices.logits for choices in each.step(sessions, trees)]
        for more in ([6, 7], [8]):
            computed = [len(tree) for tree in trees]
            trees = [
                TokenTree(np.append(tree.tokens, more), np.append(tree.parents, range(len(more)))) for tree in trees
            ]
            found += [choices.logits for choices in each.step(sessions, trees, computed)]
        rows.append(torch.cat(found))
        for session in sessions:
            session.close()
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_a_cache_that_grows_or_is_forgotten_keeps_no_old_memory() -> None:
    cache = StaticCache()
    for change in (lambda: cache._make_room(1, 2 * cache.capacity), cache.forget):
        row = cache.take([3, 4, 5], 0)
        cache.begin([row], [2])
        cache.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
        cache.end()
        assert len(cache.flat) == 2
        cache.release(row)
        before = [weakref.ref(group.entries) for group in cache.groups]
        change()
        assert [each() for each in before] == [None]


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_cache_is_bounded_by_default_as_without_graphs(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the model releases the cache that its forwards were captured over."""
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_000_000)
    target = capturing(exact=exact)
    size = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    assert isinstance(target.executor, choice.RECORDING)
    assert target.info.cache_tokens == target.executor.cache.limit == 500_000 // size


def test_what_padding_rows_wrote_is_dropped_with_the_entries() -> None:
    """Padding attends to entries of closed texts, which may be NaN."""
    cache = StaticCache()
    row = cache.take([3, 4, 5], 0)
    cache.begin([row], [2])
    cache.update(torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4), 0)
    cache.end()
    spare = cache.begin_static([row], [0], 4).begins[0] + 4
    cache.groups[0].entries[:, 0, :, spare] = torch.nan
    cache.release(row)
    cache.clear()
    assert not cache.groups[0].entries.isnan().any()


@pytest.mark.slow
def test_what_is_captured_reads_no_weights_that_autocast_has_cast_before() -> None:
    """They are freed when its block ends."""
    cuda = FakeCuda()
    with torch.autocast("cpu", torch.float16):
        target = capturing(cuda=cuda)
    run(target, prompt=PROMPT)
    assert torch.is_autocast_cache_enabled()
    for graph in cuda.alive:
        made = {id(each) for *_, found in graph.tape.operations for each in tree_leaves(found)}
        weights = [args[0] for operation, args, *_ in graph.tape.operations if operation is torch.ops.aten.t.default]
        assert weights
        assert {each.dtype for each in weights if id(each) not in made} <= {torch.float32}


def test_closing_releases_what_is_captured_and_its_entries() -> None:
    """While another engine has a text, its entries stay, and what is captured over them."""
    cuda = FakeCuda()
    target = capturing(cuda=cuda)
    with LLM(target, drafter="plain") as llm:
        text = llm.generate(PROMPT, max_new_tokens=4).tokens
        entries, session = weakref.ref(executor_of(target).cache.groups[0].entries), opened(target, PROMPT)
    assert entries() is not None
    assert cuda.alive
    assert target.step([session], [TokenTree.root(PROMPT[-1])])[0][0] == text[0]
    session.close()
    llm.close()
    assert entries() is None
    assert not cuda.alive
    assert LLM(target, drafter="plain").generate(PROMPT, max_new_tokens=4).tokens == text


@pytest.mark.slow
def test_what_is_captured_outlives_the_entries() -> None:
    """Captures take long, and entries are forgotten whenever a benchmark or a measurement has come to its end."""
    cuda = FakeCuda()
    target = capturing(cuda=cuda)
    text = run(target, prompt=PROMPT)
    captured = cuda.captured
    target.forget()
    session = target.open(PROMPT, GREEDY)
    assert session.unread == len(PROMPT) - 1
    session.close()
    assert run(target, prompt=PROMPT).tokens == text.tokens
    assert cuda.captured == captured


@pytest.mark.slow
def test_an_early_exit_leaves_the_other_steps_captured() -> None:
    cuda = FakeCuda()
    target = capturing(cuda=cuda)
    plain = run(target, prompt=PROMPT)
    drafted = run(target, DraftModelDrafter("self:first=1", nodes=4, depth=2), PROMPT)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted_by["draft"] > 0
    before = cuda.log.count("replay")
    again = run(target, prompt=PROMPT)
    assert again.tokens == plain.tokens
    assert cuda.log.count("replay") - before >= len(again.steps)


@pytest.mark.slow
def test_a_step_that_captures_says_so() -> None:
    target = capturing()
    session = opened(target, PROMPT)
    trees = [TokenTree.root(session.tokens[-1]), TokenTree.chain(session.tokens[-1], [5, 6, 7])]
    found = [target.step([session], [trees[number]])[0].prepares for number in (0, 0, 1, 0, 1)]
    session.close()
    assert found == [True, False, True, False, False]


@pytest.mark.slow
def test_a_profile_is_that_of_steps_that_capture_nothing() -> None:
    """Captures that take many times as long as a step are no reason to leave larger sizes out."""
    cuda = FakeCuda()
    target = capturing(cuda=cuda)
    clock = [0.0]
    cuda.empty_cache = lambda: clock.__setitem__(0, clock[0] + 0.1)  # type: ignore[method-assign]

    def step(*given: Any, **options: Any) -> Any:
        clock[0] += 0.01
        return TransformersTarget.step(target, *given, **options)

    target.step = step  # type: ignore[method-assign]
    found = rounds(target, sizes=(1, 4, 8, 16, 32), seconds=3.0, clock=lambda: clock[0])
    assert {n: round(seconds, 6) for n, seconds in found[0].items()} == dict.fromkeys((1, 4, 8, 16, 32), 0.01)


@pytest.mark.slow
def test_no_address_changes_from_step_to_step() -> None:
    """All that a graph reads and writes stays where it is, until the cache grows; then all graphs are released."""
    cuda = FakeCuda()
    target = capturing(cuda=cuda)
    executor = executor_of(target)
    session = opened(target, PROMPT)
    seen = []
    for _ in range(8):
        tree = TokenTree.from_paths(session.tokens[-1], [[1, 2], [3]])
        session.commit(verify(tree, target.step([session], [tree])[0]))
        buffers = executor._buffers
        seen.append((executor._memory, buffers.device.data_ptr(), buffers.host.data_ptr()))
    assert len(set(seen)) == 1
    captured, alive = cuda.captured, list(cuda.alive)
    executor.cache._make_room(1, 2 * executor.cache.capacity)
    tree = TokenTree.root(session.tokens[-1])
    session.commit(verify(tree, target.step([session], [tree])[0]))
    assert cuda.captured > captured
    assert not set(alive) & set(cuda.alive)


def test_one_copy_goes_to_the_device_in_a_step(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, copies = executor_of(target)._buffers, []
    session = opened(target, PROMPT)
    tree = TokenTree.from_paths(PROMPT[-1], [[1, 2], [3]])
    target.step([session], [tree])
    session.state.row.moves = [(9, 8), (11, 9)]
    layout = buffers._layout

    class Counted:
        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            copies.append(source)

    monkeypatch.setattr(buffers, "_layout", lambda shape: layout(shape)._replace(device=Counted()))
    monkeypatch.setattr(buffers, "read", lambda shape: pytest.fail("a replay computes nothing on the host"))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a second copy"))
    with torch.no_grad(), pytest.raises(BaseException, match="nothing on the host"):  # only to take the rows apart
        target.step([session], [tree])
    assert len(copies) == 1
    session.close()


def test_a_commit_moves_entries_in_the_next_forward(target: TransformersTarget) -> None:
    session = opened(target, PROMPT)
    row = session.state.row
    plain = run(target, prompt=PROMPT).tokens
    tree = TokenTree.from_paths(PROMPT[-1], [[99, 98], plain[:2]])
    session.commit(verify(tree, target.step([session], [tree])[0]))
    length = len(PROMPT) - 1
    assert row.moves == [(length + 3, length + 1), (length + 4, length + 2)]
    assert row.length == length + 3
    target.step([session], [TokenTree.root(session.tokens[-1])])
    assert row.moves == []
    session.close()


def test_entries_that_are_not_moved_yet_are_shared(target: TransformersTarget) -> None:
    """Whoever else reads them makes the moves first: a second sequence with the same beginning, and a fork."""
    plain = run(target, prompt=PROMPT).tokens
    session = opened(target, PROMPT)
    tree = TokenTree.from_paths(PROMPT[-1], [[99, 98], plain[:2]])
    session.commit(verify(tree, target.step([session], [tree])[0]))
    assert session.state.row.moves
    fork = target.fork(session, GREEDY)
    assert not session.state.row.moves
    other = opened(target, [*PROMPT, *plain[:3]])
    for each in (session, fork, other):
        chosen = target.step([each], [TokenTree.root(each.tokens[-1])])[0][0]
        assert chosen == plain[3]
        each.close()


@pytest.mark.slow
def test_a_long_path_is_moved_at_once(target: TransformersTarget) -> None:
    plain = run(target, prompt=PROMPT).tokens[: MOVES + 2]
    session = opened(target, PROMPT)
    tree = TokenTree.from_paths(PROMPT[-1], [[99], plain[:-1]])
    session.commit(verify(tree, target.step([session], [tree])[0]))
    assert len(session.state.row.moves) > MOVES
    assert (
        target.step([session], [TokenTree.root(session.tokens[-1])])[0][0]
        == run(target, prompt=PROMPT).tokens[MOVES + 2]
    )
    session.close()


@pytest.mark.slow
def test_a_failed_forward_loses_no_committed_token(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it fail while entries are moved, those are read again from the text."""
    plain = run(target, prompt=PROMPT).tokens
    session = opened(target, PROMPT)
    tree = TokenTree.from_paths(PROMPT[-1], [[99, 98], plain[:2]])
    session.commit(verify(tree, target.step([session], [tree])[0]))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(executor_of(target).graphs, "run", fail)
        with pytest.raises(KeyboardInterrupt):
            target.step([session], [TokenTree.root(session.tokens[-1])])
    assert session.unread == 2
    read_prompt(target, session)
    assert target.step([session], [TokenTree.root(session.tokens[-1])])[0][0] == plain[3]
    session.close()


def test_padding_rows_write_into_no_sequence(target: TransformersTarget) -> None:
    """Three sequences take part in a forward of four rows, of which the fourth holds another sequence."""
    sessions = [opened(target, PROMPT[at:]) for at in range(4)]
    target.step(sessions, [TokenTree.root(each.tokens[-1]) for each in sessions])
    row = sessions[3].state.row

    def entries() -> list[torch.Tensor]:
        return [group.entries[:, row.index].clone() for group in executor_of(target).cache.groups]

    before = entries()
    target.step(sessions[:3], [TokenTree.chain(each.tokens[-1], [1, 2, 3]) for each in sessions[:3]])
    assert row.index == 3
    assert all(torch.equal(one, other) for one, other in zip(before, entries(), strict=True))
    for each in sessions:
        each.close()


def test_what_is_too_large_is_not_captured(target: TransformersTarget, cuda: FakeCuda) -> None:
    session = opened(target, PROMPT)
    tree = TokenTree.chain(PROMPT[-1], [1] * ROWS[-1])
    before = cuda.log.count("replay")
    assert target.step([session], [tree])[0].logits.shape[0] == len(tree)
    assert cuda.log.count("replay") == before
    session.close()


# ----------------------------------------------------------------------------------------------- mixed steps, at random


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(st.data())
def test_mixed_batches_lengths_and_growth(data: st.DataObject) -> None:
    """Sessions open, step, grow drafts, commit and close in any order; few graphs are kept, and the cache begins small.

    Every logit is that of the engine without graphs.
    """
    _mixed(data, steps=6)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mixed_batches_lengths_and_growth_for_long(data: st.DataObject) -> None:
    _mixed(data, steps=25)


@pytest.fixture(scope="module", autouse=True)
def pair(target: TransformersTarget, usual: TransformersTarget) -> None:
    _pair[:] = [target, usual]


_pair: list[TransformersTarget] = []


def _mixed(data: st.DataObject, steps: int) -> None:
    target, usual = _pair
    executor = executor_of(target)
    for each in _pair:
        each.executor.forget()
    executor.cache.capacity, executor.graphs.most = 24, 3
    open_: list[tuple[TransformersSession, TransformersSession]] = []
    numbers = st.integers(0, 2**32 - 1)
    try:
        for _ in range(steps):
            rng = np.random.default_rng(data.draw(numbers))
            if len(open_) < 4 and (not open_ or data.draw(st.booleans())):
                prompt = [int(token) for token in rng.integers(3, 120, size=rng.integers(1, 20))]
                open_.append((opened(target, prompt), opened(usual, prompt)))
            some = [pair for pair in open_ if data.draw(st.booleans())] or open_[:1]
            trees = [_random_tree(rng, TokenTree.root(pair[0].tokens[-1]), int(rng.integers(0, 14))) for pair in some]
            _same_step(some, trees, None)
            if data.draw(st.booleans()):
                computed = [len(tree) for tree in trees]
                trees = [_random_tree(rng, tree, int(rng.integers(1, 5))) for tree in trees]
                _same_step(some, trees, computed)
            for pair, tree in zip(some, trees, strict=True):
                path, new = tree.path(int(rng.integers(len(tree)))), int(rng.integers(3, 120))
                for session in pair:
                    session.tokens += [*tree.path_tokens(path[-1]), new]
                    session.state.commit(path)
            if data.draw(st.booleans()):
                for session in open_.pop(int(rng.integers(len(open_)))):
                    session.close()
    finally:
        for pair in open_:
            for session in pair:
                session.close()
        executor.graphs.most = 64


def _same_step(
    pairs: list[tuple[TransformersSession, TransformersSession]], trees: list[TokenTree], computed: list[int] | None
) -> None:
    ours, theirs = [
        [choices.logits for choices in each.step(list(sessions), trees, computed)]
        for each, sessions in zip(_pair, zip(*pairs, strict=True), strict=True)
    ]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def _random_tree(rng: np.random.Generator, tree: TokenTree, count: int) -> TokenTree:
    size = len(tree)
    tokens = np.append(tree.tokens, rng.integers(3, 120, size=count))
    parents = np.append(tree.parents, [rng.integers(node) for node in range(size, size + count)])
    return TokenTree(tokens.astype(np.int64), parents.astype(np.int64))


# --------------------------------------------------------------------------------------------------------------- gate


class Spoiled(torch.nn.Module):
    """A layer of the model, which does something that a graph cannot repeat."""

    def __init__(self, layer: torch.nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.calls = layer, how, 0

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.how == "reads a value" and hidden.sum().item() > 1e9:
            return hidden
        if self.how == "counts rows" and len((hidden > 0).nonzero()) < 0:
            return hidden
        found = self.layer(hidden, *args, **kwargs)
        if self.how == "a number of the host":
            cache = next(kwargs[name] for name in CACHE_NAMES if name in kwargs)
            return found * (1 + 1e-6 * sum(row.length for row in cache.rows if row.busy)) if cache else found
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reads a value", "the host reads a value in its forward (aten._local_scalar_dense)"),
        ("counts rows", "the host reads a value in its forward (aten.nonzero)"),
        ("a number of the host", "a repeated forward gives other logits"),
        ("nothing", ""),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused(how: str, reason: str) -> None:
    model = BY_NAME["llama"].build()
    usual = TransformersTarget(model)
    model.model.layers[1] = Spoiled(model.model.layers[1], how)
    assert type(usual.executor) is MaskedExecutor

    def tested() -> StaticExecutor:
        with torch.no_grad():
            assert isinstance(usual.executor, MaskedExecutor)
            return gate.tested(usual.executor, usual.ordinary_ids(), usual.test_prompts(), recorded())

    if not reason:
        assert isinstance(tested(), StaticExecutor)
        return
    with pytest.raises(Refused) as refused:
        tested()
    assert reason in str(refused.value)


@torch.library.custom_op("leapahead_tests::with_state", mutates_args=())
def with_state(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.clone(), torch.zeros(())


@with_state.register_fake
def _(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty((), device="cpu")


def test_a_state_beside_a_result_leaves_no_device() -> None:
    """As torch's attention for float32 on CUDA returns that of its random numbers."""
    with FakeTensorMode(), gate.HostReads(torch.device("cuda")):
        found, state = with_state(torch.empty(1, device="cuda"))
        assert (found.device.type, state.device.type) == ("cuda", "cpu")


def test_a_tensor_that_leaves_the_device_is_seen() -> None:
    with FakeTensorMode(), gate.HostReads(torch.device("cuda")):
        there = torch.empty(1, device="cuda") + 1
        with pytest.raises(Refused, match=r"a tensor leaves the device in its forward \(aten._to_copy\)"):
            there.cpu()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dbrx", "Transformers does not say of DbrxForCausalLM"),
        ("mamba", "it takes no token trees"),
        ("bloom", "it takes no token trees"),
    ],
)
def test_a_model_that_cannot_be_captured_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(Refused, match=f"cannot be captured .*{reason}.*; leave out static"):
        capturing(name)


def test_auto_says_once_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(BY_NAME["dbrx"].build())
    executor = target.executor
    monkeypatch.setattr(executor, "device", torch.device("cuda"))
    monkeypatch.setattr(choice, "CudaGraphs", lambda device: recorded())
    given: Any = (executor, "dbrx", target.ordinary_ids(), (3, 1), "auto")
    with pytest.warns(UserWarning, match="of dbrx are not captured as CUDA graphs, so they take longer .*DbrxFor"):
        found, refusals = choice.upgraded(*given, exclusive=True)
    assert found is executor
    assert "DbrxForCausalLM" in refusals[choice.STATIC]
    assert choice.upgraded(*given, exclusive=False) == (executor, {})


def test_a_test_without_enough_memory_leaves_the_model_as_it_is(
    usual: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes several times the memory of a short text."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(usual.executor, "device", torch.device("cuda"))
    monkeypatch.setattr(choice, "CudaGraphs", lambda device: recorded())
    monkeypatch.setattr(gate, "_tested", fail)
    why = "its test does not fit the memory of cuda"
    given: Any = (usual.executor, "llama", usual.ordinary_ids(), (3, 1))
    with pytest.warns(UserWarning, match=f"of llama are not captured as CUDA graphs, so they take longer .{why}"):
        assert choice.upgraded(*given, "auto", exclusive=True) == (usual.executor, {choice.STATIC: why})
    with pytest.raises(Refused, match=rf"cannot be captured \({why}\); leave out static"):
        choice.upgraded(*given, "graphs", exclusive=True)


@pytest.mark.parametrize("mode", ["on", "graph", ""])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(BadParameter, match=f"static={mode!r} is not possible; choose one of auto, off, graphs"):
        TransformersTarget(BY_NAME["llama"].build(), static=mode)


def test_graphs_need_a_cuda_device() -> None:
    with pytest.raises(Refused, match=r"CUDA graphs need a CUDA device, and the model is on cpu.*leave out static"):
        TransformersTarget(BY_NAME["llama"].build(), static="graphs")


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_nothing_is_captured_on_the_cpu(mode: str) -> None:
    target = TransformersTarget(BY_NAME["llama"].build(), exclusive=True, static=mode)
    assert type(target.executor) is MaskedExecutor
    assert not target.refusals


@pytest.mark.slow
def test_calls_in_place_of_graphs(usual: TransformersTarget) -> None:
    plain = run(usual, prompt=PROMPT).tokens

    def used() -> TransformersTarget:
        target = TransformersTarget(BY_NAME["llama"].build(), static=Calls())
        assert run(target, Scattered([*PROMPT, *plain]), PROMPT).tokens == plain
        return target

    assert is_freed(used, "executor")
