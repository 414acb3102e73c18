"""The Transformers target by itself: its cache, prompts, captures, refusals, and the test that it puts a model to."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any
from weakref import proxy

import numpy as np
import pytest
import seq2seq
import torch
import transformers
from architectures import BY_NAME, SIZES, VOCABULARY, sharpen
from helpers import GREEDY, Oracle, RandomTrees, Scattered, full_text, mostly_slow, run

from leapahead import LLM, Engine, Request
from leapahead.core.errors import BadLogits, BadParameter, CacheFull, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.engine.request import Handle
from leapahead.models.base import (
    CHAIN,
    EMBEDDINGS,
    HIDDEN,
    LOGITS,
    TOP_K,
    TREE,
    Capture,
    Cost,
    KeepsPrefixes,
    Target,
    read_prompt,
    require,
)
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.transformers import families, forward, memory, recurrent, require_version, selftest
from leapahead.models.transformers import model as backend
from leapahead.models.transformers.arguments import cache_name
from leapahead.models.transformers.forward import CachedExecutor, ChainExecutor, MaskedExecutor
from leapahead.models.transformers.kv_cache import KVCache, Row
from leapahead.models.transformers.masks import Inputs
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.recurrent import NativeExecutor

PROMPT = tuple(range(3, 23))
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def build(name: str = "llama", **options: Any) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build(), **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return BY_NAME["llama"].build()


@pytest.fixture
def target(model: Any) -> TransformersTarget:
    return TransformersTarget(model)


def opened(target: TransformersTarget, prompt: Any = PROMPT, params: SamplingParams = GREEDY) -> TransformersSession:
    """A session whose prompt is read."""
    session = target.open(prompt, params)
    read_prompt(target, session)
    return session


def cache_of(target: TransformersTarget) -> KVCache:
    assert isinstance(target.executor, CachedExecutor)
    return target.executor.cache


def entries(target: TransformersTarget, session: Any) -> list[torch.Tensor]:
    """[planes, heads, length, dim] of each group: what the cache holds of a session."""
    row = session.state.row
    return [group.entries[:, row.index, :, : row.length].clone() for group in cache_of(target).groups]


def accept(tree: TokenTree, node: int, bonus: int = 7) -> Verdict:
    tokens = tree.path_tokens(node)
    return Verdict(tuple(tree.path(node)), (*tokens, bonus), len(tokens))


def own(target: TransformersTarget, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The model's own logits [length, vocab], and its hidden states [length, width] of each layer."""
    with torch.no_grad():
        output = target.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return output.logits[0], [each[0] for each in output.hidden_states]


# ------------------------------------------------------------------------------------------------------- protocol


def test_is_a_target(target: TransformersTarget) -> None:
    assert isinstance(target, Target)
    assert isinstance(target, KeepsPrefixes)
    assert target.info.capabilities == {CHAIN, TREE, LOGITS, TOP_K, HIDDEN, EMBEDDINGS}
    assert (target.info.vocab_size, target.info.layers, target.info.hidden_size) == (VOCABULARY, 2, 32)
    assert target.info.context_length == SIZES["max_position_embeddings"]


def test_logits_are_of_every_node(target: TransformersTarget) -> None:
    session = opened(target)
    (choices,) = target.step([session], [TokenTree.from_paths(PROMPT[-1], [[1, 2, 3], [4, 5]])])
    assert choices.logits.shape == (6, VOCABULARY)


def test_tokens_are_shared_with_the_sampler(target: TransformersTarget) -> None:
    session = opened(target, params=SAMPLED)
    tree = TokenTree.root(PROMPT[-1])
    target.step([session], [tree])
    session.commit(accept(tree, 0))
    assert session.tokens is session.sampler.tokens
    assert session.tokens == [*PROMPT, 7]


def test_a_model_in_training_is_put_in_evaluation() -> None:
    model = BY_NAME["gpt2"].build().train()
    assert TREE in TransformersTarget(model).info.capabilities
    assert not model.training


@pytest.mark.parametrize(("name", "rows"), [("llama", 8), ("bloom", 5), ("mamba", 2)])
def test_the_cost_of_a_forward(name: str, rows: int) -> None:
    """Padding counts, where all sequences take as many rows as the longest."""
    target = build(name)
    sessions = [opened(target, PROMPT[:n]) for n in (9, 5)]
    trees = [TokenTree.chain(session.tokens[-1], [1, 2, 3][: 3 * (name != "mamba")]) for session in sessions]
    trees[1] = TokenTree.root(sessions[1].tokens[-1])
    assert target.cost(sessions, trees) == Cost(rows, 2, 9)
    assert target.info.padded == (name == "llama")


@pytest.mark.slow
def test_the_cost_of_a_replay() -> None:
    """Where sessions have one state between them, the one that did not run last reads its tokens again."""
    target = build("recurrent_gemma")
    first, second = (opened(target, PROMPT[:n]) for n in (9, 5))
    trees = [TokenTree.root(first.tokens[-1])]
    assert target.cost([second], trees).rows == 1
    assert target.cost([first], trees).rows == 9


@pytest.mark.slow
def test_a_state_in_the_modules_survives_others_that_run_the_model() -> None:
    """Such as another LLM of the model, or the user, between two tokens of a text."""
    target = build("recurrent_gemma")
    model = target.model
    expected = run(target, None, PROMPT[:9]).tokens
    engine, others = Engine(target), TransformersTarget(model)
    handle = engine.submit(Request(PROMPT[:9], engine.drafter("plain"), stop=StopParams(max_new_tokens=24)))
    while not handle.done:
        engine.step()
        if len(handle.tokens) == 3:
            run(others, None, PROMPT[5:])
        if len(handle.tokens) == 6:
            model.generate(torch.tensor([PROMPT]), max_new_tokens=2)
    assert handle.tokens == expected


def test_a_weak_proxy_takes_turns_with_its_model() -> None:
    """As `leapahead.hf` gives its target the model."""
    model = build("mamba").model
    turns = {id(NativeExecutor(each, model.config, shared=True)._turn) for each in (model, proxy(model))}
    assert len(turns) == 1


