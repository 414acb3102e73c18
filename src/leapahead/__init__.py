"""leapahead: several tokens per forward pass, with exactly the text of one at a time.

    from leapahead import LLM

    llm = LLM("Qwen/Qwen3-0.6B", drafter="lookahead")
    print(llm.generate("def fibonacci(n):").text)

Importing this imports neither torch nor any other backend; `LLM(...)` does, when it loads a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from leapahead.api import LLM, Piece, Result
from leapahead.core.errors import BadLogits, BadParameter, ContextOverflow, DraftError, LeapaheadError, Refused
from leapahead.core.sampling import LogitsProcessor, PrefixFree, SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Context, Drafter, Proposal, Step

if TYPE_CHECKING:
    from leapahead.integrations import hf

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BadLogits",
    "BadParameter",
    "Budget",
    "Context",
    "ContextOverflow",
    "DraftError",
    "Drafter",
    "LeapaheadError",
    "LogitsProcessor",
    "Piece",
    "PrefixFree",
    "Proposal",
    "Refused",
    "Result",
    "SamplingParams",
    "Stats",
    "Step",
    "TokenTree",
    "TreeBuilder",
    "hf",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # imports torch
        return import_module("leapahead.integrations.hf")
    raise AttributeError(f"module 'leapahead' has no attribute {name!r}")
