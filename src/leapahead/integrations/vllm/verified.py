"""What a forward of vLLM gave, as our drafters read it: vLLM verifies drafts itself and tells the accepted tokens.

    logits    row 0 1 2 | 3 | 4 5 ...        of all requests, in the order of the batch
              request 0 | 1 | 2              1 + its verified drafted tokens each

Top-k tokens are selected for all rows at once when the first request's are read. This module imports no backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leapahead.core.sampling import Sampler
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.choices import Choices, FloatArray, Rows

LEAST_LOGIT = -80.0  # of kept tokens, below the likeliest of the row: banned ones are -inf, which cannot be kept


class ForwardRows(Rows):
    """The logits of all rows of a forward.

    vLLM may have changed them in place for the request's penalties, bans and grammar, which makes better drafts.
    """

    def top_k(self, k: int) -> tuple[IntArray, FloatArray]:
        if self._best is None or self._best[0].shape[1] < k:
            tokens, logits = super().top_k(k)
            top = np.where(np.isfinite(logits[:, :1]), logits[:, :1], 0.0)
            self._best = tokens, np.minimum(np.fmax(logits - top, LEAST_LOGIT), 0.0)  # of NaN, the number
        tokens, logits = self._best
        return (tokens, logits) if tokens.shape[1] == k else (tokens[:, :k], logits[:, :k])


class Verified(Choices):
    """The choices after the nodes of one chain, of which the accepted tokens are known, and the top-k tokens of all.

    Args:
        tree: the drafted tokens that vLLM verified, a chain.
        sampler: of the sequence; nothing is chosen by it.
        tokens: the tokens that the step has committed.
        rows: of the forward; None where its logits are not known, and then no top-k tokens either.
        start: the row of the root.
    """

    def __init__(
        self, tree: TokenTree, sampler: Sampler, tokens: Sequence[int], rows: ForwardRows | None, start: int
    ) -> None:
        super().__init__(None, tree, sampler)
        self._known = dict(enumerate(tokens))
        self._forward, self._start = rows, start

    def top_k(self, k: int) -> tuple[IntArray, FloatArray]:
        assert self._forward is not None, "the drafter's capture request names what the forward must give"
        tokens, logits = self._forward.top_k(k)
        end = self._start + len(self.tree)
        return tokens[self._start : end], logits[self._start : end]
