"""Drafters inside vLLM: `leapahead.integrations.vllm.Proposer` for its `speculative_config`.

    speculative_config={
        "method": "custom_class", "model": "leapahead.integrations.vllm.Proposer", "num_speculative_tokens": 8
    }

Imports neither vLLM nor torch; vLLM imports this package.
"""

from leapahead.integrations.vllm.proposer import Proposer

__all__ = ["Proposer"]
