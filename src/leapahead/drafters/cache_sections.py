"""The drafter cache that a file or an argument names, with the sections that are installed."""

from __future__ import annotations

import os
from pathlib import Path

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import file_path
from leapahead.core.text import Tokenizer, fingerprint, unnamed
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.cache_file import not_written


def load(path: str | Path) -> DrafterCache:
    """Loads a file and creates all sections that are installed.

    Raises:
        BadParameter: as of `DrafterCache.load`.
    """
    cache = DrafterCache.load(path)
    cache.activate()
    return cache


def given(drafter_cache: DrafterCache | str | Path | bool) -> DrafterCache | None:
    """The drafter cache that the argument `drafter_cache` of `LLM` names; None for False.

    Raises:
        BadParameter: as of `load`; or such a file cannot exist.
    """
    if drafter_cache is False:
        return None
    if drafter_cache is True:
        drafter_cache = DrafterCache()
    if isinstance(drafter_cache, DrafterCache):
        drafter_cache.activate()
        return drafter_cache
    if not isinstance(drafter_cache, (str, Path)) or not str(drafter_cache):
        raise BadParameter(
            f"drafter_cache={drafter_cache!r} is not possible: it must be True, False, a file, or a DrafterCache"
        )
    path = file_path("drafter_cache", drafter_cache)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # such as a name that is too long
        raise not_written(path, error) from error
    else:
        return load(path)
    if not path.parent.is_dir():
        raise BadParameter(
            f"the drafter cache {path} cannot be created: the folder {path.parent} does not exist; create it first"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadParameter(
            f"the drafter cache {path} cannot be created: the folder {path.parent} is not writable; name another file"
        )
    new = DrafterCache()
    new.activate()
    new.path = path.absolute()
    return new


def vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """The name by which a drafter cache identifies a model's tokens."""
    return unnamed(vocab_size) if tokenizer is None else fingerprint(tokenizer)
