"""Loading of draft models: by name, folder or file; given as loaded models; or made of the target itself.

    "small", "small.gguf", "bundled", a module, a target    another model
    "self:skip"            the target without the layers that `leapahead search-layers` found (2309.08168)
    "self:skip=1m,2-3"     without the MLP of layer 1 and all of layers 2 and 3
    "self:first=8"         its first 8 layers and its head, in the target's own cache (LayerSkip, 2404.16710)
    "self:int8"            its weights in int8

`DraftModels` loads each of them once for all drafters of an engine and releases them with the engine. A draft model
must have the target's tokenizer; where both are known they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.core import forks
from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.core.parameters import apart, file_path, whole
from leapahead.core.text import Tokenizer, difference
from leapahead.drafters.draft_runner import LEAST_WINDOW, LONGEST_CHAIN, SINKS
from leapahead.drafters.sources.draft import MASKED, DraftSource, ParallelDraftSource
from leapahead.models import loading, origin
from leapahead.models.base import CHAIN, TOP_K, SharesCache, Target, TargetInfo
from leapahead.models.loading import Loaded
from leapahead.models.memory import free_host_bytes
from leapahead.planner.profile import LatencyProfiles

if TYPE_CHECKING:
    from leapahead.models.transformers.model import TransformersTarget

BUNDLED = "bundled"  # the draft model that comes with the bundled model
SELF = "self:"
FIRST = "self:first="
INSTEAD = "use drafter='draft_model' with a smaller model"


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A loaded draft model.

    Attributes:
        target: the model, with the interface of a target.
        tokenizer: its own; None where none is known.
        latency: how long a forward of it takes.
    """

    target: Target
    tokenizer: Tokenizer | None
    latency: LatencyProfiles

    def __post_init__(self) -> None:
        forks.watch(self)

    def forked(self) -> None:
        """Called in a child process, which is refused a model that computes in threads or on an accelerator."""
        if getattr(self.target, "has_threads", False):
            lost: Any = forks.Lost("its draft model had threads of its own that compute, or an accelerator")
            self.target.lock = lost

    @property
    def title(self) -> str:
        return f"the draft model {self.target.info.name}"

    @property
    def source_name(self) -> str:
        return "draft"

    def source(self, name: str) -> DraftSource:
        """See `ForwardModel.source`."""
        return (DraftSource if self.depths == 1 else ParallelDraftSource)(self, self.target, name)

    @property
    def depths(self) -> int:
        """The number of depths of which one forward gives candidates."""
        return 1 if self.target.info.mask_token < 0 else MASKED

    def known(self, tokens: Sequence[int], owner: str) -> int:
        """See `ForwardModel.known`."""
        return len(tokens)

    def prepare(self) -> None:
        """See `ForwardModel.prepare`."""
        self.latency.prepare(self.target)

    def measure(self) -> None:
        """See `ForwardModel.measure`."""
        self.latency.measure(self.target)

    @classmethod
    def of(cls, loaded: Loaded) -> DraftModel:
        """A loaded model as a draft model.

        Raises:
            Refused: it cannot draft.
        """
        info = loaded.target.info
        if missing := sorted({CHAIN, TOP_K} - info.capabilities):
            raise Refused(
                f"{info.name} cannot draft, since it does not have {' and '.join(missing)}; use another draft model"
            )
        if info.mask_token >= info.vocab_size:
            raise BadParameter(
                f"the draft model {info.name} has pard_token={info.mask_token} in its config.json, and a vocabulary of "
                f"{info.vocab_size}; the file is broken"
            )
        return cls(loaded.target, loaded.tokenizer, LatencyProfiles(info))

    def check_kind(self, target: Target) -> None:
        """See the function `check_kind`."""
        check_kind(self.target.info.name, self.target.info.decoder is not None, target.info)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuses a draft model whose tokenizer is not the target's.

        Raises:
            BadParameter: naming the first difference.
        """
        if self.tokenizer is not None and (unlike := difference(tokenizer, self.tokenizer)):
            raise BadParameter(
                f"the draft model {self.target.info.name} has another vocabulary than the target: {unlike}; use one "
                "with the target's tokenizer"
            )


def check_kind(name: str, is_both: bool, target: TargetInfo) -> None:
    """Refuses a draft model that reads prompts in another way than the target.

    Args:
        name: of the draft model.
        is_both: whether it is an encoder-decoder model.
        target: what is known of the target.

    Raises:
        Refused: one of them is an encoder-decoder model and the other one is not.
    """
    if is_both != (target.decoder is not None):
        kinds = ("a decoder-only model", "an encoder-decoder model")
        raise Refused(
            f"the draft model {name} is {kinds[is_both]} and {target.name} is {kinds[not is_both]}; use a draft model "
            "of the same kind"
        )


Draft = DraftModel | str  # a name, or "self:..."


class DraftModels:
    """The draft models of one engine. Each name is loaded once and kept as long as the engine."""

    def __init__(self) -> None:
        self._kept: dict[str, DraftModel] = {}

    def get(self, draft: Draft, target: Target | None) -> DraftModel:
        """The draft model that is meant.

        Args:
            draft: loaded, a name, or "self:..." for one that is made of the target. A named one is loaded with the
                options with which the target was.
            target: for which it drafts.

        Raises:
            LeapaheadError: it cannot be loaded or made, or it cannot draft.
        """
        if isinstance(draft, DraftModel):
            return draft
        if draft not in self._kept:
            self._kept[draft] = made_of(target, draft) if draft.startswith(SELF) else load(draft, **origin.of(target))
        return self._kept[draft]

    def retrieving(self, target: Target | None, budget: int, chunk: int, refresh: int) -> DraftModel:
        """The target over a retrieved part of its cache (TriForce, 2404.11912); see `models.self_draft.retrieval`.

        Args:
            target: of which it is made.
            budget, chunk, refresh: see `models.transformers.retrieval.Retrieval`.

        Raises:
            Refused: a part of this target's cache cannot be retrieved.
        """
        name = f"{SELF}retrieval={budget},{chunk},{refresh}"
        if name not in self._kept:
            made = copyable(target, "drafter 'triforce'", INSTEAD)
            from leapahead.models.self_draft.retrieval import RetrievalDraft
            from leapahead.models.transformers.retrieval import Retrieval

            view = RetrievalDraft(made, Retrieval.of(budget, chunk, refresh))
            self._kept[name] = DraftModel.of(Loaded(view, None, ()))
        return self._kept[name]

    def all(self, drafts: Sequence[Draft], target: Target | None, tokenizer: Tokenizer | None) -> list[DraftModel]:
        """Several of them, their tokenizers compared with the target's where that is known.

        Raises:
            LeapaheadError: one cannot be loaded or made, cannot draft, or has another tokenizer.
        """
        exits = [each for each in drafts if isinstance(each, str) and each.startswith(FIRST)]
        if len(exits) > 1:
            raise BadParameter(f"{' and '.join(exits)} would use the same part of the target's cache; give one of them")
        found = [self.get(draft, target) for draft in drafts]
        for model in found:
            if target is not None:
                model.check_kind(target)
            if tokenizer is not None:
                model.check_tokenizer(tokenizer)
        return found


def parsed(draft: Any) -> list[Draft]:
    """The draft models that an option names: one, a list, or names divided by commas. Names are not loaded yet.

    Raises:
        BadParameter: it names none, or a file or folder that is not there.
        Refused: a loaded one cannot draft.
    """
    if isinstance(draft, str) and not draft.startswith(SELF):  # "self:skip=1,2" has commas of its own
        draft = apart(draft)
    drafts = draft if isinstance(draft, (list, tuple)) else [draft]
    if not drafts:
        raise BadParameter("draft names no model; give a name, a folder, a GGUF file, or several divided by commas")
    return [_parsed(each) for each in drafts]


def _parsed(draft: Any) -> Draft:
    if isinstance(draft, DraftModel):
        return draft
    if isinstance(draft, (str, Path)):
        if (name := str(draft)) != BUNDLED and not name.startswith(SELF):
            loading.check_place(name)
        return name
    return DraftModel.of(draft if isinstance(draft, Loaded) else loading.load(draft))


def needed(drafter: str, drafts: list[Draft] | None, model: str) -> list[Draft]:
    """The draft models of a drafter: those given, or for the bundled model its own draft model.

    Args:
        drafter: its name, for the message.
        drafts: as parsed; None where none was given.
        model: name of the target.

    Raises:
        BadParameter: none was given, and the target is another one.
    """
    if drafts is None and model != loading.BUNDLED:
        raise BadParameter(f"the drafter {drafter!r} needs draft=..., a smaller model with the tokenizer of {model}")
    return drafts or [BUNDLED]


def check_window(window: int, models: Sequence[DraftModel]) -> int:
    """The option `draft_window`, checked; see `DraftRunner`.

    Raises:
        BadParameter: it is too small, does not fit a draft model's context, or one shares the target's cache.
    """
    if window == 0:
        return 0
    if whole("draft_window", window) < LEAST_WINDOW:
        raise BadParameter(f"draft_window={window} is not possible: it must be at least {LEAST_WINDOW}, or 0 for none")
    for model in models:
        info = model.target.info
        if isinstance(model.target, SharesCache):
            raise BadParameter(f"draft_window={window} is not possible with {info.name}, which has the target's cache")
        if SINKS + window + LONGEST_CHAIN >= info.context_length:
            raise BadParameter(
                f"draft_window={window} is too large for {info.name}, whose context has {info.context_length} tokens; "
                f"with {SINKS} first tokens and up to {LONGEST_CHAIN} drafted ones give at most "
                f"{info.context_length - SINKS - LONGEST_CHAIN - 1}"
            )
    return window


def names(draft: Any) -> Any:
    """`draft` with the bundled one's name in place of loaded models, to check an option before anything is loaded."""
    if isinstance(draft, (list, tuple)):
        return [names(each) for each in draft]
    return draft if isinstance(draft, (str, Path)) else BUNDLED


