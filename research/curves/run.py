"""What the curves share: a check of the prompts, and decoding of one text with a callback for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leapahead.bench.conditions import Tokens
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.base import Drafter
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.planner.draft import Step


def require_prompts(prompts: Sequence[Tokens]) -> None:
    """Refuses an empty list of prompts.

    Raises:
        BadParameter: there are no prompts.
    """
    if not prompts:
        raise BadParameter("there are no prompts to measure on; give at least one")


def request(
    prompt: Tokens,
    drafter: Drafter,
    max_new_tokens: int,
    eos_token_ids: Tokens,
    sampling: SamplingParams,
    on_step: Callable[[Step], None] | None = None,
) -> Request:
    """A request for a text of up to `max_new_tokens` tokens. The drafter keeps nothing of other texts."""
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids))
    return Request(prompt, drafter, sampling=sampling, stop=stop, on_step=on_step)


def decode(engine: Engine, asked: Request) -> Handle:
    """Decodes one text alone; raises the request's error."""
    handle = engine.submit(asked)
    engine.run([handle])
    return handle
