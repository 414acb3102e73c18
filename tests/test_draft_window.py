"""A draft model that sees the first tokens of a text and a window of the newest ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from helpers import GREEDY, assert_same_text, run

from leapahead import Engine, Request
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.draft_runner import SINKS, DraftRunner
from leapahead.drafters.speculative_sampling import SpeculativeSampling
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.model import TransformersTarget

WARM = SamplingParams(temperature=1.0, seed=3)
WINDOW = 40


class Seen(ToyTarget):
    """Records the texts that its sessions begin with, and the greatest length of one in a forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.begun: list[list[int]] = []
        self.longest = 0

    def open(self, tokens: Sequence[int], *given: Any, **options: Any) -> Any:
        self.begun.append(list(tokens))
        return super().open(tokens, *given, **options)

    def step(self, sessions: Sequence[Any], *given: Any, **options: Any) -> Any:
        self.longest = max(self.longest, *(len(session.tokens) for session in sessions))
        return super().step(sessions, *given, **options)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 12, length).tolist()


def chain(draft: Any, window: int = WINDOW) -> DraftModelDrafter:
    return DraftModelDrafter(draft, nodes=3, depth=3, chain=True, draft_window=window)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [5, SINKS + WINDOW - 1, SINKS + WINDOW, 300])
def test_a_model_that_reads_a_few_tokens_back_drafts_as_without_a_window(params: SamplingParams, length: int) -> None:
    stop = StopParams(max_new_tokens=120)
    draft = Seen()
    done = assert_same_text(ToyTarget(), chain(draft), prompt=prompt(length), params=params, stop=stop)
    assert (
        done.stats.acceptance_length
        == run(
            ToyTarget(), chain(ToyTarget(), 0), prompt=prompt(length), params=params, stop=stop
        ).stats.acceptance_length
    )
    assert draft.longest <= SINKS + WINDOW
    text = [*prompt(length), *done.tokens]
    for begun in draft.begun[1:]:
        assert begun[:SINKS] == text[:SINKS]
        assert len(begun) == SINKS + WINDOW // 2
    assert len(draft.begun) > 1  # all of these texts outgrow the window


def test_the_session_has_the_sinks_and_the_newest_tokens_in_their_order() -> None:
    draft = Seen()
    tokens = list(range(12)) * 20
    runner = DraftRunner(draft, tokens, window=WINDOW)
    assert runner.missing == SINKS + WINDOW // 2 - 1
    assert runner.read_ahead()
    assert draft.begun == [[*tokens[:SINKS], *tokens[-WINDOW // 2 :]]]
    for added in range(1, 3 * WINDOW):
        tokens.append(added % 12)
        runner.commit()
        if not runner.opened:
            assert runner.read_ahead()
            assert draft.begun[-1] == [*tokens[:SINKS], *tokens[-WINDOW // 2 :]]
        runner.add([()])
        (found,), _ = DraftRunner.forward([runner])
        assert found is not None
        assert found.choices[found.nodes[0]] == int(draft.row(tuple(enumerate(tokens))).argmax())
    assert len(draft.begun) == 1 + (3 * WINDOW - 1) // (WINDOW // 2 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DraftModelDrafter, Auto, SpeculativeSampling])
def test_a_text_longer_than_the_draft_model_s_context(kind: type[Any]) -> None:
    """Without a window it stops at its context; all that have a draft model take the option."""
    target, stop = ToyTarget(context_length=600), StopParams(max_new_tokens=200)
    stopped = []
    for window in (0, WINDOW):
        options = {} if kind is SpeculativeSampling else {"nodes": 3}
        drafter: Drafter = kind(draft=ToyTarget(context_length=160), draft_window=window, **options)
        done = run(target, drafter, prompt=prompt(100), params=WARM, stop=stop)
        assert len(done.tokens) == 200
        stopped.append(done.stats.drafter["draft"].get("stopped", ""))
    assert "context" in stopped[0]
    assert not stopped[1]


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_texts_in_a_batch_with_a_model_of_transformers(params: SamplingParams) -> None:
    def model(seed: int) -> TransformersTarget:
        torch.manual_seed(seed)
        return TransformersTarget(replace(BY_NAME["llama"], options=BY_NAME["llama"].options).build())

    target, stop = model(0), StopParams(max_new_tokens=30)
    plain = [run(target, prompt=prompt(n), params=params, stop=stop).tokens for n in (30, 60, 130)]
    engine = Engine(target)
    drafter = engine.drafter("draft_model", draft=model(0), nodes=3, depth=3, draft_window=32)
    handles = [engine.submit(Request(prompt(n), drafter, params, stop)) for n in (30, 60, 130)]
    engine.run(handles)
    assert [each.tokens for each in handles] == plain
    assert all(each.stats.accepted > 0 for each in handles)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (31, "draft_window=31 is not possible: it must be at least 32, or 0 for none"),
        (-1, "draft_window=-1 is not possible"),
        (100, "draft_window=100 is too large for .*, whose context has 160 tokens; .* give at most 79"),
    ],
)
def test_impossible_windows_are_refused(window: int, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        Engine(ToyTarget()).drafter("draft_model", draft=ToyTarget(context_length=160), draft_window=window)


def test_a_window_needs_a_draft_model_with_a_cache_of_its_own() -> None:
    with pytest.raises(BadParameter, match=r"draft_window=64 needs draft=\.\.\."):
        Auto(draft_window=64)
    target = TransformersTarget(BY_NAME["llama"].build())
    with pytest.raises(BadParameter, match=r"draft_window=64 is not possible with .*, which has the target's cache"):
        Engine(target).drafter("draft_model", draft="self:first=1", draft_window=64)
