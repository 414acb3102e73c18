"""The state of recurrent layers is broken on purpose, one way at a time: the target's own test or a text must show it.

And models whose own forward of several tokens is wrong must not get chains, in any precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME
from helpers import NoisyChain, Oracle, attached

from leapahead import Engine, Request
from leapahead.core.stop import StopParams
from leapahead.models.base import CHAIN
from leapahead.models.transformers import families, selftest, statetest
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.recurrent import NativeExecutor
from leapahead.models.transformers.replay import ReplayExecutor
from leapahead.models.transformers.states import StatefulCache, StatefulRow, States, stateful_cache

PROMPTS = ([5, 6, 7, 8], [*range(3, 15)])
STOP = StopParams(max_new_tokens=40)
FAMILIES = ["qwen3_next", "granitemoehybrid", "rwkv", "lfm2", "kimi_linear"]
FAST = ("qwen3_next",)
SOME = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]


@cache
def target_of(name: str) -> TransformersTarget:
    return TransformersTarget(BY_NAME[name].build())


def texts(target: TransformersTarget, kind: Callable[[Sequence[int], int], Any], known: Sequence[list[int]]) -> Any:
    """The texts of both prompts decoded together, then of the second prompt again; with nothing kept from before."""
    target.forget()
    engine, found = Engine(target), []
    for some in ((0, 1), (1,)):
        handles = [engine.submit(Request(PROMPTS[i], attached(engine, kind(known[i], i)), stop=STOP)) for i in some]
        engine.run(handles)
        found += [[*PROMPTS[i], *handle.tokens] for i, handle in zip(some, handles, strict=True)]
    return found


@cache
def plain_texts(name: str) -> list[list[int]]:
    return texts(target_of(name), lambda text, seed: None, [[], []])[:2]  # type: ignore[no-any-return]


def differs(name: str, kind: Callable[[Sequence[int], int], Any]) -> bool:
    """Whether a drafted text is not plain decoding's, or the cache itself objects."""
    target, right = target_of(name), plain_texts(name)
    try:
        return bool(texts(target, kind, right) != [*right, right[1]])
    except AssertionError:
        return True


def uneven(text: Sequence[int], seed: int) -> Oracle:
    """Always right, so that nothing but fill tokens is dropped: the chains of the two sequences differ in length."""
    return Oracle(text, depth=4 - 2 * seed)


# ----------------------------------------------------------------------------------------------------------- mutations


def not_restored(self: StatefulCache, row: StatefulRow, count: int) -> None:
    """After a rejection the states stay those after the whole draft."""
    assert row.states is not None or row.length == 0
    row.states = States(row.length, row.pending_states)
    self.discard(row)
    row.replay += count


def fill_kept(self: StatefulCache, row: StatefulRow, count: int) -> None:
    """Whatever follows the committed tokens in the forward, rejected or filled up, stays in the states."""
    row.length += row.replay + count
    row.states, row.replay = States(row.length, row.pending_states), 0
    self.discard(row)


def one_missing(self: StatefulCache, row: StatefulRow, count: int) -> None:
    """The states are thought to have read one more token than they have."""
    self.discard(row)
    row.length, row.replay = row.length + 1, row.replay + count - 1
    if row.states is not None:
        row.states = States(row.length, row.states.tensors)


def shared(self: StatefulCache, place: Any) -> Any:
    """A model writes into the very states that are kept, if it writes in place."""
    if place not in self._working and self._given and place in self._given[0]:
        given = [each[place] for each in self._given]
        self._working[place] = given[0] if len(given) == 1 else torch.cat(given)
    return self._working.get(place)


