"""What the proposer counts, as text for the log and as Prometheus metrics. Counters are stored; rates are derived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from leapahead.planner.draft import Step

METRICS = {  # name -> help; in `prometheus_client`'s default registry, beside vLLM's own
    "drafted_tokens": "Drafted tokens that vLLM has verified, by their source.",
    "accepted_tokens": "Drafted tokens that were accepted, by their source.",
    "steps": "Steps of single requests, with and without drafted tokens.",
    "drafting_seconds": "Seconds spent in drafting.",
    "resynchronised": "Times that a request's tokens were not what the proposer knew of them.",
    "errors": "Steps in which drafting failed, so that nothing was drafted.",
}
LABELS = {"drafted_tokens": ["source"], "accepted_tokens": ["source"], "steps": ["kind"]}


class Figures:
    """Counters since the start.

    Attributes:
        drafted, accepted: drafted tokens that were verified, and those that were accepted, by source.
        drafted_steps, plain_steps: steps of single requests with and without drafted tokens.
        seconds: spent in drafting.
        calls, requests: forwards, and requests of all of them together.
        resynchronised: how often a request's tokens were not what was known of them.
        errors: how often drafting failed.
    """

    def __init__(self) -> None:
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.drafted_steps = self.plain_steps = self.calls = self.requests = self.resynchronised = self.errors = 0
        self.seconds = 0.0

    def count(self, step: Step) -> None:
        """Counts a step that was verified."""
        if len(step.tree) == 1:
            self.plain_steps += 1
            return
        self.drafted_steps += 1
        sources = step.proposal.sources
        self.drafted.update(sources[1:])
        self.accepted.update(sources[1 : step.verdict.accepted + 1])

    def add(self, seconds: float, requests: int) -> None:
        """Counts a call that took so long for so many requests."""
        self.seconds += seconds
        self.calls += 1
        self.requests += requests

    def values(self) -> dict[str, Mapping[tuple[str, ...], float]]:
        """Name of METRICS -> labels -> value."""
        return {
            "drafted_tokens": {(source,): count for source, count in self.drafted.items()},
            "accepted_tokens": {(source,): count for source, count in self.accepted.items()},
            "steps": {("drafted",): self.drafted_steps, ("plain",): self.plain_steps},
            "drafting_seconds": {(): self.seconds},
            "resynchronised": {(): self.resynchronised},
            "errors": {(): self.errors},
        }

    def __str__(self) -> str:
        drafted, accepted = self.drafted.total(), self.accepted.total()
        steps = self.drafted_steps + self.plain_steps
        sources = ", ".join(
            f"{source} {self.accepted[source]} of {count}" for source, count in self.drafted.most_common()
        )
        text = (
            f"{steps} steps of requests, {self.drafted_steps} with drafts; accepted {accepted} of {drafted} drafted "
            f"tokens{f' ({sources})' if sources else ''}; drafting took "
            f"{1e6 * self.seconds / max(self.requests, 1):.0f} microseconds for a request and step"
        )
        if self.resynchronised or self.errors:
            text += f"; {self.resynchronised} times resynchronised, {self.errors} errors"
        return text


@cache
def _counter(make: Callable[..., Any], name: str) -> Any:
    """The counter of a name; there is one in a process, however many engines that has."""
    return make(f"leapahead:{name}", METRICS[name], LABELS.get(name, []))


class Metrics:
    """The counters as Prometheus metrics; nothing where `prometheus_client` is not installed."""

    def __init__(self) -> None:
        self._counters: dict[str, Any] = {}
        self._sent: dict[tuple[str, tuple[str, ...]], float] = {}
        try:
            client = import_module("prometheus_client")
        except ImportError:
            return
        self._counters = {name: _counter(client.Counter, name) for name in METRICS}

    def send(self, figures: Figures) -> None:
        """Adds what the counters have grown by since the last call."""
        for name, values in figures.values().items():
            if (counter := self._counters.get(name)) is None:
                continue
            for labels, value in values.items():
                grown = value - self._sent.get((name, labels), 0)
                self._sent[name, labels] = value
                (counter.labels(*labels) if labels else counter).inc(grown)
