"""What the loop asks of a model: open a sequence, run one forward over trees, keep the accepted path.

Knows no backend. Glossary:

    target      a loaded model whose output is preserved
    session     one sequence of it: its tokens, its sampler, its part of the KV cache
    step        one target forward, for all sessions of the batch
    Choices     what a forward gives back: the target's own next token after every node, computed when read

Invariant, asserted by every target after a commit: the cache holds every committed token but the last; the last is the
next root.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import Array, Sampler, SamplingParams, checked
from leapahead.core.stats import Stats
from leapahead.core.tree import IntArray, TokenTree
from leapahead.core.verify import Verdict

CHAIN, TREE, LOGITS, TOP_K = "chain", "tree", "logits", "top_k"
PROMPT_ROWS = 256  # of a prompt's last tokens, what may follow is kept where it is asked for; more would cost time


class PromptTopK(NamedTuple):
    """What a target thought might follow the last tokens of a prompt, the very last one left out.

    Attributes:
        tokens: of the prompt, int64 [n].
        following: the k best behind each, int64 [n, k].
        logits: theirs, float64 [n, k], falling.
    """

    tokens: IntArray
    following: IntArray
    logits: npt.NDArray[np.float64]


class Choices:
    """The target's next token after each node of one tree, chosen when first read and then kept.

    Choosing costs O(vocab) a node (filters, noise) and verification reads only the path, so a target on the host
    chooses row by row; one on an accelerator passes `chosen` and pays a single transfer.

    Args:
        logits: float [nodes, vocab].
        tree: the draft that went through the target.
        sampler: the session's.
        chosen: int64 [nodes], if they are known already.
        borrowed: the logits lie in memory that the target's next step writes again; it calls `expire` before.
        first: the node of the first row; those before went through the target in an earlier step.
    """

    def __init__(
        self,
        logits: Array,
        tree: TokenTree,
        sampler: Sampler,
        chosen: IntArray | None = None,
        borrowed: bool = False,
        first: int = 0,
    ) -> None:
        self.tree, self.first = tree, first
        self._rows = logits
        self._borrowed, self._expired = borrowed, False
        self._sampler = sampler
        self._known: dict[int, int] = {} if chosen is None else dict(enumerate(chosen.tolist()))
        self._length = len(sampler.tokens)  # of the prefix that these logits belong to
        self._seconds = 0.0

    def __getitem__(self, node: int) -> int:
        """For the verifier: -1 where no token can be chosen, which is an error only if the text comes there."""
        if node not in self._known:
            self._choose([node])
        return self._known[node]

    def of(self, nodes: Sequence[int] | IntArray) -> IntArray:
        """For drafters: int64 [len(nodes)]; nodes not read before are chosen in one call.

        0 where no token can be chosen: a processor may ban everything after a prefix that the text will never take.
        """
        wanted = [int(node) for node in nodes]
        missing = sorted({node for node in wanted if node not in self._known})  # in the order of the rows, each once
        if missing:
            self._choose(missing)
        return np.array([max(self._known[node], 0) for node in wanted], dtype=np.int64)

    def _choose(self, nodes: list[int]) -> None:
        if self._expired:
            raise LeapaheadError("the logits of an earlier step are gone; read them before the target's next step")
        began = perf_counter()
        if self._sampler.params.processors:  # called as seldom as can be
            parts = [(nodes, self._rows[[node - self.first for node in nodes]])]
        else:  # a row stays in the processor's cache from its first operation to its last; and a slice is no copy
            parts = [([node], self._rows[node - self.first :][:1]) for node in nodes]
        for some, rows in parts:
            chosen = self._sampler.choose(rows, self.tree, np.array(some), self._length)
            self._known.update(zip(some, chosen.tolist(), strict=True))
        self._seconds += perf_counter() - began

    def seconds_since(self) -> float:
        """Wall-clock seconds of choosing since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    @property
    def logits(self) -> Array:
        """float [nodes - first, vocab], unprocessed, of the target's kind and on its device; yours to keep."""
        if self._expired:
            raise LeapaheadError("the logits of an earlier step are gone; read them before the target's next step")
        return np.array(self._rows) if self._borrowed else self._rows

    def top_k(self, k: int) -> tuple[IntArray, npt.NDArray[np.float64]]:
        """The k best tokens after each node: int64 [nodes - first, k], and their logits, float64, falling.

        Unprocessed logits, of every node, accepted or not.
        """
        if self._expired:
            raise LeapaheadError("the logits of an earlier step are gone; read them before the target's next step")
        began = perf_counter()
        found = best(self._rows, k)
        self._seconds += perf_counter() - began
        return found

    def probabilities(self, nodes: Sequence[int] | IntArray) -> npt.NDArray[np.float64]:
        """float64 [len(nodes), vocab] on the host: what the sampler draws from after each of them, all filters applied.

        Greedy it is 1 at the choice. For the rejection rule.

        Raises:
            BadLogits: they are NaN, infinite or all banned.
        """
        if self._expired:
            raise LeapaheadError("the logits of an earlier step are gone; read them before the target's next step")
        began = perf_counter()
        wanted = np.asarray(nodes, dtype=np.int64)
        if self._sampler.dice is None:
            chosen = checked(self._sampler.choose(self._rows[wanted - self.first], self.tree, wanted, self._length), "")
            found = np.zeros((len(wanted), self._rows.shape[-1]))
            found[np.arange(len(wanted)), chosen] = 1.0
        else:
            scores = self._sampler.scores(self._rows[wanted - self.first], self.tree, wanted, self._length)
            found = np.array(scores if isinstance(scores, np.ndarray) else scores.cpu(), dtype=np.float64)
            found = found - found.max(axis=1, keepdims=True)
            np.exp(found, out=found)
            found /= found.sum(axis=1, keepdims=True)
            checked(np.where(np.isfinite(found).all(axis=1), 0, -1), f"position {self._length}")
        self._seconds += perf_counter() - began
        return found

    def expire(self) -> None:
        """The logits are gone; what was chosen stays known."""
        self._expired, self._rows = True, None


