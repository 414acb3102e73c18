"""OpenVINO models as targets: their logits are Transformers' own, whatever shares the forward and the cache.

The models are exported from random ones of Transformers in float32, so that equality has no ties.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from helpers import GREEDY, is_freed
from test_exact import differing, prompts_of
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from leapahead import LLM, SamplingParams
from leapahead.core.errors import BadParameter, CacheFull, ContextOverflow, LeapaheadError, Refused
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models import huge_pages, loading
from leapahead.models.base import Capture, read_prompt
from leapahead.models.openvino import blocks, compiled, folder, paged
from leapahead.models.openvino.blocks import Plane, Pool
from leapahead.models.openvino.export import export
from leapahead.models.openvino.holding import Holding
from leapahead.models.openvino.model import OpenVinoTarget
from leapahead.models.openvino.options import OpenVinoOptions
from leapahead.models.openvino.paged import PagedModel
from leapahead.models.openvino.runtime import CORE

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
}
HAS_BF16 = "BF16" in CORE.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
Reference = Callable[[list[int]], np.ndarray[Any, np.dtype[np.float32]]]


def saved(model: Any, place: Path) -> Path:
    model.save_pretrained(place / "model")
    return export(place / "model", place / "exported", "f32").path


@pytest.fixture(scope="module")
def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def exported(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def shared_target(exported: Path) -> OpenVinoTarget:
    return folder.load(exported, OpenVinoOptions(n_threads=1, copies=3))


@pytest.fixture
def target(shared_target: OpenVinoTarget) -> OpenVinoTarget:
    shared_target.forget()
    return shared_target


@pytest.fixture(scope="module")
def reference(llama: Any) -> Reference:
    """Transformers' logits after every token, [tokens, vocab]."""

    def logits(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        with torch.no_grad():
            return np.asarray(llama(torch.tensor([tokens])).logits[0].numpy())

    return logits


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 60, length).tolist()


def opened(target: OpenVinoTarget, tokens: list[int], chunk: int = 512, **options: Any) -> Any:
    session = target.open(tokens, SamplingParams(), **options)
    read_prompt(target, session, chunk)
    return session


def close(here: Any, there: Any) -> None:
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-3)


# Logits and the cache


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_logits_are_those_of_transformers(
    target: OpenVinoTarget, reference: Reference, length: int, chunk: int
) -> None:
    tokens = text(length + 6)
    session = opened(target, tokens[:length], chunk)
    expected = reference(tokens)
    for index in range(length, len(tokens)):
        close(target.step([session], [TokenTree.root(tokens[index - 1])])[0].logits[0], expected[index - 1])
        session.commit(Verdict((0,), (tokens[index],), 0))
    session.close()


def test_trees_chains_and_single_tokens_share_a_forward(target: OpenVinoTarget, reference: Reference) -> None:
    """Every sequence has the logits that it has alone, across the borders of blocks, and after the commit too."""
    texts = [text(length + 12, seed) for seed, length in enumerate((29, 5, 64))]
    sessions = [opened(target, each[:-12]) for each in texts]
    for _ in range(3):
        begins = [len(session.tokens) for session in sessions]
        a, b, c = ([each[begin - 1], *each[begin : begin + 3]] for each, begin in zip(texts, begins, strict=True))
        trees = [
            TokenTree([a[0], 7, a[1], 8, a[2], 9, a[3]], [-1, 0, 0, 2, 2, 4, 4]),
            TokenTree.root(b[0]),
            TokenTree.chain(c[0], [c[1], 11]),
        ]
        found = target.step(sessions, trees)
        expected = [reference(each) for each in texts]
        close(found[0].logits[[0, 2, 4, 6]], expected[0][begins[0] - 1 : begins[0] + 3])
        close(found[1].logits, expected[1][begins[1] - 1 : begins[1]])
        close(found[2].logits[:2], expected[2][begins[2] - 1 : begins[2] + 1])
        sessions[0].commit(Verdict((0, 2, 4), tuple(a[1:4]), 2))
        sessions[1].commit(Verdict((0,), (b[1],), 0))
        sessions[2].commit(Verdict((0, 1), (c[1], c[2]), 1))
    for session in sessions:
        session.close()


