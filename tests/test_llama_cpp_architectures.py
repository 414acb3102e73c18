"""llama.cpp's architectures: plain text is llama.cpp's own, and every drafter's text is plain decoding's.

The fast tests cover one architecture of each kind, and the slow ones all; drafters do not depend on the architecture,
so they run on a few. Drafts over recurrent states are in `test_llama_cpp_states`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, AnyDrafter, Oracle, RandomTrees, Scattered, attached, run

from leapahead import LLM, Engine, Request, drafters
from leapahead.core.errors import BadLogits, BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import ALL, HIDDEN, TREE, read_prompt

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import llama_cpp as c
from gguf import GGUFReader
from gguf_architectures import ARCHITECTURES, BY_NAME, VOCABULARY, WINDOW, Maker, bert, bidirectional, wordless, written

from leapahead.models.llama_cpp import model
from leapahead.models.llama_cpp.context import Context
from leapahead.models.llama_cpp.model import LlamaCppTarget
from leapahead.models.llama_cpp.options import LlamaCppOptions

# One of each kind: dense, experts, sliding window, ALiBi, learned positions, latent keys; recurrent, hybrid.
FAST = ("llama", "mixtral", "gemma3", "bloom", "gpt2", "deepseek2", "mamba", "jamba")
SLIDING = ("gemma3", "gemma2", "gemma4", "cohere2", "gpt_oss")


def marked(names: Sequence[str], fast: Sequence[str] = FAST) -> list[Any]:
    """Parameters of a test, slow but for the fast ones."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


NAMES = marked([each.name for each in ARCHITECTURES])
ATTENTION = marked([each.name for each in ARCHITECTURES if not each.stateful])
DRAFTERS = [name for name in drafters.ready() if name != "plain"]
OPTIONS = {"auto": {"nodes": 8}}  # whatever they cost

_rng = np.random.default_rng(3)
_phrase = _rng.integers(0, VOCABULARY - 1, 7).tolist()
PROMPTS: tuple[list[int], ...] = (  # with something to look up; of different lengths; all longer than a window
    [*_phrase, *_rng.integers(0, VOCABULARY - 1, 12).tolist(), *_phrase],
    [*_phrase * 3, *_rng.integers(0, VOCABULARY - 1, 19).tolist()],
    _rng.integers(0, VOCABULARY - 1, 20).tolist(),
)
LENGTH = 40  # new tokens
STOP = StopParams(max_new_tokens=LENGTH)
MODES = {
    "greedy": [SamplingParams()] * len(PROMPTS),
    "sampled": [SamplingParams(temperature=1.0, seed=11 + i) for i in range(len(PROMPTS))],
}


@cache
def target_of(name: str) -> LlamaCppTarget:
    return model.load(BY_NAME[name].path(), LlamaCppOptions(n_ctx=256, n_threads=1))[0]


def texts(
    target: LlamaCppTarget, made: Sequence[AnyDrafter | None], params: Sequence[SamplingParams], max_batch: int = 8
) -> list[list[int]]:
    """The new tokens of the prompts' texts, decoded together."""
    engine = Engine(target, max_batch=max_batch)
    handles = [
        engine.submit(Request(prompt, attached(engine, drafter), each, STOP))
        for prompt, drafter, each in zip(PROMPTS, made, params, strict=False)
    ]
    engine.run(handles)
    return [handle.tokens for handle in handles]


@cache
def plain_texts(name: str, mode: str) -> list[list[int]]:
    """Each decoded by itself, in a cache without the others."""
    target, found = target_of(name), []
    for prompt, params in zip(PROMPTS, MODES[mode], strict=True):
        target.forget()
        found.append(run(target, None, prompt, params=params, stop=STOP).tokens)
    return found


@pytest.mark.parametrize("name", ["gemma3", "qwen35"])
def test_entries_of_nan_get_into_no_other_text(name: str, tmp_path: Path) -> None:
    """Of a prompt with token 7, whose embedding is NaN, and which is never chosen."""
    path = shutil.copy(BY_NAME[name].path(), tmp_path / "nan.gguf")
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name in ("token_embd.weight", "output.weight"):
            tensor.data[7] = 0 if tensor.name == "output.weight" else np.nan
    target = model.load(path, LlamaCppOptions(n_ctx=256, n_threads=1))[0]
    expected = run(target, None, PROMPTS[1], stop=STOP).tokens
    with pytest.raises(BadLogits):
        run(target, None, [*PROMPTS[1][:20], 7, *PROMPTS[2]], stop=STOP)
    assert run(target, None, PROMPTS[1], stop=STOP).tokens == expected