@pytest.mark.slow
def test_two_threads_run_one_model_whose_state_is_in_its_modules() -> None:
    """Each with a target of its own, as two LLMs of one loaded model have."""
    targets = [build("recurrent_gemma")]
    targets.append(TransformersTarget(targets[0].model))
    prompts = PROMPT[:9], PROMPT[3:]
    expected = [run(targets[0], None, prompt).tokens for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            found = pool.map(lambda target, prompt: run(target, None, prompt).tokens, targets, prompts)
            assert list(found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bloom", "mamba", "recurrent_gemma", "deepseek_v32"])
def test_a_fork_has_the_same_tokens_and_goes_its_own_way(name: str) -> None:
    target = build(name)
    forwards = list[int]()
    session = opened(target, PROMPT[:9])
    hook = target.model.register_forward_hook(lambda *args: forwards.append(1))
    fork = target.fork(session, SAMPLED)
    assert forwards == []
    hook.remove()
    assert (fork.unread, fork.tokens, fork.tokens is session.tokens) == (0, session.tokens, False)
    assert fork.sampler.prompt_length == 9
    for each, token in ((session, 50), (fork, 60)):
        tree = TokenTree.root(each.tokens[-1])
        target.step([each], [tree])
        each.commit(accept(tree, 0, token))
    for each in (fork, session):
        (choices,) = target.step([each], [TokenTree.root(each.tokens[-1])])
        alone = opened(build(name), each.tokens)
        assert choices[0] == build_step(name, alone.tokens, each.sampler.params)


def build_step(name: str, tokens: list[int], params: SamplingParams) -> int:
    target = build(name)
    return target.step([opened(target, tokens, params)], [TokenTree.root(tokens[-1])])[0][0]


# ---------------------------------------------------------------------------------------------------------- cache


def test_commit_moves_entries_to_where_a_prefill_puts_them(model: Any) -> None:
    target, fresh = TransformersTarget(model), TransformersTarget(model)
    session = opened(target)
    tree = TokenTree(np.array([PROMPT[-1], 40, 41, 42, 43, 44]), np.array([-1, 0, 0, 1, 2, 4]))
    target.step([session], [tree])
    session.commit(accept(tree, 5))
    assert session.tokens == [*PROMPT, 41, 43, 44, 7]
    for mine, theirs in zip(entries(target, session), entries(fresh, opened(fresh, session.tokens)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_cut_verdict_keeps_its_path_only(target: TransformersTarget) -> None:
    session = opened(target)
    tree = TokenTree.chain(PROMPT[-1], [40, 41, 42])
    target.step([session], [tree])
    session.commit(accept(tree, 3).cut(2))
    assert session.tokens == [*PROMPT, 40, 41]
    assert session.state.length == len(session.tokens) - 1


def test_commit_without_a_step_is_caught(target: TransformersTarget) -> None:
    with pytest.raises(AssertionError, match="without a step"):
        opened(target).commit(Verdict((0,), (1,), 0))


def test_a_commit_that_is_cut_off_leaves_out_no_token_of_the_penalties(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are read again, and count in the choices after them."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    session = opened(target, params=SamplingParams(frequency_penalty=-50.0))  # what was written is written again
    target.step([session], [TokenTree.root(PROMPT[-1])])
    with monkeypatch.context() as patched:
        patched.setattr(KVCache, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.commit(Verdict((0,), (40,), 0))
    read_prompt(target, session)
    assert target.step([session], [TokenTree.root(40)])[0][0] == 40


def test_a_session_whose_prompt_is_not_read_is_not_stepped(target: TransformersTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    with pytest.raises(LeapaheadError, match=r"target\.prefill"):
        target.step([session], [TokenTree.root(PROMPT[-1])])


def test_capacity_doubles_and_keeps_its_content(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(TransformersTarget(model), prompt=PROMPT).tokens
    monkeypatch.setattr(KVCache, "first_capacity", 4)
    target = TransformersTarget(model)
    assert run(target, RandomTrees(), prompt=PROMPT).tokens == expected
    assert cache_of(target).capacity == 64
    assert {group.entries.shape[3] for group in cache_of(target).groups} == {64}


def test_doubling_stops_where_the_context_ends() -> None:
    cache = KVCache(usual_length=300)
    row = cache.take([1, 2], 1)
    row.length = 290
    cache.begin([row], [10])
    assert cache.capacity == 300
    cache.begin([row], [30])
    assert cache.capacity == 320


def test_a_cache_that_cannot_double_takes_at_once_what_its_limit_allows() -> None:
    """Else it would be copied, and captured forwards made anew, in every step."""
    cache = KVCache()
    cache.limit = 1000
    rows = [cache.take([each] * 256, 0) for each in range(3)]
    found = set()
    for length in range(256, 333):
        for row in rows:
            row.length = length
        cache.begin(rows, [1] * 3)
        found.add(cache.capacity)
    assert found == {333}


def test_neighbours_are_found_in_time_in_the_number_of_rows() -> None:
    cache = KVCache()
    cache.rows = [Row(index) for index in range(2048)]
    began = process_time()
    for _ in range(4):
        assert cache._side_by_side(cache.rows[700:1724]) == 700
    assert process_time() - began < 0.1  # about 0.003; more than 0.2 where every window is compared with the rows


def test_rows_are_exchanged_until_they_are_neighbours() -> None:
    for taken in ([0, 1, 2], [5, 3, 4], [0, 2, 7], [1, 3, 4, 6], [7], list(range(8))):
        cache = KVCache()
        cache.rows = [Row(index) for index in range(8)]
        rows = [cache.rows[index] for index in taken]
        first = cache._side_by_side(rows)
        assert sorted(row.index for row in rows) == list(range(first, first + len(taken)))
        moved = sum(row.index != index for row, index in zip(rows, taken, strict=True))
        fewest = min(len(set(taken) - set(range(at, at + len(taken)))) for at in range(9 - len(taken)))
        assert moved == fewest
        assert [row.index for row in cache.rows] == list(range(8))


def test_few_keys_and_values_of_one_shape_are_one_tensor(target: TransformersTarget) -> None:
    latent = build("deepseek_v3")  # keys and values differ in width
    for each in (target, latent):
        opened(each).close()
    assert [group.entries.shape[0] for group in cache_of(target).groups] == [2 * SIZES["num_hidden_layers"]]
    assert [group.entries.shape[0] for group in cache_of(latent).groups] == [2, 2]


def test_the_cache_grows_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deep model there are never more than half of the planes beside the cache."""
    deep = replace(BY_NAME["llama"], options={"num_hidden_layers": 40}).build()
    target = TransformersTarget(deep)
    session = opened(target)
    groups = cache_of(target).groups
    assert [group.entries.shape[0] for group in groups] == [40] * 2
    before = [entries for group in groups for entries in [group.entries]]
    cache_of(target).begin([session.state.row], [300])
    assert all(group.entries.shape[3] == 512 for group in groups)
    for group, old in zip(groups, before, strict=True):
        torch.testing.assert_close(group.entries[:, :, :, :19], old[:, :, :, :19], rtol=0, atol=0)


def test_a_forward_reads_a_view(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [opened(target, PROMPT[:n]) for n in (5, 9, 7, 3)]
    cache = cache_of(target)
    write, seen = KVCache.write, list[torch.Tensor]()

    def spy(self: KVCache, place: tuple[int, int], states: torch.Tensor) -> torch.Tensor:
        seen.append(write(self, place, states))
        return seen[-1]

    monkeypatch.setattr(KVCache, "write", spy)
    some = [sessions[0], sessions[2]]  # not side by side
    target.step(some, [TokenTree.root(s.tokens[-1]) for s in some])
    storage = cache.groups[0].entries.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == storage for each in seen)
    assert {each.shape[0] for each in seen} == {2}
    assert {each.shape[2] for each in seen} == {7}  # no longer than the batch's longest row
    assert all(cache.rows[row.index] is row for row in cache.rows)


def test_rows_move_only_when_the_set_changes(target: TransformersTarget) -> None:
    sessions = [opened(target, PROMPT[:n]) for n in (5, 9, 7, 3)]
    places = list[list[int]]()
    for _ in range(3):
        for batch in (sessions, [sessions[3], sessions[1], sessions[0]]):
            trees = [TokenTree.root(s.tokens[-1]) for s in batch]
            for session, tree, _choices in zip(batch, trees, target.step(batch, trees), strict=True):
                session.commit(accept(tree, 0))
            places.append([session.state.row.index for session in sessions])
    assert all(place == places[1] for place in places[1:])


def test_a_step_of_others_between_step_and_commit(model: Any) -> None:
    """Rows move, and the entries that wait for their commit move with them."""
    target, fresh = TransformersTarget(model), TransformersTarget(model)
    sessions = [opened(target, PROMPT[:n]) for n in (5, 9, 7)]
    tree = TokenTree.from_paths(sessions[1].tokens[-1], [[40, 41], [42, 43]])
    target.step([sessions[1]], [tree])
    others = [sessions[0], sessions[2]]
    target.step(others, [TokenTree.root(s.tokens[-1]) for s in others])
    sessions[1].commit(accept(tree, 4))
    expected = opened(fresh, sessions[1].tokens)
    for mine, theirs in zip(entries(target, sessions[1]), entries(fresh, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_forget_releases_the_memory(target: TransformersTarget) -> None:
    text = run(target, prompt=PROMPT).tokens
    target.forget()
    assert cache_of(target).groups == []
    assert run(target, Scattered([*PROMPT, *text]), prompt=PROMPT).tokens == text


def test_forget_leaves_open_sessions_alone(target: TransformersTarget) -> None:
    text = run(target, prompt=PROMPT).tokens
    session = opened(target)
    target.forget()
    assert target.step([session], [TokenTree.root(PROMPT[-1])])[0][0] == text[0]
    other = target.open([*PROMPT[:3], 99], GREEDY)
    assert other.unread == 0  # of the open session's entries
    session.close()
    other.close()
    session.close()  # of a row that is given back


# ---------------------------------------------------------------------------------------------------- a full cache


def test_a_prompt_that_does_not_fit_is_refused(model: Any) -> None:
    target = TransformersTarget(model, cache_tokens=16)
    with pytest.raises(CacheFull, match=r"cache holds 16 tokens, .* 1 sequence of up to 20.*cache_tokens"):
        target.open(PROMPT, GREEDY)
    assert opened(target, PROMPT[:9]).unread == 0


def test_sessions_keep_free_what_they_reserve(model: Any) -> None:
    target = TransformersTarget(model, cache_tokens=100)
    first = target.open(PROMPT, GREEDY, reserve=40)
    second = target.open(PROMPT[:3], GREEDY, reserve=50)
    with pytest.raises(CacheFull, match="3 sequences of up to 50"):
        target.open(PROMPT[:3], GREEDY)
    for session in (first, second):
        session.close()
    alone = target.open(PROMPT, GREEDY, reserve=10**9)  # it may end before it is so long
    with pytest.raises(CacheFull):
        target.open(PROMPT[:3], GREEDY)
    alone.close()


def test_a_text_that_fills_the_cache_ends_there(model: Any) -> None:
    """With drafts that reach beyond it at the same token."""
    target = TransformersTarget(model, cache_tokens=32)
    for new in (12, 14, 100):
        done = run(target, prompt=PROMPT, stop=StopParams(max_new_tokens=new))
        assert (len(done.tokens), done.finish) == (min(new, 33 - len(PROMPT)), ("length", None))
    text = full_text(TransformersTarget(model), PROMPT, stop=StopParams(max_new_tokens=40))
    assert run(target, Oracle(text, depth=9), PROMPT, stop=StopParams(max_new_tokens=40)).tokens == done.tokens


def test_closed_sequences_give_way(model: Any) -> None:
    """Rows that are kept for their prefixes are dropped when open sequences need the space."""
    target = TransformersTarget(model, cache_tokens=128)
    kept = [opened(target, PROMPT[:n]) for n in (5, 9, 7, 3)]
    assert len(cache_of(target).rows) == 4
    for session in kept:
        session.close()
    long = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, size=100)]
    session = opened(target, long)
    assert len(cache_of(target).rows) == 1
    assert cache_of(target).capacity <= 128
    logits, _ = own(target, long)
    (choices,) = target.step([session], [TokenTree.root(long[-1])])
    torch.testing.assert_close(choices.logits[0], logits[-1], rtol=1e-4, atol=1e-4)


def test_the_cache_is_bounded_by_default(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1_000_000)
    size = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    assert cache_of(TransformersTarget(model)).limit == 500_000 // size
    with pytest.raises(BadParameter, match="cache_tokens=0"):
        TransformersTarget(model, cache_tokens=0)


# --------------------------------------------------------------------------------------------------------- prompts


def test_more_sessions_make_more_rows(target: TransformersTarget) -> None:
    sessions = [opened(target, PROMPT[:n]) for n in range(1, 6)]
    assert len({session.state.row for session in sessions}) == 5
    for session in sessions:
        session.close()
        session.close()
    assert not any(row.busy for row in cache_of(target).rows)


def test_a_session_that_cannot_be_opened_or_forked_takes_no_row(target: TransformersTarget) -> None:
    wrong, says = SamplingParams(bad_words=((10**6,),)), "outside the vocabulary"
    with pytest.raises(BadParameter, match=says):
        target.open(PROMPT, wrong)
    session = opened(target)
    with pytest.raises(BadParameter, match=says):
        target.fork(session, wrong)
    assert [row for row in cache_of(target).rows if row.busy] == [session.state.row]


def test_a_second_close_leaves_the_row_s_next_owner_alone(target: TransformersTarget) -> None:
    first = opened(target)
    first.close()
    second = opened(target)
    first.close()
    assert second.state.row.busy


def test_a_known_prefix_is_not_computed_again(model: Any) -> None:
    target = TransformersTarget(model)
    first = run(target, prompt=PROMPT).tokens
    longer = [*PROMPT, *first[:10], 50, 51]
    session = target.open(longer, GREEDY)
    assert session.unread == 1
    read_prompt(target, session)
    session.close()
    again = target.open(longer, GREEDY)
    assert again.unread == 0
    again.close()
    assert run(target, RandomTrees(), prompt=longer).tokens == run(TransformersTarget(model), prompt=longer).tokens


def test_a_prefix_is_copied_from_an_open_session(target: TransformersTarget) -> None:
    first = opened(target)
    second = target.open([*PROMPT[:15], 50, 51], GREEDY)
    assert second.unread == 1
    read_prompt(target, second)
    for mine, theirs in zip(entries(target, first), entries(target, second), strict=True):
        torch.testing.assert_close(mine[:, :, :15], theirs[:, :, :15], rtol=0, atol=0)
    assert first.tokens == list(PROMPT)


def test_what_differs_is_not_reused(target: TransformersTarget) -> None:
    opened(target).close()
    session = target.open([*PROMPT[:4], 99, *PROMPT[5:]], GREEDY)
    assert session.unread == len(PROMPT) - 1 - 4


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_prompts_are_read_in_chunks(name: str) -> None:
    target = build(name)
    expected = run(target, prompt=PROMPT).tokens
    target.forget()
    session, unread, forwards = target.open(PROMPT, GREEDY), list[int](), list[int]()
    hook = target.model.register_forward_hook(lambda module, args, output: forwards.append(output.logits.shape[1]))
    while session.unread:
        target.prefill(session, 5)
        unread.append(session.unread)
    hook.remove()
    assert unread == [14, 9, 4, 0]
    assert forwards == [1] * 4  # the head computes the last row only
    assert target.step([session], [TokenTree.root(PROMPT[-1])])[0][0] == expected[0]
    session.close()
    target.forget()
    assert run(target, prompt=PROMPT, prefill_chunk=5).tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_recurrent_prompt_is_read_at_once_with_logits_of_one_row(name: str) -> None:
    target = build(name)
    rows = list[int]()
    hook = target.model.register_forward_hook(lambda module, args, output: rows.append(output.logits.shape[1]))
    session = target.open(PROMPT, GREEDY)
    target.prefill(session, 5)
    hook.remove()
    assert (session.unread, rows) == (0, [1])


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([], BadParameter, "at least one token"),
        ([1, VOCABULARY], BadParameter, f"vocabulary of {VOCABULARY}"),
        ([-1], BadParameter, "vocabulary"),
        ([1] * 256, ContextOverflow, "256 tokens and the context 256"),
    ],
)
def test_prompts_that_cannot_be(
    target: TransformersTarget, tokens: list[int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        target.open(tokens, GREEDY)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama"])
def test_a_text_may_fill_the_context(name: str) -> None:
    """Learned positions end there; drafts must not reach beyond."""
    target = build(name)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, size=240)]
    stop = StopParams(max_new_tokens=100)
    plain = run(target, prompt=prompt, stop=stop)
    assert len(plain.tokens) == 16
    assert plain.finish == ("length", None)
    text = [*prompt, *plain.tokens]
    drafter = Scattered(text) if TREE in target.info.capabilities else Oracle(text)
    assert run(target, drafter, prompt=prompt, stop=stop).tokens == plain.tokens


# ---------------------------------------------------------------------------------------------------------- capture


LAYERS = [(0, 1, -1), (-1,), (2, 0), (1,)]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(
    "name", mostly_slow(["llama", "gemma2", "gpt2", "opt", "bloom", "mixtral"], "llama", "opt", "bloom")
)
def test_hidden_states_are_the_model_s_own(name: str, layers: tuple[int, ...]) -> None:
    """Of prompts in chunks and of nodes of trees, in a batch; again when the prompt was read before."""
    target, capture = build(name), Capture(hidden=layers)
    assert HIDDEN in target.info.capabilities
    for _ in range(2):
        sessions = [target.open(PROMPT[:n], GREEDY, capture) for n in (20, 9)]
        for session in sessions:
            rows = read_prompt(target, session, 7)
            _, states = own(target, session.tokens[:-1])
            wanted = torch.cat([states[layer] for layer in layers], dim=-1)
            torch.testing.assert_close(torch.cat([each.hidden for each in rows]), wanted, rtol=1e-4, atol=1e-4)
            assert [token for each in rows for token in each.tokens] == session.tokens[:-1]
            assert rows[0].start == 0
        paths = [[40, 41], [42]] if TREE in target.info.capabilities else [[40, 41]]
        trees = [TokenTree.from_paths(PROMPT[19], paths), TokenTree.chain(PROMPT[8], [50])]
        for session, tree, choices in zip(
            sessions, trees, target.step(sessions, trees, None, Capture(hidden=layers)), strict=True
        ):
            assert choices.hidden.shape == (len(tree), 32 * len(layers))
            for node in range(len(tree)):
                _, states = own(target, [*session.tokens, *tree.path_tokens(node)])
                wanted = torch.cat([states[layer][-1] for layer in layers])
                torch.testing.assert_close(choices.hidden[node], wanted, rtol=1e-4, atol=1e-4)
            session.commit(accept(tree, 1))
            session.close()


def test_hidden_states_of_nodes_behind_computed_ones(target: TransformersTarget) -> None:
    session = opened(target)
    capture, tree = Capture(hidden=(1,)), TokenTree.from_paths(PROMPT[-1], [[40, 41], [42]])
    target.step([session], [TokenTree.chain(PROMPT[-1], [40])])
    (choices,) = target.step([session], [tree], [2], capture)
    assert choices.hidden.shape == (2, 32)
    _, states = own(target, [*PROMPT, 40, 41])
    torch.testing.assert_close(choices.hidden[0], states[1][-1], rtol=1e-4, atol=1e-4)


def test_a_forward_without_a_capture_keeps_no_hidden_states(target: TransformersTarget) -> None:
    session = opened(target)
    (choices,) = target.step([session], [TokenTree.root(PROMPT[-1])])
    with pytest.raises(Refused, match="Capture"):
        _ = choices.hidden
    with pytest.raises(BadParameter, match=r"no layer 3 .* 0 to 2"):
        target.step([session], [TokenTree.root(PROMPT[-1])], None, Capture(hidden=(3,)))
    with pytest.raises(BadParameter, match="no layer -4"):
        target.open(PROMPT, GREEDY, Capture(hidden=(-4,)))


@pytest.mark.parametrize("name", ["gemma3n", "mamba"])
def test_hidden_states_are_refused_by_name(name: str) -> None:
    """Gemma 3n has four streams of them, and a recurrent model is decoded token by token."""
    target = build(name)
    assert HIDDEN not in target.info.capabilities
    with pytest.raises(Refused, match="hidden"):
        target.open(PROMPT, GREEDY, Capture(hidden=(1,)))


def test_hidden_states_that_are_not_the_model_s_own_are_refused() -> None:
    model = BY_NAME["llama"].build()

    def shift(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if kwargs.get(cache_name(module)) is not None and output.hidden_states is not None:
            output.hidden_states = tuple(None if each is None else each + 1 for each in output.hidden_states)
        return output

    model.register_forward_hook(shift, with_kwargs=True)
    target = TransformersTarget(model)
    assert target.info.capabilities == {CHAIN, TREE, LOGITS, TOP_K, EMBEDDINGS}
    assert "differ" in target.refusals[HIDDEN]


def test_a_model_whose_hidden_states_nobody_reads_has_no_hooks() -> None:
    """Transformers installs hooks for them, which take time in every forward, when they are asked for first."""
    model = BY_NAME["llama"].build()
    assert HIDDEN in TransformersTarget(model).info.capabilities
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_the_top_k_of_a_prompt_are_the_model_s_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last rows only, over several chunks."""
    monkeypatch.setattr(backend, "PROMPT_ROWS", 24)
    target = build(name)
    prompt = np.random.default_rng(3).integers(3, VOCABULARY, 60).tolist()
    session = target.open(prompt, GREEDY, Capture(top_k=4))
    rows = read_prompt(target, session, 16)
    assert [token for each in rows for token in each.tokens] == prompt[-25:-1]
    assert rows[0].start == 35
    tokens, logits = (np.concatenate(parts) for parts in zip(*(each.top_k(4) for each in rows), strict=True))
    wanted = own(target, prompt)[0][35:59].topk(4)
    assert tokens.tolist() == wanted.indices.tolist()
    assert logits == pytest.approx(wanted.values.numpy(), abs=1e-4)


def test_a_reused_prefix_has_captured_rows(target: TransformersTarget) -> None:
    prompt, capture = list(range(3, 33)), Capture(top_k=2)
    for text, start in ((prompt[:20], 0), (prompt, 0), (prompt, 0), ([*prompt[:9], 90, 91], 0)):
        session = target.open(text, GREEDY, capture)
        assert session.unread >= 1
        (rows,) = read_prompt(target, session)
        assert (rows.start, rows.tokens.tolist()) == (start, text[:-1])
        assert rows.top_k(2)[0].tolist() == own(target, text)[0][:-1].topk(2).indices.tolist()
        session.close()
    opened(target, [70, 71, 72, 73]).close()  # nothing was captured of it
    session = target.open([70, 71, 72, 73, 74, 75], GREEDY, capture)
    (rows,) = read_prompt(target, session)
    assert rows.tokens.tolist() == [73, 74]


def test_hidden_states_and_top_k_together(target: TransformersTarget) -> None:
    session = target.open(PROMPT, GREEDY, Capture(top_k=3, hidden=(1,)))
    (rows,) = read_prompt(target, session)
    logits, states = own(target, list(PROMPT))
    assert rows.top_k(3)[0].tolist() == logits[:-1].topk(3).indices.tolist()
    torch.testing.assert_close(rows.hidden, states[1][:-1], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- choices


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=20, top_p=0.9, repetition_penalty=1.3)])
def test_choosing_all_at_once_is_choosing_one_by_one(model: Any, params: SamplingParams) -> None:
    lazy, eager = (TransformersTarget(model, eager_choice=flag) for flag in (False, True))
    plain = run(lazy, prompt=PROMPT, params=params).tokens
    for target in (lazy, eager):
        drafter = Scattered([*PROMPT, *plain])
        assert run(target, drafter, prompt=PROMPT, params=params).tokens == plain
    sessions = [[opened(target, PROMPT[:n], params) for n in (20, 4)] for target in (lazy, eager)]
    trees = [TokenTree.from_paths(s.tokens[-1], [[1, 2], [3, 4, 5]][: i + 1]) for i, s in enumerate(sessions[0])]
    chosen = [target.step(each, trees) for target, each in zip((lazy, eager), sessions, strict=True)]
    for one, other, tree in zip(*chosen, trees, strict=True):
        assert one.of(np.arange(len(tree))).tolist() == other.of(np.arange(len(tree))).tolist()


def test_choosing_at_once_where_top_p_keeps_very_many_tokens() -> None:
    llama = BY_NAME["llama"]
    large = replace(llama, options={**llama.options, "vocab_size": 2500}).build()
    params = SamplingParams(temperature=4.0, seed=3, top_p=0.99)
    texts = [run(TransformersTarget(large, eager_choice=flag), params=params).tokens for flag in (False, True)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("eager", [False, True])
def test_nan_is_one_sentence_and_only_where_it_is_read(model: Any, eager: bool) -> None:
    def fails_after_99(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(prefixes[:, -1:] == 99, torch.nan)

    target = TransformersTarget(model, eager_choice=eager)
    session = opened(target, PROMPT, SamplingParams(processors=(fails_after_99,)))
    (choices,) = target.step([session], [TokenTree.from_paths(PROMPT[-1], [[1], [99]])])
    assert choices[0] >= 0
    assert choices[1] >= 0
    assert choices[2] == -1
    session.close()

    def fails_late(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.tensor(prefixes.shape[1] >= 25), torch.nan)

    with pytest.raises(BadLogits, match=r"position 25.*NaN"):
        run(target, RandomTrees(), prompt=PROMPT, params=SamplingParams(processors=(fails_late,)))


def test_entries_of_nan_get_into_no_other_text() -> None:
    """Of a prompt with token 7; neither by a row beside a longer one, nor by a beginning that is reused."""
    model = BY_NAME["mistral"].build()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    target = TransformersTarget(model)
    prompts = [[20, 9], [*range(20, 60), 3], [*range(20, 60), 7, *range(60, 80)]]
    expected = [run(target, prompt=prompt).tokens for prompt in prompts[:2]]
    target.forget()
    engine = Engine(target)
    stop = StopParams(max_new_tokens=len(expected[0]))

    def submitted(prompt: list[int]) -> Handle:
        return engine.submit(Request(prompt, engine.drafter("plain"), stop=stop))

    first = submitted(prompts[1])
    engine.step()
    with pytest.raises(BadLogits):
        engine.run([submitted(prompts[2])])
    handles = [submitted(prompt) for prompt in prompts[:2]]
    engine.run(handles)
    assert [handle.tokens for handle in (*handles, first)] == [*expected, expected[1]]


@pytest.mark.parametrize("eager", [False, True])
def test_a_processor_that_raises_ends_its_own_session_only(model: Any, eager: bool) -> None:
    def broken(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the user")

    target = TransformersTarget(model, eager_choice=eager)
    expected = run(target, prompt=PROMPT[:9]).tokens[0]
    sessions = [opened(target, PROMPT, SamplingParams(processors=(broken,))), opened(target, PROMPT[:9])]
    failed, right = target.step(sessions, [TokenTree.root(session.tokens[-1]) for session in sessions])
    assert right[0] == expected
    assert failed[0] == -1
    with pytest.raises(ValueError, match="of the user"):
        failed.check(0)


def test_a_model_of_nan_is_refused() -> None:
    model = BY_NAME["llama"].build()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(BadLogits, match="NaN or infinite"):
        TransformersTarget(model)


# ----------------------------------------------------------------------------------------- dtypes, attention, devices


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bloom", torch.float64),
        ("llama", torch.bfloat16),
        ("gpt2", torch.float16),
        *mostly_slow([("llama", torch.float64), ("qwen3_moe", torch.float16)]),
        *mostly_slow([(name, torch.bfloat16) for name in ("mistral", "mixtral", "deepseek_v3", "bloom")]),
    ],
    ids=str,
)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    target = TransformersTarget(BY_NAME[name].build(dtype))
    assert {CHAIN, HIDDEN} <= target.info.capabilities
    assert (TREE in target.info.capabilities) == (name != "bloom")
    plain = run(target, prompt=PROMPT)
    drafter = Scattered([*PROMPT, *plain.tokens]) if name != "bloom" else Oracle([*PROMPT, *plain.tokens])
    drafted = run(target, drafter, prompt=PROMPT)
    assert len(drafted.tokens) == len(plain.tokens)  # the texts may part where two logits are nearly equal
    if dtype == torch.float64:
        assert drafted.tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_eager_attention_takes_additive_masks(name: str) -> None:
    target = TransformersTarget(BY_NAME[name].build(attention="eager"))
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.dtype == torch.float32
    plain = run(target, prompt=PROMPT).tokens
    assert run(target, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain
    other = TransformersTarget(BY_NAME[name].build())
    assert run(other, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain


def test_a_boolean_mask_for_eager_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would add it to the scores without an error."""
    monkeypatch.setitem(families.MASKS, "eager", True)
    target = TransformersTarget(BY_NAME["llama"].build(attention="eager"))
    assert list(target.refusals) == ["trees by a boolean mask"]
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.dtype == torch.float32


@pytest.mark.parametrize(("name", "remedy"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_attention_without_tree_masks_is_refused_by_name(name: str, remedy: str) -> None:
    model = BY_NAME[name].build()
    model.config._attn_implementation = "flash_attention_2"
    call = re.escape(f'model.set_attn_implementation("{remedy}")')
    with pytest.raises(Refused, match=rf"'flash_attention_2' takes no tree mask.*=\"{remedy}\", or call {call}"):
        TransformersTarget(model)
    model.set_attn_implementation(remedy)
    assert TREE in TransformersTarget(model).info.capabilities


def test_why_a_model_without_recurrent_layers_takes_no_drafts() -> None:
    """Mllama's layers over images cannot be tested without one."""
    text = {**SIZES, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1}
    sizes = {"attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_output_dim": 64}
    config = transformers.MllamaConfig(
        text_config=text, vision_config={**vision, **sizes, "intermediate_layers_indices": [0]}
    )
    target = TransformersTarget(transformers.AutoModelForImageTextToText.from_config(config).eval(), name="mllama")
    for needs in (CHAIN, TREE):
        with pytest.raises(Refused, match=r"which mllama does not have \(drafts fail the test of the model: Attribute"):
            require(target.info, frozenset({needs}), "the drafter")


def test_why_a_model_with_recurrent_layers_takes_no_drafts() -> None:
    with pytest.raises(
        Refused, match=r"which MambaForCausalLM does not have \(drafts fail the test of the model: logits"
    ):
        require(build("mamba").info, frozenset({CHAIN}), "the drafter")


def test_why_a_model_that_compresses_what_it_attends_to_takes_no_drafts() -> None:
    """It keeps a state of its own, which is not the reason."""
    with pytest.raises(Refused, match=r"\(layers of the kind compressed_sparse_attention, .* select or compress"):
        require(build("deepseek_v4").info, frozenset({CHAIN}), "the drafter")


@pytest.mark.parametrize("kind", ["mps", "xpu", "cpu"])
def test_the_fingerprint_of_any_device(model: Any, kind: str) -> None:
    assert f" {kind}" in families.fingerprint(model, torch.device(kind))


# ---------------------------------------------------------------------------------------------------- failed forwards


def failing(error: BaseException) -> Callable[..., Any]:
    def forward(*args: Any, logits_to_keep: int = 0, position_ids: Any = None, **kwargs: Any) -> Any:
        raise error

    return forward


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["cuda", "cpu"],
)
def test_out_of_memory_is_one_sentence_and_harms_nothing(
    target: TransformersTarget, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(target, prompt=PROMPT).tokens[:2]
    session, other = opened(target), target.open([90, 91, 92], GREEDY)
    tree = TokenTree.from_paths(PROMPT[-1], [[expected[0], 5], [9]])
    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", failing(error), raising=False)
        with pytest.raises(LeapaheadError, match=r"out of memory in a step at 20 tokens.*batch 1.*smaller batch"):
            target.step([session], [tree])
        with pytest.raises(LeapaheadError, match="out of memory in a prompt of 3 tokens"):
            target.prefill(other, 9)
    (choices,) = target.step([session], [tree])
    assert [choices[0], choices[1]] == expected


@pytest.mark.parametrize("name", ["llama", "bloom", "mamba", pytest.param("recurrent_gemma", marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_forward_leaves_what_is_committed(
    name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the layers and at the end; in a prompt and in a step. What went through must not be used."""
    target = build(name)
    expected = run(target, prompt=PROMPT).tokens[:3]
    target.forget()
    session = target.open(PROMPT, GREEDY)
    right = target.model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        right(*args, **kwargs)
        raise KeyboardInterrupt

    layers = next(each for each in target.model.modules() if isinstance(each, torch.nn.ModuleList))

    def interrupt(run: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            if late:
                patch.setattr(target.model, "forward", interrupted)
            else:
                patch.setattr(layers[1], "forward", failing(KeyboardInterrupt()), raising=False)
            with pytest.raises(KeyboardInterrupt):
                run()

    interrupt(lambda: target.prefill(session, 30))
    assert session.unread == len(PROMPT) - 1
    read_prompt(target, session)
    for token in expected:
        root = TokenTree.root(session.tokens[-1])
        interrupt(lambda: target.step([session], [root]))  # noqa: B023
        if name in ("llama", "bloom"):
            assert session.state.row.pending == 0
        (choices,) = target.step([session], [root])
        assert choices[0] == token
        session.commit(accept(root, 0, token))
    session.close()


@pytest.mark.parametrize("name", ["mamba", pytest.param("recurrent_gemma", marks=pytest.mark.slow)])
def test_an_interrupt_right_behind_a_forward_has_no_root_read_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has read it, and what the forward gave is lost."""
    target = build(name)
    expected = run(target, prompt=PROMPT).tokens[:6]
    target.forget()
    session = opened(target)
    for token in expected:
        root = TokenTree.root(session.tokens[-1])
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "Outputs", failing(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                target.step([session], [root])
        (choices,) = target.step([session], [root])
        assert choices[0] == token
        session.commit(accept(root, 0, token))
    session.close()


def test_tokens_whose_commit_was_interrupted_are_read_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(model)
    text = run(target, prompt=PROMPT).tokens
    session = opened(target)
    tree = TokenTree(np.array([PROMPT[-1], 99, text[0]]), np.array([-1, 0, 0]))
    target.step([session], [tree])
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "gather", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            session.commit(accept(tree, 2, text[1]))
    assert session.unread == 2
    assert read_prompt(target, session) == []
    assert target.step([session], [TokenTree.root(text[1])])[0][0] == text[2]


def test_entries_that_an_interrupt_costs_another_text_are_read_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the middle of an exchange of rows."""
    target, stop = TransformersTarget(model), StopParams(max_new_tokens=16)
    expected = run(target, prompt=PROMPT[2:], stop=stop).tokens
    engine = Engine(target)
    handles = [engine.submit(Request(PROMPT[at:], engine.drafter("plain"), stop=stop)) for at in range(3)]
    while not all(handle.tokens for handle in handles):
        engine.step()
    mine, gone, other = handles
    exchange, lost = KVCache._exchange, list[Row]()

    def interrupted(cache: KVCache, one: Row, another: Row) -> None:
        if lost:
            exchange(cache, one, another)
            return
        lost.extend([one, another])
        one.length = another.length = 0
        raise KeyboardInterrupt

    monkeypatch.setattr(KVCache, "_exchange", interrupted)
    engine.cancel(gone)  # between the other two, which are made neighbours in the next step
    with pytest.raises(KeyboardInterrupt):
        engine.run([mine])
    assert any(row.busy for row in lost)
    engine.run([other])
    assert other.tokens == expected


def test_given_entries_that_an_interrupt_costs_are_written_again(target: TransformersTarget) -> None:
    """Reading the tokens would give others, of one sample of the prompt and of the next."""
    layers, generator = target.model.config.num_hidden_layers, torch.Generator().manual_seed(0)
    parts = torch.randn(layers, 2, 2, len(PROMPT) - 3, 8, generator=generator).unbind()  # of fewer tokens than are read
    begin = PromptEntries({index: (keys, values) for index, (keys, values) in enumerate(parts)}, offset=-2)

    def logits(*sessions: TransformersSession) -> torch.Tensor:
        for session in sessions:
            read_prompt(target, session)
        choices = target.step(sessions, [TokenTree.root(session.tokens[-1]) for session in sessions])
        return torch.stack([each.logits[0] for each in choices])

    session = target.open_entries(PROMPT, GREEDY, begin, Capture())
    read_prompt(target, session)
    other = target.fork(session, GREEDY)
    expected = logits(session, other)
    session.state.row.length = other.state.row.length = 0  # as in the middle of an exchange of rows
    torch.testing.assert_close(logits(session, other), expected, rtol=1e-4, atol=1e-4)


def test_other_errors_of_a_model_are_left_alone(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    session = target.open(PROMPT, GREEDY)
    monkeypatch.setattr(target.model, "forward", failing(RuntimeError("shape mismatch")), raising=False)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        target.prefill(session, 30)


# ------------------------------------------------------------- mutations: each must be caught, by test and by text


def positions_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.of

    def wrong(*args: Any) -> Inputs:
        inputs = right(*args)
        n = inputs.tokens.shape[1]
        return replace(inputs, positions=inputs.lengths[:, None] + torch.arange(n))

    monkeypatch.setattr(Inputs, "of", wrong)


def siblings_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.of

    def wrong(*args: Any) -> Inputs:
        inputs = right(*args)
        return replace(inputs, ancestors=torch.ones_like(inputs.ancestors).tril())

    monkeypatch.setattr(Inputs, "of", wrong)


def parent_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.of

    def wrong(*args: Any) -> Inputs:
        inputs = right(*args)
        return replace(
            inputs, ancestors=torch.eye(inputs.tokens.shape[1], dtype=torch.bool).expand_as(inputs.ancestors)
        )

    monkeypatch.setattr(Inputs, "of", wrong)


def masks_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.masks

    def wrong(self: Inputs, *args: Any) -> Any:
        return torch.ones_like(right(self, *args))

    monkeypatch.setattr(Inputs, "masks", wrong)


def last_entry_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.masks

    def wrong(self: Inputs, *args: Any) -> Any:
        masks = right(self, *args)
        for row, length in enumerate(self.lengths.tolist()):
            masks[row, :, :, max(length - 1, 0) : length] = False if masks.dtype == torch.bool else torch.finfo().min
        return masks

    monkeypatch.setattr(Inputs, "masks", wrong)


def commit_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, row, path: right(self, row, range(len(path))))


def commit_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.keep

    def wrong(self: KVCache, row: Any, path: Any) -> None:
        row.pending += 1
        right(self, row, [path[0], *(node + 1 for node in path[1:])])

    monkeypatch.setattr(KVCache, "keep", wrong)


def rows_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.begin
    monkeypatch.setattr(KVCache, "begin", lambda self, rows, n, kept=None: right(self, rows, n, kept)[::-1])


def one_node_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last node of the first row attends to the node before it, which is not among its ancestors."""
    right = Inputs.of

    def wrong(*args: Any) -> Inputs:
        inputs = right(*args)
        ancestors = inputs.ancestors.clone()
        if ancestors.shape[1] >= 4:
            ancestors[0, 3, 2] = True
        return replace(inputs, ancestors=ancestors)

    monkeypatch.setattr(Inputs, "of", wrong)


MUTATIONS = [positions_by_slot, siblings_visible, parent_hidden, masks_ignored, last_entry_hidden, commit_in_place]
MUTATIONS += [commit_off_by_one]


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], torch.float32), ids=str)
@pytest.mark.parametrize("mutation", [*MUTATIONS, rows_mixed_up, one_node_of_the_tree])
def test_the_self_test_catches(
    mutation: Callable[..., None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BY_NAME["llama"].build(dtype)
    mutation(monkeypatch)
    target = TransformersTarget(model)
    assert TREE not in target.info.capabilities
    assert set(target.refusals) >= {"trees by a boolean mask", "trees by an additive mask"}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_text_shows(
    target: TransformersTarget, mutation: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(target, prompt=PROMPT).tokens
    drafter = lambda: Scattered([*PROMPT, *plain])  # noqa: E731
    assert run(target, drafter(), prompt=PROMPT).tokens == plain
    mutation(monkeypatch)
    assert run(target, drafter(), prompt=PROMPT).tokens != plain


@pytest.mark.parametrize(("every", "passes"), [(False, True), (True, False)])
def test_a_routers_flip_is_told_from_a_wrong_mask(every: bool, passes: bool) -> None:
    """In half precision a node may differ for some tokens, and not for all."""
    model = BY_NAME["mixtral"].build(torch.bfloat16)
    draws = list[int]()

    def flip(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if kwargs.get(cache_name(module)) is not None and output.logits.shape[1] == 6:  # the first step of a draw
            draws.append(1)
            if every or len(draws) == 1:
                output.logits[0, 3] += torch.randn(VOCABULARY)
        return output

    model.register_forward_hook(flip, with_kwargs=True)
    target = TransformersTarget(model)
    assert (TREE in target.info.capabilities) == passes
    assert len(draws) >= 2


def test_a_window_by_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.masks

    def wrong(self: Inputs, *args: Any) -> Any:
        return right(replace(self, positions=self.lengths[:, None] + torch.arange(self.tokens.shape[1])), *args)

    monkeypatch.setattr(Inputs, "masks", wrong)
    assert TREE not in build("mistral").info.capabilities


def test_a_window_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "patterns", lambda config, recurrent=False: {"full_attention": families.Pattern()})
    narrow = replace(BY_NAME["mistral"], options={"sliding_window": 4}).build()
    assert TREE not in TransformersTarget(narrow).info.capabilities
    assert TREE in build("llama").info.capabilities


def test_a_model_that_ignores_masks_has_chains_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    right = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: right(**{**kwargs, "attention_mask": None}))
    target = TransformersTarget(model)
    assert target.info.capabilities == {CHAIN, LOGITS, TOP_K, HIDDEN}
    assert isinstance(target.executor, ChainExecutor)


def test_a_model_that_ignores_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    right, name = model.model.forward, cache_name(model.model)
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: right(**{**kwargs, name: None}))
    with pytest.raises(Refused, match="cannot be decoded exactly"):
        TransformersTarget(model)


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 10), (torch.bfloat16, 1.2)])
def test_the_self_test_has_a_margin(dtype: torch.dtype, margin: float) -> None:
    """What it measures on a right model is below what it tolerates, and what a wrong one gives is far above."""
    model = BY_NAME["llama"].build(dtype)
    executor = MaskedExecutor(model, KVCache(), {"full_attention": families.Pattern()}, boolean=True)
    with torch.no_grad():
        result = selftest.run(executor, selftest.OwnOutputs(model), np.arange(3, VOCABULARY), (4, 1))
    assert result.error < result.tolerance / margin


def test_the_models_own_values_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of what loading computes, and serve for the logits and for the hidden states."""
    calls: list[object] = []
    right = selftest.references
    monkeypatch.setattr(selftest, "references", lambda *args: calls.append(args) or right(*args))
    target = TransformersTarget(BY_NAME["llama"].build())
    assert {TREE, HIDDEN} <= target.info.capabilities
    assert len(calls) == 1


@pytest.mark.parametrize("module", [selftest, forward], ids=["the model's own", "the executor's"])
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_hidden_states_that_fail_for_longer_texts_leave_the_logits(
    module: Any, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = selftest.side_by_side

    def short(states: Any, layers: Any) -> torch.Tensor:
        if states[0].shape[1] > 1:
            raise kind("states of one token only")
        return right(states, layers)

    monkeypatch.setattr(module, "side_by_side", short)
    target = TransformersTarget(BY_NAME["llama"].build())
    assert TREE in target.info.capabilities
    assert HIDDEN not in target.info.capabilities
    assert target.refusals == {HIDDEN: "states of one token only"}
    assert target.info.hidden_size == 0


def test_rounding_that_depends_on_the_number_of_entries_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors with AVX2 in half precision: numbers are rounded otherwise where they do not fill a vector."""
    right = torch.nn.functional.scaled_dot_product_attention

    def rounding(query: torch.Tensor, key: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return right(query, key, *args, **options) * (1 if key.shape[-2] >= 8 else 1 + 2**-4)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", rounding)
    target = TransformersTarget(BY_NAME["llama"].build(torch.bfloat16))
    assert {TREE, HIDDEN} <= target.info.capabilities


# --------------------------------------------------------------------------------------------------------- refusals


def test_long_rope_ends_where_its_rotation_changes() -> None:
    config = transformers.Phi3Config(
        **{**SIZES, "max_position_embeddings": 512},
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 64,
        },
    )
    assert families.context_length(config) == 64


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "longest", "length"),
    [
        (YARN, 256, 1024),  # configured as Qwen's cards say
        (YARN, 1024, 1024),  # as DeepSeek's and gpt-oss' configurations are
        (YARN | {"factor": None}, 512, 512),  # the factor is their quotient
        (YARN | {"factor": 2.0}, 1024, 1024),
        ({"rope_type": "yarn", "factor": 4.0}, 256, 1024),
        (LINEAR, 256, 256),  # it may be the scaled length, as of Chinese Alpaca 2 for 16k tokens
        ({"rope_type": "dynamic", "factor": 4.0}, 256, 256),  # beyond it, the rotation changes with the text's length
        (
            {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
            | {"original_max_position_embeddings": 64},
            256,
            256,
        ),
    ],
)
def test_the_context_of_a_scaled_rotation(scaling: dict[str, Any], longest: int, length: int) -> None:
    """Given as Transformers 5 calls it, and by the older name."""
    for name in ("rope_parameters", "rope_scaling"):
        sizes = {**SIZES, "max_position_embeddings": longest}
        config = transformers.LlamaConfig(**sizes, **{name: {"rope_theta": 1e4, **scaling}})
        assert families.context_length(config) == length


def test_the_context_of_rotations_by_kinds_of_layers_is_the_configured_one() -> None:
    for scaling in (LINEAR, YARN):
        kinds = {"full_attention": {"rope_theta": 1e4, **scaling}, "sliding_attention": {"rope_type": "default"}}
        config = transformers.Gemma3TextConfig(**SIZES, rope_parameters=kinds)
        assert families.context_length(config) == SIZES["max_position_embeddings"]


def test_a_prompt_beyond_the_length_before_scaling() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4, **YARN})
    model = sharpen(transformers.LlamaForCausalLM(config).eval())
    prompt = torch.randint(3, VOCABULARY, (1, 300))
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    own = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **given)[0, 300:].tolist()
    assert LLM(model).generate(prompt[0].tolist(), max_new_tokens=12, ignore_eos=True).tokens == own


def test_attention_that_keeps_some_tokens_takes_no_drafts() -> None:
    """Doge keeps the tokens of greatest rank, of more than the self-test reads; equal ones are told apart by chance."""
    config = transformers.DogeConfig(**SIZES, keep_window_size=64)
    target = TransformersTarget(transformers.AutoModelForCausalLM.from_config(config).eval())
    assert not target.info.capabilities & {TREE, CHAIN}
    assert "dynamic_mask_attention select" in target.info.no_drafts
    config.keep_window_size = config.max_position_embeddings
    assert families.patterns(config) == {"full_attention": families.Pattern()}


def test_contexts() -> None:
    assert build("bloom").info.context_length > 10**6  # distances only
    assert build("falcon_alibi").info.context_length > 10**6
    assert build("mpt").info.context_length == 256
    assert build("gpt2").info.context_length == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Bert", {}, r"\(BertLMHeadModel\).*or set is_decoder"),
        ("Roberta", {}, r"\(RobertaForCausalLM\).*or set is_decoder"),
        ("XLM", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}, r"\(XLMWithLMHeadModel\); load a causal language model$"),
    ],
)
def test_an_encoder_is_refused_by_name(name: str, options: dict[str, Any], words: str, dtype: torch.dtype) -> None:
    """It attends to later tokens, so that token by token it would write a text that is none of its own."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = sharpen(transformers.AutoModelForCausalLM.from_config(config).eval()).to(dtype)
    with pytest.raises(Refused, match=rf"is no causal language model: its logits change with later tokens.*{words}"):
        TransformersTarget(model)


class DynamicallyQuantised(torch.nn.Linear):
    """Rounds its input to 8 bits, with one scale for all of a forward."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().max() / 127
        return super().forward((rows / scale).round() * scale)


def test_a_model_whose_rows_influence_each_other_is_refused() -> None:
    """A draft would change the text."""
    model = BY_NAME["llama"].build()
    for part in model.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = DynamicallyQuantised
    with pytest.raises(Refused, match=r"its own logits change by 0\.\d+ standard deviations .* quantised"):
        TransformersTarget(model)


class RoundedByRows(torch.nn.Linear):
    """Its values differ a little with the number of rows, as by another kernel, before autocast rounds them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rounded = super().forward(rows)
        with torch.autocast("cpu", enabled=False):
            found = super().forward(rows.float())
        return (found + 1e-3 * rows.shape[:-1].numel()).to(rounded.dtype)


def _under_autocast(model: Any, within: bool) -> TransformersTarget:
    """The target of a model under autocast.

    Args:
        within: begun within the model's forward, as by a `Trainer` with `bf16=True`; else in this thread.
    """
    if within:
        accelerator = pytest.importorskip("accelerate").Accelerator(mixed_precision="bf16", cpu=True)
        model = accelerator.prepare_model(model, evaluation_mode=True)
    with nullcontext() if within else torch.autocast("cpu", torch.bfloat16):
        return TransformersTarget(model)


@pytest.mark.parametrize("within", [False, True])
def test_autocast_is_no_obstacle_to_trees(within: bool) -> None:
    """The logits are rounded as those of a model in bfloat16, though weights are float32. Masks are tested still."""
    model = BY_NAME["llama"].build()
    model.lm_head.__class__ = RoundedByRows
    with torch.no_grad():
        model.lm_head.weight *= 8
    target = _under_autocast(model, within)
    assert TREE in target.info.capabilities
    assert target.info.precision == 2**-7
    right = model.model.forward
    model.model.forward = lambda **kwargs: right(**{**kwargs, "attention_mask": None})
    assert TREE not in _under_autocast(model, within).info.capabilities


def test_weights_on_the_meta_device_are_refused() -> None:
    with pytest.raises(Refused, match="are on the meta device, as where they are offloaded; load the model"):
        TransformersTarget(BY_NAME["llama"].build().to("meta"))


def test_a_model_without_a_cache_is_refused() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with pytest.raises(Refused, match="takes no cache"):
        TransformersTarget(transformers.OpenAIGPTLMHeadModel(config).eval())


def test_an_encoder_decoder_model_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8)
    with pytest.raises(Refused, match="encoder-decoder"):
        TransformersTarget(transformers.T5ForConditionalGeneration(config))


def test_what_is_no_causal_language_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadParameter, match=r"a Linear is not a Transformers model; give what AutoModelForCausalLM"):
        TransformersTarget(torch.nn.Linear(2, 2))
    with pytest.raises(Refused, match="causal language model"):
        TransformersTarget(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))


class Wrapper(torch.nn.Module):
    """The part of `peft.PeftModel` that is used: the wrapped model, and the kind of the adapter."""

    def __init__(self, model: Any, prompt: bool) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = model
        self.active_peft_config = type("Config", (), {"is_prompt_learning": prompt, "peft_type": "PREFIX_TUNING"})


def test_peft_models_work_or_are_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapper, "__module__", "peft.peft_model")
    target = TransformersTarget(Wrapper(model, prompt=False))
    assert target.model is model
    assert TREE in target.info.capabilities
    with pytest.raises(Refused, match=r"PREFIX_TUNING.*LoRA"):
        TransformersTarget(Wrapper(model, prompt=True))


def test_a_transformers_that_is_too_old_or_too_new_is_refused_with_the_version_that_is_needed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("4.57.1", "5.25.0", "6.0"):
        sentence = rf"needs Transformers 5\.23 or newer, before 5\.25, and {re.escape(version)} is installed: pip"
        with pytest.raises(LeapaheadError, match=sentence):
            require_version(version)
    for version in ("5.23.0", "5.23.1", "5.24.0"):
        require_version(version)
    # The module that the target refers to: another test may have made Python import Transformers again.
    monkeypatch.setattr("leapahead.models.transformers.model.transformers.__version__", "5.9.0")
    with pytest.raises(LeapaheadError, match=r"5\.9\.0 is installed"):
        TransformersTarget(model)


@pytest.mark.slow
def test_recurrent_models_share_no_state() -> None:
    """RecurrentGemma keeps its state in its modules: sequences side by side must not mix."""
    target = build("recurrent_gemma")
    assert isinstance(target.executor, NativeExecutor)
    assert target.executor.shared
    assert "token by token" in target.refusals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_precision_is_the_models(dtype: torch.dtype) -> None:
    """Not that of logits that were widened on the way."""
    assert TransformersTarget(BY_NAME["llama"].build().to(dtype)).info.precision == torch.finfo(dtype).eps


def _trained(model: Any, **options: Any) -> None:
    """One step of an optimizer; a fused one does not raise the versions of tensors."""
    weights = [each for each in model.parameters() if each.requires_grad]
    for each in weights:
        each.grad = torch.randn_like(each)
    torch.optim.AdamW(weights, lr=0.05, **options).step()


def _moved(model: Any) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(torch.randn_like(model.get_output_embeddings().weight))


def _written(model: Any) -> None:
    for each in model.parameters():
        each.data.copy_(torch.randn_like(each) * 0.1)


def _loaded(model: Any, **options: Any) -> None:
    model.load_state_dict({name: each + 0.1 for name, each in model.state_dict().items()}, **options)


def _replaced(model: Any) -> None:
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)


def _adapted(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()


def _checkpointed(model: Any) -> None:
    model.train()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True


PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which it uses
CHANGES: dict[str, Callable[[Any], None]] = {
    "fused step": lambda model: _trained(model, fused=True),
    "step": _trained,
    "in-place": _moved,
    "data": _written,
    "state dict": _loaded,
    "assigned": lambda model: _loaded(model, assign=True),
    "module": _replaced,
    "adapters": _adapted,
}
TEXT = [5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9]


def _agrees(llm: LLM, model: Any) -> list[int]:
    """The text of a model, which is the same by Transformers, by an LLM made before a change and by one made now."""
    ids = torch.tensor([TEXT])
    given = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    own = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)[0, len(TEXT) :].tolist()
    for drafter in ("plain", "suffix"):
        assert llm.generate(TEXT, max_new_tokens=20, ignore_eos=True, drafter=drafter).tokens == own
    return own


@pytest.mark.slow
@PEFT
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_between_two_texts_gives_its_new_text(change: str) -> None:
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    llm = LLM(model)
    before = _agrees(llm, model)
    CHANGES[change](model)
    assert _agrees(llm, model) != before
    CHANGES["in-place"](model)  # also to what was changed
    _agrees(llm, model)


@pytest.mark.parametrize("kind", mostly_slow(["llama", "qwen3_next", "t5"], "llama"))
def test_a_model_that_changed_beside_an_unfinished_stream_gives_its_new_text(kind: str) -> None:
    """Neither the stream's entries nor those of texts before the change are of use to a later text."""
    torch.manual_seed(0)
    model = BY_NAME[kind].build() if kind in BY_NAME else seq2seq.build(kind)
    llm = LLM(model)
    other = [*TEXT, 11, 12]
    before = [llm.generate(text, max_new_tokens=8).tokens for text in (TEXT, other)]
    stream = llm.stream(TEXT, max_new_tokens=8)
    next(stream)
    for _ in range(2):  # changes
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(torch.randn_like(model.get_input_embeddings().weight))
        found = [llm.generate(text, max_new_tokens=8) for text in (TEXT, other)]
        llm.target.forget()  # what is closed
        fresh = LLM(model)
        assert [each.tokens for each in found] == [
            fresh.generate(text, max_new_tokens=8).tokens for text in (TEXT, other)
        ]
        assert found[0].tokens != before[0]
    stream.close()
    assert llm.generate(TEXT, max_new_tokens=8).tokens == found[0].tokens


MODES = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),  # as by `torch.set_default_device`
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "t5"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_calling_thread_change_no_text(mode: str, kind: str) -> None:
    """What one thread leaves in the cache, another one reads and writes."""
    llm = LLM(BY_NAME[kind].build() if kind in BY_NAME else seq2seq.build(kind))
    texts = []
    for context in (nullcontext, MODES[mode], nullcontext):
        llm.target.forget()  # so that each makes the cache
        for each in (context, nullcontext, MODES[mode]):
            with each():
                texts.append(llm.generate(TEXT, max_new_tokens=8, drafter="suffix").tokens)
    assert texts == texts[:1] * len(texts)


def test_a_penalised_text_is_begun_in_one_mode_and_ended_in_another() -> None:
    """What was counted so far is a tensor where the scores are, as beside a processor."""
    llm = LLM(BY_NAME["llama"].build())
    options: Any = {"max_new_tokens": 8, "frequency_penalty": 0.5, "logits_processors": [lambda ids, logits: logits]}
    expected = llm.generate(TEXT, **options).tokens
    stream = llm.stream(TEXT, **options)
    with torch.inference_mode():
        next(stream)
    *_, last = stream
    assert last.result.tokens == expected


@pytest.mark.parametrize("exact", [False, True])
def test_the_default_device_changes_no_text(exact: bool) -> None:
    """Of batches, too. With `torch.set_default_device`, tensors that name no device are made there."""
    llm = LLM(BY_NAME["llama"].build(), exact=exact)
    options: Any = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3, "drafter": "suffix"}
    expected = [each.tokens for each in llm.generate([TEXT, TEXT[:9]], **options)]
    with torch.device("meta"):
        found = llm.generate([TEXT, TEXT[:9]], **options)
    assert [each.tokens for each in found] == expected


