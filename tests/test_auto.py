"""`auto` as a whole: it drafts what pays, stops when nothing does, starts again, and uses every source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, FixedLatency, run

from leapahead import Engine, Request
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import Auto
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.recycling import TokenRecycling
from leapahead.drafters.sources.recycling import Adjacency
from leapahead.models.base import PROMPT_ROWS, Capture, read_prompt
from leapahead.models.choices import best
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Forward, Step
from leapahead.planner.sizing import LONGEST_BACK_OFF
from research.oracle import Oracle
from research.toy_overhead import Watched, plain_steps

STEEP = {1: 1.0, 2: 1.9, 4: 3.7, 64: 60.0}
CHEAP = {1: 1.0, 8: 1.05, 128: 2.0}


class Scripted(ToyTarget):
    """Greedily writes one given text, whatever is drafted."""

    def __init__(self, text: Sequence[int], vocab_size: int = 50) -> None:
        super().__init__(vocab_size=vocab_size, order=1 << 30)
        self.text = list(text)

    def row(self, seen: Any) -> Any:
        row = np.zeros(self.info.vocab_size)
        place = len(seen)
        if [token for _, token in seen] == self.text[:place] and place < len(self.text):
            row[self.text[place]] = 10.0
        else:
            row[(7 * place + 3) % self.info.vocab_size] = 10.0
        return row


def steps(target: ToyTarget, seconds: dict[int, float], prompt: Sequence[int], length: int) -> list[Step]:
    return run(
        target, Auto(), prompt, stop=StopParams(max_new_tokens=length), latency=FixedLatency(target, seconds)
    ).steps


def test_where_nothing_pays_steps_are_plain_and_seldom_asked() -> None:
    text = np.random.default_rng(0).integers(0, 50, 600).tolist()
    done = steps(Scripted(text), STEEP, text[:8], 500)
    drafted = [len(step.tree) > 1 for step in done]
    assert sum(drafted[100:]) <= 0.05 * len(drafted[100:])


def test_where_no_draft_could_pay_sources_that_are_right_are_seldom_asked() -> None:
    text = [4, 8, 15, 16, 23, 42] * 100
    engine = Engine(target := Scripted(text), latency=FixedLatency(target, {1: 2e-4, 2: 4e-3, 64: 0.25}))
    drafter = engine.drafter(Watched)
    handle = engine.submit(Request(text[:60], drafter, GREEDY, StopParams(max_new_tokens=400)))
    asked = []
    while not handle.done:
        engine.step()
        asked.append(drafter.asked())
    assert handle.stats.steps == len(handle.tokens) == 400
    assert sum(asked[40:]) <= 0.3 * len(asked[40:])  # how seldom depends on how long drafting takes here


def test_rows_of_prompts_are_captured_for_drafts_of_a_fixed_size_only() -> None:
    """They bring less than they take."""
    engine = Engine(ToyTarget())
    assert not engine.drafter(Auto()).capture_of([1, 2, 3], "").top_k
    assert engine.drafter(Auto(nodes=4)).capture_of([1, 2, 3], "").top_k


def test_it_comes_back_when_the_text_turns_repetitive() -> None:
    rng = np.random.default_rng(1)
    wild, loop = rng.integers(0, 50, 300).tolist(), [4, 8, 15, 16, 23, 42]
    text = [*wild, *loop * 40]
    late = []
    for step in steps(Scripted(text), STEEP, text[:8], len(text) - 8):
        if step.position >= 300 + 2 * len(loop) + 2 * LONGEST_BACK_OFF:
            late.append(len(step.tokens))
    assert np.mean(late) > 1.0  # though a further node costs 0.9 of a token
    cheap = steps(Scripted(text), CHEAP, text[:8], len(text) - 8)
    assert np.mean([len(step.tokens) for step in cheap[-10:]]) > 8


def test_behind_each_changed_token_a_prediction_is_drafted_on_at_once() -> None:
    """The token behind a changed one is not sure, so nothing pays there, which must not suspend drafting."""
    expected = np.random.default_rng(3).permutation(300).tolist()
    text = [token if place % 12 else 300 + place for place, token in enumerate(expected)]
    target, stop = Scripted([7, *text], vocab_size=600), StopParams(max_new_tokens=300)
    latency = FixedLatency(target, {1: 2e-3, 2: 3.2e-3, 4: 4.8e-3, 8: 7.2e-3, 64: 6e-2})
    latency.clock = accumulate(repeat(4e-5)).__next__  # so that asking the sources takes a part of a plain step
    done = run(target, Auto(), [7], stop=stop, latency=latency, prediction=expected)
    plain = [len(step.tree) == 1 for step in done.steps]
    assert sum(plain) >= 10
    assert not any(all(four) for four in zip(*(plain[skip:] for skip in range(4)), strict=False))


def test_in_a_batch_a_text_that_nothing_foresees_does_not_suspend_a_predicted_one() -> None:
    expected = np.random.default_rng(3).permutation(300).tolist()
    text = [token if place % 12 else 300 + place for place, token in enumerate(expected)]
    wild = np.random.default_rng(4).integers(0, 600, 300).tolist()
    both = {7: [7, *text], 8: [8, *wild]}

    class Two(Scripted):
        def row(self, seen: Any) -> Any:
            self.text = both[seen[0][1]]
            return super().row(seen)

    target = Two([], vocab_size=600)
    latency = FixedLatency(target, {2: 2e-3, 3: 2.6e-3, 5: 3.8e-3, 9: 5e-3, 64: 6e-2})
    latency.clock = accumulate(repeat(4e-5)).__next__
    engine, plain = Engine(target, latency=latency), list[bool]()
    drafter, stop = engine.drafter(Auto()), StopParams(max_new_tokens=299)

    def watch(step: Step) -> None:
        if step.position > 20:
            plain.append(len(step.tree) == 1)

    predicted = Request([7], drafter, GREEDY, stop, tuple(expected), on_step=watch)
    engine.run([engine.submit(predicted), engine.submit(Request([8], drafter, GREEDY, stop))])
    assert any(plain)
    assert not any(all(three) for three in zip(plain, plain[1:], plain[2:], strict=False))


def test_one_token_repeated_makes_no_giant_tree() -> None:
    text = [5] * 1000
    target = Scripted(text)
    stop, latency = StopParams(max_new_tokens=900), FixedLatency(target, CHEAP)
    done = run(target, Auto(max_nodes=32), text[:10], stop=stop, latency=latency)
    assert max(len(step.tree) for step in done.steps) <= 33
    assert len(done.tokens) == 900
    assert np.mean([len(step.tokens) for step in done.steps[20:-1]]) > 15
    assert done.stats.drafter["suffix"]["states"] <= 2 * 1000


def test_the_prompts_own_logits_are_drafted_from_at_once() -> None:
    """Nothing in the prompt comes twice, so only what the target thought of its tokens can be known."""
    target = ToyTarget(vocab_size=40, order=1, seed=4)
    follows = [int(np.argmax(target.row(((0, token),)))) for token in range(40)]
    pairs = [(token, follows[token]) for token in range(40) if follows[token] != token]
    start = pairs[0][0]
    prompt = [start, pairs[1][0], start]
    long = run(target, TokenRecycling(nodes=4), prompt, stop=StopParams(max_new_tokens=20))
    assert follows[start] in long.steps[0].tree.tokens[1:].tolist()
    short = run(target, TokenRecycling(nodes=4), prompt, stop=StopParams(max_new_tokens=4))
    assert len(short.steps[0].tree) == 1  # for few new tokens the rows are not captured, since it would not pay


def test_the_captured_rows_of_a_prompt_are_the_targets_own() -> None:
    target = ToyTarget(vocab_size=30, order=3)
    prompt = np.random.default_rng(2).integers(0, 30, PROMPT_ROWS + 40).tolist()
    session = target.open(prompt, GREEDY, Capture(top_k=5))
    rows = read_prompt(target, session, chunk=1000)[-1]
    tokens, logits = rows.top_k(5)
    assert rows.tokens.tolist() == prompt[-1 - PROMPT_ROWS : -1]
    assert tokens.shape == logits.shape == (PROMPT_ROWS, 5)
    for index in (0, 17, PROMPT_ROWS - 1):
        row = target.row(tuple(enumerate(prompt[: rows.start + index + 1])))
        assert tokens[index].tolist() == np.argsort(-row, kind="stable")[:5].tolist()
    assert (np.diff(logits, axis=1) <= 0).all()


@pytest.mark.parametrize("size", [10, 300, 50_257])
@pytest.mark.parametrize("k", [1, 8, 128])
def test_the_best_of_a_row_are_the_best(size: int, k: int) -> None:
    rows = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    rows[0, -1], rows[1, 0], rows[2, size // 2] = 50.0, 50.0, -50.0
    k = min(k, size)
    tokens, values = best(rows, k)
    assert (values == -np.sort(-rows, axis=1)[:, :k]).all()
    assert (np.take_along_axis(rows, tokens, axis=1) == values).all()
    assert all(len(set(row)) == k for row in tokens.tolist())


def accepted(target: ToyTarget, **options: Any) -> float:
    """Mean acceptance length of some sampled texts."""
    runs = [
        run(
            target,
            Auto(nodes=8, **options),
            [1, 2, seed],
            params=SamplingParams(temperature=1.0, seed=seed),
            stop=StopParams(max_new_tokens=120),
            latency=FixedLatency(target, CHEAP),
        )
        for seed in range(4)
    ]
    return sum(done.stats.acceptance_length for done in runs) / len(runs)


def test_seed_aware_drafting_makes_sampled_drafts_better() -> None:
    target = ToyTarget(vocab_size=60, order=1, sharpness=1.5)
    assert accepted(target) > 1.15 * accepted(target, seed_aware=False)


def test_shared_contexts_serve_the_next_text() -> None:
    drafter_cache = DrafterCache()
    target = ToyTarget(vocab_size=60, order=1, sharpness=3.0)
    stop = StopParams(max_new_tokens=15)
    lengths = [
        run(target, TokenRecycling(nodes=8), [7, 9], stop=stop, drafter_cache=drafter_cache).stats.acceptance_length
        for _ in range(2)
    ]
    assert lengths[1] > lengths[0]
    section = drafter_cache.section("recycling", Adjacency)
    again = Adjacency()
    again.merge(section.arrays())
    assert {name: array.tolist() for name, array in again.arrays().items()} == {
        name: array.tolist() for name, array in section.arrays().items()
    }


@pytest.mark.parametrize("broken", ["tokens", "counts", "following", "logp", "before"])
def test_an_adjacency_that_does_not_fit_together_is_refused(broken: str) -> None:
    kept = np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32)
    section = Adjacency()
    section.put([((1,), kept), ((1, 2), kept)])
    arrays = section.arrays()
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({name: array for name, array in arrays.items() if name != broken})
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({**arrays, broken: arrays[broken][:-1]})
    with pytest.raises(ValueError, match="adjacency"):
        Adjacency().merge({**arrays, broken: arrays[broken].astype(np.float64)})


def test_impossible_options_are_refused_by_name() -> None:
    with pytest.raises(BadParameter, match="no source 'sufix'"):
        Auto(sources="sufix")
    with pytest.raises(BadParameter, match="names 'suffix' twice"):
        Auto(sources=["suffix", "recycling", "suffix"])
    with pytest.raises(BadParameter, match="nodes=-1"):
        Auto(nodes=-1)


def test_figures_report_estimates_and_latency() -> None:
    target = ToyTarget()
    stop, latency = StopParams(max_new_tokens=60), FixedLatency(target, CHEAP)
    found = run(target, Auto(nodes=6), stop=stop, latency=latency).stats.drafter
    assert {"suffix", "recycling", "siblings", "acceptance", "milliseconds"} <= set(found)
    assert found["acceptance"]
    assert all(0 <= p <= 1 for p in found["acceptance"].values())


def test_a_fixed_number_of_nodes_is_kept_and_no_time_is_read() -> None:
    target, stop = ToyTarget(vocab_size=20, order=2), StopParams(max_new_tokens=80)
    twice = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=5)
        runs = [
            run(target, Auto(nodes=7), [1, 2, 3], params, stop, latency=FixedLatency(target, seconds))
            for seconds in (CHEAP, STEEP)
        ]
        twice.append([[(step.tree.token_list, step.tree.parent_list) for step in done.steps] for done in runs])
        sizes = [len(step.tree) - 1 for step in runs[0].steps[10:-8]]  # the last trees end where the text must end
        assert max(sizes) == 7
        assert np.mean(sizes) > 5  # fewer only where there are no more candidates
    assert all(first == second for first, second in twice)
    engine = Engine(target)
    assert not engine.drafter("auto", nodes=7).plans
    assert engine.drafter("auto").plans


@pytest.mark.parametrize(("nodes", "known"), [(7, False), (0, True)])
def test_the_times_of_steps_are_kept_only_where_a_drafter_plans_with_them(
    monkeypatch: pytest.MonkeyPatch, nodes: int, known: bool
) -> None:
    target = ToyTarget(vocab_size=20, order=2)
    latency = FixedLatency(target, CHEAP)
    seen: list[Forward] = []
    monkeypatch.setattr(latency, "observe", seen.append)
    done = run(target, Auto(nodes=nodes), [1, 2, 3], stop=StopParams(max_new_tokens=40), latency=latency)
    assert bool(seen) == known
    assert done.stats.accepted > 0


def test_plain_steps_of_auto_are_measured_with_and_without_asking_the_sources() -> None:
    for row in plain_steps(batches=(2,), context=100, steps=40):
        assert 0 < row["share asking"] < 0.5  # nothing pays, so drafting is suspended most of the time
        assert min(row["plain"], row["auto, suspended"], row["auto, asking"]) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_oracle_over_the_same_candidates_accepts_more(temperature: float) -> None:
    target, stop = ToyTarget(vocab_size=40, order=2), StopParams(max_new_tokens=150)
    params = SamplingParams(temperature=temperature, seed=5)
    plain = run(target, None, [1, 2, 3], params, stop)
    oracle = run(target, Oracle({(1, 2, 3): [1, 2, 3, *plain.tokens]}, nodes=5), [1, 2, 3], params, stop)
    auto = run(target, Auto(nodes=5), [1, 2, 3], params, stop)
    assert plain.tokens == oracle.tokens == auto.tokens
    assert oracle.stats.acceptance_length > auto.stats.acceptance_length


def test_sequences_of_a_batch_share_a_cache_and_leave_without_harm() -> None:
    """Texts of different lengths and two drafters in one batch, and requests that join later."""
    target, drafter_cache = ToyTarget(vocab_size=20, order=2), DrafterCache()
    lengths = [10, 24, 17, 30, 24]
    alone = [
        run(target, None, [1, 2, n], stop=StopParams(max_new_tokens=length)).tokens for n, length in enumerate(lengths)
    ]
    engine = Engine(target, max_batch=3, latency=FixedLatency(target, CHEAP))
    drafters = [engine.drafter("auto", nodes=5), engine.drafter("suffix", nodes=3)]
    handles = [
        engine.submit(
            Request([1, 2, n], drafters[n > 2], stop=StopParams(max_new_tokens=length), drafter_cache=drafter_cache)
        )
        for n, length in enumerate(lengths)
    ]
    engine.run(handles)
    assert [handle.tokens for handle in handles] == alone
