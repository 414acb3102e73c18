"""Architectures: the logits of trees are the model's own, and every drafter's text is plain decoding's.

Those of most architectures are slow; the fast ones are of every kind: trees, chains, replayed states, plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, FAST, VOCABULARY
from helpers import NoisyChain, RandomTrees, Scattered, attached, mostly_slow

from leapahead import Engine, Request, drafters
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, TOP_K, TREE, read_prompt
from leapahead.models.transformers.model import TransformersTarget

NAMES = [each.name for each in ARCHITECTURES]
SOME = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMES]
CAPABILITIES = {"tree": {CHAIN, TREE, TOP_K}, "chain": {CHAIN, TOP_K}, "replay": {CHAIN, TOP_K}, "plain": set[str]()}
PROMPTS = ((5, 6, 7), tuple(range(3, 23)), (9,), (5, 6, 7, 8))
LENGTHS = (24, 9, 20, 16)  # so that sequences leave one by one
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, top_k=40, seed=11),
}


@cache
def target_of(name: str) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build())


def texts_of(target: TransformersTarget, mode: str, made: Sequence[Any], start: int) -> list[list[int]]:
    """`PROMPTS` decoded together: `start` of them at once, the others join after the second step. Prompt in chunks."""
    engine = Engine(target, max_batch=4, prefill_chunk=8)
    requests = [
        Request(list(prompt), attached(engine, drafter), params, StopParams(max_new_tokens=length))
        for prompt, length, drafter, params in zip(PROMPTS, LENGTHS, made, params_of(mode), strict=True)
    ]
    handles = [engine.submit(request) for request in requests[:start]]
    for _ in range(2 * start + 2):
        engine.step()
    handles += [engine.submit(request) for request in requests[start:]]
    engine.run(handles)
    return [[*prompt, *handle.tokens] for prompt, handle in zip(PROMPTS, handles, strict=True)]


@cache
def plain_texts(name: str, mode: str) -> list[list[int]]:
    """Each prompt decoded by itself."""
    engine, texts = Engine(target_of(name)), []
    for prompt, length, params in zip(PROMPTS, LENGTHS, params_of(mode), strict=True):
        stop = StopParams(max_new_tokens=length)
        handle = engine.submit(Request(list(prompt), engine.drafter("plain"), params, stop))
        engine.run([handle])
        texts.append([*prompt, *handle.tokens])
    return texts


def params_of(mode: str) -> list[SamplingParams]:
    """Sampled sequences have their own seeds."""
    base = PARAMS[mode]
    return [
        SamplingParams(temperature=base.temperature, top_k=base.top_k, seed=base.seed + i) for i in range(len(PROMPTS))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_capabilities(name: str) -> None:
    """The target tests each model when it is made, and finds what it is able to do."""
    info = target_of(name).info
    assert info.capabilities - {"logits", "hidden", "branches", "embeddings"} == CAPABILITIES[BY_NAME[name].expect]
    assert info.replays == (BY_NAME[name].expect == "replay")
    assert info.vocab_size == VOCABULARY
    has_hidden = BY_NAME[name].expect != "plain" and name not in ("gemma3n", "dory")
    assert ("hidden" in info.capabilities) == has_hidden


@pytest.mark.parametrize("name", SOME)
def test_logits_of_every_node(name: str) -> None:
    """Two ragged sequences, three steps with commits in between, against the model's own forward of every path."""
    target, rng = target_of(name), np.random.default_rng(1)
    texts = [rng.integers(3, VOCABULARY, size=size).tolist() for size in (14, 3)]
    sessions = [target.open(text, SamplingParams()) for text in texts]
    for session in sessions:
        read_prompt(target, session, 5)
    capabilities = target.info.capabilities
    for _ in range(3):
        trees = [random_tree(rng, session.tokens[-1], capabilities) for session in sessions]
        for session, tree, choices in zip(sessions, trees, target.step(sessions, trees), strict=True):
            for node in range(len(tree)):
                expected = own_logits(target, [*session.tokens, *tree.path_tokens(node)])
                error = (choices.logits[node] - expected).abs().max() / expected.std()
                assert error < (1e-4 if CHAIN in capabilities else 1e-2), f"node {node} of {tree}"
            path = tree.path(int(rng.integers(len(tree))))
            tokens = [int(tree.tokens[node]) for node in path[1:]]
            session.commit(Verdict(tuple(path), (*tokens, int(rng.integers(3, VOCABULARY))), len(tokens)))
    for session in sessions:
        session.close()


