"""The vLLM adapter on a host with vLLM's habits: texts, states and drafts of requests that come, move, wait and go."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest

from leapahead.core.errors import BadParameter, Refused
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.integrations.vllm.adapter import MISSED, Adapter
from leapahead.integrations.vllm.batch import Batch
from leapahead.integrations.vllm.figures import Metrics
from leapahead.integrations.vllm.options import Options, parsed
from leapahead.integrations.vllm.requests import ByText, Descriptions
from leapahead.models.base import CHAIN, TOP_K, TargetInfo
from tests.vllm_host import LONGEST, VOCAB, FakeHost, Job, plain_text

INFO = TargetInfo("fake", VOCAB, LONGEST, 2.0**-23, frozenset({CHAIN, TOP_K}), "a fake host")


class Clock:
    """Time passes by a fixed amount between two looks, so that drafts do not depend on the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def adapter(options: Options | None = None, clock: Clock | None = None, **changes: Any) -> Adapter:
    info = replace(INFO, **changes)
    return Adapter(info, 6, options or Options(nodes=6), cache=DrafterCache(), clock=clock or Clock())


def prompts(count: int, length: int = 12) -> list[list[int]]:
    random = np.random.default_rng(7)
    found = [random.integers(0, VOCAB, size=int(random.integers(2, length + 1))).tolist() for _ in range(count)]
    return [*found, *found[:3]]  # some twice


def checked(under_test: Adapter, host: FakeHost) -> Callable[[Batch], list[list[int]]]:
    """Steps, and compares what is known of every request with the host's record of it."""

    def step(batch: Batch) -> list[list[int]]:
        drafts = under_test.step(batch)
        assert all(name in batch.alive for name in under_test.live)
        for name, new in zip(batch.ids, batch.new, strict=True):
            if new:
                assert under_test.live[name].tokens == host.jobs[name].tokens
        return drafts

    return step


def served(under_test: Adapter, count: int = 12, **given: Any) -> FakeHost:
    host = FakeHost(lambda batch: step(batch), **given)
    step = checked(under_test, host)
    jobs = [Job(f"r{index}", prompt, 20 + 3 * index % 40) for index, prompt in enumerate(prompts(count))]
    expected = {job.name: plain_text(job.prompt, job.new) for job in jobs}
    for job in jobs:
        host.add(job)
    host.run()
    assert host.done == expected
    return host


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_texts_are_those_of_plain_decoding_and_drafts_are_accepted(rows: int) -> None:
    under_test = adapter()
    host = served(under_test, rows=rows)
    assert host.accepted > host.drafted / 4 > 0
    assert under_test.figures.resynchronised == 0
    assert under_test.figures.accepted.total() == host.accepted


@pytest.mark.parametrize("seed", range(6))
def test_preemption_cut_drafts_and_missed_steps_mix_nothing(seed: int) -> None:
    under_test = adapter()
    host = served(under_test, rows=5, seed=seed, preempts=0.2, chunk=5)
    assert host.accepted > 0


def test_planned_drafts_learn_the_times_of_steps() -> None:
    """A step takes 1 s and each further row 0.2 s: only drafts that are likely to be accepted pay."""
    clock = Clock()
    under_test = adapter(Options(), clock)
    host = FakeHost(lambda batch: step(batch), rows=1)

    def step(batch: Batch) -> list[list[int]]:
        assert batch.rows is not None
        clock.now += 0.8 + 0.2 * batch.rows
        return under_test.step(batch)

    for index, prompt in enumerate(prompts(20)):
        host.add(Job(f"r{index}", prompt, 60))
    host.run()
    assert host.drafted > 100
    assert host.accepted / host.drafted > 0.5
    assert under_test.figures.plain_steps > 0


@pytest.mark.slow
def test_nothing_is_lost_where_every_row_costs_a_step() -> None:
    def seconds(drafts: bool) -> tuple[float, int]:
        clock = Clock()
        under_test = adapter(Options(), clock)

        def step(batch: Batch) -> list[list[int]]:
            assert batch.rows is not None
            clock.now += float(batch.rows)
            drafted = under_test.step(batch)
            return drafted if drafts else [[] for _ in drafted]

        host = FakeHost(step, rows=4)
        for index, prompt in enumerate(prompts(30)):
            host.add(Job(f"r{index}", prompt, 60))
        host.run()
        return clock.now, host.drafted

    # A draft that is right costs what it brings, and of these texts the surest drafts are nearly always right.
    (took, drafted), (plain, none) = seconds(True), seconds(False)
    assert none == 0 < drafted
    assert took < 1.03 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("preempts", "seed"), [(0.0, 0), (0.1, 1), (0.1, 2)])
