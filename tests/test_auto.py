"""`auto` as a whole: it drafts what pays, rests when nothing does, comes back, and uses all that it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, begin, run

from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_forwards import LONGEST_REST
from leapahead.drafters.single import SuffixDrafter, TokenRecycling
from leapahead.drafters.sources.lookahead import FIRST_PAUSE, SHAPES, TRIAL, Judge
from leapahead.drafters.sources.recycling import Adjacency
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import CHAIN, PROMPT_ROWS, TREE, best
from leapahead.models.toy import ToyTarget
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import Machine, machine_of

STEEP = CostCurve({1: 1.0, 2: 1.9, 4: 3.7, 64: 60.0})
CHEAP = CostCurve({1: 1.0, 8: 1.05, 128: 2.0})


class Scripted(ToyTarget):
    """Greedily writes one given text, whatever is drafted."""

    def __init__(self, text: Sequence[int], vocab_size: int = 50) -> None:
        super().__init__(vocab_size=vocab_size)
        self.text = list(text)

    def row(self, seen: Any) -> Any:
        row = np.zeros(self.vocab_size)
        place = len(seen)
        if [token for _, token in seen] == self.text[:place] and place < len(self.text):
            row[self.text[place]] = 10.0
        else:
            row[(7 * place + 3) % self.vocab_size] = 10.0
        return row


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves stay as they are put, whatever steps take here."""
    monkeypatch.setattr(Machine, "observed", lambda self, forward: None)
    monkeypatch.setattr(Machine, "drafting", lambda self, nodes: 0.0)


def steps(target: ToyTarget, curve: CostCurve, prompt: Sequence[int], length: int, **options: Any) -> list[Any]:
    machine_of(target).put(target, 1, curve)
    generation = begin(target, Auto(**options), prompt, stop=StopParams(max_new_tokens=length))
    return [step for _, step in decode(target, [generation])]


@pytest.mark.usefixtures("still")
def test_where_nothing_pays_steps_are_plain_and_seldom_asked() -> None:
    text = np.random.default_rng(0).integers(0, 50, 600).tolist()
    done = steps(Scripted(text), STEEP, text[:8], 500)
    drafted = [len(step.tree) > 1 for step in done]
    assert sum(drafted[100:]) <= 0.05 * len(drafted[100:])


@pytest.mark.usefixtures("still")
def test_it_comes_back_when_the_text_turns_repetitive() -> None:
    rng = np.random.default_rng(1)
    wild, loop = rng.integers(0, 50, 300).tolist(), [4, 8, 15, 16, 23, 42]
    text = [*wild, *loop * 60]
    done = steps(Scripted(text), STEEP, text[:8], len(text) - 8)
    position, late = 8, []
    for step in done:
        if position > 300 + 2 * len(loop) + 2 * LONGEST_REST:
            late.append(len(step.tokens))
        position += len(step.tokens)
    assert np.mean(late) > 1.0  # though a further node costs 0.9 of a token
    cheap = steps(Scripted(text), CHEAP, text[:8], len(text) - 8)
    assert np.mean([len(step.tokens) for step in cheap[-10:]]) > 8


@pytest.mark.usefixtures("still")
def test_one_token_repeated_makes_no_giant_tree() -> None:
    text = [5] * 3000
    target = Scripted(text)
    machine_of(target).put(target, 1, CHEAP)
    generation = begin(target, Auto(max_nodes=32), text[:10], stop=StopParams(max_new_tokens=2900))
    done = [step for _, step in decode(target, [generation])]
    assert max(len(step.tree) for step in done) <= 33
    assert sum(len(step.tokens) for step in done) == 2900
    assert np.mean([len(step.tokens) for step in done[20:-1]]) > 15
    assert generation.stats.drafter["suffix"]["states"] <= 2 * 3000


def test_the_prompts_own_logits_are_drafted_from_at_once() -> None:
    """Nothing in the prompt comes twice, so only what the target thought of its tokens can be known."""
    target = ToyTarget(vocab_size=40, order=1, seed=4)
    follows = [int(np.argmax(target.row(((0, token),)))) for token in range(40)]
    pairs = [(token, follows[token]) for token in range(40) if follows[token] != token]
    start = pairs[0][0]
    prompt = [start, pairs[1][0], start]
    generation = begin(target, TokenRecycling(nodes=4), prompt, stop=StopParams(max_new_tokens=20))
    step = next(decode(target, [generation]))[1]
    assert follows[start] in step.tree.tokens[1:].tolist()
    short = begin(target, TokenRecycling(nodes=4), prompt, stop=StopParams(max_new_tokens=4))
    assert short.session.prompt_top_k is None  # for few new tokens it would not pay


def test_what_a_target_keeps_of_the_prompt_is_what_it_would_say() -> None:
    target = ToyTarget(vocab_size=30, order=3)
    prompt = np.random.default_rng(2).integers(0, 30, PROMPT_ROWS + 40).tolist()
    kept = target.open(prompt, GREEDY, top_k=5).prompt_top_k
    assert kept is not None
    assert kept.tokens.tolist() == prompt[-1 - PROMPT_ROWS : -1]
    assert kept.following.shape == kept.logits.shape == (PROMPT_ROWS, 5)
    for index in (0, 17, PROMPT_ROWS - 1):
        end = len(prompt) - 1 - PROMPT_ROWS + index + 1
        row = target.row(tuple(enumerate(prompt[:end])))
        assert kept.following[index].tolist() == np.argsort(-row, kind="stable")[:5].tolist()
    assert (np.diff(kept.logits, axis=1) <= 0).all()


