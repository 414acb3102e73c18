"""Generated pages about the code: the command line, the server's parameters, the drafters, and the list of files."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from leapahead import drafters
from leapahead.cli import main as program
from leapahead.cli.command import EXIT_CODES, Command, Option
from leapahead.cli.drafters import describe
from leapahead.serve.anthropic_schema import MessagesRequest
from leapahead.serve.responses_schema import ResponsesRequest
from leapahead.serve.schema import ChatRequest, CompletionRequest, Decoding, Extension, Generation

Table = Callable[[str, list[list[str]]], str]
Records = dict[str, list[tuple[str, str]]]  # group -> (option, help)
GENERAL = "Options"
SHARED = "Options of several drafters"
BOUNDLESS = 2**31 - 1  # limits from here on say only which numbers are representable
PACKAGES = (
    *(
        "core",
        "grammar",
        "chat",
        "models",
        "planner",
        "drafters",
        "engine",
        "integrations",
        "bench",
        "training",
        "serve",
    ),
    "cli",
)


def command_line(table: Table) -> str:
    """Usage, options and examples of every command. Options that several commands share are listed once."""
    commands = list(_commands(program, "leapahead"))
    records = {name: _records(command) for name, command in commands}
    shared = {
        group: rows
        for group, rows in records["leapahead generate"].items()
        if sum(rows == each.get(group) for each in records.values()) > 1
    }
    parts = [
        "## Exit codes",
        table("code | meaning", [list(each) for each in EXIT_CODES]),
        "## Shared options",
        "Commands that take all options of a group, or some of them, name them below.",
    ]
    for group, rows in shared.items():
        parts += [f"### {group}", _options(rows, table)]
    for name, command in commands:
        parts += [f"## {name}", *_command(name, command, records[name], shared, table)]
    return "\n\n".join(parts)


def _commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {command.name}")
        else:
            yield f"{name} {command.name}", command


def _records(command: click.Command) -> Records:
    context = click.Context(command, info_name=command.name)
    found: Records = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in parameter.opts:
            group = parameter.group if isinstance(parameter, Option) else GENERAL
            found.setdefault(group, []).append(record)
    return found


def _command(name: str, command: click.Command, records: Records, shared: Records, table: Table) -> list[str]:
    context = click.Context(command, info_name=name)
    parts = [f"```\n{command.get_usage(context).removeprefix('Usage: ')}\n```", _prose(command.help or "")]
    own, taken = [], []
    for group, rows in records.items():
        known = [row for row in rows if row in shared.get(group, [])]
        if known == shared.get(group):
            taken.append(f"[{group}](#{_anchor(group)})")
        elif known:
            names = ", ".join(f"`{_long(row[0])}`" for row in known)
            taken.append(f"{names} of [{group}](#{_anchor(group)})")
        own += [row for row in rows if row not in known]
    if own:
        parts.append(_options(own, table))
    if taken:
        parts.append(f"Also: {'; '.join(taken)}.")
    if isinstance(command, Command) and command.examples:
        parts.append("```\n" + "\n".join(command.examples) + "\n```")
    return parts


def _long(record: str) -> str:
    """The long name in `-m, --model MODEL`."""
    return next(word.rstrip(",") for word in record.split() if word.startswith("--"))


def _options(rows: list[tuple[str, str]], table: Table) -> str:
    return table("option | meaning", [[f"`{_cell(name)}`", _cell(text)] for name, text in rows])


def _cell(text: str) -> str:
    """Text for a cell of a table, without the bars that would end it and without HTML."""
    return " ".join(text.split()).replace("|", " or ").replace("<", "&lt;")


def _anchor(heading: str) -> str:
    return "-".join("".join(c for c in heading.lower() if c.isalnum() or c in " -").split())


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.replace("\b", "").split("\n\n"))


def drafter_list(table: Table) -> str:
    """Every built-in drafter with its options, from the docstrings. Options of several drafters are explained once."""
    described = [describe(drafters.load(name)) for name in drafters.BUILT_IN]
    known = Counter((row["name"], row["meaning"]) for drafter in described for row in drafter["options"])
    shared = [each for each, count in known.items() if count > 1]
    parts = [
        f"## {SHARED}",
        "Every drafter below names those that it has, with their defaults.",
        table("option | meaning", [[f"`{name}`", meaning] for name, meaning in shared]),
    ]
    for drafter in described:
        own = [row for row in drafter["options"] if (row["name"], row["meaning"]) not in shared]
        others = ", ".join(f"`{row['name']}={row['default']}`" for row in drafter["options"] if row not in own)
        needs = ", ".join(f"`{each}`" for each in drafter["needs"]) or "nothing"
        parts += [f"## {drafter['name']}", f"{drafter['summary']}\n\nNeeds from the target: {needs}."]
        rows = [[f"`{row['name']}`", _default(row), row["meaning"]] for row in own]
        parts += [table("option | default | meaning", rows)] if rows else []
        parts += [f"Of the [{SHARED.lower()}](#{_anchor(SHARED)}): {others}."] if others else []
    return "\n\n".join(parts)


def _default(row: dict[str, Any]) -> str:
    return f"`{row['default']}`" if row["default"] not in ("", None) else ""


def file_list(root: Path, table: Table) -> str:
    """Every module with the first sentence of its docstring, package by package."""
    source = root / "src/leapahead"
    parts = []
    for package in ("", *PACKAGES):
        folder = source / package
        files = sorted(folder.rglob("*.py") if package else folder.glob("*.py"))
        rows = []
        for file in files:
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            if docstring and (package == "" or file.name != "__init__.py"):
                rows.append([f"`{file.relative_to(source)}`", " ".join(docstring.split("\n\n")[0].split())])
        parts += [f"### {package or 'The package itself'}", table("file | content", rows)]
    return "\n\n".join(parts)


def request_parameters(table: Table) -> str:
    """The parameters of the server's requests, from the models by which they are validated."""
    common, decoding = set(Generation.model_fields), set(Decoding.model_fields)
    kinds: list[tuple[str, type[BaseModel], set[str]]] = [
        ("### Completions, chats, responses and messages", Decoding, set()),
        ("### Completions and chats", Generation, decoding),
        ("### Completions only", CompletionRequest, common),
        ("### Chats only", ChatRequest, common),
        ("### Responses only", ResponsesRequest, decoding),
        ("### Messages only", MessagesRequest, decoding - MessagesRequest.__annotations__.keys()),
        ("### `leapahead`", Extension, set()),
    ]
    parts = []
    for heading, model, known in kinds:
        meanings = {
            name: what
            for each in reversed(model.__mro__)
            for name, what in _attributes(inspect.getdoc(each) or "").items()
        }
        schema = model.model_json_schema()
        required = schema.get("required", [])
        rows = []
        for name in (name for name in model.model_fields if name not in known):
            given = schema["properties"][name]
            default = "required" if name in required else json.dumps(given.get("default"))
            rows.append([f"`{name}`", _bounds(given), f"`{default}`", _cell(meanings.get(name, ""))])
        parts += [heading, table("parameter | JSON | default | meaning", rows)]
    return "\n\n".join(parts)