def test_where_nothing_pays_little_is_drafted_until_it_pays(preempts: float, seed: int) -> None:
    """A drafted row costs as much as fifty steps at first, so nothing pays; then next to nothing."""
    clock, row_seconds = Clock(), 50.0
    under_test = adapter(Options(), clock, fingerprint=f"vain {preempts} {seed}")  # times are stored by it
    host = FakeHost(lambda batch: step(batch), rows=4, preempts=preempts, seed=seed)

    def step(batch: Batch) -> list[list[int]]:
        clock.now += 1.0 + row_seconds * sum(batch.verified or ())
        return under_test.step(batch)

    def serve(start: int) -> None:
        jobs = [Job(f"r{start + index}", prompt, 100) for index, prompt in enumerate(prompts(21))]
        for job in jobs:
            host.add(job)
        host.run()
        assert all(host.done[job.name] == plain_text(job.prompt, job.new) for job in jobs)

    serve(0)
    figures = under_test.figures
    assert host.drafted < 60
    if not preempts:
        assert figures.resynchronised == 0
        assert figures.plain_steps + figures.drafted_steps == 24 * 99 - host.accepted
    row_seconds = 0.001
    serve(100)
    assert host.accepted > 1000


def test_a_prediction_is_followed() -> None:
    prompt = [5, 9, 2]
    expected = plain_text(prompt, 50)
    under_test = adapter()
    host = FakeHost(under_test.step)
    host.add(Job("told", prompt, 50, prediction=tuple(expected)))
    host.run()
    assert host.done == {"told": expected}
    assert under_test.figures.accepted["prediction"] > 30


def test_aborted_requests_are_forgotten() -> None:
    under_test = adapter()
    host = FakeHost(under_test.step, rows=4)
    for index, prompt in enumerate(prompts(8)):
        host.add(Job(f"r{index}", prompt, 40))
    for _ in range(5):
        host.forward()
    for name in ("r0", "r2", "r9"):
        host.abort(name)
    host.forward()
    assert not {"r0", "r2"} & under_test.live.keys()
    host.run()
    assert {name: text for name, text in host.done.items()} == {
        f"r{index}": plain_text(prompt, 40) for index, prompt in enumerate(prompts(8)) if index not in (0, 2, 9)
    }


def test_the_same_id_for_another_text_begins_anew() -> None:
    under_test = adapter()
    host = FakeHost(under_test.step, rows=2)
    host.add(Job("same", [1, 2, 3], 30))
    for _ in range(4):
        host.forward()
    host.abort("same")
    host.add(Job("same", [9, 8, 7, 6], 30))
    host.run()
    assert host.done == {"same": plain_text([9, 8, 7, 6], 30)}
    assert under_test.figures.resynchronised == 1


def test_sampled_requests_get_no_drafts_and_the_others_do() -> None:
    under_test = adapter()
    host = FakeHost(under_test.step, rows=4)
    host.add(Job("sampled", [1, 2, 3], 40, temperature=0.7))
    host.add(Job("greedy", [1, 2, 3], 40))
    sampled: list[int] = []
    while host.jobs:
        host.forward()
        if job := host.jobs.get("sampled"):
            sampled += job.draft
    assert not sampled
    assert host.accepted > 0


def test_the_context_and_the_budget_of_the_host_are_kept() -> None:
    under_test = adapter(context_length=40)
    host = FakeHost(under_test.step)
    host.add(Job("long", [1, 2, 3, 4] * 5, 20))  # the host asserts that no draft goes beyond the end
    host.run()
    assert host.drafted
    tokens = np.array([[1, 2] * 10 + [0] * 20], dtype=np.int32)
    batch = Batch(["x"], [[2]], np.array([20]), tokens, {"x"}, lambda name: Job("x", [1, 2], 100) and Some_request())
    assert [len(draft) for draft in adapter().step(batch)] == [6]
    assert [len(draft) for draft in adapter().step(replace(batch, most=2))] == [2]
    assert [len(draft) for draft in adapter(context_length=23).step(batch)] == [2]
    assert adapter(context_length=20).step(batch) == [[]]


