"""A model with layers left out, as a draft model: the same weights, less computation.

    Draft & Verify (2309.08168)    any attention or MLP sub-layer may be left out       `without`
    LayerSkip (2404.16710)         the first layers, then the final norm and the head   `early_exit.EarlyExit`

A block of a decoder adds to its input, and one that is left out adds nothing:

    h ─┬─ norm ─ attention ─ + ─┬─ norm ─ MLP ─ + ─ h'      attention left out: zeros instead
       └─────────────────────┘  └───────────────┘          both left out: the layer returns h, no norm runs

The view is a copy of the user's model: every module is copied, every weight is the same tensor, so that changes of the
modules of one do not affect the other. The numbers of the layers stay as they are, and with them their planes of the
cache and their attention patterns. A view has a KV cache of its own.

Attention and MLP modules are found by their names. Whether they may be left out is tested: a forward records the form
of each module's output, and with all of them left out the model must equal its embedding, norm and head alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.tree import IntArray
from leapahead.models.base import CHAIN
from leapahead.models.transformers import families, selftest
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.twin import twin

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "ffn", "feed_forward", "block_sparse_moe")
PAIR = ("fc1", "fc2")  # an MLP whose two halves lie in the layer itself

PART = re.compile(r"(\d+)(?:-(\d+))?([am]?)")
FARTHEST = 10**6  # a larger number of a layer is a typing error; a range up to this one is still fast to make


@dataclass(frozen=True)
class Skip:
    """Which sub-layers are left out. As a text: "3a,5m,7,9-12": attention of 3, MLP of 5, all of 7 and of 9 to 12.

    Attributes:
        attention, mlp: indices of layers, from 0.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def layers(cls, layers: Iterable[int]) -> Skip:
        """Whole layers."""
        both = frozenset(layers)
        return cls(both, both)

    @classmethod
    def parse(cls, text: str) -> Skip:
        """Reads the text that `str` writes; layers in any order, "" for none.

        Raises:
            BadParameter: the text has another form.
        """
        found: dict[str, set[int]] = {"a": set(), "m": set()}
        for part in text.replace(" ", "").split(","):
            match = PART.fullmatch(part)
            if match is None and text.strip():
                raise BadParameter(
                    f"{part!r} in skip={text!r} is not a layer; write 3 for a layer, 3a or 3m for a part of it, "
                    "4-9 for several"
                )
            if match is not None:
                first, last, kind = int(match[1]), int(match[2] or match[1]), match[3] or "am"
                if not first <= last <= FARTHEST:
                    raise BadParameter(
                        f"{part!r} in skip={text!r} is not a range of layers; write the smaller number first"
                    )
                for each in kind:
                    found[each] |= set(range(first, last + 1))
        return cls(frozenset(found["a"]), frozenset(found["m"]))

    def __str__(self) -> str:
        kinds = {layer: self._kind(layer) for layer in sorted(self.attention | self.mlp)}
        # Neighbours of one kind differ from their rank among all by the same number.
        runs = groupby(enumerate(kinds), key=lambda item: (item[1] - item[0], kinds[item[1]]))
        parts = [([layer for _, layer in run], kind) for (_, kind), run in runs]
        return ",".join(f"{run[0]}{f'-{run[-1]}' if len(run) > 1 else ''}{kind}" for run, kind in parts)

    def __bool__(self) -> bool:
        return bool(self.attention or self.mlp)

    def _kind(self, layer: int) -> str:
        return "" if layer in self.attention & self.mlp else "a" if layer in self.attention else "m"


@dataclass(frozen=True)
class Form:
    """Where the hidden states are in a module's output.

    Attributes:
        length: of the tuple that it returns; None if it returns the tensor itself.
        at: index of the hidden states in it.
    """

    length: int | None = None
    at: int = 0

    @classmethod
    def of(cls, output: Any, shape: torch.Size) -> Form | None:
        """The form of an output whose hidden states have this shape, up to their row dimensions; None if none has."""

        def fits(each: Any) -> bool:
            return isinstance(each, Tensor) and each.numel() == shape.numel() and each.shape[-1] == shape[-1]

        if not isinstance(output, tuple):
            return cls() if fits(output) else None
        at = next((at for at, each in enumerate(output) if fits(each)), None)
        return None if at is None else cls(len(output), at)


