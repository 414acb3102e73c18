"""The Transformers target by itself: its cache, its prompts, its refusals, and the test that it puts a model to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import BY_NAME, SIZES, VOCABULARY
from helpers import GREEDY, Oracle, RandomTrees, Scattered, run

from leapahead.core.errors import BadLogits, BadParameter, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import CHAIN, LOGITS, TOP_K, TREE, Target
from leapahead.models.transformers import families, forward, kv_cache, selftest
from leapahead.models.transformers import model as room
from leapahead.models.transformers.forward import CachedEngine, ChainEngine, MaskedEngine, NativeEngine
from leapahead.models.transformers.kv_cache import KVCache
from leapahead.models.transformers.masks import Inputs
from leapahead.models.transformers.model import TransformersTarget, load

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


def cache_of(target: TransformersTarget) -> KVCache:
    assert isinstance(target.engine, CachedEngine)
    return target.engine.cache


def entries(target: TransformersTarget, session: Any) -> list[torch.Tensor]:
    """[planes, heads, length, dim] of each group: what the cache holds of a session."""
    row = session.state.row
    return [group.entries[:, row.index, :, : row.length].clone() for group in cache_of(target)._groups]


def accept(tree: TokenTree, node: int, bonus: int = 7) -> Verdict:
    tokens = tree.path_tokens(node)
    return Verdict(tuple(tree.path(node)), (*tokens, bonus), len(tokens))


# ------------------------------------------------------------------------------------------------------- protocol


def test_is_a_target(target: TransformersTarget) -> None:
    assert isinstance(target, Target)
    assert target.capabilities == {CHAIN, TREE, LOGITS, TOP_K}
    assert target.vocab_size == VOCABULARY
    assert target.context_length == SIZES["max_position_embeddings"]


def test_logits_are_of_every_node(target: TransformersTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    tree = TokenTree.from_paths(PROMPT[-1], [[1, 2, 3], [4, 5]])
    (choices,) = target.step([session], [tree])
    assert choices.logits.shape == (6, VOCABULARY)


def test_tokens_are_shared_with_the_sampler(target: TransformersTarget) -> None:
    session = target.open(PROMPT, SAMPLED)
    tree = TokenTree.root(PROMPT[-1])
    target.step([session], [tree])
    session.commit(accept(tree, 0))
    assert session.tokens is session.sampler.tokens
    assert session.tokens == [*PROMPT, 7]


def test_a_model_in_training_is_put_in_evaluation() -> None:
    model = BY_NAME["gpt2"].build().train()
    assert TREE in TransformersTarget(model).capabilities
    assert not model.training


# ---------------------------------------------------------------------------------------------------------- cache


def test_commit_moves_entries_to_where_a_prefill_puts_them(model: Any) -> None:
    target, fresh = TransformersTarget(model), TransformersTarget(model)
    session = target.open(PROMPT, GREEDY)
    tree = TokenTree(np.array([PROMPT[-1], 40, 41, 42, 43, 44]), np.array([-1, 0, 0, 1, 2, 4]))
    target.step([session], [tree])
    session.commit(accept(tree, 5))
    assert session.tokens == [*PROMPT, 41, 43, 44, 7]
    other = fresh.open(session.tokens, GREEDY)
    for mine, theirs in zip(entries(target, session), entries(fresh, other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_cut_verdict_keeps_its_path_only(target: TransformersTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    tree = TokenTree.chain(PROMPT[-1], [40, 41, 42])
    target.step([session], [tree])
    session.commit(accept(tree, 3).cut(2))
    assert session.tokens == [*PROMPT, 40, 41]
    assert session.state.length == len(session.tokens) - 1


def test_commit_without_a_step_is_caught(target: TransformersTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    with pytest.raises(AssertionError, match="without a step"):
        session.commit(Verdict((0,), (1,), 0))


def test_the_invariant_is_asserted(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    session = target.open(PROMPT, GREEDY)
    target.step([session], [TokenTree.root(PROMPT[-1])])
    monkeypatch.setattr(KVCache, "keep", lambda self, row, path: None)
    with pytest.raises(AssertionError):
        session.commit(Verdict((0,), (1,), 0))


def test_capacity_doubles_and_keeps_its_content(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(TransformersTarget(model), prompt=PROMPT).tokens
    monkeypatch.setattr(kv_cache, "FIRST_CAPACITY", 4)
    target = TransformersTarget(model)
    assert run(target, RandomTrees(), prompt=PROMPT).tokens == expected
    cache = cache_of(target)
    assert cache.capacity == 64
    assert {group.entries.shape[3] for group in cache._groups} == {64}


def test_doubling_stops_where_the_context_ends() -> None:
    cache = KVCache(usual_length=300)
    row = cache.take([1, 2], 1)
    row.length = 290
    cache.begin([row], 10)
    assert cache.capacity == 300
    cache.begin([row], 30)
    assert cache.capacity == 320


def test_keys_and_values_of_one_shape_are_one_tensor(target: TransformersTarget) -> None:
    latent = build("deepseek_v3")  # keys and values differ in width
    for each in (target, latent):
        each.open(PROMPT, GREEDY).close()
    assert [group.entries.shape[0] for group in cache_of(target)._groups] == [2 * SIZES["num_hidden_layers"]]
    assert [group.entries.shape[0] for group in cache_of(latent)._groups] == [2, 2]


def test_a_forward_reads_a_view(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [target.open(PROMPT[:n], GREEDY) for n in (5, 9, 7, 3)]
    cache = cache_of(target)
    write, seen = KVCache.write, list[torch.Tensor]()

    def spy(self: KVCache, place: tuple[int, int], states: torch.Tensor) -> torch.Tensor:
        seen.append(write(self, place, states))
        return seen[-1]

    monkeypatch.setattr(KVCache, "write", spy)
    some = [sessions[0], sessions[2]]  # not side by side
    target.step(some, [TokenTree.root(s.tokens[-1]) for s in some])
    storage = cache._groups[0].entries.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == storage for each in seen)
    assert {each.shape[0] for each in seen} == {2}
    assert {each.shape[2] for each in seen} == {7}  # no longer than the batch's longest row
    assert [cache.rows[row.index] is row for row in cache.rows] == [True] * len(cache.rows)


def test_rows_are_exchanged_only_when_the_set_changes(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [target.open(PROMPT[:n], GREEDY) for n in (5, 9, 7, 3)]
    exchanged = list[int]()
    exchange = KVCache._exchange
    monkeypatch.setattr(KVCache, "_exchange", lambda *args: (exchanged.append(1), exchange(*args))[1])
    for _ in range(3):
        for batch in (sessions, [sessions[3], sessions[1], sessions[0]]):
            trees = [TokenTree.root(s.tokens[-1]) for s in batch]
            for session, tree, _choices in zip(batch, trees, target.step(batch, trees), strict=True):
                session.commit(accept(tree, 0))
    assert len(exchanged) == 1


def test_a_step_of_others_between_step_and_commit(model: Any) -> None:
    """Rows move, and the entries that wait for their commit move with them."""
    target, fresh = TransformersTarget(model), TransformersTarget(model)
    sessions = [target.open(PROMPT[:n], GREEDY) for n in (5, 9, 7)]
    tree = TokenTree.from_paths(sessions[1].tokens[-1], [[40, 41], [42, 43]])
    target.step([sessions[1]], [tree])
    others = [sessions[0], sessions[2]]
    target.step(others, [TokenTree.root(s.tokens[-1]) for s in others])
    sessions[1].commit(accept(tree, 4))
    expected = fresh.open(sessions[1].tokens, GREEDY)
    for mine, theirs in zip(entries(target, sessions[1]), entries(fresh, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_forget_gives_the_memory_back(target: TransformersTarget) -> None:
    text = run(target, prompt=PROMPT).tokens
    target.forget()
    assert cache_of(target)._groups == []
    assert run(target, Scattered([*PROMPT, *text]), prompt=PROMPT).tokens == text


# --------------------------------------------------------------------------------------------------------- prompts


def test_more_sessions_make_more_rows(target: TransformersTarget) -> None:
    sessions = [target.open(PROMPT[:n], GREEDY) for n in range(1, 6)]
    assert len({session.state.row for session in sessions}) == 5
    for session in sessions:
        session.close()
        session.close()
    assert not any(row.busy for row in cache_of(target).rows)


def test_a_batch_of_one_loses_nothing(model: Any) -> None:
    """The test of the model takes two sequences; the limit is for those that come after."""
    target = TransformersTarget(model, max_batch=1)
    assert TREE in target.capabilities
    assert not any(row.busy or row.length for row in target.engine.cache.rows)
    session = target.open([1, 2, 3], GREEDY)
    with pytest.raises(Refused, match="max_batch"):
        target.open([1, 2, 3], GREEDY)
    session.close()


def test_max_batch_is_refused_by_name(model: Any) -> None:
    target = TransformersTarget(model, max_batch=2)
    kept = [target.open(PROMPT, GREEDY) for _ in range(2)]
    with pytest.raises(Refused, match="max_batch"):
        target.open(PROMPT, GREEDY)
    kept[0].close()
    target.open(PROMPT, GREEDY)
    with pytest.raises(BadParameter, match="max_batch=0"):
        TransformersTarget(model, max_batch=0)


def test_a_known_prefix_is_not_computed_again(model: Any) -> None:
    target = TransformersTarget(model)
    first = run(target, prompt=PROMPT).tokens
    stats = Stats()
    longer = [*PROMPT, *first[:10], 50, 51]
    session = target.open(longer, GREEDY, stats)
    assert (stats.reused_tokens, stats.prefill_forwards, stats.prompt_tokens) == (30, 1, 32)
    session.close()
    stats = Stats()
    target.open(longer, GREEDY, stats).close()
    assert (stats.reused_tokens, stats.prefill_forwards) == (31, 0)
    assert run(target, RandomTrees(), prompt=longer).tokens == run(TransformersTarget(model), prompt=longer).tokens


def test_a_prefix_is_copied_from_an_open_session(target: TransformersTarget) -> None:
    first = target.open(PROMPT, GREEDY)
    stats = Stats()
    second = target.open([*PROMPT[:15], 50, 51], GREEDY, stats)
    assert stats.reused_tokens == 15
    for mine, theirs in zip(entries(target, first), entries(target, second), strict=True):
        torch.testing.assert_close(mine[:, :, :15], theirs[:, :, :15], rtol=0, atol=0)
    assert first.tokens == list(PROMPT)


def test_what_differs_is_not_reused(target: TransformersTarget) -> None:
    target.open(PROMPT, GREEDY).close()
    stats = Stats()
    session = target.open([*PROMPT[:4], 99, *PROMPT[5:]], GREEDY, stats)
    assert stats.reused_tokens == 4
    assert session.state.length == len(PROMPT) - 1


def test_prompts_are_read_in_chunks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(TransformersTarget(model), prompt=PROMPT).tokens
    monkeypatch.setattr(forward, "CHUNK", 5)
    target = TransformersTarget(model)
    found = run(target, prompt=PROMPT)
    assert found.tokens == expected
    assert found.generation.stats.prefill_forwards == 4
    assert found.generation.stats.prefill_seconds > 0


def test_the_lm_head_is_spared_in_the_prefill(target: TransformersTarget) -> None:
    rows = list[int]()
    hook = target.model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    target.open(PROMPT, GREEDY)
    hook.remove()
    assert rows == [1]


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


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "opt", "mpt", "llama"])
def test_a_text_may_fill_the_context(name: str) -> None:
    """Learned positions end there; drafts must not reach beyond."""
    model = BY_NAME[name].build()
    target = TransformersTarget(model)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, VOCABULARY, size=240)]
    stop = StopParams(max_new_tokens=100)
    plain = run(target, prompt=prompt, stop=stop)
    assert len(plain.tokens) == 16
    assert plain.finish == ("length", None)
    text = [*prompt, *plain.tokens]
    drafter = Scattered(text) if TREE in target.capabilities else Oracle(text)
    assert run(target, drafter, prompt=prompt, stop=stop).tokens == plain.tokens


def test_a_prompt_that_fails_leaves_the_row_free(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model, "forward", failing(ValueError("broken")), raising=False)
    with pytest.raises(ValueError, match="broken"):
        target.open(PROMPT, GREEDY)
    assert not any(row.busy for row in cache_of(target).rows)


def failing(error: Exception) -> Callable[..., Any]:
    def forward(*args: Any, logits_to_keep: int = 0, position_ids: Any = None, **kwargs: Any) -> Any:
        raise error

    return forward


# ---------------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, top_k=20, top_p=0.9, repetition_penalty=1.3)])
def test_choosing_all_at_once_is_choosing_one_by_one(model: Any, params: SamplingParams) -> None:
    lazy, eager = (TransformersTarget(model, eager_choice=flag) for flag in (False, True))
    plain = run(lazy, prompt=PROMPT, params=params).tokens
    for target in (lazy, eager):
        drafter = Scattered([*PROMPT, *plain])
        assert run(target, drafter, prompt=PROMPT, params=params).tokens == plain
    sessions = [[target.open(PROMPT[:n], params) for n in (20, 4)] for target in (lazy, eager)]
    trees = [TokenTree.from_paths(s.tokens[-1], [[1, 2], [3, 4, 5]][: i + 1]) for i, s in enumerate(sessions[0])]
    chosen = [target.step(each, trees) for target, each in zip((lazy, eager), sessions, strict=True)]
    for one, other, tree in zip(*chosen, trees, strict=True):
        assert one.of(np.arange(len(tree))).tolist() == other.of(np.arange(len(tree))).tolist()


@pytest.mark.parametrize("eager", [False, True])
def test_nan_is_one_sentence_and_only_where_it_is_read(model: Any, eager: bool) -> None:
    def fails_after_99(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(prefixes[:, -1:] == 99, torch.nan)

    target = TransformersTarget(model, eager_choice=eager)
    session = target.open(PROMPT, SamplingParams(processors=(fails_after_99,)))
    (choices,) = target.step([session], [TokenTree.from_paths(PROMPT[-1], [[1], [99]])])
    assert choices[0] >= 0
    assert choices[1] >= 0
    assert choices[2] == -1
    session.close()

    def fails_late(prefixes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(torch.tensor(prefixes.shape[1] >= 25), torch.nan)

    with pytest.raises(BadLogits, match=r"position 25.*NaN"):
        run(target, RandomTrees(), prompt=PROMPT, params=SamplingParams(processors=(fails_late,)))


def test_a_model_of_nan_is_refused() -> None:
    model = BY_NAME["llama"].build()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(BadLogits, match="NaN or infinite"):
        TransformersTarget(model)


# ----------------------------------------------------------------------------------- dtypes, attention, and memory


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[(name, torch.float64) for name in ("llama", "mistral", "gpt2", "gemma2", "bloom")],
        *[
            (name, torch.bfloat16)
            for name in ("llama", "mistral", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "bloom")
        ],
        *[(name, torch.float16) for name in ("llama", "gpt2", "qwen3_moe")],
    ],
    ids=str,
)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    target = TransformersTarget(BY_NAME[name].build(dtype))
    assert CHAIN in target.capabilities
    assert (TREE in target.capabilities) == (name != "bloom")
    plain = run(target, prompt=PROMPT)
    drafter = Scattered([*PROMPT, *plain.tokens]) if name != "bloom" else Oracle([*PROMPT, *plain.tokens])
    drafted = run(target, drafter, prompt=PROMPT)
    assert len(drafted.tokens) == len(plain.tokens)  # the texts may part where two logits are nearly equal
    if dtype == torch.float64:
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "deepseek_v3", "qwen2_sliding"])
def test_eager_attention_takes_additive_masks(name: str) -> None:
    target = TransformersTarget(BY_NAME[name].build(attention="eager"))
    assert isinstance(target.engine, MaskedEngine)
    assert target.engine.dtype == torch.float32
    plain = run(target, prompt=PROMPT).tokens
    assert run(target, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain
    other = TransformersTarget(BY_NAME[name].build())
    assert run(other, Scattered([*PROMPT, *plain]), prompt=PROMPT).tokens == plain


def test_a_boolean_mask_for_eager_attention_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would add it to the scores without a word."""
    monkeypatch.setitem(families.MASKS, "eager", True)
    target = TransformersTarget(BY_NAME["llama"].build(attention="eager"))
    assert list(target.refusals) == ["trees by a boolean mask"]
    assert isinstance(target.engine, MaskedEngine)
    assert target.engine.dtype == torch.float32