@pytest.mark.slow
@PEFT
def test_adapters_that_are_switched_between_two_texts() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    one, other = (
        peft.LoraConfig(r=4, target_modules=[name, "v_proj"], init_lora_weights=False) for name in ("q_proj", "k_proj")
    )
    model = peft.get_peft_model(BY_NAME["llama"].build(), one).eval()
    llm = LLM(model)
    texts = [_agrees(llm, model)]
    model.add_adapter("b", other)
    model.set_adapter("b")
    texts.append(_agrees(llm, model))
    with model.disable_adapter():
        texts.append(_agrees(llm, model))
    assert _agrees(llm, model) == texts[1]
    _trained(model, fused=True)  # of the adapter alone
    texts.append(_agrees(llm, model))
    model.merge_adapter()
    _agrees(llm, model)
    assert len({str(text) for text in texts}) == 4


@PEFT
def test_adapters_of_several_kinds_in_one_model() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    mixed = peft.get_peft_model(
        BY_NAME["llama"].build(), peft.LoraConfig(init_lora_weights=False, **options), mixed=True
    )
    mixed.add_adapter("other", peft.LoHaConfig(init_weights=False, **options))
    mixed.set_adapter(["default", "other"])
    _agrees(LLM(mixed), mixed)


@PEFT
def test_adapters_that_peft_applies_in_its_own_forward_are_refused(tmp_path: Path) -> None:
    """By position behind the tokens that invoke them, or by a classifier; else with no effect, or with all of it."""
    peft = pytest.importorskip("peft")
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(BY_NAME["llama"].build(), peft.LoraConfig(**options))
    model.save_pretrained(tmp_path / "expert")
    LLM(model.eval())
    model.add_adapter("other", peft.LoraConfig(**options, alora_invocation_tokens=[5, 6]))
    with pytest.raises(Refused, match=r"adapter 'other' of this model \(activated LoRA\) .* delete it"):
        LLM(model)
    model.save_pretrained(tmp_path, selected_adapters=["other"])
    plain = BY_NAME["llama"].build()
    plain.load_adapter(str(tmp_path / "other"))  # by Transformers, whose own text lacks it
    with pytest.raises(Refused, match="activated LoRA"):
        LLM(plain)
    plain = BY_NAME["llama"].build()
    plain.config.use_cache = False  # as PEFT demands of it
    experts = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path / "expert")})
    with pytest.raises(Refused, match="X-LoRA"):
        LLM(peft.get_peft_model(plain, experts).eval())


