"""Jacobi trajectories of a target: the blocks of guesses that Jacobi decoding goes through on the way to its text.

    text            ... a b c d e f g h           the fixed point: what the target chooses, one token after another
    state           ... a b|x c y z               the guesses after b, wrong at x, y and z

They are recorded while the drafter `jacobi` decodes, so that a target is tuned on the states that this drafter will
ask it about (2403.00835, section 3.1, Jacobi trajectory collection). They are written to a file, one text a line:

    {"index": 0, "prompt": [5, 8], "answer": [9, 1, 7], "states": [[2, [4, 4]], [3, [1, 6]]]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from leapahead.api import LLM
from leapahead.core.errors import BadParameter
from leapahead.core.text import Tokenizer
from leapahead.core.tree import Budget
from leapahead.drafters.jacobi import Jacobi
from leapahead.models.base import Target
from leapahead.planner.draft import Proposal, SequenceView
from leapahead.training.texts import LEAST, Progress, Text, cut

GROUP = 4  # times as many texts as are decoded together are written at once


@dataclass(frozen=True)
class Trajectory:
    """A text and what Jacobi decoding guessed of it.

    Attributes:
        index: of the text.
        prompt, answer: token ids.
        states: for each step, how many tokens were committed, prompt included, and the guesses after them.
    """

    index: int
    prompt: list[int]
    answer: list[int]
    states: list[tuple[int, list[int]]]

    @property
    def text(self) -> Text:
        """The text alone, which is greedy."""
        return Text(self.index, self.prompt, self.answer)


class Recorder(Jacobi):
    """Jacobi decoding that reports its states; arguments as of `Jacobi`."""

    name: ClassVar[str] = "jacobi_recorder"

    def __init__(self, block: int = 8, seed: int = 0) -> None:
        super().__init__(block, seed)
        self._states: list[list[Any]] = []

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        found = super().propose(sequence, budget)
        self._states.append([len(sequence.tokens), found.tree.tokens[1:].tolist()])
        return found

    def figures(self) -> dict[str, Any]:
        return {"states": self._states}


def write(
    target: Target,
    tokenizer: Tokenizer | None,
    texts: Sequence[Text],
    block: int,
    together: int,
    path: Path,
    progress: Progress,
) -> list[Trajectory]:
    """The trajectories of greedy texts; those that the file does not hold yet are decoded and added to it.

    Args:
        target: wrote the texts. It must have no open sessions.
        tokenizer: of the target.
        texts: whose prompts are decoded again.
        block: guesses of a state.
        together: texts that are decoded together.
        path: the file.
        progress: is called after every few texts.

    Raises:
        BadParameter: the file cannot be read or written.
    """
    found = _read(path) if path.exists() and cut(path) else {}
    left = [text for text in texts if text.index not in found or found[text.index].prompt != text.prompt]
    with LLM(
        target, tokenizer=tokenizer, drafter=Recorder, block=block, max_batch=together, drafter_cache=False
    ) as llm:
        for start in range(0, len(left), GROUP * together):
            progress("Jacobi trajectories", len(texts) - len(left) + start, len(texts))
            some = left[start : start + GROUP * together]
            longest = max(len(text.answer) for text in some)
            results = llm.generate([text.prompt for text in some], max_new_tokens=longest, temperature=0.0)
            lines = []
            for text, result in zip(some, results, strict=True):
                states = [(int(length), guesses) for length, guesses in result.stats.drafter["states"]]
                found[text.index] = each = Trajectory(text.index, text.prompt, result.tokens, states)
                lines.append(json.dumps(asdict(each)) + "\n")
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
            except OSError as error:
                raise BadParameter(f"{path} cannot be written: {error.strerror}") from None
    return [found[text.index] for text in texts if len(found[text.index].answer) >= LEAST]


def _read(path: Path) -> dict[int, Trajectory]:
    """The trajectories of a file by the index of the text."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        found = [
            Trajectory(**{**record, "states": [(length, guesses) for length, guesses in record["states"]]})
            for record in records
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadParameter(f"{path} holds no trajectories of a training run: {error}; remove it") from None
    return {each.index: each for each in found}