def given(draft: Any, **options: Any) -> list[Draft]:
    """As `parsed`, but names are loaded now, with options as of `load`; "self:..." is made when it is first used."""
    return [
        load(each, **options) if isinstance(each, str) and not each.startswith(SELF) else each for each in parsed(draft)
    ]


def load(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    engine: str = "auto",
    trust_remote_code: bool = False,
    cells: int = 0,
    **options: Any,
) -> DraftModel:
    """Loads a draft model by name, folder or file, as `loading.load` does.

    Args:
        dtype: of a model of Transformers; the others have one of their own.
        engine: "openvino" for that one, whatever the draft model is; others compute what they are made for.
        trust_remote_code: whether Python code that comes with the model may run.
        cells: of the KV cache of a GGUF file, whose target has so many for all texts together; 0 for `n_ctx`.
        options: of the target's engine; those of the draft model's are used.

    Raises:
        LeapaheadError: it cannot be loaded, does not fit into the memory that is left, or cannot draft.
    """
    path = loading.bundled("tiny-draft") if name == BUNDLED else name
    _check_memory(path)
    kind = loading.engine_of(path, engine if engine == "openvino" else "auto")
    # It drafts on one of several devices, and in a cache as it needs it.
    left_out = (loading.DEVICES, loading.TENSOR_PARALLEL, "kv_unified")
    own = {name: options[name] for name in loading.OPTIONS_OF[kind] if name in options and name not in left_out}
    own |= {"dtype": dtype if kind == "transformers" else "auto", "trust_remote_code": trust_remote_code}
    return DraftModel.of(loading.load(path, engine=kind, device=device, cells=cells, **own))