def random_tree(rng: np.random.Generator, root: int, capabilities: frozenset[str]) -> TokenTree:
    nodes = int(rng.integers(4, 12)) if CHAIN in capabilities else 1
    parents = [-1] + [int(rng.integers(node)) if TREE in capabilities else node - 1 for node in range(1, nodes)]
    return TokenTree(np.array([root, *rng.integers(3, VOCABULARY, size=nodes - 1)]), np.array(parents))


def own_logits(target: TransformersTarget, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        positions = {"position_ids": torch.arange(len(tokens))[None]} if "Roberta" in target.info.name else {}
        logits: torch.Tensor = target.model(input_ids=ids, use_cache=False, **positions).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", mostly_slow(NAMES, "gemma2", "bloom", "mixtral", "deepseek_v32"))
def test_plain_decoding_is_generate(name: str) -> None:
    target = target_of(name)
    texts = plain_texts(name, "greedy")
    for prompt, length, text in zip(PROMPTS, LENGTHS, texts, strict=True):
        if name == "recurrent_gemma" and len(prompt) == 1:
            continue  # there `generate` begins with what the modules remember of the text before
        theirs = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert theirs[0].tolist() == text
    new = {token for prompt, text in zip(PROMPTS, texts, strict=True) for token in text[len(prompt) :]}
    assert len(new) > 3  # texts that a wrong cache could change


MODES = [
    pytest.param(name, mode, marks=() if name in FAST and (mode == "greedy" or name == "llama") else pytest.mark.slow)
    for name in NAMES
    for mode in PARAMS
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_text_of_made_drafts(name: str, mode: str) -> None:
    """In a batch that changes, by drafters that are right and wrong as the test wants."""
    target, texts = target_of(name), plain_texts(name, mode)
    kinds: list[Callable[[Sequence[int], int], Any]] = [lambda text, seed: None]
    if TREE in target.info.capabilities:
        kinds += [lambda text, seed: Scattered(text, seed), lambda text, seed: RandomTrees(seed)]
    elif CHAIN in target.info.capabilities:
        kinds += [NoisyChain]
    for kind, start in zip(kinds, (3, 1, 3), strict=False):
        assert texts_of(target, mode, [kind(text, i) for i, text in enumerate(texts)], start) == texts


OPTIONS: dict[str, dict[str, Any]] = {"lookahead": {"window": 4, "ngram": 3, "guesses": 4}}


@pytest.mark.parametrize("drafter", [name for name in drafters.ready() if name != "plain"])
@pytest.mark.parametrize("name", mostly_slow(["llama", "bloom", "mamba"], "bloom"))
def test_text_of_registered_drafters(name: str, drafter: str) -> None:
    """Drafters do not depend on architectures: one that takes trees, one that takes chains, one that takes neither."""
    target = target_of(name)
    engine = Engine(target)
    if not drafters.load(drafter).needs <= target.info.capabilities:
        with pytest.raises(Refused, match=drafter):
            engine.drafter(drafter)
        return
    if name == "mamba":
        with pytest.warns(UserWarning, match="decodes plainly"):
            engine.drafter(drafter)
    made = engine.drafter(drafter, **OPTIONS.get(drafter, {}))
    for mode, params in (("greedy", params_of("greedy")), ("sampled", params_of("sampled"))):
        handles = [
            engine.submit(Request(list(prompt), made, each, StopParams(max_new_tokens=length)))
            for prompt, length, each in zip(PROMPTS, LENGTHS, params, strict=True)
        ]
        engine.run(handles)
        texts = [[*prompt, *handle.tokens] for prompt, handle in zip(PROMPTS, handles, strict=True)]
        assert texts == plain_texts(name, mode)


def test_a_target_that_takes_no_drafts_has_log_probabilities() -> None:
    target = target_of("mamba")
    engine = Engine(target)
    handle = engine.submit(Request([5, 6, 7], engine.drafter("plain"), stop=StopParams(max_new_tokens=4), logprobs=2))
    engine.run([handle])
    for at, entry in enumerate(handle.logprobs):
        expected = own_logits(target, [5, 6, 7, *handle.tokens[:at]]).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-2)
    assert [entry.token for entry in handle.logprobs] == [entry.top[0][0] for entry in handle.logprobs]


def test_refusal_of_an_empty_prompt_names_the_remedy() -> None:
    with pytest.raises(BadParameter, match="at least one token"):
        target_of("llama").open([], SamplingParams())
