"""Grammars compiled for one vocabulary, and their state along a sequence, by llguidance's matchers.

A state has one matcher, which goes back to the common prefix and forward again when it is asked for another prefix:
going back and reading a token takes about half a microsecond, and a copy of the matcher would forget what it has
computed. Nothing depends on the order of the questions.

Versions 1.5.1 to 1.9.1 of llguidance, at least, need a precaution. A matcher keeps the last mask under the number of
rows of its parse and the state of its lexer, and gives it again where both are the same. After it went back and read
another text, rows of the same number are different ones, and the mask is wrong. See `State._refresh`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import BadParameter, first_line, needing
from leapahead.core.forks import Mutex
from leapahead.core.grammar import BoolArray
from leapahead.core.text import Tokenizer
from leapahead.grammar.definition import WHITESPACE, Grammar
from leapahead.grammar.vocabulary import vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FEW = 24  # tokens that are looked at faster one by one than in a mask
KEPT = 64  # compiled grammars that an LLM keeps
MOST_MASKS = 256  # of one state
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Units of llguidance: about 50,000 of the first take a millisecond, 14,000 of the second, 20,000 of the third.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # of 1 to 2 kB
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the latest. Thread-safe: one that takes long delays no other.

    Args:
        tokenizer: of the model; None is refused by `compile`.
        vocab_size: length of a row of logits.
        eos_token_ids: the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = Mutex()

    @property
    def vocabulary(self) -> LLTokenizer:
        """The tokens, read when they are first needed."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary(self._tokenizer, self._vocab_size, self._eos)
        return self._vocabulary

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar for this vocabulary.

        Raises:
            BadParameter: it is no grammar, cannot be compiled within the limits, or no text has this form.
            Refused: the tokenizer cannot serve, see `vocabulary`.
            LeapaheadError: llguidance is not installed.
        """
        if not isinstance(grammar, Grammar):
            raise BadParameter(f"grammar={grammar!r} is not possible: it must be a leapahead.Grammar, or None")
        with self._lock:
            found, tokens = self._compiled.get(grammar), self.vocabulary
        found = found or Compiled(grammar, tokens, self._eos)
        with self._lock:
            found = self._compiled.setdefault(grammar, found)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return found


class Compiled:
    """See `leapahead.core.grammar.CompiledGrammar`.

    Args:
        grammar: to be compiled.
        tokens: of the vocabulary.
        eos_token_ids: the tokens that end a text.

    Raises:
        BadParameter: it cannot be compiled within the limits, or no text has this form.
    """

    def __init__(self, grammar: Grammar, tokens: LLTokenizer, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.grammar, self.tokens, self.eos = grammar, tokens, frozenset(eos_token_ids)
        limits: dict[str, Any] = LIMITS
        try:
            self._matcher = LLMatcher(tokens, _converted(grammar), log_level=0, limits=LLParserLimits(**limits))
        except ValueError as error:
            raise _refusal(grammar, str(error)) from None
        if self._matcher.is_error():
            raise _refusal(grammar, self._matcher.get_error())
        state = self.follow([], tokens.vocab_size)
        allowed = state.mask(0, [])
        if state.problem:
            raise BadParameter(f"the {grammar.kind} {grammar.definition[:60]!r} matches no text ({state.problem})")
        if not allowed.any() or set(np.flatnonzero(allowed).tolist()) <= self.eos:
            what = "the empty text only" if allowed.any() else "no text"
            raise BadParameter(f"the {grammar.kind} {grammar.definition[:60]!r} matches {what}; correct it")

    def follow(self, tokens: list[int], vocab_size: int) -> State:
        """See `CompiledGrammar`."""
        return State(self, tokens, vocab_size)

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of a text."""
        return self._matcher.deep_copy()


def validate(grammar: Grammar) -> None:
    """Refuses a grammar that cannot be compiled for any vocabulary.

    Raises:
        BadParameter: it cannot.
        LeapaheadError: llguidance is not installed.
    """
    with needing("constrained decoding", "grammar", "llguidance"):
        from llguidance import LLMatcher
    try:
        error = LLMatcher.validate_grammar(_converted(grammar), None)
    except ValueError as raised:
        raise _refusal(grammar, str(raised)) from None
    if error:
        raise _refusal(grammar, error)


