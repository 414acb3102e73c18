"""The interface of an encoder-decoder target, beside that of all targets. See `leapahead.models.decoder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from leapahead.core.errors import Refused
from leapahead.core.sampling import SamplingParams
from leapahead.models.base import NOTHING, Capture, Session, Target
from leapahead.models.decoder import DecoderInput
from leapahead.models.prompt_entries import PromptEntries, TakesEntries


@runtime_checkable
class EncodesPrompts(Protocol):
    """An encoder-decoder target: prompts are read by its encoder, and the tokens of sessions are those of its decoder.

    Its `TargetInfo.decoder` is set. Reading a prompt is one forward of the encoder, however long it is.
    """

    def open_decoder(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        begin: DecoderInput,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> Session:
        """As `Target.open`, whose session begins with the start tokens, for a decoder that begins with other ones."""

    def source(self, session: Any) -> Sequence[int]:
        """The encoder's input of a session."""


def open_beside(
    target: Target, session: Session, tokens: Sequence[int], params: SamplingParams, reserve: int = 0
) -> Session:
    """A session with these tokens and, of an encoder-decoder model, with the encoder's input of another session."""
    if isinstance(target, EncodesPrompts):
        return target.open_decoder(target.source(session), params, DecoderInput(tuple(tokens)), reserve=reserve)
    return target.open(tokens, params, reserve=reserve)


def opened(
    target: Target,
    tokens: Sequence[int],
    params: SamplingParams,
    begin: DecoderInput | PromptEntries,
    capture: Capture = NOTHING,
    reserve: int = 0,
    owner: str = "",
) -> Session:
    """A session for a prompt, begun by what was read already.

    Args:
        begin: entries of the prompt; else it is read where the target is an encoder-decoder model.

    Raises:
        Refused: the target takes no entries.
    """
    if isinstance(begin, PromptEntries):
        if not isinstance(target, TakesEntries):
            raise Refused(f"{target.info.name} takes no entries of prompts; give a target of Transformers")
        return target.open_entries(tokens, params, begin, capture, reserve)
    if isinstance(target, EncodesPrompts):
        return target.open_decoder(tokens, params, begin, capture, reserve, owner)
    return target.open(tokens, params, capture, reserve, owner)