def test_attention_without_tree_masks_is_refused_by_name() -> None:
    model = BY_NAME["llama"].build()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(Refused, match=r"'flash_attention_2'.*sdpa"):
        TransformersTarget(model)


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
    session = target.open(PROMPT, GREEDY)
    tree = TokenTree.from_paths(PROMPT[-1], [[expected[0], 5], [9]])
    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", failing(error), raising=False)
        with pytest.raises(LeapaheadError, match=r"out of memory in a step at 20 tokens.*batch 1.*smaller batch"):
            target.step([session], [tree])
        with pytest.raises(LeapaheadError, match="out of memory in a prompt of 3 tokens"):
            target.open([90, 91, 92], GREEDY)
    (choices,) = target.step([session], [tree])
    assert [choices[0], choices[1]] == expected


def test_out_of_memory_half_way_through_a_recurrent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    target = build("mamba")
    expected = run(target, prompt=PROMPT).tokens[:2]
    session = target.open(PROMPT, GREEDY)
    (choices,) = target.step([session], [TokenTree.root(PROMPT[-1])])
    session.commit(accept(choices.tree, 0, expected[0]))
    right = target.model.forward

    def fails_at_its_end(*args: Any, **kwargs: Any) -> Any:
        right(*args, **kwargs)
        raise torch.OutOfMemoryError("late")

    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", fails_at_its_end)
        with pytest.raises(LeapaheadError, match="out of memory"):
            target.step([session], [TokenTree.root(expected[0])])
    (choices,) = target.step([session], [TokenTree.root(expected[0])])
    assert choices[0] == expected[1]


