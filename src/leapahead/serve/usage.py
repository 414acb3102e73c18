"""What a response reports of its tokens and of drafting."""

from __future__ import annotations

from leapahead.serve.replies import CompletionTokensDetails, PromptTokensDetails, Speculation, Usage
from leapahead.serve.worker import Batch

PREDICTION = "prediction"  # the source that drafts it


def usage(batch: Batch, samples: int) -> Usage:
    """The tokens so far.

    Args:
        batch: all texts of the request.
        samples: texts of each prompt, which is counted once.
    """
    completion = sum([len(handle.tokens) for handle in batch.handles])
    # Of these alone: a stream may ask for them with every chunk, and a request may have a thousand texts.
    accepted = sum([handle.stats.accepted_by.get(PREDICTION, 0) for handle in batch.handles])
    drafted = sum([handle.stats.drafted_by.get(PREDICTION, 0) for handle in batch.handles])
    return Usage(
        prompt_tokens=batch.prompt_tokens,
        completion_tokens=completion,
        total_tokens=batch.prompt_tokens + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=batch.reused_tokens(samples)),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(0, drafted - accepted),
        ),
    )


def speculation(batch: Batch) -> Speculation:
    """What drafting did, all texts together."""
    stats = batch.stats
    return Speculation(
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_length=round(stats.acceptance_length, 4),
        accepted_by=dict(stats.accepted_by),
    )
