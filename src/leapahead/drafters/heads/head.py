"""A loaded head beside its target: texts that it follows, and draft forwards for several texts at once.

    text = head.open(tokens)          follows one text
    text.append(states)               the target's hidden states of the next positions, as they are captured
    head.forward([(text, paths)])     ONE forward: the logits after these paths of drafted tokens

What kinds of heads differ in is in `row_head` and `block_head`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from threading import RLock
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from leapahead.core.errors import BadParameter
from leapahead.core.tree import IntArray
from leapahead.drafters.heads.config import HeadConfig
from leapahead.models.base import TargetInfo
from leapahead.models.choices import Rows
from leapahead.models.transformers.linears import is_packed
from leapahead.planner.measurement import Round
from leapahead.planner.profile import LatencyProfiles

Path = tuple[int, ...]  # drafted tokens from below the last committed one
Key = Path | int  # of a list of candidates: the path before them, or its length where they depend on that alone
ROUNDS, SIZES, MEASURED_CONTEXT = 12, (1, 2, 4, 8, 16), 64
READ, READ_ROUNDS = 127, 3  # positions of a prompt whose reading is measured, in every third round


class Drafted(NamedTuple):
    """What one forward has computed for one text.

    Attributes:
        keys: of the candidate lists.
        rows: the logits after each of them, over the head's vocabulary.
    """

    keys: Sequence[Key]
    rows: Rows


class HeadText(ABC):
    """One text that a head follows.

    Args:
        tokens: the committed tokens, live.
        known: positions whose hidden states were given or are not needed, the first ones.
    """

    def __init__(self, tokens: Sequence[int], known: int = 0) -> None:
        self.tokens, self.known = tokens, known

    @abstractmethod
    def append(self, states: Tensor) -> None:
        """Takes the target's hidden states of the next positions, float [positions, layers * hidden_size]."""

    @property
    def missing(self) -> int:
        """Rows of committed tokens that the next forward must compute beside what it is asked for."""
        return 0

    @abstractmethod
    def discard(self) -> None:
        """Drops what was drafted, since tokens were committed."""

    @abstractmethod
    def key(self, path: Path) -> Key:
        """What the candidates after a path are kept under."""

    @abstractmethod
    def computable(self, path: Path) -> bool:
        """Whether the next forward could compute the candidates after a path."""

    def reach(self, path: Path) -> int:
        """The number of depths of which a forward from a path gives candidates."""
        return 1


