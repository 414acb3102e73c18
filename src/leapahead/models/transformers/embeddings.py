"""Embeddings that are added to a model's own, for rows that stand for no token: the probes of trees.

    id   0 .. first - 1     the model's own embedding
         first ..           added rows

The model is given embeddings instead of token ids where a forward has such rows. Its own embedding stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leapahead.core.errors import BadParameter, Refused, first_line
from leapahead.core.tree import IntArray, TokenTree
from leapahead.models.base import TargetInfo

TESTED = 8  # tokens whose logits are compared
CLOSE = 1e-3  # of the logits' spread


class AddedEmbeddings:
    """The added rows of one model.

    Args:
        model: of Transformers.
        vocab_size: token ids are below it.

    Attributes:
        first: id of the first row.
        rows: float [rows, hidden_size].
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.embedding = model.get_input_embeddings()
        weight = self.embedding.weight
        self.first = max(vocab_size, len(weight))
        self.rows = weight.detach().new_zeros(0, weight.shape[-1])

    @property
    def ids(self) -> range:
        """Of all rows."""
        return range(self.first, self.first + len(self.rows))

    def add(self, rows: Any) -> range:
        """See `models.embeddings`."""
        added = torch.as_tensor(np.asarray(rows) if not isinstance(rows, Tensor) else rows).to(self.rows)
        if added.ndim != 2 or added.shape[1] != self.rows.shape[1] or not added.isfinite().all():
            raise BadParameter(
                f"embeddings of shape {list(added.shape)} cannot be added: they must be finite, of shape "
                f"[rows, {self.rows.shape[1]}]"
            )
        start = self.ids.stop
        self.rows = torch.cat((self.rows, added))
        return range(start, self.ids.stop)

    def used_by(self, trees: Sequence[TokenTree]) -> bool:
        """Whether a tree has rows with added embeddings."""
        return any(max(tree.token_list) >= self.first for tree in trees)

    def look_up(self, ids: Tensor) -> Tensor:
        """int64 [...] -> float [..., hidden_size]."""
        own = self.embedding(ids.clamp(max=len(self.embedding.weight) - 1))
        is_added = ids >= self.first
        return torch.where(is_added[..., None], self.rows[(ids - self.first).clamp(min=0)], own)


@torch.no_grad()
def tested(model: Any, info: TargetInfo, ids: IntArray) -> AddedEmbeddings:
    """The added rows of a model, none yet, if it computes from its embeddings what it computes from token ids.

    Args:
        info: of the model.
        ids: token ids without a special meaning.

    Raises:
        Refused: it does not.
    """
    name = info.name
    tokens = torch.from_numpy(np.resize(ids, TESTED)[None]).to(model.get_input_embeddings().weight.device)
    try:
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        found = model(inputs_embeds=model.get_input_embeddings()(tokens), use_cache=False).logits.float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Refused(f"{name} takes no embeddings: {first_line(error)}; use another head") from error
    if not (found - expected).abs().max() <= CLOSE * expected.std():
        raise Refused(
            f"{name} takes no embeddings, since its logits are others for them than for the token ids; use another head"
        )
    return AddedEmbeddings(model, info.vocab_size)
