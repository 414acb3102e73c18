"""The options that give a text a form, and the grammar that they make."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from leapahead.cli.command import option
from leapahead.cli.options import EXISTING_FILE, Option
from leapahead.cli.text_input import prompt_text, utf8_only
from leapahead.core.errors import BadParameter
from leapahead.grammar import Grammar
from leapahead.inputs import Options

GROUP = "Form of the text (one of these)"
GRAMMAR: tuple[Option, ...] = (
    option(
        "--json-schema",
        callback=utf8_only,
        metavar="FILE|JSON",
        group=GROUP,
        help="JSON that this schema describes: a file, or the schema itself.",
    ),
    option("--json-object", is_flag=True, group=GROUP, help="A JSON object."),
    option(
        "--regex",
        callback=utf8_only,
        metavar="REGEX",
        group=GROUP,
        help="Text that a regular expression matches whole.",
    ),
    option(
        "--grammar",
        "grammar_file",
        type=EXISTING_FILE,
        metavar="FILE",
        group=GROUP,
        help="Text of a context-free grammar, in Lark's syntax or llama.cpp's GBNF.",
    ),
    option(
        "--choice",
        "choices",
        callback=utf8_only,
        multiple=True,
        metavar="TEXT",
        group=GROUP,
        help="One of the texts that are given with this option. May be repeated.",
    ),
)


def grammar_argument(values: dict[str, Any]) -> Options:
    """The argument `grammar` of `LLM.generate` if one was given; its options are removed from a command's values.

    Raises:
        BadParameter: several were given, or one is not possible.
    """
    names = {"json_schema": "--json-schema", "json_object": "--json-object", "regex": "--regex"}
    names |= {"grammar_file": "--grammar", "choices": "--choice"}
    given = {name: value for name in names if (value := values.pop(name)) not in (None, False, ())}
    if len(given) > 1:
        both = " and ".join(names[name] for name in given)
        raise BadParameter(f"{both} cannot be given together: a text has one form")
    if not given:
        return {}
    ((name, value),) = given.items()
    if name == "json_schema":
        return {"grammar": Grammar.json_schema(_schema(value))}
    if name == "json_object":
        return {"grammar": Grammar.json_object()}
    if name == "regex":
        return {"grammar": Grammar.regex(value)}
    if name == "grammar_file":
        return {"grammar": Grammar.lark(prompt_text(None, value))}
    return {"grammar": Grammar.choices(list(value))}


def _schema(given: str) -> str:
    """The text of a schema that is given as such, or as a file."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    file = os.path.expanduser(given)  # shells leave `~` as it is after `--json-schema=`
    if not os.path.exists(file) or os.path.isdir(file):  # it may be a pipe
        raise BadParameter(f"--json-schema={given!r} is not possible: there is no such file, and it is no JSON object")
    return prompt_text(None, Path(file))
