"""What every curve needs: its data's type, the conditions beside it, and generations step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from leapahead.bench.conditions import conditions as of_this_machine
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.base import Drafter, Step
from leapahead.engine.loop import Generation, decode
from leapahead.models.base import Target, require

Data = dict[str, Any]
Tokens = Sequence[int]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is

GREEDY = SamplingParams()


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def conditions(target: Target | None = None, **more: Any) -> Data:
    """What must stand beside every figure: installation and machine, the target, and what the caller adds."""
    found = of_this_machine()
    if target is not None:
        found |= {"target": target.name, "precision": target.precision}
        if "torch" in sys.modules:  # what decodes has been imported
            found["torch_threads"] = sys.modules["torch"].get_num_threads()
    return {**found, **more}


def check(target: Target, prompts: Sequence[Tokens], drafter: type[Drafter] | None = None) -> None:
    """Whether there is something to measure.

    Raises:
        BadParameter: there are no prompts.
        Refused: the target does not offer what the drafter needs.
    """
    if not prompts:
        raise BadParameter("there are no prompts to measure on")
    if drafter is not None:
        require(target, drafter.needs, drafter.name)


def begin(
    target: Target, prompt: Tokens, drafter: Drafter, length: int, eos_token_ids: Tokens, params: SamplingParams
) -> Generation:
    """A generation of up to `length` tokens that counts itself."""
    stop = StopParams(max_new_tokens=length, eos_token_ids=tuple(eos_token_ids))
    return Generation.begin(target, prompt, drafter, params, stop)


def walk(target: Target, generation: Generation) -> Iterator[Step]:
    """The steps of a generation; it is closed behind the last, or when the caller stops reading."""
    with closing(decode(target, [generation])) as loop:
        for _, step in loop:
            yield step
