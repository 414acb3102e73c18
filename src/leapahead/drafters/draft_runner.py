"""A draft model that follows a text: its own session, its own cache, nothing computed twice.

    text            t0 t1 t2 t3 t4 t5 t6          committed by the target
    session         t0 t1 t2 t3                   what the draft's cache has, and its root t3
    tree            t3 ─ t4 ─ t5 ─ t6 ┬─ a ─ c    what it has missed, as a chain, then what it is asked about
                                      └─ b

Each look is one forward of the draft, over what is new in its tree (`Target.step` with `known`). When the text has
grown, the nodes along it are committed and the others forgotten. Knows no sampling and no planning.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from leapahead.core.errors import LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import Budget, TreeBuilder
from leapahead.core.verify import Verdict
from leapahead.drafters.base import Forward
from leapahead.models.base import Choices, Companion, Session, Target

Path = tuple[int, ...]  # drafted tokens from below the last committed one
LONGEST = 32  # tokens missed, beyond which it is opened again: what it has is reused, the rest a prompt


class Look(NamedTuple):
    """What a draft said in one forward.

    Attributes:
        paths: the places that it was asked about and now knows.
        nodes: the node of the draft's own tree for each of them.
        choices: of its forward; to be read before the draft's next one.
    """

    paths: list[Path]
    nodes: list[int]
    choices: Choices


class Following:
    """One text, as a draft model follows it.

    Args:
        target: the draft model.
        tokens: the text's committed tokens, live.
        params: of the sampling, for those who ask the draft for processed probabilities.

    Attributes:
        failed: why it cannot follow any more: its context is full, a token is none of its own, ...; "" while it can.
        forwards, seconds: of all its looks.
    """

    def __init__(self, target: Target, tokens: Sequence[int], params: SamplingParams | None = None) -> None:
        self.target, self.tokens, self.params = target, tokens, params or SamplingParams()
        self.failed = ""
        self.forwards, self.seconds = 0, 0.0
        self._session: Session | None = None
        self._tree: TreeBuilder | None = None
        self._paths: list[Path | None] = []  # of the tree's nodes; None of those that are committed
        self._at = 0  # the node of the text's last token
        self._computed = 0  # nodes that went through the draft
        self._length = 0  # of the text that the tree stands on
        self._beside = isinstance(target, Companion) and target.shares(tokens)
        if self._beside:
            self.open()  # it has read the prompt

    @property
    def opened(self) -> bool:
        """Whether the draft has read the prompt."""
        return self._session is not None

    @property
    def missed(self) -> int:
        """Committed tokens that a look must compute beside what it is asked about."""
        if self._session is None:
            return len(self.tokens) - 1
        if self._tree is not None and self._length == len(self.tokens):
            return max(0, self._at - self._computed)
        return len(self.tokens) - len(self._session.tokens)

    def open(self) -> None:
        """Reads the text so far, if it has not been; `failed` tells where that is not possible."""
        if self._session is None and not self.failed:
            try:
                self._session = self.target.open(self.tokens if self._beside else list(self.tokens), self.params)
            except LeapaheadError as error:
                self.fail(str(error))

    def fail(self, why: str) -> None:
        self.close()
        self.failed = why

    def close(self) -> None:
        """Gives the draft's cache back. Closing twice is harmless."""
        if self._session is not None:
            self._session.close()
        self._session = self._tree = None

    def settle(self) -> None:
        """Commits what was computed along the text, which may have grown, and forgets the rest."""
        tree, session = self._tree, self._session
        if tree is None or session is None or self._length == len(self.tokens):
            return
        begin, path = len(session.tokens), [0]
        while begin + len(path) < len(self.tokens):
            node = tree.child(path[-1], self.tokens[begin + len(path) - 1])
            if node is None or node >= self._computed:
                break
            path.append(node)
        if self._computed:
            said = tuple(self.tokens[begin : begin + len(path)])
            session.commit(Verdict(tuple(path), said, len(path) - 1))
        self._tree = None

    def add(self, paths: Sequence[Path]) -> None:
        """Puts places into the tree, as far as the draft's own limits let it."""
        self.settle()
        if self._session is not None and len(self.tokens) - len(self._session.tokens) > LONGEST:
            self.close()
        self.open()
        if self._session is None:
            return
        if self._tree is None:
            missing = self.tokens[len(self._session.tokens) :]
            room = self.target.context_length - len(self._session.tokens) - 1
            vocabulary = self.target.vocab_size
            if max(missing, default=0) >= vocabulary:
                return self.fail(f"the text has a token outside the vocabulary of {vocabulary} of {self.target.name}")
            if len(missing) >= min(room, self.target.max_nodes):
                return self.fail(f"the context of {self.target.context_length} tokens of {self.target.name} is full")
            budget = Budget(self.target.max_nodes - 1, room, self.target.max_leaves)
            self._tree = TreeBuilder(self._session.tokens[-1], budget)
            self._at = ([0, *self._tree.add_path(missing)])[-1]
            self._paths = [None] * self._at + [()]
            self._computed, self._length = 0, len(self.tokens)
        for path in paths:
            node, so_far = self._at, Path()
            for token in path:
                so_far = (*so_far, token)
                found = self._tree.add(node, token) if token < self.target.vocab_size else None
                if found is None:
                    break
                node = found
                if node == len(self._paths):
                    self._paths.append(so_far)
        return None

    @staticmethod
    def look(followings: Sequence[Following]) -> tuple[list[Look | None], Forward | None]:
        """ONE forward of the draft over what was added to all of these, which share it; None where nothing was."""
        able = [each for each in followings if each._tree is not None and len(each._tree) > each._computed]
        if not able:
            return [None] * len(followings), None
        target, began = able[0].target, perf_counter()
        builders = [each._tree for each in able if each._tree is not None]
        try:
            found = target.step(
                [each._session for each in able], [each.build() for each in builders], [each._computed for each in able]
            )
        except LeapaheadError as error:
            for each in able:
                each.fail(str(error))
            return [None] * len(followings), None
        sizes = [len(builder) - each._computed for builder, each in zip(builders, able, strict=True)]
        forward = Forward(perf_counter() - began, len(able), len(able) * max(sizes) if target.pads else sum(sizes))
        looks: dict[Following, Look] = {}
        for each, builder, choices in zip(able, builders, found, strict=True):
            new = [(path, node) for node, path in enumerate(each._paths) if node >= each._computed and path is not None]
            looks[each] = Look([path for path, _ in new], [node for _, node in new], choices)
            each._computed = len(builder)
            each.forwards += 1
            each.seconds += forward.seconds / len(able)
        return [looks.get(each) for each in followings], forward
