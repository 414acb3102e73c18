"""In which shapes captured forwards of batches run: few are captured, and the others run in larger ones."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import BY_NAME
from helpers import GREEDY, PROMPT, RandomTrees, Scattered, run
from static_parts import recorded

from leapahead import Engine, Request, StopParams
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import verify
from leapahead.drafters.base import PerSequence
from leapahead.models.base import read_prompt
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.executor import PATIENCE, StaticExecutor
from leapahead.models.transformers.static.graphs import Calls, Graphs
from leapahead.models.transformers.static.shapes import ROWS, Shape
from leapahead.models.warm_up import WarmsUp

NEW = (9, 14, 22, 17, 30)  # tokens of the texts of a batch


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Of the forwards that were run, in their order."""
    found: list[Shape] = []
    whole = Graphs.run

    def noted(self: Graphs, key: Any, forward: Any) -> None:
        found.append(key)
        whole(self, key, forward)

    monkeypatch.setattr(Graphs, "run", noted)
    return found


def made(patience: int | None = None) -> tuple[TransformersTarget, StaticExecutor]:
    target = TransformersTarget(BY_NAME["llama"].build(), static=recorded())
    executor = target.executor
    assert isinstance(executor, StaticExecutor)
    assert executor.patience == PATIENCE
    executor.patience = PATIENCE if patience is None else patience
    return target, executor


def texts(target: TransformersTarget, number: int = 5) -> list[list[int]]:
    """Of sequences that draft trees of all sizes, and end one after another."""
    engine = Engine(target, max_batch=number)
    handles = []
    for at in range(number):
        params = SamplingParams(temperature=0.9, seed=at) if at % 2 else GREEDY
        drafter = engine.drafter(PerSequence(lambda at=at: RandomTrees(seed=at, nodes=1 + 2 * at)))  # type: ignore[misc]
        handles.append(engine.submit(Request(list(PROMPT), drafter, params, StopParams(max_new_tokens=NEW[at]))))
    engine.run(handles)
    return [handle.tokens for handle in handles]


@pytest.mark.slow
def test_a_batch_captures_few_shapes_and_has_the_same_texts(shapes: list[Shape]) -> None:
    usual = TransformersTarget(BY_NAME["llama"].build())
    expected = texts(usual)
    found = {}
    for patience in (0, PATIENCE):
        target, executor = made(patience)
        texts(target)  # the cache grows to so many rows, which drops captures
        shapes.clear()
        assert texts(target) == expected
        found[patience] = {shape for shape in shapes if shape.batch > 1}
        assert len(executor.graphs) >= len(found[patience])
    assert len(found[PATIENCE]) < len(found[0])
    assert any(shape.batch == 8 for shape in found[PATIENCE])


def test_a_shape_is_captured_when_it_was_asked_for_often(shapes: list[Shape]) -> None:
    target, executor = made(patience=3)
    sessions = [target.open(PROMPT, GREEDY) for _ in range(2)]
    for session in sessions:
        read_prompt(target, session)

    def step(rows: int) -> tuple[Shape, bool]:
        trees = [TokenTree.chain(session.tokens[-1], [5] * (rows - 1)) for session in sessions]
        cost = target.cost(sessions, trees)
        choices = target.step(sessions, trees)
        for session, tree, each in zip(sessions, trees, choices, strict=True):
            session.commit(verify(tree, each))
        assert cost.rows == (2 * shapes[-1].rows if rows > 1 else 2)
        return shapes[-1], choices[0].prepares

    seen = [step(5) for _ in range(5)]
    assert [(shape.batch, shape.rows) for shape, _ in seen] == [(2, 64)] * 3 + [(2, 8)] * 2
    assert [prepares for _, prepares in seen] == [True, False, False, True, False]  # captured, used, used, captured
    seen = [step(1) for _ in range(5)]  # in the smaller one of these; such a step teaches nothing about plain ones
    assert [(shape.batch, shape.rows) for shape, _ in seen] == [(2, 8)] * 3 + [(2, 1)] * 2
    assert [prepares for _, prepares in seen] == [True, True, True, True, False]
    executor.patience = 8  # two for a larger one with many rows
    executor.graphs.drop(next(shape for shape in shapes if shape.rows == 64))
    executor._asked.clear()
    assert [step(60)[0].rows for _ in range(4)] == [128, 128, 64, 64]