class LeftOut(nn.Module):
    """Replaces a module that is left out. It has that module's plain attributes, which a model may read.

    Args:
        module: that is left out.
        form: of its output.
        gives: name of the argument that is returned unchanged; None for zeros in the first one's shape.
    """

    def __init__(self, module: nn.Module, form: Form, gives: str | None) -> None:
        super().__init__()
        names = list(inspect.signature(module.forward).parameters)
        for name, value in vars(module).items():
            if name not in vars(self) and not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        self.left_form, self.left_gives = form, gives
        self.left_first, self.left_at = names[0], names.index(gives) if gives is not None else 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.left_gives is None:
            result = torch.zeros_like(args[0] if args else kwargs[self.left_first])
        else:
            result = kwargs[self.left_gives] if self.left_gives in kwargs else args[self.left_at]
        if self.left_form.length is None:
            return result
        return tuple(result if at == self.left_form.at else None for at in range(self.left_form.length))


class SubLayers:
    """A model's decoder layers and their parts, tested to be such that each may be left out.

    Args:
        model: of Transformers; it is not changed.
        name: for messages.
        ids: token ids without a special meaning.

    Attributes:
        count: number of layers.

    Raises:
        Refused: it has no decoder layers of attention and MLP, each added to its input.
    """

    def __init__(self, model: Any, name: str, ids: IntArray) -> None:
        self._model, self._name = model, name
        self._ids = np.resize(ids[-3:], (1, 3))
        self._forms: dict[str, Form] = {}  # of layers and parts: "3", "3.mlp"
        config = families.text_config(model)
        self.count = int(config.num_hidden_layers)
        if getattr(config, "num_kv_shared_layers", 0):
            raise Refused(f"{name} has layers that read the keys of others, so that no layer can be left out")
        self._path = self._watch()
        self._test()

    def without(self, skip: Skip) -> Any:
        """A copy of the model without these sub-layers.

        Raises:
            BadParameter: a layer that the model does not have.
        """
        for layer in sorted(skip.attention | skip.mlp):
            if not 0 <= layer < self.count:
                raise BadParameter(f"layer {layer} cannot be left out: {self._name} has layers 0 to {self.count - 1}")
        return self._cut(skip, whole=True)

    def layer(self, view: Any, index: int) -> nn.Module:
        """A layer of the model or of a view of it."""
        found: nn.Module = view.get_submodule(self._path)[index]
        return found

    def form(self, index: int) -> Form:
        """Where the hidden states are in that layer's output."""
        return self._forms[str(index)]

    def _cut(self, skip: Skip, whole: bool) -> Any:
        """Layers of which nothing is left return their input if `whole`, else they are kept with their norms."""
        view = twin(self._model)
        layers = view.get_submodule(self._path)
        for index in sorted(skip.attention | skip.mlp):
            layer = layers[index]
            if whole and index in skip.attention and index in skip.mlp:
                layers[index] = LeftOut(
                    layer, self._forms[str(index)], next(iter(inspect.signature(layer.forward).parameters))
                )
                continue
            if index in skip.attention:
                self._leave_out(layer, index, _first_of(layer, ATTENTION))
            if index in skip.mlp:
                for name in _mlp_of(layer):
                    self._leave_out(layer, index, name)
        return view

    def _leave_out(self, layer: Any, index: int, name: str) -> None:
        """Some modules take the residual and return it with their own part added."""
        part = getattr(layer, name)
        form = self._forms[f"{index}.{name}"]
        parameters = inspect.signature(part.forward).parameters
        gives = "residual" if "residual" in parameters else next(iter(parameters)) if name == PAIR[0] else None
        setattr(layer, name, LeftOut(part, form, gives))

    def _watch(self) -> str:
        """Finds the layers and the forms by a forward of a copy; returns the path of the layers."""
        view = twin(self._model)
        lists: list[tuple[str, nn.ModuleList]] = [
            (path, each) for path, each in view.named_modules() if isinstance(each, nn.ModuleList)
        ]
        candidates = [(path, layers) for path, layers in lists if len(layers) == self.count]
        if not candidates:
            raise Refused(f"{self._name} has no list of {self.count} decoder layers, so that no layer can be left out")
        seen: dict[str, Form | None] = {}

        def watch(module: nn.Module, key: str) -> None:
            def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                hidden = args[0] if args else next(iter(kwargs.values()))
                narrow = isinstance(output, Tensor) and key.endswith(PAIR)  # as wide as the MLP on one side
                seen[key] = Form.of(output, output.shape if narrow else hidden.shape)

            module.register_forward_hook(see, with_kwargs=True)

        for path, layers in candidates:
            for index, layer in enumerate(layers):
                watch(layer, f"{path}.{index}")
                for name in _parts_of(layer):
                    watch(getattr(layer, name), f"{path}.{index}.{name}")
        with torch.no_grad():
            selftest.own_logits(view, self._ids)
        for path, layers in candidates:  # the layers of a vision tower are not called for tokens
            if all(f"{path}.{index}" in seen for index in range(self.count)):
                self._note(path, layers, seen)
                return path
        raise Refused(f"{self._name} does not call its decoder layers itself, so that no layer can be left out")

    def _note(self, path: str, layers: nn.ModuleList, seen: dict[str, Form | None]) -> None:
        """Keeps the forms of all layers and their parts."""
        for index, layer in enumerate(layers):
            if not (_first_of(layer, ATTENTION) and _mlp_of(layer)):
                children = ", ".join(name for name, _ in layer.named_children())
                raise Refused(
                    f"layer {index} of {self._name}, a {type(layer).__name__} of {children}, does not consist of "
                    "attention and MLP modules of known names, so that neither can be left out"
                )
            for name in ("", *(f".{part}" for part in _parts_of(layer))):
                form = seen.get(f"{path}.{index}{name}")
                if form is None:
                    raise Refused(
                        f"{name[1:] or 'the whole'} of layer {index} of {self._name} returns no hidden states in the "
                        "shape of its input, so that it cannot be left out"
                    )
                self._forms[f"{index}{name}"] = form

    def _test(self) -> None:
        """With all parts left out, layers with their norms and no layers at all must give the same logits."""
        everything = Skip.layers(range(self.count))
        try:
            with torch.no_grad():
                kept, passed = (selftest.own_logits(self._cut(everything, whole), self._ids) for whole in (False, True))
        except Exception as error:
            raise Refused(f"{self._name} does not run without its layers: {type(error).__name__}: {error}") from error
        if not torch.equal(kept, passed):
            raise Refused(
                f"a layer of {self._name} does more than add attention and MLP to its input, so that neither can be "
                "left out"
            )


def sub_layers(target: TransformersTarget) -> SubLayers:
    """The sub-layers of a target's model.

    Raises:
        Refused: it has none that may be left out, or it cannot verify drafts.
    """
    if CHAIN not in target.info.capabilities:
        raise Refused(f"{target.info.name} decodes token by token, so that it cannot draft for itself")
    if target.info.replays:
        raise Refused(
            f"the recurrent layers of {target.info.name} cannot be left out; draft with another model, or with "
            "draft='self:int8'"
        )
    return SubLayers(target.model, target.info.name, target.ordinary_ids())


def without(target: TransformersTarget, skip: Skip) -> TransformersTarget:
    """The target with sub-layers left out: its weights, a KV cache of its own. Draft & Verify, 2309.08168.

    It is tested as every target is, against its own plain forward.

    Raises:
        Refused: its layers cannot be left out; the message says why.
        BadParameter: a layer that it does not have.
    """
    return as_view(target, sub_layers(target).without(skip), f"without {skip or 'nothing'}")


def as_view(target: TransformersTarget, model: Any, what: str) -> TransformersTarget:
    """A target from a changed copy of another target's model; its forwards take another time."""
    view = TransformersTarget(
        model, name=f"{target.info.name} {what}", eager_choice=target.eager_choice, hidden_states=False
    )
    view.info = replace(view.info, fingerprint=f"{target.info.fingerprint} {what}")
    return view


def _first_of(layer: nn.Module, names: Iterable[str]) -> str:
    """The first of these that the layer has as a child; "" if none."""
    children = dict(layer.named_children())
    return next((name for name in names if name in children), "")


def _mlp_of(layer: nn.Module) -> tuple[str, ...]:
    children = dict(layer.named_children())
    name = _first_of(layer, MLP)
    return (name,) if name else PAIR if set(PAIR) <= set(children) else ()


def _parts_of(layer: nn.Module) -> Iterator[str]:
    if name := _first_of(layer, ATTENTION):
        yield name
    yield from _mlp_of(layer)
