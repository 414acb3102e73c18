"""The drafters by name, each imported when it is asked for.

Third parties add theirs through the entry-point group `leapahead.drafters` (docs/write-a-drafter.md); a name that is
taken stays ours.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Drafter

GROUP = "leapahead.drafters"

BUILT_IN = {
    "auto": "leapahead.drafters.auto:Auto",
    "plain": "leapahead.drafters.plain:Plain",
    "jacobi": "leapahead.drafters.jacobi:Jacobi",
    "prompt_lookup": "leapahead.drafters.prompt_lookup:PromptLookup",
    "lookahead": "leapahead.drafters.lookahead:Lookahead",
    "ngram": "leapahead.drafters.single:Ngram",
    "suffix": "leapahead.drafters.single:SuffixDrafter",
    "recycling": "leapahead.drafters.single:TokenRecycling",
    "datastore": "leapahead.drafters.single:DatastoreDrafter",
    "prediction": "leapahead.drafters.single:PredictionDrafter",
    "draft_model": "leapahead.drafters.single:DraftModel",
    "speculative_sampling": "leapahead.drafters.speculative_sampling:SpeculativeSampling",
}


NEEDING = ("datastore", "prediction", "draft_model", "speculative_sampling")  # a file, a text, another model


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def names() -> list[str]:
    """Every registered drafter, ours first."""
    return [*BUILT_IN, *sorted(_third_party())]


def ready() -> list[str]:
    """Those that need nothing but a target: no file, no other model, no prediction."""
    return [name for name in names() if name not in NEEDING]


def load(name: str) -> type[Drafter]:
    """The class registered as `name`.

    Raises:
        BadParameter: there is none, or it is not a `Drafter`.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    elif name in (others := _third_party()):
        found = others[name].load()
    else:
        raise BadParameter(f"there is no drafter {name!r}{_nearest(name, names())}; there are {', '.join(names())}")
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise BadParameter(f"the entry point {name!r} gives {found!r}, which is not a subclass of leapahead.Drafter")
    return found


def options(drafter: type[Drafter]) -> dict[str, inspect.Parameter]:
    """The keyword options that a drafter takes."""
    if drafter.__init__ is object.__init__:
        return {}
    return {name: p for name, p in inspect.signature(drafter).parameters.items() if p.kind != p.VAR_KEYWORD}


def factory(name: str | type[Drafter], **given: Any) -> Callable[[], Drafter]:
    """Makes instances of a drafter, one for each sequence; the options are checked now, by making one.

    Raises:
        BadParameter: unknown drafter, unknown option, or an option value that is not possible.
    """
    drafter = load(name) if isinstance(name, str) else name
    known = options(drafter)
    for option in given:
        if option not in known:
            raise BadParameter(
                f"drafter {drafter.name!r} has no option {option!r}{_nearest(option, known)}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )
    drafter(**given)
    return lambda: drafter(**given)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