def made_of(target: Target | None, draft: str) -> DraftModel:
    """A draft model that is made of the target and shares its weights.

    Args:
        target: None where the host has none.
        draft: "self:skip", "self:skip=LAYERS", "self:first=N" or "self:int8".

    Raises:
        LeapaheadError: it cannot be made of this target.
    """
    what, _, value = draft.removeprefix(SELF).partition("=")
    instead = "for a model of another engine give the same one in fewer bits, such as draft='model-q4_0.gguf'"
    target = copyable(target, f"draft={draft!r}", instead)
    view: Target
    if what == "skip":
        from leapahead.drafters import saved_skips
        from leapahead.models.self_draft.layer_skip import without

        view = without(target, saved_skips.chosen(target, draft, value))
    elif what == "first" and value.isdecimal():
        from leapahead.models.self_draft.early_exit import EarlyExit

        view = EarlyExit(target, int(value))
    elif what == "int8" and not value:
        with needing("a draft model in int8", "int8", "optimum"):
            from leapahead.models.self_draft.int8 import int8
        view = int8(target)
    else:
        raise BadParameter(
            f"draft={draft!r} is not possible; there are self:skip, self:skip=LAYERS, self:first=N and self:int8"
        )
    return DraftModel.of(Loaded(view, None, ()))


def copyable(target: Target | None, what: str, instead: str) -> TransformersTarget:
    """The target, if draft models can be made of it.

    Args:
        target: None where the host has none.
        what: is to be made, for the message.
        instead: what to do where the target is no model of Transformers.

    Raises:
        Refused: they cannot.
    """
    with needing("a draft model made of the target", "transformers", "torch", "transformers"):
        from leapahead.models.transformers.model import TransformersTarget
    if target is not None and target.info.decoder is not None:
        raise Refused(
            f"{what} is not possible with {target.info.name}, which is an encoder-decoder model; draft "
            "with a smaller one that has the same tokenizer (drafter='draft_model')"
        )
    if target is not None and target.info.devices > 1:
        raise Refused(f"{what} is not possible with devices; draft with a smaller model (drafter='draft_model')")
    if not isinstance(target, TransformersTarget):
        raise Refused(f"{what} needs a model of Transformers; {instead}")
    return target


def _check_memory(name: str) -> None:
    """Refuses a model whose weights are larger than the memory that is left.

    Raises:
        BadParameter: naming both sizes.
    """
    path = file_path("draft", name)
    files = [path] if path.is_file() else list(path.glob("*.safetensors")) if path.is_dir() else []
    size, left = sum(file.stat().st_size for file in files), free_host_bytes()
    if size > left:
        raise BadParameter(
            f"the draft model {name} does not fit beside the target: its weights are {size / 2**30:.1f} GiB and "
            f"{left / 2**30:.1f} GiB of memory are left; use a smaller one"
        )
