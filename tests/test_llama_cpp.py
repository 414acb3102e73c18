"""The llama.cpp target by itself: sequence ids, cells, forks, captures, files, refusals, and llama.cpp's own text."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GREEDY, Oracle, RandomTrees, Scattered, attached, full_text, is_freed, run

from leapahead import LLM, Engine, Request, ties
from leapahead.bench.prompts import BUNDLED
from leapahead.chat.template import chat_text
from leapahead.check import check
from leapahead.cli import main as cli
from leapahead.core.errors import BadParameter, CacheFull, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.models import loading
from leapahead.models.base import ALL, NOTHING, PROMPT_ROWS, TREE, Capture, read_prompt

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_models
import llama_cpp
from gguf_architectures import gpt2, written

from leapahead.models.llama_cpp import log, model, tokenizer
from leapahead.models.llama_cpp.cells import Cells
from leapahead.models.llama_cpp.context import Context
from leapahead.models.llama_cpp.file import metadata
from leapahead.models.llama_cpp.model import LlamaCppTarget
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.llama_cpp.session import LlamaCppSession, Part
from leapahead.models.llama_cpp.track import Track

PROMPT = tuple(range(300, 320))
TREE_OF_SIX = TokenTree(np.array([319, 5, 6, 7, 8, 9]), np.array([-1, 0, 0, 1, 2, 2]))


def load(path: Path | None = None, **options: Any) -> LlamaCppTarget:
    options = {"n_ctx": 512, "n_threads": 1, **options}
    return model.load(path or gguf_models.llama(), LlamaCppOptions(**options))[0]


@pytest.fixture(scope="module")
def shared() -> LlamaCppTarget:
    return load()


@pytest.fixture
def target(shared: LlamaCppTarget) -> LlamaCppTarget:
    for session in list(shared._sessions):  # that an earlier test has left, whatever the order of the tests
        session.close()
    shared.forget()
    return shared


def opened(
    target: LlamaCppTarget, prompt: Any, params: SamplingParams = GREEDY, capture: Capture = NOTHING, reserve: int = 0
) -> LlamaCppSession:
    """A session whose prompt is read."""
    session = target.open(prompt, params, capture, reserve)
    read_prompt(target, session)
    return session


def test_a_text_that_is_cut_shares_no_more_than_it_has() -> None:
    """So the cells that only its fork has are counted, and the fork makes room for a long prompt."""
    target = load(n_ctx=256, kept_tokens=0)
    first = opened(target, [*range(1, 151)])
    twin = target.fork(first, GREEDY)
    first.close()
    twin.close()
    session = opened(target, [*range(1, 11), *range(60, 200), 5])
    assert np.isfinite(next_logits(target, session)).all()


def test_a_context_of_one_sequence_says_why_there_are_no_trees() -> None:
    with pytest.raises(Refused, match="does not have with n_seq_max=1; "):
        Engine(load(n_seq_max=1)).drafter("lookahead")


def next_logits(target: LlamaCppTarget, session: LlamaCppSession) -> np.ndarray:
    """float32 [vocab], after the last committed token."""
    return np.array(target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[0])


def last_positions(target: LlamaCppTarget) -> dict[int, int]:
    """The last position of every sequence id that holds a cell."""
    memory = target.context.memory
    last = {i: llama_cpp.llama_memory_seq_pos_max(memory, i) for i in range(target.context.n_seq_max)}
    return {i: position for i, position in last.items() if position >= 0}


# ---------------------------------------------------------------------------------------------------- trees and cells


def test_info(target: LlamaCppTarget) -> None:
    info = target.info
    assert info.capabilities == ALL
    assert (info.context_length, info.vocab_size, info.layers, info.hidden_size) == (512, 4096, 2, 32)
    assert (target.max_leaves, info.padded) == (64, False)


def test_every_node_has_the_logits_of_its_own_path(target: LlamaCppTarget) -> None:
    session = opened(target, PROMPT)
    rows = target.step([session], [TREE_OF_SIX])[0].logits
    cost = target.cost([session], [TREE_OF_SIX])
    assert (cost.rows, cost.sequences, cost.context) == (6, 1, 20)
    session.close()
    for node in range(6):
        alone = opened(target, [*PROMPT, *TREE_OF_SIX.path_tokens(node)])
        np.testing.assert_allclose(rows[node], next_logits(target, alone), atol=1e-4)
        alone.close()


@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 2, 5)])
def test_commit_keeps_the_path_and_frees_the_rest(target: LlamaCppTarget, path: tuple[int, ...]) -> None:
    session = opened(target, PROMPT)
    target.step([session], [TREE_OF_SIX])
    tokens = (*(int(TREE_OF_SIX.tokens[node]) for node in path[1:]), 77)
    session.commit(Verdict(path, tokens, len(tokens) - 1))
    assert session.track.length == len(PROMPT) - 1 + len(path)
    assert max(last_positions(target).values()) == session.track.length - 1
    row = next_logits(target, session)
    session.close()
    target.forget()
    expected = opened(target, [*PROMPT, *tokens])
    np.testing.assert_allclose(row, next_logits(target, expected), atol=1e-4)
    expected.close()


def test_all_ids_and_cells_come_back(target: LlamaCppTarget) -> None:
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed)
        text = full_text(target, PROMPT, params=params)
        engine = Engine(target)
        made = (RandomTrees(), Oracle(text), Scattered(text), "lookahead")
        drafters = [attached(engine, each) for each in made]
        stop = StopParams(max_new_tokens=24)
        engine.run([engine.submit(Request(PROMPT[i:], each, params, stop)) for i, each in enumerate(drafters)])
    target.forget()
    assert last_positions(target) == {}
    session = opened(target, PROMPT)
    wide = TokenTree.from_paths(319, [[i] for i in range(64)])
    assert len(target.step([session], [wide])[0].logits) == 65  # every id is free
    session.close()


def test_a_step_may_be_taken_again(target: LlamaCppTarget) -> None:
    session = opened(target, PROMPT)
    first = target.step([session], [TREE_OF_SIX])[0].logits
    again = target.step([session], [TREE_OF_SIX])[0].logits
    np.testing.assert_allclose(again, first, atol=1e-4)
    session.close()


def test_logits_of_an_earlier_step_are_refused(target: LlamaCppTarget) -> None:
    session = opened(target, PROMPT)
    choices = target.step([session], [TREE_OF_SIX])[0]
    kept, known = choices.logits.copy(), choices[0]
    rows = choices.logits
    target.step([session], [TokenTree.chain(319, [4, 4, 4])])
    np.testing.assert_array_equal(rows, kept)  # what was given is the reader's
    assert choices[0] == known
    with pytest.raises(LeapaheadError, match="an earlier step are gone"):
        choices[1]
    session.close()


@pytest.mark.parametrize("error", [LeapaheadError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_failed_forward_leaves_no_cells(
    target: LlamaCppTarget, monkeypatch: pytest.MonkeyPatch, error: BaseException, late: bool
) -> None:
    """Whether it fails before or after llama.cpp has filled the cells; with a new tree, and with one that grows."""
    session = opened(target, PROMPT)
    expected = target.step([session], [TREE_OF_SIX])[0].logits
    grown = TokenTree(np.append(TREE_OF_SIX.tokens, [3, 4]), np.append(TREE_OF_SIX.parents, [1, 3]))
    for tree, num_computed in ((TREE_OF_SIX, 0), (grown, 6)):

        def fail(self: Context, *given: Any, whole: Any = Context.decode) -> Any:
            if late:
                whole(self, *given)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", fail)
            with pytest.raises(type(error)):
                target.step([session], [tree], [num_computed])
        assert set(last_positions(target).values()) == {len(PROMPT) - 2}
        np.testing.assert_allclose(target.step([session], [TREE_OF_SIX])[0].logits, expected, atol=1e-4)
    session.close()


# ---------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_is_read_in_chunks(target: LlamaCppTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    unread = [session.unread]
    while session.unread:
        assert target.prefill(session, 8) is None  # nothing is captured
        unread.append(session.unread)
    assert unread == [19, 11, 3, 0]
    row = next_logits(target, session)
    session.close()
    target.forget()
    whole = opened(target, PROMPT)
    np.testing.assert_allclose(row, next_logits(target, whole), atol=1e-4)
    whole.close()


def test_a_known_prefix_is_not_read_again(target: LlamaCppTarget) -> None:
    opened(target, PROMPT).close()
    session = target.open([*PROMPT, 7, 8], GREEDY)
    assert session.unread == 2
    read_prompt(target, session)
    row = next_logits(target, session)
    session.close()
    target.forget()
    expected = opened(target, [*PROMPT, 7, 8])
    np.testing.assert_allclose(row, next_logits(target, expected), atol=1e-4)
    expected.close()


@pytest.mark.parametrize("chunk", [512, 100])
@pytest.mark.parametrize("reused", [0, 200, 299])
def test_captured_rows_of_a_prompt(target: LlamaCppTarget, chunk: int, reused: int) -> None:
    """The top-k tokens of the last `PROMPT_ROWS` rows, those of a reused prefix included, outlive later forwards."""
    prompt = np.random.default_rng(3).integers(3, 4095, 300).tolist()
    if reused:
        opened(target, prompt[: reused + 1], capture=Capture(top_k=4)).close()
    session = target.open(prompt, GREEDY, Capture(top_k=4))
    assert session.unread == max(299 - reused, 1)
    parts = []
    while session.unread:
        if (rows := target.prefill(session, chunk)) is not None:
            assert rows.tokens.tolist() == prompt[rows.start : rows.start + len(rows.tokens)]
            parts.append(rows)
    tokens, best = np.concatenate([rows.tokens for rows in parts]), np.concatenate([rows.top_k(4)[0] for rows in parts])
    session.close()
    assert tokens.tolist() == prompt[-PROMPT_ROWS - 1 : -1]
    for index in (0, 111, PROMPT_ROWS - 1):
        alone = opened(target, prompt[: 300 - PROMPT_ROWS + index])
        assert best[index].tolist() == np.argsort(-next_logits(target, alone), kind="stable")[:4].tolist()
        alone.close()


def test_hidden_states_are_those_of_transformers() -> None:
    """The last layer's, of all rows of a prompt and of every node of a tree; the logits do not depend on it."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(loading.bundled(), dtype=torch.float32)
    prompt, tree = list(range(50, 90)), TokenTree(np.array([89, 5, 6, 7, 8]), np.array([-1, 0, 0, 1, 2]))

    def own(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            states = loaded(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return np.asarray(states[-1][0])

    target, capture = load(gguf_models.bundled("f32")), Capture(hidden=(-1,))
    opened(target, prompt).close()  # its cells are not taken over: all rows are wanted
    session, parts = target.open(prompt, GREEDY, capture | Capture(top_k=3)), []
    while session.unread:
        rows = target.prefill(session, 16)
        assert rows is not None
        assert rows.top_k(3)[0].shape == (len(rows.tokens), 3)
        parts.append(rows.hidden)
    np.testing.assert_allclose(np.concatenate(parts), own(prompt)[:-1], atol=1e-4)
    plain = target.step([session], [tree])[0].logits
    choices = target.step([session], [tree], capture=capture)[0]
    hidden = choices.hidden
    np.testing.assert_array_equal(choices.logits, plain)
    again = target.step([session], [tree])[0]
    np.testing.assert_array_equal(again.logits, plain)
    with pytest.raises(Refused, match="no hidden states were captured"):
        _ = again.hidden
    for node in range(len(tree)):  # they were copied, and outlive the step after theirs
        np.testing.assert_allclose(hidden[node], own([*prompt, *tree.path_tokens(node)])[-1], atol=1e-4)
    session.close()


def test_other_hidden_states_are_refused_by_name(target: LlamaCppTarget) -> None:
    for capture in (Capture(hidden=(1,)), Capture(hidden=(-1, 0))):
        with pytest.raises(Refused, match=r"hidden states of layer [01]: llama.cpp.*the last layer only"):
            target.open(PROMPT, GREEDY, capture)


# ---------------------------------------------------------------------------------------------------- many sessions


def test_forks_share_the_cells_of_their_prefix() -> None:
    """Each sample's text is the text that it has alone; the prompt's cells are counted, and taken, once."""
    target = load(n_ctx=256)
    prompt, length = list(range(1, 121)), 140
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(5)]
    stop = StopParams(max_new_tokens=20)
    alone = [run(target, None, prompt, params=each, stop=stop).tokens for each in params]
    first = opened(target, prompt, params[0], reserve=length)
    sessions = [first, *(target.fork(first, each) for each in params[1:])]
    while live := [session for session in sessions if len(session.tokens) < length]:
        if first in live and len(first.tokens) > 130:
            first.close()  # the cells of the prompt stay with the others
            sessions.remove(first)
            continue
        trees = [TokenTree.from_paths(session.tokens[-1], [[5, 6], [7]]) for session in live]
        for session, tree, choices in zip(live, trees, target.step(live, trees), strict=True):
            session.commit(verify(tree, choices))
    for session, text in zip(sessions, alone[1:], strict=True):
        assert session.tokens[120:length] == text
        session.close()
    target.forget()
    assert last_positions(target) == {}


def test_a_fork_of_an_unread_prompt_is_refused(target: LlamaCppTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    with pytest.raises(BadParameter, match="19 unread tokens cannot be forked"):
        target.fork(session, GREEDY)
    session.close()


def test_a_fork_that_does_not_fit_is_refused() -> None:
    target = load(n_ctx=256)
    session = opened(target, range(1, 121), reserve=200)
    with pytest.raises(CacheFull, match=r"KV cache of 256 cells is full.*another sample of 120 tokens needs 81"):
        target.fork(session, GREEDY)
    session.close()


def test_sessions_join_and_leave_with_ragged_lengths(target: LlamaCppTarget) -> None:
    llm = LLM(target, drafter="lookahead", max_batch=3)
    prompts = [list(PROMPT[: 3 + 2 * i]) for i in range(8)]
    options: dict[str, Any] = {"temperature": 0.8, "seed": list(range(8)), "max_new_tokens": 30}
    together = llm.generate(prompts, **options)
    alone = [llm.generate(prompt, **{**options, "seed": i}, drafter="plain").tokens for i, prompt in enumerate(prompts)]
    assert [result.tokens for result in together] == alone


def test_threads_share_a_target(target: LlamaCppTarget) -> None:
    """Without a lock, an assertion of llama.cpp would end the process."""
    llm = LLM(target, drafter="prompt_lookup", max_batch=3)
    prompts = [[*PROMPT[:4] * 3, 5 + i] for i in range(6)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: llm.generate(prompt, max_new_tokens=20).tokens, prompts))
    assert found == [llm.generate(prompt, max_new_tokens=20, drafter="plain").tokens for prompt in prompts]


@pytest.mark.slow
def test_prompts_wait_for_room_in_the_cache(target: LlamaCppTarget) -> None:
    llm = LLM(load(n_ctx=256), drafter="lookahead", max_batch=8)
    prompts = [list(range(10 * i + 1, 10 * i + 21)) for i in range(9)]
    texts = [result.tokens for result in llm.generate(prompts, max_new_tokens=60, ignore_eos=True)]
    plain = LLM(target, drafter="plain")
    assert texts == [plain.generate(prompt, max_new_tokens=60, ignore_eos=True).tokens for prompt in prompts]


def test_few_texts_stay_in_the_cells() -> None:
    """Those that were closed last, until another sequence is opened: attention goes over all. The others, in memory."""
    target = load()
    prompts = [range(begin, begin + 20) for begin in range(100, 260, 20)]
    for prompt in prompts:
        opened(target, prompt).close()
    assert len(last_positions(target)) == 1
    for prompt in prompts:
        session = target.open(prompt, GREEDY)
        assert session.track.length == 19
        session.close()
    sessions = [opened(target, prompt) for prompt in prompts[:6]]
    for session in sessions:
        session.close()
    assert len(last_positions(target)) == 6
    assert target.open(prompts[2], GREEDY).track.length == 19
    assert len(last_positions(target)) == 1


@pytest.mark.parametrize(("tokens", "kept"), [(0, 4), (19, 2), (57, 4), (60, 4), (None, 9)])
def test_how_many_texts_are_kept(tokens: int | None, kept: int) -> None:
    """One in the cells; of the others, the last that fit. What a longer text begins with is not kept beside it."""
    target = load(kept_tokens=tokens)
    prompts = [range(begin, begin + 20) for begin in range(100, 280, 20)]
    for prompt in prompts:
        opened(target, prompt[:10]).close()
        opened(target, prompt).close()
    for prompt in reversed(prompts[len(prompts) - kept :]):
        session = target.open(prompt, GREEDY)
        assert session.track.length == 19
        target.release(session)
        target._cells.texts.most_tokens = 0  # what was loaded is in the cells now, and pushes nothing out
    target.forget()


def test_kept_texts_of_another_owner_are_not_used() -> None:
    target = load()
    for prompt, owner in ((PROMPT, "one"), (range(5, 25), "two")):
        session = target.open(prompt, GREEDY, owner=owner)
        read_prompt(target, session)
        session.close()
    for owner, length in (("two", 0), ("one", 19)):
        session = target.open(PROMPT, GREEDY, owner=owner)
        assert session.track.length == length
        session.close()


def test_a_kept_text_without_room_is_read_again() -> None:
    """It would push out what is open; nothing is lost, and the text is the same."""
    target = load(n_ctx=256)
    expected = run(target, None, range(1, 101), stop=StopParams(max_new_tokens=5)).tokens
    opened(target, range(1, 101)).close()
    other = opened(target, range(101, 271))
    with pytest.raises(CacheFull):
        target.open(range(1, 101), GREEDY)
    other.close()
    again = run(target, None, range(1, 101), stop=StopParams(max_new_tokens=5))
    assert (again.tokens, again.stats.reused_tokens) == (expected, 99)


def test_an_unread_prompt_has_its_cells() -> None:
    """What others draft, or open, meanwhile does not take them."""
    target = load(n_ctx=256)
    one, two = opened(target, range(1, 101)), target.open(range(101, 251), GREEDY)
    assert target.max_nodes == 4
    with pytest.raises(CacheFull, match=r"a step of 9 nodes needs 9"):
        target.step([one], [TokenTree.chain(100, range(8))])
    with pytest.raises(CacheFull, match="a prompt of 20 tokens needs 20"):
        target.open(PROMPT, GREEDY)
    read_prompt(target, two)
    next_logits(target, two)
    one.close()
    two.close()


def test_a_full_cache_is_refused_before_anything_is_lost(target: LlamaCppTarget) -> None:
    small = load(n_ctx=256)
    session = opened(small, range(1, 181))
    expected = run(target, None, range(1, 181), stop=StopParams(max_new_tokens=20)).tokens
    with pytest.raises(CacheFull, match=r"KV cache of 256 cells is full.*larger n_ctx"):
        small.open(range(200, 290), GREEDY)
    for token in expected:
        assert int(next_logits(small, session).argmax()) == token
        session.commit(Verdict((0,), (token,), 0))


@pytest.mark.slow
def test_the_last_cell_is_used_and_drafts_shrink_before_it() -> None:
    target = load(n_ctx=256)
    stop = StopParams(max_new_tokens=1000)
    plain = run(target, None, PROMPT, stop=stop)
    assert (plain.finish, len(plain.tokens)) == (("length", None), 256 - len(PROMPT))
    for drafter in ("lookahead", RandomTrees(nodes=40)):
        assert run(target, drafter, PROMPT, stop=stop).tokens == plain.tokens


def test_too_many_sequences_are_refused_by_name() -> None:
    target = load(n_seq_max=2)
    sessions = [target.open(PROMPT[i:], GREEDY) for i in range(2)]
    with pytest.raises(CacheFull, match=r"no sequence id of n_seq_max=2 is left"):
        target.open(PROMPT, GREEDY)
    sessions[0].close()
    target.open(PROMPT, GREEDY)


def test_more_cells_than_llama_cpp_has_are_refused() -> None:
    """It takes their number modulo 2**32."""
    for options in ({"n_ctx": 2**31 - 1}, {"n_ctx": 2**28, "n_seq_max": 16}):
        with pytest.raises(
            BadParameter, match=f"n_ctx={options['n_ctx']} is not possible: .* are more than {2**31 - 1}; give"
        ):
            LLM(str(gguf_models.llama()), kv_unified=False, **options)


def test_ids_are_shared_fairly() -> None:
    target = load(n_seq_max=8)
    one = opened(target, PROMPT)
    assert target.max_leaves == 8
    target.step([one], [TokenTree.from_paths(319, [[i] for i in range(8)])])
    one.commit(Verdict((0,), (9,), 0))
    two = opened(target, PROMPT[1:])
    assert target.max_leaves == 4
    trees = [TokenTree.from_paths(token, [[i] for i in range(4)]) for token in (9, 319)]
    target.step([one, two], trees)  # the first gives four of its eight ids back


def test_ids_beside_those_of_a_tree_are_given_to_another_sequence() -> None:
    target = load(n_seq_max=8)
    one = opened(target, PROMPT)
    target.step([one], [TokenTree.from_paths(319, [[i] for i in range(6)])])
    one.commit(Verdict((0,), (9,), 0))
    two = opened(target, PROMPT[1:])  # takes an id that is free
    assert target.max_leaves == 4
    trees = [TokenTree.from_paths(token, [[i] for i in range(4)]) for token in (9, 319)]
    target.step([one, two], trees)  # the first has six ids and needs four


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Context, "save_state"),
        (Context, "copy"),
        (Cells, "_reserve"),
        (Cells, "release"),
        (LlamaCppSession, "__init__"),
    ],
)
def test_what_an_interrupted_call_leaves_behind_is_freed(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(n_seq_max=3)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def work() -> None:  # a text leaves the cells, others enter
        first = opened(target, range(500, 540))
        try:
            target.fork(first, GREEDY).close()
        finally:
            first.close()

    opened(target, PROMPT).close()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            work()
    sessions = [opened(target, range(start, start + 20)) for start in range(400, 430, 10)]  # all ids
    held = last_positions(target)
    assert sum(held.values()) + len(held) == 3 * 19
    for session in sessions:
        session.close()


def test_what_is_kept_for_later_makes_room() -> None:
    target = load(n_ctx=256)
    for first in range(0, 2000, 100):
        run(target, None, range(first, first + 90), stop=StopParams(max_new_tokens=3))
    held = last_positions(target)
    assert sum(held.values()) + len(held) <= 256


# ------------------------------------------------------------------------------------------ prompts in steps' forwards


@pytest.mark.parametrize("reads", [(19, 30), (7, 30), (100, 100), (1, 1), (19, 0)])
def test_prompts_are_read_in_steps(target: LlamaCppTarget, reads: tuple[int, int]) -> None:
    """Beside a tree, and in front of one; what remains unread takes no part. The rows are those of a prompt."""
    prompts, capture = [list(PROMPT), list(range(40, 71))], Capture(top_k=3)
    drafting = opened(target, range(100, 130))
    sessions = [target.open(prompt, GREEDY, capture) for prompt in prompts]
    drafted = TokenTree(np.array([129, 5, 6, 7]), np.array([-1, 0, 0, 1]))
    trees = [drafted, TREE_OF_SIX, TokenTree.root(70)]
    unread = [session.unread for session in sessions]
    found = target.step_and_read([drafting, *sessions], trees, [0, *reads])
    rows = [np.array(each.logits) for each in found]
    for session, tree, choices, before, most, own in zip(
        sessions, trees[1:], found[1:], unread, reads, rows[1:], strict=True
    ):
        assert choices.took_part == (most >= before)
        assert len(own) == (len(tree) if choices.took_part else 0)
        read = min(before, most)
        assert (choices.prompt is None) == (read == 0)
        assert session.unread == (before if choices.took_part else before - read)  # a step is not committed yet
        if choices.prompt is not None:
            assert (choices.prompt.start, choices.prompt.tokens.tolist()) == (0, session.tokens[:read])
            assert choices.prompt.top_k(3)[0].shape == (read, 3)
    for session, tree, choices in zip([drafting, *sessions], trees, found, strict=True):
        if choices.took_part:
            session.commit(verify(tree, choices))
            assert (session.unread, session.track.length) == (0, len(session.tokens) - 1)
    target.forget()
    for prompt, tree, own in zip([list(range(100, 130)), *prompts], trees, rows, strict=True):
        for node in range(len(own)):
            alone = opened(target, [*prompt, *tree.path_tokens(node)])
            np.testing.assert_allclose(own[node], next_logits(target, alone), atol=1e-4)
            alone.close()
    for session in (drafting, *sessions):
        read_prompt(target, session)
        row = next_logits(target, session)
        alone = opened(target, list(session.tokens))
        np.testing.assert_allclose(row, next_logits(target, alone), atol=1e-4)
        alone.close()
        session.close()


def test_rows_of_a_prompt_read_in_steps_are_those_of_prefill(target: LlamaCppTarget) -> None:
    prompt, capture = np.random.default_rng(3).integers(3, 4095, 300).tolist(), Capture(top_k=4)
    other, session = opened(target, PROMPT), target.open(prompt, GREEDY, capture)
    found = []
    while session.unread:
        trees = [TokenTree.root(each.tokens[-1]) for each in (other, session)]
        choices = target.step_and_read([other, session], trees, [0, 64])
        found.append(choices[1].prompt)
        other.commit(verify(trees[0], choices[0]))
        if choices[1].took_part:
            session.commit(verify(trees[1], choices[1]))
    assert [rows is None for rows in found] == [False] * 5
    session.close()
    other.close()
    target.forget()
    expected = read_prompt(target, target.open(prompt, GREEDY, capture))
    for part in (0, 1):
        one, two = (np.concatenate([rows.top_k(4)[part] for rows in all_]) for all_ in (found, expected))
        np.testing.assert_allclose(one, two, atol=1e-4)


def test_prompts_wait_where_a_step_has_no_room() -> None:
    """A forward of so few tokens takes what fits; nothing stands still, and the texts are the same."""
    small = load(n_ctx=256, n_batch=8, n_ubatch=8, n_seq_max=8)
    prompts = [list(range(10 * i + 1, 10 * i + 21)) for i in range(8)]
    options: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    for drafter in ("plain", "auto", "prompt_lookup"):
        texts = [result.tokens for result in LLM(small, drafter=drafter, max_batch=8).generate(prompts, **options)]
        alone = LLM(load(), drafter="plain")
        assert texts == [alone.generate(prompt, **options).tokens for prompt in prompts]


def test_a_prompt_and_its_first_token_take_one_forward(target: LlamaCppTarget) -> None:
    llm = LLM(target, drafter="plain")
    decode, sizes = target.context.decode, []
    target.context.decode = lambda tokens, *rest: (sizes.append(len(tokens)), decode(tokens, *rest))[1]  # type: ignore
    try:
        llm.generate([*PROMPT], max_new_tokens=3, ignore_eos=True)
        assert sizes == [len(PROMPT), 1, 1]
        sizes.clear()
        results = llm.generate([[*PROMPT, 5], [7, *PROMPT]], max_new_tokens=2, ignore_eos=True)
        assert sizes == [1 + 21, 2]  # the first one was in the cache, but for its last token
        assert [result.stats.prefill_forwards for result in results] == [0, 1]
        sizes.clear()
        llm.generate([9, *PROMPT], max_new_tokens=2, ignore_eos=True, n=2)
        assert sizes == [20, 2, 2]  # samples share the prompt, which is read by itself
    finally:
        del target.context.decode


def in_front_of_another(self: Part, *given: Any, make: Any = Part.__init__) -> None:
    """The tree hangs over the last token but one of the prompt."""
    make(self, *given)
    tree, at = self.placed, self.session.ahead
    if self.tree is None or self.session.is_read or at < 2:
        return
    parents = [*tree.parent_list[:at], at - 2, *tree.parent_list[at + 1 :]]
    self.placed = TokenTree(np.array(tree.token_list), np.array(parents))


def test_a_tree_in_a_wrong_place_behind_its_prompt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load()
    prompts = [[*PROMPT, i] for i in range(30, 40)]
    expected = [LLM(target, drafter="plain").generate(prompt, max_new_tokens=8).tokens for prompt in prompts]
    monkeypatch.setattr(Part, "__init__", in_front_of_another)
    llm = LLM(load(), drafter="plain")
    assert is_noticed(lambda: [llm.generate(prompt, max_new_tokens=8).tokens for prompt in prompts] == expected)


# ---------------------------------------------------------------------------------------------------- wrong on purpose


PLACE = Track.place


def everyone_sees_everyone(self: Track, tree: TokenTree, num_computed: int = 0) -> list[list[int]]:
    ids = PLACE(self, tree, num_computed)
    return [[each for _, each in self.leaf_ids]] * len(ids)


def the_wrong_leaf(self: Track, path: Any, commit: Any = Track.commit) -> None:
    tree = self.tree
    assert tree is not None
    commit(self, path)
    if len(tree) > 1 and self.copies:  # another id becomes the main one
        other = next(iter(self.copies))
        self.copies[self.main] = self.copies.pop(other)
        self.main = other


def one_position_late(self: Context, tokens: Any, places: Any, *rest: Any, decode: Any = Context.decode) -> Any:
    return decode(self, tokens, (np.asarray(places) + (np.asarray(places) > 0)).tolist(), *rest)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (Track, "place", everyone_sees_everyone),
        (Track, "commit", the_wrong_leaf),
        (Context, "decode", one_position_late),
    ],
)
def test_a_broken_target_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]
) -> None:
    """By the test at construction, by `check`, or by llama.cpp itself."""
    target = load()
    monkeypatch.setattr(owner, name, wrong)
    prompts = [list(PROMPT) * 2, list(range(1, 30)) * 2]
    assert is_noticed(lambda: check(target, None, prompts, ["lookahead"], max_new_tokens=40).ok)
    assert is_noticed(lambda: TREE in load().info.capabilities)


