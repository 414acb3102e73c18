"""What a section of a drafter cache is, and the sections by name, each imported when a file contains it.

Third parties add theirs through the entry-point group `leapahead.cache_sections`; built-in names take precedence. A
section that is not installed stays in its file unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy.typing as npt

from leapahead.core.errors import BadParameter
from leapahead.drafters.cache_file import Arrays
from leapahead.drafters.cache_ledger import Entry

GROUP = "leapahead.cache_sections"

BUILT_IN = {
    "suffix": "leapahead.drafters.sources.past_texts:PastTexts",
    "recycling": "leapahead.drafters.sources.recycling:Adjacency",
    "draft_rows": "leapahead.drafters.sources.recycling:Adjacency",
    "phrases": "leapahead.drafters.sources.past_phrases:PastPhrases",
}


class Section(ABC):
    """What the sources of one kind keep. It is saved as plain arrays, and merges the arrays of other sections.

    Its methods may be called from several threads at once.

    Class attributes:
        layout: version of the arrays; increased when their meaning changes.
        token_arrays: names of the arrays that hold token ids only. They are checked against the vocabulary.
        exchanged: greatest sum of the lengths of the keys that processes exchange, in bytes; 0 for a section that is
            not exchanged. Others need `entries_of`, `arrays_of` and `replace`.
    """

    layout: ClassVar[int] = 1
    token_arrays: ClassVar[tuple[str, ...]] = ()
    exchanged: ClassVar[int] = 0

    @abstractmethod
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The whole section as arrays of integers and floats (no objects)."""

    @abstractmethod
    def merge(self, arrays: Arrays) -> None:
        """Merges the arrays of another section as if its texts had come before this one's, within the section's bounds.

        What both have counts once, because two processes that save in turn read their own entries again.

        Args:
            arrays: read-only.

        Raises:
            ValueError: they are not what `arrays` gives. Nothing has changed then.
        """

    @staticmethod
    def entries_of(arrays: Arrays) -> list[Entry]:
        """The entries of a section's arrays, least recently written first. A key is unique and not empty."""
        raise NotImplementedError

    @staticmethod
    def arrays_of(entries: Sequence[Entry]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a section with these entries, least recently written first.

        Raises:
            ValueError: they are not what `entries_of` gives.
        """
        raise NotImplementedError

    def replace(self, arrays: Arrays) -> None:
        """Holds these arrays instead of its own, within the section's bounds. See `merge`."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Plain types, for `Stats` and for `leapahead cache show`."""
        return {}


def make(name: str) -> Section | None:
    """A new, empty section; None if no installed package declares that name.

    Raises:
        BadParameter: an entry point of that name does not give a section.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        kind = getattr(import_module(module), attribute)
    else:
        entry = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
        if entry is None:
            return None
        kind = entry.load()
    section = kind()
    if not isinstance(section, Section):
        raise BadParameter(f"the entry point {name!r} gives {kind!r}, which is not a subclass of Section")
    return section
