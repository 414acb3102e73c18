"""Cache entries of earlier texts in the machine's memory, for prompts that begin with the same tokens.

Attention goes over all cells of the KV cache in use, so texts that no sequence needs now leave it. Copying a text's
entries out and back takes a small part of the time that reading it again would take: they are kept until newer texts
need the room, as by llama.cpp's own server (`--cache-ram`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leapahead.core.errors import LeapaheadError
from leapahead.models.captured import TopK
from leapahead.models.llama_cpp.context import USUAL_SEQUENCES, Context, State
from leapahead.models.prefix import common_prefix


@dataclass(frozen=True, eq=False)
class KeptText:
    """A text whose cache entries were copied out.

    Attributes:
        tokens: that the entries are of.
        owner: see `Target.open`.
        state: llama.cpp's copy of the sequence: keys and values, and the recurrent state if there is one.
        top_k: captured after the last rows of its prompt.
    """

    tokens: list[int]
    owner: str
    state: State
    top_k: TopK | None


class KeptTexts:
    """The texts that are kept, at most as many tokens and texts as the KV cache itself has room for.

    Args:
        context: whose sequences are copied.
        most_tokens: of all texts together; 0 keeps none.
    """

    def __init__(self, context: Context, most_tokens: int) -> None:
        self.context, self.most_tokens = context, most_tokens
        ids = context.n_seq_max
        self._most_texts = ids if context.unified else max(ids, USUAL_SEQUENCES)
        self._texts: list[KeptText] = []  # least recently used first

    @property
    def able(self) -> bool:
        """Whether anything is kept.

        llama.cpp leaves out of a copy what a sliding window has passed, without which the text cannot be cut. Of a
        recurrent state, a test must have found that its copy is right.
        """
        context = self.context
        return self.most_tokens > 0 and not context.windowed and (not context.model.stateful or context.saves_states)

    def save(self, sequence: int, tokens: list[int], owner: str, top_k: TopK | None) -> None:
        """Copies the entries of a sequence, which are those of `tokens`. Nothing is kept if memory is short."""
        if not self.able or not 0 < len(tokens) <= self.most_tokens:
            return
        stateful = self.context.model.stateful
        self._texts = [
            each
            for each in self._texts
            if each.owner != owner
            or (each.tokens != tokens if stateful else each.tokens != tokens[: len(each.tokens)])  # it serves as well
        ]
        room = self.most_tokens - len(tokens)
        while len(self._texts) >= self._most_texts or sum(len(each.tokens) for each in self._texts) > room:
            self._texts.pop(0)
        try:
            state = self.context.save_state(sequence, whole=True)
        except (LeapaheadError, MemoryError):
            return
        self._texts.append(KeptText(tokens, owner, state, top_k))

    def find(self, tokens: Sequence[int], owner: str, more_than: int) -> tuple[KeptText | None, int]:
        """The owner's text that has most in common with `tokens`, and how much: more than `more_than` tokens."""
        best, most, wanted = None, more_than, list(tokens)
        for each in self._texts:
            if each.owner != owner:
                continue
            common = common_prefix(each.tokens, wanted, len(wanted))
            if common > most and not (self.context.model.stateful and common < len(each.tokens)):  # it cannot be cut
                best, most = each, common
        if best is not None:
            self._texts.remove(best)
            self._texts.append(best)
        return best, most

    def load(self, text: KeptText, sequence: int) -> bool:
        """Copies the entries back to a sequence id that has none; false if llama.cpp finds no place for them."""
        try:
            self.context.load_state(sequence, text.state, whole=True)
        except LeapaheadError:
            self._texts.remove(text)
            return False
        return True

    def forget(self) -> None:
        """Drops all texts."""
        self._texts.clear()
