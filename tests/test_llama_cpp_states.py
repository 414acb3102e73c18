"""Drafts over recurrent states under llama.cpp: a state is kept before a draft, and what was rejected is replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import GREEDY, Oracle, SequenceDrafter, attached, fit, mostly_slow, run

from leapahead import LLM, Engine, Request, drafters
from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Proposal
from leapahead.models.base import CHAIN, HIDDEN, TREE, Capture, read_prompt

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import llama_cpp as c
from gguf_architectures import ARCHITECTURES, BY_NAME, VOCABULARY

from leapahead.models.llama_cpp import model
from leapahead.models.llama_cpp.context import Context
from leapahead.models.llama_cpp.model import LONGEST_REPLAY, LlamaCppSession, LlamaCppTarget
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.llama_cpp.state_track import StateTrack

FAST = ("mamba", "jamba")  # a state by itself, and beside attention
STATEFUL = [each.name for each in ARCHITECTURES if each.stateful]
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STATEFUL]
SEVERAL = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in STATEFUL if not BY_NAME[name].alone
]
_rng = np.random.default_rng(5)
_phrase = _rng.integers(0, VOCABULARY - 1, 7).tolist()
PROMPTS: tuple[list[int], ...] = (  # with something to look up; of different lengths
    [*_phrase, *_rng.integers(0, VOCABULARY - 1, 5).tolist(), *_phrase],
    _rng.integers(0, VOCABULARY - 1, 9).tolist(),
    _phrase * 3,
    _rng.integers(0, VOCABULARY - 1, 3).tolist(),
)
MODES = {
    "greedy": [SamplingParams()] * len(PROMPTS),
    "sampled": [SamplingParams(temperature=1.0, seed=11 + i) for i in range(len(PROMPTS))],
}


class Mixed(SequenceDrafter):
    """Some tokens of the text, then random ones: accepted whole, in part and not at all."""

    name: ClassVar[str] = "mixed"

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self.text, self.rng = list(text), np.random.default_rng(seed)

    def propose(self, sequence: Any, budget: Budget) -> Proposal:
        at = len(sequence.tokens)
        right, wrong = self.rng.integers(0, 4, 2)
        tokens = [*self.text[at : at + right], *self.rng.integers(0, VOCABULARY, wrong).tolist()]
        return Proposal(fit(TokenTree.chain(sequence.root, tokens), budget))


def load(name: str, **options: Any) -> LlamaCppTarget:
    return model.load(BY_NAME[name].path(), LlamaCppOptions(**{"n_ctx": 1024, "n_threads": 1, **options}))[0]


@cache
def target_of(name: str) -> LlamaCppTarget:
    return load(name)


@cache
def plain_texts(name: str, mode: str, length: int) -> list[list[int]]:
    """The new tokens of each prompt, decoded by itself in a cache without the others."""
    target, found = target_of(name), []
    for prompt, params in zip(PROMPTS, MODES[mode], strict=True):
        target.forget()
        found.append(run(target, None, prompt, params=params, stop=StopParams(max_new_tokens=length)).tokens)
    target.forget()
    return found


def texts(target: LlamaCppTarget, drafter: str, mode: str, expected: list[list[int]], batch: int) -> list[list[int]]:
    """The same with a drafter, so many at a time. Drafters of this module know the expected texts."""
    engine, handles = Engine(target, max_batch=batch), []
    made = engine.drafter(drafter, **({"nodes": 6} if drafter == "auto" else {})) if drafter != "mixed" else None
    for index, (prompt, params) in enumerate(zip(PROMPTS, MODES[mode], strict=True)):
        one = made or attached(engine, Mixed([*prompt, *expected[index]], index))
        stop = StopParams(max_new_tokens=len(expected[index]))
        handles.append(engine.submit(Request(prompt, one, params, stop)))
    engine.run(handles)
    return [handle.tokens for handle in handles]


def opened(target: LlamaCppTarget, prompt: Sequence[int], capture: Capture | None = None) -> LlamaCppSession:
    session = target.open(prompt, GREEDY, capture or Capture())
    read_prompt(target, session)
    return session


def test_long_texts_of_a_model_without_cells_leave_room_for_drafts() -> None:
    target = load("mamba", n_ctx=256)
    sessions = [opened(target, [5 + at, *range(1, 200)]) for at in range(2)]
    assert target.max_nodes > 8
    for session in sessions:
        session.close()


def drafted(target: LlamaCppTarget, session: LlamaCppSession, tokens: Sequence[int]) -> np.ndarray:
    """float32 [nodes, vocab], of the root and a chain below it."""
    return np.array(target.step([session], [TokenTree.chain(session.tokens[-1], tokens)])[0].logits)


def commit(session: LlamaCppSession, *tokens: int) -> None:
    session.commit(Verdict(tuple(range(len(tokens))), tokens, len(tokens) - 1))


def test_tokens_that_are_read_again_take_the_cells_of_earlier_texts() -> None:
    target = load("jamba", n_ctx=256)
    first = opened(target, range(1, 21))
    for start in range(30, 180, 50):
        opened(target, range(start, start + 50)).close()
    drafted(target, first, range(1, 21))
    commit(first, *range(1, 14))  # 13 tokens are to be read again
    cells = target._cells
    second = opened(target, range(100, 200))
    while cells.taken + cells.kept < 256:  # it grows as far as there is room
        drafted(target, second, [])
        commit(second, 1)
    drafted(target, first, [])


# ---------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("mode", mostly_slow(MODES, "sampled"))
@pytest.mark.parametrize("name", NAMES)
def test_text_of_chains(name: str, mode: str) -> None:
    """Greedy and seeded, one and four at a time, in 200 tokens each; in 60 in the fast tests."""
    length = 60 if name in FAST else 200
    target, expected = target_of(name), plain_texts(name, mode, length)
    for drafter in ("mixed", "prompt_lookup", "auto"):
        for batch in (1, 4):
            target.forget()
            assert texts(target, drafter, mode, expected, batch) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAST)
def test_text_of_chains_over_long_texts(name: str, mode: str) -> None:
    target, expected = target_of(name), plain_texts(name, mode, 200)
    for drafter in ("mixed", "prompt_lookup", "auto", "jacobi", "suffix"):
        for batch in (1, 4):
            assert texts(target, drafter, mode, expected, batch) == expected


@pytest.mark.parametrize(("n_batch", "n_seq_max"), [(6, 2), (14, 14)])
def test_why_a_batch_too_small_for_the_test_takes_no_drafts(n_batch: int, n_seq_max: int) -> None:
    name, expected = FAST[0], plain_texts(FAST[0], "greedy", 40)
    target = load(name, n_batch=n_batch, n_seq_max=n_seq_max)
    with pytest.raises(Refused, match=r"steps of up to 15 tokens; load it with so large an n_batch and n_ubatch\)"):
        LLM(target, drafter="prompt_lookup")
    assert texts(target, "plain", "greedy", expected, 1) == expected
    assert CHAIN in load(name, n_batch=n_batch + 1, n_seq_max=n_seq_max).info.capabilities


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_seq_max", [1, 5])
def test_text_of_chains_where_ids_are_few(name: str, n_seq_max: int) -> None:
    """States that no id is left for are copied; a window does not allow that, so such a model decodes plainly."""
    alone, windowed = BY_NAME[name].alone, target_of(name).context.windowed
    if alone and n_seq_max > 1:
        with pytest.raises(BadParameter, match=r"n_seq_max=5 is not possible: .* one sequence"):
            load(name, n_seq_max=n_seq_max)
        return
    target, expected = load(name, n_seq_max=n_seq_max), plain_texts(name, "greedy", 40)
    assert (CHAIN in target.info.capabilities) == (not windowed or n_seq_max > 1)
    if windowed and n_seq_max == 1:
        with pytest.warns(UserWarning, match=r"decodes plainly .*lfm2_sliding.gguf does not have chain"):
            assert texts(target, "auto", "greedy", expected, 4) == expected
        plain = LLM(target, drafter="plain").generate([5, 6], max_new_tokens=3, logprobs=2)
        assert [entry.top[0][0] for entry in plain.logprobs] == plain.tokens
        with pytest.raises(Refused, match=r"'prompt_lookup' needs chain.*recurrent state cannot discard"):
            LLM(target, drafter="prompt_lookup")
        return
    for batch in (1, 4):
        assert texts(target, "mixed", "greedy", expected, batch) == expected


def test_drafters_of_trees_are_refused_by_name() -> None:
    target = load("jamba")
    with pytest.raises(Refused, match=r"'lookahead' needs .*tree.*jamba.gguf.*'prompt_lookup'"):
        LLM(target, drafter="lookahead")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(target)  # the default drafter makes chains
    session = opened(target, PROMPTS[0])
    for computed in (0, 1):
        with pytest.raises(BadParameter, match="takes chains only"):
            target.step([session], [TokenTree.from_paths(session.tokens[-1], [[1], [2]])], [computed])
        drafted(target, session, [])
    session.close()
    assert {"prompt_lookup", "jacobi", "suffix", "auto"} <= set(drafters.ready())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jamba", "mamba"])
@pytest.mark.parametrize("mode", MODES)
def test_a_hybrid_drafts_for_others(name: str, mode: str) -> None:
    """Its drafts grow by a token in each forward, and less of them is accepted than it has computed."""
    for target_name in ("llama", "granitehybrid", name):
        target, expected = target_of(target_name), plain_texts(target_name, mode, 40)
        engine = Engine(target, max_batch=4)
        made = engine.drafter("draft_model", draft=load(name), nodes=3, depth=3)
        handles = [
            engine.submit(Request(prompt, made, params, StopParams(max_new_tokens=40)))
            for prompt, params in zip(PROMPTS, MODES[mode], strict=True)
        ]
        engine.run(handles)
        assert [handle.tokens for handle in handles] == expected
        drafted, accepted = (sum(getattr(each.stats, what) for each in handles) for what in ("drafted", "accepted"))
        assert drafted > 100
        assert target_name != name or accepted > 0.9 * drafted  # it knows its own text


# ---------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("name", SEVERAL)
def test_what_was_rejected_is_replayed(name: str) -> None:
    """Beside a session of another length, and with hidden states, whose rows are those of the nodes."""
    target = load(name, n_seq_max=16)
    capture = Capture(hidden=(-1,) if HIDDEN in target.info.capabilities else ())
    text = [*PROMPTS[0], *plain_texts(name, "greedy", 40)[0]]
    begin = len(PROMPTS[0])
    one, other = opened(target, PROMPTS[0]), opened(target, PROMPTS[1])
    assert one.replay == 0
    drafted(target, one, [text[begin], 1, 2, 3])
    commit(one, *text[begin : begin + 2])
    assert one.replay == 2
    trees = [TokenTree.chain(one.tokens[-1], [text[begin + 2], 7]), TokenTree.root(other.tokens[-1])]
    assert target.cost([one, other], trees).rows == 6
    plain = [np.array(each.logits) for each in target.step([one, other], trees)]
    found = target.step([other, one], trees[::-1], capture=capture)[::-1]
    both = [(np.array(each.logits), np.array(each.hidden) if capture.hidden else each.logits) for each in found]
    alone = opened(target, text[: begin + 2])
    rows = target.step([alone], [trees[0]], capture=capture)[0]
    np.testing.assert_allclose(plain[0], rows.logits, atol=2e-3)
    np.testing.assert_allclose(both[0][0], rows.logits, atol=2e-3)
    if capture.hidden:
        np.testing.assert_allclose(both[0][1], rows.hidden, atol=2e-3)
    np.testing.assert_allclose(both[1][0], plain[1], atol=2e-3)
    assert len(both[1][1]) == 1
    commit(one, *text[begin + 2 : begin + 4])
    assert one.replay == 4
    fork = target.fork(one, GREEDY)
    assert fork.replay == 4
    expected = drafted(target, opened(target, text[: begin + 4]), [])
    for session in (one, fork):
        np.testing.assert_allclose(drafted(target, session, []), expected, atol=2e-3)
        commit(session, 5)
        assert session.replay == 0
    for session in (one, fork, other, alone):
        session.close()


def test_the_replay_is_bounded() -> None:
    """Tokens that were often rejected are read by themselves at some point."""
    target = load("mamba")
    session = opened(target, PROMPTS[0])
    found = []
    for token in plain_texts("mamba", "greedy", 40)[0][:30]:
        assert int(drafted(target, session, [0, 1])[0].argmax()) == token
        commit(session, token)
        found.append(session.replay)
    assert max(found) == LONGEST_REPLAY + 1
    session.close()


# ---------------------------------------------------------------------------------------------------- prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("drafter", ["plain", "auto"])
def test_a_conversation_is_not_read_again(name: str, drafter: str) -> None:
    """The next turn goes on from the end of the last one; another answer, from the end of the prompt."""
    # One engine, which measures the latency profile once: what it computes for that would take the place of the texts.
    llm, options = LLM(load(name), drafter=drafter, drafter_cache=False), {"max_new_tokens": 12, "ignore_eos": True}
    first = llm.generate(PROMPTS[0], **options).tokens
    second = [*PROMPTS[0], *first, 3, 4, 5]
    edited = [*PROMPTS[0], 9, 9, 9]
    cases = [(PROMPTS[0], len(PROMPTS[0]) - 1), (second, len(PROMPTS[0]) + 9), (edited, len(PROMPTS[0]) - 1)]
    for prompt, reused in [*cases, *cases]:
        found = llm.generate(prompt, **options)
        assert found.stats.reused_tokens >= reused - LONGEST_REPLAY * (prompt is second)
        assert found.tokens == run(load(name), None, prompt, stop=StopParams(max_new_tokens=12)).tokens


def test_what_is_lost_or_lags_fits_a_small_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a fault of llama.cpp every text is read again; and replays leave room for the drafts of all."""
    target, expected = load("jamba", n_batch=16), plain_texts("jamba", "greedy", 40)
    for batch in (1, 4):
        assert texts(target, "mixed", "greedy", expected, batch) == expected
    sessions = [opened(target, prompt) for prompt in PROMPTS]

    def fail(self: Context, *given: Any) -> Any:
        raise LeapaheadError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode", fail)
        with pytest.raises(LeapaheadError, match="no memory"):
            drafted(target, sessions[0], [])
    assert min(session.replay for session in sessions) > 0  # llama.cpp may have moved the states of all
    for _ in range(2):
        found = target.step(sessions, [TokenTree.root(session.tokens[-1]) for session in sessions])
        assert [choices[0] for choices in found] == [text[0] for text in expected]
    for session in sessions:
        session.close()