def _attributes(doc: str) -> dict[str, str]:
    """The meanings in the section "Attributes" of a docstring; several names may share one."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in doc.partition("Attributes:\n")[2].splitlines():
        if head := re.match(r" {4}([\w, ]+): (.*)", line):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _bounds(given: dict[str, Any]) -> str:
    """The type of a value in JSON, with its limits."""
    if "$ref" in given:
        return "object"
    if "const" in given or "enum" in given:
        return " or ".join(f"`{json.dumps(each)}`" for each in given.get("enum", [given.get("const")]))
    choices = given.get("anyOf") or given.get("oneOf") or []
    if choices:
        return " or ".join(dict.fromkeys(_bounds(each) for each in choices if each.get("type") != "null")) or "`null`"
    least, most = given.get("minimum", given.get("exclusiveMinimum")), given.get("maximum")
    limits = [f"{'above' if 'exclusiveMinimum' in given else 'from'} {least:g}"] if least is not None else []
    limits += [f"to {most:g}"] if most is not None and most < BOUNDLESS else []
    return " ".join([given.get("type", "any"), *limits])


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of a block -> what writes it."""
    return {
        "command-line": lambda _: command_line(table),
        "drafters": lambda _: drafter_list(table),
        "request-parameters": lambda _: request_parameters(table),
        "file-tour": lambda root: file_list(root, table),
    }
