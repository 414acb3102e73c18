"""llama.cpp's architectures: plain text is llama.cpp's own, and every drafter's text is plain decoding's.

Or the drafter is refused by name: a recurrent state cannot forget rejected tokens.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Oracle, RandomTrees, Scattered, begin

from leapahead import LLM, drafters
from leapahead.core.errors import LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams, Stopper
from leapahead.core.tree import TokenTree
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import CHAIN, LOGITS, TOP_K, TREE

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import llama_cpp as c
from gguf_architectures import ARCHITECTURES, BY_NAME, VOCABULARY, WINDOW, Maker, bert, bidirectional, wordless, written

from leapahead.models.llama_cpp import model as room
from leapahead.models.llama_cpp.context import Context, LlamaCppOptions
from leapahead.models.llama_cpp.model import LlamaCppTarget

ALL = [each.name for each in ARCHITECTURES]
ATTENTION = [each.name for each in ARCHITECTURES if not each.stateful]
SLIDING = ["gemma2", "gemma3", "gemma4", "cohere2", "gpt_oss"]
STATEFUL = [each.name for each in ARCHITECTURES if each.stateful]
DRAFTERS = [name for name in drafters.ready() if name != "plain"]
OPTIONS = {"auto": {"nodes": 8}}  # whatever they cost

_rng = np.random.default_rng(3)
_phrase = _rng.integers(0, VOCABULARY - 1, 7).tolist()
PROMPTS: tuple[list[int], ...] = (  # with something to look up; ragged; all longer than a window
    [*_phrase, *_rng.integers(0, VOCABULARY - 1, 12).tolist(), *_phrase],
    [*_phrase * 3, *_rng.integers(0, VOCABULARY - 1, 19).tolist()],
    _rng.integers(0, VOCABULARY - 1, 20).tolist(),
)
LENGTH = 40  # new tokens
MODES = {
    "greedy": [SamplingParams()] * len(PROMPTS),
    "sampled": [SamplingParams(temperature=1.0, seed=11 + i) for i in range(len(PROMPTS))],
}


@cache
def target_of(name: str) -> LlamaCppTarget:
    return room.load(BY_NAME[name].path(), LlamaCppOptions(n_ctx=256, n_threads=1))[0]


def texts(
    target: LlamaCppTarget,
    made: Sequence[Drafter],
    params: Sequence[SamplingParams],
    start: int = 3,
    prompts: Sequence[list[int]] = PROMPTS,
    length: int = LENGTH,
) -> list[list[int]]:
    """All tokens of the prompts' texts: `start` of them decoded at once, another joins whenever one has left."""
    live, waiting = list[Generation](), list(zip(prompts, made, params, strict=True))
    everyone: list[Generation] = []

    def join() -> None:
        prompt, drafter, param = waiting.pop(0)
        stopper = Stopper(StopParams(max_new_tokens=length), prompt, target.context_length)
        live.append(Generation(target.open(prompt, param), drafter, stopper))
        everyone.append(live[-1])

    for _ in range(start):
        join()
    for generation, _ in decode(target, live):
        if generation.finished and waiting:
            join()
    return [generation.session.tokens for generation in everyone]


@cache
def plain_texts(name: str, mode: str) -> list[list[int]]:
    """Each decoded by itself, in a cache without the others."""
    target, found = target_of(name), []
    for prompt, params in zip(PROMPTS, MODES[mode], strict=True):
        target.forget()
        found += texts(target, [Plain()], [params], 1, [prompt])
    return found


def own_text(path: Path, prompt: Sequence[int], length: int) -> list[int]:
    """llama.cpp by itself: one sequence, one token at a time, the best token; windows that let go of what they pass."""
    model_params = c.llama_model_default_params()
    model = c.llama_model_load_from_file(str(path).encode(), model_params)
    params = c.llama_context_default_params()
    params.n_ctx, params.n_seq_max = 256, 1
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = c.GGML_TYPE_F32
    params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.swa_full = False
    context = c.llama_init_from_model(model, params)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    tokens, one = list(prompt), (c.llama_token * 1)()
    for done in range(len(prompt) + length - 1):
        one[0] = tokens[done]
        assert c.llama_decode(context, c.llama_batch_get_one(one, 1)) == 0
        if done + 1 == len(tokens):
            logits = np.ctypeslib.as_array(c.llama_get_logits(context), shape=(vocabulary,))
            tokens.append(int(np.argmax(logits)))
    c.llama_free(context)
    c.llama_model_free(model)
    return tokens


