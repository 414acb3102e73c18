"""Online speculative decoding: a draft model learns from the target's distribution where its drafts were rejected.

    L = mean over rejected positions t of - sum over x of p(x | y_<t) log q(x | y_<t)      (2310.07177, section 4)

p is the target's distribution, renormalized over its `TOP_K` likeliest tokens, which a step has computed anyway, and q
the draft model's. Texts with their rejected positions are collected in a buffer of bounded size; after every so many
texts the draft model takes gradient steps on them, between two steps of the engine, and the buffer is emptied. Only the
draft model changes, and it only proposes: every text stays the target's.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, Refused, counted, first_line, needing
from leapahead.core.parameters import file_path
from leapahead.drafters.draft_models import BUNDLED, SELF, Draft, DraftModel
from leapahead.models.base import Target
from leapahead.planner.draft import SequenceView, Step

if TYPE_CHECKING:
    from leapahead.models.transformers.online import OnlineTraining, Positions

TOP_K = 32  # of the target's likeliest tokens at a rejected position
LONGEST = 1024  # last tokens of a text that are kept
CAPACITY = 32_768  # tokens of all texts in the buffer: with all positions rejected at most 13 MB
TOGETHER = 4096  # tokens of a forward of an update, filled up to one length
PASSES = 4  # over the buffer, in an update
LEARNED = "learned.json"  # in a folder that was written here: what was learned, and the sign that it may be replaced


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

    def example(self, tokens: Sequence[int], source: Sequence[int] = (), longest: int = LONGEST) -> Positions | None:
        """The text up to its last rejected position, and the encoder's input, with such positions; None without one.

        Args:
            tokens: of the text so far.
            source: the encoder's input.
            longest: greatest number of tokens that are kept, the last ones.
        """
        if not self._kept:
            return None
        end = self._kept[-1][0] + 1  # the draft model may not have room for what follows
        first = max(0, end - longest)
        kept = [each for each in self._kept if each[0] >= first]
        from leapahead.models.transformers.online import Positions

        places, following, logits = zip(*kept, strict=True)
        text = np.array(tokens[first:end], dtype=np.int32)
        read = np.array(source, dtype=np.int32)
        return Positions(text, np.array(places, dtype=np.int32) - first, np.stack(following), np.stack(logits), read)


class Buffer:
    """Texts that were not learned from yet; where they have more than `CAPACITY` tokens, the oldest are dropped."""

    def __init__(self) -> None:
        self.examples: deque[Positions] = deque()
        self.tokens = 0

    def add(self, example: Positions) -> None:
        """Adds a text."""
        self.examples.append(example)
        self.tokens += len(example.tokens) + len(example.source)
        while self.tokens > CAPACITY:
            dropped = self.examples.popleft()
            self.tokens -= len(dropped.tokens) + len(dropped.source)

    def take(self) -> list[Positions]:
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
        training: of its weights.
        every: texts after which there is an update.
        learned: where the draft model is written to when the engine is closed; None for nowhere.

    Attributes:
        buffer: texts that were not learned from yet.
        updates, positions: their numbers so far.
        loss: of the last update; None before.
    """

    def __init__(self, model: DraftModel, training: OnlineTraining, every: int, learned: Learned | None = None) -> None:
        self.model, self.training, self.every, self.learned = model, training, every, learned
        self.buffer = Buffer()
        self.updates = self.positions = 0
        self.loss: float | None = None
        self._texts = 0
        self._running: dict[SequenceView, Rejections] = {}

    def observe(self, sequence: SequenceView, step: Step) -> None:
        """Reads a step of a text."""
        if sequence not in self._running:
            self._running[sequence] = Rejections()
        self._running[sequence].observe(step)

    def finish(self, sequence: SequenceView) -> None:
        """A text is complete; after every so many there is an update."""
        rejections = self._running.pop(sequence, None)
        info = self.model.target.info
        longest = min(LONGEST, info.context_length)
        example = None if rejections is None else rejections.example(sequence.tokens, sequence.source, longest)
        if example is not None:
            largest = max(example.tokens.max(), example.source.max(initial=0))
            is_read = info.decoder is None or len(example.source) <= info.decoder.longest_source
            if largest < info.vocab_size and is_read:
                self.buffer.add(example)
        self._texts += 1
        if self._texts % self.every == 0:
            self.update()

    def close(self, sequence: SequenceView) -> None:
        """A text is over, complete or not."""
        self._running.pop(sequence, None)

    def update(self) -> None:
        """Takes gradient steps on the texts of the buffer, and empties it. After one that fails there are no more."""
        examples = self.buffer.take()
        steps = sum(1 for _ in takewhile(self._step, _groups(examples) * PASSES))
        if steps:
            self.training.forget()
            self.updates += 1
            self.positions += sum(len(example.places) for example in examples)

    def _step(self, group: list[Positions]) -> bool:
        """One gradient step; false, with a warning, where it failed: no text is to be lost for it."""
        try:
            self.loss = self.training.step(group)
            reason = "" if math.isfinite(self.loss) else "its loss is not a finite number; give a lower learn_rate"
        except Exception as error:  # of any kind that PyTorch or the model's own code raises, such as a full memory
            reason = f"a step failed ({first_line(error)}); give learn=0"
        if reason:
            texts = counted(len(group), "text")
            warnings.warn(f"{self.model.title} was not trained on {texts}, since {reason}", UserWarning, stacklevel=2)
        return not reason

    def release(self) -> None:
        """The engine is closed: writes the draft model, if it has changed and a folder was given for it.

        Raises:
            BadParameter: the folder cannot be written, or holds something else by now.
        """
        if self.learned is not None and self.updates:
            self.learned.check()
            self.learned.mark(self.figures())
            self.training.save(self.learned.folder, self.model.tokenizer)

    def figures(self) -> dict[str, Any]:
        """What it has learned from, as plain types."""
        loss = None if self.loss is None else round(self.loss, 4)
        return {"updates": self.updates, "positions": self.positions, "loss": loss, "buffer": self.buffer.tokens}


