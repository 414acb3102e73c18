"""Online speculative decoding: a draft model learns from the target's distribution where its drafts were rejected.

    L = mean over rejected positions t of - sum over x of p(x | y_<t) log q(x | y_<t)      (2310.07177, section 4)

p is the target's distribution, renormalized over its `TOP_K` likeliest tokens, which a step has computed anyway, and q
the draft model's. Texts with their rejected positions are collected in a buffer of bounded size; after every so many
texts the draft model takes gradient steps on them, between two steps of the engine, and the buffer is emptied. Only the
draft model changes, and it only proposes: every text stays the target's.
"""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.drafters.draft_models import SELF, Draft, DraftModel
from leapahead.models.base import KeepsPrefixes, Target
from leapahead.planner.draft import SequenceView, Step

TOP_K = 32  # of the target's likeliest tokens at a rejected position
LONGEST = 1024  # last tokens of a text that are kept
CAPACITY = 32_768  # tokens of all texts in the buffer: with all positions rejected at most 13 MB
TOGETHER = 4096  # tokens of a forward of an update, filled up to one length
PASSES = 4  # over the buffer, in an update
RATE = 0.05  # the usual learning rate, divided by the hidden size
MOST_GRADIENT = 1.0


class Example(NamedTuple):
    """A text and the positions at which a draft was rejected.

    Attributes:
        tokens: int32 [tokens], the last ones of the text.
        places: int32 [positions], the index of the token after which the draft was rejected.
        following: int32 [positions, TOP_K], the target's likeliest tokens there.
        logits: float32 [positions, TOP_K], theirs.
    """

    tokens: npt.NDArray[np.int32]
    places: npt.NDArray[np.int32]
    following: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(each.nbytes for each in self)


class Rejections:
    """Where the drafts of one text were rejected; of more than `LONGEST` positions, the last ones."""

    def __init__(self) -> None:
        self._kept = deque[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]](maxlen=LONGEST)

    def observe(self, step: Step) -> None:
        """Keeps the target's distribution after the last accepted node, if something was drafted below it in vain."""
        tree, verdict = step.tree, step.verdict
        node = verdict.path[-1]
        if node not in tree.parent_list[1:] or tree.child(node, verdict.tokens[-1]) is not None:
            return
        tokens, logits = step.choices.top_k(TOP_K)
        row = node - step.choices.num_computed
        place = step.position + tree.depth_list[node]
        self._kept.append((place, tokens[row].astype(np.int32), logits[row].astype(np.float32)))

    def example(self, tokens: list[int]) -> Example | None:
        """The text so far with its rejected positions; None where there are none."""
        first = max(0, len(tokens) - LONGEST)
        kept = [each for each in self._kept if each[0] >= first]
        if not kept:
            return None
        places, following, logits = zip(*kept, strict=True)
        text = np.array(tokens[first:], dtype=np.int32)
        return Example(text, np.array(places, dtype=np.int32) - first, np.stack(following), np.stack(logits))


class Buffer:
    """Texts that were not learned from yet; where they have more than `CAPACITY` tokens, the oldest are dropped."""

    def __init__(self) -> None:
        self.examples = deque[Example]()
        self.tokens = 0

    def add(self, example: Example) -> None:
        """Adds a text."""
        self.examples.append(example)
        self.tokens += len(example.tokens)
        while self.tokens > CAPACITY:
            self.tokens -= len(self.examples.popleft().tokens)

    def take(self) -> list[Example]:
        """All texts; the buffer is empty then."""
        found, self.examples, self.tokens = list(self.examples), deque(), 0
        return found

    @property
    def nbytes(self) -> int:
        """The memory that the texts take."""
        return sum(example.nbytes for example in self.examples)