def _refusal(grammar: Grammar, error: str) -> BadParameter:
    return BadParameter(f"the {grammar.kind} cannot be compiled: {_sentence(error)}")


def _converted(grammar: Grammar) -> str:
    """The grammar as llguidance takes it.

    Raises:
        ValueError: it is no JSON schema, or GBNF that cannot be converted.
    """
    with needing("constrained decoding", "grammar", "llguidance"):
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import gbnf_to_lark
    if grammar.kind == "JSON schema":
        options: Any = {"whitespace_flexible": False} if grammar.compact else {"whitespace_pattern": WHITESPACE}
        return LLMatcher.grammar_from_json_schema(grammar.definition, overrides=options)
    if grammar.kind == "regular expression":
        return LLMatcher.grammar_from_regex(grammar.definition)
    if not GBNF_RULE.search(grammar.definition):
        return LLMatcher.grammar_from_lark(grammar.definition)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.definition))
    except Exception as error:  # the converter's own, which is an Exception and nothing else
        raise ValueError(f"it looks like GBNF, and {first_line(error)}") from None


def _sentence(error: str) -> str:
    """The message of llguidance in one line, without the lines that point at a place of the definition."""
    first, *others = error.strip().splitlines() or [""]
    reasons = [line.strip().removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first.strip(), *reasons])[:300]