def test_other_errors_of_a_model_are_left_alone(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model, "forward", failing(RuntimeError("shape mismatch")), raising=False)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        target.open(PROMPT, GREEDY)


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
    monkeypatch.setattr(KVCache, "begin", lambda self, rows, n: right(self, rows, n)[::-1])


MUTATIONS = [positions_by_slot, siblings_visible, parent_hidden, masks_ignored, last_entry_hidden, commit_in_place]
MUTATIONS += [commit_off_by_one]


@pytest.mark.parametrize("mutation", [*MUTATIONS, rows_mixed_up])
def test_the_self_test_catches(model: Any, mutation: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    target = TransformersTarget(model)
    assert TREE not in target.capabilities
    assert set(target.refusals) >= {"trees by a boolean mask", "trees by an additive mask"}
    monkeypatch.undo()
    assert run(target, prompt=PROMPT).tokens == run(TransformersTarget(model), prompt=PROMPT).tokens


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_text_shows(
    target: TransformersTarget, mutation: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(target, prompt=PROMPT).tokens
    drafter = lambda: Scattered([*PROMPT, *plain])  # noqa: E731
    assert run(target, drafter(), prompt=PROMPT).tokens == plain
    mutation(monkeypatch)
    assert run(target, drafter(), prompt=PROMPT).tokens != plain


def test_a_window_by_slots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Inputs.masks

    def wrong(self: Inputs, *args: Any) -> Any:
        return right(replace(self, positions=self.lengths[:, None] + torch.arange(self.tokens.shape[1])), *args)

    monkeypatch.setattr(Inputs, "masks", wrong)
    target = build("mistral")
    assert TREE not in target.capabilities


def test_a_window_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "patterns", lambda config: {"full_attention": families.Pattern()})
    assert (
        TREE not in TransformersTarget(replace(BY_NAME["mistral"], options={"sliding_window": 4}).build()).capabilities
    )
    assert TREE in build("llama").capabilities


def test_a_model_that_ignores_masks_has_chains_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    right = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: right(**{**kwargs, "attention_mask": None}))
    target = TransformersTarget(model)
    assert target.capabilities == {CHAIN, LOGITS, TOP_K}
    assert isinstance(target.engine, ChainEngine)