def own_text(path: Path, prompt: Sequence[int], length: int) -> list[int]:
    """llama.cpp's own new tokens: one sequence, one token at a time, greedy; windows discard what they pass."""
    loaded = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 256, 1
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = c.GGML_TYPE_F32
    params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = False
    context = c.llama_init_from_model(loaded, params)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(loaded))
    tokens, one = list(prompt), (c.llama_token * 1)()
    for done in range(len(prompt) + length - 1):
        one[0] = tokens[done]
        assert c.llama_decode(context, c.llama_batch_get_one(one, 1)) == 0
        if done + 1 == len(tokens):
            logits = np.ctypeslib.as_array(c.llama_get_logits(context), shape=(vocabulary,))
            tokens.append(int(np.argmax(logits)))
    c.llama_free(context)
    c.llama_model_free(loaded)
    return tokens[len(prompt) :]


# ---------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
def test_plain_text_is_llama_cpps_own(name: str) -> None:
    target, found = target_of(name), plain_texts(name, "greedy")
    stateful = BY_NAME[name].stateful
    without = {TREE, HIDDEN} if name.startswith("lfm2") else {TREE} if stateful else set()
    assert target.info.capabilities == ALL - without
    assert target.info.replays == stateful
    assert target.info.vocab_size == VOCABULARY
    for prompt, text in zip(PROMPTS[:2], found[:2], strict=True):
        assert text == own_text(BY_NAME[name].path(), prompt, LENGTH)
    assert len({token for text in found for token in text}) > 6  # texts that a wrong cache could change
    target.forget()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_plain_text_in_a_batch(name: str, mode: str) -> None:
    """All at once; and two at a time, so that a third joins where one has left."""
    target, expected = target_of(name), plain_texts(name, mode)
    for max_batch in (3, 2):
        assert texts(target, [None] * 3, MODES[mode], max_batch) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_reused(name: str) -> None:
    """More behind the same prompt, and another end of it; a state goes back to the end of a prompt only."""
    target, stateful = target_of(name), BY_NAME[name].stateful
    drafter = "prompt_lookup" if stateful else RandomTrees
    prompts = ([*PROMPTS[0], 5, 6, 7], [*PROMPTS[0][:-4], 9, 8])
    for prompt, of_a_state in zip(prompts, (0 if BY_NAME[name].alone else len(PROMPTS[0]) - 1, 0), strict=True):
        target.forget()
        expected = run(target, None, prompt, stop=STOP).tokens
        target.forget()
        run(target, drafter, PROMPTS[0], stop=STOP)
        found = run(target, drafter, prompt, stop=STOP)
        assert found.tokens == expected
        assert found.stats.reused_tokens == (of_a_state if stateful else common(PROMPTS[0], prompt[:-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_has_left_the_cache_comes_back(name: str) -> None:
    """Its keys, values and states lie in the machine's memory meanwhile; not with a window, which a copy leaves out."""
    target, stateful = target_of(name), BY_NAME[name].stateful
    drafter, longer = "prompt_lookup" if stateful else RandomTrees, [*PROMPTS[0], 5, 6, 7]
    target.forget()
    expected = run(target, None, longer, stop=STOP).tokens
    target.forget()
    run(target, drafter, PROMPTS[0], stop=STOP)
    for first in range(4):
        run(target, None, [10 + first, 4, 5], stop=StopParams(max_new_tokens=2))
    alone, windowed = BY_NAME[name].alone, target.context.windowed
    kept = not (alone or windowed) and (not stateful or target.context.saves_states)
    found = run(target, drafter, longer, stop=STOP)
    assert found.tokens == expected
    assert found.stats.reused_tokens == (len(PROMPTS[0]) - (1 if stateful else 0) if kept else 0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(i for i in range(len(other) + 1) if i in (len(one), len(other)) or one[i] != other[i])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_may_be_taken_again(name: str) -> None:
    """A forward that is not committed leaves nothing behind, not even in a state."""
    target = target_of(name)
    sessions = [target.open(prompt, GREEDY) for prompt in PROMPTS[: min(2, target.context.n_seq_max)]]
    for session in sessions:
        read_prompt(target, session)
    trees = [TokenTree.root(session.tokens[-1]) for session in sessions]
    first = [choices.logits for choices in target.step(sessions, trees)]
    again = [choices.logits for choices in target.step(sessions, trees)]
    for session in sessions:
        session.close()
    for one, other in zip(first, again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("name", marked([each.name for each in ARCHITECTURES if not each.alone]))
def test_forks_have_the_text_of_their_own(name: str) -> None:
    """Two samples of a prompt that has grown by a few tokens, beside the session that they come from."""
    target = target_of(name)
    expected = plain_texts(name, "greedy")[0]
    target.forget()
    first = target.open(PROMPTS[0], GREEDY)
    read_prompt(target, first)
    other = int((expected[3] + 1) % VOCABULARY)
    for token in expected[:3]:
        target.step([first], [TokenTree.root(first.tokens[-1])])
        first.commit(Verdict((0,), (token,), 0))
    twins = [target.fork(first, GREEDY), target.fork(first, GREEDY)]
    sessions = [first, *twins]
    for index in range(3, 13):
        rows = target.step(sessions, [TokenTree.root(session.tokens[-1]) for session in sessions])
        forced = other if index == 3 else rows[2][0]
        for session, token in zip(sessions, (rows[0][0], rows[1][0], forced), strict=True):
            session.commit(Verdict((0,), (token,), 0))
    assert first.tokens == twins[0].tokens == [*PROMPTS[0], *expected[:13]]
    prompt = [*PROMPTS[0], *expected[:3], other]
    for session in sessions:
        session.close()
    target.forget()
    assert twins[1].tokens[len(prompt) :] == run(target, None, prompt, stop=StopParams(max_new_tokens=9)).tokens


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ATTENTION)
def test_text_of_made_drafts(name: str, mode: str) -> None:
    target, expected = target_of(name), plain_texts(name, mode)
    kinds: list[Callable[[list[int], int], AnyDrafter]] = [
        lambda text, seed: RandomTrees(seed),
        lambda text, seed: Oracle(text),
        lambda text, seed: Scattered(text, seed),
    ]
    for kind in kinds:
        target.forget()
        made = [kind([*prompt, *text], i) for i, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True))]
        assert texts(target, made, MODES[mode]) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", marked(["llama", "gemma4", "deepseek2"], ["gemma4"]))
def test_text_of_registered_drafters(name: str, drafter: str) -> None:
    target = target_of(name)
    for mode, params in MODES.items():
        target.forget()
        engine = Engine(target)
        made = engine.drafter(drafter, **OPTIONS.get(drafter, {}))
        handles = [
            engine.submit(Request(prompt, made, each, STOP)) for prompt, each in zip(PROMPTS, params, strict=True)
        ]
        engine.run(handles)
        assert [handle.tokens for handle in handles] == plain_texts(name, mode)


@pytest.mark.parametrize("name", marked(SLIDING, ["gemma3"]))
def test_a_window_survives_drafts_that_are_computed_in_parts(name: str) -> None:
    """Again and again in one cache, until every cell has been used before."""
    target = model.load(BY_NAME[name].path(), LlamaCppOptions(n_ctx=256, n_threads=1, n_ubatch=8))[0]
    for max_batch in (1, 1, 3, 3):
        assert texts(target, ["jacobi"] * 3, MODES["greedy"], max_batch) == plain_texts(name, "greedy")


def test_learned_positions_bound_the_context() -> None:
    """Beyond them llama.cpp would end the process."""
    path = BY_NAME["gpt2"].path()
    with pytest.raises(BadParameter, match=r"n_ctx=512 is not possible: .*gpt2.gguf' has learned positions for 256"):
        model.load(path, LlamaCppOptions(n_ctx=512))
    info = model.load(path, LlamaCppOptions(n_ctx=0, n_threads=1))[0].info
    assert (info.context_length, info.length_option) == (256, ""), "no larger n_ctx is possible"


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("name", ["mamba", "jamba", "llama"])
def test_a_forward_that_fails_half_way_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state cannot discard what it has read: it is computed anew from the tokens."""
    target, expected = target_of(name), plain_texts(name, "greedy")[0]
    session = target.open(PROMPTS[0], GREEDY)
    read_prompt(target, session)

    def fail(self: Context, *given: Any, whole: Any = Context.decode) -> Any:
        whole(self, *given)
        raise KeyboardInterrupt

    for token in expected:
        if token == expected[5]:
            with monkeypatch.context() as patch:
                patch.setattr(Context, "decode", fail)
                with pytest.raises(KeyboardInterrupt):
                    target.step([session], [TokenTree.root(session.tokens[-1])])
        assert target.step([session], [TokenTree.root(session.tokens[-1])])[0][0] == token
        session.commit(Verdict((0,), (token,), 0))
    session.close()


# ---------------------------------------------------------------------------------------------------- neither


@pytest.mark.parametrize("make", [bert, bidirectional])
def test_what_is_no_causal_model_is_refused_by_name(make: Callable[[Path], Maker]) -> None:
    path = written(make)
    with pytest.raises(Refused, match=f"{make.__name__}.gguf' is a model whose tokens attend to later ones; leapahead"):
        LLM(path, n_threads=1)


@pytest.mark.slow
def test_a_file_without_a_vocabulary_does_not_end_the_process() -> None:
    program = """
import sys
from leapahead import LLM
from leapahead.core.errors import LeapaheadError
try:
    LLM(sys.argv[1], n_threads=1)
except LeapaheadError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, str(written(wordless))]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0


def test_texts_are_longer_than_the_window() -> None:
    assert min(map(len, PROMPTS)) > 2 * WINDOW