@pytest.mark.slow
def test_one_sequence_alone_runs_in_its_own_shapes(shapes: list[Shape]) -> None:
    target, _ = made()
    shapes.clear()  # of the test of the model
    plain = run(target, prompt=PROMPT).tokens
    assert run(target, Scattered([*PROMPT, *plain]), PROMPT).tokens == plain
    assert {shape.batch for shape in shapes} == {1}
    assert {shape.rows for shape in shapes} >= {1, 16}


@pytest.mark.slow
def test_a_forward_does_not_run_in_a_shape_that_reads_too_few_slots(
    shapes: list[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, executor = made()
    monkeypatch.setattr(type(executor.cache), "first_capacity", 16)
    target.executor.forget()
    usual = TransformersTarget(BY_NAME["llama"].build())
    assert texts(target) == texts(usual)
    assert len({shape.end for shape in shapes}) > 1
    shapes.clear()
    assert texts(target) == texts(usual)
    assert len({shape.end for shape in shapes}) > 1  # the storage stays; shorter texts read a part of it


@pytest.mark.slow
def test_drafts_that_grow_run_in_shapes_that_hold_what_was_computed(shapes: list[Shape]) -> None:
    """Of a captured shape all slots that nodes may have are known; those of computed nodes come on top."""
    target, _ = made()
    sessions = [target.open(PROMPT, GREEDY) for _ in range(2)]
    for session in sessions:
        read_prompt(target, session)
    usual = TransformersTarget(BY_NAME["llama"].build())
    alone = usual.open(PROMPT, GREEDY)
    read_prompt(usual, alone)
    first, whole = (TokenTree.chain(PROMPT[-1], list(range(3, 3 + count))) for count in (4, 7))
    target.step(sessions, [first, first])
    mine = target.step(sessions, [whole, whole], [5, 5])
    theirs = usual.step([alone], [whole])[0]
    assert [int(each) for each in mine[0].logits.argmax(-1)] == [int(each) for each in theirs.logits.argmax(-1)][5:]
    assert all(shape.own - shape.rows >= 5 for shape in shapes[-1:])


@pytest.mark.slow
def test_a_target_that_is_warm_captures_nothing_when_plain_texts_begin(shapes: list[Shape]) -> None:
    target, executor = made()
    assert isinstance(target, WarmsUp)
    target.warm_up(5)
    captured = {(shape.batch, shape.rows) for shape in executor.graphs if isinstance(shape, Shape)}
    assert captured >= {(1, rows) for rows in ROWS} | {(8, 1), (8, 16), (4, 1), (4, 32), (2, 1), (2, 64)}
    assert not any(row.busy for row in executor.cache.rows)
    assert executor.patience == PATIENCE
    before = list(executor.graphs)
    usual = TransformersTarget(BY_NAME["llama"].build())
    assert texts(target) == texts(usual)
    assert list(executor.graphs) == before or set(executor.graphs) == set(before)


@pytest.mark.slow
def test_warming_up_ends_where_the_cache_is_full_or_nothing_is_captured() -> None:
    target, executor = made()
    executor.cache.limit = 2048
    target.warm_up(64)
    assert not any(row.busy for row in executor.cache.rows)
    assert run(target, prompt=PROMPT).tokens == run(TransformersTarget(BY_NAME["llama"].build()), prompt=PROMPT).tokens
    called = TransformersTarget(BY_NAME["llama"].build(), static=Calls())
    called.warm_up(4)
    assert not len(called.executor.graphs)  # type: ignore[attr-defined]
    TransformersTarget(BY_NAME["llama"].build()).warm_up(4)
