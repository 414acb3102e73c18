"""The parts of a drafter_cache by name, each imported when a file has it, so that a file is ready before a source asks for it.

Third parties add theirs through the entry-point group `leapahead.sections`; a name that is taken stays ours. A part that
nobody knows stays in its file as it is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from leapahead.core.errors import BadParameter
from leapahead.drafters.cache import DrafterCache, Section

GROUP = "leapahead.sections"

BUILT_IN = {
    "suffix": "leapahead.drafters.sources.suffix:SharedTexts",
    "recycling": "leapahead.drafters.sources.recycling:Adjacency",
    "lookahead": "leapahead.drafters.pool:SharedPool",
}


def make(name: str) -> Section | None:
    """A new part, empty; None of a name that nobody knows.

    Raises:
        BadParameter: an entry point gives something else.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        entry = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
        if entry is None:
            return None
        found = entry.load()
    part = found()
    if not isinstance(part, Section):
        raise BadParameter(f"the entry point {name!r} gives {found!r}, which is not a subclass of Section")
    return part


def load(path: str | Path) -> DrafterCache:
    """A drafter_cache from a file, all parts that are known here ready.

    Raises:
        BadParameter: as of `DrafterCache.load`.
    """
    drafter_cache = DrafterCache.load(path)
    drafter_cache.adopt(make)
    return drafter_cache


def given(drafter_cache: DrafterCache | str | Path | bool) -> DrafterCache | None:
    """What the argument `drafter_cache` of `LLM` means.

    Raises:
        BadParameter: as of `load`; or there can be no such file.
    """
    if isinstance(drafter_cache, bool):
        return DrafterCache() if drafter_cache else None
    if isinstance(drafter_cache, DrafterCache):
        drafter_cache.adopt(make)
        return drafter_cache
    if not isinstance(drafter_cache, (str, Path)) or not str(drafter_cache):
        raise BadParameter(
            f"drafter_cache={drafter_cache!r} is not possible: it must be True, False, a file, or a DrafterCache"
        )
    path = Path(drafter_cache)
    if path.exists():
        return load(path)
    if not path.parent.is_dir():
        raise BadParameter(f"there can be no memory {path}: the folder {path.parent} does not exist; make it first")
    new = DrafterCache()
    new.path = path.absolute()
    return new