def test_a_draft_may_grow(target: OpenVinoTarget, reference: Reference) -> None:
    tokens = text(45)
    session, expected = opened(target, tokens[:40]), reference(tokens)
    target.step([session], [TokenTree.chain(tokens[39], [tokens[40]])])
    grown = target.step([session], [TokenTree.chain(tokens[39], tokens[40:43])], [2])[0]
    close(grown.logits, expected[41:43])
    branched = TokenTree([tokens[39], tokens[40], tokens[41], tokens[42], 3, tokens[43]], [-1, 0, 1, 2, 0, 3])
    rows = target.step([session], [branched], [4])[0]
    assert rows.logits.shape == (2, 60)
    close(rows.logits[1], expected[43])
    session.commit(Verdict((0, 1, 2, 3, 5), tuple(tokens[40:45]), 4))
    close(target.step([session], [TokenTree.root(tokens[44])])[0].logits[0], expected[44])
    session.close()


def test_a_prompt_that_begins_like_another_reads_the_rest(target: OpenVinoTarget, reference: Reference) -> None:
    """Open and closed sequences give their blocks; what the new one writes does not change them."""
    first, second = text(80), [*text(50), *text(30, 1)]
    one = opened(target, first)
    two = target.open(second, SamplingParams())
    assert two.unread == len(second) - 1 - 50
    read_prompt(target, two)
    twin = target.fork(two, SamplingParams())
    close(target.step([one], [TokenTree.root(first[-1])])[0].logits[0], reference(first)[-1])
    close(target.step([two, twin], [TokenTree.root(second[-1])] * 2)[1].logits[0], reference(second)[-1])
    two.commit(Verdict((0,), (5,), 0))
    twin.commit(Verdict((0,), (6,), 0))
    after = target.step([two, twin], [TokenTree.root(5), TokenTree.root(6)])
    close(after[0].logits[0], reference([*second, 5])[-1])
    close(after[1].logits[0], reference([*second, 6])[-1])
    for session in (one, two, twin):
        session.close()
    again = target.open([*second, 5, 9], SamplingParams())
    assert again.unread == 1
    read_prompt(target, again)
    close(target.step([again], [TokenTree.root(9)])[0].logits[0], reference([*second, 5, 9])[-1])
    again.close()


@pytest.mark.parametrize(
    ("plain", "padded", "leaving", "entering", "held"),
    [
        (8.0, 9.6, 13.5, 15.0, 2),  # milliseconds of a small model: changes take longest
        (24.2, 36.7, 28.4, 40.0, 0),  # of a large one: rows do
        (24.2, 30.0, 27.0, 33.5, 1),
        (12.0, 10.0, 13.0, 12.0, 2),  # padding takes no time
        (12.0, 14.0, 11.0, 13.0, 0),  # nor do changes
    ],
)
def test_plain_steps_are_padded_until_that_has_cost_as_much_as_the_changes(
    plain: float, padded: float, leaving: float, entering: float, held: int
) -> None:
    holding = Holding()
    for _ in range(3):
        assert (holding.steps(1, 4), holding.steps(1, 8)) == (2, 1)
        for rows, before, seconds in ((1, 1, plain), (4, 4, padded), (1, 4, leaving), (1, 0, 99.0)):
            holding.observe(rows, before, seconds)
    holding.observe(4, 1, entering)
    holding.observe(4, 4, 200.0)  # one slow forward
    assert holding.steps(1, 4) == held
    assert holding.steps(2, 4) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "held"), [(1, 0), (3, 2), (4, 2), (7, 1), (9, 0)])
