"""What one forward gives back: the target's choice after every node, and the captured top-k, logits and hidden states.

Everything is computed when it is read. This module imports no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, is_torch_array

from leapahead.core.errors import BadLogits, BadParameter, LeapaheadError, Refused
from leapahead.core.filters import largest_at
from leapahead.core.sampling import Array, Sampler, checked
from leapahead.core.tree import IntArray, TokenTree

FloatArray = npt.NDArray[np.float64]


class Rows:
    """What a forward knows of its rows: top-k tokens, logits, hidden states. Computed when read.

    Args:
        logits: float [rows, vocab], of the target's kind.
        hidden: float [rows, layers * hidden_size], the captured layers side by side; None where none were captured.
        borrowed: the logits lie in memory that the target's next forward overwrites; it calls `expire` before.

    Attributes:
        layers: those of `hidden`, in their order; set by whoever made the capture request.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, logits: Array, hidden: Array = None, borrowed: bool = False) -> None:
        self._rows, self._hidden, self._borrowed = logits, hidden, borrowed
        self._best: tuple[IntArray, FloatArray] | None = None  # the widest selection that was read
        self._expired = False
        self._seconds = 0.0

    def top_k(self, k: int) -> tuple[IntArray, FloatArray]:
        """The k likeliest tokens after each row: int64 [rows, k], and their logits, float64 [rows, k], falling.

        From unprocessed logits, for every row, accepted or not.
        """
        if self._best is None or self._best[0].shape[1] < k:
            began = perf_counter()
            self._best = best(self._live(), k)
            self._seconds += perf_counter() - began
        tokens, logits = self._best
        return tokens[:, :k], logits[:, :k]

    def log_sums(self, rows: Sequence[int]) -> FloatArray:
        """float64 [len(rows)] on the host: of each of these rows, the log of the sum of exp over all its logits."""
        logits = self._live()[list(rows)]
        if is_torch_array(logits):  # on its device, so that one number a row is transferred
            logits = (logits if logits.dtype.itemsize >= 4 else logits.float()).detach()
            return np.asarray(logits.logsumexp(dim=-1).cpu().double().numpy())  # MPS has no float64
        top = logits.max(axis=1, keepdims=True)
        found: FloatArray = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1, dtype=np.float64))
        return found

    @property
    def logits(self) -> Array:
        """float [rows, vocab], unprocessed, of the target's kind and on its device. They are the reader's to keep."""
        rows = self._live()
        return np.array(rows) if self._borrowed else rows

    @property
    def hidden(self) -> Array:
        """float [rows, layers * hidden_size], of the target's kind and on its device: the captured layers side by side.

        Raises:
            Refused: the capture request of this forward named no layers.
        """
        if self._hidden is None:
            raise Refused("no hidden states were captured; name their layers in Capture(hidden=...)")
        return self._hidden

    def states(self, layers: tuple[int, ...]) -> Array:
        """The hidden states of some of the captured layers, side by side in this order; otherwise as `hidden`."""
        hidden = self.hidden
        if layers == self.layers:
            return hidden
        size = hidden.shape[-1] // len(self.layers)
        columns = [np.arange(size) + size * self.layers.index(layer) for layer in layers]
        return hidden[:, np.concatenate(columns)]

    @property
    def width(self) -> int:
        """Columns of the logits."""
        return int(self._live().shape[-1])

    def seconds_since(self) -> float:
        """Wall-clock seconds spent in choosing and in selecting top-k tokens since the last call of this method."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def expire(self) -> None:
        """Called by the target before it overwrites the logits; what was read before stays known."""
        self._expired, self._rows = True, None

    def _live(self) -> Array:
        if self._expired:
            raise LeapaheadError("the logits of an earlier step are gone; read them before the target's next step")
        return self._rows


class PromptRows(Rows):
    """The captured rows of a chunk of the prompt.

    Args:
        tokens: int64 [rows], the prompt's tokens of these rows.
        start: the position of the first of them in the sequence.
        logits: of all rows, or of the last ones where only their top-k tokens were captured, or none of them.

    Attributes:
        top_k_start: the position of the first row of `top_k`; `end` where there are none.
    """

    def __init__(
        self, tokens: IntArray, start: int, logits: Array, hidden: Array = None, borrowed: bool = False
    ) -> None:
        super().__init__(logits, hidden, borrowed)
        self.tokens, self.start = tokens, start
        self.top_k_start = self.end - (0 if logits is None else len(logits))

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + len(self.tokens)


class Choices(Rows):
    """The target's next token after each node of one tree, chosen when first read and then kept.

    Choosing costs O(vocab) a node (filters, noise), and verification reads the accepted path alone. So a target on the
    host chooses row by row; one on an accelerator passes `chosen` and `best`, and pays for a single transfer.

    Args:
        logits: float [nodes - num_computed, vocab].
        tree: the draft that went through the target.
        sampler: the session's.
        chosen: int64 [nodes], where they are known already.
        borrowed: see `Rows`.
        num_computed: the node of the first row; those before it went through the target in an earlier step.
        hidden: see `Rows`.
        best: what `top_k` gives, where it is known already.

    Attributes:
        prompt: the captured rows of the prompt's tokens that were read in the same forward; None for none.
        probes: of each of the tree's probes its rows; not among those of the nodes.
        prepares: whether the target prepared itself for forwards of this size in this one, as by capturing it. Its time
            says nothing of others then.
        took_part: false where the prompt was not read to its end by this forward, so that there are no rows.
    """

    prompt: PromptRows | None = None
    probes: Sequence[Rows] = ()
    took_part = True
    prepares = False

    def __init__(
        self,
        logits: Array,
        tree: TokenTree,
        sampler: Sampler,
        chosen: IntArray | None = None,
        borrowed: bool = False,
        num_computed: int = 0,
        hidden: Array = None,
        best: tuple[IntArray, FloatArray] | None = None,
    ) -> None:
        super().__init__(logits, hidden, borrowed)
        self._best = best
        self.tree, self.num_computed = tree, num_computed
        self._sampler = sampler
        self._known: dict[int, int] = {} if chosen is None else dict(enumerate(chosen.tolist()))
        self._length = len(sampler.tokens)  # of the prefix that these logits belong to
        self._raised: dict[int, Exception] = {}  # by a processor after that node

    def __getitem__(self, node: int) -> int:
        """For the verifier: -1 where no token can be chosen, which is an error only if the text comes there."""
        if node not in self._known:
            self._choose([node])
        return self._known[node]

    def of(self, nodes: Sequence[int] | IntArray) -> IntArray:
        """For drafters: int64 [len(nodes)]; nodes that were not read before are chosen in one call.

        0 where no token can be chosen: a processor may ban everything, or raise, after a prefix that the text will
        never take.
        """
        return np.array([max(chosen, 0) for chosen in self._chosen(nodes)], dtype=np.int64)

    def check(self, node: int) -> None:
        """Says why no token can be chosen after a node to which the text has come.

        Raises:
            Exception: what a processor raised there.
            BadParameter: the grammar could not be followed.
            BadLogits: the logits are NaN, infinite or all banned.
        """
        if (error := self._raised.get(node)) is not None:
            raise error
        if (grammar := self._sampler.grammar) is not None and grammar.problem:
            raise BadParameter(grammar.problem)
        try:
            checked([-1], f"position {self._length + self.tree.depth_list[node]}")
        except BadLogits as found:
            with suppress(Refused):  # logits that were not gathered from several devices
                found.banned = bool(np.isfinite(_host(self._live()[node - self.num_computed]).max()))
            raise

    def probabilities(self, nodes: Sequence[int] | IntArray) -> FloatArray:
        """float64 [len(nodes), vocab] on the host: what the sampler draws from after each node, all filters applied.

        Greedily it is 1 at the choice. All are 0 where no token can be chosen. For the rejection rule.
        """
        if self._sampler.noise is None:
            found = np.zeros((len(nodes), self.width))
            for row, chosen in enumerate(self._chosen(nodes)):
                found[row, chosen] = chosen >= 0
            return found
        began, found = perf_counter(), _softmax(self._scores(np.asarray(nodes, dtype=np.int64)))
        self._seconds += perf_counter() - began
        return found

    def log_distribution(self, node: int) -> FloatArray:
        """float64 [vocab] on the host: log-softmax of the scores after a node, from which the choice there is made.

        The temperature and all filters are applied; greedily, it is the distribution at temperature 1. -inf where a
        token is banned; nothing but -inf where no token can be chosen. For relaxed acceptance rules.
        """
        began = perf_counter()
        scores: FloatArray = self._scores(np.array([node]))[0]
        top = scores.max()
        if np.isfinite(top):
            scores -= top + np.log(np.exp(scores - top).sum())
        else:
            scores[:] = -np.inf
        self._seconds += perf_counter() - began
        return scores

    def log_probabilities(
        self, nodes: Sequence[int], tokens: Sequence[int], k: int
    ) -> tuple[FloatArray, IntArray, FloatArray]:
        """Log-softmax of the unprocessed logits after each node.

        Args:
            nodes: where to look.
            tokens: the token after each of them whose log-probability is wanted.
            k: number of likeliest alternatives.

        Returns:
            float64 [nodes] of the tokens; int64 [nodes, k] and float64 [nodes, k] of the alternatives, falling.
        """
        wanted = np.asarray(nodes, dtype=np.int64) - self.num_computed
        rows = _host(self._live()[wanted])
        top = rows.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(rows - top).sum(axis=1, keepdims=True)) + top
        chosen = rows[np.arange(len(rows)), np.asarray(tokens, dtype=np.int64)] - log_sum[:, 0]
        if k == 0:
            return chosen, np.zeros((len(rows), 0), dtype=np.int64), np.zeros((len(rows), 0))
        alternatives, logits = best(rows, min(k, rows.shape[-1]))
        return chosen, alternatives, logits - log_sum

    def _chosen(self, nodes: Sequence[int] | IntArray) -> list[int]:
        """As `of`; -1 where no token can be chosen."""
        wanted = [int(node) for node in nodes]
        missing = sorted({node for node in wanted if node not in self._known})  # in the order of the rows, each once
        if missing:
            self._choose(missing)
        return [self._known[node] for node in wanted]

    def _choose(self, nodes: list[int]) -> None:
        rows, began, processors = self._live(), perf_counter(), self._sampler.params.processors
        if processors:  # called as seldom as possible
            parts = [(nodes, rows[[node - self.num_computed for node in nodes]])]
        else:  # a row stays in the processor's cache from its first operation to its last; and a slice is no copy
            parts = [([node], rows[node - self.num_computed :][:1]) for node in nodes]
        for some, selected in parts:
            try:
                chosen = self._sampler.choose(selected, self.tree, np.array(some), self._length).tolist()
            except Exception as error:
                if not processors:
                    raise
                if len(nodes) > 1:  # after which of them?
                    for node in nodes:
                        self._choose([node])
                    return
                self._raised[nodes[0]], chosen = error, [-1]
            self._known.update(zip(some, chosen, strict=True))
        self._seconds += perf_counter() - began

    def _scores(self, nodes: IntArray) -> FloatArray:
        """float64 [len(nodes), vocab] on the host, of which a choice is made; -inf where a processor raises."""
        rows = self._live()[nodes - self.num_computed]
        try:
            return _host(self._sampler.scores(rows, self.tree, nodes, self._length))
        except Exception as error:
            if not self._sampler.params.processors:
                raise
            if len(nodes) > 1:
                return np.concatenate([self._scores(node) for node in np.split(nodes, len(nodes))])
            self._raised[int(nodes[0])] = error
            return np.full((1, self.width), -np.inf)


def best(rows: Array, k: int) -> tuple[IntArray, FloatArray]:
    """The k greatest of each row, falling: indices int64 [rows, k], values float64 [rows, k], on the host."""
    if is_torch_array(rows):
        if rows.device.type != "cpu":  # its own selection, and one transfer of 2 k numbers a row
            values, tokens = rows.topk(k, dim=-1)
            values = values if values.dtype.itemsize >= 4 else values.float()  # which holds every token id, too
            both = array_namespace(rows).stack((tokens.to(values.dtype), values)).cpu().numpy()
            return both[0].astype(np.int64), both[1].astype(np.float64)  # here, since MPS has no float64
        rows = (rows if rows.dtype.itemsize >= 4 else rows.float()).detach().numpy()
    tokens, values = largest_at(rows, k)
    return tokens, values.astype(np.float64)


def _host(array: Array) -> FloatArray:
    """A float64 copy on the host."""
    return np.array(array if isinstance(array, np.ndarray) else array.cpu().double().numpy(), dtype=np.float64)


def _softmax(scores: FloatArray) -> FloatArray:
    """Of each row; 0 where the greatest score is not finite."""
    top = scores.max(axis=1, keepdims=True)
    if impossible := np.flatnonzero(~np.isfinite(top[:, 0])).tolist():
        scores[impossible] = top[impossible] = 0.0
    found: FloatArray = np.exp(scores - top)
    found /= found.sum(axis=1, keepdims=True)
    found[impossible] = 0.0
    return found