def test_a_model_that_ignores_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["llama"].build()
    right = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: right(**{**kwargs, "past_key_values": None}))
    with pytest.raises(Refused, match="cannot be decoded exactly"):
        TransformersTarget(model)


def test_the_self_test_has_a_margin(model: Any) -> None:
    """What it measures on a right model is far below what it tolerates, and what a wrong one gives is far above."""
    engine = MaskedEngine(model, KVCache(), {"full_attention": families.Pattern()}, boolean=True)
    with torch.no_grad():
        result = selftest.run(engine, model, np.arange(3, VOCABULARY), (4, 1))
    assert result.error < result.tolerance / 10


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


def test_contexts() -> None:
    assert build("bloom").context_length > 10**6  # distances only
    assert build("falcon_alibi").context_length > 10**6
    assert build("mpt").context_length == 256
    assert build("gpt2").context_length == 256


def test_a_bidirectional_model_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be decoded exactly"):
        TransformersTarget(replace(BY_NAME["bert"], options={"is_decoder": False}).build())


def test_a_model_without_a_cache_is_refused() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with pytest.raises(Refused, match="takes no cache"):
        TransformersTarget(transformers.OpenAIGPTLMHeadModel(config).eval())


def test_an_encoder_decoder_model_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8)
    with pytest.raises(Refused, match="encoder-decoder"):
        TransformersTarget(transformers.T5ForConditionalGeneration(config))