# ---------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", ALL)
def test_capabilities(name: str) -> None:
    target = target_of(name)
    assert target.capabilities == (set() if BY_NAME[name].stateful else {CHAIN, TREE, LOGITS, TOP_K})
    assert target.vocab_size == VOCABULARY


@pytest.mark.parametrize("name", ALL)
def test_plain_text_is_llama_cpps_own(name: str) -> None:
    target, found = target_of(name), plain_texts(name, "greedy")
    for prompt, text in zip(PROMPTS[:2], found[:2], strict=True):
        assert text == own_text(BY_NAME[name].path(), prompt, LENGTH)
    new = {token for prompt, text in zip(PROMPTS, found, strict=True) for token in text[len(prompt) :]}
    assert len(new) > 6  # texts that a wrong cache could change
    target.forget()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_plain_text_in_a_batch(name: str, mode: str) -> None:
    """All at once; and two places, so that a third joins where one has left."""
    target, expected = target_of(name), plain_texts(name, mode)
    assert texts(target, [Plain() for _ in PROMPTS], MODES[mode]) == expected
    llm = LLM(target, drafter="plain", max_batch=2)
    together = llm.generate(
        list(PROMPTS),
        max_new_tokens=LENGTH,
        ignore_eos=True,
        temperature=MODES[mode][0].temperature,
        seed=[params.seed for params in MODES[mode]],
    )
    assert [[*result.prompt_tokens, *result.tokens] for result in together] == expected


@pytest.mark.parametrize("name", ALL)
def test_a_prefix_is_reused(name: str) -> None:
    """The same prompt once more, with more behind it, and with another end; a state begins anew."""
    target, params = target_of(name), MODES["greedy"][:1]
    prompt = PROMPTS[0]
    longer, other = [*prompt, 5, 6, 7], [*prompt[:-4], 9, 8]
    expected = []
    for each in (longer, other):
        target.forget()
        expected += texts(target, [Plain()], params, 1, [each])
    for each, text in zip((longer, other), expected, strict=True):
        target.forget()
        kind = Plain if BY_NAME[name].stateful else RandomTrees
        texts(target, [kind()], params, 1, [prompt])
        stats = Stats()
        session = target.open(each, params[0], stats)
        assert stats.reused_tokens == (0 if BY_NAME[name].stateful else common(prompt, each[:-1]))
        stopper = Stopper(StopParams(max_new_tokens=LENGTH), each, target.context_length)
        list(decode(target, [Generation(session, kind(), stopper)]))
        assert session.tokens == text


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(i for i in range(len(other) + 1) if i in (len(one), len(other)) or one[i] != other[i])


@pytest.mark.parametrize("name", ALL)
def test_a_step_may_be_taken_again(name: str) -> None:
    """A forward whose result never arrives leaves nothing behind, not even in a state."""
    target = target_of(name)
    sessions = [target.open(prompt, SamplingParams()) for prompt in PROMPTS[:2]]
    trees = [TokenTree.root(session.tokens[-1]) for session in sessions]
    first = [choices.logits for choices in target.step(sessions, trees)]
    again = [choices.logits for choices in target.step(sessions, trees)]
    for session in sessions:
        session.close()
    for one, other in zip(first, again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ATTENTION)
def test_text_of_made_drafts(name: str, mode: str) -> None:
    target, expected, params = target_of(name), plain_texts(name, mode), MODES[mode]
    kinds: list[Callable[[list[int], int], Drafter]] = [
        lambda text, seed: RandomTrees(seed),
        lambda text, seed: Oracle(text),
        lambda text, seed: Scattered(text, seed),
    ]
    for kind in kinds:
        target.forget()
        assert texts(target, [kind(expected[0], 0)], params[:1], 1, PROMPTS[:1]) == expected[:1]
        assert texts(target, [kind(text, i) for i, text in enumerate(expected)], params) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ATTENTION)
