"""A KV cache for each sequence (`kv_unified=False`): padding, ids between others, forks, kept texts, refusals."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GREEDY

from leapahead import LLM, Engine
from leapahead.check import check
from leapahead.cli import main as command_line
from leapahead.core.errors import BadParameter, CacheFull, Refused
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models import loading
from leapahead.models.base import ALL, TREE, Capture, read_prompt

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_architectures
import gguf_models

from leapahead.models.llama_cpp.separate import MOST_NODES, SeparateContext, SeparateLlamaCppTarget

PROMPT = list(range(300, 320))
CHAINS = (0, 3, 1, 7, 0, 2)  # drafted tokens of each of several sequences


def load(**options: Any) -> SeparateLlamaCppTarget:
    options = {"n_ctx": 256, "n_threads": 1, "n_seq_max": 6, **options}
    found = loading.load(gguf_models.llama(), kv_unified=False, **options).target
    assert isinstance(found, SeparateLlamaCppTarget)
    return found


@pytest.fixture(scope="module")
def shared() -> SeparateLlamaCppTarget:
    return load()


@pytest.fixture
def target(shared: SeparateLlamaCppTarget) -> SeparateLlamaCppTarget:
    shared.forget()
    return shared


def opened(target: SeparateLlamaCppTarget, prompt: Any, capture: Any = None) -> Any:
    session = target.open(prompt, GREEDY, *(() if capture is None else (capture,)))
    read_prompt(target, session)
    return session


def test_no_sequence_reserves_more_than_its_own_cells(target: SeparateLlamaCppTarget) -> None:
    """A length without an end, as of texts that end where the context does."""
    sessions = [target.open(range(1 + at, 30 + at), GREEDY, reserve=10**6) for at in range(6)]
    for session in sessions:
        session.close()


def chain(session: Any, drafted: int) -> TokenTree:
    return TokenTree.chain(session.tokens[-1], range(40, 40 + drafted))


@cache
def unified() -> Any:
    return loading.load(gguf_models.llama(), n_ctx=512, n_threads=1).target


def alone(tokens: list[int]) -> np.ndarray:
    """float32 [vocab]: the logits after these tokens, of the unified cache."""
    target = unified()
    target.forget()
    session = target.open(tokens, GREEDY)
    read_prompt(target, session)
    row = np.array(target.step([session], [TokenTree.root(tokens[-1])])[0].logits[0])
    session.close()
    return row


def test_info(target: SeparateLlamaCppTarget) -> None:
    info = target.info
    assert info.capabilities == ALL - {TREE}
    assert (info.context_length, target.max_leaves, target.max_nodes, info.padded) == (256, 1, MOST_NODES, True)
    assert info.reads_in_steps == 0


@pytest.mark.parametrize("hidden", [False, True])
def test_chains_of_different_lengths(target: SeparateLlamaCppTarget, hidden: bool) -> None:
    """Each has its own logits and hidden states, and no cells of padding stay behind."""
    capture = Capture(hidden=(-1,)) if hidden else Capture()
    sessions = [opened(target, PROMPT[: 5 + i], capture) for i in range(len(CHAINS))]
    trees = [chain(session, drafted) for session, drafted in zip(sessions, CHAINS, strict=True)]
    assert target.cost(sessions, trees).rows == 6 * 8
    found = [
        (np.array(each.logits), np.array(each.hidden) if hidden else None)
        for each in target.step(sessions, trees, capture=capture)
    ]
    for session, drafted in zip(sessions, CHAINS, strict=True):
        assert target.context.last_position(session.track.main) == len(session.tokens) - 1 + drafted
    for session, tree, (logits, states) in zip(sessions, trees, found, strict=True):
        again = target.step([session], [tree], capture=capture)[0]
        np.testing.assert_allclose(logits, again.logits, atol=1e-4)
        if states is not None:
            np.testing.assert_allclose(states, again.hidden, atol=1e-4)
        np.testing.assert_allclose(logits[-1], alone([*session.tokens, *tree.token_list[1:]]), atol=1e-4)
        session.commit(Verdict((0,), (77,), 0))
        assert target.context.last_position(session.track.main) == len(session.tokens) - 2
        session.close()


@pytest.mark.parametrize("stepped", [(0, 2, 4), (1, 5), (0, 1, 4, 5), (5, 0, 3)])
def test_sequences_between_others(target: SeparateLlamaCppTarget, stepped: tuple[int, ...]) -> None:
    """Those that are not in a step keep their cells, whether a row of padding went through them or not."""
    sessions = [opened(target, PROMPT[: 5 + i]) for i in range(6)]
    unread = target.open(PROMPT, GREEDY) if sessions.pop(3).close() is None else None
    assert unread is not None
    target.prefill(unread, 7)
    sessions.insert(3, unread)
    some = [sessions[i] for i in stepped if i != 3]
    for _ in range(2):
        for choices, session in zip(target.step(some, [chain(s, 0) for s in some]), some, strict=True):
            np.testing.assert_allclose(choices.logits[0], alone(session.tokens), atol=1e-4)
    target.step(some, [chain(session, 1) for session in some])
    read_prompt(target, unread)
    for session in sessions:
        row = target.step([session], [chain(session, 0)])[0].logits[0]
        np.testing.assert_allclose(row, alone(session.tokens), atol=1e-4)
        session.close()


def test_a_draft_that_grows(target: SeparateLlamaCppTarget) -> None:
    sessions = [opened(target, PROMPT[: 5 + i]) for i in range(3)]
    short = [chain(session, drafted) for session, drafted in zip(sessions, (0, 2, 1), strict=True)]
    grown = [chain(session, drafted) for session, drafted in zip(sessions, (3, 3, 2), strict=True)]
    target.step(sessions, short)
    found = [np.array(each.logits) for each in target.step(sessions, grown, list(map(len, short)))]
    for session, tree, logits, first in zip(sessions, grown, found, map(len, short), strict=True):
        assert len(logits) == len(tree) - first
        np.testing.assert_allclose(logits[-1], alone([*session.tokens, *tree.token_list[1:]]), atol=1e-4)
        session.close()


def test_a_fork_has_cells_of_its_own(target: SeparateLlamaCppTarget) -> None:
    """They are there at once: nothing of the first sequence may come to the other's id later."""
    first = opened(target, PROMPT)
    twin = target.fork(first, GREEDY)
    twin.close()
    target.forget()  # its cells are gone, and the id is free
    other = opened(target, range(5, 30))
    third = target.fork(first, GREEDY)
    first.close()
    for session in (other, third):
        row = target.step([session], [chain(session, 0)])[0].logits[0]
        np.testing.assert_allclose(row, alone(session.tokens), atol=1e-4)
        session.close()


