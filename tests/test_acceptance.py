"""Acceptance estimates, their correction for a request, and back-off."""

from __future__ import annotations

import random
from math import log

import pytest

from leapahead.planner.acceptance import CORRECTION_START, MOST_TRIALS, PRIOR_TRIALS, AcceptanceTable, Correction
from leapahead.planner.backoff import BackOff
from leapahead.planner.mixer import Mixer, logit, mixed


def test_an_estimate_begins_at_that_of_the_coarser_key_and_approaches_what_is_observed() -> None:
    table = AcceptanceTable({("a",): 0.8, ("a", 1): 0.4})
    assert table.probability(("a", 1, 2)) == 0.4
    assert table.probability(("a", 2)) == 0.8
    assert table.estimate(("b",), unknown=0.1) == 0.1
    table.learn(("a", 1, 2), hit=False)
    own = (0 + PRIOR_TRIALS * 0.8) / (1 + PRIOR_TRIALS)
    assert table.probability(("a",)) == pytest.approx(own)
    rng = random.Random(0)
    for _ in range(2000):
        table.learn(("a", 1, 3), rng.random() < 0.7)
    assert table.probability(("a", 1, 3)) == pytest.approx(0.7, abs=0.08)
    for _ in range(400):
        table.learn(("a", 1, 3), hit=False)  # the text has changed
    assert table.probability(("a", 1, 3)) < 0.2
    assert all(row["trials"] <= MOST_TRIALS for row in table.rows())
    assert {len(row["key"]) for row in table.rows(longest=2)} == {1, 2}


def test_the_priors_are_probabilities_by_source() -> None:
    table = AcceptanceTable.with_priors()
    assert all(0 <= p <= 1 for p in table.priors.values())
    assert table.estimate(("recycling", "greedy", 0)) > table.estimate(("recycling", "greedy", 1)) > 0
    table.learn(("recycling",), hit=True)
    assert AcceptanceTable.with_priors().rows() == []  # each engine has a table of its own


def test_the_correction_falls_on_a_text_that_is_hard_to_predict_and_rises_on_an_easy_one() -> None:
    hard, easy, as_expected = Correction(), Correction(), Correction()
    assert hard.factor == CORRECTION_START
    for turn in range(400):
        hard.learn(0.6, turn % 10 < 3)
        easy.learn(0.6, turn % 10 < 9)
        as_expected.learn(0.6, turn % 10 < 6)
    assert hard.factor == pytest.approx(0.5, abs=0.12)
    assert easy.factor == pytest.approx(1.5, abs=0.15)
    assert as_expected.factor == pytest.approx(1.0, abs=0.08)
    for _ in range(200):
        hard.learn(0.6, hit=True)
    assert hard.factor > 1.2, "a text may become easy"


def suspended(backoff: BackOff) -> int:
    """Steps until drafting goes on."""
    steps = 0
    while backoff.suspended():
        steps += 1
    return steps


def test_back_off_doubles_up_to_its_limit_and_ends_with_a_draft_that_pays() -> None:
    backoff = BackOff()
    assert suspended(backoff) == 0
    lengths = []
    for _ in range(6):
        backoff.update(paid=False, longest=10)
        lengths.append(suspended(backoff))
    assert lengths == [1, 2, 4, 8, 10, 10]
    backoff.update(paid=False, longest=3)
    assert backoff.remaining == 3
    backoff.update(paid=True, longest=10)
    assert suspended(backoff) == 0
    backoff.update(paid=False, longest=10)
    assert suspended(backoff) == 1
    backoff.update(paid=False, longest=0)
    assert suspended(backoff) == 0


def test_drafts_that_paid_pay_for_further_ones_that_do_not() -> None:
    backoff = BackOff()
    backoff.update(paid=True, longest=10, gain=0.25)
    waits = []
    for _ in range(4):
        backoff.update(paid=False, longest=10, cost=0.05)
        waits.append(suspended(backoff))
    assert waits == [0, 0, 1, 2]  # half of what was gained
    for _ in range(9):
        backoff.update(paid=True, longest=10, gain=3.0)
    waits = []
    for _ in range(4):
        backoff.update(paid=False, longest=10, cost=0.2)
        waits.append(suspended(backoff))
    assert waits == [0, 0, 1, 2]  # half a plain step, however much was gained
    expected = BackOff(credit=9.0)
    expected.update(paid=False, longest=10, cost=0.6)
    assert expected.remaining == 1
    expected.update(paid=False, longest=10, cost=0.4)
    assert expected.remaining == 0


