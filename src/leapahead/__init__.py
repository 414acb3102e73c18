"""leapahead: several tokens per forward pass, with exactly the text of one at a time.

    from leapahead import LLM

    llm = LLM("Qwen/Qwen3-0.6B")
    print(llm.generate("def fibonacci(n):").text)

Importing this imports no other module: each name below imports its own at its first use. Torch and other backends are
imported by `LLM(...)`, when it loads a model.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's is the same, and importing that takes time, in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from typing import Any

    from leapahead.api import LLM
    from leapahead.asynchronous import AsyncLLM
    from leapahead.core.errors import (
        BadLogits,
        BadParameter,
        CacheFull,
        ContextOverflow,
        DraftError,
        LeapaheadError,
        Refused,
    )
    from leapahead.core.processors import LogitsProcessor, PrefixFree
    from leapahead.core.sampling import SamplingParams
    from leapahead.core.stats import Stats
    from leapahead.core.stop import StopParams
    from leapahead.core.tree import Budget, Probes, TokenTree, TreeBuilder
    from leapahead.drafters.base import Drafter, SequenceDrafter
    from leapahead.drafters.cache import DrafterCache, Section
    from leapahead.engine.output import Output, TokenLogprobs
    from leapahead.engine.request import Handle, Request
    from leapahead.engine.scheduler import Engine
    from leapahead.grammar import Grammar
    from leapahead.integrations import hf as hf
    from leapahead.models.base import Capture
    from leapahead.planner.draft import Proposal, SequenceView, Step
    from leapahead.results import Piece, Result

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
    "Section",
    "SequenceDrafter",
    "SequenceView",
    "Stats",
    "Step",
    "StopParams",
    "TokenLogprobs",
    "TokenTree",
    "TreeBuilder",
]  # without hf, since `import *` would import torch, and fail where it is not installed


_MODULES = {  # of each name
    "LLM": "leapahead.api",
    "AsyncLLM": "leapahead.asynchronous",
    "BadLogits": "leapahead.core.errors",
    "BadParameter": "leapahead.core.errors",
    "CacheFull": "leapahead.core.errors",
    "ContextOverflow": "leapahead.core.errors",
    "DraftError": "leapahead.core.errors",
    "LeapaheadError": "leapahead.core.errors",
    "Refused": "leapahead.core.errors",
    "LogitsProcessor": "leapahead.core.processors",
    "PrefixFree": "leapahead.core.processors",
    "SamplingParams": "leapahead.core.sampling",
    "Stats": "leapahead.core.stats",
    "StopParams": "leapahead.core.stop",
    "Budget": "leapahead.core.tree",
    "Probes": "leapahead.core.tree",
    "TokenTree": "leapahead.core.tree",
    "TreeBuilder": "leapahead.core.tree",
    "Drafter": "leapahead.drafters.base",
    "SequenceDrafter": "leapahead.drafters.base",
    "DrafterCache": "leapahead.drafters.cache",
    "Section": "leapahead.drafters.cache",
    "Output": "leapahead.engine.output",
    "TokenLogprobs": "leapahead.engine.output",
    "Handle": "leapahead.engine.request",
    "Request": "leapahead.engine.request",
    "Engine": "leapahead.engine.scheduler",
    "Grammar": "leapahead.grammar",
    "Capture": "leapahead.models.base",
    "Proposal": "leapahead.planner.draft",
    "SequenceView": "leapahead.planner.draft",
    "Step": "leapahead.planner.draft",
    "Piece": "leapahead.results",
    "Result": "leapahead.results",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name != "hf":
        raise AttributeError(f"module 'leapahead' has no attribute {name!r}")
    from importlib import import_module  # here for the same reason as above

    if name == "hf":  # imports torch
        from leapahead.core.errors import needing
        from leapahead.models.transformers import require_version

        with needing("leapahead.hf", "transformers", "torch", "transformers"):
            require_version()
            return import_module("leapahead.integrations.hf")
    globals()[name] = value = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
