"""The drafter cache: what drafters keep from one text to the next, in named sections, saved to a file on request.

    DrafterCache ── "suffix"       past texts
                 ├─ "recycling"    top-k tokens by context
                 ├─ "draft_rows"   those of a draft model
                 ├─ "phrases"      n-grams of past texts
                 └─ ...            sections of third parties; one that is not installed passes through load and save

A save merges with what other processes saved meanwhile, under a lock, and replaces the file atomically. The text of a
request never depends on the cache, only its speed does. This module knows of the sections only which of their arrays
hold tokens.

Processes that do not share a file exchange bytes: `to_bytes` and `merge_bytes`. There the order of merges does not
matter, see `cache_ledger`. A cache without live sections can pass on what others exchange.

All methods may be called from any thread, and a section has a lock of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar

from leapahead.core.errors import BadParameter
from leapahead.core.forks import Mutex
from leapahead.core.parameters import file_path, flag
from leapahead.core.storage import real, replaceable
from leapahead.core.text import unnamed
from leapahead.drafters import cache_file
from leapahead.drafters.cache_file import Arrays, Contents, SavedSection
from leapahead.drafters.cache_ledger import Entry, Ledger
from leapahead.drafters.section import Section, make

__all__ = ["Arrays", "DrafterCache", "Entry", "Section"]

EXCHANGED, EXCHANGE_FORMAT = "leapahead drafter cache, exchanged", 1
RECEIVED = "what was received"  # name of exchanged bytes in errors
RESEND = "give merge_bytes what to_bytes of the same version of leapahead returned"


SectionType = TypeVar("SectionType", bound=Section)


class DrafterCache:
    """The sections of one vocabulary. They contain pieces of prompts and texts, and so does the file.

    Attributes:
        sections: those that sources asked for, or that `activate` created.
        unknown: sections of a file that no source has asked for yet.
        vocab_size: token ids are below it; 0 while the cache belongs to no vocabulary.
        path: the file that it was loaded from and is saved to, if there is one.
    """

    def __init__(self) -> None:
        self.sections: dict[str, Section] = {}
        self.unknown: dict[str, SavedSection] = {}
        self.vocab_size = 0
        self.path: Path | None = None
        self._tokenizer: str | Callable[[], str] = ""
        self._merged: dict[Path, str] = {}  # file -> id of the save that has been merged already
        self._ledgers: dict[str, Ledger] = {}  # of the sections that were exchanged
        self._active = False  # whether `activate` was called
        self._lock = Mutex()

    def section(self, name: str, make: Callable[[], SectionType]) -> SectionType:
        """The section of that name, created when it is first asked for.

        Raises:
            BadParameter: it is none, or the file holds something else under that name.
        """
        with self._lock:
            found = self.sections.get(name)
            if found is None:
                found = make()
                if not isinstance(found, Section):
                    raise BadParameter(
                        f"the section {name!r} of the drafter cache is a {type(found).__name__}; it must be of a "
                        "subclass of leapahead.Section"
                    )
                if (saved := self.unknown.get(name)) is not None:
                    self._merge_section(name, found, saved)
                    del self.unknown[name]
                if found.exchanged and (ledger := self._ledgers.get(name)) is not None:  # was received before
                    self._learn(name, found)
                    self._replace(name, found, ledger)
                self.sections[name] = found
            return found  # type: ignore[return-value]

    def activate(self) -> None:
        """Creates the loaded or received sections that are installed, before any source asks for them.

        So a damaged file is refused at once, and sections of several files can be merged.
        """
        with self._lock:
            self._active = True
            for name in [*self.unknown, *self._ledgers]:
                if name not in self.sections and (section := make(name)) is not None:
                    self.section(name, lambda made=section: made)  # type: ignore[misc]

    @property
    def tokenizer(self) -> str:
        """The fingerprint of the tokenizer, or `core.text.unnamed`; "" while the cache belongs to no vocabulary."""
        with self._lock:
            if not isinstance(self._tokenizer, str):
                self._tokenizer = self._tokenizer()
            return self._tokenizer

    def belong(self, tokenizer: str | Callable[[], str], vocab_size: int) -> None:
        """Binds the cache to a vocabulary. Where its tokenizer was not known, that is taken to be the one named first.

        Args:
            tokenizer: its fingerprint, or a function that computes it, called only if it must be compared or saved.
            vocab_size: token ids are below it.

        Raises:
            BadParameter: the cache belongs to another vocabulary.
        """
        with self._lock:
            if self._is_unnamed(vocab_size):
                self._tokenizer, self.vocab_size = tokenizer, vocab_size
            elif difference := self._difference(tokenizer if isinstance(tokenizer, str) else tokenizer(), vocab_size):
                raise BadParameter(
                    f"the drafter cache{f' {self.path}' if self.path else ''} belongs to {difference[0]} and the model "
                    f"has {difference[1]}; use another drafter cache for each vocabulary"
                )

    def _is_unnamed(self, vocab_size: int) -> bool:
        """Whether it belongs to no vocabulary yet, or to one of this size whose tokenizer is not known."""
        return not self.vocab_size or (self.vocab_size == vocab_size and self.tokenizer == unnamed(vocab_size))

    def _difference(self, tokenizer: str, vocab_size: int) -> tuple[str, str] | None:
        """Our vocabulary and the other one, in words; None if they are the same."""
        if self.vocab_size != vocab_size:
            return f"a vocabulary of {self.vocab_size}", f"a vocabulary of {vocab_size}"
        if self.tokenizer != tokenizer:
            return f"the tokenizer {self.tokenizer!r}", f"the tokenizer {tokenizer!r}"
        return None

    @classmethod
    def load(cls, path: str | Path) -> DrafterCache:
        """Loads a file. Its sections are created when they are asked for, or by `activate`.

        Raises:
            BadParameter: there is no such file, or it is not a drafter cache, damaged, too large, or of a newer format.
        """
        cache = cls()
        cache.path = file_path("path", path).absolute()
        cache.merge(cache.path)
        return cache

    def merge(self, path: str | Path) -> None:
        """Merges a file as if its texts had come before this cache's.

        Raises:
            BadParameter: as of `load`; or it belongs to another vocabulary.
        """
        contents = cache_file.read(real(file_path("path", path)))
        assert contents is not None
        with self._lock:
            self._merge_contents(contents)
            self._merged[contents.file] = contents.id

    def _merge_contents(self, contents: Contents) -> None:
        self._adopt(contents.file, contents.tokenizer, contents.vocab_size)
        if self.unknown.keys() & contents.sections.keys():
            self.activate()  # what two files have is merged by the section's own class
        for name, saved in contents.sections.items():
            if (section := self.sections.get(name)) is not None:
                self._merge_section(name, section, saved)
            elif name in self.unknown and self.unknown[name].file != saved.file:
                raise BadParameter(
                    f"{self.unknown[name].file} and {saved.file} both have a section {name!r}, and no installed "
                    "package can merge it; install the package that wrote it, or leave one file out"
                )
            else:
                self.unknown[name] = saved

    def _adopt(self, origin: Path | str, tokenizer: str, vocab_size: int) -> None:
        """Takes the vocabulary of what is merged, if this cache has no name for its own yet."""
        if self._is_unnamed(vocab_size):
            self._tokenizer, self.vocab_size = tokenizer, vocab_size
        elif (tokenizer, vocab_size) == (unnamed(self.vocab_size), self.vocab_size):
            return  # whatever the order in which they are merged
        elif difference := self._difference(tokenizer, vocab_size):
            raise BadParameter(
                f"{origin} belongs to {difference[1]} and cannot be merged with {self.path or 'a drafter cache'} of "
                f"{difference[0]}; use another {'file' if isinstance(origin, Path) else 'exchange'} for each vocabulary"
            )

    def _merge_section(self, name: str, section: Section, saved: SavedSection) -> None:
        if saved.layout != section.layout:
            raise BadParameter(
                f"{saved.file} has the section {name!r} in layout {saved.layout}, and the installed package reads "
                f"layout {section.layout}; {cache_file.REMEDY}"
            )
        try:
            self._check_tokens(section, saved.arrays)
            section.merge(saved.arrays)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise BadParameter(
                f"{saved.file} is damaged in its section {name!r} ({cache_file.summary(error)}); {cache_file.REMEDY}"
            ) from error

    def _check_tokens(self, section: Section, arrays: Arrays) -> None:
        for key in section.token_arrays:
            tokens = arrays[key]
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
                raise ValueError(f"{key} has a token outside the vocabulary of {self.vocab_size}")

    def to_bytes(self) -> bytes:
        """What this cache has learned and received, for `merge_bytes` of other processes.

        It is bounded: by `Section.exchanged` for each section, and by 256 MB. Two caches with the same contents give
        the same bytes. They hold pieces of prompts and texts. Nothing in them is ever executed.

        Raises:
            BadParameter: the cache belongs to no vocabulary yet.
        """
        with self._lock:
            if not self.vocab_size:
                raise BadParameter("the drafter cache belongs to no vocabulary yet; pass it to an LLM first")
            if self.unknown:  # what was loaded is exchanged, too
                self.activate()
            for name, section in self.sections.items():
                self._learn(name, section)
            names = sorted(self._ledgers)
            header = {"magic": EXCHANGED, "format": EXCHANGE_FORMAT, "tokenizer": self.tokenizer}
            header |= {"vocab_size": self.vocab_size, "sections": names}
            arrays = {f"{name}/{key}": a for name in names for key, a in self._ledgers[name].arrays().items()}
        stream = BytesIO()
        cache_file.pack(stream, header, arrays)
        return stream.getvalue()

    def merge_bytes(self, data: bytes) -> None:
        """Merges what `to_bytes` of another process gave.

        The contents after merging a set of caches do not depend on the order of the merges, and merging something twice
        changes nothing. Of entries that do not fit, the newest are kept. What running texts teach meanwhile may be
        lost, so the time to call this is between texts.

        Raises:
            BadParameter: it is something else, damaged, or belongs to another vocabulary. The sections that were merged
                before a damaged one stay merged.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise BadParameter(f"{RECEIVED} must be bytes, as to_bytes gives them, got {type(data).__name__}")
        if len(data) > cache_file.MAX_BYTES:
            raise cache_file.too_large(RECEIVED, len(data), RESEND)
        with cache_file.unpacked(data, RECEIVED, RESEND) as (header, array):
            if header.get("magic") != EXCHANGED or header.get("format") != EXCHANGE_FORMAT:
                raise ValueError("its header is not that of an exchanged drafter cache")
            tokenizer, vocab_size = header["tokenizer"], header["vocab_size"]
            if not isinstance(tokenizer, str) or type(vocab_size) is not int or vocab_size < 1:
                raise ValueError("its header is not valid")
            keys = Ledger(0).arrays()
            received = {str(n): Ledger.of({k: array(f"{n}/{k}") for k in keys}) for n in header["sections"]}
        with self._lock:
            self._adopt(RECEIVED, tokenizer, vocab_size)
            for name, ledger in received.items():
                self._receive(name, ledger)

    def _receive(self, name: str, received: Ledger) -> None:
        section = self.sections.get(name)
        if section is not None:
            self._learn(name, section)
        known = self._ledgers.get(name)
        joined = received if known is None else known.join(received)
        if joined == known:
            return
        if section is not None and section.exchanged:
            self._replace(name, section, joined)
        self._ledgers[name] = joined

    def _learn(self, name: str, section: Section) -> None:
        """Brings the ledger of a section up to date."""
        if section.exchanged:
            ledger = self._ledgers.setdefault(name, Ledger(section.exchanged))
            ledger.learn(section.entries_of(section.arrays()))

    def _replace(self, name: str, section: Section, ledger: Ledger) -> None:
        try:
            arrays = section.arrays_of(ledger.listed())
            self._check_tokens(section, arrays)
            section.replace(arrays)
        except ValueError as error:
            raise BadParameter(
                f"{RECEIVED} is damaged in its section {name!r} ({cache_file.summary(error)}); {RESEND}"
            ) from error

    def snapshot(self) -> dict[str, tuple[int, Arrays]]:
        """Name -> (layout, arrays) of every section, as a save writes them."""
        with self._lock:
            sections, unknown = dict(self.sections), dict(self.unknown)
        live = {name: (section.layout, section.arrays()) for name, section in sections.items()}
        return {**live, **{name: (saved.layout, saved.arrays) for name, saved in unknown.items()}}

    def save(self, path: str | Path | None = None, replace: bool = False) -> Path:
        """Saves all sections to a file, after merging what another process saved there since it was last read.

        If it fails, the file is as it was. What `merge_bytes` received is saved once an LLM uses this cache.

        Args:
            path: by default the cache's own.
            replace: overwrite the file without merging it.

        Returns:
            The path.

        Raises:
            BadParameter: no path is known, the file is not a drafter cache or belongs to another vocabulary, it cannot
                be written, or another process does not release its lock.
        """
        flag("replace", replace)
        named = self.path if path is None else file_path("path", path)
        if named is None:
            raise BadParameter("the drafter cache has no file; name the file to save it to")
        if not self.vocab_size:
            raise BadParameter("the drafter cache belongs to no vocabulary yet; pass it to an LLM, then save it")
        file = real(replaceable(named))
        try:
            with cache_file.locked(file):
                if not replace and file.exists():
                    contents = cache_file.read(file, unless=self._merged.get(file))
                    if contents is not None:
                        with self._lock:
                            self._merge_contents(contents)
                if self._active:  # an LLM uses this cache; sections may have been received since
                    self.activate()
                self._merged[file] = cache_file.write(file, self.tokenizer, self.vocab_size, self.snapshot())
        except OSError as error:
            raise cache_file.not_written(named, error) from error
        if self.path is None:
            self.path = named
        if missing := sorted({*self._ledgers} - {*self.sections}):
            warnings.warn(
                f"{named} has nothing of what was received of {', '.join(missing)}; pass the cache to an LLM before it "
                "is saved",
                UserWarning,
                stacklevel=2,
            )
        return named
