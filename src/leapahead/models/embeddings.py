"""The interface of a target whose forwards take rows with embeddings of others than tokens: the probes of trees."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class AddsEmbeddings(Protocol):
    """A target that has the capability "embeddings"."""

    def add_embeddings(self, rows: Any) -> range:
        """Adds embeddings for as long as the target lives.

        Args:
            rows: float [rows, hidden_size].

        Returns:
            Their ids, which are those of no token.

        Raises:
            BadParameter: they have another width than the model's own.
            Refused: the model does not take embeddings.
        """

    def embeddings(self) -> range:
        """The ids of all that were added."""