def test_entries_are_kept_while_a_model_does_not_change() -> None:
    model = BY_NAME["llama"].build()
    llm = LLM(model)
    llm.generate(TEXT, max_new_tokens=4)
    assert llm.generate(TEXT, max_new_tokens=4).stats.reused_tokens > 0
    _trained(BY_NAME["llama"].build())  # another one
    assert llm.generate(TEXT, max_new_tokens=4).stats.reused_tokens > 0


def _steered(model: Any) -> Any:
    """As by activation steering; returns the handle of the hook."""
    return model.model.layers[0].register_forward_hook(lambda module, args, output: output.roll(1, -1))


def test_forward_hooks_may_change_between_two_texts() -> None:
    model = BY_NAME["llama"].build()
    llm = LLM(model)
    before = _agrees(llm, model)
    hook = _steered(model)
    assert _agrees(llm, model) != before
    hook.remove()
    assert _agrees(llm, model) == before


def test_entries_are_kept_of_a_model_with_offloaded_layers() -> None:
    """Their weights are other tensors in every forward. A change of the other layers is still seen."""
    accelerate = pytest.importorskip("accelerate")
    model = BY_NAME["llama"].build()
    accelerate.cpu_offload(model.model.layers[1], torch.device("cpu"))
    llm = LLM(model)
    text = llm.generate(TEXT, max_new_tokens=8).tokens
    again = llm.generate(TEXT, max_new_tokens=8)
    assert again.stats.reused_tokens > 0
    assert again.tokens == text == LLM(model, draft="self:first=1").generate(TEXT, max_new_tokens=8).tokens
    _moved(model)
    assert llm.generate(TEXT, max_new_tokens=8).stats.reused_tokens == 0