def is_noticed(right: Callable[[], bool]) -> bool:
    try:
        return not right()
    except LeapaheadError as error:
        return "could not decode" in str(error) or "its own logits" in str(error)


# ---------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_plain_text_is_llama_cpp_pythons_own(kind: str) -> None:
    path = gguf_models.bundled(kind)
    own = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
    llm = LLM(path, drafter="plain", n_ctx=512, n_threads=1)
    for prompt in BUNDLED[:4]:
        tokens = own.tokenize(prompt.encode())
        theirs: list[int] = []
        for token in own.generate(tokens, temp=0.0, top_k=1):
            theirs.append(token)
            if len(theirs) == 48 or token == own.token_eos():
                break
        assert llm.generate(prompt, max_new_tokens=48).tokens == theirs
    own.close()


def test_plain_text_is_transformers_text() -> None:
    ours, theirs = LLM(gguf_models.bundled("f32"), drafter="plain", n_threads=1), LLM(drafter="plain", dtype="float32")
    for prompt in BUNDLED[:3]:
        assert ours.generate(prompt, max_new_tokens=40).text == theirs.generate(prompt, max_new_tokens=40).text


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("f32", 1.0),
        ("q8_0", 0.0),
        ("q4_k_m", 0.0),
        ("q4_k_m", 1.0),
    ],
)
@pytest.mark.slow
def test_check_finds_no_mismatch(kind: str, temperature: float) -> None:
    loaded = loading.load(gguf_models.bundled(kind), n_threads=1)
    report = check(
        loaded.target,
        loaded.tokenizer,
        BUNDLED[:3],
        max_new_tokens=32,
        sampling=SamplingParams(temperature=temperature, seed=3),
        eos_token_ids=loaded.eos_token_ids,
        batch=2,
    )
    assert report.ok
    assert {row.name for row in report.drafters if not row.refused} >= {"plain", "jacobi", "prompt_lookup", "lookahead"}