@pytest.mark.parametrize("size", [10, 300, 4096, 50_257, 256_000])
@pytest.mark.parametrize("k", [1, 8, 128])
def test_the_best_of_a_row_are_the_best(size: int, k: int) -> None:
    rows = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    rows[0, -1], rows[1, 0], rows[2, size // 2] = 50.0, 50.0, -50.0
    k = min(k, size)
    tokens, values = best(rows, k)
    assert (values == -np.sort(-rows, axis=1)[:, :k]).all()
    assert (np.take_along_axis(rows, tokens, axis=1) == values).all()
    assert all(len(set(row)) == k for row in tokens.tolist())


def accepted(target: ToyTarget, drafter_cache: DrafterCache | None = None, **options: Any) -> float:
    done = 0.0
    for seed in range(6):
        params = SamplingParams(temperature=1.0, seed=seed)
        machine_of(target).calibration = type(machine_of(target).calibration)()
        stop = StopParams(max_new_tokens=120)
        generation = begin(
            target, Auto(nodes=8, **options), [1, 2, seed], params=params, stop=stop, drafter_cache=memory
        )
        for _ in decode(target, [generation]):
            pass
        done += generation.stats.acceptance_length / 6
    return done


def test_the_dice_make_sampled_drafts_better() -> None:
    target = ToyTarget(vocab_size=60, order=1, sharpness=1.5)
    assert accepted(target) > 1.15 * accepted(target, seed_aware=False)


def test_a_window_grows_where_it_pays_and_goes_where_it_does_not() -> None:
    judge = Judge()
    seen = set()
    for _ in range(4000):
        judge.told(3 if judge.level else 2, 1.0 + 0.02 * judge.level)
        seen.add(judge.level)
    assert judge.level >= 1
    with_window = judge.level
    for _ in range(40_000):
        judge.told(2, 1.0 + 0.3 * judge.level)
        seen.add(judge.level)
    assert with_window >= 1
    assert judge.level == 0 or judge._best == 0
    assert max(seen) < len(SHAPES)


def test_a_window_that_never_pays_is_tried_ever_more_seldom() -> None:
    judge, trials = Judge(), []
    for step in range(20_000):
        before = judge.level
        judge.told(2, 1.0 + judge.level)
        if judge.level and not before:
            trials.append(step)
    assert trials[0] < 2 * FIRST_PAUSE
    assert len(trials) < 12
    assert trials[-1] - trials[-2] > 10 * TRIAL


def test_shared_places_serve_the_next_text() -> None:
    memory = DrafterCache()
    target = ToyTarget(vocab_size=60, order=1, sharpness=3.0)
    machine_of(target).put(target, 1, CHEAP)

    def once() -> float:
        generation = begin(
            target, TokenRecycling(nodes=8), [7, 9], stop=StopParams(max_new_tokens=15), drafter_cache=memory
        )
        for _ in decode(target, [generation]):
            pass
        return generation.stats.acceptance_length

    first, second = once(), once()
    assert second > first
    part = memory.part("recycling", Adjacency)
    again = Adjacency()
    again.merge(part.arrays())
    assert {name: array.tolist() for name, array in again.arrays().items()} == {
        name: array.tolist() for name, array in part.arrays().items()
    }


@pytest.mark.parametrize("broken", ["tokens", "counts", "following", "logp", "before"])
def test_an_adjacency_that_does_not_fit_together_is_refused(broken: str) -> None:
    kept = np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32)
    part = Adjacency()
    part.put([((1,), kept), ((1, 2), kept)])
    arrays = part.arrays()
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({name: array for name, array in arrays.items() if name != broken})
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({**arrays, broken: arrays[broken][:-1]})
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({**arrays, broken: arrays[broken].astype(np.float64)})


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(BadParameter, match="no source 'sufix'"):
        Auto(sources="sufix")
    with pytest.raises(BadParameter, match="nodes=-1"):
        Auto(nodes=-1)


def test_a_source_that_the_target_cannot_serve_is_told_by_name() -> None:
    target = ToyTarget(capabilities=frozenset({CHAIN, TREE}))
    done = run(target, Auto(nodes=4))
    left = done.generation.stats.drafter["left_out"]
    assert set(left) == {"recycling"}
    assert "top_k" in left["recycling"]


def test_figures_tell_what_is_believed_and_what_it_costs() -> None:
    target = ToyTarget()
    machine_of(target).put(target, 1, CHEAP)
    told = run(target, Auto(nodes=6), stop=StopParams(max_new_tokens=60)).generation.stats.drafter
    assert {"suffix", "recycling", "lookahead", "calibration", "milliseconds"} <= set(told)
    assert all(0 <= p <= 1 for p in told["calibration"].values())
    assert list(told["milliseconds"]) == ["1"]


def test_sequences_of_a_batch_leave_without_harm() -> None:
    """Shared memory, ragged ends, one text after another."""
    target, memory = ToyTarget(vocab_size=20, order=2), DrafterCache()
    alone = [run(target, None, [1, 2, n]).tokens for n in range(5)]
    batch: list[Generation] = [begin(target, Auto(nodes=5), [1, 2, n], drafter_cache=memory) for n in range(3)]
    everyone = list(batch)
    for generation, _ in decode(target, batch):
        if generation.finished and len(everyone) < 5:
            everyone.append(begin(target, SuffixDrafter(nodes=3), [1, 2, len(everyone)], drafter_cache=memory))
            batch.append(everyone[-1])
    assert [generation.session.tokens[3:] for generation in everyone] == alone
