"""A host with the habits of vLLM's scheduler and model runner, on a table model: for the tests of the vLLM adapter.

Its batch has rows that are closed when a request leaves them: the last row moves into the gap. Prompts are read in
chunks beside the steps of others, requests are preempted and read again, drafts are cut by the scheduler, and in some
steps no drafts are asked for. What it was told and gave is compared with the model's plain text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from leapahead.integrations.vllm.batch import Batch, Request

VOCAB, LONGEST = 32, 160


def logits_after(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 [vocab]: of a model that repeats itself, with another token now and then."""
    one, two = tokens[-1], tokens[-2] if len(tokens) > 1 else 0
    branch = len(tokens) % 13 == 0
    generator = np.random.default_rng((one * 131 + two * 7 + branch) % 97)
    return generator.normal(size=VOCAB).astype(np.float32)


def next_token(tokens: Sequence[int]) -> int:
    return int(logits_after(tokens).argmax())


def plain_text(prompt: Sequence[int], new: int) -> list[int]:
    """The greedy text."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Job:
    """A request of the host."""

    name: str
    prompt: list[int]
    new: int
    prediction: tuple[int, ...] = ()
    temperature: float = 0.0
    text: list[int] = field(default_factory=list)
    computed: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.text


class FakeHost:
    """Serves requests.

    Args:
        step: what is asked for drafts after every forward.
        rows: of the batch.
        chunk: tokens of a forward, at most.
        seed: of what is left to chance.
        preempts: the chance of a preemption in each step; also of a shortened draft, and of a step without drafts.
        told: whether the batches have ids, verified drafts and logits.
    """

    def __init__(
        self,
        step: Callable[[Batch], list[list[int]]],
        rows: int = 8,
        chunk: int = 24,
        seed: int = 0,
        preempts: float = 0.0,
        told: bool = True,
    ) -> None:
        self._step, self._chunk, self._preempts, self._told = step, chunk, preempts, told
        self._random = random.Random(seed)
        self.waiting: list[Job] = []
        self.running: list[Job] = []  # in the order of the rows
        self.jobs: dict[str, Job] = {}
        self.done: dict[str, list[int]] = {}
        self.texts = np.zeros((rows, LONGEST), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.drafted = self.accepted = 0
        self.most = 6
        self.longest_draft = 0

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job
        self.waiting.append(job)

    def abort(self, name: str) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            (self._leave if job in self.running else self.waiting.remove)(job)

    def describe(self, name: str) -> Request:
        job = self.jobs[name]
        longest = len(job.prompt) + job.new
        return Request(len(job.prompt), longest, job.temperature, job.prediction, drafts=job.temperature == 0)

    def run(self) -> None:
        """Until all requests are over."""
        while self.jobs:
            self.forward()

    def forward(self) -> None:
        """One forward, and the drafts for the next one."""
        if self.running and self._random.random() < self._preempts:
            victim = self._random.choice(self.running)
            self._leave(victim)
            victim.computed, victim.draft = 0, []
            self.waiting.insert(0, victim)
        while self.waiting and len(self.running) < len(self.texts):
            job = self.waiting.pop(0)
            self._enter(job)
        new, verified, rows, total = [], [], [], 0
        for job in self.running:
            tokens, count, own = self._advance(job)
            new.append(tokens)
            verified.append(count)
            rows += own
            total += self._read
        for row, job in enumerate(self.running):
            self.texts[row, : len(job.tokens)] = job.tokens
            self.lengths[row] = len(job.tokens)
        if self._random.random() >= self._preempts / 2:
            self._ask(new, verified, rows, total)
        for job in list(self.running):
            if len(job.text) >= job.new:
                self._leave(job)
                del self.jobs[job.name]
                self.done[job.name] = job.text[: job.new]

    def _advance(self, job: Job) -> tuple[list[int], int, list[Any]]:
        """Reads the prompt's next chunk, or verifies the draft: new tokens, verified ones, rows of logits."""
        known = len(job.tokens)
        if job.computed < known - 1 or not job.text:
            self._read = min(self._chunk, known - job.computed)
            job.computed += self._read
            row = logits_after(job.tokens[: job.computed])
            if job.computed < known:
                return [], 0, [row]
            job.text.append(int(row.argmax()))
            return job.text[-1:], 0, [row]
        draft, job.draft = job.draft, []
        assert len(draft) <= self.most
        assert all(0 <= token < VOCAB for token in draft), draft
        assert len(job.text) + len(draft) < max(job.new, 1) + (not draft), "a draft beyond the end of the text"
        if draft and self._random.random() < self._preempts:
            draft = draft[: self._random.randrange(len(draft))]  # as a grammar or the scheduler's budget cuts it
        self._read = len(draft) + 1
        tokens: list[int] = []
        rows = [logits_after(job.tokens + draft[:node]) for node in range(len(draft) + 1)]
        for node, row in enumerate(rows):
            tokens.append(int(row.argmax()))
            if node == len(draft) or draft[node] != tokens[-1]:
                break
        job.text += tokens
        job.computed = len(job.tokens) - 1
        self.drafted += len(draft)
        self.accepted += len(tokens) - 1
        return tokens, len(draft), rows

    def _ask(self, new: list[list[int]], verified: list[int], rows: list[Any], total: int) -> None:
        names = [job.name for job in self.running]
        if self._told:
            alive = {job.name for job in [*self.running, *self.waiting]}
            batch = Batch(
                names, new, self.lengths, self.texts, alive, self.describe, verified, total, np.array(rows), None
            )
        else:
            batch = Batch((), new, self.lengths, self.texts, (), self.describe)
        drafts = self._step(batch)
        assert len(drafts) == len(self.running)
        for job, draft, tokens in zip(self.running, drafts, new, strict=True):
            assert not draft or tokens, "drafts behind a prompt that is not read"
            job.draft = draft
            self.longest_draft = max(self.longest_draft, len(draft))

    def _enter(self, job: Job) -> None:
        self.running.append(job)

    def _leave(self, job: Job) -> None:
        row = self.running.index(job)
        last = self.running.pop()
        if last is not job:
            self.running[row] = last