def test_earlier_texts_are_kept(target: SeparateLlamaCppTarget) -> None:
    prompts = [range(begin, begin + 20) for begin in range(100, 260, 20)]
    for prompt in prompts:
        opened(target, prompt).close()
    for prompt in prompts:
        session = target.open([*prompt, 7], GREEDY)
        assert session.track.length == 19
        read_prompt(target, session)
        row = target.step([session], [chain(session, 0)])[0].logits[0]
        np.testing.assert_allclose(row, alone([*prompt, 7]), atol=1e-4)
        session.close()


@pytest.mark.slow
def test_texts_are_those_of_plain_decoding(target: SeparateLlamaCppTarget) -> None:
    """Sequences join and leave; some have predictions that are right in part; some are cancelled; samples of one."""
    plain = LLM(unified(), drafter="plain")
    prompts = [list(range(3 * i + 1, 3 * i + 8 + 5 * i)) for i in range(9)]
    options: dict[str, Any] = {"temperature": 0.8, "seed": list(range(9)), "max_new_tokens": 24}
    expected = [plain.generate(p, **{**options, "seed": i}).tokens for i, p in enumerate(prompts)]
    wrong = [[each if i % 6 else 9 for i, each in enumerate(text)] for text in expected]
    for drafter in ("auto", "prediction", "jacobi"):
        with LLM(target, drafter=drafter, max_batch=6) as llm:
            guess = {} if drafter == "jacobi" else {"prediction": wrong}
            assert [each.tokens for each in llm.generate(prompts, **options, **guess)] == expected
            stream = llm.stream(prompts[0], temperature=0.8, seed=0, max_new_tokens=24)
            next(stream)
            stream.close()
            samples = llm.generate(prompts[3], n=3, temperature=0.8, seed=3, max_new_tokens=24)
            assert samples[0].tokens == expected[3]
    sampled = plain.generate(prompts[3], n=3, temperature=0.8, seed=3, max_new_tokens=24)
    assert [each.tokens for each in samples] == [each.tokens for each in sampled]


def test_the_end_of_the_context(target: SeparateLlamaCppTarget) -> None:
    """Padding behind the last cell of a sequence has cells."""
    sessions = [opened(target, [1 + i % 90 for i in range(length)]) for length in (255, 250, 20)]
    trees = [chain(session, drafted) for session, drafted in zip(sessions, (0, 5, 31), strict=True)]
    for choices, session, tree in zip(target.step(sessions, trees), sessions, trees, strict=True):
        assert len(choices.logits) == len(tree)
        np.testing.assert_allclose(choices.logits[0], alone(session.tokens), atol=1e-4)
        session.close()


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_windows_and_learned_positions(name: str) -> None:
    path = gguf_architectures.BY_NAME[name].path()
    target = loading.load(path, n_ctx=256, n_threads=1, n_seq_max=3, kv_unified=False).target
    assert target.info.context_length == (256 - MOST_NODES if name == "gpt2" else 256)
    prompts = [[3 + i % 20 for i in range(length)] for length in (9, 40, 90)]
    found = check(target, None, prompts, ["prompt_lookup", "jacobi"], max_new_tokens=30)
    assert found.ok, found