# ---------------------------------------------------------------------------------------------------- the tokenizer


def test_the_tokenizer_is_the_folders() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(loading.bundled())
    ours = loading.load(gguf_models.bundled("bf16"), n_threads=1).tokenizer
    assert ours is not None
    assert (len(ours), ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    for text in (*BUNDLED, "  two  spaces\n\n\ttab", "Ünïcödé 日本語 €5 😀", "<|endoftext|>x", " ", "\n", "a" * 200):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_tokens_that_a_file_does_not_have_are_no_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loading.gguf_tokenizer(str(gguf_models.bundled("f32")))
    monkeypatch.setattr(tokenizer, "_joins", kind == "bpe")
    ids = tokenizer.encode("def f(x):")
    assert tokenizer.decode([-1, *ids, len(tokenizer), 2**40]) == "def f(x):"


def test_streams_join_to_the_text() -> None:
    llm = LLM(gguf_models.bundled("bf16"), n_threads=1)
    pieces = list(llm.stream("def add(a, b):\n", max_new_tokens=40, temperature=0.9, seed=1))
    assert pieces[-1].result is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.text != ""


def test_tokens_that_a_file_suppresses_are_not_written(tmp_path: Path) -> None:
    """As llama.cpp's own programs do; with drafts that say otherwise, too."""
    free = LLM(gguf_models.llama(), n_ctx=512).generate(list(PROMPT), max_new_tokens=12, ignore_eos=True).tokens
    values = {"tokenizer.ggml.suppress_tokens": [free[0], free[3]]}
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "model.gguf", values)
    llm = LLM(path, n_ctx=512)
    assert llm.target.info.suppressed == (free[0], free[3])
    found = {
        name: llm.generate(list(PROMPT), max_new_tokens=12, ignore_eos=True, drafter=name).tokens
        for name in ("plain", "auto", "prompt_lookup")
    }
    assert not set(free[:4:3]) & set(found["plain"])
    assert found["plain"] == found["auto"] == found["prompt_lookup"]


