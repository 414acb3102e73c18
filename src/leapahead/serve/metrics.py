"""Metrics in the format of Prometheus, under the names that vLLM gives them, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from leapahead.engine.request import Handle
from leapahead.planner.draft import Step

LABELS = ("model_name", "engine")
SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
MOST_POSITIONS = 64  # depths of drafts that have a series of their own
OF_ALL = 4  # counters of all steps, before those of positions


class InterTokenLatency(Collector):
    """A histogram of the times between the steps of texts. Those of a text, which may have 100,000, come at once.

    Args:
        labels: values of `LABELS`.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._counts, self._sum = np.zeros(len(SHORT) + 1, dtype=np.int64), 0.0

    def observe(self, times: Sequence[float]) -> None:
        """To be called with the times of all steps of a text."""
        seconds = np.diff(times)
        self._counts += np.bincount(np.searchsorted(SHORT, seconds), minlength=len(self._counts))
        self._sum += float(seconds.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        found = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Between the tokens of one step of a text and those of the next.",
            labels=LABELS,
        )
        bounds = map(floatToGoString, (*SHORT, float("inf")))
        found.add_metric(self._labels, list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True)), self._sum)
        yield found


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        model: the value of the label `model_name`.
        running: number of texts that are being decoded.
        waiting: number of texts that wait.
        cache_usage: used part of the KV cache, from 0 to 1.
        preemptions: how often a text gave its part of the KV cache to others.
    """

    def __init__(
        self,
        model: str,
        running: Callable[[], float],
        waiting: Callable[[], float],
        cache_usage: Callable[[], float],
        preemptions: Callable[[], int],
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._gauge("num_requests_running", "Texts that are being decoded.", running)
        self._gauge("num_requests_waiting", "Texts that wait to be decoded.", waiting)
        self._gauge("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", cache_usage)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter("prefix_cache_hits", "Tokens of prompts that were in the cache already.")
        self.queried_tokens = self._counter("prefix_cache_queries", "Tokens of prompts that were looked up in it.")
        generation_tokens = self._counter("generation_tokens", "Tokens of texts.")
        preempted = self._counter("num_preemptions", "How often a text gave its part of the full KV cache to others.")
        drafts = self._counter("spec_decode_num_drafts", "Steps of texts that had a draft.")
        draft_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft; 0 is the first.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        positions = [per_position.labels(**self._labels, position=str(at)) for at in range(MOST_POSITIONS)]
        self._of_steps = (generation_tokens, drafts, draft_tokens, accepted_tokens, *positions)
        self._preemptions = preemptions
        self._counters = (*self._of_steps, preempted)
        self._counted, self._reported = [0] * len(self._of_steps), [0] * len(self._counters)
        self._finished = Counter(
            "vllm:request_success", "Finished texts.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(**self._labels, finished_reason=reason)
        self.first_token = self._histogram("time_to_first_token_seconds", "From the request to the first token.", LONG)
        self.inter_token = InterTokenLatency(list(self._labels.values()))
        self.registry.register(self.inter_token)
        self.whole = self._histogram("e2e_request_latency_seconds", "From the request to the end of the text.", LONG)
        self.queued = self._histogram("request_queue_time_seconds", "From the request until its turn comes.", LONG)
        self.reading = self._histogram("request_prefill_time_seconds", "From its turn to the first token.", LONG)
        self.inference = self._histogram("request_inference_time_seconds", "From its turn to the end.", LONG)
        self.decoding = self._histogram("request_decode_time_seconds", "From the first token to the end.", LONG)
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of the prompt of a text.", COUNTS)
        self.generated = self._histogram("request_generation_tokens", "Tokens of a text.", COUNTS)
        self.most = self._histogram("request_params_max_tokens", "Greatest length that a text may have.", COUNTS)
        self.samples = self._histogram("request_params_n", "Texts for each prompt.", SAMPLES)

    def text(self) -> bytes:
        """All of them, in the text format of Prometheus. To be called by one thread."""
        for index, (counter, counted) in enumerate(
            zip(self._counters, [*self._counted, self._preemptions()], strict=True)
        ):
            counter.inc(counted - self._reported[index])
            self._reported[index] = counted
        return generate_latest(self.registry)

    def observe(self, step: Step) -> None:
        """To be called after every step of a text, by the thread that decodes, which has no time between two steps."""
        counted = self._counted
        counted[0] += len(step.verdict.tokens)
        drafted, accepted = len(step.proposal.tree) - 1, step.verdict.accepted
        if drafted:
            counted[1] += 1
            counted[2] += drafted
            counted[3] += accepted
            for position in range(min(accepted, MOST_POSITIONS)):
                counted[OF_ALL + position] += 1

    def finished(self, handle: Handle, most: int, began: float, now: float) -> None:
        """To be called at the end of a text.

        Args:
            handle: of the text.
            most: greatest length that it could have.
            began: when the request came, in seconds of `time.perf_counter`.
            now: the same clock.
        """
        reason = "error" if handle.error is not None else handle.finish_reason
        reason = reason if reason in ("stop", "length", "error") else "abort"
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        if not handle.times:
            return
        self.first_token.observe(handle.times[0] - began)
        self.inter_token.observe(handle.times)
        if reason in ("stop", "length"):
            self.whole.observe(now - began)
            self.queued.observe(handle.opened - began)
            self.reading.observe(handle.times[0] - handle.opened)
            self.inference.observe(handle.times[-1] - handle.opened)
            self.decoding.observe(handle.times[-1] - handle.times[0])
            self.prompt.observe(handle.stats.prompt_tokens)
            self.generated.observe(len(handle.tokens))
            self.most.observe(most)

    def read(self, prompt_tokens: int, cached_tokens: int, samples: int) -> None:
        """To be called once for every prompt that was read.

        Args:
            prompt_tokens: its length.
            cached_tokens: those of its tokens that were in the cache already.
            samples: number of its texts.
        """
        self.samples.observe(samples)
        self.prompt_tokens.inc(prompt_tokens)
        self.queried_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached_tokens)

    def _gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", help_text, LABELS, registry=self.registry)
        gauge.labels(**self._labels).set_function(value)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"vllm:{name}", help_text, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self.registry).labels(
            **self._labels
        )