def test_placeholders_of_images_outside_the_vocabulary_are_neither_drafted_nor_kept(tmp_path: Path) -> None:
    """The drafter cache was saved with them, and refused as damaged at the next start."""
    image = [VOCAB + 3] * 3
    first = plain_text([9, 0, *image, 5, 9], 1)
    prompt = [9, *first, *image, 5, 9]  # the first token leads back to the image
    under_test = adapter()
    host = FakeHost(under_test.step)  # asserts that what is drafted is in the vocabulary
    for name in ("one", "two"):
        host.add(Job(name, prompt, 30))
        host.run()
        assert host.done[name] == plain_text(prompt, 30)
    host.add(Job("without an image", [5, 9], 30))
    host.run()
    under_test.close()
    assert host.accepted
    assert under_test.cache is not None
    under_test.cache.belong("fake", VOCAB)
    under_test.cache.save(tmp_path / "texts.cache")
    assert cache_sections.load(tmp_path / "texts.cache").sections["suffix"].figures()["texts"] == 1


def Some_request() -> Any:
    from leapahead.integrations.vllm.batch import Request

    return Request()


def test_texts_of_earlier_requests_are_drafted() -> None:
    for drafts, kept in ((True, DrafterCache()), (False, None)):
        under_test = Adapter(INFO, 6, Options(nodes=6, sources="suffix"), cache=kept, clock=Clock())
        host = FakeHost(under_test.step)
        accepted = []
        for name in ("first", "second"):
            before = host.accepted
            host.add(Job(name, [3, 1, 4, 1, 5], 30))
            host.run()
            host.forward()  # the end of a request is seen in the next step
            accepted.append(host.accepted - before)
        assert (accepted[1] > accepted[0] + 5) == drafts


def test_missing_logits_are_given_up_with_one_sentence() -> None:
    under_test = adapter()
    host = FakeHost(lambda batch: under_test.step(replace(batch, logits=None)), rows=2)
    host.add(Job("one", [1, 2, 3], 60))
    with pytest.warns(UserWarning, match="without token recycling and sibling rows"):
        host.run()
    assert host.done["one"] == plain_text([1, 2, 3], 60)
    assert host.accepted > 0
    assert MISSED < 60


def test_drafting_takes_turns_where_its_time_is_short() -> None:
    """Drafting takes a tenth of a step for each of eight requests, and may take a fifth of a step: two draft a time."""
    clock = Clock()
    under_test = adapter(Options(share=0.2), clock)
    propose = under_test.drafter.propose
    asked: list[int] = []

    def slow(views: Any, budgets: Any) -> Any:
        count = sum(budget.nodes > 0 for budget in budgets)
        asked.append(count)
        clock.now += 0.1 * count
        return propose(views, budgets)

    under_test.drafter.propose = slow  # type: ignore[method-assign]
    host = FakeHost(lambda batch: step(batch), rows=8)

    def step(batch: Batch) -> list[list[int]]:
        clock.now += 1.0
        return under_test.step(batch)

    for index, prompt in enumerate(prompts(40)):
        host.add(Job(f"r{index}", prompt, 90))
    host.run()
    assert max(asked[-100:]) < 8
    assert all(count >= 1 for count in asked[-100:-20])


# ------------------------------------------------------------------------------------------ without ids


