"""The guard: compares what drafted steps really cost and bring with plain steps, and suspends drafting that loses.

    loss of a step  =  (forward + drafting) / plain step  -  tokens / sequences         in plain steps
    excess          =  max(0, excess + loss)                                            a cumulative sum test

Gains reduce the excess to 0 and no further, so that gains of long ago do not pay for a loss now. The verdict is that
drafting loses when the excess is greater than chance explains:

    excess  >  least + 2.5 sqrt(steps since the excess was 0 x variance of the loss)

Two plain steps are run before it, because the machine may have become slower: the steps since the last plain step are
valued again with their time, where it is longer. If they still lose, drafting is suspended, for twice as many steps
each time, and the next trial may lose less. Once drafting has gained as much as a trial may lose, all this is
forgotten.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

LEAST = 4.0  # excess in plain steps at which drafting is suspended, at first
TRIAL_LEAST = 2.0  # and after a suspension
CHANCE = 2.5  # standard deviations
RATE = 0.04  # weight of the newest step in the mean and variance of the loss
RECOVERED = 5.0  # plain steps gained after a suspension from which it is forgotten
CHECKS = 2  # plain steps before a verdict
FIRST, LONGEST = 8, 1024  # steps of a suspension
MOST_SECONDS = 1.3  # a step counts as at most so many times its expected time: an interruption is not its fault
MOST_RECENT = 64  # steps that are valued again, at most
MOST_REQUESTS, REQUEST_PAUSE = 4, 64  # plain steps requested in a row, and steps until more are requested


class Losses(NamedTuple):
    """The losses of drafted steps, in plain steps.

    Attributes:
        excess: their sum since it was 0 last.
        steps: how many these are.
        gained: what all steps since the last suspension have gained, at most `RECOVERED`.
    """

    excess: float = 0.0
    steps: int = 0
    gained: float = 0.0

    def add(self, loss: float) -> Losses:
        """With one more step."""
        gained = min(self.gained - loss, RECOVERED)
        if self.excess + loss <= 0.0:
            return Losses(gained=gained)
        return Losses(self.excess + loss, self.steps + 1, gained)


class Guard:
    """Judges the steps of one drafter with one number of sequences."""

    def __init__(self) -> None:
        self._settled = self._losses = Losses()  # without and with the steps that may be valued again
        # Those steps: seconds, tokens for each sequence, seconds of a plain step at that time.
        self._recent: list[tuple[float, float, float]] = []
        self._checks = 0  # plain steps to be run before the verdict
        self._suspended, self._length = 0, FIRST
        self._requests = 0
        self._mean: float | None = None  # of the loss of recent drafted steps
        self._variance = 0.0

    @property
    def suspended(self) -> bool:
        """Whether nothing may be drafted now."""
        return self._suspended > 0

    @property
    def checking(self) -> bool:
        """Whether the next step must be plain for a verdict."""
        return self._checks > 0

    @property
    def settled(self) -> bool:
        """Whether another plain step would tell it nothing: there was no drafted one since the last, and no verdict."""
        return not (self._recent or self._suspended or self._checks)

    def requests_plain(self, wanted: bool) -> bool:
        """Whether a plain step is to be run because the latency profile wants one. To be called once per step.

        Args:
            wanted: by the latency profile. Not followed for ever, as some targets may never show it a plain step.
        """
        if self._requests < 0:
            self._requests += 1
            return False
        self._requests = self._requests + 1 if wanted else 0
        if self._requests > MOST_REQUESTS:
            self._requests = -REQUEST_PAUSE
        return self._requests > 0

    def observe_drafted(self, seconds: float, expected: float, tokens: float, plain: float) -> None:
        """Takes a step with drafted nodes into account.

        Args:
            seconds: of the forward and of drafting.
            expected: that they were expected to take.
            tokens: committed for each sequence.
            plain: seconds of a plain step.
        """
        seconds = min(seconds, MOST_SECONDS * expected)
        if len(self._recent) == MOST_RECENT:
            self._recent, self._settled = [], self._losses
        self._recent.append((seconds, tokens, plain))
        loss = seconds / plain - tokens
        self._losses = self._losses.add(loss)
        self._mean = loss if self._mean is None else self._mean + RATE * (loss - self._mean)
        self._variance += RATE * ((loss - self._mean) ** 2 - self._variance)
        if not self._checks and self._lost:
            self._checks = CHECKS

    def observe_plain(self, plain: float) -> None:
        """Takes a step without drafted nodes into account.

        Args:
            plain: seconds of a plain step, as they are known with this one.
        """
        self._suspended -= self.suspended
        losses = self._settled
        for seconds, tokens, before in self._recent:
            losses = losses.add(seconds / max(plain, before) - tokens)
        self._losses = losses
        self._checks -= self.checking
        if self._checks:
            return
        if self._lost:
            self._losses = Losses()
            self._suspended, self._length = self._length, min(2 * self._length, LONGEST)
        elif losses.gained >= RECOVERED:
            self._length = FIRST
        self._recent, self._settled = [], self._losses

    def pass_by(self) -> None:
        """A step that cannot be judged, since other drafters drafted in it, too: a verdict is put off."""
        self._suspended -= self.suspended
        self._checks = 0

    @property
    def _lost(self) -> bool:
        """Whether the excess is greater than chance explains."""
        least = LEAST if self._length == FIRST else TRIAL_LEAST
        return self._losses.excess > least + CHANCE * sqrt(self._losses.steps * self._variance)