def test_long_stretches_without_a_break_are_tokenized(tmp_path: Path) -> None:
    """llama.cpp ended the process, whose stack had no more room for the recursion of its patterns."""
    program = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from leapahead.models.llama_cpp.tokenizer import read_tokenizer
tokenizer = read_tokenizer(sys.argv[1])
def is_right(text):
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
texts = [piece * 40_000 for piece in ("x", " ", ".", "\u6f22")]
assert is_right("Two words and " + texts[0])
with ThreadPoolExecutor(2) as pool:
    assert all(pool.map(is_right, texts))
assert threading.stack_size() == 0
"""
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "model.gguf", {"tokenizer.ggml.pre": "gpt-4o"})
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_too_long_a_stretch_without_a_break_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tokenizer.read_tokenizer(gguf_models.llama())
    with pytest.raises(BadParameter, match="1048577 characters between two spaces or line breaks is not possible"):
        gguf.encode("x" * (tokenizer.LONGEST + 1))

    def refusing(size: int = 0) -> int:
        if size:
            raise ValueError("the system does not allow it")
        return 0

    monkeypatch.setattr("threading.stack_size", refusing)
    with pytest.raises(BadParameter, match="would need 3 MiB of stack to tokenize it; divide them by some"):
        gguf.encode("x" * 4000)
    for text in ("word " * 1000, "\u6f22\u3002\n" * 1000):  # with breaks, they need no such thread
        assert gguf.decode(gguf.encode(text, add_special_tokens=False)) == text


# ---------------------------------------------------------------------------------------------------- bad input


def changed(tmp_path: Path, change: Callable[[bytes], bytes]) -> Path:
    path = tmp_path / "changed.gguf"
    path.write_bytes(change(gguf_models.llama().read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:100], "cannot be loaded: failed to read key-value pairs; "),
        (lambda data: data[:4] + b"\1" + data[5:], "cannot be loaded: GGUFv1 is no longer supported"),
        (lambda data: data.replace(b"general.name", b"general.type", 1), "duplicate key 'general.type'"),
        (lambda data: data[: len(data) // 2], "cannot be loaded: "),
        (lambda data: data[:-1], "not within the file bounds, model is corrupted or incomplete"),
        (lambda data: data[:-20000] + bytes(20000), "is incomplete: its last 20000 bytes are zero, among them"),
        (lambda data: data[:100] + bytes(len(data) - 100), "cannot be loaded: "),
        (lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:], "cannot be loaded: "),
        (lambda data: data[:8] + b"\xff" * 16 + data[24:], "cannot be loaded: "),
        (
            lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamaa", 1),
            "unknown model architecture",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(BadParameter) as caught:
        LLM(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


SPM = {  # a vocabulary of SentencePiece
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [*(f"<0x{byte:02X}>" for byte in range(256)), *(f"t{i}" for i in range(256, 4096))],
    "tokenizer.ggml.scores": [0.0] * 4096,
    "tokenizer.ggml.token_type": [6] * 256 + [1] * 3840,
}
WITHOUT_41 = ["<byte>" if token == "<0x41>" else token for token in SPM["tokenizer.ggml.tokens"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.block_count": 0}, "has block_count 0, with which llama.cpp cannot load it; convert it again"),
        ({"llama.context_length": 2**31}, "has context_length 2147483648, with which llama.cpp cannot load it"),
        ({**SPM, "tokenizer.ggml.tokens": WITHOUT_41}, "has no token for the byte 0x41, without which llama.cpp"),
        (
            {"tokenizer.ggml.tokens": ["a", "", "b", "", *(f"t{i}" for i in range(4, 4095)), "a"]},
            "has the token 'a' twice, with which llama.cpp cannot load it; convert it again from",
        ),
        ({"general.type": "adapter"}, "is an adapter and no model; merge it into its model, and give that file"),
        ({"adapter.type": "lora"}, "is an adapter and no model"),
        ({"general.type": "mmproj"}, "is a projector of images or sounds; give the file of its language model"),
        ({"general.architecture": "clip"}, "is a projector of images or sounds"),
        (
            {"split.no": 1, "split.count": 3},
            "is part 2 of a model in several files; give the first of them, 'm-00001-of-00003.gguf'",
        ),
    ],
)
def test_a_header_by_which_llama_cpp_cannot_load_it(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "m-00002-of-00003.gguf", values)
    for read in (LLM, loading.gguf_tokenizer):
        with pytest.raises(BadParameter) as caught:
            read(str(path))
        assert message in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_number_of_a_part_that_is_text_is_ignored(tmp_path: Path) -> None:
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "m.gguf", {"split.no": "1"})
    assert loading.gguf_tokenizer(str(path)).encode("A")


def test_a_file_of_a_vocabulary_alone(tmp_path: Path) -> None:
    """Whether a model without rotation has learned positions, its tensors tell, of which this file has none."""
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(metadata(written(gpt2)))
    assert loading.gguf_tokenizer(str(path)).encode("ab", add_special_tokens=False) == [256]


def test_a_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "sha256-3f"  # as Ollama names it
    path.write_bytes(gguf_models.llama().read_bytes())
    assert [loading.engine_of(str(path), engine) for engine in ("auto", "llama.cpp")] == ["llama.cpp"] * 2
    assert loading.load_tokenizer(str(path), trust_remote_code=False).encode("A")
    path.write_bytes(b"GGML")
    assert loading.engine_of(path) == "transformers"


def test_a_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    one, other = "{{ messages[0].content }}", "tools: {{ tools }}"
    names = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    for templates, plain, tools in (((one, other), "A", "tools: [1]"), ((None, other), "tools: None", "tools: [1]")):
        values = dict(zip(names, templates, strict=True))
        path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "m.gguf", values)
        tokenizer = loading.gguf_tokenizer(str(path))
        for variables, text in (({}, plain), ({"tools": None}, plain), ({"tools": [1]}, tools)):
            assert chat_text([{"role": "user", "content": "A"}], tokenizer, variables=variables) == text


def test_an_empty_template_is_none(tmp_path: Path) -> None:
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "m.gguf", {"tokenizer.chat_template": ""})
    with pytest.raises(BadParameter, match="the tokenizer has no chat template"):
        chat_text([{"role": "user", "content": "A"}], loading.gguf_tokenizer(str(path)))


def test_a_byte_may_be_a_token_by_itself(tmp_path: Path) -> None:
    tokens = ["A" if token == "<byte>" else token for token in WITHOUT_41]
    types = [1 if token == "A" else 6 for token in tokens[:256]] + [1] * 3840
    values = {**SPM, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = gguf_models.rewritten(gguf_models.llama(), tmp_path / "m.gguf", values)
    assert loading.gguf_tokenizer(str(path)).encode("A", add_special_tokens=False)[-1] == 0x41


@pytest.mark.parametrize("zeros", [60, 16_000])
def test_zeros_that_may_be_meant_are_not_refused(tmp_path: Path, zeros: int) -> None:
    """Less than half of the last weight, as unused rows of a matrix may be, or a small weight, as of a norm."""
    assert load(changed(tmp_path, lambda data: data[:-zeros] + bytes(zeros))).info.vocab_size == 4096


def test_what_is_impossible_is_refused_by_name(tmp_path: Path) -> None:
    path = gguf_models.llama()
    for wrong, message in (
        (lambda: LLM(tmp_path / "none.gguf"), "there is no file"),
        (lambda: LLM(path, dtype="float32"), "dtype='float32' is not possible with a GGUF file"),
        (lambda: LLM(path, device="cuda"), "device='cuda' is not possible with a GGUF file"),
        (lambda: LLM(path, n_ctx=-1), "n_ctx=-1 is not possible: it must be a whole number, from 0 to 2147483647"),
        (lambda: LLM(path, n_ctx=2**31), "n_ctx=2147483648 is not possible: it must be a whole number, from 0 to"),
        (lambda: LLM(path, n_ctx=2**32 + 512), "n_ctx=4294967808 is not possible"),
        (lambda: LLM(path, n_gpu_layers=2**32), "n_gpu_layers=4294967296 is not possible"),
        (lambda: LLM(path, n_ctx=255), "n_ctx=255 is not possible: .* give 256 or more, or 0"),
        (lambda: LLM(path, n_threads=0), "n_threads=0 is not possible"),
        (lambda: LLM(path, n_batch=None), "n_batch=None is not possible"),
        (lambda: LLM(path, n_seq_max=1000), "n_seq_max=1000 is not possible"),
        (lambda: LLM(path, n_seq_max=32, n_batch=16), "n_seq_max=32 sequences do not fit a batch of 16 tokens"),
        (lambda: LLM(path, type_k="q3"), "type_k='q3' is not possible"),
        (lambda: LLM(path, type_v="q8_0", flash_attn=False), "type_v='q8_0' is not possible with flash_attn=False"),
        (lambda: LLM(path, type_k="q8_0"), "type_k='q8_0' is not possible for .* blocks of 32 .* a head has 8 here"),
        (lambda: LLM(n_ctx=512), "n_ctx=512 can be set for a GGUF file only"),
        (lambda: LLM(path, wobble=3), "wobble"),
    ):
        with pytest.raises(BadParameter, match=message):
            wrong()
    with pytest.raises(BadParameter, match=r"type_v='q8_0' is not possible beside keys in f32.* give type_k='q8_0'"):
        LlamaCppOptions().check_types(("f32", "q8_0"), (64, 64), path)
    LlamaCppOptions(flash_attn=True).check_types(("f32", "q8_0"), (64, 64), path)
    assert load(n_batch=16).max_leaves == 16  # of a small batch the default follows


def test_prompts_are_checked(target: LlamaCppTarget) -> None:
    with pytest.raises(BadParameter, match="prompt is empty"):
        target.open([], GREEDY)
    with pytest.raises(BadParameter, match="token 5000 is outside the vocabulary of 4096"):
        target.open([1, 5000], GREEDY)
    with pytest.raises(ContextOverflow, match="512 tokens and the context 512"):
        target.open([1] * 512, GREEDY)


def test_the_log_goes_to_our_logger_and_not_to_the_screen(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    load()  # makes the file, with a progress bar of Transformers
    capfd.readouterr()
    with caplog.at_level(logging.INFO, "leapahead.llama_cpp"):
        load()
    assert any("llama" in record.getMessage() for record in caplog.records)
    load()
    assert capfd.readouterr() == ("", "")


def test_a_signal_during_a_load_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives while llama.cpp writes to its log: ctypes drops what is raised there."""
    with monkeypatch.context() as patched:
        patched.setattr(log.log, "log", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            load()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    load()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "context"])
