"""Exact mode with captured forwards: the same bits with every draft, batch and schedule, by forwards of two shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from static_parts import recorded
from test_exact import SMALL, WIDE, assert_samples_are_those_of_each_alone, differing, exact, prompts_of, texts

from leapahead import Engine, Request
from leapahead.check import check
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.drafters.plain import Plain
from leapahead.models.transformers import compacted, packed
from leapahead.models.transformers.exact import CHUNK
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static import exact as captured_exact
from leapahead.models.transformers.static.exact import STEP_ROWS, TOGETHER, CapturedExactExecutor
from leapahead.models.transformers.static.graphs import Calls

FAMILIES = ("llama", "gemma3", "mistral", "gemma2", "qwen2", "phi3")
LONG: dict[str, Any] = {**SMALL, "max_position_embeddings": 1024}


def captured(name: str, dtype: torch.dtype = torch.bfloat16, backend: Any = None, **options: Any) -> TransformersTarget:
    target = exact(name, dtype, backend or recorded(), **options)
    assert isinstance(target.executor, CapturedExactExecutor)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_drafts_and_batches(name: str) -> None:
    """Windows and soft-capped scores among them; texts pass the borders of chunks, of the window, and of blocks."""
    target = captured(name, **LONG)
    assert target.info.exact
    assert differing(target, prompts_of((5, 60, 118)), batch=3) == 0
    sampled = SamplingParams(temperature=0.8, seed=3)
    assert differing(target, prompts_of((60, 245)), batch=2, new=16, params=sampled) == 0


@pytest.mark.slow
def test_bits_where_the_cache_grows_by_a_block() -> None:
    target = captured("llama", torch.bfloat16, Calls(), **{**SMALL, "max_position_embeddings": 2048})
    assert differing(target, prompts_of((compacted.BLOCK - 14,)), new=30) == 0
    assert target.executor.cache.capacity > compacted.BLOCK  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_long_texts(name: str, dtype: torch.dtype) -> None:
    target = captured(name, dtype, Calls(), **WIDE)
    for lengths in ((10, 70, 124, 300), (1200, 240, 63, 64)):
        for params in (SamplingParams(), SamplingParams(temperature=0.8, seed=3)):
            assert differing(target, prompts_of(lengths, 512), batch=4, new=60, params=params) == 0


@pytest.mark.slow
def test_more_sequences_than_share_a_forward_have_the_bits_of_each_alone() -> None:
    target = captured("llama", backend=Calls(), **LONG)
    assert differing(target, prompts_of((5, 60, 9, 70, 33, 12, 128)), batch=7, new=12) == 0


@pytest.mark.slow
def test_forwards_are_recorded_once_and_repeated() -> None:
    target = captured("llama", **LONG)
    executor: Any = target.executor
    texts(target, Plain, prompts_of((20,)))
    shapes = {(shape.batch, shape.rows) for shape in executor.graphs._kept}
    assert shapes == {(TOGETHER, STEP_ROWS), (1, executor.chunk)}
    before = list(executor.graphs._kept.values())
    target.forget()
    texts(target, Plain, prompts_of((30, 20)))
    assert list(executor.graphs._kept.values())[: len(before)] == before


@pytest.mark.slow
def test_samples_of_one_prompt_have_the_bits_of_each_alone() -> None:
    assert_samples_are_those_of_each_alone(captured("llama", **LONG), prompts_of((70,))[0])


@pytest.mark.slow
def test_bits_do_not_depend_on_the_chunks_that_the_scheduler_wants() -> None:
    target = captured("llama", backend=Calls(), **LONG)
    prompts = prompts_of((100, 70))
    whole = texts(target, Plain, prompts[:1])
    target.forget()
    assert texts(target, Plain, prompts, batch=2, prefill_chunk=7)[:1] == whole


@pytest.mark.slow
def test_entries_of_a_text_are_not_taken_over_as_those_of_a_prompt() -> None:
    """Those of steps come from forwards of another shape."""
    target = captured("llama", backend=Calls(), **LONG)
    (first,) = prompts_of((100,))
    longer = [*first, *texts(target, Plain, [first], new=60)[0][0], 5, 6, 7]
    engine = Engine(target)
    handle = engine.submit(Request(longer, engine.drafter(Plain), stop=StopParams(max_new_tokens=1)))
    engine.run([handle])
    assert handle.stats.reused_tokens == CHUNK  # a whole chunk of the first prompt, and nothing of its text


@pytest.mark.slow
def test_trees_are_limited_to_the_rows_of_a_step() -> None:
    target = captured("llama", **LONG)
    assert target.max_nodes == STEP_ROWS
    session = target.open([1, 2], SamplingParams())
    target.prefill(session, 8)
    with pytest.raises(BadParameter, match="a tree of 17 nodes is more than the 16 rows"):
        target.step([session], [TokenTree.chain(2, range(3, 19))])


@pytest.mark.slow
def test_check_finds_no_difference() -> None:
    target = captured("llama", **LONG)
    report = check(target, None, prompts_of((20, 70, 40)), ["lookahead", "auto"], max_new_tokens=40, batch=3)
    assert report.ok
    assert not any(row.differences for row in report.drafters)


@pytest.mark.parametrize(
    ("name", "static", "why"),
    [
        ("mixtral", None, "its experts are computed by the number of tokens"),
        ("llama", "compiled", "those of exact mode are not compiled"),
        ("llama", "graphs", "CUDA graphs need a CUDA device, and the model is on cpu"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(name: str, static: Any, why: str) -> None:
    with pytest.raises(Refused, match=f"the forwards of {name} cannot be captured .*{why}.*; leave out static"):
        exact(name, static=static or Calls(), **SMALL)


@pytest.mark.slow
def test_mutation_attention_over_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed attention adds up in the order of slots, in which the entries of rejected nodes lie as zeros."""
    monkeypatch.setattr(captured_exact.compacted, "NAME", packed.NAME)
    with pytest.raises(Refused, match="are not those of plain decoding bit for bit"):
        captured("llama", torch.float32, **LONG)


