"""Every architecture: the logits of trees are the model's own, and every drafter's text is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, VOCABULARY
from helpers import RandomTrees, Scattered

from leapahead import drafters
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams, Stopper
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Context, Drafter, Proposal
from leapahead.drafters.plain import Plain
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import CHAIN, TOP_K, TREE, require
from leapahead.models.transformers.model import TransformersTarget

NAMES = [each.name for each in ARCHITECTURES]
CAPABILITIES = {"tree": {CHAIN, TREE, TOP_K}, "chain": {CHAIN, TOP_K}, "plain": set[str]()}
PROMPTS = ((5, 6, 7), tuple(range(3, 23)), (9,), (5, 6, 7, 8))
LENGTHS = (24, 9, 20, 16)  # so that sequences leave one by one
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0, top_k=40, seed=11),
}


class NoisyChain(Drafter):
    """The right text as a chain, a token in three wrong."""

    name: ClassVar[str] = "noisy_chain"

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        self.text, self.rng = list(text), np.random.default_rng(seed)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        right = self.text[len(context.tokens) :][: min(4, budget.depth)]
        drafted = [t if self.rng.random() < 2 / 3 else int(self.rng.integers(context.vocab_size)) for t in right]
        return Proposal(TokenTree.chain(context.root, drafted))


@cache
def target_of(name: str) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build())


def run(
    target: TransformersTarget, made: Sequence[Drafter], params: Sequence[SamplingParams], start: int
) -> list[list[int]]:
    """The texts of `PROMPTS` decoded together: `start` of them at once, the others join after the second step."""
    waiting = [
        Generation(
            target.open(prompt, param),
            drafter,
            Stopper(StopParams(max_new_tokens=length), prompt, target.context_length),
        )
        for prompt, length, drafter, param in zip(PROMPTS, LENGTHS, made, params, strict=True)
    ]
    everyone, live, waiting = list(waiting), waiting[:start], waiting[start:]
    for steps, _ in enumerate(decode(target, live), start=1):
        if steps >= 2 * start and waiting:
            live.append(waiting.pop(0))
    assert not waiting
    return [each.session.tokens for each in everyone]


def alone(target: TransformersTarget, made: Sequence[Drafter], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The texts of `PROMPTS`, each decoded by itself."""
    texts = []
    for prompt, length, drafter, param in zip(PROMPTS, LENGTHS, made, params, strict=True):
        session = target.open(prompt, param)
        stopper = Stopper(StopParams(max_new_tokens=length), prompt, target.context_length)
        for _ in decode(target, [Generation(session, drafter, stopper)]):
            pass
        texts.append(session.tokens)
    return texts


@cache
def plain_texts(name: str, mode: str) -> list[list[int]]:
    return alone(target_of(name), [Plain() for _ in PROMPTS], params_of(mode))


def params_of(mode: str) -> list[SamplingParams]:
    """Sampled sequences have their own seeds."""
    base = PARAMS[mode]
    return [
        SamplingParams(temperature=base.temperature, top_k=base.top_k, seed=base.seed + i) for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_capabilities(name: str) -> None:
    target = target_of(name)
    assert target.capabilities - {"logits"} == CAPABILITIES[BY_NAME[name].expect]
    assert target.vocab_size == VOCABULARY


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_node(name: str) -> None:
    """Two ragged sequences, three steps with commits in between, against the model's own forward of every path."""
    target, rng = target_of(name), np.random.default_rng(1)
    texts = [rng.integers(3, VOCABULARY, size=size).tolist() for size in (14, 3)]
    sessions = [target.open(text, SamplingParams()) for text in texts]
    for _ in range(3):
        trees = [random_tree(rng, session.tokens[-1], target.capabilities) for session in sessions]
        for session, tree, choices in zip(sessions, trees, target.step(sessions, trees), strict=True):
            for node in range(len(tree)):
                expected = own_logits(target, [*session.tokens, *tree.path_tokens(node)])
                error = (choices.logits[node] - expected).abs().max() / expected.std()
                assert error < (1e-4 if CHAIN in target.capabilities else 1e-2), f"node {node} of {tree}"
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
        positions = {"position_ids": torch.arange(len(tokens))[None]} if "roberta" in target.name.lower() else {}
        logits: torch.Tensor = target.model(input_ids=ids, use_cache=False, **positions).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("mode", PARAMS)
@pytest.mark.parametrize("name", NAMES)
def test_text_of_made_drafts(name: str, mode: str) -> None:
    """Alone and in a batch that changes, by drafters that are right and wrong as the test wants."""
    target, texts, params = target_of(name), plain_texts(name, mode), params_of(mode)
    kinds: list[Callable[[Sequence[int], int], Drafter]] = [lambda text, seed: Plain()]
    if TREE in target.capabilities:
        kinds += [lambda text, seed: Scattered(text, seed), lambda text, seed: RandomTrees(seed)]
    elif CHAIN in target.capabilities:
        kinds += [NoisyChain]
    for kind in kinds:
        for start in (1, 3):
            assert run(target, [kind(text, i) for i, text in enumerate(texts)], params, start) == texts
    assert alone(target, [kinds[-1](text, i) for i, text in enumerate(texts)], params) == texts


OPTIONS = {"auto": {"nodes": 8}, "lookahead": {"window": 4, "ngram": 3, "guesses": 4}}


@pytest.mark.parametrize("drafter", [name for name in drafters.ready() if name != "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_text_of_registered_drafters(name: str, drafter: str) -> None:
    target, kind = target_of(name), drafters.load(drafter)
    if not kind.needs <= target.capabilities:
        with pytest.raises(Refused, match=drafter):
            require(target, kind.needs, drafter)
        return
    for mode in PARAMS:
        made = [kind(**OPTIONS.get(drafter, {})) for _ in PROMPTS]
        assert run(target, made, params_of(mode), start=2) == plain_texts(name, mode)


def test_refusal_of_an_empty_prompt_names_the_remedy() -> None:
    with pytest.raises(BadParameter, match="at least one token"):
        target_of("llama").open([], SamplingParams())
