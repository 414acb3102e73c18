"""Draft models as drafters are given them: by name, folder or file, or loaded; one or several.

What is given by name is loaded once and shared by all sequences of the process. Whether a draft's tokens are the
target's is asked of the tokenizers, where both are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leapahead import targets
from leapahead.drafters.sources.draft import DraftSource
from leapahead.errors import BadParameter, Refused
from leapahead.target import CHAIN, TOP_K
from leapahead.targets import Loaded
from leapahead.text import Tokenizer, difference

BUNDLED = "bundled"  # the draft that comes with the bundled model
MOST = 4  # models that are kept by name; the one that was used longest ago goes

_kept: dict[tuple[Any, ...], Loaded] = {}


def load(draft: Any, dtype: str = "auto", device: str = "auto", **llama_cpp_options: Any) -> Loaded:
    """One draft model, as `targets.load` has it; a GGUF file has a dtype of its own, others no options of llama.cpp.

    Raises:
        LeapaheadError: it cannot be loaded, does not fit into the memory that is left, or cannot draft.
    """
    if isinstance(draft, Loaded):
        return draft
    if not isinstance(draft, (str, Path)):
        return able(targets.load(draft))
    name = targets.bundled("tiny-draft") if str(draft) == BUNDLED else str(draft)
    options = (
        {"device": device, **llama_cpp_options}
        if name.lower().endswith(".gguf")
        else {"device": device, "dtype": dtype}
    )
    key = name, *sorted(options.items())
    if (found := _kept.pop(key, None)) is None:
        room(name)
        found = able(targets.load(name, **options))
    _kept[key] = found
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return found


def given(draft: Any, **options: Any) -> list[Loaded]:
    """The draft models that are meant: one, a list, or names divided by commas; options as of `load`."""
    if isinstance(draft, str):
        draft = [name.strip() for name in draft.split(",") if name.strip()]
    found = [load(each, **options) for each in (draft if isinstance(draft, (list, tuple)) else [draft])]
    if not found:
        raise BadParameter("draft names no model; give a name, a folder, a GGUF file, or several divided by commas")
    return found


def able(loaded: Loaded) -> Loaded:
    """Refuses by name what cannot draft."""
    if missing := sorted({CHAIN, TOP_K} - loaded.target.capabilities):
        raise Refused(
            f"{loaded.target.name} cannot draft, since it does not have {' and '.join(missing)} (its state cannot "
            "forget rejected tokens); use another draft model"
        )
    return loaded


def check(drafts: Sequence[Loaded], tokenizer: Tokenizer) -> None:
    """Refuses a draft with another vocabulary.

    Raises:
        BadParameter: naming the first difference.
    """
    for draft in drafts:
        if draft.tokenizer is not None and (unlike := difference(tokenizer, draft.tokenizer)):
            raise BadParameter(
                f"the draft model {draft.target.name} has another vocabulary than the target: {unlike}; use one with "
                "the target's tokenizer"
            )


def sources(drafts: Sequence[Loaded]) -> list[DraftSource]:
    """New ones, for a sequence."""
    return [
        DraftSource(draft.target, "draft" if index == 1 else f"draft{index}") for index, draft in enumerate(drafts, 1)
    ]


def room(name: str) -> None:
    """Refuses a model whose weights are larger than the memory that is left.

    Raises:
        BadParameter: naming both sizes.
    """
    path = Path(name).expanduser()
    files = [path] if path.is_file() else list(path.glob("*.safetensors")) if path.is_dir() else []
    size, left = sum(file.stat().st_size for file in files), memory_left()
    if left is not None and size > left:
        raise BadParameter(
            f"the draft model {name} does not fit beside the target: its weights are {size / 2**30:.1f} GiB and "
            f"{left / 2**30:.1f} GiB of memory are left; use a smaller one"
        )


def memory_left() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None