def test_text_of_registered_drafters(name: str, drafter: str) -> None:
    target, new = target_of(name), drafters.factory(drafter, **OPTIONS.get(drafter, {}))
    for mode, params in MODES.items():
        expected = plain_texts(name, mode)
        target.forget()
        assert texts(target, [new()], params[:1], 1, PROMPTS[:1]) == expected[:1]
        assert texts(target, [new() for _ in PROMPTS], params) == expected


@pytest.mark.parametrize("name", SLIDING)
def test_a_window_survives_drafts_that_are_computed_in_parts(name: str) -> None:
    """Round after round in one cache, until there are no cells left that nobody has used."""
    target = room.load(BY_NAME[name].path(), LlamaCppOptions(n_ctx=256, n_threads=1, n_ubatch=8))[0]
    for start in (1, 1, 3, 3):
        made = [drafters.factory("jacobi")() for _ in PROMPTS]
        assert texts(target, made, MODES["greedy"], start) == plain_texts(name, "greedy")


# ---------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("name", STATEFUL)
def test_the_default_decodes_a_state_plainly(name: str) -> None:
    target = target_of(name)
    result = LLM(target).generate([1, 2, 3, 1, 2], max_new_tokens=12, ignore_eos=True)
    plain = LLM(target, drafter="plain").generate([1, 2, 3, 1, 2], max_new_tokens=12, ignore_eos=True)
    assert (result.tokens, result.stats.drafted) == (plain.tokens, 0)


@pytest.mark.parametrize("drafter", [drafter for drafter in DRAFTERS if drafter != "auto"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_is_refused_by_name(name: str, drafter: str) -> None:
    target = target_of(name)
    with pytest.raises(Refused, match=f"'{drafter}'.*{name}.gguf.*drafter='plain'"):
        LLM(target, drafter=drafter)
    with pytest.raises(Refused, match=f"'{drafter}'.*{name}.gguf"):
        LLM(target, drafter="plain").generate([1, 2, 3], drafter=drafter)


@pytest.mark.parametrize("name", STATEFUL)
def test_states_join_and_leave(name: str) -> None:
    """Eight ragged texts, two at a time."""
    prompts = [PROMPTS[i % 3][: 3 + 2 * i] for i in range(8)]
    llm = LLM(target_of(name), drafter="plain", max_batch=2)
    together = llm.generate(prompts, max_new_tokens=12, ignore_eos=True)
    alone = [llm.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens for prompt in prompts]
    assert [result.tokens for result in together] == alone


# ---------------------------------------------------------------------------------------------------- neither


@pytest.mark.parametrize(
    "make",
    [
        bert,
        bidirectional,
    ],
)
def test_what_is_no_causal_model_is_refused_by_name(make: Callable[[Path], Maker]) -> None:
    path = written(make)
    with pytest.raises(Refused, match=f"{make.__name__}.gguf"):
        LLM(path, n_threads=1)


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


@pytest.mark.parametrize("name", ["mamba", "jamba", "llama"])
def test_a_forward_that_fails_half_way_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence cannot forget what it has read: it is made anew from the tokens."""
    target = target_of(name)
    generation = begin(target, None, PROMPTS[0], stop=StopParams(max_new_tokens=LENGTH))
    loop = decode(target, [generation])
    done = list(next(loop)[1].tokens)

    def half(self: Context, *given: Any, whole: Any = Context.decode) -> Any:
        whole(self, *given)
        raise LeapaheadError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode", half)
        with pytest.raises(LeapaheadError, match="no memory"):
            target.step([generation.session], [TokenTree.root(generation.context.root)])
    done += [token for _, step in loop for token in step.tokens]
    assert [*PROMPTS[0], *done] == own_text(BY_NAME[name].path(), PROMPTS[0], LENGTH)