def test_what_was_loaded_before_an_interrupt_is_freed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, free = {
        "model": ("llama_model_load_from_file", "llama_model_free"),
        "context": ("llama_init_from_model", "llama_free"),
    }[kind]
    made, freed = list[int](), list[int]()
    own_make, own_free = getattr(llama_cpp, make), getattr(llama_cpp, free)

    def interrupted(*given: Any) -> Any:
        made.append(own_make(*given))
        signal.raise_signal(signal.SIGINT)
        return made[-1]

    def counted(pointer: int) -> None:
        freed.append(pointer)
        own_free(pointer)

    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, make, interrupted)
        patched.setattr(llama_cpp, free, counted)
        with pytest.raises(KeyboardInterrupt):
            load()
        gc.collect()
        assert freed == made


def test_a_file_whose_name_is_not_utf8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"m\xe9.gguf")
    try:
        shutil.copy(gguf_models.llama(), place)
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    assert load(place).info.vocab_size == 4096


def test_the_log_callback_is_replaced_with_the_first_model_and_not_before() -> None:
    program = """
import ctypes, sys, llama_cpp as c
def callback():
    found, data = c.llama_log_callback(), ctypes.c_void_p()
    c.llama_log_get(ctypes.byref(found), ctypes.byref(data))
    return ctypes.cast(found, ctypes.c_void_p).value
before = callback()
from leapahead.models.llama_cpp import model, options
assert callback() == before
model.load(sys.argv[1], options.LlamaCppOptions(n_ctx=256, n_threads=1))
assert callback() != before
"""
    subprocess.run([sys.executable, "-c", program, str(gguf_models.llama())], check=True, timeout=120)