def test_plain_steps_after_a_draft_keep_its_rows_for_a_while_where_the_model_is_compiled_once(
    exported: Path, reference: Reference, nodes: int, held: int
) -> None:
    target, tokens = folder.load(exported, OpenVinoOptions(n_threads=1, copies=1)), text(40)
    session = opened(target, tokens[:20])
    rows = []
    for turn in range(8):
        at = len(session.tokens)
        draft = TokenTree.chain(tokens[at - 1], tokens[at : at + nodes - 1] if turn == 0 else [])
        rows.append(target.cost([session], [draft]).rows)
        choices = target.step([session], [draft])[0]
        close(choices.logits[0], reference(tokens)[at - 1])
        session.commit(Verdict((0,), (tokens[at],), 0))
    session.close()
    drafted = -(-nodes // 4) * 4 if nodes > 1 else 1
    assert rows == [drafted, *[drafted] * held, *[1] * (7 - held)]


@pytest.mark.slow
def test_each_copy_computes_steps_of_one_size_over_the_same_cache(exported: Path, reference: Reference) -> None:
    target, tokens = folder.load(exported, OpenVinoOptions(n_threads=1, copies=3)), text(90)
    assert isinstance(target.model, PagedModel)
    assert target.info.prepared == 2
    first, others = target.model._first, {*target.model._others}
    session, used = opened(target, tokens[:20]), list[object]()
    for nodes in (1, 3, 8, 1, 4, 7, 12, 8, 1, 12):
        at = len(session.tokens)
        draft = TokenTree.chain(tokens[at - 1], tokens[at : at + nodes - 1])
        assert target.cost([session], [draft]).rows == (-(-nodes // 4) * 4 if nodes > 1 else 1)
        close(target.step([session], [draft])[0].logits[-1], reference(tokens)[at + nodes - 2])
        session.commit(Verdict((*range(nodes),), (*tokens[at : at + nodes],), 0))
        used.append(first if nodes == 1 else target.model._others[-1])
    session.close()
    four, eight = used[1], used[2]
    assert {four, eight} == others
    # 12 rows take the place of 4, which were used longest ago.
    assert used == [first, four, eight, first, four, eight, four, eight, first, four]
    assert [each.size for each in target.model._others] == [(8, 1), (12, 1)]


def test_captures(target: OpenVinoTarget, llama: Any, reference: Reference) -> None:
    tokens = text(40)
    session = target.open(tokens, SamplingParams(), Capture(top_k=3, hidden=(-1,)))
    given = read_prompt(target, session, 16)
    expected = reference(tokens)
    with torch.no_grad():
        states = llama.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    close(np.concatenate([rows.hidden for rows in given]), states[:39])
    likeliest = np.concatenate([rows.top_k(3)[0] for rows in given])
    assert (likeliest == np.argsort(-expected[:39], axis=1)[:, :3]).all()
    tree = TokenTree.chain(tokens[-1], [1, 2])
    choices = target.step([session], [tree], capture=Capture(hidden=(-1,), top_k=2, logits=True))[0]
    assert choices.hidden.shape == (3, 32)
    close(choices.hidden[0], states[39])
    session.close()
    with pytest.raises(Refused, match="hidden states of layer 1"):
        target.open(tokens, SamplingParams(), Capture(hidden=(1,)))
    again = target.open(tokens, SamplingParams(), Capture(top_k=3))
    assert again.unread == 1  # the rows of the others are kept with the cache
    (rows,) = read_prompt(target, again)
    assert (rows.top_k(3)[0] == likeliest).all()
    again.close()


def test_one_thread_with_amx_is_refused_in_bfloat16(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "uses_amx", lambda: True)
    monkeypatch.setattr(compiled, "_check_able", lambda asked: None)
    with pytest.raises(
        Refused, match="bf16 for one thread on a processor with AMX; use n_threads=2 or precision='f32'"
    ):
        folder.load(exported, OpenVinoOptions(n_threads=1, precision="bf16"))
    folder.load(exported, OpenVinoOptions(n_threads=1, precision="f32"))


def test_a_precision_that_the_processor_lacks_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO takes another one without telling, and the first forward failed."""
    read = ov.CompiledModel.get_property

    def without_f16(model: Any, name: str) -> Any:
        return ov.Type.bf16 if name == "INFERENCE_PRECISION_HINT" else read(model, name)

    monkeypatch.setattr(ov.CompiledModel, "get_property", without_f16)
    monkeypatch.setattr(compiled, "_check_able", lambda asked: None)
    with pytest.raises(Refused, match=r"^precision='f16' is not possible on this processor; use f32 or bf16$"):
        folder.load(exported, OpenVinoOptions(precision="f16"))


def test_a_precision_that_is_no_capability_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without AVX-512: OpenVINO failed while it compiled, and the remedy was wrong."""
    monkeypatch.setattr("openvino.Core.get_property", lambda core, *names: ["FP32", "INT8"])
    with pytest.raises(Refused, match=r"^precision='bf16' is not possible on this processor; use f32$"):
        folder.load(exported, OpenVinoOptions(precision="bf16"))


@pytest.mark.skipif(not HAS_BF16, reason="OpenVINO does not compute with bfloat16 on this processor")
def test_captured_states_of_bfloat16(exported: Path, llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "leapahead.huge_pages")
    target = folder.load(exported, OpenVinoOptions(n_threads=1, precision="bf16"))
    assert ["MiB moved in" in record.getMessage() for record in caplog.records] == [True] * bool(huge_pages.page_size())
    tokens = text(40)
    session = target.open(tokens, SamplingParams(), Capture(hidden=(-1,)))
    given = np.concatenate([rows.hidden for rows in read_prompt(target, session)])
    with torch.no_grad():
        states = llama.model(torch.tensor([tokens])).last_hidden_state[0].numpy()[:39]
    assert given.dtype == np.float32
    assert np.abs(given - states).max() < 0.05 * np.abs(states).max()
    assert not (given.view(np.uint32) & 0xFFFF).any()
    session.close()


def test_what_is_read_once_expires(target: OpenVinoTarget) -> None:
    session = opened(target, text(5))
    before = target.step([session], [TokenTree.root(session.tokens[-1])])[0]
    target.step([session], [TokenTree.root(session.tokens[-1])])
    with pytest.raises(LeapaheadError, match="earlier step are gone"):
        before.logits  # noqa: B018
    session.close()
    session.close()


# The pool


def pool(limit: int = 10_000) -> Pool:
    return Pool([Plane((1, 4, 2), np.float32), Plane((2, 4, 3), np.uint16)], limit)


def written(pool: Pool, track: Any, count: int, path: list[int] | None = None) -> None:
    """What a forward does: it writes each token's number into its place."""
    pool.extend([track], [count])
    for index in range(count):
        at = track.length + index
        for plane in range(2):
            pool.memory(plane)[track.blocks[at // 4], :, at % 4] = 100 + at
    track.pending = count
    pool.keep(track, path or range(count))


def entries(pool: Pool, track: Any) -> list[int]:
    return [int(pool.memory(0)[track.blocks[at // 4], 0, at % 4, 0]) for at in range(track.length)]


def test_an_interrupted_pool_has_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes on with tensors over arrays that are gone."""
    cache = pool()
    before = cache.version

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "range", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        cache.forget()
    assert cache.version != before


def test_the_pool_moves_accepted_entries_and_frees_the_rest() -> None:
    cache = pool()
    track = cache.take(list(range(100)), 0)
    written(cache, track, 6)
    written(cache, track, 7, [0, 3, 6])
    assert entries(cache, track) == [100, 101, 102, 103, 104, 105, 106, 109, 112]
    assert len(track.blocks) == 3
    assert sum(cache.uses) == 3


def test_the_pool_shares_whole_blocks_and_copies_the_last() -> None:
    cache = pool()
    one = cache.take(list(range(30)), 0)
    written(cache, one, 10)
    two = cache.take([*range(9), 77, 78], 10)
    assert two.length == 9
    assert two.blocks[:2] == one.blocks[:2]
    assert two.blocks[2] != one.blocks[2]
    assert entries(cache, two) == entries(cache, one)[:9]
    written(cache, two, 3)
    assert entries(cache, one) == list(range(100, 110))
    cache.release(one)
    cache.release(two)
    cache.release(two)
    assert cache.take(list(range(12)), 11).length == 10
    cache.forget()
    assert len(cache.open) == 1


def test_a_prompt_for_which_memory_ends_takes_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pool()
    source = cache.take(list(range(50)), 0)
    written(cache, source, 50)
    cache._free.clear()
    uses = list(cache.uses)
    monkeypatch.setattr(blocks.np, "zeros", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(LeapaheadError, match="no memory for a KV cache"):
        cache.take([*range(50), 1], 45)
    assert (cache.uses, cache.open) == (uses, [source])


def test_what_an_interrupt_left_in_the_pool_is_reclaimed() -> None:
    cache = pool()
    one = cache.take(list(range(20)), 0)
    written(cache, one, 10)
    lost = cache.take([5] * 20, 0)  # its sequence was never made
    written(cache, lost, 6)
    cache._free.pop()  # and no track has got this block
    cache.reclaim([one])
    assert cache.open == [one]
    assert len(cache._free) == len(cache.uses) - 5
    assert entries(cache, cache.take([5] * 20, 19)) == list(range(100, 106))
    assert entries(cache, one) == list(range(100, 110))


def test_a_session_that_an_interrupt_has_lost_takes_no_room(target: OpenVinoTarget) -> None:
    target.pool.take([1, 2, 3], 0, reserve=target.pool.limit)
    target.open([4, 5], SamplingParams()).close()
    assert not target.pool.open


def test_an_input_that_was_not_set_is_set_the_next_time() -> None:
    class Request:
        interrupts = False

        def set_tensor(self, name: str, tensor: Any) -> None:
            if self.interrupts:
                raise KeyboardInterrupt
            self.tensor = tensor

    request = Request()
    values = paged._Input(request, "input_ids", np.int64)
    values.put([1, 2])
    request.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        values.put([3, 4, 5])
    request.interrupts = False
    values.put([6, 7, 8])
    assert request.tensor.data.tolist() == [6, 7, 8]


def test_the_pool_grows_and_makes_room() -> None:
    cache = pool(limit=200)
    for number in range(40):  # each text is unlike the others, and all together would not fit
        track = cache.take([number] * 30, 0)
        written(cache, track, 29)
        assert entries(cache, track) == list(range(100, 129))
        cache.release(track)
    assert len(cache.uses) * 4 <= 400
    again = cache.take([39] * 30, 29)
    assert again.length == 29
    tracks = [cache.take([50 + number] * 30, 0, reserve=56) for number in range(2)]
    with pytest.raises(CacheFull, match="holds 200 tokens, too few for 4 sequences"):
        cache.take([60] * 30, 0, reserve=100)
    with pytest.raises(CacheFull, match="1 sequence of up to 300"):
        pool(limit=200).take([1] * 300, 0)
    assert len(tracks) == 2


def test_a_forward_that_fails_leaves_the_cache_as_it_was(
    target: OpenVinoTarget, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(20)
    session = opened(target, tokens)

    def broken(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target.model, "forward", broken)
        with pytest.raises(KeyboardInterrupt):
            target.step([session], [TokenTree.chain(tokens[-1], list(range(40)))])
    assert session.track.pending == 0
    close(target.step([session], [TokenTree.root(tokens[-1])])[0].logits[0], reference(tokens)[-1])
    session.close()


# Windows


@pytest.mark.parametrize("window", [pytest.param(each, marks=pytest.mark.slow) for each in (9, 700)])
def test_sliding_windows(window: int, tmp_path: Path) -> None:
    """Chains reach beyond a window, trees do not, since OpenVINO counts it by rows."""
    torch.manual_seed(1)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()
    target = folder.load(saved(model, tmp_path), OpenVinoOptions(n_threads=1))
    assert ("tree" in target.info.capabilities) == (window > 512)
    tokens = text(window + 60)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    session = opened(target, tokens[:-20])
    close(target.step([session], [TokenTree.chain(tokens[-21], tokens[-20:-1])])[0].logits, expected[-21:-1])
    if window > 512:
        assert target.max_leaves == 1
        with pytest.raises(BadParameter, match="has a sliding window of 700 tokens"):
            target.step([session], [TokenTree([1, 2, 3], [-1, 0, 0])])
        session.close()
        session = opened(target, tokens[:100])
        assert target.max_leaves > 1
        tree = TokenTree([tokens[99], 3, tokens[100], tokens[101]], [-1, 0, 0, 2])
        close(target.step([session], [tree])[0].logits[[0, 2, 3]], expected[99:102])
    session.close()


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, (8, 8, 8, 8)),
        ({"use_sliding_window": False}, None),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 8)),
        ({"sliding_window_pattern": 2}, (8, 0, 8, 0)),
        ({"sliding_window_pattern": "LLG"}, (8, 8, 0, 8)),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, (0, 8, 0, 8)),
    ],
)
def test_windows_of_older_configurations(
    values: dict[str, Any], windows: tuple[int, ...] | None, tmp_path: Path
) -> None:
    config = {"sliding_window": 8, "num_hidden_layers": 4, "max_position_embeddings": 64, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder.describe(tmp_path).windows == windows


@pytest.mark.slow
def test_a_window_that_only_the_graph_tells_rules_out_trees(tmp_path: Path) -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=700)).eval()
    place = saved(model, tmp_path)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({name: config[name] for name in config if name != "sliding_window"}))
    assert "tree" not in folder.load(place, OpenVinoOptions(n_threads=1)).info.capabilities


@pytest.mark.slow
def test_the_graph_tells_which_layers_have_a_window(tmp_path: Path) -> None:
    """Hub configurations leave out what is the default of their class, as the layers of Gemma 3."""
    torch.manual_seed(1)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "head_dim": 8}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **kinds)).eval()
    place = saved(model, tmp_path)
    config = json.loads((place / "config.json").read_text())
    left_out = ("layer_types", "_sliding_window_pattern", "max_position_embeddings")
    (place / "config.json").write_text(json.dumps({name: config[name] for name in config if name not in left_out}))
    target = folder.load(place, OpenVinoOptions(n_threads=1))
    assert target.info.context_length == SIZES["max_position_embeddings"]
    tokens = text(60)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    session = opened(target, tokens)
    close(target.step([session], [TokenTree.root(tokens[-1])])[0].logits, expected[-1:])
    session.close()


# Exact mode


@pytest.fixture(scope="module")
def half(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, wide enough that a change of the order of sums changes bits."""
    place = tmp_path_factory.mktemp("half")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LlamaConfig(**{**SIZES, "hidden_size": 128, "intermediate_size": 320, "vocab_size": 120})
        LlamaForCausalLM(config).save_pretrained(place / "model")
    return export(place / "model", place / "exported", "bf16").path


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_exact_mode_gives_the_same_bits(half: Path, batch: int) -> None:
    target = folder.load(half, OpenVinoOptions(n_threads=1), exact=True)
    assert target.info.exact
    assert target.max_leaves == 1
    for seed in range(3):
        assert differing(target, prompts_of([5, 31, 40, 100]), batch, seed) == 0
    with pytest.raises(BadParameter, match="takes chains only"):
        target.step([opened(target, [1, 2])], [TokenTree([2, 3, 4], [-1, 0, 0])])


@pytest.mark.slow
def test_mutation_single_tokens_that_are_not_padded(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenVinoTarget, "_padded", lambda self, part: part)
    with pytest.raises(Refused, match="not those of plain decoding bit for bit"):
        folder.load(half, OpenVinoOptions(n_threads=1), exact=True)


# Loading


def test_an_llm_of_a_folder(exported: Path, llama: Any) -> None:
    theirs = LLM(llama, drafter="plain")
    with LLM(str(exported), n_threads=1) as ours:
        for options in ({}, {"temperature": 1.0, "seed": 3}, {"top_p": 0.8, "temperature": 0.7, "seed": 1}):
            prompts = [text(9, seed) for seed in range(3)]
            for drafter in ("auto", "lookahead", "recycling"):
                found = ours.generate(prompts, max_new_tokens=60, drafter=drafter, **options)
                expected = theirs.generate(prompts, max_new_tokens=60, **options)
                assert [each.tokens for each in found] == [each.tokens for each in expected]
        with pytest.raises(ContextOverflow):
            ours.generate(text(2000))
    assert loading.engine_of(str(exported)) == "openvino"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 512}, "n_ctx=512 can be set for a GGUF file only"),
        ({"precision": "f8"}, "precision='f8' is not possible"),
        ({"cache_type": "q8_0"}, "cache_type='q8_0' is not possible"),
        ({"n_threads": 0}, "n_threads=0 is not possible"),
        ({"weights": "int8"}, "is exported already"),
        ({"dtype": "float32"}, "dtype='float32' is not possible with OpenVINO"),
        ({"device": "cuda"}, "device='cuda' is not possible with OpenVINO"),
        ({"engine": "llama.cpp"}, "engine='llama.cpp' cannot compute"),
        ({"engine": "wobble"}, "engine='wobble' is not possible"),
        ({"cache_tokens": 1}, "cache_tokens=1 is not possible"),
        ({"copies": 0}, "copies=0 is not possible"),
    ],
)
def test_what_is_impossible_is_refused_by_name(exported: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        LLM(str(exported), **options)


def test_a_type_of_the_cache_that_cannot_be_compiled_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> None:
        raise RuntimeError("expect kvcache type f16, current: f32")

    monkeypatch.setattr("openvino.Core.compile_model", failing)
    with pytest.raises(LeapaheadError, match="current: f32; leave out cache_type='bf16', so that"):
        LLM(str(exported), precision="f32", cache_type="bf16")
    with pytest.raises(LeapaheadError, match="current: f32; export it as f32"):
        LLM(str(exported), precision="f32")


def test_broken_folders(exported: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"

    def copy() -> Path:
        shutil.rmtree(broken, ignore_errors=True)
        return Path(shutil.copytree(exported, broken))

    def refused(message: str) -> None:
        with pytest.raises(LeapaheadError, match=message) as found:
            LLM(str(broken))
        assert "\n" not in str(found.value)

    (copy() / "openvino_model.xml").write_text("<net>")
    refused("cannot be read")
    (copy() / "openvino_model.bin").unlink()
    refused("cannot be read")
    file = copy() / "openvino_model.bin"
    file.write_bytes(file.read_bytes()[:1000])
    refused("cannot be read")
    (copy() / "config.json").write_text("{")
    refused("config.json' cannot be read")
    (copy() / "config.json").write_text("[]")
    refused("is not a configuration")
    config = json.loads((exported / "config.json").read_text())
    kinds = {**config, "layer_types": ["linear_attention", "full_attention"]}
    (copy() / "config.json").write_text(json.dumps(kinds))
    assert not LLM(str(broken)).target.model.trees  # paged attention is not tried; its states grow, so it is decoded
    window = {**config, "layer_types": ["sliding_attention"] * 3, "sliding_window": 8}
    (copy() / "config.json").write_text(json.dumps(window))
    refused("has 2 attention layers and its config.json describes 3")
    (copy() / "config.json").write_text("{}")
    assert LLM(str(broken)).target.info.context_length == SIZES["max_position_embeddings"]  # the graph tells it
    (broken / "config.json").write_text(json.dumps({**config, "max_position_embeddings": -1}))
    refused("a context of -1 tokens in .*config.json' is not possible; correct it")
    (broken / "config.json").unlink()
    refused("has no config.json, which tells context, windows and end tokens; export the model again, or copy it")


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": LONGROPE},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default"}, "full_attention": LONGROPE}},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64},
        {"text_config": {"max_position_embeddings": 256, "rope_parameters": LONGROPE}},
    ],
)
def test_longrope_ends_the_context(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, **values}))
    assert folder.describe(tmp_path).context_length == 64