def test_kept_states_give_way() -> None:
    """To sessions and to drafts; each takes an id."""
    target = load("jamba", n_seq_max=4)
    for index in range(12):
        run(target, Mixed(PROMPTS[index % 4]), [index, *PROMPTS[index % 4]], stop=StopParams(max_new_tokens=9))
    sessions = [opened(target, prompt) for prompt in PROMPTS]
    with pytest.raises(CacheFull, match=r"^4 sequences are open and no sequence id of n_seq_max=4 is left"):
        target.open(PROMPTS[0], GREEDY)
    drafted(target, sessions[0], [1, 2, 3])
    commit(sessions[0], 1)
    for session in sessions:
        session.close()
    target.forget()
    assert [c.llama_memory_seq_pos_max(target.context.memory, i) for i in range(4)] == [-1] * 4


@pytest.mark.slow
def test_states_take_their_share_of_the_cells() -> None:
    """Those of a hybrid's attention; what is kept for later makes room, and shared cells are counted once."""
    target = load("jamba", n_ctx=256)
    for index in range(20):
        prompt = [index, *PROMPTS[0] * 5]
        first = run(target, "prompt_lookup", prompt, stop=StopParams(max_new_tokens=40)).tokens
        run(target, "prompt_lookup", [*prompt, *first, 3], stop=StopParams(max_new_tokens=40))
    prompt = [3, *PROMPTS[0] * 5]
    plain = run(load("jamba"), None, prompt, stop=StopParams(max_new_tokens=256 - len(prompt))).tokens
    found = run(target, Mixed([*prompt, *plain]), prompt, stop=StopParams(max_new_tokens=1000)).tokens
    assert found == plain  # to the last cell


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [LeapaheadError("no memory"), CacheFull("no cells"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", FAST)
def test_a_draft_that_fails_leaves_no_trace(
    name: str, error: BaseException, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before or after the state has gone on; as a whole, with a replay, and while it grows."""
    target, expected = load(name), plain_texts(name, "greedy", 40)[0]
    session, beside = opened(target, PROMPTS[0]), opened(target, PROMPTS[1])
    text = [*PROMPTS[0], *expected]

    def fail(self: Context, *given: Any, whole: Any = Context.decode) -> Any:
        if late:
            whole(self, *given)
        raise error

    def fails(tokens: Sequence[int], computed: int = 0) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", fail)
            with pytest.raises(type(error)):
                target.step([session], [TokenTree.chain(session.tokens[-1], tokens)], [computed])

    for _ in range(2):
        at = len(session.tokens)
        fails([text[at], 1])
        fails([])
        rows = drafted(target, session, [text[at], 1])
        assert [int(row.argmax()) for row in rows[:2]] == text[at : at + 2]
        fails([text[at], 1, 2], 3)
        assert [int(row.argmax()) for row in drafted(target, session, [text[at], 1])[:2]] == text[at : at + 2]
        commit(session, text[at])
        assert session.replay > 0
    assert int(drafted(target, beside, []).argmax()) == plain_texts(name, "greedy", 40)[1][0]
    session.close()
    beside.close()
    assert run(target, None, PROMPTS[0], stop=StopParams(max_new_tokens=40)).tokens == expected


def test_an_interrupted_commit_does_not_leave_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that has read more tokens than are known of it is not kept; nor is one without its cells."""
    target = load("jamba")
    expected = plain_texts("jamba", "greedy", 40)[0]
    for name in ("remove", "copy"):
        for accepted in (1, 3):
            target.forget()
            session = opened(target, PROMPTS[0])
            drafted(target, session, expected[:2])

            def interrupted(self: Context, *given: Any) -> Any:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(Context, name, interrupted)
                with suppress(KeyboardInterrupt):
                    session.track.commit(range(accepted))  # and nothing behind it is reached
            session.close()
            for prompt, text in ((PROMPTS[0], expected), ([*PROMPTS[0], *expected[:3]], expected[3:])):
                assert run(target, None, prompt, stop=StopParams(max_new_tokens=len(text))).tokens == text


# ---------------------------------------------------------------------------------------------------- wrong on purpose


def nothing_comes_back(self: StateTrack, read: int, state: Any) -> None:
    """The state is not restored."""


def one_too_far(self: StateTrack, path: Any, whole: Any = StateTrack.commit) -> None:
    """The replay is off by one."""
    before = len(self.tree or ())
    whole(self, path)
    self.length += len(path) < before


def shared_by_two(self: StateTrack, tree: TokenTree, num_computed: int = 0) -> list[list[int]]:
    """The draft goes through the id of the kept state too."""
    self.tree = tree
    spares = [state for _, state in self.kept if isinstance(state, int)]
    return [[self.main, *spares]] * (len(tree) - num_computed)


def seen_twice(self: StateTrack, read: int, state: Any) -> None:
    """The main id keeps the attention cells of what was rejected."""
    if isinstance(state, int):
        self.context.copy(state, self.main)


@pytest.mark.parametrize(
    ("name", "method", "wrong"),
    [
        *((name, "_restore", nothing_comes_back) for name in FAST),
        *((name, "commit", one_too_far) for name in FAST),
        *((name, "place", shared_by_two) for name in FAST),
        ("granitehybrid", "_restore", seen_twice),
    ],
)
def test_a_broken_state_is_noticed(
    name: str, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the test of the model, so that the state is not kept like this, and by the text."""
    target, expected = load(name), plain_texts(name, "greedy", 40)
    monkeypatch.setattr(StateTrack, method, wrong)
    assert not load(name).context.shares_states
    try:
        found = texts(target, "mixed", "greedy", expected, 1)
    except (LeapaheadError, AssertionError):
        return
    assert found != expected


def test_the_oracle_needs_no_replay() -> None:
    """What is accepted whole costs no rows."""
    target, expected = target_of("jamba"), plain_texts("jamba", "greedy", 40)[0]
    found = run(target, Oracle([*PROMPTS[0], *expected]), PROMPTS[0], stop=StopParams(max_new_tokens=40))
    assert found.tokens == expected
    assert sum(step.forward.cost.rows for step in found.steps) == 40
    assert TREE not in target.info.capabilities