class Learner:
    """Trains the draft model of one drafter.

    Args:
        model: the draft model, whose weights are changed.
        every: texts after which there is an update.
        rate: the learning rate; 0 for the usual one.
        folder: the draft model is written there when the engine is closed; "" for nowhere.

    Attributes:
        updates, positions: their numbers so far.
        loss: of the last update; None before.
    """

    def __init__(self, model: DraftModel, every: int, rate: float = 0.0, folder: str = "") -> None:
        with needing("a draft model that learns", "transformers", "torch", "transformers"):
            import torch

        self.model, self.every, self.folder = model, every, folder
        self.buffer = Buffer()
        self.updates = self.positions = 0
        self.loss: float | None = None
        self._module: Any = model.target.model  # type: ignore[attr-defined]  # `learner` has checked it
        self._texts = 0
        self._running: dict[SequenceView, Rejections] = {}
        self._parameters = list(self._module.parameters())
        self._masters = [each.detach().float().clone() for each in self._parameters]  # small steps vanish in 16 bits
        width = self._module.get_input_embeddings().weight.shape[-1]
        self._optimizer = torch.optim.AdamW(self._masters, lr=rate or RATE / width, weight_decay=0.0)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """Reads a step of a text."""
        if sequence not in self._running:
            self._running[sequence] = Rejections()
        self._running[sequence].observe(step)

    def finish(self, sequence: SequenceView) -> None:
        """A text is complete; after every so many there is an update."""
        rejections = self._running.pop(sequence, None)
        example = rejections.example(sequence.tokens) if rejections is not None else None
        if example is not None and example.tokens.max() < self.model.target.info.vocab_size:
            self.buffer.add(example)
        self._texts += 1
        if self._texts % self.every == 0:
            self.update()

    def close(self, sequence: SequenceView) -> None:
        """A text is over, complete or not."""
        self._running.pop(sequence, None)

    def update(self) -> None:
        """Takes gradient steps on the texts of the buffer, and empties it."""
        import torch

        examples = self.buffer.take()
        if not examples:
            return
        target = self.model.target
        with target.lock, torch.enable_grad():
            for _ in range(PASSES):
                for group in _groups(examples):
                    loss = self._step(group)
            if isinstance(target, KeepsPrefixes):
                target.forget()  # cache entries of the weights before
        self.updates += 1
        self.positions += sum(len(example.places) for example in examples)
        self.loss = round(loss, 4)

    def _step(self, group: list[Example]) -> float:
        """One step of the optimizer; returns the loss before it. A loss that is no number changes nothing."""
        import torch

        loss = self._loss(group)
        value: float = loss.item()
        if not np.isfinite(value):
            warnings.warn(
                f"{self.model.title} is not trained further on {len(group)} texts, since its loss is not a finite "
                "number; give a lower learn_rate",
                UserWarning,
                stacklevel=2,
            )
            return value
        loss.backward()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, MOST_GRADIENT)
        self._optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
        return value

    def _loss(self, group: list[Example]) -> Any:
        """The mean over all rejected positions of some texts; a number with its gradient."""
        import torch

        from leapahead.models.transformers.forward import inputs

        tokens = np.zeros((len(group), max(len(example.tokens) for example in group)), dtype=np.int64)
        for row, example in enumerate(group):
            tokens[row, : len(example.tokens)] = example.tokens
        device = self._parameters[0].device
        output = self._module(**inputs(self._module, tokens, 0, device), use_cache=False)
        rows = np.concatenate([np.full(len(example.places), row) for row, example in enumerate(group)])
        places, following, logits = (
            torch.from_numpy(np.concatenate(each)).to(device)
            for each in zip(*((example.places, example.following, example.logits) for example in group), strict=True)
        )
        logq = output.logits[torch.from_numpy(rows).to(device), places.long()].float().log_softmax(-1)
        known = following < logq.shape[-1]  # the target's vocabulary may be the larger one
        p = logits.masked_fill(~known, -torch.inf).softmax(-1).nan_to_num()
        return -(p * logq.gather(1, following.long().where(known, 0))).sum(-1).mean()

    def save(self, folder: str | Path) -> None:
        """Writes the draft model as a folder of Transformers, with its tokenizer.

        Raises:
            BadParameter: the folder cannot be written.
        """
        from leapahead.models.transformers.pretrained import quiet

        try:
            with self.model.target.lock, quiet():
                self._module.save_pretrained(folder)
                if (write := getattr(self.model.tokenizer, "save_pretrained", None)) is not None:
                    write(folder)
        except OSError as error:
            raise BadParameter(f"{folder} cannot be written: {error.strerror or error}") from None

    def figures(self) -> dict[str, Any]:
        """What it has learned from, as plain types."""
        return {"updates": self.updates, "positions": self.positions, "loss": self.loss, "buffer": self.buffer.tokens}


def learner(draft: Draft, model: DraftModel, target: Target | None, every: int, rate: float, folder: str) -> Learner:
    """What trains a draft model while it drafts; arguments as of `Learner`.

    Args:
        draft: how the draft model was named.
        model: it.
        target: that it drafts for.

    Raises:
        Refused: its weights cannot be trained, or are the target's.
    """
    with needing("a draft model that learns", "transformers", "torch", "transformers"):
        from leapahead.models.transformers.model import TransformersTarget
    if isinstance(draft, str) and draft.startswith(SELF):
        raise Refused(f"draft={draft!r} cannot learn, since its weights are the target's; name another model")
    if not isinstance(model.target, TransformersTarget):
        raise Refused(f"{model.title} cannot learn, which needs a draft model of Transformers; give learn=0")
    parameters = list(model.target.model.parameters())
    if any(not each.is_floating_point() for each in parameters):
        raise Refused(f"{model.title} cannot learn, since its weights are quantised; give another one, or learn=0")
    own = {each.data_ptr() for each in parameters}
    if isinstance(target, TransformersTarget) and own & {each.data_ptr() for each in target.model.parameters()}:
        raise Refused(f"{model.title} cannot learn, since it shares weights with the target; load it by itself")
    return Learner(model, every, rate, folder)


def _groups(examples: list[Example]) -> list[list[Example]]:
    """The texts in groups that have at most `TOGETHER` tokens when filled up to one length; at least one each."""
    groups: list[list[Example]] = []
    for example in sorted(examples, key=lambda each: len(each.tokens)):
        if groups and len(example.tokens) * (len(groups[-1]) + 1) <= TOGETHER:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups
