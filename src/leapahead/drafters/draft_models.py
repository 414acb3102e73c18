"""Draft models as drafters are given them: by name, folder or file, or loaded; the target itself; one or several.

    "small", "small.gguf", "bundled", a module, a target    another model
    "self:skip"            the target without the layers that `leapahead lab skip` found (Draft & Verify, 2309.08168)
    "self:skip=1m,2-3"     without these: MLP of 1, all of 2 and 3
    "self:first=8"         its first 8 layers and its head, in the target's own cache (LayerSkip, 2404.16710)
    "self:int8"            its weights in int8

What is given by name is loaded once and shared by all sequences of the process; what is made of a target lives as long
as that. Whether a draft's tokens are the target's is asked of the tokenizers, where both are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.core.text import Tokenizer, difference
from leapahead.drafters.sources.draft import DraftSource
from leapahead.models import loading
from leapahead.models.base import CHAIN, TOP_K, Target
from leapahead.models.loading import Loaded

BUNDLED = "bundled"  # the draft that comes with the bundled model
SELF = "self:"
FIRST = "self:first="
MOST = 4  # models that are kept by name; the one that was used longest ago goes

Draft = Loaded | str  # a string: of the target itself
_kept: dict[tuple[Any, ...], Loaded] = {}
_own: WeakKeyDictionary[Target, dict[str, Loaded]] = WeakKeyDictionary()


def load(draft: Any, dtype: str = "auto", device: str = "auto", **llama_cpp_options: Any) -> Loaded:
    """One draft model, as `loading.load` has it; a GGUF file has a dtype of its own, others no options of llama.cpp.

    Raises:
        LeapaheadError: it cannot be loaded, does not fit into the memory that is left, or cannot draft.
    """
    if isinstance(draft, Loaded):
        return draft
    if not isinstance(draft, (str, Path)):
        return able(loading.load(draft))
    name = loading.bundled("tiny-draft") if str(draft) == BUNDLED else str(draft)
    options = (
        {"device": device, **llama_cpp_options}
        if name.lower().endswith(".gguf")
        else {"device": device, "dtype": dtype}
    )
    key = name, *sorted(options.items())
    if (found := _kept.pop(key, None)) is None:
        room(name)
        found = able(loading.load(name, **options))
    _kept[key] = found
    while len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return found


def given(draft: Any, **options: Any) -> list[Draft]:
    """The draft models that are meant: one, a list, or names divided by commas; options as of `load`."""
    if isinstance(draft, str) and not draft.startswith(SELF):  # whose layers are divided by commas
        draft = [name.strip() for name in draft.split(",") if name.strip()]
    drafts = draft if isinstance(draft, (list, tuple)) else [draft]
    if not drafts:
        raise BadParameter("draft names no model; give a name, a folder, a GGUF file, or several divided by commas")
    return [each if isinstance(each, str) and each.startswith(SELF) else load(each, **options) for each in drafts]


def resolved(drafts: Sequence[Draft], target: Target) -> list[Loaded]:
    """The models, those that are made of the target too.

    Raises:
        LeapaheadError: it cannot be made, or cannot draft.
    """
    exits = [each for each in drafts if isinstance(each, str) and each.startswith(FIRST)]
    if len(exits) > 1:
        raise BadParameter(f"{' and '.join(exits)} would share one part of the target's cache; give one of them")
    return [own(target, each) if isinstance(each, str) else each for each in drafts]


def own(target: Target, draft: str) -> Loaded:
    """A draft that is made of the target itself and shares its weights."""
    made = _own.setdefault(target, {})
    if draft not in made:
        what, _, value = draft.removeprefix(SELF).partition("=")
        with needing("a draft made of the target", "transformers", "torch", "transformers"):
            from leapahead.models.transformers.model import TransformersTarget
        if not isinstance(target, TransformersTarget):
            raise Refused(
                f"draft={draft!r} needs a model of Transformers; for a GGUF file give another quantisation of it, "
                "draft='model-q4_0.gguf'"
            )
        if what == "skip":
            from leapahead.drafters import saved_skips
            from leapahead.models.self_draft.layer_skip import Skip, without

            skip = Skip.parse(value) if value else saved_skips.saved(target)
            if skip is None:
                raise BadParameter(
                    f"draft={draft!r} needs a search that was not made for {target.name}: run `leapahead lab skip`, or "
                    "name the layers, as in self:skip=2m,4-6"
                )
            if not skip:
                raise BadParameter(f"leaving layers out of {target.name} does not pay: the search found none")
            view = without(target, skip)
        elif what == "first" and value.isdigit():
            from leapahead.models.self_draft.early_exit import EarlyExit

            view = EarlyExit(target, int(value))
        elif what == "int8" and not value:
            with needing("a draft in int8", "int8", "optimum"):
                from leapahead.models.self_draft.int8 import int8
            view = int8(target)
        else:
            raise BadParameter(
                f"draft={draft!r} is not possible; there are self:skip, self:skip=LAYERS, self:first=N and self:int8"
            )
        made[draft] = able(Loaded(view, None, ()))
    return made[draft]


def able(loaded: Loaded) -> Loaded:
    """Refuses by name what cannot draft."""
    if missing := sorted({CHAIN, TOP_K} - loaded.target.capabilities):
        raise Refused(
            f"{loaded.target.name} cannot draft, since it does not have {' and '.join(missing)} (its state cannot "
            "forget rejected tokens); use another draft model"
        )
    return loaded


def check(drafts: Sequence[Draft], tokenizer: Tokenizer) -> None:
    """Refuses a draft with another vocabulary.

    Raises:
        BadParameter: naming the first difference.
    """
    for draft in drafts:
        if isinstance(draft, str) or draft.tokenizer is None:
            continue
        if unlike := difference(tokenizer, draft.tokenizer):
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