def test_yarn_lengthens_the_context_where_the_graph_is_sure_to_have_its_factor(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for name, length in (("rope_parameters", 1024), ("rope_scaling", 256)):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256, name: scaling}))
        assert folder.describe(tmp_path).context_length == length


def test_a_full_cache_delays_or_refuses(exported: Path) -> None:
    with LLM(str(exported), n_threads=1, cache_tokens=150) as llm:
        prompts = [text(40, seed) for seed in range(4)]
        together = llm.generate(prompts, max_new_tokens=30)
        assert [each.tokens for each in together] == [llm.generate(p, max_new_tokens=30).tokens for p in prompts]
        assert llm.engine.preemption.count > 0
        with pytest.raises(LeapaheadError, match="the cache holds 150 tokens"):
            llm.generate(text(200), max_new_tokens=1)


def test_a_tiny_cache_refuses_prompts_and_not_the_model(exported: Path) -> None:
    with LLM(str(exported), n_threads=1, cache_tokens=2) as llm:
        assert len(llm.generate(text(8), max_new_tokens=9).tokens) == 9
        with pytest.raises(LeapaheadError, match=r"the cache holds 32 tokens.*or load the model with larger cache_tok"):
            llm.generate(text(60), max_new_tokens=1)


@pytest.mark.slow
def test_the_weights_digest_tells_models_apart(exported: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = saved(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), tmp_path)
    digests = {folder.load(each, OpenVinoOptions(n_threads=1)).weights_digest() for each in (exported, other)}
    assert len(digests) == 2
    assert "" not in digests


