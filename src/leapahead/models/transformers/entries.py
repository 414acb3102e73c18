"""Writes given entries to a row of the KV cache, as a forward over their tokens would have done."""

from __future__ import annotations

from leapahead.core.errors import Refused
from leapahead.models.base import Capture, TargetInfo
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.transformers.forward import CachedState, ChainExecutor, Executor, MaskedExecutor, State

INSTEAD = "use model.generate without custom_generate, or prompts of text alone"


def require(info: TargetInfo, executor: Executor, capture: Capture) -> None:
    """Refuses what cannot go on from given entries. See `TakesEntries`."""
    if type(executor) not in (MaskedExecutor, ChainExecutor):
        raise Refused(
            f"{info.name} cannot go on from a prompt that was read with images or sounds: not all that it keeps of a "
            f"prompt are KV entries, one for each token and layer; {INSTEAD}"
        )
    if capture.hidden:
        raise Refused(
            "a drafter that reads hidden states of the prompt cannot be used where that was read with images or "
            "sounds; use another drafter, such as prompt_lookup"
        )


def write(state: State, begin: PromptEntries) -> None:
    """Makes these entries the first ones of a sequence, which has none."""
    assert isinstance(state, CachedState)
    cache, row = state.cache, state.row
    tokens = begin.tokens
    assert row.length == 0, "they are the first ones"
    assert tokens < len(state.tokens), "the last token is the root of the next step"
    row.offset = begin.offset
    if tokens == 0:
        return
    cache.begin([row], [tokens])
    try:
        for layer, (keys, values) in begin.layers.items():
            cache.update(keys[None], values[None], layer)
        cache.keep(row, range(tokens))
    finally:
        cache.end()