def test_recurrent_models_share_no_state() -> None:
    """RecurrentGemma keeps its state in its modules: sequences side by side must not mix."""
    target = build("recurrent_gemma")
    assert isinstance(target.engine, NativeEngine)
    assert target.engine.shared
    assert "token by token" in target.refusals


# ------------------------------------------------------------------------------------------------------------- load


def test_load(tiny_folder: Path) -> None:
    target, tokenizer = load(tiny_folder, dtype="float32", device="cpu")
    assert tokenizer is not None
    assert target.vocab_size == len(tokenizer) + 32  # a vocabulary larger than the tokenizer's
    prompt = tokenizer.encode("def add(a, b):")
    plain = run(target, prompt=prompt).tokens
    assert run(target, Scattered([*prompt, *plain]), prompt=prompt).tokens == plain


def test_load_keeps_the_dtype_of_the_checkpoint(tiny_folder: Path, tiny_model: Any, tmp_path: Path) -> None:
    tiny_model.bfloat16().save_pretrained(tmp_path)
    tiny_model.float()
    target, tokenizer = load(tmp_path)
    assert target.model.dtype == torch.bfloat16
    assert tokenizer is None  # there are no files of one
    assert load(tmp_path, dtype="float64")[0].model.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8"}, "dtype 'float8'.*bfloat16"),
        ({"device": "gpu"}, "device 'gpu'.*cuda"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": "cuda:7"}, "device 'cuda:7' is not there"),
    ],
)
def test_load_options_that_cannot_be(tiny_folder: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        load(tiny_folder, **options)


def test_load_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="no folder"):
        load(tmp_path / "missing")
    with pytest.raises(BadParameter, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadParameter, match="cannot be loaded"):
        load(tmp_path)


