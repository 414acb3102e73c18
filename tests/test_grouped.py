"""Attention with grouped query heads: the same numbers without copies of the cache, and a model left as it was."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from helpers import PROMPT, Scattered, run
from transformers.integrations import sdpa_attention

from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.transformers import grouped
from leapahead.models.transformers.forward import MaskedExecutor
from leapahead.models.transformers.model import TransformersTarget


def layer(batch: int, heads: int, shared: int, rows: int, cached: int) -> dict[str, torch.Tensor]:
    """Query, keys, values and a random mask in which every row sees something."""
    random = torch.Generator().manual_seed(rows)

    def values(heads: int, length: int, dim: int = 8) -> torch.Tensor:
        return torch.randn(batch, heads, length, dim, generator=random, dtype=torch.float64)

    mask = torch.rand(batch, 1, rows, cached, generator=random) < 0.5
    mask[..., 0] = True
    return {
        "query": values(heads, rows),
        "key": values(shared, cached),
        "value": values(shared, cached, 4),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("rows", [1, 2, 7, grouped.MOST_ROWS + 1])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_numbers_are_those_of_sdpa(rows: int, heads: int, shared: int, batch: int) -> None:
    given = layer(batch, heads, shared, rows, cached=rows + 5)
    module: Any = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    mine, _ = grouped.forward(module, **given, scaling=0.3)
    theirs, _ = sdpa_attention.sdpa_attention_forward(module, **given, scaling=0.3)
    assert mine.shape == theirs.shape == (batch, rows, heads, 4)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_keys_are_not_copied_for_every_query_head(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TransformersTarget(BY_NAME["llama"].build(), exclusive=True)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *_: pytest.fail("keys were repeated"))
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.config is target.model.config
    plain = run(target, prompt=PROMPT).tokens
    assert run(target, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain


def test_a_model_that_computes_attention_in_another_way_keeps_it() -> None:
    target = TransformersTarget(BY_NAME["llama"].build(attention="eager"), exclusive=True)
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.config is None
    assert not target.refusals


def test_a_model_of_the_user_keeps_its_attention() -> None:
    """Another thread may run it at the same time."""
    target = TransformersTarget(BY_NAME["llama"].build())
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.config is None


def test_it_takes_the_place_of_sdpa_only() -> None:
    assert grouped.fits("sdpa", torch.device("cpu"))
    assert not grouped.fits("eager", torch.device("cpu"))
    assert not grouped.fits("sdpa", torch.device("mps"))


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 3],
        [4, 1, 2],
        [2, 2],
        [1, 1, grouped.MOST_ROWS + 1],
        [1, 17, 2, 20, 1, 2, 3, 2],
        [2, 0],
        [0, 3, 0],
        [0] * 30 + [1],
    ],
)
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 4)])
def test_packed_nodes_attend_as_padded_ones(sizes: list[int], heads: int, shared: int) -> None:
    given = layer(len(sizes), heads, shared, max(sizes), cached=max(sizes) + 5)
    module: Any = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    padded, _ = grouped.forward(module, **given, scaling=0.3)
    expected = torch.cat([padded[tree, :size] for tree, size in enumerate(sizes)])[None]
    nodes = torch.cat([given["query"][tree, :, :size] for tree, size in enumerate(sizes)], dim=1)[None]
    config: Any = SimpleNamespace(_attn_implementation="sdpa")
    with grouped.attention(config, grouped.Packing.of(sizes, torch.device("cpu"))):
        packed, _ = grouped.forward(module, **{**given, "query": nodes}, scaling=0.3)
    torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)


def test_a_few_large_trees_have_blocks_of_their_own() -> None:
    blocks = grouped.Packing.of([1, 30, 2, 1, 2, 40, 1, 2], torch.device("cpu")).blocks
    found = [(each.trees.start, each.trees.stop, each.rows.start, each.rows.stop) for each in blocks]
    assert found == [(0, 8, 0, 2), (1, 2, 2, 30), (5, 6, 2, 40)]
    assert [each.nodes for each in blocks[1:]] == [slice(3, 31), slice(38, 76)]
    assert [len(grouped.Packing.of(sizes, torch.device("cpu")).blocks) for sizes in ([3, 4, 3], [2, 1])] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mistral"])
def test_only_the_nodes_of_a_batch_go_through_the_model(name: str) -> None:
    """Trees of different sizes, over sequences of different lengths, in an order that is not the cache's."""
    padding, packing = (TransformersTarget(BY_NAME[name].build(), exclusive=each) for each in (False, True))
    assert (padding.info.padded, packing.info.padded) == (True, False)
    widths = []
    packing.model.get_input_embeddings().register_forward_hook(lambda _, given, __: widths.append(given[0].shape))
    found = []
    for target in (padding, packing):
        prompts = [PROMPT[:3], PROMPT, PROMPT[:5]]
        sessions = [target.open(prompt, SamplingParams()) for prompt in prompts]
        for session in sessions:
            target.prefill(session, 99)
        sessions = [sessions[at] for at in (2, 0, 1)]
        rows = []
        for parents in ([[-1], [-1, 0, 0, 1], [-1, 0]], [[-1, 0, 0], [-1], [-1]]):
            trees = [
                TokenTree(np.array([session.tokens[-1], *PROMPT[: len(each) - 1]]), np.array(each))
                for session, each in zip(sessions, parents, strict=True)
            ]
            cost = target.cost(sessions, trees).rows
            assert cost == (sum(map(len, parents)) if target is packing else 3 * max(map(len, parents)))
            choices = target.step(sessions, trees)
            rows += [torch.as_tensor(each.logits) for each in choices]
            for session, tree in zip(sessions, trees, strict=True):
                path = [0, 1, 3] if len(tree) > 3 else [0]
                session.commit(Verdict(tuple(path), (*tree.path_tokens(path[-1]), 7), len(path) - 1))
        found.append(torch.cat(rows))
    assert widths[-2:] == [(1, 7), (1, 5)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_the_configuration_is_as_before_after_a_forward_and_after_an_error() -> None:
    target = TransformersTarget(BY_NAME["llama"].build(), exclusive=True)
    run(target, prompt=PROMPT)
    assert target.model.config._attn_implementation == "sdpa"
    names = []
    with suppress(KeyboardInterrupt), grouped.attention(target.model.config):
        names.append(target.model.config._attn_implementation)
        raise KeyboardInterrupt
    assert names == [grouped.NAME]
    assert target.model.config._attn_implementation == "sdpa"


def test_a_model_that_depends_on_the_name_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some architectures compute something else unless the implementation is called "sdpa"."""
    model = BY_NAME["llama"].build()
    right = model.model.forward

    def forward(**given: Any) -> Any:
        if model.config._attn_implementation != "sdpa":
            given["attention_mask"] = None
        return right(**given)

    monkeypatch.setattr(model.model, "forward", forward)
    target = TransformersTarget(model, exclusive=True)
    assert list(target.refusals) == ["trees by a boolean mask, attention grouped and packed"]
    assert isinstance(target.executor, MaskedExecutor)
    assert target.executor.config is None
    plain = run(target, prompt=PROMPT).tokens
    assert run(target, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain
