"""The parts of a memory by name, each imported when a file has it, so that a file is ready before a source asks for it.

Third parties add theirs through the entry-point group `leapahead.parts`; a name that is taken stays ours. A part that
nobody knows stays in its file as it is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from leapahead.core.errors import BadParameter
from leapahead.drafters.cache import Memory, Part

GROUP = "leapahead.parts"

BUILT_IN = {
    "suffix": "leapahead.drafters.sources.suffix:SharedTexts",
    "recycling": "leapahead.drafters.sources.recycling:Adjacency",
    "lookahead": "leapahead.drafters.pool:SharedPool",
}


def make(name: str) -> Part | None:
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
    if not isinstance(part, Part):
        raise BadParameter(f"the entry point {name!r} gives {found!r}, which is not a subclass of Part")
    return part


def load(path: str | Path) -> Memory:
    """A memory from a file, all parts that are known here ready.

    Raises:
        BadParameter: as of `Memory.load`.
    """
    memory = Memory.load(path)
    memory.adopt(make)
    return memory


def given(memory: Memory | str | Path | bool) -> Memory | None:
    """What the argument `memory` of `LLM` means.

    Raises:
        BadParameter: as of `load`; or there can be no such file.
    """
    if isinstance(memory, bool):
        return Memory() if memory else None
    if isinstance(memory, Memory):
        memory.adopt(make)
        return memory
    if not isinstance(memory, (str, Path)) or not str(memory):
        raise BadParameter(f"memory={memory!r} is not possible: it must be True, False, a file, or a Memory")
    path = Path(memory)
    if path.exists():
        return load(path)
    if not path.parent.is_dir():
        raise BadParameter(f"there can be no memory {path}: the folder {path.parent} does not exist; make it first")
    new = Memory()
    new.path = path.absolute()
    return new
