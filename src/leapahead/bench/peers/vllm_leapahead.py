"""This package's drafters inside vLLM, as a peer of vLLM's own: `leapahead.integrations.vllm.Proposer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from leapahead.bench.peers.vllm import Plain
from leapahead.core.errors import BadParameter


@dataclass(frozen=True)
class Leapahead(Plain):
    """Drafts from this package's sources, which learn from the texts of a round, as this package's own drafters."""

    name: ClassVar[str] = "vllm-leapahead"
    predicts: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    num_tokens: int = 12
    sources: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_tokens < 1:
            raise BadParameter(f"num_tokens={self.num_tokens} is not possible; it must be at least 1")
        if not self._ask()["leapahead"]:
            raise BadParameter(
                f"there is no leapahead in the environment of {self.python}: "
                f"{self.python} -m pip install --no-deps leapahead, and numpy and array-api-compat"
            )

    def speculative(self) -> dict[str, Any]:
        return {
            "method": "custom_class",
            "model": "leapahead.integrations.vllm.Proposer",
            "num_speculative_tokens": self.num_tokens,
        }

    def additional(self) -> dict[str, Any]:
        return {"leapahead": {"report_seconds": 0, "sources": self.sources.replace("+", ",")}}

    def _environment(self, threads: int | None) -> dict[str, str]:
        return {**super()._environment(threads), "VLLM_USE_V2_MODEL_RUNNER": "0"}