def test_greedy_is_greedy(target: OpenVinoTarget, reference: Reference) -> None:
    session = opened(target, text(9))
    choice = target.step([session], [TokenTree.root(session.tokens[-1])])[0][0]
    assert choice == int(reference(text(9))[-1].argmax())
    assert session.sampler.params == GREEDY
    session.close()


def test_a_forked_child_is_refused(exported: Path) -> None:
    """It does not have the threads in which OpenVINO computes, and waited for them for ever."""
    llm = LLM(str(exported), n_threads=1)
    llm.engine._turn.forked()  # as `forks` does in a child
    for call in (lambda: llm.generate(text(8), max_new_tokens=4), llm.close):
        with pytest.raises(LeapaheadError, match=r"forked while its model had threads .*; make one in each process"):
            call()


def test_a_model_is_freed_with_its_llm(exported: Path) -> None:
    def used() -> LLM:
        llm = LLM(str(exported), n_threads=1)
        llm.generate(text(8), max_new_tokens=4)
        return llm

    assert is_freed(used, "target.model")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there OpenVINO sets stacks for signal handlers")
@pytest.mark.parametrize("freed", ["by another thread", "in the order of creation"])
def test_an_interrupt_after_a_model_was_freed(exported: Path, freed: str) -> None:
    """It ended the process with a segmentation fault; see `runtime`."""
    code = f"""
        import gc, signal, threading
        from pathlib import Path
        from leapahead.models.openvino import folder
        from leapahead.models.openvino.options import OpenVinoOptions
        models = [folder.load(Path({str(exported)!r}), OpenVinoOptions(n_threads=1)) for _ in range(3)]
        def free():
            while models:
                models.pop(0)
                gc.collect()
        if {freed == "by another thread"}:
            thread = threading.Thread(target=free)
            thread.start()
            thread.join()
        else:
            free()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["interrupted"]), done.stderr