class State:
    """See `leapahead.core.grammar.GrammarState`.

    Args:
        compiled: the grammar.
        tokens: committed tokens, live.
        vocab_size: length of a mask.
    """

    def __init__(self, compiled: Compiled, tokens: list[int], vocab_size: int) -> None:
        self.problem = ""
        self._compiled, self._committed, self._vocab_size = compiled, tokens, vocab_size
        self._start = len(tokens)  # of the output
        self._matcher = compiled.matcher()
        self._read: list[int] = []  # the tokens that the matcher has read
        self._same = 0  # how many of them, from the first on, are known to be committed
        self._base: LLMatcher | None = None  # what a new matcher is copied from; made when one is needed
        self._based = 0  # how many of the committed tokens it has read
        self._masked = -1  # how many of them there were when the last mask was computed; -1 if the matcher keeps none
        self._intact = 0  # how many of those the matcher has not gone back behind since then
        self._length = -1  # of the committed tokens to which the masks belong
        self._masks: dict[tuple[int, ...], npt.NDArray[np.uint32]] = {}  # after the paths that were asked about

    def mask(self, length: int, path: Sequence[int]) -> BoolArray:
        bits = self._allowed(length, path)
        if bits is not None:
            found = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
            found[self._compiled.tokens.vocab_size :] = False
            return found
        # Only a draft may leave the grammar. Elsewhere no token can be chosen, which ends the request.
        in_draft = len(self._read) >= length - self._start and not self.problem
        return np.full(self._vocab_size, in_draft, dtype=np.bool_)

    def allows(self, length: int, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        if len(tokens) > FEW and max(tokens) < self._compiled.tokens.vocab_size:
            asked = np.asarray(tokens)
            if (bits := self._allowed(length, path)) is not None:
                return [bool(bit) for bit in (bits[asked >> 5] >> (asked & 31).astype(np.uint32)) & 1]
        return [self._allows(length, path, token) for token in tokens]

    def _allows(self, length: int, path: Sequence[int], token: int) -> bool:
        if not self._move(length, path):
            return False
        if self._matcher.is_stopped():
            return token in self._compiled.eos
        is_allowed = token < self._compiled.tokens.vocab_size and self._matcher.validate_tokens([token]) == 1
        return is_allowed and not self._failed()

    def _allowed(self, length: int, path: Sequence[int]) -> npt.NDArray[np.uint32] | None:
        """The allowed tokens, a bit for each; None where the prefix is outside the grammar."""
        if length != self._length or len(self._masks) == MOST_MASKS:  # other hosts may always give a length of 0
            self._length, self._masks = length, {}
        key = tuple(path)
        if key not in self._masks:
            if not self._move(length, path, for_mask=True):
                return None
            bits = self._mask()
            if self._failed():
                return None
            self._masks[key] = bits
        return self._masks[key]

    def _mask(self) -> npt.NDArray[np.uint32]:
        """The mask where the matcher is, a bit for each token."""
        bits = np.zeros((self._compiled.tokens.vocab_size + 31) // 32, dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._masked = self._intact = len(self._read)
        return bits

    def _refresh(self) -> None:
        """Makes the matcher forget a mask of a text that it went back behind: by one of the text that it still has.

        A mask is not kept where the grammar forces what comes next. So it is that of the last place where there is a
        choice, and the few tokens behind it are read again: a new matcher would read the whole text, which may be long.
        """
        matcher, behind = self._matcher, list[int]()
        while is_forced := matcher.is_stopped() or bool(matcher.compute_ff_bytes()):
            if not self._read:
                break
            behind.append(self._read.pop())
            matcher.rollback(1)
            if matcher.is_error():  # it does not go back in lexemes with max_tokens or stop
                break
        if not is_forced:
            self._mask()
            matcher.try_consume_tokens(behind[::-1])
        self._read += behind[::-1]
        if is_forced:
            self._renew()

    def _renew(self) -> None:
        """Begins again with a new matcher: a copy of one that has read the committed tokens, and keeps no mask."""
        same = min(self._same, len(self._read))
        if self._base is None or self._based > same:
            self._base, self._based = self._compiled.matcher(), 0
        self._base.try_consume_tokens(self._read[self._based : same])
        self._based = same
        self._matcher, self._masked = self._base.deep_copy(), -1
        self._matcher.try_consume_tokens(self._read[self._based :])

    def admitted(self, length: int, path: Sequence[int]) -> int:
        self._move(length, path)
        return max(0, len(self._read) - (length - self._start))

    def forced(self, length: int, path: Sequence[int]) -> list[int]:
        if not self._move(length, path) or self._matcher.is_stopped():
            return []
        found = self._matcher.compute_ff_tokens()
        return [] if self._failed() else [token for token in found if token < self._vocab_size]

    def ended(self, length: int, path: Sequence[int]) -> bool:
        return self._move(length, path) and self._matcher.is_stopped() and self._matcher.is_accepting()

    def _move(self, length: int, path: Sequence[int], for_mask: bool = False) -> bool:
        """Moves the matcher behind a prefix, as far as the grammar allows it; whether it is there.

        Args:
            for_mask: whether a mask is to be computed there.
        """
        committed, read, goal = self._committed, self._read, length - self._start
        same = min(self._same, goal, len(read))
        while same < min(goal, len(read)) and read[same] == committed[self._start + same]:
            same += 1
        self._same = at = same
        while same == goal and at < len(read) and at - goal < len(path) and read[at] == path[at - goal]:
            at += 1
        if for_mask and self._masked > self._intact:
            at = min(at, self._intact)
        rest = list(path[at - goal :]) if at >= goal else [*committed[self._start + at : length], *path]
        if at < len(read):
            self._matcher.rollback(len(read) - at)
            del read[at:]
            self._intact = min(self._intact, at)
            if self._matcher.is_error():  # it does not go back in lexemes with max_tokens or stop
                self._renew()
        if for_mask and self._masked > self._intact:
            self._refresh()
        known, eos = self._compiled.tokens.vocab_size, self._compiled.eos
        end = next((index for index, token in enumerate(rest) if token in eos or token >= known), len(rest))
        done = self._matcher.try_consume_tokens(rest[:end]) if end else 0
        read += rest[:done]
        if len(read) < goal and not self._failed():
            self.problem = f"the {self._compiled.grammar.kind} does not allow the text that was written under it"
        return done == len(rest) and not self._failed()

    def _failed(self) -> bool:
        """Whether a limit was reached. The matcher would be of no more use, so that it begins anew."""
        if not self._matcher.is_error():
            return False
        kind, error = self._compiled.grammar.kind, _sentence(self._matcher.get_error())
        self.problem = f"the {kind} became too complex to follow ({error}); simplify it"
        self._matcher, self._read, self._same, self._base = self._compiled.matcher(), [], 0, None
        self._masked, self._intact = -1, 0
        return True
