"""Whether a module that its user loaded has changed since the last text: weights, adapters, attention, training mode.

The user trains such a module, switches its adapters or copies weights into it between two texts, and nothing tells of
it. So the target looks at it before it opens a session. Entries that were made before a change serve no other sequence:
those of closed sessions are dropped, those of open ones, such as of a stream that nobody reads on, are not shared. A
look must cost little, also at thousands of tensors; these together show what changed:

    modules, parameters    which objects they are, by the dictionaries that hold them
    versions               counts of in-place changes, which torch keeps; not raised by writes to `tensor.data`, by
                           collectives and by fused optimizers
    steps of optimizers    of this model's parameters, counted by a hook of torch
    values                 some of some tensors, for what is written to `tensor.data`
    adapters               of PEFT, by its layers
    hooks                  of the forwards of modules, by the numbers that torch gives them

What is written to `tensor.data` of a few tensors only may go unseen, and what a hook reads does. `target.forget()` is
for that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from leapahead.core.errors import Refused
from leapahead.models.transformers import devices
from leapahead.models.transformers.decoder_view import DecoderView
from leapahead.models.transformers.exact import ExactExecutor
from leapahead.models.transformers.families import text_config
from leapahead.models.transformers.static.executor import StaticExecutor

SAMPLED, VALUES = 32, 4  # so many tensors of a model are read, so many values of each
DROPS = "the model is in training mode and its dropout makes every text different; call model.eval() first"
UNCACHED = "the model is in training mode and its gradient checkpointing leaves no KV cache; call model.eval() first"
AGAIN = "undo that, or make another LLM of the model as it is now"

_steps = Counter[int]()  # of optimizers, by the identity of the first parameter of each group


def _count(optimizer: Optimizer, *_: object) -> None:
    _steps.update(id(group["params"][0]) for group in optimizer.param_groups if group["params"])


register_optimizer_step_post_hook(_count)


class Changes:
    """What is known of a model, to be compared with what it is now.

    Args:
        model: of Transformers, or a view of it; its modules are referred to. None for one that is not to be looked at.
        executor: that runs it. Those of exact mode and those that record forwards run a copy with the same tensors.
    """

    def __init__(self, model: Any, executor: Any) -> None:
        self._model = model.model if isinstance(model, DecoderView) else model
        self._count = 0  # of changes
        self._is_copied = isinstance(executor, (ExactExecutor, StaticExecutor))
        if self._model is not None:
            self._form, self._parts = _form(self._model), Parts(self._model)
            self._objects, self._values = self._parts.state()

    def look(self, target: Any) -> None:
        """Lets no further session have cache entries that were made with other weights, adapters or hooks.

        Raises:
            Refused: the model cannot be decoded as it is now.
        """
        if self._model is None:
            return
        for name, now in _form(self._model).items():
            if now != (was := self._form[name]):
                raise Refused(f"the model's {name} was {was} when this LLM was made, and is {now} now; {AGAIN}")
        if not self._parts.are_all():
            self._parts = Parts(self._model)
        self._parts.refuse_training()
        objects, values = self._parts.state()
        if objects != self._objects and self._is_copied:
            raise Refused(
                "adapters, layers, hooks or parameters of the model were changed since this LLM was made, whose exact "
                f"or captured forwards run a copy of it; {AGAIN}"
            )
        if (objects, values) != (self._objects, self._values):
            target.forget()
            self._count += 1
            cache = getattr(target.executor, "cache", None)
            for row in () if cache is None else cache.rows:
                if row.busy:
                    row.owner = f"before change {self._count}"  # of which there is no further sequence
            self._parts = Parts(self._model)  # it may have other tensors now
            self._objects, self._values = self._parts.state()


class Parts:
    """The modules of a model, and what is read of them."""

    def __init__(self, model: Any) -> None:
        modules = list(model.modules())
        self._children = [(part._modules, dict(part._modules)) for part in modules]
        lasting = [part for part in modules if not offloads(part)]
        held: list[dict[str, Tensor | None]] = [part._parameters for part in lasting]
        # Other buffers are changed by forwards, as some rotary positions are.
        held += [part._buffers for part in lasting if not part._non_persistent_buffers_set]
        self._held = list(filter(None, held))
        self._adapters = adapter_layers(modules)
        self._attributes = list(map(vars, modules))
        names = "gradient_checkpointing", "attention_dropout"
        self._training = [
            part for part in modules if isinstance(part, torch.nn.Dropout) or any(hasattr(part, name) for name in names)
        ]
        tensors = self._tensors()
        self._identities = set(map(id, tensors))
        trained = [at for at, each in enumerate(tensors) if each.requires_grad] or list(range(len(tensors)))
        self._sampled = trained[:: -(-len(trained) // SAMPLED) or 1]

    def are_all(self) -> bool:
        """Whether the model has these modules and no others."""
        return all(now == known for now, known in self._children)

    def state(self) -> tuple[object, object]:
        """Which tensors, adapters and hooks there are, and what differs where the values of tensors do."""
        tensors = self._tensors()
        some = [tensors[at] for at in self._sampled if at < len(tensors)]
        try:
            versions = list(map(attrgetter("_version"), tensors))
        except RuntimeError:  # tensors of torch's inference mode have none
            versions = []
        steps = sum(count for key, count in _steps.items() if key in self._identities)
        places = [each.data_ptr() for each in some]
        return (self.objects(), places), (versions, steps, _values(some))

    def objects(self) -> tuple[list[int], list[tuple[object, ...]], list[int]]:
        """Which tensors, adapters and hooks there are. A tensor that was given up may hand its number to another."""
        return list(map(id, self._tensors())), adapters(self._adapters), hooks(self._attributes)

    def refuse_training(self) -> None:
        """Refuses a training mode in which forwards are random, or leave nothing in the cache.

        Raises:
            Refused: they are, or do.
        """
        for part in filter(attrgetter("training"), self._training):
            if drops(part):
                raise Refused(DROPS)
            if getattr(part, "gradient_checkpointing", False):  # in Transformers before 5.24
                raise Refused(UNCACHED)

    def _tensors(self) -> list[Tensor]:
        """Parameters, and the buffers that a checkpoint has."""
        return [each for held in self._held for each in held.values() if each is not None]


def offloads(part: torch.nn.Module) -> bool:
    """Whether Accelerate loads a part's weights for each forward, into new tensors, and drops them behind it."""
    return any(getattr(hook, "offload", False) for hook in devices.hooks(part))


def drops(part: torch.nn.Module) -> bool:
    """Whether a part of a model is in training mode and drops values at random."""
    rate = part.p if isinstance(part, torch.nn.Dropout) else getattr(part, "attention_dropout", 0.0)
    return part.training and isinstance(rate, float) and rate > 0


def adapter_layers(modules: Sequence[Any]) -> list[Any]:
    """The layers with PEFT adapters."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # there are such layers only where it has been imported
    return [] if tuners is None else [part for part in modules if isinstance(part, tuners.BaseTunerLayer)]


def adapters(layers: Sequence[Any]) -> list[tuple[object, ...]]:
    """The state of layers with PEFT adapters."""
    return [
        (
            tuple(layer.active_adapters),
            tuple(layer.merged_adapters),
            layer.disable_adapters,
            tuple(getattr(layer, "scaling", {}).items()),
        )
        for layer in layers
    ]


def hooks(attributes: Iterable[Mapping[str, Any]]) -> list[int]:
    """The numbers of the forward hooks of modules, which torch gives once each.

    Those are left out that Transformers installs for good where it has given hidden states, and those of a test of the
    model (`modes.precision`), perhaps in another thread: they only look.

    Args:
        attributes: of each module.
    """
    return [
        number
        for each in attributes
        for table in (each.get("_forward_pre_hooks"), each.get("_forward_hooks"))
        if table
        for number, hook in tuple(table.items())
        if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "leapahead."))
    ]


def _form(model: Any) -> dict[str, object]:
    """What the executor of a model was chosen by."""
    config = text_config(model)
    form = {"attention implementation": config._attn_implementation, "dtype": model.dtype, "device": model.device}
    return form | {"vocabulary": getattr(config, "vocab_size", None)}


@torch.no_grad()
def _values(tensors: Sequence[Tensor]) -> list[bytes]:
    """Some values of each, as far as they can be read."""
    groups: dict[object, list[Tensor]] = {}
    try:
        for each in tensors:
            if (count := min(VALUES, each.numel())) and not each.is_meta:
                groups.setdefault((each.device, each.dtype), []).append(
                    each.as_strided((count,), (each.numel() // count,))
                )
        return [torch.cat(some).view(torch.uint8).cpu().numpy().tobytes() for some in groups.values()]
    except (RuntimeError, NotImplementedError, TypeError):  # tensors of a kind that cannot be read piece by piece
        return []