class Head(ABC):
    """A loaded head.

    Args:
        config: what it is.
        module: its network, on the target's device.
        info: of the target.
        name: for reports.

    Attributes:
        layers: the target's hidden states that it reads, see `Capture.hidden`.
        latency: how long its forwards take.
        lock: held during a forward.
    """

    sizes: ClassVar[tuple[int, ...]] = SIZES  # paths, of which the time is measured

    def __init__(self, config: HeadConfig, module: Any, info: TargetInfo, name: str) -> None:
        self.config, self.module, self.name = config, module, name
        self.layers = config.layers_of(info.layers)
        self.lock = RLock()
        parameter = next(module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        mapping = getattr(module, "d2t", None)
        self._ids = None if mapping is None else _target_ids(mapping, config)
        described = f"{config.kind} {config.hidden_size} {config.draft_vocab_size} {config.depths} {self.dtype}"
        described += " packed" if is_packed(module) else ""
        own = TargetInfo(
            name=name,
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            precision=info.precision,
            capabilities=frozenset(),
            fingerprint=f"head {described} of {info.fingerprint}",
        )
        self.latency = LatencyProfiles(own)

    @property
    def vocab_size(self) -> int:
        """Tokens that it may propose are below it."""
        return self.config.vocab_size

    @abstractmethod
    def known(self, tokens: Sequence[int], owner: str) -> int:
        """How many tokens of a prompt, its first ones, there are whose hidden states it does not need."""

    @abstractmethod
    def open(self, tokens: Sequence[int], owner: str = "") -> HeadText:
        """Follows a text, of which the first `known` tokens' hidden states count as given."""

    def keep(self, text: Any, owner: str) -> None:  # noqa: B027
        """Keeps what was computed of a finished text, for prompts that begin like it."""

    def renew(self, text: Any, start: int, owner: str) -> None:  # noqa: B027
        """Forgets what was kept of texts that begin like a prompt, where the target has kept nothing of them.

        Its weights or adapters may have changed, for which it drops its cache.

        Args:
            text: of the prompt.
            start: the position from which the target computes its hidden states anew.
            owner: see `open`.
        """

    @abstractmethod
    def forward(self, wanted: Sequence[tuple[Any, Sequence[Path]]]) -> list[Drafted]:
        """ONE forward for several texts of this head, whose lock is held.

        Args:
            wanted: texts, and the paths after which candidates are wanted. What is missing of a text is computed first.
        """

    def read(self, text: Any, rows: int) -> None:  # noqa: B027
        """Computes so many missing rows of a text, and drafts nothing."""

    def target_ids(self, tokens: IntArray) -> IntArray:
        """The target's ids of tokens of the head's vocabulary."""
        return tokens if self._ids is None else self._ids[tokens]

    def as_states(self, states: Any) -> Tensor:
        """Captured hidden states as a tensor of the head's kind and on its device; its own, not borrowed."""
        found = torch.from_numpy(np.array(states)) if isinstance(states, np.ndarray) else states
        return found.to(self.device, self.dtype)

    # -------------------------------------------------------------------------------------------- its time

    def prepare(self) -> None:
        """Loads its latency profile or measures it. Does nothing from the second call on."""
        with self.lock:
            if not self.latency.load():
                self.measure()

    def measure(self) -> None:
        """Measures how long its forwards take, by their number of paths."""
        with self.lock:
            text = self._unread(MEASURED_CONTEXT)
            self.forward([(text, [()])])
            random, found = Random(0), list[Round]()
            for turn in range(ROUNDS):
                found.append({})
                for size in random.sample(self.sizes, len(self.sizes)):
                    found[-1][size] = self._timed(text, size)
                if turn % READ_ROUNDS == 1 and (rows := (unread := self._unread(READ)).missing + 1) > READ:
                    found[-1][rows] = self._seconds(unread, [()])
            self.latency.use(found)

    def _unread(self, positions: int) -> Any:
        """A text of which the hidden states of so many positions are given, and no row is computed."""
        width = len(self.layers) * self.config.target_hidden_size
        text = self.open([1] * (positions + 1))
        text.append(torch.zeros(positions - text.known, width, dtype=self.dtype, device=self.device))
        return text

    def _timed(self, text: Any, size: int) -> float:
        """Seconds of a forward over so many paths."""
        text.discard()
        if not text.computable((1,)):  # no path but the root's is ever computed
            return self._seconds(text, [()])
        return self._seconds(text, [(token % self.vocab_size,) for token in range(1, size + 1)])

    def _seconds(self, text: Any, paths: Sequence[Path]) -> float:
        clock = self.latency.clock
        began = clock()
        rows = self.forward([(text, paths)])[0].rows
        rows.top_k(min(4, rows.width))
        return max(clock() - began, 1e-9)


def _target_ids(offsets: Tensor, config: HeadConfig) -> IntArray:
    """The target's id of each token of the draft vocabulary.

    Raises:
        BadParameter: the mapping names tokens that the target does not have.
    """
    found = np.arange(len(offsets)) + offsets.cpu().numpy()
    if len(offsets) != config.draft_vocab_size or found.min() < 0 or found.max() >= config.vocab_size:
        raise BadParameter(
            f"the head maps its {len(offsets)} tokens to ids from {found.min()} to {found.max()}, and the target has "
            f"{config.vocab_size}; the file is broken"
        )
    return np.asarray(found, dtype=np.int64)
