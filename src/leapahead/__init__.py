"""leapahead: several tokens per forward pass, with exactly the text of one at a time.

    from leapahead import LLM

    llm = LLM("Qwen/Qwen3-0.6B")
    print(llm.generate("def fibonacci(n):").text)

Importing this imports neither torch nor any other backend; `LLM(...)` does, when it loads a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leapahead.api import LLM, AsyncLLM
from leapahead.core.errors import (
    BadLogits,
    BadParameter,
    CacheFull,
    ContextOverflow,
    DraftError,
    LeapaheadError,
    Refused,
    needing,
)
from leapahead.core.processors import LogitsProcessor, PrefixFree
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, Probes, TokenTree, TreeBuilder
from leapahead.drafters.base import Drafter, SequenceDrafter
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.output import Output, TokenLogprobs
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.grammar import Grammar
from leapahead.models.base import Capture
from leapahead.planner.draft import Proposal, SequenceView, Step
from leapahead.results import Piece, Result

if TYPE_CHECKING:
    from leapahead.integrations import hf

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BadLogits",
    "BadParameter",
    "Budget",
    "CacheFull",
    "Capture",
    "ContextOverflow",
    "DraftError",
    "Drafter",
    "DrafterCache",
    "Engine",
    "Grammar",
    "Handle",
    "LeapaheadError",
    "LogitsProcessor",
    "Output",
    "Piece",
    "PrefixFree",
    "Probes",
    "Proposal",
    "Refused",
    "Request",
    "Result",
    "SamplingParams",
    "SequenceDrafter",
    "SequenceView",
    "Stats",
    "Step",
    "StopParams",
    "TokenLogprobs",
    "TokenTree",
    "TreeBuilder",
    "hf",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # imports torch
        from leapahead.models.transformers import require_version

        with needing("leapahead.hf", "transformers", "torch", "transformers"):
            require_version()
            return import_module("leapahead.integrations.hf")
    raise AttributeError(f"module 'leapahead' has no attribute {name!r}")