def test_entries_are_kept_where_transformers_has_installed_its_hooks() -> None:
    """By which it gives hidden states, from the first time on."""
    model = BY_NAME["llama"].build()
    llm = LLM(model)
    llm.generate(TEXT, max_new_tokens=4)
    model(torch.tensor([TEXT]), output_hidden_states=True)
    assert any(part._forward_hooks for part in model.modules())
    assert llm.generate(TEXT, max_new_tokens=4).stats.reused_tokens > 0


def test_a_copy_with_other_hooks_is_refused() -> None:
    model = BY_NAME["llama"].build()
    llm = LLM(model, exact=True)
    text = llm.generate(TEXT, max_new_tokens=8).tokens
    hook = _steered(model)
    with pytest.raises(Refused, match="adapters, layers, hooks or parameters of the model were changed"):
        llm.generate(TEXT)
    hook.remove()
    assert llm.generate(TEXT, max_new_tokens=8).tokens == text


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("llama", lambda model: model.set_attn_implementation("eager"), "attention implementation was sdpa .* eager"),
        ("llama", lambda model: model.resize_token_embeddings(150), "vocabulary was 120 .* is 150 now"),
        ("llama", lambda model: model.double(), "dtype was torch.float32 .* is torch.float64 now"),
        ("gpt2", lambda model: model.train(), r"training mode and its dropout .* model.eval\(\)"),
        ("llama", _checkpointed, "gradient checkpointing leaves no KV cache"),
    ],
)
def test_a_model_that_cannot_be_decoded_any_more_is_refused(
    name: str, change: Callable[[Any], object], sentence: str
) -> None:
    model = BY_NAME[name].build()
    llm = LLM(model)
    change(model)
    with pytest.raises(Refused, match=sentence):
        llm.generate(TEXT)


@pytest.mark.slow
@PEFT
def test_a_copy_with_other_adapters_is_refused() -> None:
    model = BY_NAME["llama"].build()
    llm = LLM(model, exact=True)
    before = llm.generate(TEXT, max_new_tokens=8).tokens
    _moved(model)  # the copy has the same tensors
    assert llm.generate(TEXT, max_new_tokens=8).tokens == LLM(model, exact=True).generate(TEXT, max_new_tokens=8).tokens
    assert llm.generate(TEXT, max_new_tokens=8).tokens != before
    _adapted(model)
    with pytest.raises(Refused, match="exact or captured forwards run a copy of it; undo that, or make another LLM"):
        llm.generate(TEXT)