def test_what_is_impossible_is_refused_by_name(target: SeparateLlamaCppTarget) -> None:
    with pytest.raises(Refused, match=r"kv_unified=False is not possible.*recurrent state"):
        loading.load(gguf_architectures.BY_NAME["mamba"].path(), kv_unified=False)
    with pytest.raises(BadParameter, match="kv_unified='no' is not possible: it must be true or false"):
        LLM(gguf_models.llama(), kv_unified="no")
    with pytest.raises(
        Refused, match=r"needs tree from the target, which .* does not have with a KV cache for each sequence"
    ):
        Engine(target).drafter("lookahead")
    session = opened(target, PROMPT)
    with pytest.raises(BadParameter, match=r"with branches is not possible.*kv_unified=False"):
        target.step([session], [TokenTree([319, 5, 6], [-1, 0, 0])])
    others = [opened(target, PROMPT) for _ in range(5)]
    with pytest.raises(CacheFull, match="no sequence id of n_seq_max=6 is left"):
        target.open(PROMPT, GREEDY)
    row = target.step([session], [chain(session, 0)])[0].logits[0]  # nothing was lost
    np.testing.assert_allclose(row, alone(PROMPT), atol=1e-4)
    for each in (session, *others):
        each.close()


def test_as_many_sequences_as_are_decoded_together() -> None:
    llm = LLM(gguf_models.llama(), kv_unified=False, n_ctx=256, n_threads=1, max_batch=3, drafter="plain")
    assert llm.target.context.n_seq_max == 3  # type: ignore[attr-defined]
    words = ["--no-kv-unified", "--threads", "1", "-c", "256", "--max-new-tokens", "4", "hello"]
    result = CliRunner().invoke(command_line, ["generate", "-m", str(gguf_models.llama()), *words])
    assert result.exit_code == 0, result.output
    with pytest.raises(BadParameter, match=r"^kv_unified=False can be set for a GGUF file only, not for 'bundled'"):
        LLM(kv_unified=False)


def test_exact_mode_has_a_cache_for_each_sequence_anyway() -> None:
    target = loading.load(
        gguf_models.bundled("bf16"), exact=True, kv_unified=False, n_ctx=256, n_threads=1, n_seq_max=2
    ).target
    assert target.info.exact
    with pytest.raises(BadParameter, match=r"^kv_unified=True is not possible in exact mode.*leave it out$"):
        LLM(gguf_models.bundled("bf16"), exact=True, kv_unified=True, n_ctx=256, n_threads=1)
    words = ["-m", str(gguf_models.bundled("bf16")), "--exact", "--kv-unified", "-c", "256", "hello"]
    result = CliRunner().invoke(command_line, ["generate", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --kv-unified is not possible in exact mode")


# ----------------------------------------------------------------------------------------------------- mutations


def test_mutation_padding_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of padding are attended to by the tokens that follow, or llama.cpp refuses the next forward."""
    target = load()
    remove = SeparateContext.remove
    sessions = [opened(target, PROMPT[: 5 + i]) for i in range(2)]
    monkeypatch.setattr(SeparateContext, "remove", lambda *_: True)
    target.step(sessions, [chain(sessions[0], 0), chain(sessions[1], 3)])
    monkeypatch.setattr(SeparateContext, "remove", remove)
    assert target.context.last_position(sessions[0].track.main) > len(sessions[0].tokens) - 1


def test_ids_of_a_step_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What llama.cpp is given: rows of every id from the first to the last where gaps are small."""
    target, seen = load(), list[list[int]]()
    sessions = sorted((opened(target, PROMPT[: 5 + i]) for i in range(6)), key=lambda each: each.track.main)
    whole = SeparateContext.__mro__[1].decode  # type: ignore[attr-defined]

    def decode(self: Any, tokens: Any, positions: Any, ids: Any, *rest: Any) -> Any:
        seen.append([each for (each,) in ids])
        return whole(self, tokens, positions, ids, *rest)

    monkeypatch.setattr(SeparateContext.__mro__[1], "decode", decode)
    some = [sessions[4], sessions[0], sessions[2]]
    target.step(some, [chain(session, 1) for session in some])
    target.step([sessions[0], sessions[5]], [chain(sessions[0], 0), chain(sessions[5], 0)])
    target.step([sessions[0], sessions[4]], [chain(sessions[0], 0), chain(sessions[4], 0)])
    assert seen == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4], [0, 5], [0, 1, 2, 3, 4]]
    assert all(one <= other for each in seen for one, other in pairwise(each))