MUTATIONS: dict[str, tuple[str, Any, Any]] = {  # the method, what it becomes, the drafter that shows it
    "states not restored": ("lag", not_restored, NoisyChain),
    "replay off by one": ("lag", one_missing, NoisyChain),
    "fill tokens kept": ("lag", fill_kept, uneven),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", SOME)
def test_a_broken_state_is_caught_by_texts_and_by_the_test_of_the_model(
    name: str, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, broken, kind = MUTATIONS[mutation]
    model = BY_NAME[name].build()
    right = plain_texts(name)
    assert not differs(name, kind)
    monkeypatch.setattr(StatefulCache, method, broken)
    assert texts(target_of(name), lambda text, seed: None, [[], []])[:2] == right, "plain decoding does not show it"
    if kind is not uneven or target_of(name).info.padded:  # one sequence a forward is never filled up
        assert differs(name, kind)
    assert CHAIN not in TransformersTarget(model).info.capabilities


def first_branch(self: StatefulCache, row: StatefulRow, count: int, branch: int | None = None) -> None:
    """The states after one branch are taken for those after another."""
    settle(self, row, count, None if branch is None else 0)


def without_branches(self: StatefulCache) -> None:
    """The states after all branches are those after the first."""
    end(self)
    for row in self.rows:
        row.branches = row.branches and [row.branches[0]] * len(row.branches)


settle, end = StatefulCache.settle, StatefulCache.end


@pytest.mark.slow
@pytest.mark.parametrize(("method", "broken"), [("settle", first_branch), ("end", without_branches)])
@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid"])
def test_a_state_of_another_branch_is_caught_by_the_test_of_branches(
    name: str, method: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(name)
    native = NativeExecutor(target.model, target.config, shared=False)

    @torch.no_grad()
    def passes() -> bool:
        ids = target.ordinary_ids()
        own = selftest.OwnOutputs(target.model)
        return selftest.run(target.executor, own, ids, (16,), native=native, branches=True).passed

    assert passes()
    monkeypatch.setattr(StatefulCache, method, broken)
    assert not passes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "mamba2"])
def test_a_state_that_is_written_while_it_is_kept_is_caught_by_the_next_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states after a prompt serve the same prompt again; single tokens are read by kernels that write in place."""
    target, right = target_of(name), plain_texts(name)[1]

    def again() -> list[list[int]]:
        target.forget()
        engine, found = Engine(target), []
        for _ in range(3):
            handle = engine.submit(Request(PROMPTS[1], engine.drafter("plain"), stop=STOP))
            engine.run([handle])
            found.append([*PROMPTS[1], *handle.tokens])
        assert handle.stats.reused_tokens == len(PROMPTS[1]) - 1
        return found

    assert again() == [right] * 3
    monkeypatch.setattr(StatefulCache, "get", shared)
    found = again()
    assert found[0] == right, "the first text does not show it"
    assert found != [right] * 3


# ------------------------------------------------------------------- models whose forward of several tokens is another

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMPTY_START = ("zamba", "mamba", "falcon_mamba", "jamba")  # Mamba-1: they ignore the state in a forward of several
REPLAYING = [each.name for each in ARCHITECTURES if each.expect == "replay"]
SEEDS = range(5)
# Their own code, or what is left of it without kept float32 modules, needs float32.
FLOAT32 = ("xlstm", "inkling2", "inkling2_loop")


def state_distance(name: str, dtype: torch.dtype, seed: int) -> float:
    """As `statetest.check` finds it."""
    model = BY_NAME[name].build(dtype, seed=seed)
    patterns = families.patterns(families.text_config(model), recurrent=True)
    assert patterns is not None
    executor = ReplayExecutor(model, stateful_cache(model), patterns, masked=target_of(name).info.padded)
    with torch.no_grad():
        return min(statetest.distance(executor, target_of(name).ordinary_ids(), draw) for draw in range(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMPTY_START)
@pytest.mark.slow
def test_a_forward_that_begins_with_an_empty_state_is_found_with_margin(name: str, dtype: str) -> None:
    """By the states, where the logits of some weights show less than rounding."""
    for seed in SEEDS:
        assert CHAIN not in TransformersTarget(BY_NAME[name].build(DTYPES[dtype], seed=seed)).info.capabilities
        assert state_distance(name, DTYPES[dtype], seed) > 2.5 * statetest.CEILING


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REPLAYING)
def test_right_states_are_far_from_the_limit(name: str, dtype: str) -> None:
    if name in FLOAT32 and dtype != "float32":
        pytest.skip("the tiny model does not run in half precision")
    for seed in SEEDS:
        assert state_distance(name, DTYPES[dtype], seed) < (1e-5 if dtype == "float32" else statetest.CEILING / 5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in ("nemotron_h", "zamba2") for dtype in DTYPES])
def test_time_steps_that_are_bounded_in_forwards_of_several_tokens_only(name: str, dtype: str) -> None:
    """Such models decode plainly, even where rounding hides the difference; without the bound they take chains."""
    model = BY_NAME[name].build(DTYPES[dtype])
    target = TransformersTarget(model)
    assert CHAIN not in target.info.capabilities
    assert "bounds its time steps" in target.refusals["chains with replay"]
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    assert TransformersTarget(model).info.replays
