"""What a user may ask of the form of a text. Nothing is compiled here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import flag, unicode_text

if TYPE_CHECKING:
    from typing import Self

LONGEST = 2_000_000  # characters of a definition
WHITESPACE = r" |\n[ \t]{0,20}"  # that may stand between the tokens of JSON
SHOWN = 60  # characters of one that a message quotes


@dataclass(frozen=True)
class Grammar:
    """The form that a text must have, for the option `grammar`. Made by its class methods.

    Attributes:
        kind: "JSON schema", "regular expression" or "grammar", as messages name it.
        definition: the text that defines it.
        compact: of a JSON schema, whether the text has no white space between its tokens.
    """

    kind: str
    definition: str
    compact: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "compact", flag("compact", self.compact))
        if len(self.definition) > LONGEST:
            raise BadParameter(
                f"the {self.kind} has {len(self.definition)} characters, and {LONGEST} are possible; make it shorter"
            )

    def __repr__(self) -> str:
        short = self.definition if len(self.definition) <= SHOWN else self.definition[:SHOWN] + "..."
        return f"Grammar({self.kind!r}, {short!r})"

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, compact: bool = False) -> Self:
        """JSON that a schema describes.

        Args:
            schema: JSON Schema (draft 2020-12), as a dictionary or as JSON text. Keywords that llguidance does not
                implement are refused when it is compiled.
            compact: no spaces and no line breaks between the tokens of the JSON. Without, a single space, or a line
                break with at most 20 characters of indentation, may stand wherever JSON allows white space.

        Raises:
            BadParameter: it is no JSON, or no object and no boolean.
        """
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            found = {} if found is True else found
            text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadParameter(f"the JSON schema is not JSON: {error}") from None
        if found is False:
            raise BadParameter("the JSON schema false matches no text; correct it")
        if not isinstance(found, Mapping):
            raise BadParameter(f"a JSON schema must be an object or a boolean, got {type(found).__name__}")
        return cls("JSON schema", text, compact)

    @classmethod
    def json_object(cls, compact: bool = False) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, compact)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that a regular expression matches as a whole.

        Args:
            pattern: in the syntax of Rust's regex crate, which has no look-around and no back-references.
        """
        return cls("regular expression", _text("the regular expression", pattern))

    @classmethod
    def lark(cls, text: str) -> Self:
        """Text of a context-free grammar.

        Args:
            text: in Lark's syntax with a rule `start`, with llguidance's extensions; or in GBNF, the syntax of
                llama.cpp, with a rule `root`.
        """
        return cls("grammar", _text("the grammar", text))

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Self:
        """One of several texts."""
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
            raise BadParameter(f"choices={texts!r} is not possible: it must be a list of texts, at least one")
        choices = " | ".join(literal(_text("a choice", text)) for text in texts)
        return cls.lark(f"start: CHOICE\nCHOICE: {choices}")  # llguidance takes at most 2,000 in a rule


def literal(text: str) -> str:
    """A text as a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which llguidance does not read as it is


def _text(what: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise BadParameter(f"{what} must be a text that is not empty, got {text!r}")
    return unicode_text(what, text)