def config(**model: Any) -> Any:
    return Some(
        model_config=Some(get_vocab_size=lambda: VOCAB, skip_tokenizer_init=True, **model),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_without_ids_requests_are_known_by_their_texts(seed: int) -> None:
    names, under_test = ByText(), adapter(capabilities=frozenset({CHAIN}), context_length=150)
    describe = Descriptions(config(), True, logging.getLogger("vllm.test"))

    def step(batch: Batch) -> list[list[int]]:
        return under_test.step(names.batch(batch.new, batch.lengths, batch.texts, describe))

    host = FakeHost(step, rows=4, seed=seed, preempts=0.1, told=False)
    host.describe = lambda name: replace(Some_request())  # type: ignore[method-assign]
    jobs = [Job(f"r{index}", prompt, 150 - len(prompt)) for index, prompt in enumerate(prompts(8))]
    expected = {job.name: plain_text(job.prompt, job.new) for job in jobs}
    for job in jobs:
        host.add(job)
    host.run()
    assert host.done == expected
    assert host.accepted > 0


# ---------------------------------------------------------------------------------------------- requests


def params(**given: Any) -> Any:
    return Some(**{"temperature": 0.0, "max_tokens": 9, "extra_args": None, **given})


def described(prediction: Any = None, sampled: bool = True, **given: Any) -> Any:
    found = Descriptions(config(), sampled, logging.getLogger("vllm.test"))
    extra = None if prediction is None else {"prediction": prediction}
    found.requests = {"x": Some(num_prompt_tokens=3, sampling_params=params(extra_args=extra, **given))}
    return found("x")


def test_what_vllm_knows_of_a_request() -> None:
    found = described([1, 2])
    assert (found.prompt_length, found.longest, found.prediction, found.drafts) == (3, 12, (1, 2), True)
    assert described(temperature=0.5).drafts
    assert not described(temperature=0.5, sampled=False).drafts
    assert not Descriptions(config(), True, logging.getLogger("x"))("unknown").prediction


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "without a tokenizer"),
        ([1, VOCAB], f"outside the vocabulary of {VOCAB}"),
        ([1, -1], "outside the vocabulary"),
        ({"type": "content"}, "must be text or token ids"),
        (7, "must be text or token ids"),
    ],
)
def test_a_bad_prediction_is_left_out_with_a_sentence(
    prediction: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert described(prediction).prediction == ()
    assert message in caplog.text


# ----------------------------------------------------------------------------------------------- options


def test_options_from_the_configuration_and_from_a_file(tmp_path: Path) -> None:
    assert parsed({}) == parsed(None) == Options()
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"nodes": 3, "share": 0.5}))
    assert parsed({"leapahead": {"config": str(file), "nodes": 4}}) == Options(nodes=4, share=0.5)
    assert parsed({"leapahead": str(file)}) == Options(nodes=3, share=0.5)
    assert parsed({"leapahead": {"drafter": "auto"}, "other": 1}) == Options()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"drafter": "lookahead"}, Refused, "lookahead decoding drafts token trees"),
        ({"drafter": "suffix"}, Refused, "choose its sources"),
        ({"sources": "suffix,lookahead"}, Refused, "lookahead"),
        ({"trees": True}, Refused, "one chain"),
        ({"draft": "x"}, Refused, "'draft_model'"),
        ({"drafter": "cascade"}, Refused, "'draft_model'"),
        ({"drafter": "ouroboros"}, Refused, "'draft_model'"),
        ({"sources": "sufix"}, BadParameter, "no source 'sufix'"),
        ({"node": 3}, BadParameter, "did you mean 'nodes'"),
        ({"xyz": 3}, BadParameter, "there are sources"),
        ({"nodes": -1}, BadParameter, "nodes=-1"),
        ({"share": 0}, BadParameter, "share=0"),
        ({"share": "much"}, BadParameter, "share='much'"),
        ({"save_seconds": 0}, BadParameter, "save_seconds=0"),
        (
            {"report_seconds": -0.5},
            BadParameter,
            "report_seconds=-0.5 is not possible: it must be a number of at least 0",
        ),
        ({"report_seconds": "5"}, BadParameter, "report_seconds='5' is not possible: it must be a number"),
        ({"share": float("nan")}, BadParameter, "share=nan"),
        ({"sources": " "}, BadParameter, "no source ''"),
        ({"sources": "suffix,suffix"}, BadParameter, "names 'suffix' twice"),
        ({"drafter_cache": ""}, BadParameter, "drafter_cache='' is not possible: it must be true, false, or a file"),
        ({"drafter_cache": 3}, BadParameter, "drafter_cache=3"),
        ({"sources": 3}, BadParameter, "sources=3"),
        ({"config": "/nowhere/at/all.json"}, BadParameter, "cannot be read"),
        ({"config": 3}, BadParameter, "path of a JSON file"),
        (7, BadParameter, "must be an object"),
    ],
)
def test_impossible_options_are_refused_by_name(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parsed({"leapahead": given})


def test_a_file_without_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(BadParameter, match="JSON object"):
        parsed({"leapahead": str(tmp_path / "list.json")})


def test_the_draft_length_of_the_options_must_fit() -> None:
    with pytest.raises(BadParameter, match="nodes=7 is not possible with num_speculative_tokens=6"):
        adapter(Options(nodes=7))


# ----------------------------------------------------------------------------------------------- figures


def test_figures_are_metrics_and_a_sentence() -> None:
    from prometheus_client import REGISTRY

    under_test = adapter()
    metrics = [Metrics(), Metrics()]  # as of two engines in one process
    labels = {"source": "suffix"}
    before = REGISTRY.get_sample_value("leapahead:drafted_tokens_total", labels) or 0.0
    served(under_test)
    for _ in range(2):
        metrics[0].send(under_test.figures)
    found = REGISTRY.get_sample_value("leapahead:drafted_tokens_total", labels)
    assert found is not None
    assert found - before == under_test.figures.drafted["suffix"] > 0
    assert f"of {under_test.figures.drafted.total()} drafted tokens" in str(under_test.figures)