def test_a_suspension_goes_on_in_the_next_text_for_as_many_steps_as_its_cost_explains() -> None:
    backoff = BackOff()
    for _ in range(6):
        backoff.update(paid=False, longest=32)
    backoff.usual = 32
    assert backoff.remaining == backoff.carried().remaining == 32
    backoff.usual = 3  # asking takes little: a text is a new chance
    carried = backoff.carried()
    assert suspended(carried) == 3
    carried.update(paid=False, longest=32)
    assert suspended(carried) == 6
    carried.update(paid=True, longest=32)
    assert not carried.carried().suspended()


def test_the_estimate_of_a_single_source_is_kept_by_a_mixer_that_has_learned_nothing() -> None:
    parameters = Mixer().parameters("greedy", 0, ["one", "two"])
    for p in (0.01, 0.3, 0.9):
        assert mixed(parameters, (logit(p), None)) == pytest.approx(p)
        assert mixed(parameters, (logit(p), logit(p))) != pytest.approx(p)
    assert 0 < mixed(parameters, (logit(0.0), logit(0.0))) < mixed(parameters, (logit(1.0), logit(1.0))) < 1


def test_the_mixer_learns_whom_to_believe() -> None:
    """One source knows the probability, another gives random numbers: the mixture is hardly worse than the first."""
    rng, mixer = random.Random(0), Mixer()
    losses = {"mixed": 0.0, "knows": 0.0}
    for turn in range(6000):
        parameters = mixer.parameters("sampled", turn % 3, ["knows", "noise"])
        truth = rng.choice((0.05, 0.3, 0.8))
        logits = logit(truth), logit(rng.uniform(0.02, 0.98))
        p, hit = mixed(parameters, logits), rng.random() < truth
        mixer.learn(parameters, logits, p, hit)
        if turn >= 4000:
            losses["mixed"] -= log(p if hit else 1.0 - p) / 2000
            losses["knows"] -= log(truth if hit else 1.0 - truth) / 2000
    assert losses["mixed"] < losses["knows"] + 0.02
    (known, noise) = (each[1] for each in mixer.parameters("sampled", 1, ["knows", "noise"]))
    assert abs(noise[0]) < 0.15 < 0.8 < known[0]


def test_a_token_that_a_good_source_does_not_propose_becomes_unlikely() -> None:
    mixer = Mixer()
    parameters = mixer.parameters("greedy", 5, ["silent", "speaks"])
    logits = None, logit(0.5)
    before = mixed(parameters, logits)
    for _ in range(500):
        mixer.learn(parameters, logits, mixed(parameters, logits), hit=False)
    assert mixed(parameters, logits) < 0.3 * before
    assert parameters[0][0][2] < 0 == parameters[0][0][0] - 1.0, "its own weight is that of tokens that it proposes"
    assert mixer.parameters("greedy", 1, ["silent"])[0] is parameters[0], "all depths below the root share parameters"
    assert mixer.parameters("greedy", 0, ["silent"])[0][0] == [1.0, 0.0, 0.0]
    again = Mixer(mixer.rows()).parameters("greedy", 1, ["silent", "speaks"])
    assert mixed(again, logits) == pytest.approx(mixed(parameters, logits), abs=1e-3)


def test_sources_have_parameters_of_their_own_beside_a_prediction() -> None:
    mixer = Mixer()
    beside, alone = (
        mixer.parameters("greedy", 1, ["suffix", "prediction"])[0],
        mixer.parameters("greedy", 1, ["suffix"])[0],
    )
    mixer.learn([beside], (logit(0.5),), 0.5, hit=True)
    assert alone[0] == [1.0, 0.0, 0.0] != beside[0]
    assert [place for _, place, _, _ in mixer.rows()] == [1, 3, 3]


def test_the_mixer_begins_with_measured_priors() -> None:
    rows = AcceptanceTable.with_priors().mixer.rows()
    assert {(mode, place) for mode, place, _, _ in rows} >= {(m, p) for m in ("greedy", "sampled") for p in range(4)}
    assert {source for _, place, source, _ in rows if place > 1} >= {"prediction", "suffix", "recycling"}
    assert {source for _, _, source, _ in rows} >= {"suffix", "recycling", "siblings", "table"}
