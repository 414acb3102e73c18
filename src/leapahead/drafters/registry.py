"""The registered drafters. A drafter's module is imported when the drafter is asked for by name.

Other packages register theirs through the entry-point group `leapahead.drafters`, see
docs/contributing/write-a-drafter.md. A built-in name cannot be replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, first_line
from leapahead.core.parameters import is_whole, meant
from leapahead.drafters.base import Drafter, PerSequence, SequenceDrafter
from leapahead.models.base import TREE

GROUP = "leapahead.drafters"

BUILT_IN = {
    "auto": "leapahead.drafters.auto:Auto",
    "plain": "leapahead.drafters.plain:Plain",
    "jacobi": "leapahead.drafters.jacobi:Jacobi",
    "prompt_lookup": "leapahead.drafters.prompt_lookup:PromptLookup",
    "lookahead": "leapahead.drafters.lookahead:Lookahead",
    "ngram": "leapahead.drafters.ngram:NgramDrafter",
    "suffix": "leapahead.drafters.suffix:SuffixDrafter",
    "recycling": "leapahead.drafters.recycling:TokenRecycling",
    "datastore": "leapahead.drafters.datastore:DatastoreDrafter",
    "prediction": "leapahead.drafters.prediction:PredictionDrafter",
    "draft_model": "leapahead.drafters.draft_model:DraftModelDrafter",
    "cascade": "leapahead.drafters.cascade:Cascade",
    "ouroboros": "leapahead.drafters.ouroboros:Ouroboros",
    "head": "leapahead.drafters.head:HeadDrafter",
    "triforce": "leapahead.drafters.triforce:TriForce",
    "speculative_sampling": "leapahead.drafters.speculative_sampling:SpeculativeSampling",
}

# Drafters that need more than any target: a file, a prediction, another model, a target of Transformers.
NEEDING = (
    "datastore",
    "prediction",
    "draft_model",
    "cascade",
    "ouroboros",
    "head",
    "triforce",
    "speculative_sampling",
)

MOST = 2**24  # of whole numbers in the options of this package's drafters: more than any context or draft needs
FEW = 3  # drafters that a message names as those that have an option
A_CLASS = "a drafter must be a name or a class, got"
DrafterClass = type[Drafter] | type[SequenceDrafter]


def names() -> list[str]:
    """The names of all registered drafters: the built-in ones, then those of other packages in alphabetical order."""
    return [*BUILT_IN, *sorted(_third_party())]


def ready() -> list[str]:
    """The names of the drafters that need nothing but a target."""
    return [name for name in names() if name not in NEEDING]


def load(name: str) -> DrafterClass:
    """The class that is registered under `name`.

    Raises:
        BadParameter: no drafter has that name, or what is registered is not a usable drafter class or cannot be loaded.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    elif name in (others := _third_party()):
        entry = others[name]
        try:
            found = entry.load()
        except Exception as error:  # whatever the code of another package raises
            package = f" of the package {entry.dist.name}" if entry.dist is not None else ""
            raise BadParameter(
                f"the drafter {name!r}{package} cannot be loaded from its entry point {entry.value!r}: "
                f"{first_line(error)}; repair or uninstall it"
            ) from error
    else:
        raise BadParameter(f"there is no drafter {name!r}{meant(name, names())}; there are {', '.join(names())}")
    return _checked(found, f"the entry point {name!r} gives")


def options(drafter: DrafterClass) -> dict[str, inspect.Parameter]:
    """The keyword options that a drafter class takes, by name."""
    if drafter.__init__ is object.__init__:
        return {}
    return {name: p for name, p in inspect.signature(drafter).parameters.items() if p.kind != p.VAR_KEYWORD}


def check_options(drafter: DrafterClass, given: Iterable[str]) -> None:
    """Refuses a name that is no option of a drafter class.

    Raises:
        BadParameter: there is one.
    """
    known = options(drafter)
    for option in given:
        if option not in known:
            raise BadParameter(
                f"drafter {drafter.name!r} has no option {option!r}{_whose(option) or meant(option, known)}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )


def _whose(option: str) -> str:
    """Which built-in drafters have an option, in parentheses; "" where none has, or many have."""
    found = []
    for name in BUILT_IN:
        with suppress(ImportError):  # of a package that is not installed
            if option in options(load(name)):
                found.append(name)
    return f" (an option of {', '.join(found)})" if 0 < len(found) <= FEW else ""


def kind_of(drafter: str | DrafterClass) -> DrafterClass:
    """The class of a drafter that is given by its name or as a class.

    Raises:
        BadParameter: the drafter is unknown, or is no drafter.
    """
    return load(drafter) if isinstance(drafter, str) else _checked(drafter, A_CLASS)


def branching(*drafters: str | DrafterClass) -> str:
    """The name of the first of these drafters that needs branches in its drafts; "" if none does.

    Raises:
        BadParameter: a drafter is unknown, or is no drafter.
    """
    return next((kind.name for kind in map(kind_of, drafters) if TREE in kind.needs), "")


def make(drafter: str | DrafterClass, /, **given: Any) -> Drafter:
    """A new drafter object, for one engine: `Drafter.attach` is called by the engine that takes it.

    Args:
        drafter: a registered name, or a subclass of `Drafter` or `SequenceDrafter`.
        given: its options.

    Raises:
        BadParameter: the drafter is unknown, is no drafter, or does not take such an option or value.
    """
    kind = kind_of(drafter)
    check_options(kind, given)
    for option in given:
        if option != "seed" and is_whole(given[option]) and given[option] > MOST and _is_ours(kind):
            raise BadParameter(f"{option}={given[option]} is not possible: it must be at most {MOST}")
    draft = given.get("draft") if _is_ours(kind) else None
    if isinstance(draft, str) and draft in BUILT_IN and not Path(draft).exists():
        raise BadParameter(
            f"draft={draft!r} names a drafter, and no model: give drafter={draft!r}, or the name, folder or file of a "
            "draft model"
        )
    if issubclass(kind, SequenceDrafter):
        sequence_drafter = kind
        return PerSequence(lambda: sequence_drafter(**given))
    return kind(**given)


def _is_ours(kind: DrafterClass) -> bool:
    return kind.__module__.startswith("leapahead.")


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in BUILT_IN}


def _checked(found: Any, where: str) -> DrafterClass:
    """`found`, if it is a drafter class that can be instantiated and has a name."""
    if not (isinstance(found, type) and issubclass(found, (Drafter, SequenceDrafter))):
        raise BadParameter(
            f"{where} {found!r}, which is not a subclass of leapahead.Drafter or leapahead.SequenceDrafter"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise BadParameter(f"the drafter class {found.__name__} must define {' and '.join(missing)}()")
    name = getattr(found, "name", None)
    if not (isinstance(name, str) and name):
        raise BadParameter(f"the drafter class {found.__name__} has no name; give it one, such as name = 'my_drafter'")
    return found
