"""The form of a text: JSON of a schema, a regular expression, a context-free grammar, a choice; compiled by llguidance.

    Grammar  ── Grammars.compile ──>  Compiled  ── follow ──>  State
    what the user gives               for one vocabulary       of one sequence

Knows tokenizers and no model.
"""

from leapahead.grammar.compiled import Grammars, validate
from leapahead.grammar.definition import Grammar
from leapahead.grammar.processor import GrammarProcessor

__all__ = ["Grammar", "GrammarProcessor", "Grammars", "validate"]