class Learned:
    """The folder that a draft model is written to. Names are resolved at once: the working directory may change later.

    Args:
        folder: its path.
        draft: that model. Its own folder may be replaced, as may one that has been written here before.

    Attributes:
        folder: its absolute path.

    Raises:
        BadParameter: it is no path.
    """

    def __init__(self, folder: str | Path, draft: Draft) -> None:
        self.folder = file_path("learned", folder).absolute()
        name = draft if isinstance(draft, str) else draft.target.info.name
        self._own = None if name == BUNDLED else Path(os.path.expanduser(name)).resolve()

    def check(self) -> None:
        """Refuses a folder that cannot be written, or whose content would be lost.

        Raises:
            BadParameter: it is a file, cannot be written, or holds something else.
        """
        path = self.folder
        try:
            there = next(each for each in (path, *path.parents) if each.exists())
            with tempfile.TemporaryDirectory(dir=there):  # permissions do not tell: nobody writes to /proc
                pass
            is_free = not path.exists() or (path / LEARNED).is_file() or not any(path.iterdir())
        except OSError as error:
            raise BadParameter(
                f"learned={path} is not possible: it is no folder that can be written ({error.strerror}); give another"
            ) from None
        if not is_free and path.resolve() != self._own:
            raise BadParameter(
                f"learned={path} is not possible: the folder is not empty, and what it holds would be lost; give a new "
                "folder, or that of the draft model"
            )

    def mark(self, figures: dict[str, Any]) -> None:
        """Writes `LEARNED`. To be called before the model is written, which may fail when parts of it are there.

        Raises:
            BadParameter: it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LEARNED).write_text(json.dumps(figures) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadParameter(f"{self.folder} cannot be written: {error.strerror}") from None


def learner(
    draft: Draft, model: DraftModel, target: Target | None, every: int, rate: float, learned: Learned | None
) -> Learner:
    """What trains a draft model while it drafts.

    Args:
        draft: how the draft model was named.
        model: it.
        target: that it drafts for.
        every, learned: see `Learner`.
        rate: the learning rate; 0 for the usual one.

    Raises:
        Refused: its weights cannot be trained, or are the target's.
    """
    with needing("a draft model that learns", "transformers", "torch", "transformers"):
        from leapahead.models.transformers.linears import is_packed, unpack
        from leapahead.models.transformers.model import TransformersTarget
        from leapahead.models.transformers.modes import computing
        from leapahead.models.transformers.online import OnlineTraining
    if isinstance(draft, str) and draft.startswith(SELF):
        raise Refused(f"draft={draft!r} cannot learn, since its weights are the target's; name another model")
    if not isinstance(model.target, TransformersTarget):
        raise Refused(f"{model.title} cannot learn, which needs a draft model of Transformers; give learn=0")
    parameters = list(model.target.model.parameters())
    if any(not each.is_floating_point() for each in parameters):
        raise Refused(f"{model.title} cannot learn, since its weights are quantised; give another one, or learn=0")
    if isinstance(target, TransformersTarget) and _places(model.target.model) & _places(target.model):
        raise Refused(f"{model.title} cannot learn, since it shares weights with the target; load it by itself")
    if is_packed(model.target.model):  # there are no gradients of packed weights
        with model.target.lock, computing():
            unpack(model.target.model)
            model.target.model.requires_grad_()
    return Learner(model, OnlineTraining(model.target, rate), every, learned)


def _places(model: Any) -> set[int]:
    """Where the weights of a model lie in memory; packed ones are left out, since they do not tell."""
    return {each.data_ptr() for each in model.parameters() if not each.is_mkldnn}


def _groups(examples: list[Positions]) -> list[list[Positions]]:
    """The texts in groups that have at most `TOGETHER` tokens when filled up to one length; at least one each."""
    groups: list[list[Positions]] = []
    for example in sorted(examples, key=lambda each: each.longest):
        if groups and example.longest * (len(groups[-1]) + 1) <= TOGETHER:
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups
