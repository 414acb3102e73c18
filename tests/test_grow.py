"""Growing a tree between forwards: `num_computed` nodes are not computed again, and the logits stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gguf_models import llama

from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.models import loading
from leapahead.models.base import CHAIN, TREE, Session, Target, read_prompt
from leapahead.models.toy import ToyTarget

GREEDY = SamplingParams()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def toy() -> Target:
    return ToyTarget()


def bundled() -> Target:
    return loading.load(None, dtype="float32").target


def windowed() -> Target:
    """Sliding windows of a few tokens beside full attention."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=6, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return loading.load(Gemma2ForCausalLM(config).to(torch.float32)).target


def chains_only() -> Target:
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    return loading.load(BloomForCausalLM(config)).target


def gguf() -> Target:
    return loading.load(llama(), n_ctx=256, n_seq_max=12).target


KINDS: dict[str, Callable[[], Target]] = {
    "toy": toy,
    "bundled": bundled,
    "windowed": windowed,
    "chains only": chains_only,
    "gguf": gguf,
}


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return KINDS[request.param]()


def grown(rng: random.Random, target: Target, root: int, sizes: list[int]) -> list[TokenTree]:
    """Trees, each the one before and some nodes more, anywhere."""
    builder, found = TreeBuilder(root), []
    for size in sizes:
        while len(builder) < size:
            parent = rng.randrange(len(builder)) if TREE in target.info.capabilities else len(builder) - 1
            builder.add(parent, rng.randrange(1, min(target.info.vocab_size, 60)))
        found.append(builder.build())
    return found


def rows(choices: Any) -> np.ndarray[Any, Any]:
    return np.asarray(choices.logits).astype(np.float64)


def opened(target: Target, tokens: list[int]) -> Session:
    """A session with its prompt read."""
    session = target.open(tokens, GREEDY)
    read_prompt(target, session)
    return session


def whole(target: Target, tokens: list[int], tree: TokenTree) -> np.ndarray[Any, Any]:
    with closing(opened(target, list(tokens))) as session:
        return rows(target.step([session], [tree])[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_tree_that_grows_has_the_logits_of_one_that_is_there_at_once(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [*PROMPT]
    session = opened(target, tokens)
    with closing(session):
        for turn in range(4):
            trees = grown(rng, target, session.tokens[-1], [1 + turn % 2, 3, 4, 8, 9])
            computed, found = 0, []
            for tree in trees:
                choices = target.step([session], [tree], [computed])[0]
                assert choices.num_computed == computed
                found.append(rows(choices))
                assert choices.top_k(1)[0].shape == (len(tree) - computed, 1)
                assert choices[len(tree) - 1] == int(found[-1][-1].argmax())
                computed = len(tree)
            expected = whole(target, session.tokens, trees[-1])
            np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-3 * expected.std())
            path = trees[-1].path(rng.randrange(len(trees[-1])))  # and what is committed of it serves what follows
            said = [int(trees[-1].tokens[node]) for node in path[1:]]
            session.commit(Verdict(tuple(path), (*said, rng.randrange(1, min(target.info.vocab_size, 60))), len(said)))


@pytest.mark.slow
def test_sessions_that_grow_together_do_not_disturb_each_other(target: Target) -> None:
    rng = random.Random(7)
    prompts = [PROMPT, [*PROMPT, 2, 7, 1, 8], PROMPT[:3]]
    sessions = [opened(target, list(prompt)) for prompt in prompts]
    sizes = [[1, 4, 9], [3, 4, 5], [2, 6, 7]]
    trees = [grown(rng, target, s.tokens[-1], some) for s, some in zip(sessions, sizes, strict=True)]
    found: list[list[Any]] = [[], [], []]
    computed = [0, 0, 0]
    for turn in range(3):
        now = [some[turn] for some in trees]
        for index, choices in enumerate(target.step(sessions, now, computed)):
            found[index].append(rows(choices))
        computed = [len(tree) for tree in now]
    for session in sessions:
        session.close()
    for prompt, some, parts in zip(prompts, trees, found, strict=True):
        expected = whole(target, prompt, some[-1])
        np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-3 * expected.std())


def test_a_draft_that_grew_can_be_dropped(target: Target) -> None:
    rng = random.Random(3)
    with closing(opened(target, PROMPT)) as session:
        first, second = grown(rng, target, PROMPT[-1], [3, 6])
        target.step([session], [first])
        target.step([session], [second], [3])
        other = grown(random.Random(4), target, PROMPT[-1], [5])[0]
        found = rows(target.step([session], [other])[0])
        expected = whole(target, PROMPT, other)
        np.testing.assert_allclose(found, expected, atol=2e-3 * expected.std())


def test_all_of_these_can_grow(target: Target) -> None:
    assert CHAIN in target.info.capabilities