@pytest.mark.slow
def test_mutation_rows_that_are_not_padded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CapturedExactExecutor._forward

    def unpadded(self: Any, drafts: Any, size: int, *args: Any, **options: Any) -> Any:
        return [whole(self, [draft], max(1, draft.new), *args, **options)[0] for draft in drafts]

    monkeypatch.setattr(CapturedExactExecutor, "_forward", unpadded)
    monkeypatch.setattr(captured_exact.gate, "compare", lambda *_: None)  # which needs forwards of one shape
    with pytest.raises(Refused, match="are not those of plain decoding bit for bit"):
        captured("llama", torch.float32, **LONG)


@pytest.mark.slow
def test_a_cache_of_any_limit_has_whole_blocks() -> None:
    target = captured("llama", backend=Calls(), **LONG)
    target.executor.cache.limit = 300  # type: ignore[attr-defined]
    target.forget()
    assert differing(target, prompts_of((200,)), new=40) == 0
    assert target.executor.cache.capacity % compacted.BLOCK == 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_bits_where_rows_give_way_to_slots() -> None:
    """The second text takes another block, for which the limit leaves fewer rows than share a forward."""
    target = captured("llama", backend=Calls(), **{**SMALL, "max_position_embeddings": 2048})
    cache: Any = target.executor.cache  # type: ignore[attr-defined]
    cache.limit = 8 * compacted.BLOCK
    target.forget()
    assert differing(target, prompts_of((5,) * 5), batch=5, new=4) == 0
    assert len(cache.rows) == 8
    assert differing(target, prompts_of((950,)), new=90) == 0
    assert cache.capacity == 2 * compacted.BLOCK


def test_a_cache_that_cannot_double_has_whole_blocks() -> None:
    cache = captured_exact.CompactedCache()
    for rows in (2, 3, 5):
        cache._make_room(rows, 0)
    assert (len(cache.rows), cache.capacity) == (8, compacted.BLOCK)
    cache.limit = 8 * (3 * compacted.BLOCK + 300)
    cache._make_room(8, 2 * compacted.BLOCK + 1)
    assert (len(cache.rows), cache.capacity) == (8, 3 * compacted.BLOCK)