def test_load_checkpoints_that_cannot_be(tiny_folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "config-only"
    whole.mkdir()
    shutil.copy(tiny_folder / "config.json", whole)
    with pytest.raises(BadParameter, match="cannot be loaded"):
        load(whole)
    bare = tmp_path / "bare"
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaModel(config).save_pretrained(bare)  # without a head
    with pytest.raises(Refused, match="lacks weights"):
        load(bare)
    seq2seq = tmp_path / "t5"
    t5 = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(seq2seq)
    with pytest.raises(Refused, match="encoder-decoder"):
        load(seq2seq)


def test_auto_device_is_one_that_is_there() -> None:
    assert room._device("auto").type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_precision_is_the_models(model: Any, dtype: torch.dtype) -> None:
    """Not that of logits that were widened on the way."""
    assert TransformersTarget(BY_NAME["llama"].build().to(dtype)).precision == torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_what_is_kept_of_the_prompt_is_what_the_target_would_say_there(name: str) -> None:
    """Over several chunks and behind a part that was known; and the cache is the one without it."""
    target = build(name)
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, VOCABULARY, 60).tolist()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forward, "CHUNK", 16)
        patched.setattr(forward, "PROMPT_ROWS", 24)
        session = target.open(prompt, GREEDY, top_k=4)
    kept = session.prompt_top_k
    assert kept is not None
    assert kept.tokens.tolist() == prompt[-25:-1]
    assert kept.following.shape == kept.logits.shape == (24, 4)
    session.close()
    for index in (0, 11, 23):
        alone = target.open(prompt[: 36 + index], GREEDY)
        logits = target.step([alone], [TokenTree.root(prompt[35 + index])])[0].logits[0]
        expected = torch.as_tensor(logits).topk(4)
        assert kept.following[index].tolist() == expected.indices.tolist()
        assert kept.logits[index] == pytest.approx(expected.values.numpy(), abs=1e-4)
        alone.close()
    assert target.open(prompt, GREEDY).prompt_top_k is None


def test_only_what_had_to_be_read_is_kept_of_a_prompt(target: TransformersTarget) -> None:
    prompt = list(range(3, 33))
    target.open(prompt[:20], GREEDY).close()
    session = target.open(prompt, GREEDY, top_k=2)
    assert session.prompt_top_k is not None
    assert session.prompt_top_k.tokens.tolist() == prompt[19:-1]
    session.close()
    assert target.open(prompt[:5], GREEDY, top_k=2).prompt_top_k is None