# ---------------------------------------------------------------------------------------------------- the command line


def invoke(*words: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli, words, input=stdin)


def test_generate_from_a_file() -> None:
    path = str(gguf_models.bundled("q8_0"))
    words = ("generate", "-m", path, "--threads", "1", "-c", "512", "--max-new-tokens", "20", "--json", "def f(x):\n")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["target"], found["drafter"], len(found["tokens"])) == (Path(path).name, "auto", 20)


def test_chat_by_the_template_of_the_file() -> None:
    words = ("chat", "-m", str(gguf_models.bundled("q8_0")), "--threads", "1", "--max-new-tokens", "8", "-q")
    result = invoke(*words, stdin="hello\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.slow
def test_check_from_a_file() -> None:
    words = ("check", "-m", str(gguf_models.bundled("f32")), "--threads", "1", "--limit", "2", "--max-new-tokens", "16")
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]


def test_errors_on_the_command_line(tmp_path: Path) -> None:
    broken, whole = str(changed(tmp_path, lambda data: data[:5000])), str(gguf_models.llama())
    for words, message in (
        (("-m", broken), "cannot be loaded"),
        (("-m", whole, "-c", "32"), "--ctx-size=32 is not possible: llama.cpp's smallest context has 256 tokens"),
    ):
        result = invoke("generate", *words, "x")
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert result.output.startswith("error: ")
        assert message in result.output