def best(rows: Array, k: int) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """The k greatest of each row, falling: indices int64 [rows, k], values float64 [rows, k], on the host."""
    if hasattr(rows, "topk"):  # torch: its own selection, and one transfer of 2 k numbers a row
        values, tokens = rows.topk(k, dim=-1)
        return tokens.cpu().numpy(), values.double().cpu().numpy()
    size = rows.shape[-1]
    width = 1 << round(log2(max(1.0, size * k)) / 2)
    if size >= 4 * width and width > k:  # the k best lie in the k columns of greatest maxima: few numbers are sorted
        height = size // width
        maxima = rows[:, : height * width].reshape(-1, height, width).max(axis=1)
        columns = np.argpartition(maxima, -k, axis=-1)[:, -k:]  # [rows, k]
        looked = (columns[:, :, None] + width * np.arange(height)).reshape(len(rows), -1)
        if rest := size - height * width:
            looked = np.concatenate((looked, np.tile(np.arange(size - rest, size), (len(rows), 1))), axis=-1)
        some = np.take_along_axis(rows, looked, axis=-1)
        tokens = np.take_along_axis(looked, np.argpartition(some, -k, axis=-1)[:, -k:], axis=-1)
    else:
        tokens = np.argpartition(rows, -k, axis=-1)[:, -k:]
    values = np.take_along_axis(rows, tokens, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(tokens, order, axis=-1), np.take_along_axis(values, order, axis=-1).astype(np.float64)


class KeptPrompt:
    """For targets: collects the best tokens after each of a prompt's last ones.

    Args:
        k: how many, at most as many as the vocabulary has.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._parts: list[tuple[IntArray, npt.NDArray[np.float64]]] = []

    def see(self, logits: Array) -> None:
        """Of the next tokens of the prompt, [n, vocab]; the last ones shown are those before the very last."""
        self._parts.append(best(logits, self.k))

    def found(self, tokens: Sequence[int]) -> PromptTopK | None:
        """For the tokens shown, the last of the prompt but one; None if none had to be read."""
        if not self._parts:
            return None
        following, logits = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        return PromptTopK(np.array(tokens[-1 - len(following) : -1]), following, logits)


@runtime_checkable
class Session(Protocol):
    """One sequence of a target."""

    tokens: list[int]
    """Committed tokens, prompt included. Read it, never write it."""
    sampler: Sampler
    prompt_top_k: PromptTopK | None
    """Where `open` was asked for it."""

    def commit(self, verdict: Verdict) -> None:
        """Makes the verdict's path final and forgets every other node of the last step's tree."""

    def close(self) -> None:
        """Gives the cache rows back. Closing twice is harmless."""


@runtime_checkable
class Target(Protocol):
    """A loaded model.

    Attributes:
        name: for reports and messages.
        vocab_size: length of a row of logits.
        context_length: greatest number of tokens of a sequence.
        max_leaves: greatest number of leaves of a tree; it may fall while more sessions are open.
        max_nodes: the same of its nodes, the root counted.
        precision: relative step of the coarsest numbers that it computes with, as 2**-7 for bfloat16: how far two equal
            computations may part.
        capabilities: which of "chain" (several tokens in one forward), "tree" (branches too), "logits" (of every node,
            to drafters), "top_k" (the best of them) it has. Without any it decodes plainly.
        fingerprint: what the time of a forward depends on: model, precision, device, threads.
        pads: whether all sequences of a step have as many rows as the longest of them.
    """

    name: str
    vocab_size: int
    context_length: int
    precision: float
    capabilities: frozenset[str]
    fingerprint: str
    pads: bool

    @property
    def max_leaves(self) -> int: ...

    @property
    def max_nodes(self) -> int: ...

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        stats: Stats | None = None,
        reserve: int = 0,
        top_k: int = 0,
    ) -> Session:
        """Reads the prompt but its last token into the cache.

        Args:
            tokens: the prompt.
            params: of the sampling.
            stats: where the prompt and its forwards are counted.
            reserve: the length that the sequence may grow to, if it is known; a target whose sessions share a cache of
                fixed size keeps so much of it free.
            top_k: keep so many of the best tokens after each of the prompt's last `PROMPT_ROWS` tokens, those that
                had to be read, in the session's `prompt_top_k`. Targets with the capability "top_k" do.

        Raises:
            BadParameter: no tokens, or one outside the vocabulary.
            ContextOverflow: the prompt leaves no room in the context.
            CacheFull: it does not fit beside the sessions that are open.
        """

    def step(
        self, sessions: Sequence[Any], trees: Sequence[TokenTree], known: Sequence[int] | None = None
    ) -> list[Choices]:  # of its own sessions
        """ONE forward for all trees, each over its session's last committed token.

        Args:
            known: for each tree, how many of its nodes, the first ones, are those of the session's last step, not
                committed since; only the nodes behind them go through the model, at least one of each tree, and have
                rows in the `Choices`. So a draft grows without being computed again. 0 by default.
        """


@runtime_checkable
class Companion(Protocol):
    """A target that reads along in the cache of another one: a session of it follows a session of that.

    `open` with the live tokens of a session of the other one costs nothing then, and its commits are that one's.
    """

    def shares(self, tokens: Sequence[int]) -> bool:
        """Whether these are such tokens, the list itself."""


@runtime_checkable
class Forgetful(Protocol):
    """A target that keeps the prompts of closed sessions, so that a later one with the same beginning is cheaper."""

    def forget(self) -> None:
        """Gives them up, and their memory."""


def checked_prompt(tokens: Sequence[int], vocab_size: int, context_length: int) -> list[int]:
    """The prompt of a new session, as plain integers.

    Raises:
        BadParameter: no tokens, or one outside the vocabulary.
        ContextOverflow: the prompt leaves no room in the context.
    """
    prompt = [int(token) for token in tokens]
    if not prompt:
        raise BadParameter("the prompt is empty; give at least one token")
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise BadParameter(f"the prompt's token {token} is outside the vocabulary of {vocab_size}")
    if len(prompt) >= context_length:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and the context {context_length}; shorten the prompt"
        )
    return prompt


def require(target: Target, needs: frozenset[str], drafter: str) -> None:
    """Refuses by name, before any work, what the target cannot give."""
    missing = sorted(needs - target.capabilities)
    if missing:
        raise Refused(
            f"drafter {drafter!r} needs {' and '.join(missing)} from the target, which {target.name} does not have"
            f"{REASONS.get(missing[0], '')}; use drafter='plain'"
            + (", or one that drafts chains such as 'prompt_lookup'" if target.capabilities >= {CHAIN} else "")
        )


REASONS = {
    TREE: " (its attention cannot be told which tokens of a tree see each other)",
    CHAIN: " (its state cannot forget rejected tokens)",
}