@pytest.mark.slow
def test_a_tie_is_judged_where_two_such_sequences_do_not_fit() -> None:
    """A prompt of more than half the cache: the sequence in question leaves, and the ways are computed without it."""
    loaded = loading.load(gguf_models.bundled("q8_0"), n_threads=1, n_ctx=256)
    prompt = [5 + i % 90 for i in range(200)]
    found = ties.measure(loaded.target, prompt, [7, 8], (3, 4), SamplingParams(), 1)
    assert found.noise > 0
    quick = ties.measure(loaded.target, prompt, [7, 8], (3, 4), SamplingParams(), 1, thorough=False)
    assert quick.gap == pytest.approx(found.gap, abs=0.2)
    loaded.target.open(prompt, SamplingParams()).close()  # nothing was left open


def test_a_model_is_freed_with_its_llm() -> None:
    """Not closed, so that texts are kept for prompts to come."""

    def used() -> LLM:
        llm = LLM(str(gguf_models.llama()), n_threads=1)
        llm.generate([3, 4, 5], max_new_tokens=4)
        return llm

    assert is_freed(used, "target.model")


CLOSES = """
class Closes:
    llm = llm
    def __del__(self):
        self.llm.close()
closes = Closes()
llm.generate([5, 6, 7], max_new_tokens=8)
"""
HALF_READ = """
stream = llm.stream([5, 6, 7] * 5, max_new_tokens=100, ignore_eos=True)
for _ in range(5):
    next(stream)
"""


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ("drafter='plain'", CLOSES),
        ("drafter='lookahead'", HALF_READ),
        ("drafter='prompt_lookup', exact=True", HALF_READ),
    ],
    ids=["closed", "half read", "half read, exact"],
)
def test_nothing_is_released_once_the_end_of_the_interpreter_has_freed_it(options: str, program: str) -> None:
    """Which comes before the end of the global variables, and was a segmentation fault."""
    program = f"import sys, leapahead\nllm = leapahead.LLM(sys.argv[1], n_threads=1, {options}){program}print('ended')"
    command = [sys.executable, "-c", program, str(gguf_models.llama())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
